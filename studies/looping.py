"""When does looping pay? Looped models against flat ones at equal executed training FLOPs, on little text and
on plenty.

    python -m studies.looping                                        # the page, from results/ledger
    python -m studies.looping --train --text little --seeds 4,5,6,7  # other seeds; trains what has no line
    python -m studies.looping --train --text plenty --only "flat; 2 loops"

Weight decay is tuned at a seed of its own; the answer is from other seeds.
Written: results/when-looping-pays.md and .png.
"""

import itertools
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from looped.common import Parser, ints, positive_int
from looped.machine import ROOT
from studies import ledger
from tools.ablate import copy_patched
from tools.arms import Arm, Run, paired
from tools.figures import Plot, figure, frame_table, half_width, plus_minus
from tools.pages import cost_of, origin, save_page
from tools.runner import Training, default_side_by_side, train_arms

PAGE = "when-looping-pays"
TUNING = 100  # the seed that chooses the weight decay
SEEDS = 4  # that a model needs to be chosen


@dataclass
class Text:
    """How much text there is, and the budget."""

    flags: str
    decays: tuple[str, ...]  # weight decays of the sweep
    words: str


LITTLE = "little code, 1 unique token a parameter"
PLENTY = "plenty of code, 10 unique tokens a parameter"
PROSE = "plenty of prose, 170 unique tokens a parameter"
TEXTS = {
    "little-short": Text("--flops 2e12 --rows 1346", ("0.2", "0.5", "1"), LITTLE),
    "little": Text("--flops 6.5e12 --rows 1346", ("1", "2", "4", "8"), LITTLE),
    "little-long": Text("--flops 1.3e13 --rows 1346", ("1", "2", "4", "8"), LITTLE),
    "little-longest": Text("--flops 1.95e13 --rows 1346", ("1", "2", "4", "8"), LITTLE),
    "plenty": Text("--flops 2.7e13", ("0.05", "0.1", "0.2", "0.5", "1"), PLENTY),
    "prose": Text(
        "--flops 8.1e13 --data data/prose-v1024/rows-256-split", ("0.05", "0.1", "0.2"), PROSE
    ),
}
EVERY = "--dtype float32 --eval-depths 1,2,4,8,16"


