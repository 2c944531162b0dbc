"""A comparison's page and figure, from the lines of the ledger that its arms hold."""

import math
import textwrap
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from studies.comparisons import Arm
from tools.figures import (
    Plot,
    depth_plot,
    figure,
    fmt,
    frame_table,
    half_width,
    plus_minus,
    records_table,
    save_page,
)

DEPTHS = {1, 2, 4, 8, 12, 16, 24, 64}  # of the tables
OVER_TRAINING = {"training loss": "loss", "state norm": "state_norm", "residual": "residual"}
RUN_COLUMNS = {  # of a run's line, and how they are written
    "arm": "",
    "seed": "",
    "dtype": "",
    "params": ",.0f",
    "tokens": ",.0f",
    "last_loss": ".4f",
    "validation_loss": ".4f",
    "largest_state_norm": ".3g",
    "tok_s": ",.0f",
    "minutes": ".1f",
    "ρ(Ā)": ".4f",
}
CELLS = (
    "Cells: validation loss in nats a token, mean over seeds ± half the 95 % t interval (standard "
    "deviation over seeds). Source: the paper's or the post's number, at its own scale and on its "
    "own data; of a perplexity the logarithm."
)
DIVERGED = (
    "A run diverged if three steps in a row had no finite loss, if its training loss ended above "
    "its start or more than 0.5 nats above its lowest, or if the state norm became 10,000 times "
    "that of step 1, or 10,000 where that was below 1."
)
MARK = "<!-- From here on written by studies.experiments. -->"
CURVES = (
    "Curves: the first seed's runs; one that was trained with one loop, or has none, is a "
    "horizontal line against depth. Differences: mean over seeds, and its 95 % interval."
)


# -- losses


def at_mu_rec(line: dict) -> float:
    """The validation loss at mu_rec (0 of a flat model)."""
    return line["loss"].get(line["mu_rec"], math.nan)


def has_one_depth(line: dict) -> bool:
    """Whether a model is flat, or was always trained with one loop and is used with one."""
    mu_rec = line["mu_rec"]
    once = mu_rec == 1 and line["settings"]["sampling"] == "fixed"
    return mu_rec == 0 or once


def depths_of(arms: list[Arm]) -> list:
    """The columns of the tables: mu_rec, and the depths of DEPTHS that runs were evaluated at."""
    known = set()
    for arm in arms:
        for line in arm.runs:
            known.update(line["loss"])
    return ["mu_rec", *sorted(known & DEPTHS)]


def losses_of(arm: Arm, depths: list) -> pd.DataFrame:
    """Of the runs that did not diverge: a row for each seed, a column for each depth, "mu_rec" for
    that of the run. A model of one depth has its one loss at every depth.
    """
    losses = {}
    for line in arm.runs:
        if line["diverged_at"]:
            continue
        found = line["loss"] | {"mu_rec": at_mu_rec(line)}
        if has_one_depth(line):
            found = dict.fromkeys(depths, at_mu_rec(line))
        losses[line["seed"]] = found
    return pd.DataFrame(losses, index=depths, dtype=float).T


def cell(arm: Arm) -> str:
    """What the seeds of an arm say: the steps at which some diverge, and the mean loss at mu_rec."""
    steps = [line["diverged_at"] for line in arm.runs if line["diverged_at"]]
    losses = losses_of(arm, ["mu_rec"])["mu_rec"]
    n = len(losses)
    mean = plus_minus(losses)
    if n > 1:
        mean += f" ({losses.std():.4f}; n = {n})"
    if not steps:
        return mean
    said = f"diverges at step {', '.join(map(str, steps))}"
    return f"{said}; {mean}" if n else said


def loss_table(arms: list[Arm]) -> list[str]:
    """A row for each arm: its losses at mu_rec and at depths that all its seeds have, and the
    source's numbers.
    """
    depths = depths_of(arms)
    rows = []
    for arm in arms:
        losses = losses_of(arm, depths)
        row = {"arm": arm.name(), "depth mu_rec": cell(arm)}
        for depth in depths[1:]:
            known = losses[depth]
            row[f"depth {depth}"] = "–" if known.hasnans else plus_minus(known)
        numbers = [f"{of}: {number}" for of, number in arm.source.items()]
        row["source, by depth or score"] = "; ".join(numbers) or "–"
        rows.append(row)
    return frame_table(pd.DataFrame(rows).set_index("arm"))


