"""A comparison's page and figure, from the lines of the ledger that its arms hold."""

import math
import textwrap
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

import numpy as np
import pandas as pd

from looped.console import fail
from looped.figures import (
    Plot,
    depth_plot,
    figure,
    fmt,
    frame_table,
    half_width,
    interval_note,
    plus_minus,
    records_table,
    save_page,
    table,
)
from studies.comparisons import EXPERIMENTS, Arm, flat
from studies.ledger import read_ledger
from studies.scaling_laws import rows_of, write_fit

USUAL = {"protocol": "parcae", "baselines": "v1", "max_per_task": None}  # of a score
OTHER = {"row": "col", "col": "row"}
OVER_TRAINING = {  # panels over training: the column of the run's history
    "training loss": "loss",
    "state norm": "state_norm",
    "residual": "residual",
    "ρ(Ā)": "rho",
}
NO_RUN = {"loss": {}, "curve": {"tokens": []}, "evals": [], "mu_rec": 0}
DEPTHS = {1, 2, 4, 8, 12, 16, 24, 64}  # of the table of differences
RUN_COLUMNS = {  # of a run's line, and how they are written
    "arm": "",
    "run": "",
    "seed": "",
    "params": ",.0f",
    "tokens": ",.0f",
    "tokens_per_param": ".1f",
    "first_loss": ".4f",
    "lowest_loss": ".4f",
    "last_loss": ".4f",
    "validation_loss": ".4f",
    "skipped": ".0f",
    "largest_state_norm": ".3g",
    "tok_s": ",.0f",
    "minutes": ".1f",
    "ρ(Ā)": ".4f",
}
CELLS = (
    "mean over seeds ± half the 95 % t interval (standard deviation over seeds). Source: the "
    "paper's or the post's number, at its own scale and on its own data."
)
DIVERGED = (
    "A run diverged if three steps in a row had no finite loss, if its training loss ended above "
    "its start or more than 0.5 nats above its lowest, or if the state norm became 10,000 times "
    "that of step 1, or 10,000 where that was below 1."
)


def loss_at(line: dict, depth) -> float:
    """The validation loss at a depth; "mu" is mu_rec (0 of a flat model)."""
    if depth == "mu":
        depth = line["mu_rec"]
    return line["loss"].get(depth, math.nan)


def cell(lines: list[dict], depth, unit: str) -> str:
    """What the seeds of an arm say at a depth: those that diverge or are stuck, and the mean loss.

    stuck: a loss of more than 95 % of the entropy of token frequencies, so little else was learned.
    """
    said = []
    losses = []
    for line in lines:
        if line["diverged_at"]:
            said.append(f"diverges at step {line['diverged_at']}")
            continue
        losses.append(loss_at(line, depth))
        if line["unigram"] and loss_at(line, "mu") > 0.95 * line["unigram"]:
            said.append("stuck")
    spec = ".4f"
    if unit == "perplexity":
        losses = np.exp(losses)
        spec = ".2f"
    if len(losses) or not said:
        said.append(plus_minus(losses, spec))
    if len(losses) > 1:
        said[-1] += f" ({np.std(losses, ddof=1):{spec}})"
    return "; ".join(said)


# -- differences, paired by seed


@dataclass
class Difference:
    arm: Arm
    base: Arm
    values: np.ndarray  # loss of the arm less that of the base, a seed each


def losses_of(arm: Arm, depth) -> pd.Series:
    """By seed, without diverged runs; a run of one depth has its one loss at every depth."""
    losses = {}
    for seed, line in arm.runs.items():
        if not line["diverged_at"]:
            losses[seed] = loss_at(line, "mu" if has_one_depth(line) else depth)
    return pd.Series(losses, dtype=float)


def has_one_depth(line: dict) -> bool:
    """Whether a model is flat, or was always trained with one loop and is used with one."""
    once = line["mu_rec"] == 1 and line["settings"]["sampling"] == "fixed"
    return line["mu_rec"] == 0 or once


def differences(arms: list[Arm], experiment, depth) -> list[Difference]:
    """Of each arm with runs and its base: see Experiment."""
    bases = {}
    found = []
    for arm in arms:
        if not arm.runs:
            continue
        group = getattr(arm, OTHER[experiment.base])
        base = bases.setdefault(group, arm)
        values = (losses_of(arm, depth) - losses_of(base, depth)).dropna()
        if arm is not base and len(values):
            found.append(Difference(arm, base, values.to_numpy()))
        if experiment.stepwise:
            bases[group] = arm
    return found


def sentence(d: Difference, unit: str) -> str:
    """As: "zoh is lower than euler by 0.0120 ± 0.0040 nats/token, n = 5 (…)". unit: of the source's
    numbers.
    """
    mean = d.values.mean()
    note = interval_note(d.values)
    known = [arm.source.get("mu") for arm in (d.base, d.arm)]
    if all(isinstance(number, float) for number in known):
        if unit == "perplexity":
            known = np.log(known)
        note += f"; source {known[1]:.4f} against {known[0]:.4f}"
    side = "lower" if mean < 0 else "higher"
    pair = f"{d.arm.name()} is {side} than {d.base.name()}"
    return f"- {pair} by {plus_minus(np.sign(mean) * d.values)} nats/token, {note}."


