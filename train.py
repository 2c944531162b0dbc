"""
Trains a looped language model, or its flat twin, on packed rows of tokens.

    python train.py                                                        # the small model, CPU
    python train.py --preset parcae-140m --gain zoh --data data/fineweb-edu-v32768/rows-2048-crop
    torchrun --standalone --nproc_per_node=8 train.py --preset parcae-140m ...
    torchrun --nnodes=2 --node-rank=0 --master-addr=FIRST --nproc_per_node=8 train.py ...
        (on the second node --node-rank=1)

What a step sees (rows, depths, initial states) depends only on (seed, step, sequence in the step), not on
the number of ranks or the micro-batch: --batch-size is the optimiser's batch, --device-batch-size only has
to fit in memory. A run directory holds config.json, log.jsonl, the tokenizer and the checkpoints;
`--resume` continues it. What happens before the first step is in launch.py.
"""

import dataclasses
import gc
import json
import math
import os
import sys
import time
from argparse import BooleanOptionalAction
from dataclasses import dataclass
from pathlib import Path

# Before torch is loaded. OpenMP's threads spin while they wait for each other; beside another busy
# program that can stall a step for seconds. Make them sleep soon (results/cpu.md).
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import numpy as np
import torch

from dataloader import PackedData
from launch import (
    DEVICE_BATCH,
    announce,
    begin_from,
    catch_signals,
    default_rows,
    device_batch,
    note_idle_parameters,
    parameter_sums,
    refuse_idle_flags,
    run_config,
    steps_for,
    warm_up,
    will_compile,
)
from looped.common import Parser, fail, ints, non_negative_float, non_negative_int, positive_int
from looped.depth import sample_depths, share_out
from looped.machine import Rank, best_dtype, connect, disconnect, to_device
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
from model import CHOICES, PRESETS, Model, ModelConfig
from muon import AdamW, Muon, Optimizer, Rates

FINAL_DEPTHS = [1, 2, 4, 8, 16]  # of the validation at the end, beside mu_rec
BAD_STEPS = 3  # consecutive steps without a finite loss or gradient that end a run
GC_OFF_AFTER = 20  # steps of a process, after which its Python objects stay


# -------------------------------------------------------------------------------------------------
# Recipes


@dataclass
class Recipe:
    """What a preset is trained with; each field is the default of the flag with the same name."""

    tokens: float
    adam_lr: float
    muon_lr: float
    batch_size: int = 256
    optimizer: str = "muon"
    warmup: float = 0
    cooldown: float = 0.5
    # the paper's table prints a momentum of 0.95 throughout; its authors' code has this rise
    momentum_warmup: int = 300  # steps
    weight_decay: float = 0.2
    eval_tokens: float = 10.5e6


# paper, table "Hyperparameter"
PARCAE_RECIPES = {
    "140m": Recipe(tokens=11.2e9, adam_lr=8e-3, muon_lr=8e-3),
    "370m": Recipe(tokens=29.6e9, adam_lr=8e-3, muon_lr=8e-3),
    "770m": Recipe(tokens=61.6e9, adam_lr=6e-3, muon_lr=8e-3),
    "1.3b": Recipe(tokens=104e9, adam_lr=6e-3, muon_lr=8e-3),
}
# chosen for a few minutes on a CPU, see LOG.md
NANO_RECIPE = Recipe(
    tokens=6.9e6, batch_size=16, adam_lr=6.4e-2, muon_lr=2e-2, momentum_warmup=0, eval_tokens=400e3
)
# paper, "Parcae and RDM comparison"; batch, row length and tokens are our choice
RDM_ADAMW = {"optimizer": "adamw", "muon_lr": 0, "warmup": 4096, "cooldown": 4096}
RDM_RECIPES = {
    "100m": Recipe(tokens=10e9, adam_lr=4e-4, **RDM_ADAMW),
    "350m": Recipe(tokens=10e9, adam_lr=2e-4, **RDM_ADAMW),
}
# ours altogether, see LOG.md
RDM_NANO_RECIPE = dataclasses.replace(
    NANO_RECIPE, optimizer="adamw", muon_lr=0, adam_lr=6.4e-3, warmup=50
)
RECIPES = {
    "nano": NANO_RECIPE,
    "transformer-nano": NANO_RECIPE,
    "parcae-rdm-nano": RDM_NANO_RECIPE,
    "rdm-nano": RDM_NANO_RECIPE,
}
for scale, recipe in PARCAE_RECIPES.items():
    RECIPES |= {f"parcae-{scale}": recipe, f"transformer-{scale}": recipe}
