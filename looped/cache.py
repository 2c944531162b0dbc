"""
Keys and values of past tokens, so that a text can be read piece by piece.

    cache = KVCache(model, room=T_max, loops=depth)
    cache.begin_piece(T)                              # before each piece of T tokens, ids (B, T)
    h, inputs = model.enter_loop(ids, keys, cache)
    for state in model.unroll(h, inputs, plan, cache):
        h = state.h
    x = model.coda(h, ids, cache)                     # as for the whole text at one depth, but for rounding

A layer outside the loop has one slot; a core layer has one for each loop, since its keys and values
differ from loop to loop. Where tokens may leave early, a loop also writes to the deeper slots: later
tokens that loop on find a token's last keys and values there (Geiping et al. 2025).
"""

from collections.abc import Callable

import torch

from looped.ops import attend


class KVCache:
    def __init__(self, model, room: int, loops: int):
        """room: tokens of the longest text; loops: the most that a token takes."""
        self.model = model
        self.room = room
        self.loops = loops
        self.length = 0  # tokens so far
        self.slots = {}  # {layer: keys and values (slots, 2, B, H, room, K)}

    def begin_piece(self, tokens: int) -> None:
        device = self.model.cos.device
        first = self.length
        self.length += tokens
        self.new = slice(first, self.length)  # the tokens' places in a slot
        self.positions = torch.arange(first, self.length, device=device)[None]  # (1, T)
        self.cos, self.sin = self.model.rotary(self.positions)
        every = torch.ones(tokens, self.length, dtype=torch.bool, device=device)
        self.mask = every.tril(first)  # (T, S)
        self.live = None

    def begin_loop(self, loop: int, live: torch.Tensor | None) -> None:
        """live (B, T) bool: the tokens that take this loop; None: all of them."""
        self.loop = loop
        self.live = live
        self.written = set()  # core layers, in this loop

    def attend(self, layer: int, q, k, v, shift: Callable | None = None):
        """q, k, v (B, H, T, K) of the tokens just placed -> their attention, (B, H, T, K). Slots hold
        keys and values before the shift, so that a piece's first token can use its predecessor's.
        """
        new = torch.stack([k, v])
        looped = layer in self.model.core_layers
        if looped:
            if layer in self.written:
                raise ValueError(
                    f"layer {layer} runs twice a loop; a cache has one place for its keys"
                )
            self.written.add(layer)
        if layer not in self.slots:
            B, H, _, K = k.shape
            count = self.loops if looped else 1
            self.slots[layer] = k.new_zeros(count, 2, B, H, self.room, K)
        slots = self.slots[layer]
        slot = self.loop if looped else 0
        if self.live is None:  # every token takes each loop: no deeper slot lacks an entry
            slots[slot, ..., self.new, :] = new
        else:
            new = torch.where(self.live[:, None, :, None], new, slots[slot, ..., self.new, :])
            slots[slot:, ..., self.new, :] = new
        k, v = slots[slot, ..., : self.length, :]
        return attend(q, k, v, shift, self.mask)
