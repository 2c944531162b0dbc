"""
The comparisons of the sources as data: every experiment is a list of arms, each with train.py's flags, the
group that it is compared in and the source's numbers. Sources: the paper (Parcae; Prairie et al. 2026) and
the post (Exact-ZOH; Huang 2026).

At the small scale (`nano`) an arm usually trains 20 tokens for each parameter of the preset of that
name (the RDM's models are smaller); at the others the source's tokens. To add a comparison, write a
function of the scale's name under @experiment(…).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import pandas as pd

from looped.common import ints
from model import PRESETS
from tools.arms import Arm
from train import FINAL_DEPTHS, RECIPES

SOURCES = Path(__file__).with_name("sources.csv")  # of: a depth, or a score
SMALL = "nano"
LENGTHS = {size: RECIPES[f"parcae-{size}"].tokens for size in ("140m", "370m", "770m", "1.3b")}
TRANSFORMER = ("nano", *LENGTHS)  # sizes of the paper's two setups
RDM = ("nano", "100m", "350m")
UP_TO_80 = (20, 40, 80)  # tokens a parameter at the small scale
ONE_LOOP = "--sampling fixed --mu-rec 1"
AS_PARCAE = "as Parcae"  # for --flops: the training FLOPs of the group's Parcae arm


@dataclass
class Experiment:
    title: str
    scales: tuple[str, ...]
    arms: Callable[[str], list[Arm]]  # of the scale's name
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


def arms_of(name: str, scale: str) -> list[Arm]:
    """The arms of an experiment, with the source's numbers."""
    entry = EXPERIMENTS[name]
    arms = entry.arms(scale)
    for arm in arms:
        arm.flags[2:2] = entry.flags.split()  # before its own, which win
        # train.py's own choice of depths is measured at the end of a run alone
        if "transformer" not in arm.flags[1] and ints(entry.depths) != FINAL_DEPTHS:
            arm.flags += ["--eval-depths", entry.depths]
    known = pd.read_csv(SOURCES, dtype=str, keep_default_na=False).query("experiment == @name")
    if scale not in set(known.scale):
        scale = next(iter(known.scale), scale)  # beside the smallest of the source's
    for number in known[known.scale == scale].itertuples():
        of = int(number.of) if number.of.isdigit() else number.of
        value = number.value
        if entry.perplexity and of in {"mu_rec", *range(99)}:
            value = f"{math.log(float(value)):.3f}"
        for arm in arms:
            if arm.label == number.arm and number.group in ("", arm.group):
                arm.source[of] = value
    return arms


def preset(family: str, scale: str) -> str:
    """The small scale's Parcae has the scale's name alone."""
    name = f"{family}-{scale}"
    return name if name in PRESETS else scale


def tokens(number: float) -> str:
    return f"--tokens {number:.0f}"


def arm(label: str, scale: str, flags: str, group: str = "", family: str = "parcae") -> Arm:
    return Arm(label, ["--preset", preset(family, scale), *flags.split()], group)


def rows(scale: str, length: str, flags: dict[str, str], group="", family="parcae") -> list[Arm]:
    """An arm for each row's flags, all of one length."""
    return [arm(label, scale, f"{length} {text}", group, family) for label, text in flags.items()]


def length(scale: str, source: float, ratio: float = 20) -> str:
    """The source's tokens, or at the small scale those of the recipe, which has 20 a parameter."""
    return tokens(RECIPES[SMALL].tokens * ratio / 20 if scale == SMALL else source)


# -- the two gains


def no_stochastic_depth(scale) -> str:
    """The post's "no-SD" probe: AdamW's rate is a quarter of the recipe's, Muon's the same."""
    recipe = RECIPES[preset("parcae", scale)]
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
    trained = {f"{name}, {B}": (recipes[name], tokens(float(B[:-1]) * 1e9)) for name, B in lengths}
    if scale == SMALL:
        trained = {}
        decays = {"0.447": "", "0.9": "--ssm-decay 0.9"}
        for name, ratio, decay in product(recipes, UP_TO_80, decays):
            group = f"{name}, decay {decay}, {ratio} tokens/parameter"
            trained[group] = (f"{recipes[name]} {decays[decay]}", length(scale, 0, ratio))
    arms = []
    for group, (flags, budget) in trained.items():
        gains = {gain: f"{flags} --gain {gain}" for gain in ("euler", "zoh")}
        arms += rows(scale, budget, gains, group)
    return arms


# -- stability


