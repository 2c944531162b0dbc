"""CORE's records: a task's scores, their averages, the file that holds them, the line on the
screen.

An entry is a task's record at one depth: accuracy and centred accuracy, each with mean, standard
deviation and its value by seed, and counts of what was odd in its examples.
"""

import itertools
import json
from pathlib import Path

import numpy as np

from looped.console import fail, outside
from looped.core_prompts import EncodedTask
from looped.core_tasks import LAMBADA, TASKS, TITLES, Panel, Task
from looped.files import file_hash, turn, write_atomic

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
    right = np.bincount(groups, correct).astype(np.float32)
    asked = np.bincount(groups).astype(np.float32)
    means = right / asked
    return float(np.mean(means, dtype=np.float64))


def task_entry(work: EncodedTask, results: dict, baselines: str) -> dict:
    """The record of a task at one depth, from {seed: result}."""
    chance = work.task.chance[baselines]
    accuracies = {}
    over_chance = {}
    for seed, result in results.items():
        share = accuracy(result["correct"], work.groups)
        accuracies[seed] = share
        over_chance[seed] = centred(share, chance)
    entry = {"accuracy": spread(accuracies), "centered": spread(over_chance)}
    entry["n"] = len(work.groups)
    for name in ODDITIES:
        counts = [result[name].sum() for result in results.values()]
        entry[name] = int(sum(counts))
    if work.protocol == "lambada":
        perplexities = {}
        for seed, result in results.items():
            with np.errstate(over="ignore"):  # of a diverged model: infinite
                perplexities[seed] = float(np.exp(result["nats"].mean()))
        entry["perplexity"] = spread(perplexities)
    return entry


def average(title: str, tasks: list[Task], entries: dict) -> dict:
    """The unweighted mean of the centred scores, seed by seed. If tasks are missing, its name says
    how many there are.
    """
    labels = [task.label for task in tasks if task.label in entries]
    done = [entries[label]["centered"]["per_seed"] for label in labels]
    if len(done) < len(tasks):
        title = f"{len(done)} of the {len(tasks)} tasks of {title}"
    means = {}
    for seed in dict.fromkeys(itertools.chain(*done)):
        scores = [per_seed[seed] for per_seed in done]
        means[seed] = float(np.mean(scores))
    return {"name": title, **spread(means), "tasks_done": len(done), "tasks_total": len(tasks)}


def averages(name: str, tasks: list[Task], entries: dict) -> dict:
    """{group: mean} of the tasks grouped by their "category" or "family"."""
    means = {}
    for title in dict.fromkeys(getattr(task, name) for task in tasks):
        members = [task for task in tasks if getattr(task, name) == title]
        found = average(title, members, entries)
        if found["tasks_done"]:
            means[found["name"]] = found["mean"]
    return means


def summarise(panel: Panel, entries: dict) -> dict:
    """Entries of the tasks at one depth -> the record of that depth."""
    cut = f", at most {panel.limit} examples a task" if panel.limit else ""
    total = average(TITLES[panel.name] + cut, panel.averaged, entries)
    record = {"aggregate": total, "tasks": entries}
    if panel.name == "lambada" and entries:
        total |= entries[LAMBADA.label]["perplexity"]
    if panel.name == "core-extended":
        record["core"] = average("CORE" + cut, TASKS[:22], entries)
        record["categories_ext"] = averages("family", TASKS, entries)
    if panel.name.startswith("core"):
        record["categories_fine"] = averages("category", TASKS[:22], entries)
    return record


def read_entries(path: Path, header: dict) -> tuple[dict, list[str]]:
    """-> {depth: {label: entry}} that a file of results holds, and in which settings it differs."""
    if not path.is_file():
        return {}, []
    with outside(f"{path} is damaged", "delete it"):
        old = json.loads(path.read_text(encoding="utf-8"))
        entries = {int(depth): record["tasks"] for depth, record in old["depths"].items()}
    settings = header.keys() - {"date", "command", "missing"}
    return entries, sorted(name for name in settings if old.get(name) != header[name])


def earlier(path: Path, header: dict) -> dict:
    """{depth: {label: entry}} that a file of results holds. If it is from other settings, it gets
    another name.
    """
    with turn(path):
        entries, differ = read_entries(path, header)
        if not differ:
            return entries
        aside = path.with_name(f"{path.name}.old-{file_hash(path)[:8]}")
        path.rename(aside)
    print(f"{path} was made with another {', '.join(differ)}; it is kept as {aside.name}")
    return {}


def merge(path: Path, header: dict, panel: Panel, own: dict) -> dict:
    """Adds {depth: {label: entry}}, all that this evaluation has, to a file of results, to which
    another may add meanwhile -> {depth: record}. Ends the program if another evaluation, with
    other settings, now writes that file.
    """
    with turn(path):
        entries, differ = read_entries(path, header)
        if differ:
            fail(
                f"another evaluation, with another {', '.join(differ)}, now writes {path}; begin this "
                "one again when that has ended"
            )
        for depth, tasks in own.items():
            entries[depth] = entries.get(depth, {}) | tasks
        records = {depth: summarise(panel, entries[depth]) for depth in sorted(entries)}
        save(path, header, records)
    return records


def save(path: Path, header: dict, records: dict) -> None:
    text = json.dumps({**header, "depths": records}, indent=1)
    write_atomic(path, text.encode())


def describe(label: str, entry: dict) -> str:
    """The line on the screen for a task."""
    score = "{mean:.4f} ± {std:.4f}".format(**entry["accuracy"])
    over_chance = entry["centered"]["mean"]
    notes = [f"{entry[name]} {text}" for name, text in ODDITIES.items() if entry[name]]
    numbers = f"centred {over_chance:+.4f}  n {entry['n']:5d}"
    return f"{label:33} {score}  {numbers}  {', '.join(notes)}"
