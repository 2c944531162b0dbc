"""
How fast a preset's training step is, and where its time goes; the page goes to results/.

    python -m tools.bench                                      # nano on a CPU, parcae-140m on a GPU
    torchrun --standalone --nproc_per_node=8 -m tools.bench    # eight GPUs, timed on the first

Times train.py's own training step on random tokens; on a CPU as it is, on a GPU compiled. ms: mean
over the rounds. MFU: against the GPU's dense bfloat16 peak, by the model's own FLOPs. GiB: the
largest so far. Where the time goes: torch's profiler, over one step, rank 0's.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from torch.profiler import profile

import train
from looped.console import Parser, fail, positive_int, run_cli
from looped.depth import sample_depths
from looped.figures import fmt, table
from looped.files import write_atomic
from looped.machine import (
    Place,
    best_dtype,
    distributed,
    leave,
    machine_name,
    peak_flops,
    peak_memory,
)
from looped.memory import CPU_CHUNK, warm_up
from looped.randomness import SEED_STATE, sequence_keys
from looped.settings import settle
from model import PRESETS, Model, ModelConfig
from muon import Optimizer, Rates

RESULTS = Path(__file__).parents[1] / "results"
HEADER = ["rows", "ms", "tok/s a rank", "MFU", "GiB"]
KERNELS = 20  # of the profile, the longest


def build(preset: str, place: Place) -> tuple[Model, Optimizer]:
    """The model on the device, with its optimiser, as train.py makes them."""
    args = train.parse_args(["--preset", preset])
    cfg = PRESETS[preset]
    settle(args, cfg, train.recipe_of(preset), place.world)
    args.dtype, _ = best_dtype(place.device)
    model, optimizer, _ = train.build(args, cfg, None, None, place, compiled=place.is_gpu)
    model.loss_chunk = 0 if place.is_gpu else CPU_CHUNK
    return model, optimizer


def random_batch(cfg: ModelConfig, rows: int, step: int, place: Place) -> train.Batch:
    """Random tokens with the step's depths."""
    generator = torch.Generator().manual_seed(step)
    shape = (rows, cfg.seq_len + 1)
    tokens = torch.randint(0, cfg.vocab_size, shape, generator=generator)
    n, k = sample_depths(cfg, 0, step, rows)
    return train.Batch(
        tokens=tokens.to(place.device),
        keys=sequence_keys(SEED_STATE, step, each=range(rows), device=place.device),
        n=n,
        k=k,
        step_tokens=rows * cfg.seq_len * place.world,
    )


def timed_step(model: Model, optimizer: Optimizer, batch: train.Batch) -> float:
    """Seconds of a training step."""
    start = time.perf_counter()
    train.training_step(model, optimizer, batch, len(batch.tokens), Rates())
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def step_row(model: Model, optimizer: Optimizer, rows: int, rounds: int, place: Place) -> list:
    """Times the steps of so many rows -> the table's row."""
    cfg = model.cfg
    torch._dynamo.reset()  # else graphs of other rows would be in the way
    warm_up(model, rows, place)
    optimizer.rehearse()
    seconds = []
    for step in range(rounds):
        batch = random_batch(cfg, rows, step, place)
        seconds.append(timed_step(model, optimizer, batch))
    mean = statistics.mean(seconds)
    rate = rows * cfg.seq_len / mean
    peak = peak_flops(place.device)
    mfu = rate * cfg.flops_per_token() / peak if peak else None
    memory = fmt(peak_memory(place.device), ".2f")
    return [rows, fmt(mean * 1e3, ".1f"), fmt(rate, ",.0f"), fmt(mfu, ".3f"), memory]


def profiled(model: Model, optimizer: Optimizer, rows: int, place: Place) -> list[str]:
    """The longest kernels of one step, as torch's profiler shows them."""
    batch = random_batch(model.cfg, rows, 0, place)
    with profile() as found:
        timed_step(model, optimizer, batch)
    order = "self_cuda_time_total" if place.is_gpu else "self_cpu_time_total"
    longest = found.key_averages().table(order, KERNELS, max_name_column_width=60)
    return ["```", longest, "```"]


def where(place: Place) -> str:
    """The command, and the machine it ran on."""
    command = " ".join(["python -m tools.bench", *sys.argv[1:]])
    ranks = f"{place.world} rank(s) of {torch.get_num_threads()} threads"
    dtype, _ = best_dtype(place.device)
    date = time.strftime("%Y-%m-%d")
    return f"`{command}`: {machine_name()}; {ranks}, {dtype}, torch {torch.__version__}, {date}"


def main(argv=None):
    gpu = torch.cuda.is_available()
    parser = Parser(description=__doc__, prog="python -m tools.bench")
    add = parser.add_argument
    add("--preset", default="parcae-140m" if gpu else "nano", choices=PRESETS,
        help="what to time (default: %(default)s)")  # fmt: skip
    add("--rows", type=positive_int, nargs="+", default=[8, 16, 32] if gpu else [16],
        help="sequences at once (default: %(default)s)")  # fmt: skip
    add("--rounds", type=positive_int, default=20, help="timed steps (default: %(default)s)")
    add("--out", default=RESULTS / f"bench-{'gpu' if gpu else 'cpu'}.md",
        help="the page, written over (default: %(default)s)")  # fmt: skip
    args = parser.parse_args(argv)
    place = distributed("auto")
    model, optimizer = build(args.preset, place)
    steps = []
    for rows in args.rows:
        try:
            steps.append(step_row(model, optimizer, rows, args.rounds, place))
        except torch.OutOfMemoryError:
            place.say(f"{rows} rows do not fit")
            optimizer.zero_grad()
            break
    if not steps:
        fail(f"--rows {args.rows[0]} does not fit; try --rows {max(1, args.rows[0] // 2)}")
    fitting = steps[-1][0]
    lines = [f"# Training step: {args.preset}, {model.cfg.seq_len} tokens a row", ""]
    lines += [where(place), "", *table(HEADER, steps), f"Where the time goes: {fitting} rows.", ""]
    lines += profiled(model, optimizer, fitting, place)
    place.say("\n".join(lines))
    if place.rank == 0:
        write_atomic(args.out, "\n".join(lines).encode())
    leave(place)


if __name__ == "__main__":
    run_cli(main)
