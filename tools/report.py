"""Compares runs: a sentence, pictures and tables from run directories, as report.md and PNG files.

    python -m tools.report runs/nano-euler-s0 runs/nano-zoh-s0  # report.md in their common parent
    python -m tools.report runs/nano-*-s* --out results/gains   # several seeds an arm: t intervals

Reads config.json, log.jsonl and, if present, core_*_*.json. Every other run is compared with the
first. Runs that differ in nothing but the seed form an arm; arms are paired by seed. Losses: nats
per token.
"""

import json
import math
import os
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd

from looped.common import Parser, fail
from looped.run import MAY_CHANGE, read_log
from model import PRESETS, ModelConfig
from tools.figures import (
    Plot,
    depth_plot,
    figure,
    fmt,
    frame_table,
    interval_note,
    plus_minus,
    records_table,
    save_page,
)

TOKENS = "tokens trained, millions"
POINTS = 100  # of a curve over training, each the mean of its steps
# what is drawn of the training records: {name: (the axis' label, its scale)}
CURVES = {
    "loss": ("training loss, nats/token", "linear"),
    "grad_norm": ("gradient norm", "log"),
    "decay_max": ("largest decay a loop", "linear"),
    "decay_mean": ("mean decay a loop", "linear"),
    "state_norm": ("state norm ‖h‖ after the last loop", "linear"),
    "residual": ("residual ‖Δh‖ of the last loop", "log"),
}
COSTS = {  # {column: format of its numbers}
    "parameters": ",", "FLOPs a token": ",.4g", "tokens trained": ",", "training FLOPs": ".3g",
    "tokens/s": ",.0f", "minutes in steps": ".1f", "peak memory, GiB": ".2f",
}  # fmt: skip
SCORES = {
    "run": "", "loops": "", "name": "", "mean": ".4f", "std": ".4f", "checkpoint": "", "seeds": "",
}  # fmt: skip
NEVER = {"eval_tokens": 0, "loss": {}, "bpb": {}}  # no evaluation
ONE_SEED = "One seed gives no interval, and chance alone changes losses from seed to seed."


# -------------------------------------------------------------------------------------------------
# Reading a run


@dataclass
class LoggedRun:
    name: str
    config: dict
    train: list[dict]  # the records of log.jsonl by step
    evals: list[dict]
    starts: list[dict]
    core: dict[str, dict]  # {name of the file: what core_eval.py wrote}

    @property
    def flags(self) -> dict:
        """Of the training and of the network."""
        return self.config["args"] | self.config["model"]

    @property
    def last(self) -> dict:
        """The last evaluation."""
        return self.evals[-1] if self.evals else NEVER

    @property
    def depth(self) -> int:
        """mu_rec"""
        return self.config["model"]["mu_rec"]

    @property
    def loss(self) -> float:
        """The last val loss at mu_rec, nats/token; NaN if there is none."""
        return self.last["loss"].get(self.depth, math.nan)

    @property
    def unigram(self) -> float | None:
        """Entropy of the token frequencies, nats/token, if the rows are here."""
        manifest = Path(self.config["data"]["path"], "manifest.json")
        if not manifest.exists():
            return None
        return json.loads(manifest.read_text())["unigram_entropy"]

    def may_be_compared(self) -> bool:
        """Whether it ended well, and one code made it."""
        one_code = all(start["code"] == self.config["code"] for start in self.starts)
        ended = self.last.get("final", False)
        return ended and one_code and math.isfinite(self.loss)


def read_run(path: Path, name: str = "") -> LoggedRun:
    """All that is known of one run."""
    config = json.loads((path / "config.json").read_text())
    core = {}
    for file in sorted(path.glob("core_*_*.json")):
        core[file.stem] = json.loads(file.read_text())
    run = LoggedRun(name, config, *read_log(path), core)
    if not run.train:
        fail(f"{path} has made no step; continue it with train.py --resume")
    return run


def core_averages(record: dict) -> list[dict]:
    """The averages in a file of core_eval.py, each with its depth."""
    found = []
    for depth, scores in record["depths"].items():
        for average in (scores["aggregate"], scores.get("core")):
            if average:
                found.append({"depth": int(depth)} | average)
    return found


# -------------------------------------------------------------------------------------------------
# Comparing


