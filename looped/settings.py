"""From the given flags to a run's settings: defaults that depend on others, and combinations that
are refused.
"""

import math
from importlib.util import find_spec

from looped.console import flag, positive_ints, refuse
from looped.depth import refuse_too_deep
from looped.files import file_hash
from looped.memory import device_batches

FINAL_DEPTHS = "1,2,4,8,16"
MUON_FLAGS = ("muon_lr", "momentum_warmup", "weight_decay")
# Network flags that only a model with a loop heeds, and of them those of Parcae's linear path, which
# the injections of WITHOUT_DECAY do not heed.
LOOP_FLAGS = {
    "gain",
    "injection",
    "input_matrix",
    "readout",
    "mu_rec",
    "mu_bwd",
    "sampling",
    "granularity",
    "mechanism",
    "streams",
    "prelude_norm",
    "state_init",
    "ssm_decay",
}
DIAGONAL_FLAGS = ("gain", "input_matrix", "ssm_decay")
WITHOUT_DECAY = ("add", "concat", "none")


def unheeded(n_core: int) -> set[str]:
    """Network settings that change nothing in a model of so many core layers."""
    return set() if n_core else LOOP_FLAGS


def refuse_idle(given: dict, names, why: str) -> None:
    """Refuses flags in names that were given (not None) although they would change nothing."""
    idle = [flag(name) for name in given if name in names and given[name] is not None]
    if idle:
        refuse(f"{' '.join(idle)} has no meaning {why}; leave it out")


def check_meaning(given: dict, settings: dict) -> None:
    """Refuses flags that were given and would change nothing in a network of these settings."""
    if settings["n_core"] == 0:
        refuse_idle(given, LOOP_FLAGS, "without a loop (--n-core 0)")
    if settings["injection"] in WITHOUT_DECAY:
        refuse_idle(given, DIAGONAL_FLAGS, f"with --injection {settings['injection']}")
    if settings["mechanism"] != "hyper":
        refuse_idle(given, ["streams"], "without --mechanism hyper")
    if settings["sampling"] == "poisson-full" and settings["mu_bwd"] not in (0, settings["mu_rec"]):
        refuse_idle(given, ["mu_bwd"], "with --sampling poisson-full: all loops carry gradient")


def settle(args, cfg, recipe, world: int) -> int:
    """Fills in what was not given, from the recipe and from other settings; -> the number of steps.

    recipe: train.py's Recipe, whose fields are defaults of the flags of their names. The device
    batch is left to looped/memory.py.
    """
    if args.tokens is not None and args.flops is not None:
        refuse("--tokens and --flops both set the length of the run; give one of them")
    if args.flops is not None:
        args.tokens = args.flops / cfg.flops_per_token()
    if args.wandb and not find_spec("wandb"):
        refuse("--wandb needs the package wandb; pip install wandb, or leave it out")
    if args.checkpoint_loops and cfg.n_core == 0:
        refuse("--checkpoint-loops has no meaning without a loop (--n-core 0); leave it out")
    settle_optimizer(args, recipe)
    for name, default in vars(recipe).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    rows = args.device_batch_size or 1
    if args.batch_size % (world * rows):
        advice = f"--batch-size {math.ceil(args.batch_size / (world * rows)) * world * rows}"
        if args.batch_size % world == 0:
            most = min(rows, args.batch_size // world)
            advice = f"--device-batch-size {device_batches(most, args.batch_size, world)[0]}"
        refuse(
            f"--batch-size {args.batch_size} is not a multiple of ranks × device batch = "
            f"{world} × {rows}; try {advice}"
        )
    steps = round(args.tokens / (args.batch_size * cfg.seq_len))
    if steps < 1:
        given = f"--flops {args.flops:g}" if args.flops else f"--tokens {args.tokens:g}"
        refuse(f"{given} is less than one step of {args.batch_size} × {cfg.seq_len} tokens")
    check_ramps(args, steps)
    settle_evaluation(args, cfg, steps)
    return steps


def settle_optimizer(args, recipe) -> None:
    """Weight decay and momentum warm-up of the optimiser in use; refuses flags of the other."""
    optimizer = args.optimizer or recipe.optimizer
    if optimizer == "adamw":
        refuse_idle(vars(args), MUON_FLAGS, "with --optimizer adamw")
        args.momentum_warmup = 0
    elif optimizer == "muon" and args.muon_lr is None and recipe.muon_lr == 0:
        why = f"the recipe of {args.preset} has none; try --muon-lr 8e-3"
        refuse(f"--optimizer {optimizer} needs a rate, and {why}")
    if args.weight_decay is None:
        args.weight_decay = 0.0 if optimizer == "adamw" else 0.2


def ramp_steps(length: float, steps: int) -> float:
    """A warm-up or cool-down in steps, given as a fraction of the run if at most 1."""
    return length * steps if length <= 1 else length


def check_ramps(args, steps: int) -> None:
    """Refuses a warm-up and cool-down with which the learning rates would not reach their peaks."""
    warmup = ramp_steps(args.warmup, steps)
    cooldown = ramp_steps(args.cooldown, steps)
    if warmup + cooldown > steps:
        refuse(
            f"--warmup {args.warmup:g} and --cooldown {args.cooldown:g} are {warmup:g} and "
            f"{cooldown:g} steps, more than the run's {steps}; try --warmup 0.1 --cooldown 0.5"
        )


def settle_evaluation(args, cfg, steps: int) -> None:
    if args.eval_tokens < cfg.seq_len:
        refuse(f"--eval-tokens {args.eval_tokens:g} is less than a row of {cfg.seq_len} tokens")
    if args.eval_every == 0:
        args.eval_every = math.ceil(steps / 5)
    refuse_too_deep("--eval-depths", args.eval_depths or [])
    if not args.core_every:
        refuse_idle(vars(args), ["bundle"], "without --core-every")


def eval_depths(args, cfg, final: bool) -> list[int]:
    """Depths of a validation: mu_rec and those asked for."""
    if cfg.n_core == 0:
        return [0]
    usual = positive_ints(FINAL_DEPTHS) if final else []
    return sorted({cfg.mu_rec, *(args.eval_depths or usual)})


def check_rows(data, cfg, batch_size: int | None) -> None:
    """Refuses packed rows of another tokenizer, length or vocabulary, or too few for one step.

    batch_size: None if no step is to be taken.
    """
    folder = data.folder
    packed = data.manifest
    if file_hash(folder / "tokenizer.json") != packed["tokenizer_sha256"]:
        refuse(f"{folder}/tokenizer.json is not the tokenizer of these rows; run pack again")
    for name in ("seq_len", "vocab_size"):
        wanted = getattr(cfg, name)
        if packed[name] != wanted:
            advice = f"try {flag(name)} {packed[name]} or pack again"
            refuse(
                f"{folder} was packed with {name} {packed[name]}, the model has {wanted}; {advice}"
            )
    there = data.rows("train")
    if batch_size and packed["complete"] and there < batch_size:
        advice = f"give more text, or try --batch-size {there}"
        refuse(
            f"{folder} has {there} training rows, fewer than --batch-size {batch_size}; {advice}"
        )
