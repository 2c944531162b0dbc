"""
The ledger of the studies: one JSON line for every finished or diverged training, in
results/ledger/, a file for each set of rows, named by the beginning of their hash.

Pages and figures are made from these lines alone, and a run whose line is there is not
repeated, so that a study can be continued on another machine from what is committed. Of equal
runs the last line counts.
"""

import fcntl
import functools
import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

import train
from looped.console import outside
from looped.logs import LoggedRun, by_depth, read_log, read_run
from looped.run_directory import CHANGEABLE
from looped.settings import unheeded
from model import ModelConfig

LEDGER = Path("results/ledger")
CURVE_POINTS = 20
LOGGED = ["loss", "state_norm", "residual"]  # of the training log
# Settings that decide nothing (CHANGEABLE), or that others imply: the network and the rates imply
# the preset, the steps the length in tokens or FLOPs. eval_tokens is not one of them: the
# validation set decides the number measured.
UNTOLD = (CHANGEABLE | {"preset", "tokens", "flops", "dtype"}) - {"eval_tokens"}


def settings_of(args: dict, model: dict, steps: int) -> dict:
    """What decides a run's numbers, data apart: settled flags of train.py, the network, the number
    of steps.
    """
    decisive = {name: value for name, value in args.items() if name not in UNTOLD}
    return decisive | model | {"steps": steps}


def wanted_settings(flags: list[str], ranks: int = 1) -> tuple[dict, float]:
    """-> the settings of the run that train.py would make of these flags, and its FLOPs.

    Flags that train.py refuses end the program.
    """
    args = train.parse_args(flags)
    cfg = train.model_config(args)
    steps = train.settle(args, cfg, train.recipe_of(args.preset), ranks)
    tokens = steps * args.batch_size * cfg.seq_len
    return settings_of(vars(args), asdict(cfg), steps), tokens * cfg.flops_per_token()


@functools.cache
def defaults() -> dict:
    return vars(train.parse_args([])) | asdict(ModelConfig())


def identity(settings: dict) -> frozenset:
    """What equal runs share: settings, which had the default of today where a line lacks them; of
    a Transformer none that only a loop heeds.
    """
    known = defaults() | settings
    idle = unheeded(known["n_core"])
    return frozenset((name, value) for name, value in known.items() if name not in idle)


# -- from a run directory to a line


def steps_of(records: list[dict]) -> pd.DataFrame:
    """The training log as a frame; what a run did not log is NaN."""
    steps = pd.DataFrame(records, columns=["step", "tokens", "tok_s", "ms", "skipped", *LOGGED])
    return steps.astype(float)