def settings(run: LoggedRun) -> dict:
    """What has an effect on a run's numbers, its code aside."""
    flags = asdict(ModelConfig()) | run.flags
    told = {name: value for name, value in flags.items() if name not in MAY_CHANGE}
    told["dtype"] = run.config["dtype"]
    told["rows"] = run.config["data"]["sha256"][:8]
    told["torch"] = run.config["versions"]["torch"]
    told["eval_tokens"] = run.last["eval_tokens"]
    return told


def changes(run: LoggedRun, base: LoggedRun) -> list[str]:
    """In words, how a run's flags differ from another's, the seed apart. Another preset stands for
    all that it changes in the network.
    """
    ours = settings(run)
    theirs = settings(base)
    expected = theirs
    if ours["preset"] != theirs["preset"]:
        expected = theirs | asdict(PRESETS.get(ours["preset"], ModelConfig()))
    found = []
    for name, value in ours.items():
        was = theirs.get(name)
        if value not in (was, expected.get(name)) and name != "seed":
            found.append(f"{name} {value} instead of {was}")
    return found


def arms_of(runs: list[LoggedRun]) -> dict[tuple, dict[int, float]]:
    """{how an arm differs from the first run: {seed: val loss}}, the first run's own arm under ()."""
    first = runs[0]
    codes = {first.config["code"]: []}  # each called by the first run that has it
    arms = {}
    for run in runs:
        code = codes.setdefault(run.config["code"], [f"the code of {run.name}"])
        arm = arms.setdefault((*code, *changes(run, first)), {})
        if run.may_be_compared():
            arm[run.flags["seed"]] = run.loss
    return arms


def compare_arms(runs: list[LoggedRun]) -> list[str]:
    """A sentence on each arm against the first one, the best arm's first; then what makes the
    comparison unfair.
    """
    first = runs[0]
    answers = []  # (mean difference, sentence)
    warnings = []
    for run in runs:
        if not run.may_be_compared():
            why = "it is unfinished, diverged, or was continued by other code"
            warnings.append(f"Warning: {run.name} is not compared: {why}.")
    arms = arms_of(runs)
    base = arms.pop(())
    for changed, losses in arms.items():
        words = ", ".join(changed)
        gaps = [losses[seed] - base[seed] for seed in losses if seed in base]
        if gaps:
            change = f"{plus_minus(gaps, '+.4f')} nats/token, {interval_note(gaps)}"
            answer = f"With {words} the val loss changes by {change}, paired by seed."
            answers.append((fmean(gaps), answer))
        if len(changed) > 1:
            warnings.append(f"Warning: more than one thing differs: {words}.")
        if losses.keys() != base.keys():
            warnings.append(f"Warning: not every seed is also there with {words}.")
    seeds = {run.flags["seed"] for run in runs}
    if len(runs) > 1 and len(seeds) == 1:
        warnings.append(ONE_SEED)
    answers.sort()
    said = [answer for _, answer in answers]
    if not said:
        said = [f"The val loss of {first.name} is {fmt(first.loss)} nats/token."]
    return said + warnings


# -------------------------------------------------------------------------------------------------
# The page


def loss_table(runs: list[LoggedRun]) -> list[str]:
    """The last validation of each run, at its own mu_rec."""
    first = runs[0]
    rows = []
    for run in runs:
        row = {"run": run.name, "loops": run.depth, "val loss": run.loss}
        row[f"difference from {first.name}"] = run.loss - first.loss
        row["bits per byte"] = run.last["bpb"].get(run.depth)
        rows.append(row)
    formats = dict.fromkeys(rows[0], ".4f") | {"run": "", "loops": ""}
    return records_table(rows, formats)


def depth_table(runs: list[LoggedRun]) -> list[str]:
    """The last val loss of each run by depth."""
    losses = pd.DataFrame([run.last["loss"] for run in runs])
    losses.index = pd.Index([run.name for run in runs], name="run")
    return frame_table(losses.add_prefix("depth ").map(fmt))


def flag_table(runs: list[LoggedRun]) -> list[str]:
    """The settings in which any two runs differ."""
    flags = pd.DataFrame({run.name: settings(run) for run in runs}, dtype=object)
    differ = flags.astype(str).nunique(axis=1, dropna=False) > 1
    return frame_table(flags[differ].rename_axis("flag"))


def cost_of(run: LoggedRun) -> dict:
    steps = pd.DataFrame(run.train)
    flops = run.config["flops_per_token"]
    tokens = steps.tokens.max()
    cost = {"parameters": run.config["params"], "FLOPs a token": flops}
    cost["tokens trained"] = tokens
    cost["training FLOPs"] = tokens * flops
    cost["tokens/s"] = steps.tok_s.median()
    cost["minutes in steps"] = steps.ms.sum() / 6e4
    cost["peak memory, GiB"] = steps.mem_gb.max()
    return cost


