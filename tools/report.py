"""Compares runs: a sentence, a picture and tables from run directories, as report.md and PNG files.

    python -m tools.report runs/nano-euler-s0 runs/nano-zoh-s0  # report.md in their common parent
    python -m tools.report runs/nano-*-s* --out results/gains   # several seeds an arm: t intervals

Reads config.json, log.jsonl and, if present, core_eval_*.json. Runs that differ in nothing but the seed form
an arm; every other arm is compared with the first run's, paired by seed.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import pandas as pd

from looped.common import Parser, fail, note
from looped.machine import code_hash
from tools.arms import Arm, Run, identity, read_run
from tools.figures import frame_table, records_table
from tools.pages import CURVES, curves_figure, write_page

SCORES = {
    "run": "", "loops": "", "name": "", "mean": ".4f", "std": ".4f", "checkpoint": "", "seeds": "",
}  # fmt: skip
SHORT = ("rows (--data)", "code")  # hashes


# -------------------------------------------------------------------------------------------------
# Comparing


def settings(run: Run) -> dict:
    """What decides a run's numbers, the seed apart."""
    decides = identity(run.config) | {"preset": run.flags["preset"]}
    for name in SHORT:
        decides[name] = decides[name][:8]
    return decides


def changes(run: Run, base: Run) -> list[str]:
    """In words, how a run's code and settings differ from another's. Another preset stands for the
    network that it names.
    """
    ours = settings(run)
    theirs = settings(base)
    expected = set(run.config["model"]) if ours["preset"] != theirs["preset"] else set()
    differ = [name for name in ours if ours[name] != theirs.get(name) and name not in expected]
    words = ["other code"] if "code" in differ else []
    for name in differ:
        if name != "code":
            words.append(f"{name} {ours[name]} instead of {theirs.get(name)}")
    return words


def arms_of(runs: list[Run]) -> list[Arm]:
    """Each is called by its first run."""
    arms = {}
    for run in runs:
        name = re.sub(r"[-_]s\d+$", "", run.name)
        key = tuple(settings(run).values())
        arms.setdefault(key, Arm(name)).runs.append(run)
    return list(arms.values())


def differences(arms: list[Arm]) -> list[str]:
    """What differs between each arm and the first."""
    base, *others = arms
    lines = []
    for arm in others:
        changed = changes(arm.runs[0], base.runs[0])
        lines += [f"{arm.name} has {', '.join(changed)}.", ""]
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


def setting_table(runs: list[Run]) -> list[str]:
    """The settings in which any two runs differ."""
    frame = pd.DataFrame({run.name: settings(run) for run in runs}, dtype=object)
    differ = frame.astype(str).nunique(axis=1, dropna=False) > 1
    return frame_table(frame[differ].rename_axis("setting"))


def core_tables(runs: list[Run]) -> list[str]:
    """Scores by depth, and by category at mu_rec. ±: over seeds; of one seed, the binomial error."""
    lines = []
    for file in sorted({file for run in runs for file in run.core}):
        rows = []
        categories = {}
        for run in (run for run in runs if file in run.core):
            record = run.core[file]
            about = {"run": run.name, "checkpoint": record["checkpoint"], "seeds": record["seeds"]}
            for depth, scores in record["depths"].items():
                for average in (scores["aggregate"], scores.get("core")):
                    if average:
                        rows.append(about | {"loops": int(depth)} | average)
            at_mu_rec = record["depths"].get(str(run.depth), {})
            categories[run.name] = {
                **at_mu_rec.get("categories_fine", {}),
                **at_mu_rec.get("categories_ext", {}),
            }
        lines += [f"## {file}", "", *records_table(rows, SCORES)]
        frame = pd.DataFrame(categories, dtype=float).round(4)
        lines += frame_table(frame.rename_axis("mean centred accuracy")) if len(frame) else []
    return lines


def report(runs: list[Run], out: Path, command: str) -> None:
    """The page and its figures."""
    arms = arms_of(runs)
    sections = [*differences(arms), *not_compared(runs)]
    sections += ["## Over training", "", *curves_figure(out / "training.png", arms, CURVES)]
    sections += ["## What differs", "", *setting_table(runs)] if len(runs) > 1 else []
    title = ", ".join(arm.name for arm in arms)
    write_page(out / "report", title, arms, command, sections + core_tables(runs))


def runs_in(paths: list[Path]) -> list[Path]:
    """The run directories among these; where there are none, what is in them is named."""
    found = [path.absolute() for path in paths if (path / "log.jsonl").exists()]
    if not found:
        inside = sorted(path.parent.name for path in paths[0].glob("*/log.jsonl"))
        there = f"; in it are {', '.join(inside)}" if inside else ""
        fail(f"{paths[0]} is no run directory{there}; give directories that train.py made")
    return found


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m tools.report")
    add = parser.add_argument
    about = "run directories, the reference first; other files and folders are left out"
    add("runs", nargs="+", type=Path, metavar="RUN", help=about)
    about = "for report.md and figures (default: the runs' common parent; of one run, the run)"
    add("--out", type=Path, help=about)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    paths = runs_in(args.runs)
    parent = os.path.commonpath([path.parent for path in paths])
    runs = [read_run(path, os.path.relpath(path, parent)) for path in paths]
    if any(run.config["code"] != code_hash() for run in runs):
        note("other code than this made some of these runs; their commits are on the page")
    command = shlex.join(["python", "-m", "tools.report", *argv])
    report(runs, args.out or Path(os.path.commonpath(paths)), command)


if __name__ == "__main__":
    main()
