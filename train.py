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

import contextlib
import dataclasses
import gc
import math
import os
import shlex
import signal
import sys
import uuid
from argparse import BooleanOptionalAction
from dataclasses import dataclass
from pathlib import Path

# Before torch is loaded. OpenMP's threads spin while they wait for each other; beside another busy
# program that can stall a step for seconds. Make them sleep soon (results/cpu.md).
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import numpy as np
import torch

import core_eval
import dataloader
import tokenizer_train
from dataloader import PackedData
from looped.common import Parser, fail, ints, note
from looped.core_tasks import bundle_at, load_panel
from looped.depth import deepest, sample_depths, share_out
from looped.machine import Place, best_dtype, connect, disconnect, environment, to_device
from looped.ops import hash_keys
from looped.randomness import FOR_STATE
from looped.run import (
    RunLog,
    begun_config,
    check_same_settings,
    is_finished,
    restore,
    save_checkpoint,
)
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
    weight_decay: float = 0.2
    eval_tokens: float = 10.5e6


def rdm_recipe(**settings) -> Recipe:
    return Recipe(optimizer="adamw", muon_lr=0, **settings)


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
    "rdm-100m": rdm_recipe(tokens=10e9, batch_size=256, adam_lr=4e-4, warmup=4096, cooldown=4096),
    "rdm-350m": rdm_recipe(tokens=10e9, batch_size=256, adam_lr=2e-4, warmup=4096, cooldown=4096),
    "rdm-nano": rdm_recipe(
        tokens=6.9e6, batch_size=16, adam_lr=6.4e-3, warmup=50, eval_tokens=400e3
    ),
}  # fmt: skip
FINAL_DEPTHS = [1, 2, 4, 8, 16]  # of the validation at the end, beside mu_rec
DEVICE_BATCH = 32  # sequences at once, where memory allows
COMPILE_STEPS = 1500  # from so many on, compiling, which takes minutes, pays on a CPU (LOG.md)
CORE_EXAMPLES = 32  # a task of --core-every; ten-shot tasks need 11
BAD_STEPS = 3  # consecutive steps without a finite loss that end a run


# -------------------------------------------------------------------------------------------------
# Settings