# -- differences, paired by seed


class Difference(NamedTuple):
    arm: Arm
    base: Arm
    values: pd.DataFrame  # losses of the arm less those of the base: a row a seed, a column a depth


def differences(arms: list[Arm], experiment) -> list[Difference]:
    """Of each arm with runs and its base (see Experiment)."""
    depths = depths_of(arms)
    bases = {}
    found = []
    for arm in arms:
        if not arm.runs:
            continue
        group = getattr(arm, experiment.within)
        base = bases.setdefault(group, arm)
        values = losses_of(arm, depths) - losses_of(base, depths)
        values = values.dropna(how="all")
        if arm is not base and len(values):
            found.append(Difference(arm, base, values))
        if experiment.stepwise:
            bases[group] = arm
    return found


def difference_table(found: list[Difference]) -> list[str]:
    if not found:
        return []
    rows = []
    for d in found:
        values = d.values.dropna(axis="columns")  # depths that all seeds have
        row = {"arm": d.arm.name(), "difference from": d.base.name()}
        row["seeds"] = len(values)
        for depth in values:
            row[f"depth {depth}"] = plus_minus(values[depth], "+.4f")
        rows.append(row)
    depths = [f"depth {depth}" for depth in sorted(DEPTHS)]
    columns = ["difference from", "seeds", "depth mu_rec", *depths]
    frame = pd.DataFrame(rows).set_index("arm").reindex(columns=columns)
    frame = frame.dropna(axis="columns", how="all")
    return ["## Differences of loss by depth, paired by seed", "", *frame_table(frame)]


# -- the other tables


def score_table(arms: list[Arm]) -> list[str]:
    """The mean over seeds of each score, by the rules it was measured by."""
    scores = []
    for arm in arms:
        for line in arm.runs:
            scores += [{"arm": arm.name()} | score for score in line["core"]]
    if not scores:
        return []
    frame = pd.DataFrame(scores).drop(columns="std", errors="ignore")
    rules = [name for name in frame if name != "mean"]
    frame[rules] = frame[rules].astype(object).fillna("–")
    means = frame.groupby(rules, sort=False)["mean"].agg(plus_minus)
    return ["## Downstream", "", *frame_table(means.to_frame())]


def run_table(arms: list[Arm]) -> list[str]:
    """A row for each training; one that several arms share has the name of the last."""
    rows = {}
    for arm in arms:
        for line in arm.runs:
            rho = line["spectra"].get("rho")
            more = {"arm": arm.name(), "validation_loss": at_mu_rec(line), "ρ(Ā)": rho}
            rows[line["run"]] = line | more
    header, *body = records_table(list(rows.values()), RUN_COLUMNS)
    return ["## Runs", "", header.replace("_", " "), *body]


def origin(line: dict) -> str:
    """Where a run was made."""
    commit = "commit " + (line["commit"] or "unknown")[:10]
    if line["changed"]:
        commit += " with changes"
    versions = ", ".join(map(" ".join, line["versions"].items()))
    made = "- {machine}; {dtype}".format(**line)
    data = "data {data:.10}; {eval_tokens} validation tokens".format(**line)
    return "; ".join([made, versions, data, commit, line["date"]])


# -- figures


def curve(arm: Arm, kind: str) -> tuple:
    """(x, y) of the first run's curve over training."""
    if not arm.runs:
        return [], []
    line = arm.runs[0]
    evals = line["evals"]
    if kind == "ρ(Ā)":
        values = {record["tokens"]: record.get("rho") for record in evals}
    elif kind.startswith("validation"):
        depth = kind.removeprefix("validation at ")
        if kind == "validation loss":
            depth = str(line["mu_rec"])
        values = {record["tokens"]: record["loss"].get(depth) for record in evals}
    else:
        logged = line["curve"]
        y = logged.get(OVER_TRAINING[kind], [])
        values = dict(zip(logged["tokens"], y))
    known = pd.Series(values, dtype=float).dropna()
    return known.index.to_numpy(float) / 1e6, known.to_numpy()


