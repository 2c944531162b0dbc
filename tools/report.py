"""Compares runs: a picture, tables and warnings from run directories, as report.md and PNG files.

    python -m tools.report runs/tiny-euler-s0 runs/tiny-zoh-s0  # report.md in their common parent
    python -m tools.report runs/tiny-*-s* --out results/gains   # several seeds an arm: t intervals

Reads config.json, log.jsonl and, if present, core_*_*.json. Every other run is compared with the
first run. Runs that differ in nothing but the seed form an arm; arms are paired
by seed. Losses: nats per token.
"""

import math
import os
import textwrap
from collections import defaultdict
from dataclasses import asdict
from itertools import chain
from operator import attrgetter
from pathlib import Path

import numpy as np

from looped.console import Parser, run_cli
from looped.figures import (
    Plot,
    depth_plot,
    figure,
    fmt,
    interval_note,
    plus_minus,
    records_table,
    table,
)
from looped.logs import CoreRules, LoggedRun, nearest, read_run
from looped.run_directory import CHANGEABLE
from looped.settings import unheeded
from model import PRESETS, ModelConfig

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
COSTS = [
    "run", "parameters", "tokens trained", "training FLOPs", "tokens/s", "minutes in steps",
    "peak memory, GiB", "machine",
]  # fmt: skip
SCORES = {  # {column: format of its numbers}
    "run": "", "depth": "", "name": "", "mean": ".4f", "std": ".4f", "tasks_done": "",
    "tasks_total": "",
}  # fmt: skip
RADARS = {"core": ["categories_fine"], "core-extended": ["categories_fine", "categories_ext"]}


def settings(run: LoggedRun) -> dict:
    """The flags of the training and the network that have an effect on a run's numbers, and a hash
    of the network's code.
    """
    # what an older run lacks had the default
    flags = run.config["args"] | asdict(ModelConfig()) | run.config["model"]
    known = {name: value for name, value in flags.items() if name not in CHANGEABLE | {"dtype"}}
    return known | {"code": run.config.get("network_code", "")[:10]}


def changes(run: LoggedRun, base: LoggedRun) -> list[str]:
    """In words, the flags apart from the seed in which a run differs from another; another preset
    stands for all that it changes in the network.
    """
    ours = settings(run)
    theirs = settings(base)
    names = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    if "preset" in names:
        own = asdict(PRESETS.get(ours.get("preset"), ModelConfig()))
        meant = {name for name, value in own.items() if ours.get(name) == value}
        meant |= unheeded(run.config["model"]["n_core"])
        names = [name for name in names if name not in meant]
    names = [name for name in names if name != "seed"]
    if names != ["code"]:  # a flag names the change
        names = [name for name in names if name != "code"]
    return [f"{name} {ours.get(name)} instead of {theirs.get(name)}" for name in names]


def compare_arms(runs: list[LoggedRun]) -> list[str]:
    """A sentence on each arm of several seeds against the first arm, and what makes it unfair."""
    arms = defaultdict(dict)  # {settings but the seed: {seed: run}}
    for run in runs:
        decisive = settings(run)
        seed = decisive.pop("seed", None)
        arms[repr(decisive)][seed] = run
    base = next(iter(arms.values()))
    remarks = []
    for arm in arms.values():
        changed = changes(next(iter(arm.values())), runs[0])
        words = ", ".join(changed)
        both = [seed for seed in arm if seed in base]
        gaps = [arm[seed].loss - base[seed].loss for seed in both]
        if changed and len(gaps) > 1:
            change = f"{plus_minus(gaps, '+.4f')} nats/token, {interval_note(gaps)}"
            remarks.append(f"With {words} the loss changes by {change}, paired by seed.")
        if len(changed) > 1:
            remarks.append(f"Warning: more than one flag differs: {words}.")
    matched = all(arm.keys() == base.keys() for arm in arms.values())
    if not matched or len(runs) > len(arms) * len(base):
        remarks.append("Warning: the arms are not matched seed by seed.")
    facts = [circumstances(run) for run in runs]
    for name, value in facts[0].items():
        if any(other[name] != value for other in facts):
            remarks.append(f"Warning: the runs differ in {name}.")
    return remarks