# fmt: off
def parse_args(argv=None, prog="train.py", about=__doc__):
    parser = Parser(description=about, prog=prog)
    add = parser.add_argument
    add("--preset", default="nano", choices=PRESETS, metavar="NAME",
        help="network and recipe: " + ", ".join(PRESETS) + " (default: %(default)s)")

    add = parser.add_argument_group("run").add_argument
    add("--out", help="run directory (default: runs/PRESET-GAIN-sSEED; GAIN where there is one)")
    add("--data",
        help="folder of packed rows, from dataloader.py pack (default: Python's own library)")
    add("--seed", type=int, default=0,
        help="of weights, row order, depths and initial states (default: %(default)s)")
    add("--tokens", type=float, help="training tokens (default: the recipe's)")
    add("--flops", type=float,
        help="training FLOPs; sets --tokens by the model's FLOPs per token")
    add("--stop-at", type=int,
        help="save and stop after this step; the schedule is unchanged")
    add("--init-from", help="start from this run's newest weights: new optimiser, step 0")
    add("--resume", action="store_true", help="continue the run directory if it exists")
    add("--save-every", type=int, default=1000,
        help="steps between checkpoints; the newest two stay (default: %(default)s)")
    add("--keep-every", type=int, default=0,
        help="steps between checkpoints that stay (default: none)")
    add("--wandb", action="store_true", help="also log to Weights & Biases, if installed")

    add = parser.add_argument_group("optimiser", "defaults: the recipe's").add_argument
    add("--batch-size", type=int, help="sequences per optimiser step")
    add("--optimizer", choices=OPTIMIZERS,
        help="muon: Muon for the blocks' matrices, AdamW for the rest; adamw: AdamW for all, "
             "without epsilon, updates clipped by tensor")
    add("--muon-lr", type=float, help="peak learning rate of the matrices")
    add("--adam-lr", type=float, help="peak learning rate of the rest")
    add("--warmup", type=float,
        help="learning rates rise from 0 over this first fraction of the run (at most 1) or number "
             "of steps")
    add("--cooldown", type=float,
        help="learning rates fall to 0 over this last fraction of the run (at most 1) or number of "
             "steps")
    add("--momentum-warmup", type=int,
        help="steps over which Muon's momentum rises from 0.85 to 0.95; 0: 0.95 throughout")
    add("--weight-decay", type=float, help="Muon's, cautious, falling linearly to 0")
    add("--clip", type=float, default=1.0,
        help="largest norm of the gradient (default: %(default)s)")

    add = parser.add_argument_group("evaluation").add_argument
    add("--eval-every", type=int, default=0,
        help="steps between validations (default: a fifth of the run)")
    add("--eval-tokens", type=float, help="validation tokens (default: the recipe's)")
    add("--eval-depths", type=ints,
        help="depths of every validation beside mu_rec, e.g. 1,4,8; each costs a forward pass "
             "(default: none in training, 1,2,4,8,16 at its end)")
    add("--core-every", type=int, default=0,
        help="steps between reduced CORE panels (default: none)")
    add("--bundle",
        help="CORE task data, a zip (default: data/eval_bundle.zip, fetched once)")

    network = parser.add_argument_group("network", "override the preset")
    for field in dataclasses.fields(ModelConfig):
        name = "--" + field.name.replace("_", "-")
        about = field.metadata.get("help")
        if field.type is bool:
            network.add_argument(name, action=BooleanOptionalAction, help=about)
        else:
            choices = CHOICES.get(field.name)
            network.add_argument(name, type=field.type, choices=choices, help=about)

    unchanged = "none of these changes the weights beyond rounding"
    add = parser.add_argument_group("machine", unchanged).add_argument
    add("--device", default="auto", choices=("auto", "cuda", "mps", "cpu"),
        help="auto: an NVIDIA GPU or the CPU; mps, an Apple GPU, is untried")
    add("--device-batch-size", type=int,
        help=f"sequences per forward pass and device (default: {DEVICE_BATCH}, or what fits)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"),
        help="of activations (auto: the faster one)")
    add("--residual-dtype", default="auto", choices=("auto", "float32"),
        help="of the residual stream and the loop's state (auto: that of the activations; the "
             "authors': float32)")
    add("--compile", default="auto", choices=("auto", "on", "off"),
        help="torch.compile (auto: on NVIDIA GPUs, and for long runs on a CPU)")
    add("--checkpoint-loops", action=BooleanOptionalAction, default=False,
        help="recompute loops in the backward pass: less memory, more work")
    return parser.parse_args(argv)
# fmt: on


def model_config(args) -> ModelConfig:
    """The preset's network with the flags given."""
    settings = dataclasses.asdict(PRESETS[args.preset])
    given = {}
    for name in settings:
        if getattr(args, name) is not None:
            given[name] = getattr(args, name)
    if "mu_rec" in given and "mu_bwd" not in given:
        settings["mu_bwd"] = 0  # half of the given mu_rec, not of the preset's
    try:
        cfg = ModelConfig(**settings | given)
    except ValueError as e:
        fail(str(e))
    check_meaning(args, given, cfg)
    return cfg


LOOP_FLAGS = (
    "gain", "injection", "input_matrix", "readout", "mu_rec", "mu_bwd", "sampling", "granularity",
    "mechanism", "streams", "prelude_norm", "state_init", "ssm_decay",
)  # fmt: skip
DIAGONAL_FLAGS = ("gain", "input_matrix", "ssm_decay")
MUON_FLAGS = ("muon_lr", "momentum_warmup", "weight_decay")