for scale, recipe in RDM_RECIPES.items():
    RECIPES |= {f"parcae-rdm-{scale}": recipe, f"rdm-{scale}": recipe}


# -------------------------------------------------------------------------------------------------
# Flags


# fmt: off
def parse_args(argv=None, prog="train.py", description=__doc__):
    parser = Parser(description=description, prog=prog)
    add = parser.add_argument
    add("--preset", default="nano", choices=PRESETS, metavar="NAME",
        help="network and recipe, one of " + ", ".join(PRESETS) + " (default: %(default)s)")

    add = parser.add_argument_group("run").add_argument
    add("--out", help="run directory (default: runs/PRESET-GAIN-sSEED; GAIN where there is one)")
    add("--data",
        help="folder of packed rows, from dataloader.py pack (default: Python's own library)")
    add("--rows", type=positive_int,
        help="training rows to use, a random part that is the same for all seeds (default: all)")
    add("--seed", type=int, default=0,
        help="seed of weights, row order, depths and initial states (default: %(default)s)")
    add("--tokens", type=float, help="training tokens (default: the recipe's)")
    add("--flops", type=float,
        help="training FLOPs, as they are run; they decide the number of steps")
    add("--stop-at", type=positive_int,
        help="save and stop after this step; the schedule is unchanged")
    add("--init-from", help="run whose newest weights to start from: new optimiser, step 0")
    add("--resume", action="store_true", help="continue the run directory if it exists")
    add("--save-every", type=non_negative_float, default=20,
        help="minutes between checkpoints, of which the newest two stay; 0: one at the end "
             "(default: %(default)s)")
    add("--keep-every", type=non_negative_int, default=0,
        help="steps between checkpoints that stay (default: 0, never)")
    add("--dry-run", action="store_true",
        help="train nothing, print what config.json would say: FLOPs, steps, parameters …")
    add("--wandb", action="store_true", help="also log to Weights & Biases, if installed")

    add = parser.add_argument_group("optimiser", "defaults: the recipe's").add_argument
    add("--batch-size", type=positive_int, help="sequences per optimiser step")
    add("--optimizer", choices=OPTIMIZERS,
        help="muon: Muon for the blocks' matrices, AdamW for the rest; adamw: AdamW for all, "
             "without epsilon, each tensor's updates clipped")
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
    add("--weight-decay", type=float,
        help="weight decay of Muon, only where update and weight agree in sign; falls linearly to 0")
    add("--clip", type=float, default=1.0,
        help="largest norm of the gradient (default: %(default)s)")

    add = parser.add_argument_group("evaluation").add_argument
    add("--eval-every", type=non_negative_int,
        help="steps between validations; 0: one at the end (default: a fifth of the run)")
    add("--eval-tokens", type=float, help="validation tokens (default: the recipe's)")
    add("--eval-depths", type=ints,
        help="depths of every validation beside mu_rec, e.g. 1,4,8; each costs a forward pass "
             "(default: none in training, 1,2,4,8,16 at its end)")

    network = parser.add_argument_group("network", "override the preset")
    for field in dataclasses.fields(ModelConfig):
        name = "--" + field.name.replace("_", "-")
        text = field.metadata["help"]
        if field.type is bool:
            network.add_argument(name, action=BooleanOptionalAction, help=text)
        else:
            choices = CHOICES.get(field.name)
            network.add_argument(name, type=field.type, choices=choices, help=text)

    add = parser.add_argument_group("machine", "these change no weights beyond rounding").add_argument
    add("--device", default="auto", choices=("auto", "cuda", "mps", "cpu"),
        help="auto: an NVIDIA GPU or the CPU; mps, an Apple GPU, is untried")
    add("--device-batch-size", type=positive_int,
        help=f"sequences per forward pass and device (default: {DEVICE_BATCH}, or what fits)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"),
        help="dtype of activations (auto: the faster one)")
    add("--residual-dtype", default="auto", choices=("auto", "float32"),
        help="dtype of the residual stream and the loop's state (auto: that of the activations; "
             "the authors use float32)")
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
        return ModelConfig(**settings | given)
    except ValueError as e:
        fail(str(e))


