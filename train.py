"""
Trains a looped language model, or its flat baseline, on packed rows of tokens.

    python train.py                                                        # the small model, CPU
    python train.py --preset parcae-140m --gain zoh --data data/fineweb-edu-v32768/rows-2048-crop
    torchrun --standalone --nproc_per_node=8 train.py --preset parcae-140m ...
    torchrun --nnodes=2 --node-rank=0 --master-addr=FIRST --nproc_per_node=8 train.py ...
        (on the second node --node-rank=1)

What a step sees (rows, depths, initial states) depends only on (seed, step, sequence in the step),
not on the number of ranks or the micro-batch size: --batch-size is the optimiser's batch,
--device-batch-size only has to fit in memory. A run directory holds config.json, log.jsonl, the
tokenizer and the checkpoints; `--resume` continues it.
"""

import argparse
import dataclasses
import faulthandler
import gc
import math
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Before torch is loaded. OpenMP's threads spin while they wait for each other; beside another busy
# program that can stall a step for seconds. Make them sleep soon (results/cpu.md).
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import numpy as np
import torch
import torch.distributed as dist

import core_eval
from dataloader import PackedData
from looped.announce import announce, choices_made, run_config
from looped.checkpoint import (
    MISFIT_ERRORS,
    differences,
    join_writer,
    restore,
    save_checkpoint,
    step_of,
)
from looped.console import (
    Parser,
    fail,
    flag,
    non_negative_float,
    non_negative_int,
    one_line,
    positive_float,
    positive_int,
    positive_ints,
    refuse,
    run_cli,
)
from looped.core_tasks import bundle_at, load_panel
from looped.corpus import prepare_stdlib
from looped.depth import sample_depths, share_out
from looped.edits import Watch
from looped.endings import (
    catch_signals,
    exit_by_signal,
    explain,
    process_as_before,
    save_last_step,
    sequences,
    stop_diverged,
)
from looped.files import read_checked
from looped.logs import read_log
from looped.machine import (
    DEVICES,
    Place,
    best_dtype,
    choose_compile,
    distributed,
    from_device,
    leave,
    limit_waiting,
    note_busy_cores,
    program_code,
    refuse_unlike,
    take_from_first,
    to_device,
)
from looped.memory import CPU_CHUNK, DEVICE_BATCH, check_memory, fit_memory, settle_chunks
from looped.ops import hash_keys
from looped.randomness import FOR_STATE
from looped.run_directory import (
    RunLog,
    begun_config,
    default_directory,
    hold_run,
    is_finished,
    prepare_run,
    release_run,
)
from looped.settings import (
    FINAL_DEPTHS,
    check_meaning,
    check_rows,
    eval_depths,
    ramp_steps,
    settle,
)
from looped.tokenizer import load_tokenizer, token_bytes
from looped.validation import HeldOut, validate
from model import CHOICES, PRESETS, Model, ModelConfig, load_run, parameter_count
from muon import AdamW, Muon, Optimizer, Rates


@dataclass
class Recipe:
    """What a preset is trained with; each field is the default of the flag with the same name."""

    tokens: float
    batch_size: int
    adam_lr: float
    muon_lr: float
    optimizer: str = "muon"
    warmup: float = 0
    cooldown: float = 0.5
    # the paper's table prints a momentum of 0.95 throughout; its authors' code has this rise
    momentum_warmup: int = 300  # steps
    eval_tokens: float = 10.5e6


RECIPES = {
    # paper, table "Hyperparameter"
    "140m": Recipe(tokens=11.2e9, batch_size=256, adam_lr=8e-3, muon_lr=8e-3),
    "370m": Recipe(tokens=29.6e9, batch_size=256, adam_lr=8e-3, muon_lr=8e-3),
    "770m": Recipe(tokens=61.6e9, batch_size=256, adam_lr=6e-3, muon_lr=8e-3),
    "1.3b": Recipe(tokens=104e9, batch_size=256, adam_lr=6e-3, muon_lr=8e-3),
    # chosen for a few minutes on a CPU, see LOG.md
    "nano": Recipe(
        tokens=6.9e6, batch_size=16, adam_lr=6.4e-2, muon_lr=2e-2, momentum_warmup=0, eval_tokens=400e3
    ),
    # paper, "Parcae and RDM comparison"; batch, row length and tokens are our choice, and all of
    # rdm-nano (LOG.md)
    "rdm-100m": Recipe(
        tokens=10e9, batch_size=256, adam_lr=4e-4, muon_lr=0, optimizer="adamw", warmup=4096, cooldown=4096
    ),
    "rdm-350m": Recipe(
        tokens=10e9, batch_size=256, adam_lr=2e-4, muon_lr=0, optimizer="adamw", warmup=4096, cooldown=4096
    ),
    "rdm-nano": Recipe(
        tokens=6.9e6, batch_size=16, adam_lr=6.4e-3, muon_lr=0, optimizer="adamw", warmup=50, eval_tokens=400e3
    ),
}  # fmt: skip
CORE_EXAMPLES = 32  # a task of --core-every; ten-shot tasks need 11
BAD_STEPS = 3  # consecutive steps without a finite loss that end a run


