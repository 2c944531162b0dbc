"""What a run is, in words and as records: config.json, its first lines on the screen.

`run` is train.py's Run; `args` its settled flags.
"""

import dataclasses
import os
import shlex
import sys
from pathlib import Path

import torch

from looped.machine import Place, environment
from looped.memory import MemoryFit
from looped.ops import attends_by_products
from looped.settings import eval_depths
from looped.validation import rows_asked


def run_config(args, cfg, params: int, data, steps: int, place: Place) -> dict:
    """config.json: all that decides a run's numbers, and what it ran on."""
    network = dataclasses.asdict(cfg)
    sha256 = data.manifest["tokenizer_sha256"]
    tokenizer = {"path": str(data.folder / "tokenizer.json"), "sha256": sha256}
    program = Path(sys.argv[0]).name
    return {
        "args": {name: value for name, value in vars(args).items() if name not in network},
        "model": network,
        "params": params,
        "flops_per_token": cfg.flops_per_token(),
        "steps": steps,
        "tokenizer": tokenizer,
        "data": {"path": str(data.folder), "sha256": data.sha256()},
        "device": place.device.type,
        "dtype": args.dtype,
        "ranks": place.world,
        "command": shlex.join(["python", program, *sys.argv[1:]]),
        **environment(),
    }


def announce(run, first: int, choices: dict) -> None:
    """What will happen, and what was chosen and why, on the screen and as the log's first line."""
    args, place = run.args, run.place
    mega = run.config["flops_per_token"] / 1e6
    params = run.config["params"]
    place.say(f"{run.folder.name}: {params:,} parameters, {mega:,.0f} MFLOPs a token")
    length = run.cfg.seq_len
    tokens = run.steps * args.batch_size * length
    steps = f"{run.steps} steps of {args.batch_size} × {length} tokens = {tokens:,}"
    if run.data.manifest["complete"]:
        there = run.data.rows("train") * length
        place.say(f"data: {there:,} tokens in rows, seen {tokens / there:.2f} times")
    rows = args.device_batch_size
    parts = args.batch_size // place.world // rows
    place.say(f"{steps}; {place.world} rank(s) × {parts} × {rows} rows")
    for name, (value, reason) in choices.items():
        place.say(f"{name}: {value} ({reason})")
    place.say(f"{validation_cost(run)}; directory {run.folder}")
    if first:
        place.say(f"continuing after step {first}")
    run.record("start", first, choices=choices)


def validation_cost(run) -> str:
    """The validations during training, and what they cost beside it."""
    args, cfg = run.args, run.cfg
    depths = eval_depths(args, cfg, final=False)
    times = (run.steps - 1) // args.eval_every
    tokens = rows_asked(run.data, args.eval_tokens) * cfg.seq_len
    # what is not a loop, again for every further depth
    flops = flops_at(cfg, depths[-1]) + (len(depths) - 1) * flops_at(cfg, 1)
    flops /= 3  # a backward pass is two forward passes
    training = run.config["flops_per_token"] * args.tokens
    share = times * tokens * flops / training
    names = ",".join(str(depth) for depth in depths)
    return f"validation: {times} times at depth {names}, at most {share:.1%} of training's FLOPs"


def flops_at(cfg, depth: int) -> float:
    """Training FLOPs per token at one depth, which a flat model ignores."""
    fixed = dataclasses.replace(cfg, sampling="fixed", mu_rec=depth, mu_bwd=depth)
    return fixed.flops_per_token()


def choices_made(args, cfg, place: Place, fit: MemoryFit) -> dict:
    """{what: (value, reason)} of the settings that were not, or need not be, asked for."""
    processes = f"{place.world} process(es) of {torch.get_num_threads()} threads"
    attention = ("torch's", "its own order of kernels")
    if attends_by_products(place.device.type, getattr(torch, args.dtype), cfg.seq_len):
        attention = ("two matrix products", "the faster way for short bfloat16 rows on a CPU")
    chunk = f"{fit.loss_chunk} tokens" if fit.loss_chunk else "all tokens"
    chosen = {
        "device": (place.device.type, processes),
        "attention": attention,
        "device batch": (f"{fit.rows} rows", fit.rows_reason),
        "loss chunk": (chunk, fit.chunk_reason),
    }
    if place.is_gpu:
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        allocator = " ".join(os.environ[name] for name in names if name in os.environ)
        why = f"at the deepest depth to be expected; {allocator}"
        chosen["memory"] = (f"peak {fit.peak:.1f} GiB", why)
    if fit.keeps_less:
        why = "or fewer rows would fit; no product is made twice"
        chosen["backward pass"] = ("makes elementwise results again", why)
    if place.device.type == "mps":
        why = "mps lacks 64-bit products and numbers"
        chosen["on the CPU"] = ("initial states, sums of losses", why)
    if cfg.n_core and cfg.granularity == "token":
        chosen["rows"] = ("all, at every loop", "tokens have depths of their own")
    return chosen


def say_stopped(run, first: int, step: int) -> None:
    """The last line of a run that is not at its end."""
    done = f"stopped after step {step} of {run.steps} and saved"
    again = "the same command with --resume continues"
    if run.args.stop_at and run.args.stop_at <= first:
        done = f"nothing was done: the run is at step {step} of {run.steps} already"
        again = f"with --resume and without --stop-at {run.args.stop_at} it continues"
    run.place.say(f"{done}; {again}")
