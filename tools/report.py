"""Compares runs: a sentence, pictures and tables from run directories, as report.md and PNG files.

    python -m tools.report runs/nano-euler-s0 runs/nano-zoh-s0  # report.md in their common parent
    python -m tools.report runs/nano-*-s* --out results/gains   # several seeds an arm: t intervals

Reads config.json, log.jsonl and, if present, core_*_*.json. Runs that differ in nothing but the
seed form an arm; every other arm is compared with the first run's, paired by seed.
"""

import json
import os
import re
import textwrap
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from looped.common import Parser, fail
from looped.run import MAY_CHANGE
from model import PRESETS, ModelConfig
from tools.arms import (
    CURVES,
    Arm,
    Run,
    answer,
    comparison_figure,
    cost_table,
    curves_figure,
    difference_over_training,
    loss_table,
    read_run,
    shown_depths,
)
from tools.figures import Plot, figure, fmt, frame_table, records_table, save_page

SCORES = {
    "run": "", "loops": "", "name": "", "mean": ".4f", "std": ".4f", "checkpoint": "", "seeds": "",
}  # fmt: skip


# -------------------------------------------------------------------------------------------------
# Comparing


def settings(run: Run) -> dict:
    """What has an effect on a run's numbers, its code aside."""
    config = run.config
    flags = asdict(ModelConfig()) | run.flags
    told = {name: value for name, value in flags.items() if name not in MAY_CHANGE}
    told["dtype"] = config["dtype"]
    told["rows"] = config["data"]["sha256"][:8]
    told["torch"] = config["versions"]["torch"]
    told["eval_tokens"] = run.last.get("eval_tokens")
    return told


def changes(run: Run, base: Run) -> list[str]:
    """In words, how a run's code and flags differ from another's, the seed apart. Another preset
    stands for all that it changes in the network.
    """
    ours = settings(run)
    theirs = settings(base)
    expected = theirs
    if ours["preset"] != theirs["preset"]:
        expected = theirs | asdict(PRESETS.get(ours["preset"], ModelConfig()))
    found = ["other code"] if run.config["code"] != base.config["code"] else []
    for name, value in ours.items():
        was = theirs.get(name)
        if value not in (was, expected.get(name)) and name != "seed":
            found.append(f"{name} {value} instead of {was}")
    return found


def arms_of(runs: list[Run]) -> list[Arm]:
    """Each is called by its first run."""
    arms = {}
    for run in runs:
        name = re.sub(r"[-_]s\d+$", "", run.name)
        key = run.config["code"], *changes(run, runs[0])
        arms.setdefault(key, Arm(name)).runs.append(run)
    return list(arms.values())


def comparison(arm: Arm, base: Arm) -> list[str]:
    """Whether an arm is better than the first, and what differs."""
    changed = changes(arm.runs[0], base.runs[0])
    lines = [f"{answer(arm, base)} {arm.name} has {', '.join(changed)}.", ""]
    if len(changed) > 1:
        lines += [f"Warning: more than one thing differs in {arm.name}.", ""]
    return lines


def not_compared(runs: list[Run]) -> list[str]:
    lines = []
    for run in runs:
        if not run.counts():
            why = "it is unfinished, diverged, or was continued by other code"
            lines += [f"Warning: {run.name} is not compared: {why}.", ""]
    return lines


# -------------------------------------------------------------------------------------------------
# The page


def flag_table(runs: list[Run]) -> list[str]:
    """The settings in which any two runs differ."""
    flags = pd.DataFrame({run.name: settings(run) for run in runs}, dtype=object)
    differ = flags.astype(str).nunique(axis=1, dropna=False) > 1
    return frame_table(flags[differ].rename_axis("flag"))


