"""Arms: runs that differ in the seed alone, and whether one arm is better than another.

An arm is what decides its numbers: the configuration that its own code prints for its flags with
`train.py --dry-run`. Its key is a hash of that without the seed; its label only stands on pages. A
difference is paired by seed: the mean over seeds ± half the 95 % Student t interval, below 0 where the
arm is better than the base. Losses are nats per token, or bits per byte where tokenizers differ.
"""

import hashlib
import json
import math
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

import train
from dataloader import PackedData
from looped.common import fail
from looped.machine import ROOT, code_hash
from looped.run import decisive, read_log
from tools.figures import half_width, t_quantile

TRAININGS = Path("runs/ablate/trainings")
ROUNDING = ("ranks", "device_batch_size")  # of what decides a run's numbers: the last digits alone
UNITS = {"loss": "nats/token", "bpb": "bits/byte"}  # by the name in an evaluation's record
MEASURED_ON = {  # the parts of a yardstick
    "text": "validation text", "rows": "validation rows", "tokenizer": "tokenizer",
    "seq_len": "row length", "tokens": "number of validation tokens",
}  # fmt: skip
FEW_TOKENS = 5  # a parameter
# standard deviation over 4 and 8 seeds of `nano` and its flat twin in results/ledger
SCATTER = "seeds scatter by about 0.004 (nano on code, 20 tokens a parameter)"


# -------------------------------------------------------------------------------------------------
# A run


@dataclass
class Run:
    name: str
    config: dict  # config.json, with "commit", "branch", "edited" and "date"
    train: list[dict]  # the records of log.jsonl by step
    evals: list[dict]
    core: dict[str, dict] = field(default_factory=dict)  # {file: what core_eval.py wrote}
    diverged_at: int | None = None  # step
    notes: list[str] = field(default_factory=list)  # that its training printed

    @property
    def flags(self) -> dict:
        """The flags of training and network."""
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
        return self.at_depth(self.depth)

    @property
    def tokens(self) -> int:
        """Tokens trained."""
        return self.train[-1]["tokens"]

    @property
    def flops(self) -> float:
        """Training FLOPs of the whole run."""
        return self.config.get("flops", self.config["flops_per_token"] * self.tokens)

    @property
    def yardstick(self) -> dict:
        """What the last evaluation was measured on: older runs have no more than these two hashes."""
        if "yardstick" in self.last:
            return self.last["yardstick"]
        return {"rows": self.config["data"]["sha256"], "tokens": self.last.get("eval_tokens")}

    def at_depth(self, depth: int, unit: str = "loss") -> float:
        """The last val loss at a depth. A model of one depth has the same at every one."""
        if self.has_one_depth():
            depth = self.depth
        return self.last.get(unit, {}).get(depth, math.nan)

    def counts(self) -> bool:
        """Whether it ended well, and one code made it."""
        ended = self.last.get("final", False) and math.isfinite(self.loss)
        return ended and self.diverged_at is None and not self.config.get("other_code")

    def has_one_depth(self) -> bool:
        """Whether it has no loop, or was always trained with one and is used with one."""
        once = self.depth == 1 and self.flags["sampling"] == "fixed"
        return self.depth == 0 or once


def read_run(path: Path, name: str) -> Run:
    """A run directory's run. Its name says if other code continued it."""
    config = json.loads((path / "config.json").read_text())
    log = read_log(path)
    if not log.train:
        fail(f"{path} has made no step; continue it with train.py --resume")
    config["other_code"] = any(start["code"] != config["code"] for start in log.starts)
    if config["other_code"]:
        name += " (continued by other code)"
    written = time.gmtime((path / "log.jsonl").stat().st_mtime)
    config["date"] = time.strftime("%Y-%m-%d", written)
    config |= commit_of(config)
    core = {}
    for file in sorted(path.glob("core_eval_*.json")):
        core[file.stem] = json.loads(file.read_text())
    from_scratch = not config["init_from"]
    diverged_at = divergence(log.train, from_scratch)
    return Run(name, config, log.train, log.evals, core, diverged_at, notes_of(path))


def commit_of(config: dict) -> dict:
    """The commit and branch of a run's code, and whether its files had edits."""
    git = config["git"]
    return {"commit": git["commit"], "branch": git["branch"], "edited": bool(git["diff"])}


def notes_of(path: Path) -> list[str]:
    """What a training printed of itself beside its numbers, each once; screen.txt is tools.runner's."""
    screen = path / "screen.txt"
    if not screen.exists():
        return []
    notes = re.findall(
        r"^(?:note: .*|.*recompile_limit.*)$", screen.read_text(errors="replace"), re.M
    )
    return [*dict.fromkeys(note.removeprefix("note: ") for note in notes)]


