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
from looped.logs import CoreRules
from studies.comparisons import DENSE, EXPERIMENTS, Arm
from studies.ledger import defaults, read_ledger
from studies.scaling_laws import rows_of, write_fit

DEPTHS = {1, 2, 4, 8, 12, 16, 24, 64}  # of differences
OTHER = {"row": "col", "col": "row"}
OVER_TRAINING = {  # panels over training: the column of the run's history
    "training loss": "loss",
    "state norm": "state_norm",
    "residual": "residual",
    "ρ(Ā)": "rho",
}
NO_RUN = {"loss": {}, "curve": {"tokens": []}, "evals": [], "mu_rec": 0}
RUN_COLUMNS = {  # of a run's line, and how they are written
    "arm": "",
    "run": "",
    "seed": "",
    "dtype": "",
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
CURVES = (
    "Curves: the first seed's runs; one that was trained with one loop, or has none, is a "
    "horizontal line against depth. Differences: mean over seeds, and its 95 % interval."
)


# -- losses


def lines_of(arms: list[Arm]) -> list[dict]:
    return list(chain.from_iterable(arm.runs for arm in arms))


def at_mu_rec(line: dict) -> float:
    """The validation loss at mu_rec (0 of a flat model)."""
    return line["loss"].get(line["mu_rec"], math.nan)


def has_one_depth(line: dict) -> bool:
    """Whether a model is flat, or was always trained with one loop and is used with one."""
    once = line["mu_rec"] == 1 and line["settings"]["sampling"] == "fixed"
    return line["mu_rec"] == 0 or once


def losses_of(arm: Arm, depths: list) -> pd.DataFrame:
    """Of the runs that did not diverge: a row for each seed, a column for each depth, "mu_rec" for
    that of the run. A model of one depth has its one loss at every depth.
    """
    losses = {}
    for line in arm.runs:
        if line["diverged_at"]:
            continue
        losses[line["seed"]] = line["loss"] | {"mu_rec": at_mu_rec(line)}
        if has_one_depth(line):
            losses[line["seed"]] = dict.fromkeys(depths, at_mu_rec(line))
    return pd.DataFrame(losses, index=depths, dtype=float).T


def cell(arm: Arm, depth, unit: str) -> str:
    """What the seeds of an arm say at a depth: those that diverge or are stuck, and the mean loss.

    stuck: a loss of more than 95 % of the entropy of token frequencies, so little else was learned.
    """
    diverged = [line["diverged_at"] for line in arm.runs if line["diverged_at"]]
    said = []
    if diverged:
        plural = "s" if len(diverged) > 1 else ""
        said.append(f"diverges at step{plural} {', '.join(map(str, diverged))}")
    for line in arm.runs:
        stuck = line["unigram"] and at_mu_rec(line) > 0.95 * line["unigram"]
        if stuck and not line["diverged_at"]:
            said.append("stuck")
    losses = losses_of(arm, [depth])[depth]
    spec = ".4f"
    if unit == "perplexity":
        losses = np.exp(losses)
        spec = ".2f"
    if len(losses) or not said:
        said.append(plus_minus(losses, spec))
    if len(losses) > 1:
        said[-1] += f" ({losses.std():{spec}}; n = {len(losses)})"
    return "; ".join(said)


# -- differences, paired by seed


@dataclass
class Difference:
    arm: Arm
    base: Arm
    values: pd.DataFrame  # losses of the arm less those of the base: a row a seed, a column a depth


def differences(arms: list[Arm], experiment) -> list[Difference]:
    """Of each arm with runs and its base (see Experiment), at mu_rec and the depths of DEPTHS that
    these arms' runs have.
    """
    known = set().union(*(line["loss"] for line in lines_of(arms)))
    depths = ["mu_rec", *sorted(known.intersection(DEPTHS))]
    bases = {}
    found = []
    for arm in arms:
        if not arm.runs:
            continue
        group = getattr(arm, OTHER[experiment.base])
        base = bases.setdefault(group, arm)
        values = (losses_of(arm, depths) - losses_of(base, depths)).dropna(how="all")
        if arm is not base and len(values):
            found.append(Difference(arm, base, values))
        if experiment.stepwise:
            bases[group] = arm
    return found


def sentence(d: Difference, unit: str) -> str:
    """As: "zoh is lower than euler by 0.0120 ± 0.0040 nats/token, n = 5 (…)". unit: of the source's
    numbers.
    """
    values = d.values["mu_rec"]
    note = interval_note(values)
    sources = [arm.source.get("mu_rec") for arm in (d.base, d.arm)]
    known = pd.to_numeric(sources, errors="coerce")
    if np.isfinite(known).all():
        if unit == "perplexity":
            known = np.log(known)
        note += f"; source {known[1]:.4f} against {known[0]:.4f}"
    side = "lower" if values.mean() < 0 else "higher"
    pair = f"{d.arm.name()} is {side} than {d.base.name()}"
    return f"- {pair} by {plus_minus(np.sign(values.mean()) * values)} nats/token, {note}."


def difference_table(found: list[Difference], experiment) -> list[str]:
    if not found:
        return []
    values = {}
    for d in found:  # at depths that all seeds have
        pair = (d.arm.name(), getattr(d.base, experiment.base))
        values[pair] = d.values.dropna(axis="columns")
    frame = pd.concat(values, names=["loss of", "less that of"]).drop(columns="mu_rec")
    frame = frame.dropna(axis="columns", how="all").sort_index(axis="columns")
    frame = frame.add_prefix("depth ")
    rows = frame.groupby(level=[0, 1], sort=False).agg(signed)
    return ["## Differences of loss by depth, paired by seed", "", *frame_table(rows)]


def signed(values: pd.Series) -> str:
    return plus_minus(values.dropna(), "+.4f")


# -- tables


def source_table(arms: list[Arm], unit: str) -> list[str]:
    """Rows and columns of arms, at mu_rec or at the source's depths; its number right of ours."""
    known = set().union(*(arm.source for arm in arms))
    depths = [depth for depth in ("mu_rec", *sorted(DEPTHS)) if depth in known]
    rows = {}
    for arm, depth in product(arms, depths or ["mu_rec"]):
        row = rows.setdefault(arm.row, {"": arm.row})
        name = arm.col or f"depth {depth}"
        row[name] = cell(arm, depth, unit)
        if depths:
            row[f"source, {name}"] = arm.source.get(depth, "–")
    frame = pd.DataFrame(rows.values()).fillna("–")
    return table([name.split(",")[0] for name in frame], frame.to_numpy())


def score_table(arms: list[Arm]) -> list[str]:
    """Scores by the rules they were measured by, and the source's."""
    scores = []
    said = []
    for arm in arms:
        known = [f"{of} {arm.source[of]}" for of in arm.source if of not in {"mu_rec", *DEPTHS}]
        if known:
            said.append(f"- Source, {arm.name()}: {'; '.join(known)}.")
        for line in arm.runs:
            scores += [{"arm": arm.name()} | score for score in line["core"]]
    if not scores:
        return []
    rules = ["arm", "panel", "name", "depth", *CoreRules._fields[1:]]
    frame = pd.DataFrame(scores).reindex(columns=[*rules, "mean"])
    frame = frame.astype(object).fillna("–").astype({"mean": float})
    means = frame.groupby(rules, sort=False)["mean"].agg(plus_minus)
    return ["## Downstream", "", *frame_table(means.to_frame()), *said, ""]


def run_table(arms: list[Arm]) -> list[str]:
    """A row for each training; one that several arms share has the name of the last."""
    rows = {}
    for arm in arms:
        for line in arm.runs:
            rows[line["run"]] = line | {
                "arm": arm.name(),
                "run": Path(line["run"]).name,
                "validation_loss": at_mu_rec(line),
                "ρ(Ā)": line["spectra"].get("rho"),
            }
    header, *body = records_table(list(rows.values()), RUN_COLUMNS)
    return ["## Runs", "", header.replace("_", " "), *body]


def origin(line: dict) -> str:
    """Where a run was made."""
    commit = "commit " + (line["commit"] or "unknown")[:10]
    if line["changed"]:
        commit += " with changes"
    versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
    data = f"data {line['data'][:10]}; {line['eval_tokens']} validation tokens"
    return "- " + "; ".join([line["machine"], line["dtype"], versions, data, commit, line["date"]])


# -- figures


def curve(line: dict, kind: str) -> tuple:
    """(x, y) of one run's curve over training."""
    names = OVER_TRAINING | {"validation loss": f"loss.{line['mu_rec']}"}
    name = names.get(kind) or kind.replace("validation at ", "loss.")
    history = pd.concat([pd.DataFrame(line["curve"]), pd.json_normalize(line["evals"])])
    values = history.set_index("tokens").reindex(columns=[name])[name].dropna()
    return values.index / 1e6, values.to_numpy(float)


def difference_plot(arms: list[Arm], ylabel: str, experiment) -> Plot:
    """Mean differences over seeds by depth, with their 95 % intervals."""
    means = {arm.name(): {} for arm in arms}
    halves = dict.fromkeys(means)
    for d in differences(arms, experiment):
        values = d.values.drop(columns="mu_rec").dropna(axis="columns")  # depths of all seeds
        means[d.arm.name()] = values.mean().to_dict()
        if len(values) > 1:
            halves[d.arm.name()] = half_width(values)
    plot = depth_plot(list(means.values()), ylabel)
    plot.half_widths = list(halves.values())
    return plot


def plot_of(kind: str, arms: list[Arm], title: str, experiment) -> Plot:
    """A plot of the first seeds' runs, or of the mean differences over seeds; an arm may have no
    run.
    """
    ylabel = "\n".join([*textwrap.wrap(title, 30), kind])
    if kind == "difference by depth":
        return difference_plot(arms, ylabel, experiment)
    firsts = [(arm.runs or [NO_RUN])[0] for arm in arms]
    if kind == "loss by depth":
        losses = []
        for line in firsts:
            level = line["loss"] and has_one_depth(line)
            losses.append({0: at_mu_rec(line)} if level else line["loss"])
        return depth_plot(losses, ylabel)
    scale = "log" if kind in ("state norm", "residual") else "linear"
    curves = [curve(line, kind) for line in firsts]
    return Plot("tokens trained, millions", ylabel, curves, {"yscale": scale})


def draw(arms: list[Arm], experiment, path: Path) -> list[str]:
    """The figure; panels are split by the tables' rows or columns if the experiment says so."""
    split = experiment.split
    groups = {}
    for arm in arms:
        title = getattr(arm, split) if split else ""
        label = getattr(arm, OTHER[split]) if split else arm.name()
        groups.setdefault(title, {})[label] = arm
    names = list(dict.fromkeys(chain.from_iterable(groups.values())))
    plots = []
    for (title, members), kind in product(groups.items(), experiment.panels):
        shown = [members.get(name, Arm(name)) for name in names]
        plots.append(plot_of(kind, shown, title, experiment))
    return figure(path, CURVES, names, plots)


# -- the page


def introduction(args, experiment, lines: list[dict]) -> list[str]:
    """What was run, and how to read the tables."""
    ratios = sorted({f"{line['tokens_per_param']:.0f}" for line in lines}, key=float)
    if len(ratios) > 6:
        ratios = [f"{ratios[0]} to {ratios[-1]}"]
    seeds = ", ".join(map(str, sorted({line["seed"] for line in lines})))
    unigram = fmt(lines[0]["unigram"])
    return [
        f"# {experiment.title}: {args.scale}",
        "",
        f"`{args.command}`",
        "",
        f"Training tokens a parameter: {', '.join(ratios)}. Seeds: {seeds}.",
        f"Cells: validation {experiment.unit}, {CELLS}",
        DIVERGED,
        f"Entropy of the token frequencies: {unigram} nats (stuck: a loss above 95 % of it).",
        "",
    ]


def write_page(args, tables: list[list[Arm]]) -> None:
    """results/NAME-SCALE.md and .png, also of a part of the runs; of the scaling experiments the
    fits as well.
    """
    experiment = EXPERIMENTS[args.name]
    arms = [arm for arm in chain.from_iterable(tables) if arm.runs]
    lines = lines_of(arms)
    if not lines:
        fail(f"no finished run of {args.name} to show; {args.out}.md is left as it is")
    text = introduction(args, experiment, lines)
    found = []
    for part in tables:
        shown = [arm for arm in part if arm.runs or arm.source]
        pairs = differences(part, experiment)
        found += pairs
        if shown:
            text += source_table(shown, experiment.unit)
        if pairs:
            text += [*(sentence(d, experiment.unit) for d in pairs), ""]
    text += draw(arms, experiment, Path(f"{args.out}.png"))
    text += score_table(arms)
    text += difference_table(found, experiment)
    text += run_table(arms)
    text += [*sorted({origin(line) for line in lines}), ""]
    save_page(args.out, text)
    good = [line for line in lines if not line["diverged_at"]]
    if good and experiment.depths == DENSE:
        write_fit(rows_of(good), rows_of(held_out(good)), args.out)


def held_out(fitted: list[dict]) -> list[dict]:
    """Other runs in the ledger of the same looped model, rows and recipe, to predict."""
    wanted = family(fitted[-1])
    others = [line for line in read_ledger().values() if family(line) == wanted]
    return [line for line in others if line not in fitted and not line["diverged_at"]]


def family(line: dict) -> dict:
    """What held-out runs share with the fitted ones."""
    free = {"steps", "seed", "mu_rec", "mu_bwd"}
    known = defaults() | line["settings"]
    shared = {name: value for name, value in known.items() if name not in free}
    return shared | {"data": line["data"]}
