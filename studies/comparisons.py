"""
The comparisons of the sources as data: every experiment's arms, each a line of train.py flags
with the group that it is compared in and the source's numbers. Sources: the paper (Parcae; Prairie
et al. 2026) and the post (Exact-ZOH; Huang 2026).

At the small scale (`nano`) an arm usually trains 20 tokens for each parameter of the preset of that
name (the RDM's models are smaller); at the others the source's tokens. To add a comparison, write a
function of the scale's name under @experiment(…).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path

import pandas as pd

from tools.arms import Arm
from train import RECIPES

SOURCES = Path(__file__).with_name("sources.csv")  # of: a depth, or a score
SMALL = "nano"
LENGTHS = {"140m": 11.2e9, "370m": 29.6e9, "770m": 61.6e9, "1.3b": 104e9}  # the paper's tokens
TRANSFORMER = ("nano", *LENGTHS)  # sizes of the paper's two setups
RDM = ("nano", "100m", "350m")
UP_TO_80 = (20, 40, 80)  # tokens a parameter at the small scale
ONE_LOOP = "--sampling fixed --mu-rec 1"


@dataclass
class StudyArm(Arm):
    preset: str = "parcae"  # without its size
    flags: str = ""
    tokens: float = 0
    flops: float = 0  # training FLOPs, instead of tokens
    equal_flops: bool = False  # trains the FLOPs that the looped model needs for its tokens
    source: dict = field(default_factory=dict)  # {depth, "mu_rec" or score: the source's number}


@dataclass
class Experiment:
    title: str
    scales: tuple[str, ...]
    arms: Callable[[str], list[StudyArm]]  # of the scale's name
    depths: str = "1,2,4,8,16"  # evaluated
    perplexity: bool = False  # the source's unit: its numbers are shown as their logarithms
    curves: tuple[str, ...] = ()  # over training, beside the losses: of tools.arms
    flags: str = ""  # of all arms
    seeds: int = 4  # at the small scale; 1 at the others
    fits: bool = False  # the page ends in the fits of studies/laws.py


EXPERIMENTS = {}


def experiment(title: str, scales: tuple[str, ...], **fields):
    """Enters the function below it, which makes the arms, into EXPERIMENTS under its name."""

    def enter(arms):
        EXPERIMENTS[arms.__name__] = Experiment(title, scales, arms, **fields)
        return arms

    return enter


def arms_of(name: str, scale: str) -> list[StudyArm]:
    """The arms of an experiment, with the source's numbers."""
    arms = EXPERIMENTS[name].arms(scale)
    known = pd.read_csv(SOURCES, dtype=str, keep_default_na=False).query("experiment == @name")
    if scale not in set(known.scale):
        scale = next(iter(known.scale), scale)  # beside the smallest of the source's
    for number in known[known.scale == scale].itertuples():
        of = int(number.of) if number.of.isdigit() else number.of
        value = number.value
        if EXPERIMENTS[name].perplexity and of in {"mu_rec", *range(99)}:
            value = f"{math.log(float(value)):.3f}"
        for arm in arms:
            if arm.label == number.arm and number.group in ("", arm.group):
                arm.source[of] = value
    return arms


def rows(flags: dict[str, str], group: str = "", **same) -> list[StudyArm]:
    """An arm for each row's flags."""
    return [StudyArm(label, group, flags=text, **same) for label, text in flags.items()]


def length(scale: str, source: float, ratio: float = 20) -> float:
    """Tokens: the source's, or at the small scale those of the recipe, which has 20 a parameter."""
    return RECIPES[SMALL].tokens * ratio / 20 if scale == SMALL else source


# -- the two gains


def no_stochastic_depth(scale) -> str:
    """The post's "no-SD" probe: AdamW's rate is a quarter of the recipe's, Muon's the same."""
    recipe = RECIPES[scale]
    rates = f"--adam-lr {recipe.adam_lr / 4:g} --muon-lr {recipe.muon_lr:g}"
    return f"--sampling fixed --granularity batch {rates} --cooldown 0"


