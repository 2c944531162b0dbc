"""A comparison's page and figure, from the lines of the ledger that its arms hold."""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from pathlib import Path

import numpy as np
import pandas as pd

from looped.figures import Panel, depth_panel, figure, fmt, interval, table
from looped.files import write_atomic
from studies import scaling_laws
from studies.comparisons import EXPERIMENTS, Arm, flat
from studies.ledger import read_ledger

CURVES = {  # panels over training: the curve of the ledger's line
    "training loss": "loss",
    "state norm": "state_norm",
    "residual": "residual",
    "ρ(Ā)": "decay_max",
}
NO_CURVE = ([math.nan], [math.nan])
RUN_COLUMNS = {  # of a run's line, and how they are written
    "params": ",.0f",
    "tokens": ",.0f",
    "tokens_per_param": ".1f",
    "first_loss": ".4f",
    "lowest_loss": ".4f",
    "last_loss": ".4f",
    "skipped": ".0f",
    "largest_state_norm": ".3g",
    "tok_s": ",.0f",
    "minutes": ".1f",
}
CELLS = (
    "mean over seeds ± half the 95 % t interval. Source: the paper's or the post's number, at its "
    "own scale and on its own data."
)
DIVERGED = (
    "A run diverged if three steps in a row had no finite loss, if its training loss ended above "
    "its start or more than 0.5 nats above its lowest, or if the state norm became 10,000 times "
    "that of step 1."
)


def loss_at(line: dict, depth) -> float:
    """The validation loss at a depth; "mu" is mu_rec (0 of a flat model)."""
    if depth == "mu":
        depth = line["mu_rec"]
    return line["loss"].get(depth, math.nan)


def spread(values, spec: str = ".4f") -> str:
    """The mean, with half the width of its 95 % t interval where there are several."""
    if len(values) == 0:
        return "–"
    mean = fmt(np.mean(values), spec)
    if len(values) == 1:
        return mean
    return f"{mean} ± {interval(values).half:{spec.lstrip('+')}}"


def outcome(line: dict) -> str:
    """In words. stuck: a loss of more than 95 % of the entropy of token frequencies, so little else
    was learned.
    """
    if line["diverged_at"]:
        return f"diverges at step {line['diverged_at']}"
    if line["unigram"] and loss_at(line, "mu") > 0.95 * line["unigram"]:
        return "stuck"
    return "converges"


def cell(lines: list[dict], depth, unit: str) -> str:
    """What the seeds of an arm say at a depth."""
    if not lines:
        return "–"
    if unit == "verdict":
        return verdict(lines, depth)
    said = [outcome(line) for line in lines if line["diverged_at"]]
    losses = [loss_at(line, depth) for line in lines if not line["diverged_at"]]
    if losses and unit == "perplexity":
        said.append(spread(np.exp(losses), ".2f"))
    elif losses:
        said.append(spread(losses))
    return "; ".join(said)


def verdict(lines: list[dict], depth) -> str:
    said = []
    for words, count in Counter(map(outcome, lines)).items():
        said.append(f"{count} × {words}" if len(lines) > 1 else words)
    losses = [loss_at(line, depth) for line in lines if not line["diverged_at"]]
    if losses:
        said.append(spread(losses))
    radii = [line["spectra"]["rho"] for line in lines if line["spectra"].get("rho")]
    norms = [line["largest_state_norm"] for line in lines if line["largest_state_norm"]]
    largest = fmt(max(norms, default=None), ".2g")
    return "; ".join([*said, f"ρ(Ā) {spread(radii, '.3f')}", f"‖h_T‖ up to {largest}"])


# -- differences, paired by seed


@dataclass
class Difference:
    arm: Arm
    base: Arm
    values: list[float]  # loss of the arm less that of the base, a seed each


def differences(arms: list[Arm], by: str, depth) -> list[Difference]:
    """Of each arm and its base, the first arm of the same column (by "row") or row (by "col").

    A flat model has its one loss at every depth; pairs with a diverged run are left out.
    """
    place = attrgetter({"row": "col", "col": "row"}[by])
    bases = {}
    found = []
    for arm in arms:
        base = bases.setdefault(place(arm), arm)
        values = []
        for seed in sorted(arm.runs.keys() & base.runs.keys()):
            pair = [arm.runs[seed], base.runs[seed]]
            if not any(line["diverged_at"] for line in pair):
                mine, its = (loss_at(line, depth if line["mu_rec"] else 0) for line in pair)
                values.append(mine - its)
        if arm is not base and values and np.isfinite(values).all():
            found.append(Difference(arm, base, values))
    return found


