"""
How fast a training step is, and where its time goes.

    python -m tools.bench                                       # nano
    python -m tools.bench --preset parcae-140m --device-batch-size 16
    torchrun --standalone --nproc_per_node=8 -m tools.bench --preset parcae-140m

Takes train.py's flags and times its training step on random tokens; flags of data, checkpoints and
evaluation change nothing. ms: mean of 20 steps. GiB: the largest so far. MFU: against the GPU's
dense bfloat16 peak, by the model's own FLOPs. Then torch's profiler, over one step of rank 0.
"""

import time

import numpy as np
import torch
from torch.profiler import profile

import train
from looped.console import run_cli
from looped.machine import (
    Place,
    choose_compile,
    distributed,
    leave,
    machine_name,
    peak_flops,
    peak_memory,
)
from looped.memory import check_memory, fit_memory
from looped.settings import settle
from muon import Rates

STEPS = 20
KERNELS = 20  # of the profile, the longest


class RandomRows:
    """Random tokens in place of packed rows."""

    def __init__(self, cfg):
        self.row = cfg.seq_len + 1
        self.vocab_size = cfg.vocab_size

    def stream_ids(self, seed, start, count):
        return np.arange(start, start + count)

    def get(self, split, ids):
        return np.random.default_rng(ids[0]).integers(0, self.vocab_size, (len(ids), self.row))


def timed_step(model, optimizer, args, step: int, place: Place) -> float:
    """Seconds of a training step, without making its batch."""
    batch, _ = train.next_batch(RandomRows(model.cfg), model.cfg, args, step, place)
    start = time.perf_counter()
    sums = train.training_step(model, optimizer, batch, args.device_batch_size, Rates())
    sums["loss"].item()  # waits for the device
    return time.perf_counter() - start


def main(argv=None):
    args = train.parse_args(argv, "python -m tools.bench", __doc__)
    args.resume = args.init_from = None
    cfg = train.model_config(args)
    place = distributed(args.device)
    steps = settle(args, cfg, train.recipe_of(args.preset), place.world)
    train.settle_dtype(args, None, place)
    compiled = choose_compile(args.compile, steps, place)
    check_memory(cfg, args.optimizer, place)
    model, optimizer, _ = train.build(args, cfg, None, None, place, compiled)
    fit_memory(model, optimizer, args, place)

    timed_step(model, optimizer, args, 0, place)  # the first takes longer
    seconds = [timed_step(model, optimizer, args, step, place) for step in range(STEPS)]
    mean = sum(seconds) / STEPS
    rate = args.batch_size * cfg.seq_len / mean
    memory = peak_memory(place.device)
    with profile() as found:
        timed_step(model, optimizer, args, 0, place)

    place.say(
        f"{args.preset}: {args.batch_size} rows of {cfg.seq_len} tokens a step, "
        f"{args.device_batch_size} at once, {args.dtype}, {'' if compiled else 'not '}compiled"
    )
    place.say(f"{place.world} rank(s) of {torch.get_num_threads()} threads, {machine_name()}")
    place.say(f"{mean * 1e3:.1f} ms, {rate:,.0f} tok/s, {memory:.2f} GiB")
    peak = peak_flops(place.device)
    if peak:
        place.say(f"MFU {rate * cfg.flops_per_token() / peak / place.world:.3f}")
    order = f"self_{'cuda' if place.is_gpu else 'cpu'}_time_total"
    place.say(found.key_averages().table(order, KERNELS, max_name_column_width=60))
    leave(place)


if __name__ == "__main__":
    run_cli(main)