def settle(args, cfg: ModelConfig, rank: Rank) -> None:
    """Fills in what was not given. From here on nobody writes to args."""
    recipe = RECIPES[args.preset]
    refuse_idle_flags(args, cfg, args.optimizer or recipe.optimizer)
    for name, default in vars(recipe).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    step_tokens = args.batch_size * cfg.seq_len
    if args.flops is not None:
        args.steps = steps_for(args.flops, cfg, args.seed, args.batch_size)
        args.tokens = args.steps * step_tokens
    else:
        args.steps = round(args.tokens / step_tokens)
    if args.steps < 1:
        fail(f"--tokens {args.tokens:g} is less than a step's {step_tokens}; try {step_tokens}")
    if args.eval_every is None:
        args.eval_every = math.ceil(args.steps / 5)
    if args.out is None:
        has_gain = cfg.n_core and cfg.injection == "diagonal"
        gain = f"-{cfg.gain}" if has_gain else ""
        args.out = f"runs/{args.preset}{gain}-s{args.seed}"
    args.device = rank.device.type
    args.device_batch_size = device_batch(args.batch_size, args.device_batch_size, cfg, rank)
    args.data = args.data or default_rows(cfg, rank)
    if args.dtype == "auto":  # a run that is continued keeps its dtype on any machine
        begun = begun_config(Path(args.out), args.resume or args.dry_run)
        args.dtype = begun["dtype"] if begun else best_dtype(rank.device)


# -------------------------------------------------------------------------------------------------
# The schedule


def schedule(step: int, args) -> Rates:
    """Learning rates and weight decay of a step as multiples of their peaks: the first rise, stay and fall
    linearly, the second falls linearly throughout; neither is 0 at any step of the run. Muon's momentum
    itself, which may rise from 0.85 to 0.95.
    """
    rise = (step + 1) / ramp_steps(args.warmup, args.steps)
    fall = (args.steps - step) / ramp_steps(args.cooldown, args.steps)
    momentum = 0.95
    if args.momentum_warmup:
        momentum = 0.85 + 0.1 * min(1.0, step / args.momentum_warmup)
    left = (args.steps - step) / args.steps
    return Rates(lr=min(1.0, rise, fall), weight_decay=left, momentum=momentum)


def ramp_steps(length: float, steps: int) -> float:
    """A warm-up or cool-down in steps, one at least; given as a fraction of the run if at most 1."""
    if length <= 1:
        length = length * steps
    return max(length, 1)


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
    """AdamW for everything, without epsilon, each tensor's updates clipped: as the RDM is trained."""
    rule = AdamW(args.adam_lr, betas=(0.9, 0.95), eps=0.0, update_clip=True, compile=compiled)
    return [(rule, named)]


OPTIMIZERS = {"muon": muon_groups, "adamw": adamw_groups}


def make_optimizer(model: Model, args, rank: Rank, compiled: bool) -> Optimizer:
    """The optimiser of all parameters that are not frozen (`requires_grad_(False)`)."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = OPTIMIZERS[args.optimizer](named, args, compiled)
    return Optimizer(groups, args.clip, rank.number, rank.world)


# -------------------------------------------------------------------------------------------------
# The next batch, and a step


@dataclass
class Batch:
    """A rank's sequences of a step, deepest first."""

    tokens: torch.Tensor  # (local, T + 1) int64, on the device
    keys: torch.Tensor  # (local,) int64: each sequence's randomness in the loop
    n: np.ndarray  # (local,): loops without gradient
    k: np.ndarray  # (local,): loops with gradient
    depth_mean: float  # over all ranks' sequences

    def micro_batches(self, size: int):
        """Arguments of Model.loss, for `size` sequences at once."""
        for start in range(0, len(self.tokens), size):
            part = slice(start, start + size)
            tokens = self.tokens[part]
            ids = tokens[:, :-1]
            targets = tokens[:, 1:]
            yield ids, targets, self.keys[part], self.n[part], self.k[part]


