"""
How fast a training step is, and where its time goes; the page goes to results/.

    python -m tools.bench                                      # nano on a CPU, parcae-140m on a GPU
    torchrun --standalone --nproc_per_node=8 -m tools.bench    # eight GPUs, timed on the first

Times train.py's own training step on random tokens. All variants take the same batches, round by
round in turn. ms: mean over the rounds; "over the first": median of the rounds' ratios. MFU: against
the GPU's dense bfloat16 peak, by the model's own FLOPs. Where the time goes: torch's profiler, over
one step of the first model, rank 0's.
"""

import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.profiler import profile

from looped.console import Parser, fail, positive_int, run_cli
from looped.depth import sample_depths
from looped.figures import fmt, table
from looped.files import write_atomic
from looped.machine import Place, best_dtype, distributed, machine_name, peak_flops
from looped.memory import CPU_CHUNK, warm_up
from looped.randomness import SEED_STATE, sequence_keys
from model import PRESETS, Model, ModelConfig
from muon import Optimizer, Rates
from train import OPTIMIZERS, Batch, recipe_of, training_step

RESULTS = Path(__file__).parents[1] / "results"
HEADER = ["rows", "model", "ms", "tok/s a rank", "over the first", "MFU"]
KERNELS = 20  # of the profile, the longest


@dataclass
class Variant:
    """A model that is timed."""

    name: str
    model: Model
    optimizer: Optimizer
    seconds: list[float] = field(default_factory=list)

    def step(self, batch: Batch) -> None:
        training_step(self.model, self.optimizer, batch, len(batch.tokens), Rates())
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def networks(preset: str) -> dict[str, ModelConfig]:
    """{name: network} of what is timed."""
    cfg = PRESETS[preset]
    found = {"Euler": replace(cfg, gain="euler"), "Exact-ZOH": replace(cfg, gain="zoh")}
    if cfg.injection != "diagonal":  # which has no gain
        found = {cfg.injection: cfg}
    found["fixed depth"] = replace(cfg, sampling="fixed")
    flat = "transformer-" + preset.removeprefix("parcae-")
    if flat in PRESETS:
        found["Transformer"] = PRESETS[flat]
    return found


def build(name: str, cfg: ModelConfig, preset: str, place: Place) -> Variant:
    """A model on the device, with its optimiser, as train.py makes them."""
    model = Model(cfg)
    model.dtype = getattr(torch, best_dtype(place.device)[0])
    model.loss_chunk = 0 if place.is_gpu else CPU_CHUNK
    model.init_weights(0)
    model.to(place.device)
    recipe = recipe_of(preset)
    rates = SimpleNamespace(muon_lr=recipe.muon_lr, adam_lr=recipe.adam_lr, weight_decay=0.2)
    groups = OPTIMIZERS[recipe.optimizer](model, rates, place.is_gpu)
    optimizer = Optimizer(groups, 1.0, place.rank, place.world)
    if place.is_gpu:
        model.compile_pieces()
    return Variant(name, model, optimizer)


def random_batch(cfg: ModelConfig, rows: int, step: int, place: Place) -> Batch:
    """Random tokens with the step's depths."""
    generator = torch.Generator().manual_seed(step)
    shape = (rows, cfg.seq_len + 1)
    tokens = torch.randint(0, cfg.vocab_size, shape, generator=generator)
    n, k = sample_depths(cfg, 0, step, rows)
    return Batch(
        tokens=tokens.to(place.device),
        keys=sequence_keys(SEED_STATE, step, each=range(rows), device=place.device),
        n=n,
        k=k,
        step_tokens=rows * cfg.seq_len * place.world,
    )


def time_steps(variants: list[Variant], rows: int, rounds: int, place: Place) -> None:
    """Fills in the variants' seconds."""
    for variant in variants:
        variant.seconds.clear()
        warm_up(variant.model, rows, place)
        variant.optimizer.rehearse()
    for step in range(rounds):
        for variant in variants:
            batch = random_batch(variant.model.cfg, rows, step, place)
            start = time.perf_counter()
            variant.step(batch)
            variant.seconds.append(time.perf_counter() - start)


def step_row(variant: Variant, first: Variant, rows: int, place: Place) -> list:
    """The variant's row of the table."""
    cfg = variant.model.cfg
    mean = statistics.mean(variant.seconds)
    pairs = zip(variant.seconds, first.seconds, strict=True)
    ratio = statistics.median(own / other for own, other in pairs)
    rate = rows * cfg.seq_len / mean
    peak = peak_flops(place.device)
    mfu = rate * cfg.flops_per_token() / peak if peak else None
    numbers = [fmt(mean * 1e3, ".1f"), fmt(rate, ",.0f"), fmt(ratio, ".3f")]
    return [rows, variant.name, *numbers, fmt(mfu, ".3f")]


def profiled(variant: Variant, rows: int, place: Place) -> list[str]:
    """The longest kernels of one step, as torch's profiler shows them."""
    batch = random_batch(variant.model.cfg, rows, 0, place)
    with profile() as found:
        variant.step(batch)
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
    looped = [name for name, cfg in PRESETS.items() if cfg.n_core]
    add("--preset", default="parcae-140m" if gpu else "nano", choices=looped,
        help="looped model to time (default: %(default)s)")  # fmt: skip
    add("--rows", type=positive_int, nargs="+", default=[8, 16, 32] if gpu else [16],
        help="sequences at once (default: %(default)s)")  # fmt: skip
    add("--rounds", type=positive_int, default=20, help="timed steps (default: %(default)s)")
    add("--out", default=RESULTS / f"bench-{'gpu' if gpu else 'cpu'}.md",
        help="the page, written over (default: %(default)s)")  # fmt: skip
    args = parser.parse_args(argv)
    place = distributed("auto")
    variants = []
    for name, cfg in networks(args.preset).items():
        variants.append(build(name, cfg, args.preset, place))
    steps = []
    fitting = 0
    for rows in args.rows:
        try:
            time_steps(variants, rows, args.rounds, place)
        except torch.OutOfMemoryError:
            place.say(f"{rows} rows do not fit beside the {len(variants)} models")
            for variant in variants:
                variant.optimizer.zero_grad()
            break
        fitting = rows
        for variant in variants:
            steps.append(step_row(variant, variants[0], rows, place))
    if not fitting:
        fail(f"--rows {args.rows[0]} does not fit; try --rows {max(1, args.rows[0] // 2)}")
    length = variants[0].model.cfg.seq_len
    lines = [f"# Training step: {args.preset}, {length} tokens a row", "", where(place), ""]
    lines += table(HEADER, steps)
    lines += [f"Where the time goes: {variants[0].name}, {fitting} rows.", ""]
    lines += profiled(variants[0], fitting, place)
    place.say("\n".join(lines))
    if place.rank == 0:
        write_atomic(args.out, "\n".join(lines).encode())
    if place.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_cli(main)
