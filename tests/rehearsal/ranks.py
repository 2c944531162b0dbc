# ruff: noqa: E402
"""
The optimiser on 2, 8 and 16 ranks that are not there (torch's "fake" process group), beside the card that is not there.

    PY=… bash tests/rehearsal/dry.sh tests/rehearsal/ranks.py 8

A line for each large preset: GiB of a rank at rest, with looped/memory.py's prediction in brackets, and in an update; GB
of gradients reduced and of weights gathered; the busiest rank's part of Muon's matrices over the mean rank's.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

from peaks import GIB, build, reset

import muon
from looped.figures import table
from looped.memory import static_bytes
from model import PRESETS
from train import recipe_of

HEADER = ["preset", "at rest", "update", "reduced GB", "gathered GB", "busiest rank"]


REDUCE_SCATTER = muon.reduce_scatter
ALL_GATHER = muon.all_gather


class Sent:
    """Bytes."""

    reduced = 0
    gathered = 0


def reduce_scatter(out, given, async_op=False):
    Sent.reduced += given.nbytes
    return REDUCE_SCATTER(out, given, async_op=async_op)


def all_gather(out, given, async_op=False):
    Sent.gathered += out.nbytes
    return ALL_GATHER(out, given, async_op=async_op)


def busiest(optimizer, world: int) -> float:
    """The largest rank's numbers in Muon's matrices over the mean rank's."""
    work = [0] * world
    for rule, buffer in optimizer.buffers:
        if rule.stacked:
            own = len(buffer.p)
            for (_, p), span in zip(buffer.members, buffer.spans, strict=True):
                work[span.start // own] += p.numel()
    return max(work) * world / sum(work) if sum(work) else 1.0


def row(name: str, world: int) -> list[str]:
    reset()
    model, optimizer = build(name, compiled=False, world=world)
    at_rest = torch.cuda.memory_allocated() / GIB
    Sent.reduced = Sent.gathered = 0
    torch.cuda.reset_peak_memory_stats()
    optimizer.rehearse()
    update = torch.cuda.max_memory_allocated() / GIB
    predicted = static_bytes(model.cfg, recipe_of(name).optimizer, world) / GIB
    return [
        name,
        f"{at_rest:.2f} ({predicted:.2f})",
        f"{update:.2f}",
        f"{Sent.reduced / 1e9:.2f}",
        f"{Sent.gathered / 1e9:.2f}",
        f"{busiest(optimizer, world):.2f}",
    ]


def main(world: int) -> None:
    dist.init_process_group("fake", rank=world - 1, world_size=world, store=FakeStore())
    muon.reduce_scatter = reduce_scatter
    muon.all_gather = all_gather
    large = [name for name in PRESETS if not name.endswith(("nano", "tiny"))]
    print(f"{world} ranks:\n")
    print("\n".join(table(HEADER, [row(name, world) for name in large])), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
