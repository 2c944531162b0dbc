"""
The ledger of the studies: one JSON line for every finished or diverged training, in
results/ledger/, a file for each set of rows, named by the beginning of their hash.

Pages and figures are made from these lines alone, and a run whose line is there is not repeated,
so that a study can be continued on another machine from what is committed. Runs of edited code or
with flags after `--` are not entered.
"""

import functools
import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

import train
from looped.common import finite
from looped.run import MAY_CHANGE, by_depth
from model import ModelConfig
from tools import runner
from tools.report import LoggedRun, core_averages, read_run

LEDGER = Path("results/ledger")
CURVE_POINTS = 20
LOGGED = ["loss", "state_norm", "residual"]  # of the training log
# Settings that decide nothing, or that others imply: the network and the rates imply the preset,
# the steps the length. The validation set decides the number measured.
UNTOLD = MAY_CHANGE | {"preset", "tokens", "flops", "dtype", "log_every", "loss_chunk"}
UNTOLD -= {"eval_tokens"}


def settings_of(args: dict, model: dict, steps: int) -> dict:
    """What decides a run's numbers, data apart: settled flags of train.py, network, steps."""
    decisive = {name: value for name, value in args.items() if name not in UNTOLD}
    return decisive | model | {"steps": steps}


@functools.cache
def defaults() -> dict:
    return vars(train.parse_args([])) | asdict(ModelConfig())


def identity(settings: dict) -> frozenset:
    """What equal runs share: settings, which had the default of today where a line lacks them; of
    a Transformer none that only a loop heeds, with AdamW alone none that only Muon heeds.
    """
    known = defaults() | settings
    idle = set(UNTOLD)
    if not known["n_core"]:
        idle.update(train.LOOP_FLAGS)
    if known["optimizer"] == "adamw":
        idle.update(train.MUON_FLAGS)
    for name in idle:
        known.pop(name, None)
    return frozenset(known.items())


# -- from a run directory to a line


def steps_of(records: list[dict]) -> pd.DataFrame:
    """The training log as a frame; what a run did not log is NaN."""
    return pd.DataFrame(records, columns=["step", "tokens", "tok_s", "ms", *LOGGED], dtype=float)


def divergence(steps: pd.DataFrame, stopped: bool) -> int | None:
    """The first step of a divergence, or None.

    Diverged: train.py stopped the run (three steps in a row without a finite loss or gradient);
    or its training loss ends above its start, or more than 0.5 nats above its lowest (medians
    of the last twentieth of the steps so far); or the state explodes: ‖h_T‖ becomes 10,000
    times that of step 1, or of 1, if it was below (the raw loop may begin at 0).
    """
    norm = steps.state_norm
    bad = norm > 1e4 * max(norm[0], 1.0)
    if stopped:
        bad.iloc[-train.BAD_STEPS :] = True
    else:
        width = max(1, len(steps) // 20)
        medians = steps.loss.rolling(width, min_periods=1).median()
        limit = np.nanmin([medians[0], medians.min() + 0.5])
        last_good = medians.index[medians <= limit][-1]
        bad[last_good + 1 :] = True
    if not bad.any():
        return None
    return int(steps.step[bad].min())


def training_curve(steps: pd.DataFrame) -> dict[str, list]:
    """The training curve in at most CURVE_POINTS points: means, and the last of their tokens."""
    point = steps.index * CURVE_POINTS // len(steps)
    points = steps.groupby(point)
    means = points[LOGGED].mean(skipna=False).dropna(axis="columns", how="all")
    tokens = points.tokens.last().astype(int)
    return {"tokens": tokens.tolist()} | means.to_dict("list")


def scores(run: LoggedRun) -> list[dict]:
    """Averages of the run's core_*.json files, one entry a file, depth and set of tasks."""
    found = []
    for record in run.core.values():
        rules = {name: record[name] for name in ("panel", "protocol", "baselines", "max_per_task")}
        for average in core_averages(record):
            scored = "{tasks_done} of the {tasks_total}".format(**average)
            told = {name: average[name] for name in ("depth", "name", "mean")}
            found.append(rules | told | {"scored": scored})
    return found


def evaluations(evals: list[dict]) -> list[dict]:
    """At most CURVE_POINTS of them, the last among these."""
    every = math.ceil(len(evals) / CURVE_POINTS) or 1
    kept = []
    for one in evals[::-every]:
        kept.append({name: one.get(name) for name in ("tokens", "loss", "rho")})
    return kept[::-1]


def record(path: Path) -> dict | None:
    """The line of a finished or diverged run directory; None if the run is still to be done."""
    if not runner.is_over(path):
        return None
    run = read_run(path)
    config = run.config
    args = config["args"]
    network = config["model"]
    git = config["git"]
    steps = steps_of(run.train)
    stopped = not run.last.get("final")  # for want of finite losses
    written = time.gmtime((path / "log.jsonl").stat().st_mtime)
    copied = ("command", "params", "flops_per_token", "machine", "dtype", "versions")
    line = {name: config[name] for name in copied}
    line["run"] = str(path)
    line["seed"] = args["seed"]
    line["settings"] = settings_of(args, network, config["steps"])
    line["mu_rec"] = network["mu_rec"]
    line["data"] = config["data"]["sha256"]
    line["commit"] = git["commit"]
    line["changed"] = bool(git["diff"])
    line["date"] = time.strftime("%Y-%m-%d", written)
    line["diverged_at"] = divergence(steps, stopped)
    line["loss"] = {} if stopped else run.last["loss"]
    line["eval_tokens"] = run.last.get("eval_tokens")
    line["unigram"] = run.unigram
    line["tokens"] = int(steps.tokens.max())
    line["tokens_per_param"] = line["tokens"] / config["params"]
    line["last_loss"] = steps.loss.iloc[-1]
    line["largest_state_norm"] = steps.state_norm.max()
    line["tok_s"] = steps.tok_s.median()
    line["minutes"] = steps.ms.sum() / 6e4
    line["curve"] = training_curve(steps)
    line["evals"] = evaluations(run.evals)
    line["spectra"] = {"rho": run.last.get("rho")}
    line["core"] = scores(run)
    return finite(line)


# -- the files


def read_ledger() -> list[dict]:
    """The lines; of equal runs (settings, rows, dtype) the last in the place of the first."""
    found = {}
    for file in sorted(LEDGER.glob("*.jsonl")):
        for text in file.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            line["loss"] = by_depth(line["loss"])
            key = identity(line["settings"]), line["data"], line["dtype"]
            found[key] = line
    return list(found.values())


def append(line: dict) -> None:
    LEDGER.mkdir(parents=True, exist_ok=True)
    with open(LEDGER / f"{line['data'][:10]}.jsonl", "a", encoding="utf-8") as ledger:
        ledger.write(json.dumps(line, ensure_ascii=False) + "\n")