def next_batch(data: PackedData, cfg: ModelConfig, args, step: int, rank: Rank) -> Batch:
    B = args.batch_size
    n, k = sample_depths(cfg, args.seed, step, B, progress=step / args.steps)
    mine = share_out(n, k, rank.world)[rank.number]
    rows = data.stream_ids(args.seed, step * B, B)
    tokens = torch.from_numpy(data.get("train", rows[mine]))
    tokens = to_device(tokens, rank.device)
    keys = hash_keys(args.seed, FOR_STATE, each=step * B + mine)
    keys = to_device(keys, rank.device)
    depth_mean = float((n + k).mean())
    return Batch(tokens, keys, n[mine], k[mine], depth_mean)


def accumulate(model: Model, batch: Batch, device_batch_size: int, step_tokens: int) -> dict:
    """Gradients of this rank's sequences, so many at once -> its part of the step's mean loss and
    statistics, on the device. Nothing waits for the device.
    """
    sums = {}
    for ids, targets, keys, n, k in batch.micro_batches(device_batch_size):
        loss, stats = model.loss(ids, targets, keys, n, k)
        (loss / step_tokens).backward()
        for name, value in {"loss": loss.detach(), **stats}.items():
            sums[name] = sums.get(name, 0.0) + value / step_tokens
    return sums


def record_step(log: RunLog, step: int, entry: dict, summed: dict) -> dict:
    """Logs a step's numbers, and returns them; to read them waits for the device."""
    values = torch.stack(list(summed.values())).tolist()
    numbers = dict(zip(summed, values))
    norm2 = numbers.pop("grad_norm2")
    norm = math.sqrt(norm2) if math.isfinite(norm2) else norm2
    numbers["grad_norm"] = norm
    if not numbers["ok"]:
        log.rank.say(f"step {step}: loss {numbers['loss']}, gradient {norm}: skipped on all ranks")
        entry = entry | {"skipped": True}
    logged = {name: x for name, x in numbers.items() if name not in ("ok", "stop", "save")}
    log.step(step, entry | logged)
    return numbers


def is_due(every: int, step: int) -> bool:
    """True every `every` steps, not at step 0; never if `every` is 0."""
    return every > 0 and step > 0 and step % every == 0


# -------------------------------------------------------------------------------------------------
# Evaluation


def evaluate(
    model: Model, held_out: HeldOut, depths: list, device_batch_size: int, rank: Rank
) -> dict:
    """Validation loss at mu_rec and these depths, and norms of the linear path."""
    depths = sorted({model.cfg.mu_rec, *depths}) if model.cfg.n_core else [0]
    result = validate(model, held_out, depths, device_batch_size, rank)
    losses = [f"{depth}: {loss:.4f}" for depth, loss in result["loss"].items()]
    rank.say(f"val loss by depth  {'  '.join(losses)}  ({held_out.tokens:,} tokens)")
    return result | model.spectra()


# -------------------------------------------------------------------------------------------------
# The loop


