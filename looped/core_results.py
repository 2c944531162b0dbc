"""CORE's records: a task's scores, their averages, the file that holds them, the line on the
screen.

An entry is a task's record at one depth: accuracy and centred accuracy, each with mean, standard
deviation and its value by seed, and counts of what was odd in its examples.
"""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from looped.console import DAMAGE, one_line
from looped.core_prompts import EncodedTask
from looped.core_tasks import LAMBADA, TASKS, TITLES, Panel, Task
from looped.files import file_hash, write_atomic

ODDITIES = {  # what is counted of a task's examples, and how it is said
    "near_ties": "near ties",
    "cropped": "prompts cropped",
    "cut": "answers cut",
    "empty": "empty spans",
    "not_prefix": "prompts no prefix, counted wrong",
}


def centred(accuracy: float, chance: float) -> float:
    """0 where guessing is (chance in %), 1 where all answers are right."""
    chance /= 100
    return (accuracy - chance) / (1 - chance)


def spread(per_seed: dict) -> dict:
    """Mean and population standard deviation over seeds."""
    mean = None
    std = None
    if per_seed:
        values = list(per_seed.values())
        mean = float(np.mean(values))
        std = float(np.std(values))
    return {"mean": mean, "std": std, "per_seed": per_seed}


def accuracy(correct, groups) -> float:
    """The share of right answers: a float32 mean, as in the public evaluators; over several groups
    (the categories of dclm) the plain mean of the groups' means.
    """
    means = []
    for group in range(groups.max() + 1):
        part = correct[groups == group]
        means.append(np.float32(part.sum()) / np.float32(len(part)))
    return float(np.mean(means, dtype=np.float64))


def task_entry(work: EncodedTask, results: dict, baselines: str) -> dict:
    """The record of a task at one depth, from {seed: result}."""
    chance = work.task.chance[baselines]
    accuracies = {}
    over_chance = {}
    perplexities = {}
    for seed, result in results.items():
        share = accuracy(result["correct"], work.groups)
        accuracies[seed] = share
        over_chance[seed] = centred(share, chance)
        nats = torch.tensor(result["nats"].mean())
        perplexities[seed] = nats.exp().item()
    entry = {
        "accuracy": spread(accuracies),
        "centered": spread(over_chance),
        "n": len(work.groups),
    }
    for name in ODDITIES:
        counts = [result[name].sum() for result in results.values()]
        entry[name] = int(sum(counts))
    if work.protocol == "lambada":
        entry["perplexity"] = spread(perplexities)
    return entry


def average(title: str, tasks: list[Task], entries: dict) -> dict:
    """The unweighted mean of the centred scores, seed by seed. If tasks are missing, its name says
    how many there are.
    """
    done = [entries[task.label] for task in tasks if task.label in entries]
    if len(done) < len(tasks):
        title = f"{len(done)} of the {len(tasks)} tasks of {title}"
    by_seed = defaultdict(list)
    for entry in done:
        for seed, score in entry["centered"]["per_seed"].items():
            by_seed[seed].append(score)
    means = {seed: float(np.mean(scores)) for seed, scores in by_seed.items()}
    return {"name": title, **spread(means), "tasks_done": len(done), "tasks_total": len(tasks)}


def averages(name: str, tasks: list[Task], entries: dict) -> dict:
    """{group: mean} of the tasks grouped by their "category" or "family"."""
    groups = defaultdict(list)
    for task in tasks:
        groups[getattr(task, name)].append(task)
    means = {}
    for title, members in groups.items():
        found = average(title, members, entries)
        if found["tasks_done"]:
            means[found["name"]] = found["mean"]
    return means


def summarise(panel: Panel, entries: dict) -> dict:
    """Entries of the tasks at one depth -> the record of that depth."""
    cut = f", at most {panel.limit} examples a task" if panel.limit else ""
    tasks = panel.averaged
    total = average(TITLES[panel.name] + cut, tasks, entries)
    record = {"aggregate": total, "tasks": entries}
    if panel.name == "lambada":
        if LAMBADA.label in entries:
            total |= entries[LAMBADA.label]["perplexity"]
        return record
    if panel.name == "core-extended":
        record["core"] = average("CORE" + cut, TASKS[:22], entries)
        record["categories_ext"] = averages("family", tasks, entries)
    if panel.name != "own":
        record["categories_fine"] = averages("category", TASKS[:22], entries)
    return record


def save(path, header: dict, records: dict) -> None:
    text = json.dumps({**header, "depths": records}, indent=1)
    write_atomic(path, text.encode())


def put_aside(path: Path) -> Path:
    """Copies a file beside itself, under a name that its content gives; -> the copy."""
    old = path.with_name(f"{path.name}.old-{file_hash(path)[:8]}")
    write_atomic(old, path.read_bytes())
    return old


def earlier(path, header: dict):
    """-> {depth: {label: entry}} of an earlier start with the same settings, or {} and why its file
    cannot be used.
    """
    if not path.is_file():
        return {}, ""
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
        settings = [name for name in header if name not in ("date", "command", "missing")]
        differ = [name for name in settings if old[name] != header[name]]
        entries = {int(depth): record["tasks"] for depth, record in old["depths"].items()}
    except DAMAGE as e:
        return {}, f"is damaged ({one_line(e)})"
    if differ:
        return {}, f"was made with another {', '.join(differ)}"
    return entries, ""


def describe(label: str, entry: dict) -> str:
    """The line on the screen for a task."""
    score = "{mean:.4f} ± {std:.4f}".format(**entry["accuracy"])
    over_chance = entry["centered"]["mean"]
    line = f"{label:33} {score}  centred {over_chance:+.4f}  n {entry['n']:5d}  "
    notes = [f"{entry[name]} {text}" for name, text in ODDITIES.items() if entry[name]]
    return line + ", ".join(notes)
