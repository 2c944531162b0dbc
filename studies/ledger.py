"""
The ledger of the studies: one JSON line for every finished or diverged training, in
results/ledger/, a file for each set of rows, named by the beginning of their hash.

A line is a run with its curves thinned out. Pages and figures are made from these lines alone, and
a run whose line is there is not repeated, so that a study can be continued on another machine from
what is committed. Runs of edited code or with flags after `--` are not entered.
"""

import functools
import json
import time
from dataclasses import asdict
from pathlib import Path

import pandas as pd

import train
from looped.common import finite
from looped.run import MAY_CHANGE, by_depth
from model import ModelConfig
from tools import runner
from tools.arms import Run, read_run

LEDGER = Path("results/ledger")
CURVE_POINTS = 20
TRAINING = ["tokens", "loss", "state_norm", "residual", "tok_s", "ms", "mem_gb"]
VALIDATION = ["tokens", "loss", "rho", "eval_tokens", "final"]
ABOUT = ["params", "flops_per_token", "data", "dtype", "versions", "machine", "steps"]
# Settings that decide nothing, or that others imply: the network and the rates imply the preset,
# the steps the length. The validation set decides the number measured.
UNTOLD = MAY_CHANGE | {"preset", "tokens", "flops", "dtype"}
UNTOLD -= {"eval_tokens"}


@functools.cache
def defaults() -> dict:
    return vars(train.parse_args([])) | asdict(ModelConfig())


def identity(flags: dict) -> frozenset:
    """What equal runs of a length share: settings, which had the default of today where a line lacks
    them; of a Transformer none that only a loop heeds, with AdamW alone none that only Muon heeds.
    """
    known = defaults() | flags
    idle = set(UNTOLD)
    if not known["n_core"]:
        idle.update(train.LOOP_FLAGS)
    if known["optimizer"] == "adamw":
        idle.update(train.MUON_FLAGS)
    for name in idle:
        known.pop(name, None)
    return frozenset(known.items())


def thinned(records: list[dict]) -> list[dict]:
    """The training records in at most CURVE_POINTS points: means, the last of their tokens, and the
    sum of their times.
    """
    steps = pd.DataFrame(records, columns=TRAINING, dtype=float)
    points = steps.groupby(steps.index * CURVE_POINTS // len(steps))
    means = points.agg(functools.partial(pd.Series.mean, skipna=False))
    means["tokens"] = points.tokens.last().astype(int)
    means["ms"] = points.ms.sum()
    return means.to_dict("records")


def some(evals: list[dict]) -> list[dict]:
    """At most CURVE_POINTS of them, the last among these."""
    every = -(-len(evals) // CURVE_POINTS) or 1
    kept = [{name: one.get(name) for name in VALIDATION} for one in evals[::-every]]
    return kept[::-1]


def record(folder: Path) -> Run | None:
    """A finished or diverged run, as the ledger has it; None if it is still to be done."""
    if not runner.is_over(folder):
        return None
    run = read_run(folder, str(folder))
    config = {name: run.config[name] for name in ABOUT}
    decisive = {name: x for name, x in run.config["args"].items() if name not in UNTOLD}
    written = time.gmtime((folder / "log.jsonl").stat().st_mtime)
    config |= {"args": decisive, "model": run.config["model"]}
    config["commit"] = run.config["git"]["commit"]
    config["date"] = time.strftime("%Y-%m-%d", written)
    return Run(run.name, config, thinned(run.train), some(run.evals), run.core, run.diverged_at)


# -- the files


def read_ledger() -> list[Run]:
    """Of equal runs (settings, length, rows, dtype) the last in the place of the first."""
    found = {}
    for file in sorted(LEDGER.glob("*.jsonl")):
        for text in file.read_text(encoding="utf-8").splitlines():
            run = Run(**json.loads(text))
            run.train = pd.DataFrame(run.train, dtype=float).to_dict("records")
            for one in run.evals:
                one["loss"] = by_depth(one["loss"])
            config = run.config
            key = identity(run.flags), config["steps"], config["data"]["sha256"], config["dtype"]
            found[key] = run
    return list(found.values())


def append(run: Run) -> None:
    LEDGER.mkdir(parents=True, exist_ok=True)
    name = run.config["data"]["sha256"][:10]
    line = asdict(run) | {"train": pd.DataFrame(run.train).to_dict("list")}
    with open(LEDGER / f"{name}.jsonl", "a", encoding="utf-8") as ledger:
        ledger.write(json.dumps(finite(line), ensure_ascii=False) + "\n")
