"""
The ledger of the studies: results/runs.jsonl, one JSON line for every finished or diverged
training.

Pages and figures are made from these lines alone, and a run whose line is there is not
repeated, so that a study goes on on another machine from what is committed. Of equal runs the
last line counts.
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
from looped.logs import Run, read_run
from looped.run_directory import FREE
from model import ModelConfig

LEDGER = Path("results/runs.jsonl")
CURVE_POINTS = 60
CURVES = ["loss", "state_norm", "residual", "decay_max"]  # of the training log
# Settings that decide nothing (FREE), or that are told by others: the preset by the network and
# the rates, the length in tokens or FLOPs by the steps. The validation set decides the number
# measured.
UNTOLD = (FREE | {"preset", "tokens", "flops", "dtype"}) - {"eval_tokens"}


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
    recipe = train.recipe_of(args.preset)
    steps = train.settle(args, cfg, recipe, ranks)
    model = asdict(cfg)
    given = {name: value for name, value in vars(args).items() if name not in model}
    tokens = steps * args.batch_size * cfg.seq_len
    return settings_of(given, model, steps), tokens * cfg.flops_per_token()


def same_run(line: dict, settings: dict) -> bool:
    """Whether a line was made with these settings; what it lacks had the default of today."""
    known = defaults() | line["settings"]
    return settings.items() <= known.items()


@functools.cache
def defaults() -> dict:
    return asdict(ModelConfig()) | vars(train.parse_args([]))


# -- from a run directory to a line


def steps_of(records: list[dict]) -> pd.DataFrame:
    """The training log as a frame; what a run did not log is NaN."""
    return pd.DataFrame(records).reindex(columns=["step", "tokens", "tok_s", "ms", *CURVES])


def divergence(steps: pd.DataFrame, stopped: bool) -> int | None:
    """The first step of a divergence, or None.

    Diverged: train.py stopped the run (three steps in a row without a finite loss or gradient);
    or its training loss ends above its start, or more than 0.5 nats above its lowest (medians
    of the last twentieth of the steps so far); or the state explodes: ‖h_T‖ becomes 10,000
    times that of step 1.
    """
    exploded = steps.state_norm > 1e4 * steps.state_norm[0]
    bad = list(steps.step[exploded])
    if stopped:
        bad.append(steps.step.iloc[-train.BAD_STEPS])
    else:
        width = max(1, len(steps) // 20)
        medians = steps.loss.rolling(width, min_periods=1).median()
        limit = np.nanmin([medians[0], medians.min() + 0.5])
        last_good = np.flatnonzero(medians <= limit)[-1]
        bad += list(steps.step[last_good + 1 :])
    return int(min(bad)) if bad else None


def plain(value):
    """A number for JSON in six digits; None for what is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def thinned(steps: pd.DataFrame) -> dict[str, list]:
    """The training curve in at most CURVE_POINTS points: means, and the last of their tokens."""
    count = min(CURVE_POINTS, len(steps))
    parts = np.array_split(np.arange(len(steps)), count)
    lasts = [part[-1] for part in parts]
    curve = {"tokens": steps.tokens[lasts].astype(int).tolist()}
    for name in CURVES:
        values = steps[name].to_numpy(float)
        if np.isfinite(values).any():
            curve[name] = [plain(values[part].mean()) for part in parts]
    return curve


def scores(run: Run) -> list[dict]:
    """Averages of the run's core_*.json files, one entry a panel, depth and set of tasks."""
    found = []
    for rules, depths in run.core.items():
        for depth, record in depths.items():
            for average in (record["aggregate"], record.get("core")):
                if average:
                    score = {name: average.get(name) for name in ("name", "mean", "std")}
                    found.append(rules._asdict() | {"depth": depth} | score)
    return found


def evaluation(entry: dict) -> dict:
    """A validation during training: its tokens, its losses by depth, the spectra of the loop."""
    losses = {str(depth): plain(loss) for depth, loss in entry["loss"].items()}
    return {"step": entry["step"], "tokens": entry["tokens"], "loss": losses} | spectra(entry)