# -------------------------------------------------------------------------------------------------
# Optimisers: each function makes an Optimizer's groups from the model and the flags. To add one,
# write a rule as in muon.py, a function here, and its line in OPTIMIZERS.


def trained_parameters(model: Model) -> list[tuple]:
    """(name, parameter) of all but the frozen ones (`requires_grad_(False)`), which weight decay
    would change too.
    """
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def muon_groups(model: Model, args, compiled: bool) -> list:
    """Muon for the blocks' matrices, AdamW for the rest."""
    matrices = model.muon_parameters()
    stacked, rest = [], []
    for name, p in trained_parameters(model):
        (stacked if name in matrices else rest).append((name, p))
    muon = Muon(args.muon_lr, args.weight_decay, compile=compiled)
    return [(AdamW(args.adam_lr, compile=compiled), rest), (muon, stacked)]


def adamw_groups(model: Model, args, compiled: bool) -> list:
    """AdamW for everything, without epsilon, updates clipped per tensor: as the RDM is trained."""
    rule = AdamW(args.adam_lr, betas=(0.9, 0.95), eps=0.0, update_clip=True, compile=compiled)
    return [(rule, trained_parameters(model))]


OPTIMIZERS = {"muon": muon_groups, "adamw": adamw_groups}


def parameter_groups(model: Model, args, compiled: bool) -> list:
    """--optimizer's groups; refuses those that would leave a parameter as it is, or train it twice."""
    groups = OPTIMIZERS[args.optimizer](model, args, compiled)
    times = Counter()
    for _, members in groups:
        times.update(name for name, _ in members)
    for name, _ in trained_parameters(model):
        if times[name] != 1:
            found = f"{name} is in {times[name]} groups of parameters"
            raise ValueError(f"--optimizer {args.optimizer}: {found}; put it in one, or freeze it")
    return groups


# -------------------------------------------------------------------------------------------------
# Settings