def sentence(d: Difference) -> str:
    """As: "zoh is lower than euler by 0.0120 ± 0.0040 nats/token, n = 5 (…)"."""
    mean = np.mean(d.values)
    size = f"{abs(mean):.4f}"
    note = ""
    if len(d.values) > 1:
        i = interval(d.values)
        size += f" ± {i.half:.4f}"
        inside = ", includes 0" if abs(mean) <= i.half else ""
        note = f" (95 % t interval{inside}; standard error {i.error:.4f})"
    known = [arm.source.get("mu") for arm in (d.base, d.arm)]
    if all(isinstance(number, float) for number in known):
        note += f"; source {known[1]:g} against {known[0]:g}"
    side = "lower" if mean < 0 else "higher"
    pair = f"{d.arm.name()} is {side} than {d.base.name()}"
    return f"- {pair} by {size} nats/token, n = {len(d.values)}{note}."


def difference_table(tables: list[list[Arm]], by: str) -> list[str]:
    """The differences at every depth that was evaluated, or at some of very many."""
    depths = set()
    for line in lines_of(flat(tables)):
        depths |= line["loss"].keys() - {0}
    if len(depths) > 16:
        depths &= {1, 2, 4, 8, 12, 16, 24}
    cells = []
    for depth in sorted(depths):
        for arms in tables:
            for d in differences(arms, by, depth):
                names = [d.arm.name(), getattr(d.base, by)]
                cells.append([*names, f"T = {depth}", spread(d.values, "+.4f")])
    if not cells:
        return []
    names = ["loss of", "less that of"]
    frame = pd.DataFrame(cells, columns=[*names, "depth", "difference"])
    rows = frame.pivot_table("difference", names, "depth", aggfunc="first", sort=False)
    rows = rows.fillna("–").reset_index()
    title = "## Differences of loss at depth T, paired by seed"
    return [title, "", *table(list(rows), rows.to_numpy())]


# -- tables


def lines_of(arms: list[Arm]) -> list[dict]:
    """The lines of all their runs, by arm and seed."""
    lines = []
    for arm in arms:
        lines += [arm.runs[seed] for seed in sorted(arm.runs)]
    return lines


def source_table(arms: list[Arm], experiment) -> list[str]:
    """The source's table: rows and columns of arms, or of arms and depths; its number right of
    ours.
    """
    known = {}  # the source's depths, in its order
    for arm in arms:
        known |= arm.source
    depths = list(known)
    if not known:
        depths = ["mu"]
        if len(arms) < 8:
            depths += map(int, experiment.depths.split(","))
    rows = {arm.row: {"": arm.row} for arm in arms}
    for arm, depth in product(arms, depths):
        name = arm.col
        if depth != "mu" or not name:
            at = "mu_rec" if depth == "mu" else depth
            name = f"{name} T = {at}".strip()
        row = rows[arm.row]
        row[name] = cell(lines_of([arm]), depth, experiment.unit)
        if known:
            row[f"source, {name}"] = arm.source.get(depth, "–")
    frame = pd.DataFrame(rows.values()).fillna("–")
    header = ["source" if name.startswith("source, ") else name for name in frame]
    return table(header, frame.to_numpy())


def score_table(arms: list[Arm]) -> list[str]:
    """CORE, CORE Extended and LAMBADA of the runs that have them, beside the source's."""
    scores = []
    for arm in arms:
        for line in lines_of([arm]):
            for score in line["core"]:
                at = "mu_rec" if score["depth"] == line["mu_rec"] else score["depth"]
                name = f"{score['name'] or score['panel']}, T = {at}"
                scores.append([arm.name(), name, score["mean"]])
    if not scores:
        return []
    frame = pd.DataFrame(scores, columns=["arm", "score", "mean"])
    rows = frame.pivot_table("mean", "arm", "score", aggfunc=spread, sort=False)
    for arm in arms:
        source = [f"{name} {value}" for name, value in arm.core.items()]
        rows.loc[arm.name(), "source"] = "; ".join(source)
    rows = rows.fillna("–").reset_index()
    return ["## Downstream", "", *table(list(rows), rows.to_numpy())]


def run_table(lines: list[dict]) -> list[str]:
    """A row for each training."""
    rows = {}
    for line in lines:
        run = Path(line["run"])
        numbers = [fmt(line[name], spec) for name, spec in RUN_COLUMNS.items()]
        radius = fmt(line["spectra"].get("rho"))
        rows[run] = [run.name, line["seed"], *numbers, radius]
    names = [name.replace("_", " ") for name in RUN_COLUMNS]
    return ["## Runs", "", *table(["run", "seed", *names, "ρ(Ā)"], rows.values())]


def circumstances(line: dict) -> str:
    """Where a run was made."""
    commit = str(line["commit"])[:10]
    if line["changed"]:
        commit += " with changes"
    versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
    told = [line["machine"], line["dtype"], versions, f"data {line['data'][:10]}"]
    told.append(f"{line['eval_tokens']} validation tokens")
    return "- " + "; ".join([*told, f"commit {commit}", line["date"]])


# -- figures