def difference_plot(arms: list[Arm], ylabel: str, experiment) -> Plot:
    """Mean differences over seeds by depth, with their 95 % intervals."""
    means = {arm.name(): {} for arm in arms}
    halves = dict.fromkeys(means)
    for d in differences(arms, experiment):
        name = d.arm.name()
        values = d.values.drop(columns="mu_rec").dropna(axis="columns")
        means[name] = values.mean().to_dict()
        if len(values) > 1:
            halves[name] = [half_width(values[depth]) for depth in values]
    plot = depth_plot(list(means.values()), ylabel)
    plot.half_widths = list(halves.values())
    return plot


def level(arm: Arm) -> dict[int, float]:
    """Losses by depth; of a model of one depth the key is 0, for a horizontal line."""
    if not arm.runs:
        return {}
    line = arm.runs[0]
    if line["loss"] and has_one_depth(line):
        return {0: at_mu_rec(line)}
    return line["loss"]


def plot_of(kind: str, arms: list[Arm], title: str, experiment) -> Plot:
    """A plot of the first seeds' runs, or of the mean differences over seeds."""
    ylabel = "\n".join([*textwrap.wrap(title, 30), kind])
    if kind == "difference by depth":
        return difference_plot(arms, ylabel, experiment)
    if kind == "loss by depth":
        return depth_plot([level(arm) for arm in arms], ylabel)
    scale = "log" if kind in ("state norm", "residual") else "linear"
    curves = [curve(arm, kind) for arm in arms]
    return Plot("tokens trained, millions", ylabel, curves, {"yscale": scale})


def draw(arms: list[Arm], experiment, path: Path) -> list[str]:
    """The figure; panels are split by the arms' rows or columns if the experiment says so."""
    groups = {}  # {title: {label: arm}}
    for arm in arms:
        title = ""
        label = arm.name()
        if experiment.split:
            title = getattr(arm, experiment.split)
            label = arm.col if experiment.split == "row" else arm.row
        groups.setdefault(title, {})[label] = arm
    names = list(dict.fromkeys(chain(*groups.values())))
    plots = []
    for title, members in groups.items():
        shown = [members.get(name, Arm(name)) for name in names]
        for kind in experiment.panels:
            plots.append(plot_of(kind, shown, title, experiment))
    return figure(path, CURVES, names, plots)


# -- the page


def introduction(command: str, lines: list[dict]) -> list[str]:
    """What was run, and how to read the tables."""
    runs = pd.DataFrame(lines)
    lengths = runs.tokens_per_param.map("{:.2g}".format).astype(float)
    ratios = ", ".join(map("{:g}".format, sorted(set(lengths))))
    seeds = ", ".join(map(str, sorted(set(runs.seed))))
    trained = f"Training tokens a parameter: {ratios}. Seeds: {seeds}."
    unigram = f"Entropy of the token frequencies: {fmt(lines[0]['unigram'])} nats."
    return [f"`{command}`", "", trained, CELLS, DIVERGED, unigram, ""]


def below_opening(out: Path, opening: list[str], body: list[str]) -> list[str]:
    """A page's lines. What stands above MARK in a page that is there, its answer, stays."""
    file = Path(f"{out}.md")
    if file.exists():
        above, mark, _ = file.read_text().partition(MARK)
        opening = above.splitlines() if mark else opening
    return [*opening, MARK, "", *body]


def write_page(args, experiment, tables: list[list[Arm]]) -> None:
    """OUT.md and OUT.png, also of a part of the runs."""
    shown = []
    found = []
    for part in tables:
        shown += [arm for arm in part if arm.runs or arm.source]
        found += differences(part, experiment)
    arms = [arm for arm in shown if arm.runs]
    lines = []
    for arm in arms:
        lines += arm.runs
    opening = [f"# {experiment.title}: {args.scale}", ""]
    opening += draw(arms, experiment, Path(f"{args.out}.png"))
    text = introduction(args.command, lines)
    text += loss_table(shown)
    text += difference_table(found)
    text += score_table(arms)
    text += run_table(arms)
    origins = {origin(line) for line in lines}
    text += [*sorted(origins), ""]
    save_page(args.out, below_opening(args.out, opening, text))
