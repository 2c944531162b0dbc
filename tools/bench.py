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
from looped.machine import (
    Place,
    best_dtype,
    connect,
    disconnect,
    machine_name,
    peak_flops,
    peak_memory,
)
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


def timed_step(model, optimizer, args, step: int, place: Place) -> float:
    """Seconds of a training step, without making its batch."""
    rows = RandomRows(model.cfg)
    batch = train.next_batch(rows, model.cfg, args, step, place)
    step_tokens = args.batch_size * model.cfg.seq_len
    start = time.perf_counter()
    means = train.accumulate(model, batch, args.device_batch_size, step_tokens)
    found = optimizer.step(Rates(), means)
    found["loss"].item()  # waits for the device
    return time.perf_counter() - start


def main(argv=None):
    args = train.parse_args(argv, "python -m tools.bench", __doc__)
    cfg = train.model_config(args)
    steps = train.settle(args, cfg)
    place = connect(args.device)
    train.settle_device_batch(args, place.world)
    if args.dtype == "auto":
        args.dtype = best_dtype(place.device)
    compiled = train.will_compile(args, steps, place)
    model = train.make_model(cfg, args)
    model.to(place.device)
    optimizer = train.make_optimizer(model, args, place, compiled and place.is_gpu)
    train.warm_up(model, optimizer, args, place, compiled)

    timed_step(model, optimizer, args, 0, place)  # the first takes longer
    seconds = 0
    for step in range(STEPS):
        seconds += timed_step(model, optimizer, args, step, place)
    mean = seconds / STEPS
    rate = args.batch_size * cfg.seq_len / mean
    memory = peak_memory(place.device)
    with profile() as found:
        timed_step(model, optimizer, args, 0, place)

    how = "compiled" if compiled else "not compiled"
    place.say(f"{args.preset}, {args.dtype}, {how}")
    place.say(f"{place.world} rank(s) of {torch.get_num_threads()} threads, {machine_name()}")
    place.say(f"{args.batch_size} × {cfg.seq_len} tokens, {args.device_batch_size} rows at once")
    place.say(f"{mean * 1e3:.1f} ms, {rate:,.0f} tokens/s, {memory:.2f} GiB")
    peak = peak_flops(place.device)
    if peak:
        flops = rate * cfg.flops_per_token()
        place.say(f"MFU {flops / peak / place.world:.3f}")
    order = f"self_{place.device.type}_time_total"
    kernels = found.key_averages()
    place.say(kernels.table(order, KERNELS, max_name_column_width=60))
    disconnect(place)


if __name__ == "__main__":
    main()