def core_table(file: str, runs: list[Run]) -> list[str]:
    """Scores by depth. ±: over seeds; of one seed, the binomial standard error."""
    rows = []
    for run in runs:
        record = run.core[file]
        about = {"run": run.name, "checkpoint": record["checkpoint"]}
        about["seeds"] = str(record["seeds"])
        for depth, scores in record["depths"].items():
            for average in (scores["aggregate"], scores.get("core")):
                if average:
                    rows.append(about | {"loops": int(depth)} | average)
    return [f"## {file}", "", *records_table(rows, SCORES)]


def radars(file: str, runs: list[Run], out: Path) -> list[str]:
    """The scores at mu_rec by category."""
    scores = [run.core[file]["depths"].get(str(run.depth), {}) for run in runs]
    plots = []
    for kind in ("categories_fine", "categories_ext"):
        plots.append(radar([score.get(kind, {}) for score in scores]))
    names = [run.name for run in runs] + ["chance"]
    caption = "Mean centred accuracy by category at mu_rec."
    return figure(out / f"radar_{file}.png", caption, names, plots, polar=True)


def radar(categories: list[dict]) -> Plot:
    """A closed curve for each run's {category: mean}, and one at 0 for chance."""
    means = pd.DataFrame([*categories, {}])
    means.iloc[-1] = 0
    closed = pd.concat([means, means.iloc[:, :1]], axis=1).to_numpy(float)
    angles = np.linspace(0, 2 * np.pi, closed.shape[1])
    labels = [textwrap.fill(name, 16, break_long_words=False) for name in means]
    ticks = {"xticks": angles[:-1], "xticklabels": labels}
    curves = [(angles, row) for row in closed]
    return Plot("", "", curves, ticks)


def unigram_baseline(run: Run) -> list[str]:
    """The entropy of the token frequencies, if the rows are here."""
    manifest = Path(run.config["data"]["path"], "manifest.json")
    if not manifest.exists():
        return []
    entropy = json.loads(manifest.read_text())["unigram_entropy"]
    return [f"Unigram baseline: {fmt(entropy)} nats/token.", ""]


def report(runs: list[Run], out: Path) -> None:
    """The page and its figures; its beginning goes to the screen, too."""
    arms = arms_of(runs)
    lines = [f"# {', '.join(arm.name for arm in arms)}", ""]
    for arm in arms[1:]:
        lines += comparison(arm, arms[0])
    data = Path(runs[0].config["data"]["path"])
    title = "/".join(data.parts[-2:])
    lines += comparison_figure(out / "depth.png", arms, title)
    lines += loss_table(arms, [])
    lines += unigram_baseline(runs[0])
    lines += not_compared(runs)
    print("\n".join(lines))
    lines += ["## Val loss by depth", "", *loss_table(arms, shown_depths(arms))]
    first = [difference_over_training(arms, title)] if len(arms) > 1 else []
    lines += ["## Over training", "", *curves_figure(out / "training.png", arms, CURVES, first)]
    lines += ["## What differs", "", *flag_table(runs)]
    lines += ["## Cost", "", *cost_table(arms)]
    files = set()
    for run in runs:
        files |= run.core.keys()
    for file in sorted(files):
        scored = [run for run in runs if file in run.core]
        lines += core_table(file, scored) + radars(file, scored, out)
    save_page(out / "report", lines)


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m tools.report")
    add = parser.add_argument
    about = "run directories, the reference first; other files and folders are left out"
    add("runs", nargs="+", type=Path, metavar="RUN", help=about)
    about = "for report.md and figures (default: the runs' common parent; of one run, the run)"
    add("--out", type=Path, help=about)
    args = parser.parse_args(argv)
    paths = [path.absolute() for path in args.runs if (path / "log.jsonl").exists()]
    if not paths:
        fail(f"{args.runs[0]} is no run directory; give directories that train.py made")
    parent = os.path.commonpath([path.parent for path in paths])
    runs = [read_run(path, os.path.relpath(path, parent)) for path in paths]
    report(runs, args.out or Path(os.path.commonpath(paths)))


if __name__ == "__main__":
    main()
