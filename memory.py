"""
Keys and values of past tokens, so that text can be read piece by piece: what sampling and shared prefixes need.

    memory = Memory(model.cfg, rows=B, room=T_max)
    memory.place(at)                                 # positions (B, T) of the tokens that come next
    h, *drive = model.before(ids, keys, memory)
    for t in range(depth):
        memory.loop = t
        h = model.core_step(h, *drive, memory)
    z = model.after(h, ids, memory)                  # as of the whole text, to rounding

A layer outside the loop has one slot; a core layer has one for each loop, since its keys and values differ from loop to
loop. cache_loops = k keeps only k of them, loop t in slot t mod k: less memory, another function (Geiping et al. 2025).
Rows may have different lengths: what lies behind a token's position is masked, and overwritten when it is reached.
"""

import torch
import torch.nn.functional as F

from model import ModelConfig


class Memory:
    def __init__(self, cfg: ModelConfig, rows: int, room: int, cache_loops: int = 0):
        self.cfg, self.rows, self.room, self.cache_loops = cfg, rows, room, cache_loops
        self.loop, self.slots, self.live = 0, {}, None

    def place(self, at: torch.Tensor, live: torch.Tensor | None = None) -> None:
        """at (B, T) int64: positions of the tokens that come next. live (B, T) bool: tokens still in the loop."""
        self.at, self.live, self.length = at, live, int(at.max()) + 1
        self.row = torch.arange(at.size(0), device=at.device)[:, None]
        self.mask = torch.arange(self.length, device=at.device) <= at[:, None, :, None]  # (B, 1, T, S)

    def slot(self, layer: int, loop: int):
        """-> (2, B, room, H, K) of a layer, or None before it was written."""
        core = self.cfg.n_prelude <= layer < self.cfg.n_prelude + self.cfg.n_core
        return layer, (loop % self.cache_loops if self.cache_loops else loop) if core else 0

    def attend(self, layer: int, q, k, v):
        """q, k, v (B, H, T, K) of the tokens at self.at -> their attention over all that is known, (B, H, T, K)."""
        new = torch.stack([k, v]).transpose(2, 3)  # (2, B, T, H, K)
        name = self.slot(layer, self.loop)
        if name not in self.slots:
            self.slots[name] = new.new_zeros(2, self.rows, self.room, *new.shape[3:])
        kv = self.slots[name]
        if self.live is not None and self.loop:  # a token that has left keeps the entry of its last loop
            before = self.slots[self.slot(layer, self.loop - 1)][:, self.row, self.at]
            new = torch.where(self.live[..., None, None], new, before)
        kv[:, self.row, self.at] = new
        k, v = kv[:, :, : self.length].transpose(2, 3)  # (B, H, S, K)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)

    def select(self, rows: torch.Tensor) -> "Memory":
        """A copy whose row i is row rows[i] of this one."""
        copy = Memory(self.cfg, len(rows), self.room, self.cache_loops)
        copy.slots = {name: kv[:, rows] for name, kv in self.slots.items()}
        return copy

    def bytes(self) -> int:
        return sum(kv.nbytes for kv in self.slots.values())
