"""From the given flags to a run's settings: defaults that depend on others, and combinations that
are refused.
"""

import math
from importlib.util import find_spec

from looped.console import counts, flag, refuse
from looped.files import file_hash
from looped.memory import device_batches

DEVICE_BATCH = 32  # sequences, where memory allows and nothing else is asked for
FINAL_DEPTHS = "1,2,4,8,16"
MUON_FLAGS = ("muon_lr", "momentum_warmup", "weight_decay")
MAX_MU_REC = 10_000  # drawing a depth takes as long as its mean
# Network flags that only a model with a loop heeds, and of them those of the diagonal injection.
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


def unheeded(n_core: int) -> set[str]:
    """Network settings that change nothing in a model of so many core layers."""
    return set() if n_core else LOOP_FLAGS


def settle(args, cfg, recipe, world: int) -> int:
    """Fills in what was not given, from the recipe and from other settings; -> the number of steps.

    recipe: train.py's Recipe, whose fields are defaults of the flags of their names.
    """
    if args.tokens is not None and args.flops is not None:
        refuse("--tokens and --flops both set the length of the run; give one of them")
    if args.flops is not None:
        args.tokens = args.flops / cfg.flops_per_token()
    if args.wandb and not find_spec("wandb"):
        refuse("--wandb needs the package wandb; pip install wandb, or leave it out")
    settle_optimizer(args, recipe)
    for name, default in vars(recipe).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    settle_batch(args, world)
    steps = round(args.tokens / (args.batch_size * cfg.seq_len))
    if steps < 1:
        length = f"--tokens {args.tokens:g} is"
        if args.flops is not None:
            length = f"--flops {args.flops:g} is {args.tokens:g} tokens,"
        refuse(f"{length} less than one step of {args.batch_size} × {cfg.seq_len} tokens")
    check_ramps(args, steps)
    settle_evaluation(args, cfg, steps)
    return steps


def settle_optimizer(args, recipe) -> None:
    """Refuses flags of the optimiser that is not used."""
    optimizer = args.optimizer or recipe.optimizer
    if optimizer == "adamw":
        given = [name for name in MUON_FLAGS if getattr(args, name) is not None]
        why = f"is Muon's, and has no meaning with --optimizer {optimizer}; leave it out"
        refuse_given(MUON_FLAGS, given, why)
        args.momentum_warmup = 0
    if args.weight_decay is None:
        args.weight_decay = 0.0 if optimizer == "adamw" else 0.2
    if optimizer == "muon" and args.muon_lr is None and recipe.muon_lr == 0:
        why = f"the recipe of {args.preset} has none; try --muon-lr 8e-3"
        refuse(f"--optimizer muon needs a rate, and {why}")


def refuse_given(names, given, why: str) -> None:
    """Refuses flags in names that were given although they would change nothing."""
    idle = [flag(name) for name in given if name in names]
    if idle:
        refuse(f"{' '.join(idle)} {why}")


def settle_batch(args, world: int) -> None:
    """The device batch, which must divide each rank's share of the batch."""
    if args.device_batch_size is None:
        args.device_batch_size = max(
            device_batches(DEVICE_BATCH, args.batch_size, world), default=1
        )
    unit = world * args.device_batch_size
    if args.batch_size % unit:
        fits = math.ceil(args.batch_size / unit) * unit
        refuse(
            f"--batch-size {args.batch_size} is not a multiple of ranks × device batch = "
            f"{world} × {args.device_batch_size}; try {fits}"
        )


def ramp_steps(length: float, steps: int) -> float:
    """A warm-up or cool-down in steps, given as a fraction of the run if at most 1."""
    return length * steps if length <= 1 else length


