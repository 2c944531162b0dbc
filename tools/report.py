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
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from looped.common import Parser, fail
from looped.run import MAY_CHANGE, read_log, step_of
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
SCORES = {"run": "", "loops": "", "score": "", "mean": ".4f", "±": ".4f"}
NEVER = {"step": 0, "tokens": 0, "eval_tokens": 0, "loss": {}, "bpb": {}}  # no evaluation
ONE_SEED = "One seed gives no interval, and chance alone changes losses from seed to seed."


# -------------------------------------------------------------------------------------------------
# Reading a run


class CoreRules(NamedTuple):
    """What a score was measured by; only scores with equal rules compare."""

    panel: str
    protocol: str
    baselines: str | None
    max_per_task: int | None
    seeds: str = ""
    bundle: str | None = None  # the beginning of its hash
    tasks: str | None = None  # one's own, each with the beginning of its hash


@dataclass
class LoggedRun:
    name: str
    config: dict
    train: list[dict]  # the records of log.jsonl by step
    evals: list[dict]
    starts: list[dict]
    unigram: float | None = None  # entropy of the token frequencies, nats/token
    core: dict = field(default_factory=dict)  # {CoreRules: the scores by depth}
    notes: list[str] = field(default_factory=list)  # what is wrong with the run

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

    def other_code(self) -> list[int]:
        """The steps after which other code continued the run."""
        code = self.config["code"]
        return [start["step"] for start in self.starts if start["code"] != code]


def read_run(path: Path, name: str = "") -> LoggedRun:
    """All that is known of one run."""
    config = json.loads((path / "config.json").read_text())
    run = LoggedRun(name, config, *read_log(path))
    if not run.train:
        fail(f"{path} has made no step; continue it with train.py --resume")
    run.unigram = unigram_entropy(path, config["data"]["path"])
    if not run.last.get("final"):
        step = run.train[-1]["step"]
        run.notes.append(f"unfinished at step {step}, last evaluated at step {run.last['step']}")
    lost = [record["step"] for record in run.train if not math.isfinite(record["loss"])]
    if lost:
        run.notes.append(f"the loss is not finite at step {lost[0]}")
    for step in run.other_code():
        run.notes.append(f"continued by other code after step {step}")
    for file in sorted(path.glob("core_*_*.json")):
        add_scores(run, file)
    return run


def add_scores(run: LoggedRun, file: Path) -> None:
    """A core_*_*.json; of a finished run only that of its last checkpoint."""
    record = json.loads(file.read_text())
    checkpoint, *_ = record["checkpoint"].split()  # its hash follows
    step = step_of(Path(checkpoint))
    if run.last.get("final") and step != run.last["step"]:
        run.notes.append(f"{file.name} has scores of step {step}, which are left out")
        return
    depths = {int(depth): found for depth, found in record["depths"].items()}
    run.core[rules_of(record, depths)] = depths


def rules_of(record: dict, depths: dict) -> CoreRules:
    """By what a file of scores was measured."""
    tasks = None
    if record["panel"] == "own":
        names = set().union(*(found["tasks"] for found in depths.values()))
        tasks = ", ".join(sorted(names))
    told = [record[name] for name in ("panel", "protocol", "baselines", "max_per_task")]
    seeds = ",".join(map(str, record["seeds"]))
    bundle = record.get("bundle_sha256")
    return CoreRules(*told, seeds, bundle[:8] if bundle else None, tasks)


def unigram_entropy(path: Path, data: str) -> float | None:
    """From the rows' manifest; `data` may be relative to the folder the run was started from."""
    for folder in [Path("."), *path.resolve().parents]:
        manifest = folder / data / "manifest.json"
        if manifest.is_file():
            return json.loads(manifest.read_text())["unigram_entropy"]
    return None


# -------------------------------------------------------------------------------------------------
# Comparing


def settings(run: LoggedRun) -> dict:
    """What has an effect on a run's numbers, its code aside."""
    flags = asdict(ModelConfig()) | run.flags
    told = {name: value for name, value in flags.items() if name not in MAY_CHANGE}
    return told | {
        "dtype": run.config["dtype"],
        "rows": run.config["data"]["sha256"][:8],
        "torch": run.config["versions"]["torch"],
        "eval_tokens": run.last["eval_tokens"],
    }


