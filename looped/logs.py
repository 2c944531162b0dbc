"""Reading run directories."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from looped.checkpoint import step_of
from looped.console import DAMAGE, fail, outside


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
    path: Path
    config: dict
    flags: dict  # of the training and of the network
    train: list[dict]  # the records of log.jsonl by step
    evals: list[dict]
    last: dict  # the last of evals, or an empty one at step 0
    core: dict[CoreRules, dict[int, dict]]  # the scores of core_*_*.json by depth
    depth: int  # mu_rec
    loss: float  # last validation loss at `depth`, nats/token; NaN if there is none
    unigram: float | None  # entropy of the token frequencies, nats/token
    notes: list[str]  # what is wrong with the run


def read_json(path: Path):
    with outside(f"{path} is damaged", "restore it, or delete it and make it again"):
        return json.loads(path.read_text(encoding="utf-8"))


def by_depth(values: dict) -> dict[int, object]:
    """JSON's keys are strings."""
    return {int(depth): value for depth, value in values.items()}


class Log(NamedTuple):
    """The records of log.jsonl by kind, each in order."""

    train: list[dict]  # one a step
    evals: list[dict]
    starts: list[dict]  # of the beginning and of each --resume; none whose steps were all repeated
    damaged: list[int]  # numbers of lines that could not be read


def read_log(path: Path) -> Log:
    """A resumed run repeats steps: the last record of a step counts."""
    found = {"train": {}, "eval": {}}
    starts = []
    damaged = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            kind = record.pop("kind")
            if kind == "eval":
                record |= {name: by_depth(record[name]) for name in ("loss", "bpb")}
            if kind == "start":
                step = int(record["step"])
                starts = [start for start in starts if start["step"] < step]
                starts.append(record | {"step": step})
            if kind in found:  # not "core"
                found[kind][int(record["step"])] = record
        except DAMAGE:
            damaged.append(number)
    train, evals = ([steps[step] for step in sorted(steps)] for steps in found.values())
    return Log(train, evals, starts, damaged)


def read_run(path: Path, name: str = "") -> LoggedRun:
    """All that is known of one run; a folder that is no run is refused."""
    log_file = path / "log.jsonl"
    if not (path / "config.json").is_file() or not log_file.is_file():
        fail(f"{path} lacks config.json or log.jsonl; give directories that train.py made")
    log = read_log(log_file)
    if not log.train:
        fail(f"{log_file} has no whole step; continue the run with train.py --resume")
    last = log.evals[-1] if log.evals else {"step": 0, "loss": {}, "bpb": {}}
    config = read_json(path / "config.json")
    with outside(f"{path} is damaged", "restore its files, or leave it out"):
        flags = config["args"] | config["model"]
        depth = flags["mu_rec"]
        core, stale = read_scores(path, last)
        return LoggedRun(
            name=name,
            path=path,
            config=config,
            flags=flags,
            train=log.train,
            evals=log.evals,
            last=last,
            core=core,
            depth=depth,
            loss=last["loss"].get(depth, math.nan),
            unigram=unigram_entropy(path, config["data"]["path"]),
            notes=faults(log, last) + changes_of_code(log, config["code"]) + stale,
        )


def read_scores(path: Path, last: dict) -> tuple[dict, list[str]]:
    """The run's files core_*_*.json; of a finished run, whose last evaluation is given, only those of
    its last checkpoint, and a note on each other.
    """
    core = {}
    notes = []
    for file in sorted(path.glob("core_*_*.json")):
        record = read_json(file)
        depths = by_depth(record["depths"])
        file_name = record["checkpoint"].split()[0]  # its hash follows
        step = step_of(Path(file_name))
        if last.get("final") and step != last["step"]:
            notes.append(f"{file.name} has scores of step {step}, which are left out")
            continue
        core[rules_of(record, depths)] = depths
    return core, notes


def rules_of(record: dict, depths: dict) -> CoreRules:
    """By what a file of scores was measured."""
    tasks = None
    if record["panel"] == "own":
        tasks = ", ".join(sorted(set().union(*(found["tasks"] for found in depths.values()))))
    return CoreRules(
        panel=record["panel"],
        protocol=record["protocol"],
        baselines=record["baselines"],
        max_per_task=record["max_per_task"],
        seeds=",".join(map(str, record["seeds"])),
        bundle=(record.get("bundle_sha256") or "")[:8] or None,
        tasks=tasks,
    )


def unigram_entropy(path: Path, data: str) -> float | None:
    """From the rows' manifest; `data` may be relative to the folder the run was started from."""
    for folder in [Path("."), *path.resolve().parents]:
        manifest = folder / data / "manifest.json"
        if manifest.is_file():
            return read_json(manifest).get("unigram_entropy")
    return None


def faults(log: Log, last: dict) -> list[str]:
    notes = [f"line {number} of log.jsonl is damaged and left out" for number in log.damaged]
    if not last.get("final"):
        step = log.train[-1]["step"]
        notes.append(f"unfinished at step {step}, last evaluated at step {last['step']}")
    lost = [record["step"] for record in log.train if not math.isfinite(record["loss"])]
    if lost:
        notes.append(f"the loss is not finite at step {lost[0]}")
    return notes


def changes_of_code(log: Log, code: str) -> list[str]:
    """Where a run was continued by other code than before; code: the hash that it began with."""
    notes = []
    for start in log.starts:
        new = start["code"]
        trained = start["step"] < log.train[-1]["step"]
        if new != code and trained:
            notes.append(f"trained by other code ({new[:8]}) after step {start['step']}")
        code = new
    return notes