# fmt: off
def parse_args(argv=None, prog="train.py", about=__doc__):
    parser = Parser(description=about, prog=prog, allow_abbrev=False)
    add = parser.add_argument
    add("--preset", default="nano", choices=PRESETS,
        help="network and recipe (default: %(default)s)")
    add_network_flags(parser)

    add = parser.add_argument_group("run").add_argument
    add("--out", help="run directory (default: runs/PRESET-GAIN-sSEED; GAIN where there is one)")
    add("--data",
        help="folder of packed rows, from dataloader.py pack (default: Python's own library)")
    add("--seed", type=non_negative_int, default=0,
        help="of weights, row order, depths and initial states (default: %(default)s)")
    add("--tokens", type=positive_float, help="training tokens (default: the recipe's)")
    add("--flops", type=positive_float,
        help="training FLOPs; sets --tokens by the model's FLOPs per token")
    add("--stop-at", type=positive_int,
        help="save and stop after this step; the schedule is unchanged")
    add("--init-from", help="run whose newest weights to begin with: new optimiser, step 0")
    add("--resume", action="store_true", help="continue the run directory if it exists")
    add("--save-every", type=positive_int, default=1000,
        help="steps between checkpoints; the newest two stay (default: %(default)s)")
    add("--keep-every", type=non_negative_int,
        help="steps between checkpoints that stay (default: as the run began, else none)")
    add("--log-every", type=positive_int, default=10,
        help="steps between lines on the screen; log.jsonl has every step (default: %(default)s)")
    add("--wandb", action="store_true", help="also log to Weights & Biases, if installed")

    add = parser.add_argument_group("optimiser").add_argument
    add("--batch-size", type=positive_int,
        help="sequences per optimiser step (default: the recipe's)")
    add("--optimizer", choices=OPTIMIZERS,
        help="muon: Muon for the blocks' matrices, AdamW for the rest; adamw: AdamW for all, "
             "without epsilon, updates clipped by tensor (default: the recipe's)")
    add("--muon-lr", type=non_negative_float,
        help="peak learning rate of the matrices (default: the recipe's)")
    add("--adam-lr", type=non_negative_float,
        help="peak learning rate of the rest (default: the recipe's)")
    add("--warmup", type=non_negative_float,
        help="learning rates rise from 0 over this first fraction of the run (at most 1) or number "
             "of steps (default: the recipe's)")
    add("--cooldown", type=non_negative_float,
        help="learning rates fall to 0 over this last fraction of the run (at most 1) or number of "
             "steps (default: the recipe's)")
    add("--momentum-warmup", type=non_negative_int,
        help="steps over which Muon's momentum rises from 0.85 to 0.95; 0: 0.95 throughout "
             "(default: the recipe's)")
    add("--weight-decay", type=non_negative_float,
        help="Muon's, cautious, falling linearly to 0 (default: 0.2)")
    add("--clip", type=positive_float, default=1.0,
        help="largest norm of the gradient (default: %(default)s)")

    add = parser.add_argument_group("evaluation").add_argument
    add("--eval-every", type=non_negative_int, default=0,
        help="steps between validations (default: a fifth of the run)")
    add("--eval-tokens", type=positive_float, help="validation tokens (default: the recipe's)")
    add("--eval-depths", type=positive_ints,
        help="depths of every validation beside mu_rec, e.g. 1,4,8; each costs a forward pass (default: "
             f"none in training, {FINAL_DEPTHS} at its end)")
    add("--core-every", type=non_negative_int, default=0,
        help="steps between reduced CORE panels (default: none)")
    add("--bundle",
        help="CORE task data, a zip or folder (default: data/eval_bundle.zip, fetched once)")

    unchanged = "none of these changes the weights beyond rounding"
    add = parser.add_argument_group("machine", unchanged).add_argument
    add("--device", default="auto", choices=DEVICES,
        help="auto: an NVIDIA GPU or the CPU; mps, an Apple GPU, is untried")
    add("--device-batch-size", type=positive_int,
        help=f"sequences per forward pass and device (default: {DEVICE_BATCH}, or what is found to "
             "fit)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"),
        help="of activations (auto: the faster one)")
    add("--residual-dtype", default="auto", choices=("auto", "float32"),
        help="of the residual stream and the loop's state (auto: that of the activations; the "
             "authors': float32)")
    add("--compile", default="auto", choices=("auto", "on", "off"),
        help="torch.compile (auto: on NVIDIA GPUs, and for long runs on a CPU)")
    add("--loss-chunk", type=non_negative_int,
        help="tokens whose logits exist at once; 0: all (default: by memory on a GPU, "
             f"{CPU_CHUNK} on a CPU)")
    add("--checkpoint-loops", action=argparse.BooleanOptionalAction, default=False,
        help="recompute loops in the backward pass: less memory, more work")
    return parser.parse_args(argv)
# fmt: on


def add_network_flags(parser) -> None:
    """A flag for every field of ModelConfig; given, it overrides the preset."""
    network = parser.add_argument_group("network", "override the preset")
    for field in dataclasses.fields(ModelConfig):
        about = field.metadata.get("help")
        if field.type is bool:
            network.add_argument(
                flag(field.name), action=argparse.BooleanOptionalAction, help=about
            )
        else:
            choices = CHOICES.get(field.name)
            network.add_argument(flag(field.name), type=field.type, choices=choices, help=about)


def recipe_of(preset: str) -> Recipe:
    """The recipe whose name ends the preset's, the longest if several do."""
    fitting = [name for name in RECIPES if f"-{preset}".endswith(f"-{name}")]
    if not fitting:
        refuse(f"--preset {preset} has no recipe: its name must end in one of {', '.join(RECIPES)}")
    return RECIPES[max(fitting, key=len)]


