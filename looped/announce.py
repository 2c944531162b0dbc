"""What a run is, in words and as records: config.json, its first lines on the screen.

`run` is train.py's Run; `args` its settled flags.
"""

import dataclasses
import shlex
import sys
import uuid
from pathlib import Path

import torch

from looped.machine import Place, environment, program_code
from looped.memory import MemoryFit
from looped.ops import attends_by_products


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
        "id": uuid.uuid4().hex,  # kept when the run is continued
        **environment(),
    }


def announce(run, first: int, choices: dict) -> None:
    """What will happen, and what was chosen and why, on the screen and as the log's first line."""
    args = run.args
    say = run.place.say
    mega = run.config["flops_per_token"] / 1e6
    say(f"{run.folder}: {run.config['params']:,} parameters, {mega:,.0f} MFLOPs a token")
    length = run.cfg.seq_len
    tokens = run.steps * args.batch_size * length
    say(f"{run.steps} steps of {args.batch_size} × {length} tokens = {tokens:,}")
    if run.data.manifest["complete"]:
        there = run.data.rows("train") * length
        say(f"data: {there:,} tokens in rows, seen {tokens / there:.2f} times")
    for name, (value, reason) in choices.items():
        say(f"{name}: {value} ({reason})")
    if first:
        say(f"continuing after step {first}")
    run.record("start", first, code=program_code(), choices=choices)


def rows_reason(place: Place, given: set) -> str:
    if "device_batch_size" in given:
        return "given"
    return "the largest that fits and divides the batch" if place.is_gpu else "divides the batch"


def chunk_reason(args, place: Place, given: set) -> str:
    if "loss_chunk" in given:
        return "given"
    if args.loss_chunk is not None:
        return "the head or its loss was edited"
    return "by memory" if place.is_gpu else "always so on a CPU"


def choices_made(args, cfg, place: Place, fit: MemoryFit, given: set) -> dict:
    """{what: (value, reason)} of the settings that were not, or need not be, asked for; given: the
    flags that were.
    """
    processes = f"{place.world} process(es) of {torch.get_num_threads()} threads"
    attention = ("torch's", "its own order of kernels")
    if attends_by_products(place.device.type, getattr(torch, args.dtype), cfg.seq_len):
        attention = ("two matrix products", "the faster way for short bfloat16 rows on a CPU")
    chosen = {
        "device": (place.device.type, processes),
        "attention": attention,
        "device batch": (f"{fit.step.rows} rows", rows_reason(place, given)),
        "loss chunk": (f"{fit.step.loss_chunk or 'all'} tokens", chunk_reason(args, place, given)),
    }
    if place.is_gpu:
        chosen["memory"] = (f"peak {fit.peak:.1f} GiB", "at the deepest depth to be expected")
    if fit.step.keep_less:
        why = "or fewer rows would fit; no product is made twice"
        chosen["backward pass"] = ("makes elementwise results again", why)
    return chosen