def divergence(steps: pd.DataFrame, stopped: bool) -> int | None:
    """The first step of a divergence, or None.

    Diverged: train.py stopped the run (three steps in a row without a finite loss or gradient);
    or its training loss ends above its start, or more than 0.5 nats above its lowest (medians
    of the last twentieth of the steps so far); or the state explodes: ‖h_T‖ becomes 10,000
    times that of step 1, or of 1, if it was below (the raw loop may begin at 0).
    """
    bad = steps.state_norm > 1e4 * max(steps.state_norm[0], 1.0)
    if stopped:
        bad.iloc[-train.BAD_STEPS] = True
    else:
        width = max(1, len(steps) // 20)
        medians = steps.loss.rolling(width, min_periods=1).median()
        limit = np.nanmin([medians[0], medians.min() + 0.5])
        last_good = medians.index[medians <= limit][-1]
        bad[last_good + 1 :] = True
    return int(steps.step[bad].min()) if bad.any() else None


def six_digits(value):
    """A number for JSON in six digits; None for what is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def training_curve(steps: pd.DataFrame) -> dict[str, list]:
    """The training curve in at most CURVE_POINTS points: means, and the last of their tokens."""
    points = steps.groupby(steps.index * CURVE_POINTS // len(steps))
    means = points[LOGGED].mean(skipna=False).dropna(axis="columns", how="all")
    values = {name: list(map(six_digits, column)) for name, column in means.items()}
    return {"tokens": points.tokens.last().astype(int).tolist()} | values


def scores(run: LoggedRun) -> list[dict]:
    """Averages of the run's core_*.json files over all their tasks, one entry a panel, depth and
    set of tasks.
    """
    found = []
    for rules, depths in run.core.items():
        for depth, record in depths.items():
            for average in (record["aggregate"], record.get("core")):
                if average and average["tasks_done"] == average["tasks_total"]:
                    score = {name: average.get(name) for name in ("name", "mean", "std")}
                    found.append(rules._asdict() | {"depth": depth} | score)
    return found


def evaluation(entry: dict) -> dict:
    """A validation during training: its tokens, its losses by depth, the spectral radius."""
    losses = {depth: six_digits(loss) for depth, loss in entry["loss"].items()}
    return {"tokens": entry["tokens"], "loss": losses, "rho": six_digits(entry.get("rho"))}


def record(path: Path) -> dict | None:
    """The line of a finished or diverged run directory; None if the run is still to be done."""
    log = path / "log.jsonl"
    if not log.is_file() or not read_log(log).train:
        return None
    run = read_run(path)
    steps = steps_of(run.train)
    stopped = steps.skipped[-train.BAD_STEPS :].sum() == train.BAD_STEPS  # no finite losses
    if not stopped and not run.last.get("final"):
        return None
    every = math.ceil(len(run.evals) / CURVE_POINTS) or 1
    evals = run.evals[::-1][::every][::-1]  # the last one is kept
    outcome = {
        "date": time.strftime("%Y-%m-%d", time.gmtime(log.stat().st_mtime)),
        "diverged_at": divergence(steps, stopped),
        "loss": {} if stopped else run.last["loss"],
        "eval_tokens": run.last.get("eval_tokens"),
        "unigram": run.unigram,
        "spectra": {"rho": six_digits(run.last.get("rho"))},
        "evals": [evaluation(entry) for entry in evals],
        "core": scores(run),
    }
    with outside(f"{path}/config.json is not a whole run's", f"restore it, or leave {path} out"):
        return origin(run) | outcome | of_steps(steps)


def origin(run: LoggedRun) -> dict:
    """What was trained, and where."""
    config = run.config
    args = config["args"]
    copied = ("command", "params", "flops_per_token", "machine", "dtype", "versions")
    told = {
        "run": str(run.path),
        "seed": args["seed"],
        "settings": settings_of(args, config["model"], config["steps"]),
        "mu_rec": config["model"]["mu_rec"],
        "data": config["data"]["sha256"],
        "commit": config["git"]["commit"],
        "changed": bool(config["git"]["diff"]),
        "tokens_per_param": six_digits(run.train[-1]["tokens"] / config["params"]),
    }
    return {name: config[name] for name in copied} | told


def of_steps(steps: pd.DataFrame) -> dict:
    """What the training log says of a run."""
    numbers = {
        "first_loss": steps.loss[0],
        "last_loss": steps.loss.iloc[-1],
        "lowest_loss": steps.loss.min(),
        "largest_state_norm": steps.state_norm.max(),
        "tok_s": steps.tok_s.median(),
        "minutes": steps.ms.sum() / 6e4,
    }
    told = {name: six_digits(value) for name, value in numbers.items()}
    counts = {"tokens": int(steps.tokens.iloc[-1]), "skipped": int(steps.skipped.sum())}
    return counts | told | {"curve": training_curve(steps)}


# -- the file


def read_ledger() -> dict[tuple, dict]:
    """{(identity, rows, dtype): line}; losses by depth have whole numbers as keys."""
    found = {}
    for file in sorted(LEDGER.glob("*.jsonl")):
        for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            with outside(f"line {number} of {file} is damaged", "restore or delete it"):
                line = json.loads(text)
                line["loss"] = by_depth(line["loss"])
                found[identity(line["settings"]), line["data"], line["dtype"]] = line
    return found


def append(line: dict) -> None:
    """Adds a line; several processes may write to one ledger."""
    LEDGER.mkdir(parents=True, exist_ok=True)
    with open(LEDGER / f"{line['data'][:10]}.jsonl", "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line, ensure_ascii=False) + "\n")