def model_config(args) -> ModelConfig:
    """The preset's network with the flags given."""
    settings = dataclasses.asdict(PRESETS[args.preset])
    given = {}
    for name in settings:
        if getattr(args, name) is not None:
            given[name] = getattr(args, name)
    if "mu_rec" in given and "mu_bwd" not in given:
        settings["mu_bwd"] = 0  # half of the given mu_rec, not of the preset's
    settings |= given
    check_meaning(given, settings)
    try:
        return ModelConfig(**settings)
    except ValueError as e:
        refuse(str(e))


# -------------------------------------------------------------------------------------------------
# Data


def default_rows(cfg: ModelConfig) -> str:
    """The standard library's rows for a network."""
    return f"data/stdlib-v{cfg.vocab_size}/rows-{cfg.seq_len}-split"


def open_data(args, cfg: ModelConfig, place: Place) -> PackedData:
    """The packed rows."""
    folder = Path(args.data or default_rows(cfg))
    if not args.data and place.rank == 0:
        manifest = read_checked(folder / "manifest.json")
        if not manifest or not manifest.get("complete"):
            prepare_stdlib(folder, cfg.vocab_size, cfg.seq_len)
    if place.world > 1:
        dist.barrier()
    if not (folder / "manifest.json").is_file():
        make = f"python dataloader.py pack --out {folder} …"
        refuse(f"--data {folder} holds no packed rows; make them with `{make}`")
    # the ranks of a machine share the work of verifying checksums
    local = int(os.environ.get("LOCAL_RANK", 0))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    data = PackedData(folder, check=(local, here))
    check_rows(data, cfg, args.batch_size)
    return data


@dataclass
class Batch:
    """A rank's sequences of a step."""

    tokens: torch.Tensor  # (local, T + 1) int64, on the device
    keys: torch.Tensor  # (local,) int64: where their initial states come from
    n: np.ndarray  # (local,) or (local, T): loops without gradient
    k: np.ndarray  # the same: loops with gradient
    step_tokens: int  # of all ranks

    def parts(self, rows: int):
        """Micro-batches of so many rows."""
        for at in range(0, len(self.tokens), rows):
            part = slice(at, at + rows)
            yield Batch(
                self.tokens[part], self.keys[part], self.n[part], self.k[part], self.step_tokens
            )


def next_batch(data: PackedData, cfg: ModelConfig, args, step: int, place: Place):
    """-> this rank's Batch, and what the log says of the step: mean depth, checksum of the row
    numbers.
    """
    B = args.batch_size
    n, k = sample_depths(cfg, args.seed, step, B)
    mine = share_out(n, k, place.world)[place.rank]
    rows = step_rows(data, args, step)
    tokens = torch.from_numpy(data.get("train", rows[mine]))
    keys = hash_keys(args.seed, FOR_STATE, each=step * B + mine)
    batch = Batch(
        tokens=to_device(tokens, place.device),
        keys=to_device(keys, place.device),
        n=n[mine],
        k=k[mine],
        step_tokens=B * cfg.seq_len,
    )
    about = {"depth_mean": float((n + k).mean()), "rows": zlib.crc32(rows.tobytes())}
    return batch, about


def step_rows(data: PackedData, args, step: int):
    """The row ids of all sequences of a step."""
    return data.stream_ids(args.seed, step * args.batch_size, args.batch_size)


def check_last_rows(run: Path, data: PackedData, args, step: int) -> None:
    """Refuses to go on after `step` where that step would have other rows today than the log says:
    a stream was lengthened after the run had seen all of it.
    """
    log = run / "log.jsonl"
    known = read_log(log).train if log.is_file() else []
    last = [record for record in known if record["step"] == step]
    if last and last[0]["rows"] != zlib.crc32(step_rows(data, args, step - 1).tobytes()):
        fail(
            f"{data.folder} was lengthened after {run} had seen all of it, so step {step} had other "
            "rows; pack as many shards as before into another folder, and give it as --data"
        )


# -------------------------------------------------------------------------------------------------
# Schedule


