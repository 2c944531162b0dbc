"""Reading run directories."""

import json
import math
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from looped.console import DAMAGE, fail, outside


class CoreRules(NamedTuple):
    """What a score was measured by; only scores with equal rules compare."""

    panel: str
    protocol: str
    baselines: str | None
    max_per_task: int | None


@dataclass
class LoggedRun:
    name: str
    path: Path
    config: dict
    train: list[dict]  # the records of log.jsonl by step
    evals: list[dict]
    last: dict  # the last of evals, or an empty evaluation at step 0
    core: dict[CoreRules, dict[int, dict]]  # the scores of core_*_*.json by depth
    depth: int  # mu_rec, or the evaluated depth nearest to it
    loss: float  # last validation loss at `depth`, nats/token; NaN if there is none
    unigram: float | None  # entropy of the token frequencies, nats/token
    notes: list[str]  # what is wrong with the run


ADVICE = "restore it, or delete it and make it again"


def read_json(path: Path):
    with outside(f"{path} is damaged", ADVICE):
        return json.loads(path.read_text(encoding="utf-8"))


def by_depth(losses: dict) -> dict[int, float]:
    """JSON's keys are strings."""
    return {int(depth): float(loss) for depth, loss in losses.items()}


def number(value) -> float | None:
    return None if value is None else float(value)


# The parts that the files must all have, and what each is converted to.
CONFIG = dict.fromkeys(["args", "model", "data", "tokenizer", "git", "versions"], dict)
CONFIG |= {"device": str, "dtype": str, "params": int, "flops_per_token": float}
RECORDS = {
    "train": {"step": int, "tokens": int, "loss": float},
    "eval": {"step": int, "tokens": int, "eval_tokens": int, "loss": by_depth, "bpb": by_depth},
}
AVERAGE = {"name": str, "mean": number, "std": number, "tasks_done": int, "tasks_total": int}


def converted(record: dict, kinds: dict) -> dict:
    """The parts named in kinds {name: kind}; an error of DAMAGE where one is missing or cannot be converted."""
    return {name: kind(record[name]) for name, kind in kinds.items()}


def read_log(path: Path) -> tuple[list[dict], list[dict], list[int]]:
    """-> (training records, evaluations, numbers of damaged lines).

    A resumed run repeats steps: the last record of a step counts.
    """
    found = {"train": {}, "eval": {}}
    damaged = []
    text = path.read_text(encoding="utf-8", errors="replace")
    for i, line in enumerate(text.rstrip("\n").split("\n"), 1):
        try:
            record = json.loads(line)
            kind = record.pop("kind")
            if kind in found:  # not "start", "core"
                kinds = dict.fromkeys(record, number) | RECORDS[kind]
                found[kind][int(record["step"])] = converted(record, kinds)
        except DAMAGE:
            damaged.append(i)
    train, evals = (sorted(kind.values(), key=itemgetter("step")) for kind in found.values())
    return train, evals, damaged


def read_run(path: Path) -> LoggedRun:
    """Everything that a report says of one run; a folder that is no run is refused."""
    config_file = path / "config.json"
    log_file = path / "log.jsonl"
    if not config_file.is_file() or not log_file.is_file():
        fail(f"{path} lacks config.json or log.jsonl; give directories that train.py made")
    train, evals, damaged = read_log(log_file)
    if not train:
        lines = f" (line {damaged[0]} is damaged)" if damaged else ""
        fail(f"{log_file} has no step{lines}; continue the run with train.py --resume")
    last = evals[-1] if evals else {"step": 0, "loss": {}, "bpb": {}}
    with outside(f"{config_file} is damaged", f"restore it, or leave {path} out"):
        config = read_json(config_file)
        config |= converted(config, CONFIG)
        converted(config["tokenizer"], {"sha256": str})
        data = converted(config["data"], {"path": Path, "sha256": str})
        depth = nearest(last["loss"], int(config["model"]["mu_rec"]))
    return LoggedRun(
        name=path.name,
        path=path,
        config=config,
        train=train,
        evals=evals,
        last=last,
        core=read_scores(path),
        depth=depth,
        loss=last["loss"].get(depth, math.nan),
        unigram=unigram_entropy(path, data["path"]),
        notes=faults(train, last, damaged),
    )


def read_scores(path: Path) -> dict[CoreRules, dict[int, dict]]:
    """The run's files core_*_*.json."""
    core = {}
    for file in sorted(path.glob("core_*_*.json")):
        with outside(f"{file} is damaged", ADVICE):
            record = read_json(file)
            whole = {}
            for depth, scores in record.get("depths", {}).items():
                if "aggregate" in scores:
                    whole[int(depth)] = scores_at(scores)
            if whole:
                rules = [record.get(name) for name in CoreRules._fields]
                core[CoreRules(*rules)] = whole
    return core


def scores_at(record: dict) -> dict:
    """What a report shows of a depth's record."""
    shown = {}
    for name in record.keys() & {"aggregate", "core"}:
        shown[name] = converted(record[name], AVERAGE)
    for name in record.keys() & {"categories_fine", "categories_ext"}:
        shown[name] = {title: number(mean) for title, mean in record[name].items()}
    return shown


def nearest(depths, wanted: int) -> int:
    """Of the depths the one nearest to that wanted; without any, that itself."""
    return min(depths, key=lambda depth: abs(depth - wanted), default=wanted)


def unigram_entropy(path: Path, data: Path) -> float | None:
    """From the rows' manifest; `data` may be relative to the folder the run was started from."""
    for folder in [Path("."), *path.resolve().parents]:
        manifest = folder / data / "manifest.json"
        if manifest.is_file():
            with outside(f"{manifest} is damaged", "pack the rows again"):
                return number(read_json(manifest).get("unigram_entropy"))
    return None


def faults(train: list[dict], last: dict, damaged: list[int]) -> list[str]:
    notes = [f"line {number} of log.jsonl is damaged and left out" for number in damaged]
    step = train[-1]["step"]
    if not last.get("final") or step > last["step"]:
        notes.append(f"unfinished at step {step}, last evaluated at step {last['step']}")
    lost = [record["step"] for record in train if not math.isfinite(record["loss"])]
    if lost:
        notes.append(f"the loss is not finite at step {lost[0]}")
    return notes