@experiment(
    "Euler against Exact-ZOH (post, Validation Loss)",
    TRANSFORMER,
    seeds=8,
)
def gains(scale):
    """At the small scale with the paper's initial decay √(1/5) and a higher one."""
    recipes = {"Fixed no-SD": no_stochastic_depth(scale), "Paper-style": ""}
    lengths = [*product(recipes, ("0.2B", "0.5B")), ("Paper-style", "11.2B")]
    trained = {f"{name}, {B}": (recipes[name], float(B[:-1]) * 1e9) for name, B in lengths}
    if scale == SMALL:
        trained = {}
        decays = {"0.447": "", "0.9": "--ssm-decay 0.9"}
        for name, ratio, decay in product(recipes, UP_TO_80, decays):
            group = f"{name}, decay {decay}, {ratio} tokens/parameter"
            trained[group] = (f"{recipes[name]} {decays[decay]}", length(scale, 0, ratio))
    arms = []
    for group, (flags, tokens) in trained.items():
        gains = {gain: f"{flags} --gain {gain}" for gain in ("euler", "zoh")}
        arms += rows(gains, group, tokens=tokens)
    return arms


# -- stability


@experiment(
    "Learning rates that each looped model bears (paper, training instability)",
    RDM,
    depths="1,4,8",
    seeds=1,
    curves=("loss", "rho", "state_norm", "residual"),
    flags="--eval-every 50 --save-every 50 --eval-tokens 65536",
)
def stability(scale):
    """The paper's five learning rates; at the small scale, whose models bear more, 16 times as
    large, plus 64 times the highest. The paper's ramps of 4,096 steps each are longer than a run of
    ten tokens a parameter.
    """
    rates = [2e-4, 4e-4, 6e-4, 8e-4, 1e-3]
    factor = 1
    if scale == SMALL:
        rates.append(4e-3)
        factor = 16
    tokens = length(scale, 3.8e9 if scale == "350m" else 1.1e9)  # ten a parameter
    models = [  # of the paper's table, with the highest rate at which each converges
        ("Base (pre-norm concat)", "rdm", "--block prenorm", 2e-4),
        ("Res. Norm (concat)", "rdm", "", 4e-4),
        ("Parcae", "parcae-rdm", "", 1e-3),
    ]
    arms = []
    for (group, preset, block, limit), rate in product(models, rates):
        flags = f"{block} --warmup 0.1 --cooldown 0.1 --adam-lr {rate * factor:g}"
        arm = StudyArm(f"LR {rate * factor:g}", group, [], preset, flags, tokens)
        if rate <= 1e-3:
            arm.source["mu_rec"] = "converges" if rate <= limit else "diverges"
        arms.append(arm)
    return arms


@experiment("Parcae's components one by one (paper, table 3)", TRANSFORMER, depths="1,4,8")
def components(scale):
    """One change a step, each a group. All keep C, except at nano, which has none; nor has nano the
    B that concatenation has.
    """
    batch = "--granularity batch --no-prelude-norm"
    changes = {"RDM: concat, per batch": f"--injection concat {batch}"}
    if scale == SMALL:
        changes["+ constrained Ā"] = f"{batch} --input-matrix"
        changes["without B"] = batch
    else:
        changes["+ constrained Ā"] = batch
    changes["+ per-sequence depth"] = "--no-prelude-norm"
    changes["+ prelude norm"] = "--prelude-norm"
    arms = []
    for step in pairwise(changes):
        flags = {name: changes[name] for name in step}
        arms += rows(flags, step[1].strip("+ "), tokens=length(scale, LENGTHS.get(scale)))
    return arms


# -- against other models


@experiment("Looped against flat (paper, table 4)", TRANSFORMER, perplexity=True)
def baseline(scale):
    """The paper trains 80 tokens a parameter. The last two rows of a group are ours."""
    arms = []
    for budget in UP_TO_80 if scale == SMALL else (80,):
        group = f"{budget} tokens/parameter"
        tokens = length(scale, LENGTHS.get(scale), budget)
        flat = {"group": group, "preset": "transformer", "tokens": tokens}
        arms += [
            StudyArm("Transformer", **flat),
            StudyArm("Parcae", group, tokens=tokens),
            StudyArm("Transformer, Parcae's FLOPs", equal_flops=True, **flat),
            StudyArm("Parcae, one loop", group, flags=ONE_LOOP, tokens=tokens),
        ]
    return arms