def check_meaning(args, given: dict, cfg: ModelConfig) -> None:
    """Refuses flags that have no effect, which a comparison would take hours to show."""
    idle = []
    if cfg.n_core == 0:
        idle += [(name, "without a loop") for name in LOOP_FLAGS if name in given]
    elif cfg.injection != "diagonal":
        why = f"with --injection {cfg.injection}"
        idle += [(name, why) for name in DIAGONAL_FLAGS if name in given]
    optimizer = args.optimizer or recipe_of(args.preset).optimizer
    if optimizer == "adamw":
        idle += [(name, "with --optimizer adamw") for name in MUON_FLAGS if getattr(args, name)]
    if args.flops:
        idle += [("tokens", "with --flops")] if args.tokens else []
    for name, why in idle:
        fail(f"--{name.replace('_', '-')} has no meaning {why}; leave it out")


def recipe_of(preset: str) -> Recipe:
    """The longest recipe name that the preset's ends in: 140m for transformer-140m."""
    fitting = [name for name in RECIPES if f"-{preset}".endswith(f"-{name}")]
    return RECIPES[max(fitting, key=len)]


def settle(args, cfg: ModelConfig) -> int:
    """Fills in what was not given -> the number of steps."""
    for name, default in vars(recipe_of(args.preset)).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if args.flops:
        args.tokens = args.flops / cfg.flops_per_token()
    step_tokens = args.batch_size * cfg.seq_len
    steps = round(args.tokens / step_tokens)
    if steps < 1:
        fail(f"--tokens {args.tokens:g} is less than a step's {step_tokens}; try {step_tokens}")
    args.eval_every = args.eval_every or math.ceil(steps / 5)
    if args.out is None:
        has_gain = cfg.n_core and cfg.injection == "diagonal"
        gain = f"-{cfg.gain}" if has_gain else ""
        args.out = f"runs/{args.preset}{gain}-s{args.seed}"
    return steps


def settle_device_batch(args, world: int) -> None:
    """The largest device batch up to DEVICE_BATCH that divides each rank's share of the batch."""
    B, size = args.batch_size, args.device_batch_size or 1
    unit = world * size
    if B % unit:
        more = math.ceil(B / unit) * unit
        what = f"is not a multiple of ranks × device batch = {world} × {size}"
        fail(f"--batch-size {B} {what}; try {more}")
    if args.device_batch_size is None:
        share = B // world
        fitting = [size for size in range(1, DEVICE_BATCH + 1) if share % size == 0]
        args.device_batch_size = fitting[-1]


# -------------------------------------------------------------------------------------------------
# Optimisers: each function makes an Optimizer's groups from the model and the flags. To add one,
# write a rule as in muon.py, a function here, and its line in OPTIMIZERS.


def muon_groups(named: list, args, compiled: bool) -> list:
    """Muon for the blocks' matrices, AdamW for the rest."""
    matrices = [(name, p) for name, p in named if p.muon]
    rest = [(name, p) for name, p in named if not p.muon]
    adamw = AdamW(args.adam_lr, compile=compiled)
    muon = Muon(args.muon_lr, args.weight_decay, compile=compiled)
    return [(adamw, rest), (muon, matrices)]


def adamw_groups(named: list, args, compiled: bool) -> list:
    """AdamW for everything, without epsilon, updates clipped per tensor: as the RDM is trained."""
    rule = AdamW(args.adam_lr, betas=(0.9, 0.95), eps=0.0, update_clip=True, compile=compiled)
    return [(rule, named)]


OPTIMIZERS = {"muon": muon_groups, "adamw": adamw_groups}