def train_steps(
    args, data: PackedData, model: Model, optimizer: Optimizer, log: RunLog, device_batch_size: int
):
    """Trains until the last step, --stop-at or a signal -> steps made so far."""
    rank = log.rank
    held_out = HeldOut(data, args.eval_tokens, rank.device)
    step_tokens = args.batch_size * data.seq_len
    end = min(args.steps, args.stop_at or args.steps)
    first_sums = parameter_sums(model)
    saved_at = time.monotonic()
    bad_steps, stopped = 0, False
    step = log.first  # steps made so far
    batch = next_batch(data, model.cfg, args, step, rank)
    with catch_signals() as caught:
        while True:
            # evaluate before the next step: a run that was killed in its evaluation repeats it on --resume
            final = step == args.steps
            done = stopped or step >= end
            if final or (is_due(args.eval_every, step) and not done):
                depths = args.eval_depths or (FINAL_DEPTHS if final else [])
                result = evaluate(model, held_out, depths, device_batch_size, rank)
                log.record("eval", step, **result, final=final)
            if done:
                break
            if step == log.first + GC_OFF_AFTER:
                note_idle_parameters(model, optimizer, first_sums, rank)
                gc.freeze()  # a collection would stall all ranks, and what lives now lives to the end
                gc.disable()

            rates = schedule(step, args)
            sums = accumulate(model, batch, device_batch_size, step_tokens)
            # one all-reduce carries the gradient's norm, the statistics, "stop" and "save", so that all
            # ranks skip, stop and save together
            save_due = args.save_every > 0 and time.monotonic() - saved_at > 60 * args.save_every
            requests = {"stop": len(caught), "save": save_due and rank.number == 0}
            for name, x in requests.items():
                sums[name] = torch.tensor(float(x), device=rank.device)
            summed = optimizer.step(rates, sums)
            entry = {"lr_multiple": rates.lr, "depth_mean": batch.depth_mean}
            step += 1
            batch = next_batch(data, model.cfg, args, step, rank)  # while a GPU computes
            numbers = record_step(log, step, entry, summed)

            stopped = numbers["stop"] > 0
            bad_steps = 0 if numbers["ok"] else bad_steps + 1
            if bad_steps == BAD_STEPS:
                fail(
                    f"{bad_steps} steps in a row, up to step {step}, had no finite loss or gradient; "
                    f"lower --adam-lr (now {args.adam_lr:g}) and --muon-lr"
                )
            if numbers["save"] or is_due(args.keep_every, step) or stopped or step == end:
                save_checkpoint(log.folder, step, model, optimizer, rank, args.keep_every)
                saved_at = time.monotonic()
                gc.collect()  # torch's recomputed loops leave garbage
    gc.enable()
    return step


# -------------------------------------------------------------------------------------------------
# The run


def prepare(argv):
    """-> args, the network, this rank, the rows and config.json of a run."""
    args = parse_args(argv)
    cfg = model_config(args)
    rank = connect(args.device)
    settle(args, cfg, rank)
    data = PackedData(args.data, args.rows)
    data.check(cfg.seq_len, cfg.vocab_size, args.batch_size)
    return args, cfg, rank, data, run_config(args, cfg, data, rank)


def planned(argv) -> dict:
    """config.json as a run with these flags would have it (for tools/arms.py)."""
    *_, config = prepare([*argv, "--dry-run"])
    return config


def make_model(cfg: ModelConfig, args) -> Model:
    residual_dtype = None if args.residual_dtype == "auto" else torch.float32
    model = Model(cfg, getattr(torch, args.dtype), residual_dtype, args.checkpoint_loops)
    model.init_weights(args.seed)
    return model


def main(argv=None):
    args, cfg, rank, data, config = prepare(argv)
    if args.dry_run:
        rank.say(json.dumps(config, indent=1))
        return

    # a new run, or one to continue
    folder = Path(args.out)
    begun = begun_config(folder, args.resume)
    if begun:
        check_same_settings(folder, begun, config)
        config["id"] = begun["id"]
    model = make_model(cfg, args)
    if args.init_from and not begun:
        begin_from(args.init_from, model, data, args)
    model.to(rank.device)

    # its optimiser and newest checkpoint. On a CPU the update is too short to be worth compiling.
    compiled = will_compile(args.compile, args.steps, rank)
    optimizer = make_optimizer(model, args, rank, compiled and rank.is_gpu)
    first = restore(folder, model, optimizer)
    if first == args.steps and is_finished(folder):
        rank.say(f"{folder} is finished")
        disconnect(rank)
        return

    device_batch_size = args.device_batch_size
    if compiled or rank.is_gpu:
        device_batch_size = warm_up(model, optimizer, args, rank, compiled)
    rank.barrier()  # all have looked whether the run exists, before rank 0 makes it
    log = RunLog(config, first, data.folder / "tokenizer.json", rank)
    announce(config, device_batch_size, rank)
    step = train_steps(args, data, model, optimizer, log, device_batch_size)
    if step < args.steps:
        rank.say(f"stopped after step {step} of {args.steps} and saved; --resume continues")
    log.close()
    disconnect(rank)
    if step < min(args.steps, args.stop_at or args.steps):  # by a signal
        sys.exit(130)  # not 0, so that torchrun ends the other ranks


if __name__ == "__main__":
    main()