@experiment(
    "Looped against flat at 30M tokens of the next size", ("nano",), perplexity=True, seeds=1
)
def bridge(scale):
    """The looped model and its flat twin at twice the width and four times the vocabulary, all else as in `nano`."""
    size = "--vocab-size 4096 --d-model 128 --n-head 2 --d-mlp 512"
    at = {"flags": size, "tokens": 30e6}
    return [StudyArm("Transformer", preset="transformer", **at), StudyArm("Parcae", **at)]


@experiment("What the looped frame costs (no source)", ("nano",))
def frame(scale):
    """What the looped frame (B, C, prelude norm, random start) costs against a Transformer; with
    eight loops, and with one, where looping gives nothing back. Last, what becomes of the decay
    at mu_rec 2.
    """
    paper = "--input-matrix --readout --prelude-norm --state-init like-init"
    changes = {
        "nano": "",
        "with B": "--input-matrix",
        "with C": "--readout",
        "with the prelude norm": "--prelude-norm",
        "with a random start": "--state-init like-init",
        "with all four, the paper's": paper,
        "all loops with gradient": "--mu-bwd 8",
        "one loop": ONE_LOOP,
        "one loop, with B": f"{ONE_LOOP} --input-matrix",
        "one loop, with C": f"{ONE_LOOP} --readout",
        "one loop, with the prelude norm": f"{ONE_LOOP} --prelude-norm",
        "one loop, with a random start": f"{ONE_LOOP} --state-init like-init",
        "one loop, with all four": f"{ONE_LOOP} {paper}",
        "mu_rec 2": "--mu-rec 2",
        "mu_rec 2, both loops with gradient": "--mu-rec 2 --mu-bwd 2",
        "mu_rec 2, random start": "--mu-rec 2 --state-init like-init",
        "mu_rec 2, fixed depth": "--mu-rec 2 --sampling fixed",
    }
    at = {"tokens": length(scale, 0)}
    return [*rows(changes, **at), StudyArm("Transformer", preset="transformer", **at)]


@experiment("Parcae against the RDM (paper, table 1)", RDM, depths="1,4,8,16", perplexity=True)
def rdm(scale):
    """Table 1's models; tools/lm_eval.py gives WikiText and the zero-shot tasks."""
    tokens = length(scale, 10e9)
    return [
        StudyArm("RDM", preset="rdm", tokens=tokens),
        StudyArm("Parcae", preset="parcae-rdm", tokens=tokens),
    ]


# -- depth in training

BY_DEPTH = ("loss", *(f"loss.{depth}" for depth in (1, 4, 8, 16)))


@experiment(
    "Depth per batch against depth per sequence (paper, appendix)",
    RDM,
    depths="1,4,8,16",
    perplexity=True,
    curves=(*BY_DEPTH, "state_norm", "residual"),
)
def granularity(scale):
    units = {"per batch": "--granularity batch", "per sequence": "--granularity sequence"}
    return rows(units, preset="parcae-rdm", tokens=length(scale, 10e9))


@experiment(
    "Sampling of truncated recurrence (paper, appendix)",
    RDM,
    depths="1,4,8,16,64",
    curves=(*BY_DEPTH, "loss.64"),
)
def sampling(scale):
    """The source has figures only."""
    eight = "--mu-rec 8 --mu-bwd 8 --sampling"
    laws = {
        "full backpropagation": f"{eight} poisson-full",
        "fill": f"{eight} poisson-fill",
        "truncated-full": f"{eight} poisson-truncated-full",
    }
    return rows(laws, preset="parcae-rdm", tokens=length(scale, 10e9))