def make_optimizer(model: Model, args, place: Place, compiled: bool) -> Optimizer:
    """The optimiser of all parameters that are not frozen (`requires_grad_(False)`)."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = OPTIMIZERS[args.optimizer](named, args, compiled)
    return Optimizer(groups, args.clip, place.rank, place.world)


def schedule(step: int, steps: int, args) -> Rates:
    """The rates of a step as multiples of their peaks: learning rates rise, stay and fall linearly,
    weight decay falls linearly throughout; neither is 0 at any step of the run. Muon's momentum
    rises from 0.85 to 0.95.
    """
    rise = (step + 1) / ramp_steps(args.warmup, steps)
    fall = (steps - step) / ramp_steps(args.cooldown, steps)
    momentum = 0.95
    if args.momentum_warmup:
        momentum = 0.85 + 0.1 * min(1.0, step / args.momentum_warmup)
    left = (steps - step) / steps
    return Rates(lr=min(1.0, rise, fall), weight_decay=left, momentum=momentum)


def ramp_steps(length: float, steps: int) -> float:
    """A warm-up or cool-down in steps, one at least; given as a fraction of the run if at most 1."""
    if length <= 1:
        length = length * steps
    return max(length, 1)


# -------------------------------------------------------------------------------------------------
# Data


def default_rows(cfg: ModelConfig, place: Place) -> str:
    """Python's own library as packed rows, made if they are not there."""
    folder = f"data/stdlib-v{cfg.vocab_size}"
    rows = f"{folder}/rows-{cfg.seq_len}-split"
    if place.rank == 0 and not Path(rows, "manifest.json").exists():
        tokenizer = f"{folder}/tokenizer.json"
        texts = ["--texts", "data/stdlib"]
        dataloader.main(["stdlib", "--out", "data/stdlib"])
        tokenizer_train.main([*texts, "--vocab-size", str(cfg.vocab_size), "--out", tokenizer])
        made_of = [*texts, "--tokenizer", tokenizer, "--seq-len", str(cfg.seq_len)]
        dataloader.main(["pack", *made_of, "--long-docs", "split", "--workers", "1", "--out", rows])
    place.barrier()
    return rows


@dataclass
class Batch:
    """A rank's sequences of a step."""

    tokens: torch.Tensor  # (local, T + 1) int64, on the device
    seeds: torch.Tensor  # (local,) int64, of their initial states
    n: np.ndarray  # (local,) or (local, T): loops without gradient
    k: np.ndarray  # the same: loops with gradient
    depth_mean: float  # of all ranks' sequences

    def micro_batches(self, size: int):
        """Arguments of Model.loss, for so many sequences at once."""
        for at in range(0, len(self.tokens), size):
            part = slice(at, at + size)
            tokens = self.tokens[part]
            ids = tokens[:, :-1]
            targets = tokens[:, 1:]
            yield ids, targets, self.seeds[part], self.n[part], self.k[part]


def next_batch(data: PackedData, cfg: ModelConfig, args, step: int, place: Place) -> Batch:
    B = args.batch_size
    n, k = sample_depths(cfg, args.seed, step, B)
    mine = share_out(n, k, place.world)[place.rank]
    rows = data.stream_ids(args.seed, step * B, B)
    tokens = torch.from_numpy(data.get("train", rows[mine]))
    tokens = to_device(tokens, place.device)
    seeds = hash_keys(args.seed, FOR_STATE, each=step * B + mine)
    seeds = to_device(seeds, place.device)
    depth_mean = float((n + k).mean())
    return Batch(tokens, seeds, n[mine], k[mine], depth_mean)


# -------------------------------------------------------------------------------------------------
# A step


def accumulate(model: Model, batch: Batch, size: int, step_tokens: int) -> dict:
    """Gradients of this rank's sequences, so many at once -> its share of the step's mean loss and
    statistics, on the device. Nothing waits for the device.
    """
    shares = {}
    for ids, targets, seeds, n, k in batch.micro_batches(size):
        loss, stats = model.loss(ids, targets, seeds, n, k)
        (loss / step_tokens).backward()
        for name, value in {"loss": loss.detach(), **stats}.items():
            shares[name] = shares.get(name, 0.0) + value / step_tokens
    return shares


def try_deepest(model: Model, args, place: Place) -> None:
    """A forward and backward pass of depths as the law draws them, then of the deepest: compiles
    what is compiled, and takes the most memory that training will. Then a validation's pass.
    """
    cfg = model.cfg
    size = args.device_batch_size
    tokens = torch.zeros(size, cfg.seq_len + 1, dtype=torch.int64, device=place.device)
    ids = tokens[:, :-1]
    targets = tokens[:, 1:]
    seeds = hash_keys(FOR_STATE, each=range(size), device=place.device)
    for n, k in (sample_depths(cfg, args.seed, 0, size), deepest(cfg, size)):
        loss, _ = model.loss(ids, targets, seeds, n, k)
        loss.backward()
    model.losses(ids, targets, [cfg.mu_rec], seeds)


