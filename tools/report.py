"""Compares runs: a picture, tables and warnings from run directories, as report.md and PNG files.

    python -m tools.report runs/nano-euler-s0 runs/nano-zoh-s0  # report.md in their common parent
    python -m tools.report runs/nano-*-s* --out results/gains   # several seeds an arm: t intervals

Reads config.json, log.jsonl and, if present, core_*_*.json. Every other run is compared with the
first run. Runs that differ in nothing but the seed form an arm; arms are paired
by seed. Losses: nats per token.
"""

import os
import textwrap
from dataclasses import asdict
from itertools import chain
from operator import attrgetter
from pathlib import Path

import numpy as np
import pandas as pd

from looped.console import Parser, run_cli
from looped.figures import (
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
from looped.logs import CoreRules, LoggedRun, read_run
from looped.run_directory import CHANGEABLE
from looped.settings import unheeded
from model import PRESETS, ModelConfig

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
    "run": "", "parameters": ",", "tokens trained": ",", "training FLOPs": ".3g",
    "tokens/s": ",.0f", "minutes in steps": ".1f", "peak memory, GiB": ".2f", "machine": "",
}  # fmt: skip
SCORES = {
    "run": "", "depth": "", "name": "", "mean": ".4f", "std": ".4f", "tasks_done": "",
    "tasks_total": "",
}  # fmt: skip
ONE_SEED = (
    "One seed gives no interval, and chance alone changes losses from seed to seed: train the same "
    "with --seed 1, 2, …, and give all runs."
)
# what should be the same where losses are compared: of config.json and of the last evaluation
SHARED = [
    "versions.torch", "versions.numpy", "device", "git.commit", "git.diff", "network_code",
    "tokenizer.sha256", "tokens", "eval_tokens",
]  # fmt: skip


def settings(run: LoggedRun) -> dict:
    """The flags that have an effect on a run's numbers, the dtype that they settled, and the rows;
    a flag of the network that an older run lacks had the default.
    """
    flags = asdict(ModelConfig()) | run.flags | {"dtype": run.config["dtype"]}
    told = {name: value for name, value in flags.items() if name not in CHANGEABLE}
    return told | {"rows": run.config["data"]["sha256"][:8]}


def changes(run: LoggedRun, base: LoggedRun) -> list[str]:
    """In words, the flags apart from the seed in which a run differs from another, or else its
    code. Another preset stands for all that it changes in the network.
    """
    ours = settings(run)
    theirs = settings(base)
    expected = theirs
    if ours["preset"] != theirs["preset"]:
        expected = theirs | asdict(PRESETS.get(ours["preset"], ModelConfig()))
    idle = unheeded(ours["n_core"]) | {"seed"}
    found = []
    for name, value in ours.items():
        was = theirs.get(name)
        if value not in (was, expected.get(name)) and name not in idle:
            found.append(f"{name} {value} instead of {was}")
    if not found and code(run) != code(base):
        found.append(f"other code ({code(run)})")
    return found


def code(run: LoggedRun) -> str:
    """A short hash of the code that trained."""
    return run.config["code"][:8]


def compare_arms(runs: list[LoggedRun]) -> list[str]:
    """A sentence on each arm against the first one, and what makes the comparison unfair."""
    arms = {}  # {changes: {seed: loss}}
    remarks = []
    for run in runs:
        reason = why_not_compared(run, runs) if len(runs) > 1 else None
        arm = arms.setdefault(tuple(changes(run, runs[0])), {})
        seed = run.flags["seed"]
        if seed in arm:
            remarks.append(f"Warning: {run.name} repeats a run, and is not compared.")
        elif reason:
            remarks.append(f"Warning: {run.name} is not compared: {reason}.")
        else:
            arm[seed] = run.loss
    base = arms[()]
    for changed, losses in arms.items():
        words = ", ".join(changed)
        gaps = [losses[seed] - base[seed] for seed in losses if seed in base]
        if changed and gaps:
            change = f"{plus_minus(gaps, '+.4f')} nats/token, {interval_note(gaps)}"
            remarks.append(f"With {words} the loss changes by {change}, paired by seed.")
        if len(changed) > 1:
            remarks.append(f"Warning: more than one flag differs: {words}.")
        if losses.keys() != base.keys():
            remarks.append(f"Warning: not every seed is also there with {words}.")
    facts = pd.json_normalize([run.config | run.last for run in runs])
    values = facts.reindex(columns=SHARED).astype(str).nunique(dropna=False)
    differ = ", ".join(values.index[values > 1])
    if differ:
        remarks.append(f"Warning: the runs differ in {differ}.")
    return remarks


def why_not_compared(run: LoggedRun, runs: list[LoggedRun]) -> str | None:
    """What keeps a run from being compared: finished runs are compared with finished ones, others
    with those that were evaluated after as many tokens as the first.
    """
    if not np.isfinite(run.loss):
        return "its last validation loss is not finite" if run.evals else "it was never evaluated"
    if any(other.last.get("final") and np.isfinite(other.loss) for other in runs):
        return None if run.last.get("final") else "it is unfinished; continue it with --resume"
    tokens = run.last["tokens"]
    first = next(other for other in runs if np.isfinite(other.loss))
    if tokens == first.last["tokens"]:
        return None
    return f"it was evaluated after {tokens:,} tokens, {first.name} after {first.last['tokens']:,}"


def headline(runs: list[LoggedRun]) -> str:
    """The lowest loss of the looped runs, beside the lowest of those without a loop."""
    ranked = sorted((run for run in runs if np.isfinite(run.loss)), key=attrgetter("loss"))
    if not ranked:
        return "No validation loss is finite yet."
    flat = [run for run in ranked if not run.depth]
    looped = [run for run in ranked if run.depth]
    best = [*looped, *flat][0]
    text = f"{best.name} has a validation loss of {best.loss:.4f} nats/token at depth {best.depth}"
    if not looped or not flat:
        return f"{text}."
    gap = best.loss - flat[0].loss
    word = "less" if gap < 0 else "more"
    return f"{text}, {abs(gap):.4f} {word} than {flat[0].name}, which has no loop."