def changes(run: LoggedRun, base: LoggedRun) -> list[str]:
    """In words, how a run differs from another, the seed apart: its code first, then its flags.
    Another preset stands for all that it changes in the network.
    """
    ours = settings(run)
    theirs = settings(base)
    expected = theirs
    if ours["preset"] != theirs["preset"]:
        expected = theirs | asdict(PRESETS.get(ours["preset"], ModelConfig()))
    found = []
    if run.config["code"] != base.config["code"]:
        found.append("other code")
    for name, value in ours.items():
        was = theirs.get(name)
        if value not in (was, expected.get(name)) and name != "seed":
            found.append(f"{name} {value} instead of {was}")
    return found


def arms_of(runs: list[LoggedRun]) -> tuple[dict, list[str]]:
    """{(name of the code, changes from the first run …): {seed: loss}}, and what was left out."""
    arms = {}
    warnings = []
    codes = {}  # each called by the first run that has it
    for run in runs:
        code = codes.setdefault(run.config["code"], f"the code of {run.name}")
        arm = arms.setdefault((code, *changes(run, runs[0])), {})
        reason = why_not_compared(run)
        seed = run.flags["seed"]
        if seed in arm:
            reason = "it repeats another"
        if reason:
            warnings.append(f"Warning: {run.name} is not compared: {reason}.")
        else:
            arm[seed] = run.loss
    return arms, warnings


def why_not_compared(run: LoggedRun) -> str | None:
    if run.other_code():
        return "it was continued by other code"
    if not run.last.get("final"):
        return "it is unfinished; continue it with --resume"
    if not math.isfinite(run.loss):
        return "its last val loss is not finite"
    return None


def compare_arms(runs: list[LoggedRun]) -> list[str]:
    """A sentence on each arm against the first one, and what makes the comparison unfair."""
    arms, remarks = arms_of(runs)
    base, *_ = arms.values()
    for (code, *changed), losses in arms.items():
        words = ", ".join(changed).replace("other code", code)
        gaps = [losses[seed] - base[seed] for seed in losses if seed in base]
        if changed and gaps:
            change = f"{plus_minus(gaps, '+.4f')} nats/token, {interval_note(gaps)}"
            remarks.append(f"With {words} the val loss changes by {change}, paired by seed.")
        if len(changed) > 1:
            remarks.append(f"Warning: more than one thing differs: {words}.")
        if losses.keys() != base.keys():
            remarks.append(f"Warning: not every seed is also there with {words}.")
    if len(runs) > 1 and len({run.flags["seed"] for run in runs}) == 1:
        remarks.append(ONE_SEED)
    return remarks


# -------------------------------------------------------------------------------------------------
# The page


def loss_table(runs: list[LoggedRun]) -> list[str]:
    """The last validation of each run at its own mu_rec."""
    rows = []
    for run in runs:
        row = {
            "run": f"{run.name} (other code later)" if run.other_code() else run.name,
            "loops": run.depth,
            "val loss": run.loss,
            f"difference from {runs[0].name}": run.loss - runs[0].loss,
            "lowest": lowest(run),
            "bits per byte": run.last["bpb"].get(run.depth),
            "tokens/s": cost_of(run)["tokens/s"],
        }
        rows.append(row)
    formats = dict.fromkeys(row, ".4f") | {"run": "", "loops": "", "tokens/s": ",.0f"}
    return records_table(rows, formats)


def lowest(run: LoggedRun) -> float:
    """Of its val losses at its depth on as many tokens as the last; NaN if there is none."""
    evals = [entry for entry in run.evals if entry["eval_tokens"] == run.last["eval_tokens"]]
    losses = [entry["loss"].get(run.depth, math.nan) for entry in evals]
    return np.fmin.reduce([math.nan, *losses])