def difference_table(tables: list[list[Arm]], experiment) -> list[str]:
    known = set().union(*(line["loss"] for line in lines_of(flat(tables))))
    cells = []
    for depth, arms in product(sorted(known & DEPTHS), tables):
        for d in differences(arms, experiment, depth):
            names = [d.arm.name(), getattr(d.base, experiment.base)]
            cells.append([*names, f"depth {depth}", plus_minus(d.values, "+.4f")])
    if not cells:
        return []
    names = ["loss of", "less that of"]
    frame = pd.DataFrame(cells, columns=[*names, "depth", "difference"])
    rows = frame.pivot_table("difference", names, "depth", aggfunc="first", sort=False)
    title = "## Differences of loss by depth, paired by seed"
    return [title, "", *frame_table(rows)]


# -- tables


def lines_of(arms: list[Arm]) -> list[dict]:
    """The lines of all their runs, by arm and seed."""
    lines = []
    for arm in arms:
        lines += [arm.runs[seed] for seed in sorted(arm.runs)]
    return lines


def source_table(arms: list[Arm], unit: str) -> list[str]:
    """Rows and columns of arms, at mu_rec or at the source's depths; its number right of ours."""
    known = {}  # the source's depths, in its order
    for arm in arms:
        known |= arm.source
    rows = {}
    for arm, depth in product(arms, known or ["mu"]):
        name = arm.col
        if depth != "mu" or not name:
            at = "mu_rec" if depth == "mu" else depth
            name = f"{name} depth {at}".strip()
        row = rows.setdefault(arm.row, {"": arm.row})
        row[name] = cell(lines_of([arm]), depth, unit)
        if known:
            row[f"source, {name}"] = arm.source.get(depth, "–")
    frame = pd.DataFrame(rows.values()).fillna("–")
    header = ["source" if name.startswith("source, ") else name for name in frame]
    return table(header, frame.to_numpy())


def score_table(arms: list[Arm]) -> list[str]:
    """CORE, CORE Extended and LAMBADA of the runs that have them, beside the source's."""
    scores = {}
    source = {}
    for arm in arms:
        source[arm.name()] = "; ".join(f"{name} {value}" for name, value in arm.core.items())
        for line in lines_of([arm]):
            for score in line["core"]:
                at = "mu_rec" if score["depth"] == line["mu_rec"] else score["depth"]
                name = f"{score['name'] or score['panel']}, depth {at}{other_rules(score)}"
                scores[arm.name(), name, line["seed"]] = score["mean"]
    if not scores:
        return []
    frame = pd.Series(scores).rename_axis(["arm", "score", "seed"]).reset_index(name="mean")
    rows = frame.pivot_table("mean", "arm", "score", aggfunc=plus_minus, sort=False)
    rows["source"] = pd.Series(source)
    return ["## Downstream", "", *frame_table(rows)]


def other_rules(score: dict) -> str:
    """By which rules a score was measured, if not by core_eval.py's own."""
    words = ""
    for name, usual in USUAL.items():
        if score.get(name) not in (None, usual):
            words += f", {name} {score[name]}"
    return words


def run_table(arms: list[Arm]) -> list[str]:
    """A row for each training; one that several arms share has the name of the last."""
    rows = {}
    for arm in arms:
        for line in lines_of([arm]):
            path = Path(line["run"])
            rows[path] = line | {
                "arm": arm.name(),
                "run": path.name,
                "validation_loss": loss_at(line, "mu"),
                "ρ(Ā)": line["spectra"].get("rho"),
            }
    header, *body = records_table(list(rows.values()), RUN_COLUMNS)
    return ["## Runs", "", header.replace("_", " "), *body]


def origin(line: dict) -> str:
    """Where a run was made."""
    commit = f"commit {str(line['commit'])[:10]}"
    if line["changed"]:
        commit += " with changes"
    versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
    data = f"data {line['data'][:10]}; {line['eval_tokens']} validation tokens"
    return "- " + "; ".join([line["machine"], line["dtype"], versions, data, commit, line["date"]])


# -- figures


def curve(line: dict, kind: str) -> tuple:
    """(x, y) of one run's curve over training; a flat model is validated at depth 0 alone."""
    name = OVER_TRAINING.get(kind)
    if name is None:
        depth = line["mu_rec"]
        if kind.startswith("validation at ") and depth:
            depth = kind.removeprefix("validation at ")
        name = f"loss.{depth}"
    history = pd.concat([pd.DataFrame(line["curve"]), pd.json_normalize(line["evals"])])
    values = history.set_index("tokens").reindex(columns=[name])[name].dropna()
    return values.index / 1e6, values.to_numpy(float)


def drawn_losses(line: dict) -> dict[int, float]:
    """{depth: loss} as `depth_plot` takes it; of a model of one depth {0: loss}, its level."""
    if line["loss"] and has_one_depth(line):
        return {0: loss_at(line, "mu")}
    return line["loss"]


