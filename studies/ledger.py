"""The ledger of the studies: one JSON line for every finished or diverged training, in results/ledger/, a
file for each set of rows, named by the beginning of their hash.

A line is a run with its curves thinned out. "pages" says where it stands: {"page", "group", "label"} of each
page that shows it. Pages and figures are made from these lines alone.
"""

import functools
import json
from pathlib import Path

import pandas as pd

from looped.common import finite
from looped.run import IMPLIED, by_depth
from tools.arms import Arm, Run

LEDGER = Path("results/ledger")
CURVE_POINTS = 20
CONFIG = [
    "params", "flops", "flops_per_token", "steps", "dtype", "code", "commit", "branch", "edited",
    "date", "machine", "versions", "model",
]  # fmt: skip
TRAINING = ["tokens", "loss", "state_norm", "residual", "tok_s", "ms", "mem_gb"]


def thinned(records: list[dict]) -> dict:
    """The training records in at most CURVE_POINTS points, {name: values}: means, the last of their tokens,
    and the sum of their times.
    """
    steps = pd.DataFrame(records, columns=TRAINING, dtype=float)
    points = steps.groupby(steps.index * CURVE_POINTS // len(steps))
    means = points.agg(functools.partial(pd.Series.mean, skipna=False))
    means["tokens"] = points.tokens.last().astype(int)
    means["ms"] = points.ms.sum()
    return means.to_dict("list")


def append(page: str, arm: Arm, run: Run) -> None:
    """Enters a run of an arm of a page."""
    LEDGER.mkdir(parents=True, exist_ok=True)
    place = {"page": page, "group": arm.group, "label": arm.label}
    config = {name: run.config[name] for name in CONFIG}
    config["args"] = {name: x for name, x in run.config["args"].items() if name not in IMPLIED}
    config["data"] = {name: run.config["data"][name] for name in ("sha256", "rows")}
    line = {"pages": [place], "seed": run.seed, "name": run.name, "config": config}
    line |= {"train": thinned(run.train), "evals": run.evals, "core": run.core}
    line |= {"diverged_at": run.diverged_at}
    file = LEDGER / f"{run.config['data']['sha256'][:10]}.jsonl"
    with open(file, "a", encoding="utf-8") as ledger:
        ledger.write(json.dumps(finite(line), ensure_ascii=False, separators=(",", ":")) + "\n")


@functools.cache
def lines() -> list[dict]:
    found = []
    for file in sorted(LEDGER.glob("*.jsonl")):
        for text in file.read_text(encoding="utf-8").splitlines():
            found.append(json.loads(text))
    return found


def run_of(line: dict) -> Run:
    train = pd.DataFrame(line["train"], dtype=float).to_dict("records")
    evals = [one | {"loss": by_depth(one["loss"])} for one in line["evals"]]
    return Run(line["name"], line["config"], train, evals, line["core"], line["diverged_at"])


def fill(page: str, arms: list[Arm]) -> list[str]:
    """Gives the arms of a page their runs, by seed; of two lines for one seed the later counts -> what the
    page says of lines that it leaves out.

    They show losses of one yardstick: the one that most of their lines were measured with.
    """
    by_arm = {(arm.group, arm.label): {} for arm in arms}
    for line in lines():
        for place in line["pages"]:
            key = (place["group"], place["label"])
            if place["page"] == page and key in by_arm:
                by_arm[key][line["seed"]] = run_of(line)
    runs = [run for seeds in by_arm.values() for run in seeds.values()]
    yardsticks = [json.dumps(run.yardstick, sort_keys=True) for run in runs]
    usual = max(yardsticks, key=yardsticks.count, default="")
    for arm in arms:
        mine = by_arm[arm.group, arm.label]
        for seed in sorted(mine):
            if json.dumps(mine[seed].yardstick, sort_keys=True) == usual:
                arm.runs.append(mine[seed])
    others = len(yardsticks) - yardsticks.count(usual)
    if not others:
        return []
    return [f"{others} runs of the ledger are left out: they were validated on other rows.", ""]
