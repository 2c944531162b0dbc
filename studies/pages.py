"""A comparison's page and figures, from the runs that its arms hold."""

from dataclasses import replace
from pathlib import Path

import pandas as pd

from studies.comparisons import StudyArm
from tools.arms import (
    Run,
    comparison_figure,
    cost_table,
    curves_figure,
    loss_table,
    shown_depths,
)
from tools.figures import frame_table, records_table, save_page
from tools.report import core_table

DIVERGED = (
    "A run diverged if three steps in a row had no finite loss, if its training loss ended above "
    "its start or more than 0.5 nats above its lowest, or if the state norm passed 10,000 times "
    "its value at step 1 (taken as at least 1)."
)
MARK = "<!-- From here on written by studies.experiments. -->"
RUN_COLUMNS = {  # of a run's line, and how they are written
    "run": "", "dtype": "", "val loss": ".4f", "ρ(Ā)": ".4f", "diverges at step": "",
}  # fmt: skip


def introduction(command: str, runs: list[Run]) -> list[str]:
    """What was run, and how to read the tables."""
    lengths = set()
    for run in runs:
        tokens = run.train[-1]["tokens"] / run.config["params"]
        lengths.add(f"{tokens:.3g}")
    ratios = ", ".join(sorted(lengths, key=float))
    seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
    trained = f"Training tokens a parameter: {ratios}. Seeds: {seeds}."
    return [f"`{command}`", "", trained, DIVERGED, ""]


def source_table(arms: list[StudyArm]) -> list[str]:
    """The paper's or the post's numbers, at their own scale and on their own data."""
    rows = {}
    for arm in arms:
        if arm.source:
            numbers = [f"{of}: {number}" for of, number in arm.source.items()]
            rows[arm.name] = {
                "by depth or score (of a perplexity the logarithm)": "; ".join(numbers)
            }
    if not rows:
        return []
    return ["## The source", "", *frame_table(pd.DataFrame(rows).T.rename_axis("arm"))]


def run_table(runs: list[Run]) -> list[str]:
    rows = []
    for run in runs:
        row = {"run": run.name, "dtype": run.config["dtype"], "val loss": run.loss}
        row |= {"ρ(Ā)": run.last.get("rho"), "diverges at step": run.diverged_at}
        rows.append(row)
    return ["## Runs", "", *records_table(rows, RUN_COLUMNS)]


def origin(run: Run) -> str:
    """Where a run was made."""
    config = run.config
    versions = ", ".join(map(" ".join, config["versions"].items()))
    data = f"data {config['data']['sha256']:.10}; {run.last.get('eval_tokens')} validation tokens"
    commit = f"commit {config['commit'] or 'unknown':.10}"
    return "; ".join([f"- {config['machine']}", versions, data, commit, config["date"]])


def below_opening(out: Path, opening: list[str], body: list[str]) -> list[str]:
    """A page's lines. What stands above MARK in a page that is there, its answer, stays."""
    file = Path(f"{out}.md")
    if file.exists():
        above, mark, _ = file.read_text().partition(MARK)
        opening = above.splitlines() if mark else opening
    return [*opening, MARK, "", *body]


def write_page(args, experiment, arms: list[StudyArm]) -> None:
    """OUT.md and its figures, also of a part of the runs."""
    arms = [arm for arm in arms if arm.runs]
    runs = []
    for arm in arms:
        runs += [replace(run, name=f"{arm.name}, seed {run.seed}") for run in arm.runs]
    opening = [f"# {experiment.title}: {args.scale}", ""]
    opening += comparison_figure(Path(f"{args.out}.png"), arms)
    text = introduction(args.command, runs)
    text += loss_table(arms, shown_depths(arms))
    text += source_table(arms)
    text += curves_figure(Path(f"{args.out}-training.png"), arms, experiment.curves)
    for file in sorted({file for run in runs for file in run.core}):
        scored = [run for run in runs if file in run.core]
        text += core_table(file, scored)
    text += ["## Cost", "", *cost_table(arms), *run_table(runs)]
    text += [*sorted(set(map(origin, runs))), ""]
    save_page(args.out, below_opening(args.out, opening, text))