# columns: label, patch (of studies/edits), flags; a label that begins with "flat" has no loop
ARMS = pd.read_csv(
    Path(__file__).with_name("looping.csv"), index_col="label", keep_default_na=False
)
LIMITS = """\
- **Shown.** The table and the picture have the models that an answer above names and that have four
  seeds or more on three or more of the texts and budgets; the others stand under The runs, arms of
  one seed under The sweep. Readings and tokens a parameter in its head are the flat twin's, 64
  wide; larger models read the same code fewer times. A loss is the mean of all seeds (plenty of
  code, eight loops: seeds 0 to 3 are bfloat16 on another processor, with 2 % more FLOPs), a
  difference that of the seeds both models have. The boundary operator with one loop needs no loop,
  so it is a flat model.
- **Chosen.** The best looped and the best flat model are chosen by the seeds that answer, among
  those with four seeds or more, each by its difference from the flat twin over the seeds both have.
  Where the first four seeds did not settle it, more were added: 4 to 7 in the recipe at 1.3e13
  FLOPs, 64 and 128 wide, and at 1.95e13, two loops 128 wide and flat 160 wide; 4 to 7 with plenty
  of prose, 96 wide, at nano's rates; 0 to 3 on little code at 6.5e12, four sampled loops, and with
  plenty of code, flat, two loops, two sampled, late growth and the first of three layers looped. At
  1.95e13, 64 wide, 4 to 7 repeat what 0 to 3 show.
- **Width.** On little code, the smaller the model is for its budget, the more two loops give. At
  the sweep's seed, each model at its best weight decay tried, two loops 64 wide beat flat at 6.5e12
  FLOPs and nano's rates; 96 and 128 wide they lose (128 wide at each of four other seeds too). At
  1.3e13, in the recipe, they win by less the wider the models are, and lose 160 wide; so too at
  1.95e13, where they win by more. With plenty of code, at nano's rates and that seed, they lose at
  each width, by more the wider. From 6.5e12 on the best flat model is wider than 64: 96 wide at
  6.5e12, 128 wide at 1.3e13 and with plenty of code, 160 wide at 1.95e13. The best models at 1.3e13
  and 1.95e13, flat and looped, read the code 5 to 8 times, 1.7 to 2.8 trained tokens a parameter.
  At 2e12, at that seed, flat and two loops are each worse 96 wide than 64 wide, by 0.25.
- **Width and depth.** Five layers 96 wide, flat or with the middle one looped twice, are no better
  than three layers of the best width. Of the two, at the sweep's seed, the looped one is worse by
  0.029 with plenty of code, and better by 0.021 on little code at 1.3e13 FLOPs, in the recipe.
- **Other loops.** With plenty of code, at the sweep's seed, nano's rates and the best weight decay
  tried, late growth from one to two loops is better than flat by 0.002. Every other looped model 64
  wide is worse than the flat one of as many layers: two loops by 0.002, two sampled by 0.005, the
  rest by 0.008 or more. Over the four or eight seeds that answer all of them are worse on average,
  late growth too. Nearly all are worse at each seed; two loops, two sampled, late growth and the
  first of three layers looped are at seven of eight, the last layer looped at three of four. Flat
  with the boundary operator is worse than flat at each of four. On little code at 6.5e12 FLOPs and
  nano's rates, of the looped models of three layers 64 wide, three are shown to beat flat, by 0.017
  to 0.021: two loops, four sampled and the first layer twice. Eight loops, fixed or sampled, lose;
  the others are not shown to differ. Seven layers with the middle one looped lose to seven flat
  ones; with five layers, the middle one or the middle three looped, no difference from five flat
  ones is shown. At 2e12 the operator helps flat (eight seeds) and two loops (four), though neither
  at the sweep's seed.
- **The recipe of 2609.19107** (arXiv), whose authors propose the boundary operator and late growth,
  is RMS norm on the embedding and the learning rates of their smallest models, flat or with two
  loops: Muon's some three times nano's, Adam's less than half. On little code at 1.3e13 and 1.95e13
  FLOPs all models trained both ways are better with it. At 6.5e12 flat is not shown to be, and two
  loops are worse. At the sweep's seed the rates give flat, 64 wide, most of its gain at 6.5e12,
  without the norm; at 2e12, or with plenty of code, flat is worse with the recipe. In the recipe,
  at that seed, flat beats the boundary operator with two loops and with growth from two to four
  (6.5e12, plenty), and with one loop (6.5e12). With plenty of code, in the recipe, flat is also
  better at each of four other seeds than two loops, with the operator or without, and than that
  growth.
- **Overfitting.** At nano's rates and width flat, two loops and seven layers end worse at 1.3e13
  FLOPs than at 6.5e12; in the recipe flat 64 wide does, two loops do not. At 1.95e13, in the
  recipe, flat and two loops 64 wide end worse than at 1.3e13. At the sweep's seed so does flat 128
  wide, but not flat 160 wide or two loops 128 wide.
- **Weight decay.** Many models are best at an end of their sweeps and may gain from more tuning:
  among them seven flat layers on little code at nano's rates, two loops in the recipe wider than 64
  at 1.3e13 and 160 wide at 1.95e13, all models at 2e12, and 96 wide with plenty of prose or, in the
  recipe, of code. With plenty of code the sweep's seed chooses 0.1 for flat and 0.05 for late
  growth; over the eight that answer 0.2 and 0.1 are better. There late growth is behind by about as
  much, but the interval holds 0 (losses in ledger/62895bb6fe.jsonl). Models with changed rates, or
  with a part of the recipe, have one or two decays: see The sweep.
- **Rates.** Outside the recipe all models of the table have nano's. At the sweep's seed 0.7 times
  these is sometimes better. With plenty of code it is for 128 wide (flat by 0.005, two loops by
  0.001) and for five layers looped: the middle one three times by 0.012, the middle three by 0.031,
  and both still lose to five flat layers, by 0.028 or more. On little code at 6.5e12 FLOPs it is
  for flat, the deeper models (by 0.020 at most) and 96 wide (two loops by 0.018), and with plenty
  of prose for 96 wide (flat by 0.005, two loops by 0.004). 1.4 times is better for two loops 64
  wide at 6.5e12; no other gain is over 0.002. At four other seeds no gain is shown, where we
  looked: flat 128 wide with plenty of code; on little code flat and two loops, 64 and 96 wide, and
  seven flat layers; with plenty of prose flat and two loops, 96 wide. In the recipe both rates are
  worse for the best models at 1.95e13; 128 wide at 1.3e13, 0.7 times is better at the sweep's seed,
  flat by 0.004 and two loops by 0.009; over the eight seeds that answer by 0.002 and 0.006, neither
  shown.
- **Prose.** On little prose read ten times, at weight decays tuned on code, neither two loops nor
  seven layers are shown to differ from flat (looping-prose-nano.md); at other weight decays flat
  and two loops gain 0.002, seven layers 0.014 (two seeds, looping-prose-decay-nano.md). With plenty
  of prose two loops beat flat at the sweep's seed, by 0.011 to 0.013 at each weight decay; of the
  eight seeds that answer six agree, two do not. At 0.2, where both models are worse, the same eight
  do show two loops better, by about as much (losses in ledger/ca5d07a5a3.jsonl). 96 wide and at
  nano's rates, two loops beat flat at the sweep's seed, by 0.003 to 0.005 at each weight decay, and
  at three of the eight that answer, by 0.003 at most; with 0.7 times the rates for both, at one of
  four. Whichever of the two rates each has, no difference is shown. Eight loops, sampled, lose
  (baseline-nano.md), and at five budgets up to 2.4e14 FLOPs no sampled mean of two to eight loops
  beats one (one seed, isoflop-nano.md).
- **Not shown:** more than seven layers; at 1.95e13 more than three, or wider than 160; wider than
  128 with plenty of code; wider than 96 or deeper with plenty of prose; larger budgets on code;
  GPUs; and whether text or training makes plenty of prose differ from plenty of code: it has three
  times the FLOPs.
- At equal parameters and tokens, a third question, looping wins: baseline-nano-stdlib.md (eight
  loops, plenty of code).
"""
SAME_SIZE = 1.01  # at most so many times the smallest model's parameters