@experiment(
    "mu_rec and mu_bwd (paper, appendix)",
    RDM,
    depths="1,4,8,16,64",
    curves=(*BY_DEPTH, "loss.64"),
    seeds=2,
)
def backward(scale):
    """Runs of the paper before its sampling was corrected."""
    law = "--sampling poisson-lognormal-fill --granularity batch"
    by_rec = {f"mu_rec {mu}": f"{law} --mu-rec {mu} --mu-bwd 4" for mu in (4, 8, 14, 20, 26, 32)}
    by_bwd = {f"mu_bwd {mu}": f"{law} --mu-rec 20 --mu-bwd {mu}" for mu in (4, 6, 8, 10, 12)}
    return [
        *rows(by_rec, "mu_bwd 4", preset="rdm", tokens=length(scale, 10e9)),
        *rows(by_bwd, "mu_rec 20", preset="rdm", tokens=length(scale, 8.5e9)),
    ]


# -- loop mechanisms


@experiment("Other loop mechanisms (post, appendix)", TRANSFORMER, depths="1,4,8,16")
def mechanisms(scale):
    """Two lengths: the post's 0.2B tokens, the best of its run, and 0.5B; at the small scale 0.4
    and 1 times the tokens. The post does not state this recipe: 3.6761 is its no-SD probe's.
    """
    probe = no_stochastic_depth(scale)
    raw = {}
    parcae = {}
    loops = ("", ""), (", Loop AttnRes", "attnres"), (", HyperConnectedLoop", "hyper")
    for name, mechanism in loops:
        flags = f" --mechanism {mechanism}" if mechanism else ""
        raw[f"Raw loop{name}"] = f"{probe} --injection none{flags}"
        parcae[f"Parcae{name}"] = probe + flags
    raw["PLC / Parcae"] = probe
    shorter = 2758144 if scale == SMALL else 0.2e9
    longer = length(scale, 0.5e9)
    return [
        *rows(raw, "raw loop", tokens=longer),
        *rows(parcae, "shorter", tokens=shorter),
        *rows(parcae, "longer", tokens=longer),
    ]


# -- scaling

DENSE = ",".join(map(str, range(1, 25)))  # test-time depths 1 … 24
CURVES = {
    "depths": DENSE,
    "flags": "--eval-every 1000000000",  # validation at the end only: it is dear at so many depths
    "seeds": 1,
    "fits": True,
}
# In FLOPs. The budgets of `nano` are 11 to 175 tokens a parameter at mu_rec 8.
BUDGETS = {
    "nano": (1.5e13, 3e13, 6e13, 12e13, 24e13),
    "140m": (1e18, 2e18, 4e18, 8e18, 16e18, 64e18),
    "370m": (32e18, 64e18, 128e18),
}


@experiment("Looping or data at equal FLOPs (paper, figures 3 to 5)", tuple(BUDGETS), **CURVES)
def isoflop(scale):
    """mu_rec 1 is the paper's fixed-depth baseline."""
    mus = (1, 2, 3, 4, 6, 8) if scale == SMALL else (1, 2, 4, 6, 8, 10, 12)
    arms = []
    for flops, mu in product(BUDGETS[scale], mus):
        flags = ONE_LOOP if mu == 1 else f"--mu-rec {mu}"
        arms.append(StudyArm(f"mu_rec {mu}", f"{flops:g} FLOPs", flags=flags, flops=flops))
    return arms


@experiment("Test-time depth for six mu_rec (paper, figure 7)", tuple(BUDGETS), **CURVES)
def testtime(scale):
    mus = {f"mu_rec {mu}": f"--mu-rec {mu}" for mu in (2, 4, 6, 8, 10, 12)}
    return rows(mus, tokens=length(scale, 11.2e9))


@experiment("Test-time depth over model sizes (paper, figure 6)", ("nano", "140m"), **CURVES)
def sizes(scale):
    """Test-time curves over model sizes: at nano three widths at 20 tokens a parameter, else the
    paper's four models at its lengths.
    """
    if scale == SMALL:
        lengths = {32: 2710400, 64: 6.9e6, 96: 12552320}  # {width: tokens}
        shapes = {d: f"--d-model {d} --d-mlp {4 * d}" for d in lengths}
        return [StudyArm(f"d {d}", flags=shapes[d], tokens=D) for d, D in lengths.items()]
    models = LENGTHS.items()
    return [StudyArm(size, flags=f"--preset parcae-{size}", tokens=D) for size, D in models]
