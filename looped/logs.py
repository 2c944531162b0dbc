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
class Run:
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


def read_json(path: Path):
    with outside(f"{path} is damaged", "restore it, or delete it and make it again"):
        return json.loads(path.read_text(encoding="utf-8"))


NUMBER = (int, float)
NEEDED = {  # of config.json, with the types; of its parts by a dot
    "args": dict,
    "model": dict,
    "model.mu_rec": int,
    "data.path": str,
    "data.sha256": (str, type(None)),
    "tokenizer.sha256": str,
    "git": dict,
    "versions": dict,
    "device": str,
    "dtype": str,
    "params": NUMBER,
    "flops_per_token": NUMBER,
}


def expect(value, kind, name: str):
    """The value, if it is of this type (or one of these); else TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {json.dumps(value)[:40]}")
    return value


def by_depth(entries: dict, kind) -> dict:
    """JSON's keys are strings; the values are of this type."""
    return {int(depth): expect(entry, kind, f"depth {depth}") for depth, entry in entries.items()}


def check_record(record: dict) -> None:
    """TypeError or KeyError where a training record or evaluation is not one."""
    for name in ("step", "tokens"):
        expect(record[name], int, name)
    for name, value in record.items():
        if name not in ("kind", "loss", "bpb"):
            expect(value, (*NUMBER, type(None)), name)
    if record["kind"] == "train":
        expect(record["loss"], NUMBER, "loss")
    else:
        record["loss"] = by_depth(record["loss"], NUMBER)
        record["bpb"] = by_depth(record["bpb"], NUMBER)


def read_log(path: Path) -> tuple[list[dict], list[dict], list[int]]:
    """-> (training records, evaluations, numbers of damaged lines).

    A resumed run repeats steps: the last record of a step counts.
    """
    found = {"train": {}, "eval": {}}
    damaged = []
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.rstrip("\n").split("\n"), 1):
        try:
            record = json.loads(line)
            if record["kind"] not in found:  # "start", "core"
                continue
            check_record(record)
            found[record["kind"]][record["step"]] = record
        except DAMAGE:
            damaged.append(number)
    train, evals = (sorted(kind.values(), key=itemgetter("step")) for kind in found.values())
    return train, evals, damaged


def read_run(path: Path) -> Run:
    """Everything that a report says of one run; a folder that is no run is refused."""
    config_file = path / "config.json"
    log_file = path / "log.jsonl"
    if not config_file.is_file() or not log_file.is_file():
        fail(f"{path} lacks config.json or log.jsonl; give directories that train.py made")
    config = read_json(config_file)
    with outside(f"{config_file} is not a run's", f"restore it, or leave {path} out"):
        for name, kind in NEEDED.items():
            value = expect(config, dict, "it")
            for part in name.split("."):
                value = expect(value, dict, name.split(".")[0])[part]
            expect(value, kind, name)
    train, evals, damaged = read_log(log_file)
    if not train:
        lines = f" (line {damaged[0]} is damaged)" if damaged else ""
        fail(f"{log_file} has no step{lines}; continue the run with train.py --resume")
    last = evals[-1] if evals else {"step": 0, "loss": {}, "bpb": {}}
    mu_rec = config["model"]["mu_rec"]
    depth = nearest(last["loss"], mu_rec)
    return Run(
        name=path.name,
        path=path,
        config=config,
        train=train,
        evals=evals,
        last=last,
        core=read_scores(path),
        depth=depth,
        loss=last["loss"].get(depth, math.nan),
        unigram=unigram_entropy(path, config["data"]["path"]),
        notes=faults(train, last, damaged),
    )


def read_scores(path: Path) -> dict[CoreRules, dict[int, dict]]:
    """The run's files core_*_*.json, without depths whose evaluation was cut short."""
    core = {}
    for file in sorted(path.glob("core_*_*.json")):
        record = read_json(file)
        with outside(f"{file} is damaged", "restore it, or delete it and make it again"):
            depths = by_depth(record.get("depths", {}), dict)
            whole = {depth: scores for depth, scores in depths.items() if "aggregate" in scores}
            for scores in whole.values():
                check_scores(scores)
            if whole:
                rules = [record.get(name) for name in CoreRules._fields]
                core[CoreRules(*rules)] = whole
    return core


def check_scores(scores: dict) -> None:
    """TypeError or KeyError where the record of a depth is not one."""
    for average in scores.keys() & {"aggregate", "core"}:
        found = expect(scores[average], dict, average)
        expect(found["name"], str, "name")
        for name in ("mean", "std", "tasks_done", "tasks_total"):
            expect(found[name], (*NUMBER, type(None)), name)
    for group in ("categories_fine", "categories_ext"):
        for name, mean in expect(scores.get(group, {}), dict, group).items():
            expect(mean, (*NUMBER, type(None)), name)


def nearest(depths, wanted: int) -> int:
    """Of the depths the one nearest to that wanted; without any, that itself."""
    return min(depths, key=lambda depth: abs(depth - wanted), default=wanted)


def unigram_entropy(path: Path, data: str) -> float | None:
    """From the rows' manifest; `data` may be relative to the folder the run was started from."""
    for folder in [Path("."), *path.resolve().parents]:
        manifest = folder / data / "manifest.json"
        if manifest.is_file():
            found = read_json(manifest)
            with outside(f"{manifest} is damaged", "pack the rows again"):
                return expect(found.get("unigram_entropy"), (*NUMBER, type(None)), "its entropy")
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