@experiment(
    "Learning rates that each looped model bears (paper, training instability)",
    RDM,
    depths="1,4,8",
    seeds=1,
    curves=("loss", "rho", "state_norm", "residual"),
    flags="--eval-every 50 --eval-tokens 65536",
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
    ten_a_parameter = length(scale, 3.8e9 if scale == "350m" else 1.1e9)
    models = [  # of the paper's table, with the highest rate at which each converges
        ("Base (pre-norm concat)", "rdm", "--block prenorm", 2e-4),
        ("Res. Norm (concat)", "rdm", "", 4e-4),
        ("Parcae", "parcae-rdm", "", 1e-3),
    ]
    arms = []
    for (group, family, block, limit), rate in product(models, rates):
        flags = f"{ten_a_parameter} {block} --warmup 0.1 --cooldown 0.1 --adam-lr {rate * factor:g}"
        arms.append(arm(f"LR {rate * factor:g}", scale, flags, group, family))
        if rate <= 1e-3:
            arms[-1].source["mu_rec"] = "converges" if rate <= limit else "diverges"
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
        arms += rows(scale, length(scale, LENGTHS.get(scale)), flags, step[1].strip("+ "))
    return arms


# -- against other models


@experiment("Looped against flat (paper, table 4)", TRANSFORMER, perplexity=True)
def baseline(scale):
    """The paper trains 80 tokens a parameter. The last two rows of a group are ours."""
    arms = []
    for budget in UP_TO_80 if scale == SMALL else (80,):
        group = f"{budget} tokens/parameter"
        n = length(scale, LENGTHS.get(scale), budget)
        arms += [
            arm("Transformer", scale, n, group, "transformer"),
            arm("Parcae", scale, n, group),
            arm("Transformer, Parcae's FLOPs", scale, "", group, "transformer"),
            arm("Parcae, one loop", scale, f"{n} {ONE_LOOP}", group),
        ]
        arms[-2].flags += ["--flops", AS_PARCAE]
    return arms


@experiment(
    "Looped against flat at 30M tokens of the next size", ("nano",), perplexity=True, seeds=1
)
def bridge(scale):
    """The looped model and its flat twin at twice the width and four times the vocabulary, all else as in `nano`."""
    size = "--vocab-size 4096 --d-model 128 --n-head 2 --d-mlp 512"
    flags = f"{size} {tokens(30e6)}"
    flat = arm("Transformer", scale, flags, family="transformer")
    return [flat, arm("Parcae", scale, flags)]


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
    n = length(scale, 0)
    return [*rows(scale, n, changes), arm("Transformer", scale, n, family="transformer")]


@experiment("Parcae against the RDM (paper, table 1)", RDM, depths="1,4,8,16", perplexity=True)
def rdm(scale):
    """Table 1's models; WikiText and the zero-shot tasks: results/SOURCES.md."""
    n = length(scale, 10e9)
    return [arm("RDM", scale, n, family="rdm"), arm("Parcae", scale, n, family="parcae-rdm")]


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
    return rows(scale, length(scale, 10e9), units, family="parcae-rdm")


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
    return rows(scale, length(scale, 10e9), laws, family="parcae-rdm")


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
        *rows(scale, length(scale, 10e9), by_rec, "mu_bwd 4", "rdm"),
        *rows(scale, length(scale, 8.5e9), by_bwd, "mu_rec 20", "rdm"),
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
    shorter = tokens(2758144 if scale == SMALL else 0.2e9)
    longer = length(scale, 0.5e9)
    return [
        *rows(scale, longer, raw, "raw loop"),
        *rows(scale, shorter, parcae, "shorter"),
        *rows(scale, longer, parcae, "longer"),
    ]


# -- scaling

DENSE = ",".join(map(str, range(1, 25)))  # test-time depths 1 … 24
CURVES = {
    "depths": DENSE,
    "flags": "--eval-every 0",  # validation at the end only: it is dear at so many depths
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
        arms.append(arm(f"mu_rec {mu}", scale, f"--flops {flops:g} {flags}", f"{flops:g} FLOPs"))
    return arms


@experiment("Test-time depth for six mu_rec (paper, figure 7)", tuple(BUDGETS), **CURVES)
def testtime(scale):
    mus = {f"mu_rec {mu}": f"--mu-rec {mu}" for mu in (2, 4, 6, 8, 10, 12)}
    return rows(scale, length(scale, 11.2e9), mus)


@experiment("Test-time depth over model sizes (paper, figure 6)", ("nano", "140m"), **CURVES)
def sizes(scale):
    """Test-time curves over model sizes: at nano three widths at 20 tokens a parameter, else the
    paper's four models at its lengths.
    """
    if scale == SMALL:
        lengths = {32: 2710400, 64: 6.9e6, 96: 12552320}  # {width: tokens}
        shapes = {d: f"--d-model {d} --d-mlp {4 * d}" for d in lengths}
        return [arm(f"d {d}", scale, f"{shapes[d]} {tokens(D)}") for d, D in lengths.items()]
    return [arm(size, size, tokens(D)) for size, D in LENGTHS.items()]