def divergence(records: list[dict], from_scratch: bool = True) -> int | None:
    """The first step of a divergence, or None.

    Diverged: train.py stopped the run (three steps in a row without a finite loss or gradient); or its
    training loss ends more than 0.5 nats above its lowest, or, where it began from scratch, above its
    start (medians of the last twentieth of the steps so far); or the state explodes: ‖h_T‖ becomes
    10,000 times that of step 1, or of 1, if it was below (the raw loop may begin at 0).
    """
    steps = pd.DataFrame(records, columns=["step", "loss", "state_norm", "skipped"], dtype=float)
    bad = list(np.flatnonzero(steps.state_norm > 1e4 * max(steps.state_norm[0], 1.0)))
    if steps.skipped[-train.BAD_STEPS :].sum() == train.BAD_STEPS:
        bad.append(len(steps) - train.BAD_STEPS)
    else:
        width = max(1, len(steps) // 20)
        medians = steps.loss.rolling(width, min_periods=1).median()
        limit = medians.min() + 0.5
        if from_scratch:
            limit = min(limit, medians[0])
        good = np.flatnonzero(medians <= limit)
        if good[-1] + 1 < len(steps):
            bad.append(good[-1] + 1)
    return int(steps.step[min(bad)]) if bad else None


# -------------------------------------------------------------------------------------------------
# An arm


@dataclass(eq=False)
class Arm:
    label: str
    flags: list[str] = field(default_factory=list)  # of train.py, without --seed and --out
    group: str = ""  # the first arm of a group is what its others are compared with
    code: Path = ROOT  # the checkout whose train.py trains it
    origin: str = ""  # of the code, in words: branch, commit, edits
    runs: list[Run] = field(default_factory=list)
    source: dict = field(default_factory=dict)  # {depth or score: the source's number}, of studies

    @property
    def name(self) -> str:
        return f"{self.group}, {self.label}".removeprefix(", ")

    @cached_property
    def config(self) -> dict:
        """config.json as the arm's own code plans it, at seed 0."""
        flags = [*self.flags, "--out", str(TRAININGS / "planned")]
        if code_hash(self.code) == code_hash():  # the same code, which is loaded here
            return train.planned(flags)
        line = [sys.executable, self.code / "train.py", *flags, "--dry-run"]
        done = subprocess.run(line, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            fail(f"{self.name}: train.py does not start, see above")
        packing, start, config = done.stdout.partition("{\n")
        print(packing, end="")
        return json.loads(start + config)

    @property
    def key(self) -> str:
        """A hash of all that decides the arm's numbers: arms of one key are one."""
        settings = json.dumps(identity(self.config), sort_keys=True)
        return hashlib.sha256(settings.encode()).hexdigest()[:12]

    @property
    def depth(self) -> int:
        """mu_rec of its runs; 0 without a loop"""
        return self.runs[0].depth

    @property
    def yardstick(self) -> dict:
        """What its losses are measured on; of an arm without runs, what they will be."""
        if self.runs:
            return self.runs[0].yardstick
        rows = PackedData(self.config["data"]["path"])
        return rows.yardstick | {"tokens": self.config["args"]["eval_tokens"]}

    def diverged(self) -> list[int]:
        """The steps at which runs diverge."""
        return [run.diverged_at for run in self.runs if run.diverged_at is not None]

    def losses(self, unit: str = "loss") -> pd.Series:
        """Last val losses at mu_rec of the runs that count, by seed."""
        found = {run.seed: run.at_depth(run.depth, unit) for run in self.runs if run.counts()}
        return pd.Series(found, dtype=float)

    def losses_at(self, depths: list[int], unit: str = "loss") -> pd.DataFrame:
        """Last val losses of the runs that count: a row a seed, a column a depth."""
        rows = {}
        for run in filter(Run.counts, self.runs):
            rows[run.seed] = {depth: run.at_depth(depth, unit) for depth in depths}
        return pd.DataFrame(rows, depths, dtype=float).T

    def over_training(self, unit: str = "loss") -> pd.DataFrame:
        """Val losses at mu_rec of the runs that count, each on as many tokens as its last: a row a
        seed, a column a validation.
        """
        rows = {}
        for run in filter(Run.counts, self.runs):
            rows[run.seed] = {}
            for record in run.evals:
                # the ledger's older lines have this of the last one alone
                if record.get("eval_tokens") in (None, run.last["eval_tokens"]):
                    rows[run.seed][record["tokens"]] = record.get(unit, {}).get(run.depth)
        return pd.DataFrame(rows, dtype=float).T


def identity(config: dict) -> dict:
    """What the runs of an arm share: all that decides their numbers, but the seed and rounding."""
    settings = decisive(config)
    for name in ("seed", *ROUNDING):
        settings.pop(name)
    if config["args"]["flops"]:  # the steps that these take are another number at another seed
        settings["steps"] = config["args"]["flops"]
        settings.pop("eval_every")
    return settings


def base_of(arm: Arm, arms: list[Arm]) -> Arm:
    """The first of its group."""
    return next(other for other in arms if other.group == arm.group)


# -------------------------------------------------------------------------------------------------
# A difference


@dataclass
class Verdict:
    """How an arm compares with its base."""

    kind: str  # better, worse, not shown, diverged, no effect, not comparable
    sentence: str
    unit: str = "loss"
    gaps: pd.Series = field(default_factory=lambda: pd.Series(dtype=float))  # by seed

    @property
    def mean(self) -> float:
        return float(self.gaps.mean())

    @property
    def half_width(self) -> float:
        return half_width(self.gaps)


def compared_in(arm: Arm, base: Arm) -> str:
    """The unit in which two arms compare; "" where they do not: other validation rows, say."""
    differ = unlike(arm, base)
    if not differ:
        return "loss"
    only_tokenizer = "tokenizer" in differ and not {"text", "seq_len"} & set(differ)
    return "bpb" if only_tokenizer else ""


def unlike(arm: Arm, base: Arm) -> list[str]:
    """The parts in which the yardsticks of two arms differ."""
    ours = arm.yardstick
    theirs = base.yardstick
    return [part for part in MEASURED_ON if ours.get(part) != theirs.get(part)]


def unlike_in_words(arm: Arm, base: Arm) -> str:
    return "another " + " and ".join(MEASURED_ON[part] for part in unlike(arm, base))


def paired(losses, base):
    """Differences at the seeds, and in the columns, that both have; Series or DataFrames."""
    gaps = (losses - base).dropna(how="all")
    return gaps.dropna(axis="columns") if gaps.ndim == 2 else gaps


def change_nothing(arm: Arm, base: Arm) -> bool:
    """Whether each step and each validation is the same, to the last digit, at all seeds of both."""
    theirs = {run.seed: run for run in base.runs}
    pairs = [(run, theirs[run.seed]) for run in arm.runs if run.seed in theirs]
    for run, other in pairs:
        ours = [record["loss"] for record in run.train]
        if run.last["loss"] != other.last["loss"] or ours != [x["loss"] for x in other.train]:
            return False
    return bool(pairs)


def seeds_to_see(gap: float, deviation: float) -> int:
    """How many pairs, at this scatter, narrow the interval to ± gap."""
    n = 2
    while t_quantile(n - 1) * deviation > gap * math.sqrt(n):
        n += 1
    return n


def loops_in_words(depth: int) -> str:
    return f" at {depth} loop{'s' * (depth > 1)}" if depth else ""


def depths_in_words(arm: Arm, base: Arm) -> str:
    """At how many loops the two are compared: " at 8 loops", or each where they differ."""
    of_arm = loops_in_words(arm.depth)
    if arm.depth == base.depth:
        return of_arm
    return f"{of_arm} ({base.label}{loops_in_words(base.depth) or ' has no loop'})"


def compare(arm: Arm, base: Arm) -> Verdict:
    """Whether an arm is better than another, in a word and in one sentence."""
    unit = compared_in(arm, base)
    pair = f"{arm.name} and {base.name}"
    if not unit:
        said = f"{pair} do not compare: they have {unlike_in_words(arm, base)}."
        return Verdict("not comparable", said)
    for one in (arm, base):
        if one.diverged():
            count = f"{len(one.diverged())} of {len(one.runs)}"
            return Verdict("diverged", f"{one.name} diverges on {count} seeds.")
    gaps = paired(arm.losses(unit), base.losses(unit))
    if not len(gaps):
        return Verdict("not comparable", f"{pair} have no seed in common that ended well.")
    if change_nothing(arm, base):
        said = f"{arm.name} changes nothing with these flags: all losses are those of {base.name}."
        return Verdict("no effect", said, unit, gaps)
    return weigh(arm, base, unit, gaps)


def weigh(arm: Arm, base: Arm, unit: str, gaps: pd.Series) -> Verdict:
    """The paired t test of differences at one seed or more."""
    mean = gaps.mean()
    word = "better" if mean < 0 else "worse"
    where = f"{UNITS[unit]}{depths_in_words(arm, base)}"
    if unit == "bpb":
        where += ", since tokenizers differ"
    if len(gaps) == 1:
        said = (
            f"{arm.name} is {word} than {base.name} at this seed: {mean:+.4f} {where}; {SCATTER}."
        )
        return Verdict("not shown", said, unit, gaps)
    half = half_width(gaps)
    shown = f"{mean:+.4f} ± {half:.4f} {where} ({len(gaps)} seeds, 95 %)"
    if abs(mean) > half:
        return Verdict(word, f"{arm.name} is {word} than {base.name}: {shown}.", unit, gaps)
    goal = float(f"{half / 2:.1g}")
    seeds = seeds_to_see(goal, gaps.std())
    said = f"{arm.name}: no difference from {base.name} is shown: {shown}; at this scatter "
    return Verdict("not shown", f"{said}{seeds} seeds see {goal:g}.", unit, gaps)