def schedule(step: int, steps: int, args) -> Rates:
    """The rates of a step as multiples of their peaks: learning rates rise, stay and fall linearly,
    weight decay falls linearly throughout; neither is 0 at any step of the run. Muon's momentum
    rises from 0.85 to 0.95.
    """
    rise = (step + 1) / max(ramp_steps(args.warmup, steps), 1)
    fall = (steps - step) / max(ramp_steps(args.cooldown, steps), 1)
    momentum = 0.95
    if args.momentum_warmup:
        momentum = 0.85 + 0.1 * min(1.0, step / args.momentum_warmup)
    left = (steps - step) / steps
    return Rates(lr=min(1.0, rise, fall), weight_decay=left, momentum=momentum)


# -------------------------------------------------------------------------------------------------
# The training step

# fields of a step's record, which no statistic may be called
LOGGED = {
    "kind", "step", "tokens", "lr_multiple", "depth_mean", "rows", "loss", "grad_norm", "grad_norm2",
    "skipped", "stop", "tok_s", "ms", "time", "mem_gb",
}  # fmt: skip


def training_step(
    model: Model, optimizer: Optimizer, batch: Batch, rows: int, rates: Rates, **own
) -> dict:
    """Forward, backward and update, in micro-batches of `rows`.

    own: further scalars of this rank, on the device; they are added up over the ranks.

    Returns device scalars of the whole step, of all ranks: "loss" (nats per token), "grad_norm2"
    (before clipping), `Model.statistics` as means over tokens, and the sums of `own`. Nothing waits
    for the device.
    """
    means = {}
    for part in batch.parts(rows):
        ids = part.tokens[:, :-1]
        targets = part.tokens[:, 1:]
        loss, stats = model.loss(ids, targets, part.keys, part.n, part.k)
        (loss / batch.step_tokens).backward()
        found = {"loss": loss.detach(), **stats}
        check_statistics(stats, means)
        for name, value in found.items():
            means[name] = means.get(name, 0.0) + value / batch.step_tokens
    return optimizer.step(rates, means | own)


def check_statistics(stats: dict, means: dict) -> None:
    """Refuses statistics that cannot be logged; means: those of the micro-batches before, and the
    loss, if this is not the first.
    """
    taken = stats.keys() & LOGGED
    if taken:
        raise ValueError(f"a statistic is called {min(taken)}, as a field of the log is; rename it")
    unlike = stats.keys() ^ (means.keys() - {"loss"})
    if means and unlike:
        raise ValueError(f"not every micro-batch has the statistic {min(unlike)}; give it to all")
    for name, value in stats.items():
        shape = tuple(value.shape) if torch.is_tensor(value) else type(value).__name__
        if shape != ():
            raise ValueError(f"statistic {name} is {shape}; make it a tensor's sum over tokens")


# -------------------------------------------------------------------------------------------------
# What the parts of a run share


@dataclass
class Run:
    """A run under way."""

    args: argparse.Namespace
    cfg: ModelConfig
    config: dict  # config.json of this start; a continued run's file keeps the first start's
    folder: Path
    place: Place
    steps: int
    data: PackedData
    model: Model
    optimizer: Optimizer
    log: RunLog | None = None  # rank 0's
    held_out: HeldOut | None = None
    tokenizer: object = None
    panel: object = None  # of --core-every
    bad: int = 0  # consecutive steps without a finite loss
    stopped: bool = False  # whether some rank was asked to stop, by a signal

    def record(self, kind: str, step: int, **numbers) -> None:
        """A line of log.jsonl, on rank 0."""
        if self.log:
            tokens = step * self.args.batch_size * self.cfg.seq_len
            self.log.record({"kind": kind, "step": step, "tokens": tokens, **numbers})

    def save(self, step: int) -> None:
        """Writes a checkpoint, in the background; every rank calls."""
        keep = self.args.keep_every
        save_checkpoint(self.folder, step, self.model, self.optimizer, self.place.rank, keep)


# -------------------------------------------------------------------------------------------------
# Evaluation


def open_evaluation(run: Run) -> None:
    """The validation rows, and the CORE panel if it is asked for."""
    args, place = run.args, run.place
    run.tokenizer = load_tokenizer(run.data.folder / "tokenizer.json")
    sizes = torch.from_numpy(token_bytes(run.tokenizer)).to(place.device)
    run.held_out = HeldOut(run.data, sizes, args.eval_tokens)
    if args.core_every:
        run.panel = load_panel(bundle_at(args.bundle), limit=CORE_EXAMPLES)
        refuse_unlike({"bundle": run.panel.sha256}, place)  # it may be at another path


