"""Loss on held-out rows."""

import math

import numpy as np
import torch
import torch.distributed as dist

from looped.machine import Rank
from looped.ops import hash_keys
from looped.randomness import FOR_EVAL, permute
from looped.tokenizer import load_tokenizer, token_bytes


class HeldOut:
    """The validation rows that a loss is measured on: about so many tokens of the packed rows
    (math.inf: all), drawn by a permutation that is the same for all runs.

    Packing leaves long documents for the end of a shard, so its first rows are no fair sample.
    """

    def __init__(self, data, tokens: float, device):
        self.data = data  # PackedData
        there = data.rows("val")
        wanted = min(tokens, there * data.seq_len) // data.seq_len
        first = np.arange(max(1, int(wanted)))
        drawn = permute(first, there, "validation")
        self.ids = np.sort(drawn)
        self.tokens = len(self.ids) * data.seq_len
        self.tokenizer = load_tokenizer(data.folder / "tokenizer.json")
        sizes = token_bytes(self.tokenizer)
        self.sizes = torch.from_numpy(sizes).to(device)  # (V,) bytes of each token, 0 for specials


@torch.no_grad()
def validate(model, held_out: HeldOut, depths: list[int], rows: int, rank: Rank) -> dict:
    """Mean loss by depth, in nats a token and in bits a byte, independent of batch and ranks.

    Bits per byte count the targets that have bytes (not BOS) against the tokens' true byte lengths.
    The last batch is filled up to `rows` rows, so that a compiled model sees one shape; the filling is
    not counted. "yardstick" says what the loss was measured on: losses compare where it is equal.
    """
    data = held_out.data
    # a row a depth: nats of all targets, nats of the targets with bytes, their bytes
    sums = torch.zeros(len(depths), 3, dtype=torch.float64)
    mine = held_out.ids[rank.number :: rank.world]
    for at in range(0, len(mine), rows):
        ids = mine[at : at + rows]
        n = len(ids)
        filled = np.resize(ids, rows)
        block = data.get("val", filled)  # (rows, T + 1)
        block = torch.from_numpy(block).to(rank.device)
        inputs = block[:, :-1]
        targets = block[:, 1:]
        keys = hash_keys(FOR_EVAL, each=filled, device=rank.device)
        losses = model.losses(inputs, targets, depths, keys)
        sizes = held_out.sizes[targets[:n]].cpu()
        counted = sizes > 0
        for row, depth in zip(sums, depths):
            nats = losses[depth][:n].cpu().double()
            row[0] += nats.sum()
            row[1] += (nats * counted).sum()
            row[2] += sizes.sum()
    if rank.world > 1:
        sums = sums.to(rank.device)
        dist.all_reduce(sums)
    nats, nats_with_bytes, size = sums.T.cpu()
    loss = nats / held_out.tokens
    bpb = nats_with_bytes / size / math.log(2)
    return {
        "loss": dict(zip(depths, loss.tolist())),
        "bpb": dict(zip(depths, bpb.tolist())),
        "eval_tokens": held_out.tokens,
        "yardstick": data.yardstick | {"tokens": held_out.tokens},
    }
