"""
How fast a training step is, and where its time goes.

    python -m tools.bench                                       # nano
    python -m tools.bench --preset parcae-140m --device-batch-size 16
    torchrun --standalone --nproc_per_node=8 -m tools.bench --preset parcae-140m

Takes train.py's flags and times its training step on random tokens; flags of data, checkpoints and
evaluation change nothing. ms: mean of 20 steps. GiB: the peak so far, the deepest step's included.
MFU: the FLOPs of these steps at the depths they were drawn, over the GPU's dense bfloat16 peak. Then
torch's profile of one step of rank 0.
"""

import time

import numpy as np
import torch
from torch.profiler import profile

import train
from launch import training_flops, warm_up, will_compile
from looped.machine import Rank, connect, disconnect, machine_name, peak_flops, peak_memory
from muon import Rates

STEPS = 20
KERNELS = 20  # of the profile, the longest


class RandomRows:
    """Random tokens in place of packed rows."""

    def __init__(self, cfg):
        self.cfg = cfg

    def stream_ids(self, seed, start, count):
        return np.arange(start, start + count)

    def get(self, split, ids):
        shape = len(ids), self.cfg.seq_len + 1
        generator = np.random.default_rng(ids[0])
        return generator.integers(0, self.cfg.vocab_size, shape)


def timed_step(model, optimizer, args, size: int, step: int, rank: Rank) -> float:
    """Seconds of a training step of `size` sequences at once, without making its batch."""
    rows = RandomRows(model.cfg)
    batch = train.next_batch(rows, model.cfg, args, step, rank)
    step_tokens = args.batch_size * model.cfg.seq_len
    start = time.perf_counter()
    sums = train.accumulate(model, batch, size, step_tokens)
    summed = optimizer.step(Rates(), sums)
    summed["ok"].item()  # waits for the device
    return time.perf_counter() - start


def main(argv=None):
    args = train.parse_args(argv, "python -m tools.bench", __doc__)
    args.data = args.out = "none"  # no rows are read, and no run is begun or continued
    cfg = train.model_config(args)
    rank = connect(args.device)
    train.settle(args, cfg, rank)
    compiled = will_compile(args.compile, args.steps, rank)
    model = train.make_model(cfg, args)
    model.to(rank.device)
    optimizer = train.make_optimizer(model, args, rank, compiled and rank.is_gpu)
    size = warm_up(model, optimizer, args, rank, compiled)

    args.steps = STEPS  # a depth law that follows the run's progress goes through all of it
    timed_step(model, optimizer, args, size, 0, rank)  # the first compiles the update
    seconds = 0.0
    for step in range(STEPS):
        seconds += timed_step(model, optimizer, args, size, step, rank)
    memory = peak_memory(rank.device)
    with profile() as profiled:
        timed_step(model, optimizer, args, size, 0, rank)

    mean = seconds / STEPS
    speed = args.batch_size * cfg.seq_len / mean
    how = "compiled" if compiled else "not compiled"
    rank.say(f"{args.preset}, {args.dtype}, {how}")
    rank.say(f"{rank.world} rank(s) of {torch.get_num_threads()} threads, {machine_name()}")
    rank.say(f"{args.batch_size} × {cfg.seq_len} tokens, {size} rows at once")
    rank.say(f"{mean * 1e3:.1f} ms, {speed:,.0f} tokens/s, {memory:.2f} GiB")
    peak = peak_flops(rank.device)
    if peak:
        flops = training_flops(cfg, args.seed, args.batch_size, STEPS)
        rank.say(f"MFU {flops / seconds / peak / rank.world:.3f}")
    order = f"self_{rank.device.type}_time_total"
    kernels = profiled.key_averages()
    rank.say(kernels.table(order, KERNELS, max_name_column_width=60))
    disconnect(rank)


if __name__ == "__main__":
    main()