def evaluate(run: Run, step: int, final: bool = False) -> None:
    """Validation loss, to screen and log."""
    depths = eval_depths(run.args, run.cfg, final)
    place = run.place
    rows = run.args.device_batch_size
    result = validate(run.model, run.held_out, depths, rows, place.rank, place.world)
    more = dict(result)
    if run.cfg.n_core and place.rank == 0:
        more |= run.model.spectra()
    if final:
        more["final"] = True
    run.record("eval", step, **more)
    losses = "  ".join(f"{depth}: {loss:.4f}" for depth, loss in result["loss"].items())
    place.say(f"step {step}  validation loss at depth {losses}  ({result['eval_tokens']:,} tokens)")


def evaluate_core(run: Run, step: int) -> None:
    """The reduced CORE panel at mu_rec, to screen and log; no score where an answer is not finite."""
    try:
        score = core_eval.quick_score(run.model, run.tokenizer, run.panel, run.place)
    except core_eval.NotFiniteError as e:
        run.record("core without a score", step, reason=str(e))
        run.place.say(f"step {step}  CORE: no score; {e}")
        return
    run.record("core", step, **score)
    run.place.say(f"step {step}  {score['name']}: {score['mean']:.4f} centred")


def is_due(every: int, step: int) -> bool:
    """Whether what happens every so many steps happens after this one; 0: never."""
    return every > 0 and step % every == 0


def measure(run: Run, step: int) -> None:
    """The validation and the CORE panel that are due after a step. The last step is validated at
    the end of the run.
    """
    if is_due(run.args.eval_every, step) and step < run.steps:
        evaluate(run, step)
    if is_due(run.args.core_every, step):
        evaluate_core(run, step)


# -------------------------------------------------------------------------------------------------
# The loop


@dataclass
class Finished:
    """A step whose numbers are on their way from the device. On a GPU they are read when the next
    step is queued, so that the GPU always has work.
    """

    entry: dict
    numbers: Callable[[], dict[str, float]]  # waits for them


def finish_step(run: Run, finished: Finished) -> None:
    """Records a step's numbers; ends the run after too many steps without a finite loss or gradient."""
    numbers = finished.numbers()
    run.stopped |= numbers.pop("stop") > 0
    norm2 = numbers.pop("grad_norm2")
    good = math.isfinite(norm2) and math.isfinite(numbers["loss"])
    entry = finished.entry | numbers
    entry["grad_norm"] = math.sqrt(norm2) if good else norm2
    step = entry["step"]
    run.bad = 0 if good else run.bad + 1
    if not good:
        entry["skipped"] = True
        found = f"loss {numbers['loss']}, gradient {norm2}, {sequences(run, step, count=1)}"
        run.place.say(f"step {step}: {found}; the step was skipped on all ranks")
    if run.log:
        run.log.step(entry)
    if run.bad == BAD_STEPS:
        stop_diverged(run, step)


def awaited_batch(run: Run, step: int, pending: Finished | None):
    """`next_batch`; if its rows never come, records and saves the last step, then ends the run."""
    try:
        return next_batch(run.data, run.cfg, run.args, step, run.place)
    except SystemExit:
        if pending:
            finish_step(run, pending)
        save_last_step(run, step)
        raise


def train_steps(run: Run, first: int, end: int, progress: dict) -> int:
    """The training loop; -> the last step: `end`, or where a signal stopped it."""
    args, place = run.args, run.place
    watch = Watch(run.model, place.device)
    pending = None
    step = first
    while step < end and not run.stopped:
        batch, about = awaited_batch(run, step, pending)
        rates = schedule(step, run.steps, args)
        asked = torch.full((), float(len(run.data.caught)), device=place.device)
        result = training_step(
            run.model, run.optimizer, batch, args.device_batch_size, rates, stop=asked
        )
        if pending:
            finish_step(run, pending)
        step += 1
        progress["step"] = step
        entry = {
            "kind": "train",
            "step": step,
            "tokens": step * batch.step_tokens,
            "lr_multiple": rates.lr,
            **about,
        }
        pending = Finished(entry, from_device(result, place))
        join_writer(wait=False)
        if step == first + 20:
            watch.note_oddities()
            gc.collect()  # from here on a collection would stall all ranks
            gc.freeze()
            gc.disable()
        save = step == end or is_due(args.save_every, step) or is_due(args.keep_every, step)
        due = is_due(args.eval_every, step) or is_due(args.core_every, step)
        # at --stop-at, measuring is left to the run that continues this one
        pauses = step == end and end < run.steps
        if save or due or run.stopped or not place.is_gpu:
            finish_step(run, pending)
            pending = None
        if save or run.stopped:  # before evaluation, which might fail
            limit_waiting(place, training=False)  # the write of the save before may take long
            run.save(step)
            limit_waiting(place, training=step < end and not run.stopped)
        if due and not run.stopped and not pauses:
            measure(run, step)
        if save or due:
            gc.collect()  # torch's recomputed loops leave garbage
            if run.log:
                run.log.pause()
    return step