def curve(line: dict, kind: str) -> tuple:
    """(x, y) of one run's curve over training."""
    name = CURVES.get(kind)
    if name in line["curve"]:
        tokens = line["curve"]["tokens"]
        values = line["curve"][name]
    else:  # over its validations
        depth = line["mu_rec"]
        if kind.startswith("validation at ") and depth:
            depth = int(kind.split()[-1])
        tokens = [entry["tokens"] for entry in line["evals"]]
        values = [entry["loss"].get(depth) for entry in line["evals"]]
        if kind == "ρ(Ā)":
            values = [entry.get("rho") for entry in line["evals"]]
        elif kind in ("state norm", "residual"):
            values = [None for _ in tokens]
    return np.array(tokens) / 1e6, np.array(values, float)


def panel(kind: str, arms: list[Arm], title: str, by: str) -> Panel:
    """A panel of the first seeds' runs, or of the mean differences over seeds; an arm may have no
    run.
    """
    ylabel = f"{title}\n{kind}".strip()
    firsts = [next(iter(lines_of([arm])), None) for arm in arms]
    losses = [line["loss"] if line else {} for line in firsts]
    if kind == "loss by depth":
        return depth_panel(losses, ylabel)
    if kind == "difference by depth":
        means = {id(arm): {} for arm in arms}
        for depth in set().union(*losses):
            for d in differences([arm for arm in arms if arm.runs], by, depth):
                means[id(d.arm)][depth] = np.mean(d.values)
        return depth_panel(list(means.values()), ylabel)
    settings = {"yscale": "log"} if kind in ("state norm", "residual") else {}
    curves = [curve(line, kind) if line else NO_CURVE for line in firsts]
    return Panel("tokens trained, millions", ylabel, curves, settings)


def draw(arms: list[Arm], experiment, path: Path) -> list[str]:
    """The figure; panels are split by the tables' rows or columns if the experiment says so."""
    groups = {}
    for arm in arms:
        title = ""
        label = arm.name()
        if experiment.split == "row":
            title, label = arm.row, arm.col
        elif experiment.split == "col":
            title, label = arm.col, arm.row
        groups.setdefault(title, {})[label] = arm
    names = {}
    for members in groups.values():
        names |= dict.fromkeys(members)
    panels = []
    for title, members in groups.items():
        shown = [members.get(name, Arm(name)) for name in names]
        for kind in experiment.panels:
            panels.append(panel(kind, shown, title, experiment.base))
    caption = "Curves: the first seed's runs. Differences: mean over seeds."
    return figure(path, caption, list(names), panels)


# -- the page


def introduction(args, experiment, lines: list[dict]) -> list[str]:
    """What was run, and how to read the tables."""
    ratios = sorted({f"{line['tokens_per_param']:.2g}" for line in lines}, key=float)
    seeds = sorted({str(line["seed"]) for line in lines}, key=int)
    unigram = lines[0]["unigram"] if lines else None
    unit = "perplexity" if experiment.unit == "perplexity" else "loss in nats a token"
    return [
        f"# {experiment.title}: {args.scale}",
        "",
        f"`{args.command}`",
        "",
        f"Training tokens a parameter: {', '.join(ratios)}. Seeds: {', '.join(seeds)}.",
        f"Cells: validation {unit}, {CELLS}",
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
    text = introduction(args, experiment, lines)
    for part in tables:
        text += source_table(part, experiment)
        said = [sentence(d) for d in differences(part, experiment.base, "mu")]
        if said and experiment.unit != "verdict" and len(said) < 30:
            text += [*said, ""]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    page = args.out.with_name(f"{args.out.name}.md")
    text += draw(arms, experiment, args.out.with_name(f"{args.out.name}.png"))
    text += score_table(arms)
    text += difference_table(tables, experiment.base)
    text += run_table(lines)
    text += sorted({circumstances(line) for line in lines})
    write_atomic(page, ("\n".join(text) + "\n").encode())
    print(f"written: {page}")
    good = [line for line in lines if not line["diverged_at"]]
    if good and args.name in ("isoflop", "testtime", "sizes"):
        others = held_out(good, read_ledger(args.ledger))
        scaling_laws.fit_lines(good, others, args.out)


def held_out(lines: list[dict], known: list[dict]) -> list[dict]:
    """Other runs of the same looped model, rows and recipe, to predict.

    They may differ in mu_rec, length and seed.
    """
    fitted = [line["settings"] for line in lines]
    kinds = [kind(line) for line in lines if line["settings"]["sampling"] != "fixed"]
    found = []
    for line in known:
        if kind(line) in kinds[:1] and not line["diverged_at"] and line["settings"] not in fitted:
            found.append(line)
    return found


def kind(line: dict) -> dict:
    """What held-out runs share with the fitted ones."""
    free = ("steps", "seed", "mu_rec", "mu_bwd")
    shared = dict(line["settings"], data=line["data"])
    for name in free:
        shared.pop(name, None)
    return shared