def depth_table(runs: list[LoggedRun]) -> list[str]:
    losses = pd.DataFrame([run.last["loss"] for run in runs], dtype=float).sort_index(axis=1)
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
    return {
        "parameters": run.config["params"],
        "FLOPs a token": flops,
        "tokens trained": tokens,
        "training FLOPs": tokens * flops,
        "tokens/s": steps.tok_s.median(),
        "minutes in steps": steps.ms.sum() / 6e4,
        "peak memory, GiB": steps.mem_gb.max(),
    }


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
        both = steps.dropna(subset="gap").reset_index()
        curves.append(curve(both, "gap"))
    return Plot(TOKENS, f"training loss, difference from {base.name}", curves)


def training_figure(runs: list[LoggedRun], out: Path) -> list[str]:
    plots = [difference_plot(runs)] if len(runs) > 1 else []
    curves = [curve(pd.json_normalize(run.evals), f"loss.{run.depth}") for run in runs]
    plots.append(Plot(TOKENS, "val loss, nats/token", curves))
    for name, (label, scale) in CURVES.items():
        curves = [curve(pd.DataFrame(run.train), name) for run in runs]
        plots.append(Plot(TOKENS, label, curves, {"yscale": scale}))
    return figure(out / "training.png", "Over training.", [run.name for run in runs], plots)


def score_rows(run: LoggedRun, rules: CoreRules) -> list[dict]:
    """±: over seeds; of one seed, the binomial standard error."""
    rows = []
    for depth, score in run.core[rules].items():
        for average in filter(None, (score["aggregate"], score.get("core"))):
            row = {
                "run": run.name,
                "loops": depth,
                "score": average["name"],
                "mean": average["mean"],
                "±": average["std"],
            }
            rows.append(row)
    return rows


def core_section(rules: CoreRules, runs: list[LoggedRun], out: Path) -> list[str]:
    """Scores of runs by depth, and at mu_rec the radars of their categories."""
    rows = list(chain(*(score_rows(run, rules) for run in runs)))
    known = [f"{name} {rule}" for name, rule in rules._asdict().items() if rule]
    lines = [f"## {', '.join(known)}", "", *records_table(rows, SCORES)]
    plots = []
    at_mu_rec = [run.core[rules].get(run.depth, {}) for run in runs]
    for kind in ("categories_fine", "categories_ext"):
        plots.append(radar([score.get(kind, {}) for score in at_mu_rec]))
    names = [*(run.name for run in runs), "chance"]
    file = out / f"radar_{'_'.join(known).replace(' ', '_')}.png"
    return lines + figure(file, "Mean centred accuracy by category at mu_rec.", names, plots, True)


def radar(categories: list[dict]) -> Plot:
    """A closed curve for each run's {category: mean}, and one at 0 for chance."""
    means = pd.DataFrame([*categories, {}])
    means.iloc[-1] = 0
    closed = pd.concat([means, means.iloc[:, :1]], axis=1).to_numpy(float)
    angles = np.linspace(0, 2 * np.pi, closed.shape[1])
    labels = [textwrap.fill(name, 16, break_long_words=False) for name in means]
    ticks = {"xticks": angles[:-1], "xticklabels": labels}
    return Plot("", "", [(angles, row) for row in closed], ticks)


def report(runs: list[LoggedRun], out: Path) -> None:
    """The page and its figures; its beginning goes to the screen, too."""
    names = [run.name for run in runs]
    data = Path(runs[0].config["data"]["path"]).parent.name
    trained = max(run.depth for run in runs)
    plot = depth_plot([run.last["loss"] for run in runs], "val loss, nats/token", trained)
    caption = f"Val loss by depth on {data}; the grey line is the trained mean depth."
    lines = [f"# {', '.join(names)}", "", "\n\n".join(compare_arms(runs)), ""]
    lines += figure(out / "depth.png", caption, names, [plot])
    lines += loss_table(runs)
    lines += [f"Unigram baseline: {fmt(runs[0].unigram)} nats/token.", ""]
    for run in runs:
        lines += [f"{run.name}: {note}.\n" for note in run.notes]
    print("\n".join(lines))
    lines += training_figure(runs, out)
    lines += ["## By depth", "", *depth_table(runs)]
    lines += ["## What differs", "", *flag_table(runs)]
    lines += ["## Cost", "", *cost_table(runs)]
    for rules in dict.fromkeys(chain(*(run.core for run in runs))):
        scored = [run for run in runs if rules in run.core]
        lines += core_section(rules, scored, out)
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
