"""
Keys and values of past tokens, so that a text can be read piece by piece.

    cache = KVCache(model.cfg, room=T_max)
    cache.begin_piece(positions, *model.rotary(positions))  # (B, T): the tokens that come next
    h, inputs = model.enter_loop(ids, keys, cache)
    for state in model.unroll(h, inputs, plan, cache):
        h = state.h
    x = model.coda(h, ids, cache)                     # as for the whole text at one depth, but for rounding

A layer outside the loop has one slot; a core layer has one for each loop, since its keys and values
differ from loop to loop. A token may leave the loop early: later tokens that loop on find its last
keys and values in the deeper slots (Geiping et al. 2025).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F


class KVCache:
    def __init__(self, cfg, room: int):
        """room: the longest text, in tokens."""
        self.core = range(cfg.n_prelude, cfg.n_prelude + cfg.n_core)
        self.room = room
        self.slots = {}  # {(layer, loop): keys and values (2, B, room, H, K)}

    def begin_piece(self, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """The next tokens' positions (B, T) int64, the same in each row, and rotary embedding
        (B, T, 1, K/2).
        """
        self.positions = positions
        self.cos = cos
        self.sin = sin
        self.begin_loop(0, None)
        first = int(positions[0, 0])
        tokens = positions.size(1)
        self.length = first + tokens
        self.new = slice(first, self.length)  # their places in a slot
        every = torch.ones(tokens, self.length, dtype=torch.bool, device=positions.device)
        self.mask = every.tril(first)  # (T, S)

    def begin_loop(self, loop: int, live: torch.Tensor | None) -> None:
        """live (B, T) bool: the tokens that take this loop; None: all of them."""
        self.loop = loop
        self.live = live

    def attend(self, layer: int, q, k, v, shift: Callable | None = None):
        """q, k, v (B, H, T, K) of the tokens just placed -> their attention, (B, H, T, K). Slots hold
        keys and values before the shift, so that a piece's first token can use its predecessor's.
        """
        new = torch.stack([k, v]).transpose(2, 3)  # (2, B, T, H, K)
        loop = self.loop if layer in self.core else 0
        last = self.slots.get((layer, loop - 1))
        if (layer, loop) not in self.slots:
            if last is None:
                last = new.new_zeros(*new.shape[:2], self.room, *new.shape[3:])
            # in a deeper slot, tokens that took fewer loops have the entries of their last loop
            self.slots[layer, loop] = last.clone()
        slot = self.slots[layer, loop]
        if self.live is not None and loop:
            new = torch.where(self.live[..., None, None], new, last[:, :, self.new])
        slot[:, :, self.new] = new
        k, v = slot[:, :, : self.length].transpose(2, 3)  # (B, H, S, K)
        if shift is not None:
            k, v = shift(k, v)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)

    def settle(self, loops: int) -> None:
        """Copies the last keys and values of the tokens just placed to slots `loops` and deeper."""
        for (layer, loop), slot in self.slots.items():
            if layer in self.core and loop >= loops:
                slot[:, :, self.new] = self.slots[layer, loops - 1][:, :, self.new]