def circumstances(run: LoggedRun) -> dict:
    """What should be the same where losses are compared."""
    config = run.config
    facts = {name: config[name] for name in ("versions", "device", "dtype")}
    return facts | {
        "code": [config["git"], config.get("network_code")],
        "data": config["data"]["sha256"],
        "tokenizer; compare bits per byte": config["tokenizer"]["sha256"],
        "tokens trained": run.last.get("tokens"),
        "validation tokens": run.last.get("eval_tokens"),
    }


def headline(runs: list[LoggedRun]) -> str:
    """The lowest loss of the looped runs, beside the lowest of those without a loop."""
    ranked = sorted((run for run in runs if math.isfinite(run.loss)), key=attrgetter("loss"))
    if not ranked:
        return "No validation loss is finite yet."
    flat = [run for run in ranked if not run.depth]
    looped = [run for run in ranked if run.depth]
    best = [*looped, *flat][0]
    text = f"{best.name} has a validation loss of {best.loss:.4f} nats/token at depth {best.depth}"
    if not looped or not flat:
        return text + "."
    gap = best.loss - flat[0].loss
    word = "less" if gap < 0 else "more"
    return f"{text}, {abs(gap):.4f} {word} than {flat[0].name}, which has no loop."


def loss_table(runs: list[LoggedRun]) -> list[str]:
    """Each run at its own mu_rec, the last loss and the lowest, then its losses at all depths."""
    depths = sorted(set().union(*(run.last["loss"] for run in runs)))
    header = ["run", "depth", "validation loss", "less the first's", "lowest, at step"]
    header += ["perplexity", "bits per byte", *(f"depth {depth}" for depth in depths)]
    rows = []
    for run in runs:
        difference = fmt(run.loss - runs[0].loss, "+.4f")
        perplexity = fmt(np.exp(run.loss), ".2f")
        bits = fmt(run.last["bpb"].get(run.depth))
        losses = [fmt(run.last["loss"].get(depth)) for depth in depths]
        row = [run.name, run.depth, fmt(run.loss), difference, lowest(run), perplexity, bits]
        rows.append([*row, *losses])
    return table(header, rows)


def lowest(run: LoggedRun) -> str:
    """The lowest of its validation losses at its depth, and the step."""
    losses = validation_losses(run)
    if not np.isfinite(losses).any():
        return "–"
    at = np.nanargmin(losses)
    return f"{losses[at]:.4f}, {run.evals[at]['step']}"


def validation_losses(run: LoggedRun) -> np.ndarray:
    """At its depth, over training; NaN where it was not measured."""
    losses = [evaluation["loss"].get(run.depth) for evaluation in run.evals]
    return np.array(losses, float)


def flag_table(runs: list[LoggedRun]) -> list[str]:
    """The flags in which any two runs differ."""
    every = [settings(run) for run in runs]
    rows = []
    for name in dict.fromkeys(chain(*every)):
        values = [flags.get(name) for flags in every]
        if values.count(values[0]) < len(values):
            rows.append([name, *values])
    return table(["flag", *(run.name for run in runs)], rows)


def cost_table(runs: list[LoggedRun]) -> list[str]:
    rows = []
    for run in runs:
        tokens = run.train[-1]["tokens"]
        flops = fmt(tokens * run.config["flops_per_token"], ".3g")
        speed = fmt(np.median(series(run.train, "tok_s")), ",.0f")
        minutes = fmt(series(run.train, "ms").sum() / 6e4, ".1f")
        memory = fmt(series(run.train, "mem_gb").max(), ".2f")
        numbers = [f"{run.config['params']:,}", f"{tokens:,}", flops, speed, minutes, memory]
        rows.append([run.name, *numbers, run.config.get("machine")])
    return table(COSTS, rows)


def series(records: list[dict], name: str) -> np.ndarray:
    """NaN where a record has none."""
    return np.array([record.get(name) for record in records], float)


def means_of_parts(values: np.ndarray) -> list[float]:
    """The means of POINTS parts."""
    parts = np.array_split(values, min(POINTS, len(values)))
    return [part.mean() for part in parts]