# -------------------------------------------------------------------------------------------------
# Arms and runs


def arm_of(text: str, label: str, decay: str, codes: dict[str, Path]) -> Arm:
    patch, flags = ARMS.loc[label]
    line = f"{flags} {TEXTS[text].flags} {EVERY} --weight-decay {decay}"
    code = codes.get(patch, ROOT)
    return Arm(label, line.split(), group_of(text, decay), code, f"{patch}.patch" if patch else "")


def group_of(text: str, decay: str) -> str:
    return f"{text} text, weight decay {decay}"


def filled(text: str, label: str, codes: dict[str, Path]) -> dict[str, Arm]:
    """{weight decay: its arm, with the runs of the ledger}"""
    arms = {decay: arm_of(text, label, decay, codes) for decay in TEXTS[text].decays}
    ledger.fill(PAGE, list(arms.values()))
    return arms


def tuned(arms: dict[str, Arm]) -> Arm:
    """The arm of the weight decay that is best at the seed of the sweep, with the other seeds' runs."""
    losses = {decay: arm.losses().get(TUNING, np.inf) for decay, arm in arms.items()}
    best = arms[min(losses, key=losses.get)]
    runs = [run for run in best.runs if run.seed != TUNING]
    return Arm(best.label, best.flags, best.group, best.code, best.origin, runs)


def train(trainings: list[Training], jobs: int) -> None:
    """Trains what has no line in the ledger, and enters it."""
    missing = []
    for training in trainings:
        there = {run.seed for run in training.arm.runs}
        if training.seed not in there:
            missing.append(training)
    for training in train_arms(missing, jobs):
        if training:
            ledger.append(PAGE, training.arm, training.arm.runs[-1])


def train_text(text: str, labels: list[str], args) -> None:
    """The sweep of each arm, then the seeds that answer at its best weight decay."""
    with tempfile.TemporaryDirectory() as folder:
        codes = {}
        for patch in {*ARMS.patch[labels]} - {""}:
            file = ROOT / "studies/edits" / f"{patch}.patch"
            codes[patch] = copy_patched("HEAD", [file], Path(folder) / patch)
        by_decay = [filled(text, label, codes) for label in labels]
        sweep = []
        for arms in by_decay:
            sweep += [Training(arm, TUNING) for arm in arms.values()]
        train(sweep, args.jobs)
        best = map(tuned, by_decay)
        pairs = itertools.product(args.seeds, best)
        train([Training(arm, seed) for seed, arm in pairs], args.jobs)


# -------------------------------------------------------------------------------------------------
# The page


def best_of(arms: list[Arm], flat: bool, size: float = np.inf) -> Arm:
    """The flat or looped model that is lowest beside the flat twin, over the seeds both have; of at most so many
    parameters, and of enough seeds.
    """
    twin = twin_of(arms)
    some = []
    for arm in arms:
        kind = arm.label.startswith("flat") == flat
        if kind and parameters(arm) <= size and len(arm.losses()) >= SEEDS:
            some.append(arm)
    return min(some, key=lambda arm: paired(arm.losses(), twin.losses()).mean())