# -------------------------------------------------------------------------------------------------
# The parts of a run, and the run itself


def begin_from(run, model: Model, data: PackedData) -> None:
    """Gives the model another run's newest weights."""
    try:
        other, cfg, config = load_run(run)
        try:
            shapes_only = model.wte.weight.is_meta
            model.load_state_dict(other.state_dict(), assign=shapes_only)
        except RuntimeError:
            unlike = differences(dataclasses.asdict(cfg), dataclasses.asdict(model.cfg))
            names = ", ".join(unlike) or "another model.py"
            raise ValueError(f"it has other weights: {names}") from None
        same_tokens = config["tokenizer"]["sha256"] == data.manifest["tokenizer_sha256"]
    except (*MISFIT_ERRORS, FileNotFoundError) as e:
        fail(f"--init-from {run}: {one_line(e)}")
    if not same_tokens:
        fail(
            f"--init-from {run} has another tokenizer than the data; "
            f"pack them with {run}/tokenizer.json"
        )


def check_sources(args, cfg: ModelConfig, data: PackedData) -> None:
    """Refuses what the run could not begin with, before its directory is made."""
    if args.init_from:
        with torch.device("meta"):
            model = Model(cfg)
        begin_from(args.init_from, model, data)
    if args.core_every:
        load_panel(bundle_at(args.bundle), limit=CORE_EXAMPLES)


def settle_dtype(args, begun: dict | None, place: Place) -> str:
    """--dtype auto; -> the reason. A continued run keeps the one that it began with: begun is its
    config.json.
    """
    if args.dtype != "auto":
        return "given"
    if begun:
        args.dtype = begun["dtype"]
        return "as the run began"
    args.dtype = best_dtype(place.device)
    return "the faster one here"


def build(
    args, cfg: ModelConfig, data: PackedData, newest: Path | None, place: Place, compiled: bool
):
    """-> model and optimiser on their device, with the weights to begin with, and the step they are
    from.
    """
    model = Model(cfg)
    model.dtype = getattr(torch, args.dtype)
    if args.residual_dtype != "auto":
        model.residual_dtype = getattr(torch, args.residual_dtype)
    model.checkpoint_loops = args.checkpoint_loops
    model.init_weights(args.seed)
    settle_chunks(model, args)
    if args.init_from and not newest:
        begin_from(args.init_from, model, data)
    model.to(place.device)
    if args.init_from and not newest:  # ranks may have read that run at different steps
        take_from_first(model, place)
    # on a CPU the update is too short for its compilation to pay
    groups = parameter_groups(model, args, compiled and place.is_gpu)
    optimizer = Optimizer(groups, args.clip, place.rank, place.world)
    first = restore(newest, model, optimizer) if newest else 0
    if compiled:
        torch._dynamo.reset()  # graphs of earlier runs in this process count towards its limit
        model.compile_pieces(for_cpu=not place.is_gpu)
    return model, optimizer, first


@dataclass
class Beginning:
    """What rank 0 found in the run directory, or put there."""

    config: dict  # config.json
    newest: Path | None  # the checkpoint to continue from
    finished: bool  # nothing is left to do
    dtype_reason: str


