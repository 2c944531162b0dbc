"""Loss on held-out rows."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from looped.ops import hash_keys
from looped.randomness import FOR_EVAL


@dataclass
class HeldOut:
    """The validation rows that a loss is measured on."""

    data: object  # PackedData
    sizes: torch.Tensor  # (V,) bytes of each token, 0 for the special ones, on the model's device
    tokens: float  # at most so many; math.inf: all


def rows_asked(data, tokens: float) -> int:
    """The number of validation rows of packed data that --eval-tokens asks for."""
    there = data.rows("val")
    if tokens >= there * data.seq_len:
        return there
    return max(1, int(tokens) // data.seq_len)


@torch.no_grad()
def validate(model, held_out: HeldOut, depths: list, batch: int, rank: int = 0, world: int = 1):
    """Mean loss over the first rows of the validation shard, independent of batch and ranks.

    -> {"eval_tokens", "loss": {depth: nats per token}, "bpb": {depth: bits per byte}}. Bits per
    byte count the targets that have bytes (not BOS) against the true byte lengths of the tokens.
    The last batch is filled up with its first row, so that a compiled model sees one shape; those
    rows are not counted.
    """
    data = held_out.data
    device = held_out.sizes.device
    rows = rows_asked(data, held_out.tokens)
    # by depth: nats of all targets, nats of those with bytes, their bytes
    sums = torch.zeros(len(depths), 3, dtype=torch.float64)
    mine = range(rank, rows, world)
    for at in range(0, len(mine), batch):
        ids = list(mine[at : at + batch])
        n = len(ids)
        ids += ids[:1] * (batch - n)
        block = torch.from_numpy(data.get("val", ids)).to(device)  # (batch, T + 1)
        x = block[:, :-1]
        y = block[:, 1:]
        keys = hash_keys(FOR_EVAL, each=ids, device=device)
        losses = model.losses(x, y, depths, keys)
        sizes = held_out.sizes[y[:n]].cpu()
        for of_depth, depth in zip(sums, depths):
            nats = losses[depth][:n].cpu().double()
            of_depth[0] += nats.sum()
            of_depth[1] += (nats * (sizes > 0)).sum()
            of_depth[2] += sizes.sum()
    if world > 1:
        sums = sums.to(device)
        dist.all_reduce(sums)
    nats, nats_with_bytes, size = sums.T.cpu()
    count = rows * data.seq_len
    bits = nats_with_bytes / size / math.log(2)
    names = [str(depth) for depth in depths]
    loss = nats / count
    loss = dict(zip(names, loss.tolist()))
    bpb = dict(zip(names, bits.tolist()))
    return {"eval_tokens": count, "loss": loss, "bpb": bpb}