def cost_table(runs: list[LoggedRun]) -> list[str]:
    rows = [{"run": run.name} | cost_of(run) for run in runs]
    return records_table(rows, {"run": ""} | COSTS)


def curve(records: pd.DataFrame, name: str) -> tuple[pd.Series, pd.Series]:
    """Millions of tokens, and a column of the records, both as means of at most POINTS parts."""
    known = records.reindex(columns=["tokens", name]).astype(float)
    parts = known.index * POINTS // max(1, len(known))
    means = known.groupby(parts).mean(skipna=False)
    return means.tokens / 1e6, means[name]


def difference_plot(runs: list[LoggedRun]) -> Plot:
    """Training loss less that of the run without a loop, or of the first, at the same steps."""
    base = next((run for run in runs if not run.depth), runs[0])
    reference = pd.DataFrame(base.train).set_index("step").loss
    curves = []
    for run in runs:
        steps = pd.DataFrame(run.train).set_index("step")
        steps["gap"] = steps.loss - reference
        known = steps.dropna(subset="gap").reset_index()
        curves.append(curve(known, "gap"))
    return Plot(TOKENS, f"training loss, difference from {base.name}", curves)


def training_figure(runs: list[LoggedRun], out: Path) -> list[str]:
    plots = []
    if len(runs) > 1:
        plots.append(difference_plot(runs))
    curves = []
    for run in runs:
        evals = pd.json_normalize(run.evals)
        curves.append(curve(evals, f"loss.{run.depth}"))
    plots.append(Plot(TOKENS, "val loss, nats/token", curves))
    trainings = [pd.DataFrame(run.train) for run in runs]
    for name, (label, scale) in CURVES.items():
        curves = [curve(steps, name) for steps in trainings]
        plots.append(Plot(TOKENS, label, curves, {"yscale": scale}))
    names = [run.name for run in runs]
    return figure(out / "training.png", "Losses and gauges by tokens trained.", names, plots)


def core_section(file: str, runs: list[LoggedRun], out: Path) -> list[str]:
    """Scores by depth, and at mu_rec the radars of their categories. ±: over seeds; of one seed, the
    binomial standard error.
    """
    rows = []
    fine = []
    coarse = []
    for run in runs:
        record = run.core[file]
        at_mu_rec = record["depths"].get(str(run.depth), {})
        fine.append(at_mu_rec.get("categories_fine", {}))
        coarse.append(at_mu_rec.get("categories_ext", {}))
        for average in core_averages(record):
            row = {"run": run.name, "loops": average["depth"]} | average
            row["checkpoint"] = record["checkpoint"]
            row["seeds"] = str(record["seeds"])
            rows.append(row)
    lines = [f"## {file}", "", *records_table(rows, SCORES)]
    names = [run.name for run in runs] + ["chance"]
    caption = "Mean centred accuracy by category at mu_rec."
    plots = [radar(fine), radar(coarse)]
    return lines + figure(out / f"radar_{file}.png", caption, names, plots, polar=True)


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


def report(runs: list[LoggedRun], out: Path) -> None:
    """The page and its figures; its beginning goes to the screen, too."""
    names = [run.name for run in runs]
    trained = max(run.depth for run in runs)
    losses = [run.last["loss"] for run in runs]
    plot = depth_plot(losses, "val loss, nats/token", trained)
    caption = "Val loss by depth; the grey line is the trained mean depth."
    answer, *remarks = compare_arms(runs)
    lines = [f"# {', '.join(names)}", "", answer, ""]
    lines += figure(out / "depth.png", caption, names, [plot])
    lines += loss_table(runs)
    lines += [f"Unigram baseline: {fmt(runs[0].unigram)} nats/token.", ""]
    for remark in remarks:
        lines += [remark, ""]
    print("\n".join(lines))
    lines += ["## Val loss by depth", "", *depth_table(runs)]
    lines += ["## Over training", "", *training_figure(runs, out)]
    lines += ["## What differs", "", *flag_table(runs)]
    lines += ["## Cost", "", *cost_table(runs)]
    files = set()
    for run in runs:
        files |= run.core.keys()
    for file in sorted(files):
        scored = [run for run in runs if file in run.core]
        lines += core_section(file, scored, out)
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