def enter_directory(
    args, cfg: ModelConfig, data: PackedData, steps: int, place: Place
) -> Beginning:
    """Makes the run directory, or checks the one to continue, on rank 0."""
    folder = Path(args.out)
    if not (folder / "config.json").is_file():
        check_sources(args, cfg, data)
    hold_run(folder)
    begun = begun_config(folder, args.resume)
    dtype_reason = settle_dtype(args, begun, place)
    if args.keep_every is None and begun:
        args.keep_every = begun["args"]["keep_every"]
    args.keep_every = args.keep_every or 0
    config = run_config(args, cfg, parameter_count(cfg), data, steps, place)
    newest = prepare_run(folder, begun, config)
    if newest:
        config["id"] = begun["id"]
        check_last_rows(folder, data, args, step_of(newest))
    return Beginning(config, newest, is_finished(folder, args, cfg, data), dtype_reason)


def agree_on_run(args, cfg: ModelConfig, data: PackedData, steps: int, place: Place) -> Beginning:
    """What rank 0 found, on all ranks; where it refuses, all end. Settles dtype and keep_every."""
    alike = vars(args) | dataclasses.asdict(cfg)
    alike = {flag(name): value for name, value in alike.items() if name not in ("bundle", "data")}
    alike |= {"torch": torch.__version__, "code": program_code()[:16], "rows": data.sha256()[:16]}
    refuse_unlike(alike, place)
    if args.core_every:
        bundle_at(args.bundle, place.rank)  # a fetch may take longer than a collective waits
    told = [None]
    try:
        if place.rank == 0:
            told[0] = enter_directory(args, cfg, data, steps, place)
    finally:  # where rank 0 refuses, the others wait here and must be told, too: None
        if place.world > 1:
            dist.broadcast_object_list(told)
    found = told[0]
    if found is None:
        refuse("rank 0 refused, and said why on its machine; do what it says there")
    args.dtype = found.config["dtype"]
    args.keep_every = found.config["args"]["keep_every"]
    return found


def train(args, progress: dict) -> None:
    """The run. progress["step"] counts the steps, for the message of an early end."""
    # 1. settings, ranks, data, run directory
    cfg = model_config(args)
    place = distributed(args.device)
    note_busy_cores(place)
    args.device = place.device.type
    given = {name for name, value in vars(args).items() if value is not None}
    steps = settle(args, cfg, recipe_of(args.preset), place.world)
    data = open_data(args, cfg, place)
    args.out = args.out or default_directory(args, cfg)
    folder = Path(args.out)
    found = agree_on_run(args, cfg, data, steps, place)

    # 2. model and optimiser
    compiled = choose_compile(args.compile, steps, place)
    check_memory(cfg, args.optimizer, place)
    model, optimizer, first = build(args, cfg, data, found.newest, place, compiled)
    if found.finished and first == steps:
        place.say(f"{folder} is finished: all {steps} steps, and its validation")
        leave(place)
        return
    fit = fit_memory(model, optimizer, args, place)
    choices = choices_made(args, cfg, place, fit, given)
    choices["activations"] = (args.dtype, found.dtype_reason)
    choices["compile"] = ("on" if compiled else "off", f"--compile {args.compile}")
    if compiled:
        choices["compiling took"] = (f"{fit.seconds:.0f} s", "with the memory's test")

    # 3. what will happen
    run = Run(args, cfg, found.config, folder, place, steps, data, model, optimizer)
    open_evaluation(run)
    if place.rank == 0:
        run.log = RunLog(folder, run.config, args, place.device)
    announce(run, first, choices)
    progress["step"] = first
    data.caught = catch_signals()

    # 4. training
    if first:  # what was due then may have been cut off
        measure(run, first)
        if run.log:
            run.log.pause()
    end = min(steps, args.stop_at or steps)
    limit_waiting(place, training=True)
    step = train_steps(run, first, end, progress)

    # 5. the end
    limit_waiting(place, training=False)
    join_writer()
    if step < steps or run.stopped:
        done = f"stopped after step {step} of {steps} and saved"
        if step == first:
            done = f"nothing was done: the run is at step {step} of {steps} already"
        place.say(f"{done}; --resume continues")
    else:
        evaluate(run, steps, final=True)
    leave(place)
    if run.stopped or (data.caught and step < steps):
        exit_by_signal(data.caught)


def main(argv=None):
    faulthandler.enable(sys.__stderr__)  # a rank that aborts says where
    args = parse_args(argv)
    progress = {"step": 0}
    try:
        with process_as_before():
            train(args, progress)
    except (RuntimeError, MemoryError, OSError) as e:
        explain(e, args, progress)
    finally:
        release_run()


if __name__ == "__main__":
    run_cli(main)