def difference_plot(arms: list[Arm], ylabel: str, experiment) -> Plot:
    """Mean differences over seeds by depth, with their 95 % intervals."""
    means = {arm.name(): {} for arm in arms}
    halves = {arm.name(): [] for arm in arms}
    for depth in sorted(set().union(*(line["loss"] for line in lines_of(arms)))):
        for d in differences(arms, experiment, depth):
            means[d.arm.name()][depth] = d.values.mean()
            half = half_width(d.values) if len(d.values) > 1 else math.nan
            halves[d.arm.name()].append(half)
    plot = depth_plot(list(means.values()), ylabel)
    plot.half_widths = [np.array(half) for half in halves.values()]
    return plot


def plot_of(kind: str, arms: list[Arm], title: str, experiment) -> Plot:
    """A plot of the first seeds' runs, or of the mean differences over seeds; an arm may have no
    run.
    """
    ylabel = "\n".join([*textwrap.wrap(title, 30), kind])
    firsts = [(lines_of([arm]) or [NO_RUN])[0] for arm in arms]
    if kind == "loss by depth":
        return depth_plot([drawn_losses(line) for line in firsts], ylabel)
    if kind == "difference by depth":
        return difference_plot(arms, ylabel, experiment)
    scale = "log" if kind in ("state norm", "residual") else "linear"
    curves = [curve(line, kind) for line in firsts]
    return Plot("tokens trained, millions", ylabel, curves, {"yscale": scale})


def draw(arms: list[Arm], experiment, path: Path) -> list[str]:
    """The figure; panels are split by the tables' rows or columns if the experiment says so."""
    groups = {}
    for arm in arms:
        title = ""
        label = arm.name()
        if experiment.split:
            title = getattr(arm, experiment.split)
            label = getattr(arm, OTHER[experiment.split])
        groups.setdefault(title, {})[label] = arm
    names = dict.fromkeys(chain.from_iterable(groups.values()))
    plots = []
    for title, members in groups.items():
        shown = [members.get(name, Arm(name)) for name in names]
        for kind in experiment.panels:
            plots.append(plot_of(kind, shown, title, experiment))
    caption = (
        "Curves: the first seed's runs; one that was trained with one loop, or has none, is a "
        "horizontal line against depth. Differences: mean over seeds, and its 95 % interval."
    )
    return figure(path, caption, list(names), plots)


# -- the page


def introduction(args, experiment, lines: list[dict]) -> list[str]:
    """What was run, and how to read the tables."""
    ratios = sorted({f"{line['tokens_per_param']:.0f}" for line in lines}, key=float)
    if len(ratios) > 6:
        ratios = [f"{ratios[0]} to {ratios[-1]}"]
    seeds = ", ".join(map(str, sorted({line["seed"] for line in lines})))
    unigram = lines[0]["unigram"] if lines else None
    return [
        f"# {experiment.title}: {args.scale}",
        "",
        f"`{args.command}`",
        "",
        f"Training tokens a parameter: {', '.join(ratios)}. Seeds: {seeds}.",
        f"Cells: validation {experiment.unit}, {CELLS}",
        DIVERGED,
        f"Entropy of the token frequencies: {fmt(unigram)} nats (stuck: a loss above 95 % of it).",
        "",
    ]


def write_page(args, tables: list[list[Arm]]) -> None:
    """results/NAME-SCALE.md and .png, also of a part of the runs; of the scaling experiments the
    fits as well.
    """
    experiment = EXPERIMENTS[args.name]
    arms = [arm for arm in flat(tables) if arm.runs]
    lines = lines_of(arms)
    if not lines:
        fail(f"no finished run of {args.name} to show; {args.out}.md is left as it is")
    text = introduction(args, experiment, lines)
    for part in tables:
        shown = [arm for arm in part if arm.runs or arm.source]
        if shown:
            text += source_table(shown, experiment.unit)
        said = [sentence(d, experiment.unit) for d in differences(part, experiment, "mu")]
        if said:
            text += [*said, ""]
    text += draw(arms, experiment, Path(f"{args.out}.png"))
    text += score_table(arms)
    text += difference_table(tables, experiment)
    text += run_table(arms)
    text += [*sorted({origin(line) for line in lines}), ""]
    save_page(args.out, text)
    good = [line for line in lines if not line["diverged_at"]]
    if good and args.name in ("isoflop", "testtime", "sizes"):
        unseen = held_out(good, read_ledger())
        write_fit(rows_of(good), rows_of(unseen), args.out)


def held_out(lines: list[dict], known: list[dict]) -> list[dict]:
    """Other runs of the same looped model, rows and recipe, to predict.

    They may differ in mu_rec, length and seed.
    """
    wanted = family(lines[-1])
    others = [line for line in known if line not in lines and not line["diverged_at"]]
    return [line for line in others if family(line) == wanted]


def family(line: dict) -> dict:
    """What held-out runs share with the fitted ones."""
    free = {"steps", "seed", "mu_rec", "mu_bwd"}
    shared = {name: value for name, value in line["settings"].items() if name not in free}
    return shared | {"data": line["data"]}