def twin_of(arms: list[Arm]) -> Arm:
    return next(arm for arm in arms if arm.label == "flat")


def mean_loss(arm: Arm) -> float:
    return arm.losses().mean()


def parameters(arm: Arm) -> int:
    return arm.runs[0].config["params"]


def answer(by_text: dict[str, list[Arm]], question: str, most: float) -> str:
    """Text by text: the best looped model against the best flat one, of at most so many parameters."""
    parts = []
    for text, arms in by_text.items():
        looped = best_of(arms, False, most)
        flat = best_of(arms, True, most)
        times = epochs(twin_of(arms).runs[0])
        gaps = paired(looped.losses(), flat.losses())
        seeds = len(gaps)
        mean = gaps.mean()
        half = half_width(gaps)
        word = "is not shown to pay"
        if abs(mean) > half:
            word = "pays" if mean < 0 else "does not pay"
        regime = f"with {TEXTS[text].words} read {times:.2g} times"
        shown = f"{looped.label} beside {flat.label}: {mean:+.4f} ± {half:.4f} nats/token, {seeds} seeds"
        parts.append(f"{word} {regime} ({shown})")
    return f"{question} looping {'; '.join(parts)}."


def worth_a_row(by_text: dict[str, list[Arm]], most: float) -> dict[str, list[Arm]]:
    """The models that have enough seeds on three or more of the texts and budgets, and are the best of some
    answer.
    """
    labels = [arm.label for arm in sum(by_text.values(), []) if len(arm.losses()) >= SEEDS]
    best = set()
    for arms, flat, size in itertools.product(by_text.values(), [True, False], [most, np.inf]):
        best.add(best_of(arms, flat, size).label)
    several = {label for label in best if labels.count(label) > 2}
    shown = {}
    for text, arms in by_text.items():
        shown[text] = [arm for arm in arms if arm.label in several]
    return shown


def models_table(by_text: dict[str, list[Arm]]) -> list[str]:
    """A row a model, a column a text: the loss of the flat twin; of the others less that, over the seeds both
    have.
    """
    rows = {}
    for text, arms in by_text.items():
        flat = twin_of(arms)
        times = epochs(flat.runs[0])
        column = f"{TEXTS[text].words}, read {times:.2g} times, {budget(flat):.2g} FLOPs"
        for arm in arms:
            gaps = paired(arm.losses(), flat.losses())
            shown = plus_minus(gaps, "+.4f") if arm is not flat else plus_minus(flat.losses())
            row = rows.setdefault(arm.label, {"parameters": f"{parameters(arm):,}"})
            row[column] = f"{shown} ({len(gaps)} seeds)"
    frame = pd.DataFrame(rows).T.reindex(ARMS.index.intersection([*rows]))
    return frame_table(frame.rename_axis("flat: val loss; others: val loss less flat's"))


def runs_table(by_text: dict[str, list[Arm]]) -> list[str]:
    """What each model of each text was trained with, and the loss of every seed; best first in its text."""
    rows = {}
    for text, arms in by_text.items():
        for arm in sorted(arms, key=mean_loss):
            run = arm.runs[0]
            losses = arm.losses()
            unique = unique_tokens(run) / parameters(arm)
            row = {"val loss": plus_minus(losses)}
            row["weight decay"] = arm.group.rpartition(" ")[2]
            row["unique tokens a parameter"] = f"{unique:.3g}"
            row["tokens a parameter"] = f"{unique * epochs(run):.3g}"
            row["epochs"] = f"{epochs(run):.2g}"
            row["training FLOPs"] = f"{run.flops:.3g}"
            row |= losses.map("{:.4f}".format).add_prefix("seed ")
            rows[f"{text} text, {arm.label}"] = row
    return frame_table(pd.DataFrame(rows).T.rename_axis("trained"))


def unique_tokens(run: Run) -> int:
    rows = run.config["args"].get("rows") or run.config["data"]["rows"]
    return rows * run.config["model"]["seq_len"]


def epochs(run: Run) -> float:
    return cost_of(run)["tokens trained"] / unique_tokens(run)