def spectra(entry: dict) -> dict:
    names = ("rho", "carry_norm", "write_norm", "readout_norm")
    return {name: plain(entry[name]) for name in names if name in entry}


def record(path: Path) -> dict | None:
    """The line of a finished or diverged run directory; None if the run is still to be done."""
    log = path / "log.jsonl"
    if not log.is_file() or not log.stat().st_size:
        return None
    run = read_run(path)
    tail = [step.get("skipped") for step in run.train[-train.BAD_STEPS :]]
    stopped = len(tail) == train.BAD_STEPS and all(tail)  # for want of finite losses
    if not stopped and not run.last.get("final"):
        return None
    line = identity(run)
    line["date"] = time.strftime("%Y-%m-%d", time.gmtime(log.stat().st_mtime))
    steps = steps_of(run.train)
    line["diverged_at"] = divergence(steps, stopped)
    line["skipped"] = sum(bool(step.get("skipped")) for step in run.train)
    line["loss"] = {} if stopped else run.last["loss"]
    line["bpb"] = {} if stopped else run.last["bpb"]
    line["eval_tokens"] = run.last.get("eval_tokens")
    line["unigram"] = run.unigram
    line["spectra"] = spectra(run.last)
    every = max(1, math.ceil(len(run.evals) / CURVE_POINTS))
    evals = run.evals[::-1][::every][::-1]  # the last one is kept
    line["evals"] = [evaluation(entry) for entry in evals]
    line["core"] = scores(run)
    return line | of_steps(steps)


def identity(run: Run) -> dict:
    """What was trained, and where."""
    config = run.config
    args = config["args"]
    copied = ("command", "params", "flops_per_token", "machine", "device", "dtype", "versions")
    line = {name: config[name] for name in copied}
    line |= {"run": str(run.path), "preset": args["preset"], "seed": args["seed"]}
    line["settings"] = settings_of(args, config["model"], config["steps"])
    line["mu_rec"] = config["model"]["mu_rec"]
    line["tokens"] = run.train[-1]["tokens"]
    line["tokens_per_param"] = plain(line["tokens"] / line["params"])
    line["data"] = config["data"]["sha256"]
    line["tokenizer"] = config["tokenizer"]["sha256"]
    line["commit"] = config["git"]["commit"]
    line["changed"] = bool(config["git"]["diff"])
    return line


def of_steps(steps: pd.DataFrame) -> dict:
    """What the training log says of a run."""
    return {
        "first_loss": plain(steps.loss[0]),
        "last_loss": plain(steps.loss.iloc[-1]),
        "lowest_loss": plain(steps.loss.min()),
        "largest_state_norm": plain(steps.state_norm.max()),
        "tok_s": plain(steps.tok_s.median()),
        "minutes": plain(steps.ms.sum() / 6e4),
        "curve": thinned(steps),
    }


# -- the file


def read_ledger(path: Path) -> list[dict]:
    """All lines; losses by depth have whole numbers as keys. Of lines with equal settings and data
    the last counts.
    """
    found = {}
    if not path.is_file():
        return []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        with outside(f"line {number} of {path} is damaged", "restore or delete it"):
            line = json.loads(text)
            key = json.dumps([line["settings"], line["data"]], sort_keys=True)
            for entry in (line, *line["evals"]):
                entry["loss"] = {int(depth): loss for depth, loss in entry["loss"].items()}
            found.pop(key, None)
            found[key] = line
    return list(found.values())


def append(path: Path, line: dict) -> None:
    """Adds a line; several processes may write to one ledger."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def evaluated(line: dict, depths: list[int]) -> bool:
    """Whether it has losses at these depths; a diverged run needs none."""
    return bool(line["diverged_at"]) or set(depths) <= line["loss"].keys()


def find(lines: list[dict], settings: dict, data: str | None, depths: list[int]) -> dict | None:
    """The line of a run with these settings on these rows, evaluated at these depths."""
    for line in lines:
        if line["data"] == data and evaluated(line, depths) and same_run(line, settings):
            return line
    return None