def fit_device_batch(model: Model, optimizer: Optimizer, args, place: Place) -> None:
    """Halves the device batch until `try_deepest` fits on every GPU."""
    while True:
        fits = True
        try:
            try_deepest(model, args, place)
        except torch.OutOfMemoryError:
            fits = False
        optimizer.zero_grad()
        if place.all(fits):
            return
        size = args.device_batch_size
        if size == 1:
            fail(
                "out of memory with one sequence at once; try --checkpoint-loops, or a smaller --preset"
            )
        smaller = range(1, size // 2 + 1)
        args.device_batch_size = max(d for d in smaller if size % d == 0)
        place.say(f"out of memory with {size} sequences at once; trying {args.device_batch_size}")
        torch.cuda.empty_cache()


def will_compile(args, steps: int, place: Place) -> bool:
    if args.compile == "auto":
        return place.is_gpu or (sys.platform == "linux" and steps >= COMPILE_STEPS)
    return args.compile == "on"


def warm_up(model: Model, optimizer: Optimizer, args, place: Place, compiled: bool) -> None:
    """Compiles and finds what fits, before the first step."""
    if compiled:
        place.say("compiling takes some minutes, less where torch's cache has these shapes")
        model.compile_pieces(for_cpu=not place.is_gpu)
    try:
        fit_device_batch(model, optimizer, args, place)
    except Exception as e:  # torch's compiler may raise anything
        if args.compile != "auto" or not compiled:
            raise
        place.say(
            f"training without torch.compile, which failed: {type(e).__name__} {str(e)[:100]}"
        )
        model.uncompile()
        fit_device_batch(model, optimizer, args, place)


def note_idle_parameters(model: Model, optimizer: Optimizer, before: dict, place: Place) -> None:
    """Names the parameters that no gradient has reached, or that have not moved; every rank calls."""
    state = optimizer.state_dict()
    if place.rank:
        return
    moments = [tensors for name, tensors in state.items() if name != "steps"]
    for name, p in model.named_parameters():
        if p.requires_grad:
            reached = any(named[name].any() for named in moments if name in named)
            moved = p.detach().double().sum() != before[name]
            if not (reached and moved):
                what = "has not moved" if reached else "has had no gradient"
                note(f"{name} {what} in the first 20 steps")


# -------------------------------------------------------------------------------------------------
# Evaluation


@dataclass
class Yardsticks:
    """What a model is measured on."""

    held_out: HeldOut
    panel: object = None  # of --core-every


def load_yardsticks(data: PackedData, args, place: Place) -> Yardsticks:
    found = Yardsticks(HeldOut(data, args.eval_tokens, place.device))
    if args.core_every:
        found.panel = load_panel(bundle_at(args.bundle, place.rank), limit=CORE_EXAMPLES)
    return found


def evaluate(model: Model, held_out: HeldOut, depths: list, size: int, place: Place) -> dict:
    """Validation loss at mu_rec and these depths, and norms of the linear path."""
    depths = sorted({model.cfg.mu_rec, *depths}) if model.cfg.n_core else [0]
    found = validate(model, held_out, depths, size, place)
    losses = [f"{depth}: {loss:.4f}" for depth, loss in found["loss"].items()]
    place.say(f"val loss by depth  {'  '.join(losses)}  ({found['eval_tokens']:,} tokens)")
    return found | model.spectra()


def evaluate_core(model: Model, yardsticks: Yardsticks, place: Place) -> dict:
    """The reduced CORE panel at mu_rec; no score where an answer is not finite."""
    try:
        score = core_eval.quick_score(model, yardsticks.held_out.tokenizer, yardsticks.panel, place)
    except core_eval.NotFiniteError as e:
        place.say(f"CORE: no score; {e}")
        return {"mean": None}
    place.say(f"{score['name']}: {score['mean']:.4f} centred")
    return score


# -------------------------------------------------------------------------------------------------
# The run


def run_config(args, cfg: ModelConfig, data: PackedData, steps: int, place: Place) -> dict:
    """config.json: all that decides a run's numbers, and what it ran on."""
    network = dataclasses.asdict(cfg)
    flags = {name: value for name, value in vars(args).items() if name not in network}
    tokenizer = str(data.folder / "tokenizer.json")
    return {
        "args": flags,
        "model": network,
        "params": parameter_count(cfg),
        "flops_per_token": cfg.flops_per_token(),
        "steps": steps,
        "tokenizer": {"path": tokenizer, "sha256": data.manifest["tokenizer_sha256"]},
        "data": {"path": str(data.folder), "sha256": data.sha256},
        "device": place.device.type,
        "dtype": args.dtype,
        "ranks": place.world,
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "id": uuid.uuid4().hex,
        **environment(),
    }


def announce(config: dict, data: PackedData, place: Place) -> None:
    """The first lines on the screen."""
    args = config["args"]
    steps = config["steps"]
    say = place.say
    length = data.manifest["seq_len"]
    B = args["batch_size"]
    size = args["device_batch_size"]
    there = data.rows("train") * length
    tokens = steps * B * length
    mflops = config["flops_per_token"] / 1e6
    say(f"run    {args['out']}, {args['preset']}, seed {args['seed']}")
    say(f"model  {config['params']:,} parameters, {mflops:,.0f} MFLOPs a token")
    say(f"data   {data.folder}: {there:,} tokens, seen {tokens / there:.2f} times")
    say(f"steps  {steps:,} of {B} × {length} tokens; {place.world} × {size} sequences at once")
    say(f"on     {place.device.type}, {torch.get_num_threads()} threads a process, {args['dtype']}")


def begin_from(run: str, model: Model, data: PackedData, args) -> None:
    """Gives the model another run's newest weights."""
    other, _, config = load_run(run)
    if config["tokenizer"]["sha256"] != data.manifest["tokenizer_sha256"]:
        fail(
            f"--init-from {run} has another tokenizer than the rows; pack them with {run}/tokenizer.json"
        )
    try:
        model.load_state_dict(other.state_dict())
    except RuntimeError as e:
        fail(f"--init-from {run} is another model: {str(e).splitlines()[-1].strip()}")
    if config["data"]["sha256"] == data.sha256 and config["args"]["seed"] == args.seed:
        note(f"this run will see the same rows in the same order as {run} did; try another --seed")


@contextlib.contextmanager
def catch_signals():
    """Within, SIGTERM and SIGINT only append their number to the list that is yielded."""
    caught: list[int] = []
    before = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_model(cfg: ModelConfig, args) -> Model:
    residual_dtype = None if args.residual_dtype == "auto" else torch.float32
    model = Model(cfg, getattr(torch, args.dtype), residual_dtype, args.checkpoint_loops)
    model.init_weights(args.seed)
    return model


def is_due(every: int, step: int) -> bool:
    """Whether a task run each `every` steps is due after this one; 0: never."""
    return every > 0 and step > 0 and step % every == 0


def record_step(log: RunLog, step: int, entry: dict, totals: dict) -> tuple[bool, bool]:
    """Reads a step's numbers, which waits for the device -> whether they are finite, and whether a
    rank was asked to stop.
    """
    values = torch.stack(list(totals.values())).tolist()
    numbers = dict(zip(totals, values))
    stopped = numbers.pop("stop") > 0
    norm2 = numbers.pop("grad_norm2")
    good = math.isfinite(norm2) and math.isfinite(numbers["loss"])
    numbers["grad_norm"] = math.sqrt(norm2) if good else norm2
    if not good:
        numbers["skipped"] = True
        log.place.say(
            f"step {step}: loss {numbers['loss']}, gradient {norm2}: skipped on all ranks"
        )
    log.step(step, entry | numbers)
    return good, stopped


def train_steps(args, place: Place, data: PackedData, model, optimizer, yardsticks, log) -> int:
    """The loop over steps -> the last one: the end, or where a signal stopped it."""
    cfg, steps = model.cfg, log.steps
    end = min(steps, args.stop_at or steps)
    step_tokens = args.batch_size * cfg.seq_len
    begun_with = {name: p.detach().double().sum() for name, p in model.named_parameters()}
    bad, stopped = 0, False
    step = log.first
    batch = next_batch(data, cfg, args, step, place)
    with catch_signals() as caught:
        while step < end and not stopped:
            # before the next step, so that a resumed run measures what a kill cut off
            if is_due(args.eval_every, step):
                depths = args.eval_depths or []
                found = evaluate(model, yardsticks.held_out, depths, args.device_batch_size, place)
                log.record("eval", step, **found)
            if is_due(args.core_every, step):
                log.record("core", step, **evaluate_core(model, yardsticks, place))
            if step == log.first + 20:
                note_idle_parameters(model, optimizer, begun_with, place)
                gc.freeze()
                gc.disable()  # a collection would stall all ranks

            rates = schedule(step, steps, args)
            shares = accumulate(model, batch, args.device_batch_size, step_tokens)
            shares["stop"] = torch.full((), float(len(caught)), device=place.device)
            totals = optimizer.step(rates, shares)  # summed over ranks, so all stop together
            entry = {"lr_multiple": rates.lr, "depth_mean": batch.depth_mean}
            step += 1
            batch = next_batch(data, cfg, args, step, place)  # while a GPU computes
            good, stopped = record_step(log, step, entry, totals)

            bad = 0 if good else bad + 1
            if bad == BAD_STEPS:
                fail(
                    f"{bad} steps in a row, up to step {step}, had no finite loss or gradient; lower "
                    f"--adam-lr (now {args.adam_lr:g}) and --muon-lr"
                )
            due = is_due(args.save_every, step) or is_due(args.keep_every, step)
            if due or stopped or step == end:
                save_checkpoint(log.folder, step, model, optimizer, place.rank, args.keep_every)
                gc.collect()  # torch's recomputed loops leave garbage
    gc.enable()
    return step


def main(argv=None):
    # 1. settings
    args = parse_args(argv)
    cfg = model_config(args)
    steps = settle(args, cfg)

    # 2. ranks and device
    place = connect(args.device)
    args.device = place.device.type
    settle_device_batch(args, place.world)
    compiled = will_compile(args, steps, place)

    # 3. data; the run directory; the model
    data = PackedData(args.data or default_rows(cfg, place))
    data.check(cfg.seq_len, cfg.vocab_size, args.batch_size)
    yardsticks = load_yardsticks(data, args, place)
    folder = Path(args.out)
    begun = begun_config(folder, args.resume)
    if args.dtype == "auto":
        args.dtype = begun["dtype"] if begun else best_dtype(place.device)
    config = run_config(args, cfg, data, steps, place)
    if begun:
        check_same_settings(folder, begun, config)
        config["id"] = begun["id"]
    model = make_model(cfg, args)
    if args.init_from and not begun:
        begin_from(args.init_from, model, data, args)
    model.to(place.device)

    # 4. optimiser; where to begin. On a CPU its update is too short to be worth compiling.
    optimizer = make_optimizer(model, args, place, compiled and place.is_gpu)
    first = restore(folder, model, optimizer)
    if first == steps and is_finished(folder):
        place.say(f"{folder} is finished")
        disconnect(place)
        return

    # 5. compile; find what fits; announce
    if compiled or place.is_gpu:
        warm_up(model, optimizer, args, place, compiled)
    log = RunLog(config, first, data.folder / "tokenizer.json", place)
    announce(config, data, place)

    # 6. the loop, and the validation at its end
    step = train_steps(args, place, data, model, optimizer, yardsticks, log)
    if step == steps:
        if is_due(args.core_every, step):
            log.record("core", step, **evaluate_core(model, yardsticks, place))
        depths = args.eval_depths or FINAL_DEPTHS
        found = evaluate(model, yardsticks.held_out, depths, args.device_batch_size, place)
        log.record("eval", step, **found, final=True)
    else:
        place.say(f"stopped after step {step} of {steps} and saved; --resume continues")
    log.close()
    disconnect(place)
    if step < min(steps, args.stop_at or steps):  # by a signal: torchrun must not wait for others
        sys.exit(130)


if __name__ == "__main__":
    main()