def picture(by_text: dict[str, list[Arm]]) -> list[str]:
    """The difference from the flat twin against unique tokens a parameter, and on little text against FLOPs."""
    labels = []
    for arms in by_text.values():
        labels += [arm.label for arm in arms if arm.label not in labels]
    some = [by_text["little"], by_text["plenty"], by_text["prose"]]
    xlabel = "unique tokens a parameter of the flat twin"
    left = panel(some, labels, xlabel, unique_per_parameter)
    some = [arms for text, arms in by_text.items() if text.startswith("little")]
    xlabel = "training FLOPs, on little code"
    right = panel(some, labels, xlabel, budget)
    caption = (
        "Validation loss of each model less that of the flat twin at equal training FLOPs; below 0 is "
        "better than flat; bars: 95 % interval over seeds, paired. Left: flat reads little code 10 times, "
        "plenty of code 4, plenty of prose 0.7."
    )
    return figure(Path(f"results/{PAGE}.png"), caption, labels, [left, right])


def unique_per_parameter(flat: Arm) -> float:
    return unique_tokens(flat.runs[0]) / parameters(flat)


def budget(flat: Arm) -> float:
    return flat.runs[0].flops


def panel(texts: list[list[Arm]], labels: list[str], xlabel: str, x_of: Callable) -> Plot:
    """A curve for each label, over the arms of several texts; x_of: where a text stands, from its flat twin."""
    points = {label: ([], [], []) for label in labels}
    for arms in texts:
        base = twin_of(arms)
        for arm in arms:
            gaps = paired(arm.losses(), base.losses())
            x, y, half = points[arm.label]
            x.append(x_of(base))
            y.append(gaps.mean())
            half.append(half_width(gaps) if arm is not base else 0)
    curves = [(np.array(x), np.array(y)) for x, y, _ in points.values()]
    halves = [half for *_, half in points.values()]
    return Plot(xlabel, "val loss less the flat twin's", curves, {"xscale": "log"}, halves)


def sweep_table(text: str) -> list[str]:
    """The loss at the tuning seed by weight decay, those beside the sweep included."""
    rows = {}
    start = group_of(text, "")
    for line in ledger.lines():
        for place in line["pages"]:
            group = place["group"]
            on_page = place["page"] == PAGE and group.startswith(start)
            if on_page and line["seed"] == TUNING:
                decay = float(group.removeprefix(start))
                loss = ledger.run_of(line).loss
                rows.setdefault(place["label"], {})[decay] = f"{loss:.4f}"
    frame = pd.DataFrame(rows).sort_index().rename(index="{:g}".format).T
    frame = frame.reindex(ARMS.index.intersection([*rows]))
    return frame_table(frame.rename_axis(f"{text} text, seed {TUNING}: weight decay"))


def write(command: str) -> None:
    by_text = {}
    for text in TEXTS:
        arms = [tuned(filled(text, label, {})) for label in ARMS.index]
        by_text[text] = [arm for arm in arms if len(arm.losses()) > 1]
    smallest = min(map(parameters, sum(by_text.values(), [])))
    most = SAME_SIZE * smallest
    larger = {}
    for text, arms in by_text.items():
        if max(map(parameters, arms)) > most:
            larger[text] = arms
    said = [
        answer(by_text, "At equal parameters and training FLOPs", most),
        answer(larger, "At equal training FLOPs and any size tried", np.inf),
    ]
    shown = worth_a_row(by_text, most)
    body = [*models_table(shown), *origin(sum(by_text.values(), []), command)]
    body += ["## How to read it, and what it does not show", "", LIMITS]
    body += ["## The runs", "", *runs_table(by_text), "## The sweep", ""]
    for text in TEXTS:
        body += sweep_table(text)
    save_page(Path("results") / PAGE, "When looping pays", said, picture(shown), body)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__, prog="python -m studies.looping")
    add = parser.add_argument
    add("--train", action="store_true", help="train what has no line in the ledger")
    add("--text", choices=TEXTS, help="text and budget to train with (default: all)")
    add(
        "--only",
        default="; ".join(ARMS.index),
        help="arms to train, between semicolons (default: all)",
    )
    add("--seeds", type=ints, default=[0, 1, 2, 3], help="that answer (default: 0,1,2,3)")
    add("--jobs", type=positive_int, default=default_side_by_side(), help="trainings side by side")
    args = parser.parse_args(argv)
    if args.train:
        labels = [label.strip() for label in args.only.split(";")]
        for text in [args.text] if args.text else TEXTS:
            train_text(text, labels, args)
            ledger.lines.cache_clear()
    write(shlex.join(["python", "-m", "studies.looping", *argv]))


if __name__ == "__main__":
    main()