def check_ramps(args, steps: int) -> None:
    """Refuses a warm-up and cool-down that exceed the run: the learning rates would never reach
    their peaks.
    """
    warmup = ramp_steps(args.warmup, steps)
    cooldown = ramp_steps(args.cooldown, steps)
    if warmup + cooldown > steps:
        refuse(
            f"--warmup {args.warmup:g} and --cooldown {args.cooldown:g} are {warmup:g} and "
            f"{cooldown:g} steps, more than the run's {steps}: the learning rates would not reach "
            "their peaks; try --warmup 0.1 --cooldown 0.5"
        )


def settle_evaluation(args, cfg, steps: int) -> None:
    if args.eval_tokens < cfg.seq_len:
        refuse(f"--eval-tokens {args.eval_tokens:g} is less than a row of {cfg.seq_len} tokens")
    if args.eval_every == 0:
        args.eval_every = math.ceil(steps / 5)
    if args.eval_depths and max(args.eval_depths) > MAX_MU_REC:
        refuse(f"--eval-depths {max(args.eval_depths)} is more than {MAX_MU_REC:,}")
    if args.bundle and not args.core_every:
        refuse("--bundle has no meaning without --core-every; add it, or leave --bundle out")
    if args.checkpoint_loops and cfg.n_core == 0:
        refuse("--checkpoint-loops has no meaning with --n-core 0: no loop; leave it out")


def eval_depths(args, cfg, final: bool) -> list[int]:
    """Depths of a validation: mu_rec and those asked for."""
    if cfg.n_core == 0:
        return [0]
    usual = counts(FINAL_DEPTHS) if final else []
    return sorted({cfg.mu_rec, *(args.eval_depths or usual)})


def check_meaning(preset: str, given: dict, settings: dict) -> None:
    """Refuses flags that were given and would change nothing in a network of these settings."""
    if settings["n_core"] == 0:
        why = f"has no meaning for --preset {preset} with --n-core 0: no loop"
        refuse_given(LOOP_FLAGS, given, f"{why}; try --n-core 1 --mu-rec 8")
    if settings["injection"] != "diagonal":
        why = f"has no meaning with --injection {settings['injection']}, only with diagonal"
        refuse_given(DIAGONAL_FLAGS, given, f"{why}; leave it out")
    if settings["mechanism"] != "hyper":
        why = f"has no meaning with --mechanism {settings['mechanism']}; try --mechanism hyper"
        refuse_given(["streams"], given, why)
    if settings["sampling"] == "poisson-full" and settings["mu_bwd"] not in (0, settings["mu_rec"]):
        why = "has no meaning with --sampling poisson-full: all loops carry gradient; leave it out"
        refuse_given(["mu_bwd"], given, f"{given.get('mu_bwd')} {why}")
    if settings["mu_rec"] > MAX_MU_REC:
        refuse(f"--mu-rec {settings['mu_rec']} is more than {MAX_MU_REC:,}")


def check_rows(data, cfg, batch_size: int | None) -> None:
    """Refuses packed rows of another tokenizer, length or vocabulary, or too few for one step.

    batch_size: None if no step is to be taken.
    """
    folder = data.folder
    if file_hash(folder / "tokenizer.json") != data.manifest["tokenizer_sha256"]:
        refuse(f"{folder}/tokenizer.json is not the tokenizer of these rows; run pack again")
    found = data.manifest
    misfits = [name for name in ("seq_len", "vocab_size") if found[name] != getattr(cfg, name)]
    if misfits:
        packed = " and ".join(f"{name} {found[name]}" for name in misfits)
        wanted = " and ".join(str(getattr(cfg, name)) for name in misfits)
        flags = " ".join(f"{flag(name)} {found[name]}" for name in misfits)
        refuse(
            f"{folder} was packed with {packed}, the model has {wanted}; try {flags} or pack again"
        )
    there = data.rows("train")
    if batch_size and found["complete"] and there < batch_size:
        advice = f"give more text, or try --batch-size {there}"
        refuse(
            f"{folder} has {there} training rows, fewer than --batch-size {batch_size}; {advice}"
        )
