"""Arms: runs that differ in the seed alone. Their losses, and how one arm differs from another.

For tools.report, tools.ablate and studies/. Losses: nats per token. A difference is paired by seed:
its mean over seeds ± half the 95 % Student t interval.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from looped.common import fail
from looped.run import read_log
from tools.figures import (
    Plot,
    depth_plot,
    figure,
    frame_table,
    half_width,
    plus_minus,
    records_table,
    t_quantile,
)
from train import BAD_STEPS

TOKENS = "tokens trained, millions"
TRAINED = "at mu_rec"  # of the tables: at the depth that a run was trained with
SHOWN = [1, 2, 4, 8, 12, 16, 24, 64]  # depths of the tables
POINTS = 100  # of a curve over training, each the mean of its steps
CURVES = {  # {of the log's records: (the axis' label, its scale)}
    "loss": ("training loss, nats/token", "linear"),
    "grad_norm": ("gradient norm", "log"),
    "rho": ("spectral radius ρ(Ā)", "linear"),
    "decay_max": ("largest decay a loop", "linear"),
    "decay_mean": ("mean decay a loop", "linear"),
    "state_norm": ("state norm ‖h‖ after the last loop", "log"),
    "residual": ("residual ‖Δh‖ of the last loop", "log"),
}
COSTS = {  # {column: format of its numbers}
    "parameters": ",.0f", "FLOPs a token": ",.4g", "tokens trained": ",.0f", "training FLOPs": ".3g",
    "tokens/s": ",.0f", "minutes in steps": ".1f", "peak memory, GiB": ".2f",
}  # fmt: skip
CAPTION = (
    "Val loss by depth (the grey line: the trained mean depth), and its difference over training; "
    "mean over seeds and 95 % interval."
)


# -------------------------------------------------------------------------------------------------
# A run


@dataclass
class Run:
    name: str
    config: dict  # config.json
    train: list[dict]  # the records of log.jsonl by step
    evals: list[dict]
    core: dict[str, dict] = field(default_factory=dict)  # {file: what core_eval.py wrote}
    diverged_at: int | None = None  # step

    @property
    def flags(self) -> dict:
        """Of the training and of the network."""
        return self.config["args"] | self.config["model"]

    @property
    def seed(self) -> int:
        return self.flags["seed"]

    @property
    def depth(self) -> int:
        """mu_rec; 0 without a loop"""
        return self.flags["mu_rec"]

    @property
    def last(self) -> dict:
        """The last evaluation."""
        return self.evals[-1] if self.evals else {"loss": {}}

    @property
    def loss(self) -> float:
        """The last val loss at mu_rec, nats/token; NaN if there is none."""
        return self.last["loss"].get(self.depth, math.nan)

    def counts(self) -> bool:
        """Whether it ended well, and one code made it."""
        ended = self.last.get("final", False) and math.isfinite(self.loss)
        return ended and self.diverged_at is None and not self.config.get("other_code")

    def has_one_depth(self) -> bool:
        """Whether it has no loop, or was always trained with one and is used with one."""
        once = self.depth == 1 and self.flags["sampling"] == "fixed"
        return self.depth == 0 or once


def read_run(path: Path, name: str) -> Run:
    """Everything known about a run. Its name says if other code continued it."""
    config = json.loads((path / "config.json").read_text())
    log = read_log(path)
    if not log.train:
        fail(f"{path} has made no step; continue it with train.py --resume")
    config["other_code"] = any(start["code"] != config["code"] for start in log.starts)
    if config["other_code"]:
        name += " (continued by other code)"
    core = {}
    for file in sorted(path.glob("core_*_*.json")):
        core[file.stem] = json.loads(file.read_text())
    return Run(name, config, log.train, log.evals, core, divergence(log.train))


def divergence(records: list[dict]) -> int | None:
    """The first step of a divergence, or None.

    Diverged: train.py stopped the run (three steps in a row without a finite loss or gradient);
    or its training loss ends above its start, or more than 0.5 nats above its lowest (medians
    of the last twentieth of the steps so far); or the state explodes: ‖h_T‖ becomes 10,000
    times that of step 1, or of 1, if it was below (the raw loop may begin at 0).
    """
    steps = pd.DataFrame(records, columns=["step", "loss", "state_norm", "skipped"], dtype=float)
    norm = steps.state_norm
    bad = norm > 1e4 * max(norm[0], 1.0)
    if steps.skipped[-BAD_STEPS:].sum() == BAD_STEPS:
        bad.iloc[-BAD_STEPS:] = True
    else:
        width = max(1, len(steps) // 20)
        medians = steps.loss.rolling(width, min_periods=1).median()
        limit = np.nanmin([medians[0], medians.min() + 0.5])
        last_good = medians.index[medians <= limit][-1]
        bad[last_good + 1 :] = True
    return int(steps.step[bad].min()) if bad.any() else None


def cost_of(run: Run) -> dict:
    steps = pd.DataFrame(run.train, columns=["tokens", "tok_s", "ms", "mem_gb"], dtype=float)
    tokens = int(steps.tokens.max())
    flops = run.config["flops_per_token"]
    cost = {"parameters": run.config["params"], "FLOPs a token": flops}
    cost["tokens trained"] = tokens
    cost["training FLOPs"] = tokens * flops
    cost["tokens/s"] = steps.tok_s.median()
    cost["minutes in steps"] = steps.ms.sum() / 6e4
    cost["peak memory, GiB"] = steps.mem_gb.max()
    return cost


# -------------------------------------------------------------------------------------------------
# Arms


@dataclass
class Arm:
    label: str
    group: str = ""  # the first arm of a group is what its others are compared with
    runs: list[Run] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.group}, {self.label}".removeprefix(", ")

    def diverged(self) -> list[int]:
        """The steps at which runs diverge."""
        return [run.diverged_at for run in self.runs if run.diverged_at is not None]

    def losses(self, depths: list) -> pd.DataFrame:
        """Last val losses of the runs that count: a row a seed, a column a depth, and one for
        mu_rec. A model of one depth has its one loss at every depth.
        """
        found = {}
        for run in filter(Run.counts, self.runs):
            known = run.last["loss"]
            if run.has_one_depth():
                known = dict.fromkeys(depths, run.loss)
            found[run.seed] = known | {TRAINED: run.loss}
        return pd.DataFrame(found, [TRAINED, *depths], dtype=float).T

    def over_training(self) -> pd.DataFrame:
        """Val losses at mu_rec of the runs that count, each on as many tokens as its last: a row a
        seed, a column a validation.
        """
        found = {}
        for run in filter(Run.counts, self.runs):
            found[run.seed] = {}
            for record in run.evals:
                # the ledger's older lines have this of the last one alone
                if record.get("eval_tokens") in (None, run.last["eval_tokens"]):
                    found[run.seed][record["tokens"]] = record["loss"].get(run.depth)
        return pd.DataFrame(found, dtype=float).T


def base_of(arm: Arm, arms: list[Arm]) -> Arm:
    """The first of its group."""
    return next(other for other in arms if other.group == arm.group)


def depths_of(arms: list[Arm]) -> list[int]:
    """All depths that looped runs were evaluated at."""
    known = set()
    for arm in arms:
        for run in arm.runs:
            known.update(run.last["loss"])
    return sorted(known - {0}) or [1]


def paired(losses: pd.DataFrame, base: pd.DataFrame) -> pd.DataFrame:
    """Differences at the seeds, and in the columns, that both have."""
    return (losses - base).dropna(how="all").dropna(axis="columns")


def seeds_to_see(gap: float, deviation: float) -> int:
    """How many pairs, at this scatter, narrow the interval to ± gap."""
    n = 2
    while t_quantile(n - 1) * deviation > gap * math.sqrt(n):
        n += 1
    return n


def answer(arm: Arm, base: Arm) -> str:
    """Whether an arm is better than another, in one sentence."""
    for one in (arm, base):
        if one.diverged():
            return f"{one.name} diverges on {len(one.diverged())} of {len(one.runs)} seeds."
    gaps = paired(arm.losses([]), base.losses([])).get(TRAINED, [])
    if not len(gaps):
        return f"{arm.name} and {base.name} have no seed in common that ended well."
    loops = arm.runs[0].depth
    at = f"nats/token at {loops} loops" if loops else "nats/token without a loop"
    mean = np.mean(gaps)
    if len(gaps) == 1:
        return (
            f"{arm.name} differs from {base.name} by {mean:+.4f} {at}; one seed gives no interval."
        )
    told = f"{at}, {len(gaps)} seeds, 95 %"
    half = half_width(gaps)
    if abs(mean) > half:
        word = "better" if mean < 0 else "worse"
        return f"{arm.name} is {word} than {base.name} by {abs(mean):.4f} ± {half:.4f} {told}."
    goal = float(f"{half / 2:.1g}")
    seeds = seeds_to_see(goal, gaps.std())
    shown = f"{mean:+.4f} ± {half:.4f} {told}"
    return (
        f"{arm.name}: no difference shown: {shown}; to see {goal:g} about {seeds} seeds are needed."
    )


# -------------------------------------------------------------------------------------------------
# Tables


def loss_table(arms: list[Arm], depths: list) -> list[str]:
    """A row an arm: val losses at mu_rec and at depths, mean over seeds ± half the 95 % t interval;
    then a row for each difference from the first of its group.
    """
    rows = []
    for arm in arms:
        losses = arm.losses(depths)
        row = {"val loss": arm.name, "seeds": len(losses)}
        row |= cells(losses, ".4f")
        if arm.diverged():
            steps = ", ".join(map(str, arm.diverged()))
            row[TRAINED] = f"diverges at step {steps}; {row[TRAINED]}".removesuffix("; –")
        rows.append(row)
    for arm in arms:
        base = base_of(arm, arms)
        gaps = paired(arm.losses(depths), base.losses(depths))
        if arm is not base and len(gaps):
            row = {"val loss": f"{arm.name}: difference from {base.label}", "seeds": len(gaps)}
            rows.append(row | cells(gaps, "+.4f"))
    return frame_table(pd.DataFrame(rows).set_index("val loss"))


def cells(losses: pd.DataFrame, spec: str) -> dict[str, str]:
    """Of a row, the depths that all seeds have."""
    found = {}
    for depth, values in losses.items():
        name = depth if depth == TRAINED else f"depth {depth}"
        found[name] = "–" if values.hasnans else plus_minus(values, spec)
    return found


def shown_depths(arms: list[Arm]) -> list[int]:
    return [depth for depth in depths_of(arms) if depth in SHOWN]


def cost_table(arms: list[Arm]) -> list[str]:
    """What a training takes, the median over seeds."""
    rows = []
    for arm in arms:
        costs = pd.DataFrame(map(cost_of, arm.runs))
        rows.append({"cost": arm.name} | costs.quantile(interpolation="higher").to_dict())
    return records_table(rows, {"cost": ""} | COSTS)


# -------------------------------------------------------------------------------------------------
# Figures


def labels_of(arms: list[Arm]) -> list[str]:
    return list(dict.fromkeys(arm.label for arm in arms))


def groups_of(arms: list[Arm]) -> dict[str, dict[str, Arm]]:
    """{group: {label: arm}}; every group has every label, missing arms have no runs."""
    groups = {arm.group: {label: Arm(label) for label in labels_of(arms)} for arm in arms}
    for arm in arms:
        groups[arm.group][arm.label] = arm
    return groups


def loss_by_depth(arms: list[Arm], title: str) -> Plot:
    """Val loss by depth, with its interval over seeds."""
    depths = depths_of(arms)
    means = []
    halves = []
    for arm in arms:
        losses = arm.losses(depths)[depths].dropna(axis="columns")
        means.append(losses.mean().dropna().to_dict())
        halves.append([half_width(losses[depth]) for depth in means[-1]])
    trained = {run.depth for arm in arms for run in arm.runs if not run.has_one_depth()}
    mark = trained.pop() if len(trained) == 1 else 0
    plot = depth_plot(means, "val loss, nats/token", mark)
    plot.settings["title"] = title
    plot.half_widths = halves
    return plot


def difference_over_training(arms: list[Arm], title: str) -> Plot:
    """The difference of the val losses at mu_rec from the flat model's, or else the first arm's."""
    trained = [arm for arm in arms if arm.runs]
    base = next((arm for arm in trained if arm.runs[0].depth == 0), trained[0])
    curves = []
    halves = []
    for arm in arms:
        ours = Arm(arm.label) if arm is base else arm
        gaps = paired(ours.over_training(), base.over_training())
        curves.append((gaps.columns.to_numpy(float) / 1e6, gaps.mean().to_numpy()))
        halves.append([half_width(gaps[tokens]) for tokens in gaps])
    label = f"val loss, difference from {base.label}"
    return Plot(TOKENS, label, curves, {"title": title}, halves)


def comparison_figure(path: Path, arms: list[Arm], title: str = "") -> list[str]:
    """For each group the val loss by depth, and the differences over training."""
    plots = []
    for group, by_label in groups_of(arms).items():
        members = list(by_label.values())
        plots.append(loss_by_depth(members, group or title))
        if len(arms) > 1:
            plots.append(difference_over_training(members, group or title))
    return figure(path, CAPTION, labels_of(arms), plots)


def curve(run: Run, kind: str) -> tuple:
    """(millions of tokens, values) over training, as means of at most POINTS parts. kind: of the
    records of CURVES, or loss.DEPTH, the val loss at a depth.
    """
    records = pd.DataFrame(run.train)
    if kind not in records:
        records = pd.json_normalize(run.evals)
    known = records.reindex(columns=["tokens", kind]).astype(float)
    parts = known.index * POINTS // max(1, len(known))
    means = known.groupby(parts).mean(skipna=False)
    return means.tokens / 1e6, means[kind]


def curves_figure(path: Path, arms: list[Arm], kinds, first=()) -> list[str]:
    """Training curves of each arm's first run, by group and kind, after the plots given first."""
    plots = [*first]
    for group, by_label in groups_of(arms).items():
        for kind in kinds:
            curves = []
            for arm in by_label.values():
                curves.append(curve(arm.runs[0], kind) if arm.runs else ([], []))
            label, scale = CURVES.get(kind, (f"val {kind}", "linear"))
            plots.append(Plot(TOKENS, label, curves, {"yscale": scale, "title": group}))
    caption = "Over training, the first seed of each."
    if first:
        caption = "Over training: the mean difference over seeds, then the first seed of each."
    return figure(path, caption, labels_of(arms), plots)