def training_figure(runs: list[LoggedRun], out: Path) -> list[str]:
    plots = []
    for name, (ylabel, scale) in CURVES.items():
        curves = []
        for run in runs:
            tokens = series(run.train, "tokens") / 1e6
            curves.append((means_of_parts(tokens), means_of_parts(series(run.train, name))))
        plots.append(Plot(TOKENS, ylabel, curves, {"yscale": scale}))
    curves = []
    for run in runs:
        curves.append((series(run.evals, "tokens") / 1e6, validation_losses(run)))
    plots.append(Plot(TOKENS, "validation loss, nats/token", curves))
    names = [run.name for run in runs]
    return figure(out / "training.png", "Over training.", names, plots)


def core_section(rules: CoreRules, runs: list[LoggedRun], out: Path) -> list[str]:
    """Scores of runs by depth, and at mu_rec the radar of their categories."""
    names = [run.name for run in runs]
    scores = []
    rows = []
    for run in runs:
        by_depth = run.core[rules]
        scores.append(by_depth[nearest(by_depth, run.depth)])
        for depth, score in sorted(by_depth.items()):
            for average in ("aggregate", "core"):
                if average in score:
                    rows.append({"run": run.name, "depth": depth, **score[average]})
    known = [f"{name} {rule}" for name, rule in rules._asdict().items() if rule]
    lines = [f"## {', '.join(known)}", "", *records_table(rows, SCORES)]
    plots = [radar(kind, scores) for kind in RADARS.get(rules.panel, [])]
    file = out / f"radar_{'_'.join(known).replace(' ', '_')}.png"
    caption = "Mean centred accuracy by category at mu_rec."
    return lines + figure(file, caption, [*names, "chance"], plots, polar=True)


def radar(kind: str, scores: list[dict]) -> Plot:
    """A closed curve for each score, and one at 0 for chance."""
    names = list(dict.fromkeys(chain(*(score.get(kind, {}) for score in scores))))
    angles = np.linspace(0, 2 * math.pi, len(names) + 1) if names else np.zeros(0)
    curves = []
    for score in scores:
        means = [score.get(kind, {}).get(name) for name in names]
        closed = np.array([*means, *means[:1]], float)
        curves.append((angles, closed))
    curves.append((angles, np.zeros(len(angles))))
    labels = [textwrap.fill(name, 16, break_long_words=False) for name in names]
    return Plot("", "", curves, {"xticks": angles[:-1], "xticklabels": labels})


def write_report(runs: list[LoggedRun], out: Path) -> list[str]:
    """-> its beginning, without the picture, for the screen."""
    names = [run.name for run in runs]
    remarks = compare_arms(runs)
    remarks.append(f"Knowing token frequencies only: {fmt(runs[0].unigram)} nats/token.")
    for run in runs:
        remarks += [f"{run.name}: {note}." for note in run.notes]
    losses = loss_table(runs)
    plot = depth_plot([run.last["loss"] for run in runs], "validation loss, nats/token")
    lines = [f"# {', '.join(names)}", "", headline(runs), ""]
    lines += figure(out / "depth.png", "Last validation loss against depth.", names, [plot])
    lines += [*losses, "\n\n".join(remarks), ""]
    lines += training_figure(runs, out)
    lines += ["## What differs", "", *flag_table(runs)]
    lines += ["## Cost", "", *cost_table(runs)]
    for rules in dict.fromkeys(chain(*(run.core for run in runs))):
        scored = [run for run in runs if rules in run.core]
        lines += core_section(rules, scored, out)
    (out / "report.md").write_text("\n".join(lines), encoding="utf-8")
    return [headline(runs), "", *losses, *remarks]


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m tools.report")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run directories, the reference first")
    add("--out", type=Path, help="for report.md and figures (default: the runs' common parent)")
    args = parser.parse_args(argv)
    runs = [read_run(path) for path in args.runs]
    parents = [run.path.resolve().parent for run in runs]
    common = Path(os.path.commonpath(parents))
    for run in runs:
        run.name = str(run.path.resolve().relative_to(common))
    out = common if len(runs) > 1 else args.runs[0]
    if args.out:
        out = args.out
    out.mkdir(parents=True, exist_ok=True)
    print("\n".join(write_report(runs, out)))
    print(f"report: {out / 'report.md'}")


if __name__ == "__main__":
    run_cli(main)