def loss_table(runs: list[LoggedRun]) -> list[str]:
    """The last validation of each run: at its own mu_rec, then at all depths."""
    depths = sorted(set().union(*(run.last["loss"] for run in runs)))
    rows = []
    for run in runs:
        row = {
            "run": run.name,
            "depth": run.depth,
            "validation loss": run.loss,
            "less the first's": run.loss - runs[0].loss,
            "lowest": lowest(run),
            "perplexity": np.exp(run.loss),
            "bits per byte": run.last["bpb"].get(run.depth),
        }
        losses = {f"depth {depth}": run.last["loss"].get(depth) for depth in depths}
        rows.append(row | losses)
    frame = pd.DataFrame(rows).set_index(["run", "depth"])
    return frame_table(frame.map(fmt))


def lowest(run: LoggedRun) -> float:
    """Of its validation losses at its depth; NaN if there is none."""
    losses = [entry["loss"].get(run.depth, np.nan) for entry in run.evals]
    return np.fmin.reduce(losses, initial=np.nan)


def flag_table(runs: list[LoggedRun]) -> list[str]:
    """The flags in which any two runs differ."""
    flags = pd.DataFrame({run.name: settings(run) for run in runs}, dtype=object)
    differ = flags.astype(str).nunique(axis=1, dropna=False) > 1
    return frame_table(flags[differ].rename_axis("flag"))


def cost_table(runs: list[LoggedRun]) -> list[str]:
    rows = []
    for run in runs:
        steps = pd.DataFrame(run.train)
        tokens = steps.tokens.max()
        cost = {
            "run": run.name,
            "parameters": run.config.get("params"),
            "tokens trained": tokens,
            "training FLOPs": tokens * run.config.get("flops_per_token", np.nan),
            "tokens/s": steps.tok_s.median(),
            "minutes in steps": steps.ms.sum() / 6e4,
            "peak memory, GiB": steps.mem_gb.max(),
            "machine": run.config.get("machine"),
        }
        rows.append(cost)
    return records_table(rows, COSTS)


def curve(records: pd.DataFrame, name: str) -> tuple[pd.Series, pd.Series]:
    """Millions of tokens, and a column of the records, both as means of at most POINTS parts."""
    known = records.reindex(columns=["tokens", name]).astype(float)
    parts = known.index * POINTS // max(1, len(known))
    means = known.groupby(parts).mean(skipna=False)
    return means.tokens / 1e6, means[name]


def training_figure(runs: list[LoggedRun], out: Path) -> list[str]:
    xlabel = "tokens trained, millions"
    plots = []
    for name, (ylabel, scale) in CURVES.items():
        curves = [curve(pd.DataFrame(run.train), name) for run in runs]
        plots.append(Plot(xlabel, ylabel, curves, {"yscale": scale}))
    curves = [curve(pd.json_normalize(run.evals), f"loss.{run.depth}") for run in runs]
    plots.append(Plot(xlabel, "validation loss, nats/token", curves))
    return figure(out / "training.png", "Over training.", [run.name for run in runs], plots)


def core_section(rules: CoreRules, runs: list[LoggedRun], out: Path) -> list[str]:
    """Scores of runs by depth, and at mu_rec the radars of their categories."""
    rows = []
    for run in runs:
        for depth, score in run.core[rules].items():
            for average in (score["aggregate"], score.get("core")):
                if average:
                    rows.append({"run": run.name, "depth": depth, **average})
    known = [f"{name} {rule}" for name, rule in rules._asdict().items() if rule]
    lines = [f"## {', '.join(known)}", "", *records_table(rows, SCORES)]
    plots = []
    for kind in ("categories_fine", "categories_ext"):
        plots.append(radar([run.core[rules].get(run.depth, {}).get(kind, {}) for run in runs]))
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
    lines = [f"# {', '.join(names)}", "", headline(runs), ""]
    plot = depth_plot([run.last["loss"] for run in runs], "validation loss, nats/token")
    lines += figure(out / "depth.png", "Last validation loss against depth.", names, [plot])
    lines += loss_table(runs)
    remarks = compare_arms(runs)
    if len(runs) > 1 and len({run.flags["seed"] for run in runs}) == 1:
        remarks.append(ONE_SEED)
    remarks.append(f"Knowing token frequencies only: {fmt(runs[0].unigram)} nats/token.")
    for run in runs:
        remarks += [f"{run.name}: {note}." for note in run.notes]
    lines += ["\n\n".join(remarks), ""]
    print("\n".join(lines))
    lines += training_figure(runs, out)
    lines += ["## What differs", "", *flag_table(runs)]
    lines += ["## Cost", "", *cost_table(runs)]
    for rules in dict.fromkeys(chain(*(run.core for run in runs))):
        scored = [run for run in runs if rules in run.core]
        lines += core_section(rules, scored, out)
    save_page(out / "report", lines)


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m tools.report")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run directories, the reference first")
    add(
        "--out",
        type=Path,
        help="for report.md and figures (default: the runs' common parent; of one run, the run)",
    )
    args = parser.parse_args(argv)
    paths = [path.resolve() for path in args.runs]
    common = os.path.commonpath([path.parent for path in paths])
    runs = [read_run(path, os.path.relpath(path, common)) for path in paths]
    report(runs, args.out or Path(os.path.commonpath(paths)))


if __name__ == "__main__":
    run_cli(main)
