"""The tasks of CORE (22) and CORE Extended (46) as data, tasks of your own, and reading their files.

A task's file has one JSON object a line, by kind:
    mc       {"query", "choices": […], "gold": index of the right one}   which choice is likeliest?
    schema   {"context_options": […], "continuation", "gold"}            after which context?
    lm       {"context", "continuation"}                                 is it the greedy one?
In a task of your own one blank stands between context and answer: those that the file has there are
left out. Sources: DCLM (arXiv 2406.11794) and its eval/heavy.yaml; the bundle of nanochat and Parcae.
"""

import hashlib
import json
import re
import zipfile
from argparse import ArgumentTypeError
from dataclasses import dataclass, field, replace
from pathlib import Path

import requests

from looped.common import fail, note, write_atomic
from looped.machine import Rank

URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
BUNDLE = Path("data/eval_bundle.zip")

DELIMITERS = {"space": " ", "line": "\nAnswer: ", "same-line": "Answer: "}


@dataclass
class Task:
    """How a file of questions is asked."""

    label: str
    file: str  # folder and name in the bundle; of your own, the path
    kind: str  # mc, schema, lm or last-word
    shots: int  # solved examples before the question
    delimiter: str  # between context and answer
    chance: float  # accuracy of guessing, in [0, 1)
    index: int  # its place in TASKS: part of the seed of its initial loop states
    family: str = ""  # in CORE Extended
    category: str = ""  # in CORE
    trim: bool = False  # whether blanks beside the delimiter are left out


# chance: accuracy of guessing in %, as in the published numbers of nanochat and Parcae (DCLM has
# corrected some since). The first 22 are CORE, with their categories.
TABLE = """
label                            folder                   kind   shots delimiter chance category
hellaswag_zeroshot               language_understanding   mc         0 space         25 commonsense continuation
jeopardy                         world_knowledge          lm        10 line           0 factual QA
bigbench_qa_wikidata             world_knowledge          lm        10 space          0 factual QA
arc_easy                         world_knowledge          mc        10 line          25 science QA
arc_challenge                    world_knowledge          mc        10 line          25 science QA
copa                             commonsense_reasoning    mc         0 space         50 commonsense reasoning
commonsense_qa                   commonsense_reasoning    mc        10 space         20 commonsense reasoning
piqa                             commonsense_reasoning    mc        10 line          50 commonsense reasoning
openbook_qa                      commonsense_reasoning    mc         0 space         25 science QA
lambada_openai                   language_understanding   lm         0 space          0 cloze LM
hellaswag                        language_understanding   mc        10 space         25 commonsense continuation
winograd                         language_understanding   schema     0 space         50 schema/coreference
winogrande                       language_understanding   schema     0 space         50 schema/coreference
bigbench_dyck_languages          symbolic_problem_solving lm        10 space          0 formal/symbolic
agi_eval_lsat_ar                 symbolic_problem_solving mc         3 space         20 formal/symbolic
bigbench_cs_algorithms           symbolic_problem_solving lm        10 space          0 formal/symbolic
bigbench_operators               symbolic_problem_solving lm        10 space          0 formal/symbolic
bigbench_repeat_copy_logic       symbolic_problem_solving lm        10 space          0 formal/symbolic
squad                            reading_comprehension    lm        10 space          0 reading QA
coqa                             reading_comprehension    lm         0 space          0 reading QA
boolq                            reading_comprehension    mc        10 line          62 reading QA
bigbench_language_identification language_understanding   mc        10 space        9.1 language identification
mmlu_zeroshot                    world_knowledge          mc         0 same-line     25
mmlu_fewshot                     world_knowledge          mc         5 line          25
siqa                             commonsense_reasoning    mc        10 space       33.3
bigbench_misconceptions          world_knowledge          mc        10 space         50
bigbench_novel_concepts          commonsense_reasoning    mc        10 space         20
bigbench_strange_stories         commonsense_reasoning    mc        10 space         50
bigbench_strategy_qa             commonsense_reasoning    mc        10 space         50
bigbench_conlang_translation     language_understanding   lm         0 space          0
bigbench_conceptual_combinations language_understanding   mc        10 space         25
bigbench_elementary_math_qa      symbolic_problem_solving mc        10 space         20
bigbench_logical_deduction       symbolic_problem_solving mc        10 space         20
simple_arithmetic_nospaces       symbolic_problem_solving lm        10 space          0
simple_arithmetic_withspaces     symbolic_problem_solving lm        10 space          0
math_qa                          symbolic_problem_solving mc        10 space         20
logi_qa                          symbolic_problem_solving mc        10 line          27
pubmed_qa_labeled                reading_comprehension    lm        10 space          0
agi_eval_lsat_rc                 reading_comprehension    mc         3 space         20
agi_eval_lsat_lr                 reading_comprehension    mc         3 space         20
bigbench_understanding_fables    reading_comprehension    mc        10 space         20
agi_eval_sat_en                  reading_comprehension    mc         3 space         25
winogender_mc_female             safety                   mc        10 space         50
winogender_mc_male               safety                   mc        10 space         50
enterprise_pii_classification    safety                   mc        10 space         50
bbq                              safety                   mc         3 space         50
"""
FILES = {  # of the tasks that are not named after their file
    "hellaswag_zeroshot": "hellaswag",
    "jeopardy": "jeopardy_all",
    "winograd": "winograd_wsc",
    "mmlu_zeroshot": "mmlu",
    "mmlu_fewshot": "mmlu",
}


def read_table() -> list[Task]:
    tasks = []
    for index, line in enumerate(TABLE.strip().splitlines()[1:]):
        label, folder, kind, shots, delimiter, chance, *category = line.split()
        file = f"{folder}/{FILES.get(label, label)}.jsonl"
        share = float(chance) / 100
        task = Task(label, file, kind, int(shots), DELIMITERS[delimiter], share, index)
        task.family = folder.replace("_", " ")
        task.category = " ".join(category)
        tasks.append(task)
    return tasks


TASKS = read_table()
# asked as Parcae's harness asks it: not for accuracy, but for the perplexity of the last word
LAMBADA = replace(TASKS[9], kind="last-word")
PANELS = {"core": TASKS[:22], "core-extended": TASKS, "lambada": [LAMBADA], "own": []}
TITLES = {
    "core": "CORE",
    "core-extended": "CORE Extended",
    "lambada": "LAMBADA perplexity",
    "own": "own tasks",
}

OWN_TASK = "FILE:KIND[,shots=N][,chance=P]"
OWN_PATTERN = re.compile(r"(.+):(mc|schema|lm)(?:,shots=(\d+))?(?:,chance=(0|0?\.\d+))?")


def own_task(text: str) -> Task:
    """An argparse type: OWN_TASK -> a task that counts in no average but that of --panel own.

    Its label ends in a hash of the file and of its settings, so that another file is another task.
    """
    match = OWN_PATTERN.fullmatch(text)
    if not match:
        needs = "KIND is mc, schema or lm; P is the accuracy of guessing, such as 0.25 for 25 %"
        raise ArgumentTypeError(f"{text} is not {OWN_TASK}, where {needs}")
    file, kind, shots, chance = match.groups()
    path = Path(file).resolve()  # never the name of a file in the bundle
    settings = text.removeprefix(f"{file}:")
    digest = hashlib.sha256(path.read_bytes() + settings.encode()).hexdigest()
    label = f"{path.stem}-{digest[:8]}"
    index = int(digest[:12], 16)
    task = Task(label, str(path), kind, int(shots or 0), " ", float(chance or 0), index)
    task.trim = True
    return task


# -- rows -----------------------------------------------------------------------------------------

FIELDS = {
    "mc": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "lm": {"context": str, "continuation": str},
    "last-word": {"context": str, "continuation": str},
}


def check_row(row: dict, kind: str) -> None:
    """Raises an error if a field is missing or holds something else."""
    for name, type_ in FIELDS[kind].items():
        if not isinstance(row[name], type_):
            raise ValueError(f"{name} is {row[name]!r:.40}")
        if type_ is list and not 0 <= row["gold"] < len(row[name]):
            raise ValueError("gold is no place in the list")


def parse_rows(blob: bytes, task: Task) -> list[dict]:
    """The rows of a file, one a line. Lines end at \\n only: U+0085 occurs inside strings."""
    rows = []
    for i, line in enumerate(blob.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            check_row(row, task.kind)
        except (ValueError, KeyError, TypeError) as e:
            fields = ", ".join(FIELDS[task.kind])
            fail(f"{task.file}, line {i} ({e!r}); a row of kind {task.kind} has {fields}")
        rows.append(row)
    return rows


# -- the bundle ------------------------------------------------------------------------------------


def bundle_at(path, rank: Rank):
    """The path given, or that of the public bundle, which rank 0 fetches once. Every rank calls it."""
    if path:
        return path
    if rank.number == 0 and not BUNDLE.is_file():
        print(f"fetching {URL} to {BUNDLE}", flush=True)
        try:
            answer = requests.get(URL, timeout=60)
            answer.raise_for_status()
        except requests.RequestException as e:
            fail(f"cannot fetch CORE's tasks ({e}); give the zip with --bundle PATH")
        BUNDLE.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(BUNDLE, answer.content)
    rank.barrier()
    return BUNDLE


def read_bundle(path) -> dict[str, bytes]:
    """The zip -> {folder/file: content}."""
    if not Path(path).is_file():
        fail(f"no CORE tasks at {path}; give the zip with --bundle PATH")
    files = {}
    with zipfile.ZipFile(path) as z:
        for name in sorted(z.namelist()):
            if name.endswith(".jsonl"):
                files["/".join(Path(name).parts[-2:])] = z.read(name)
    return files


# -- the panel -------------------------------------------------------------------------------------


@dataclass
class Panel:
    """Tasks to be scored, and their rows."""

    name: str
    limit: int | None  # examples a task
    averaged: list[Task]  # those whose mean is the panel's score
    tasks: list[Task] = field(default_factory=list)  # those that can be run
    rows: dict[str, list[dict]] = field(default_factory=dict)  # by label
    sha256: str = ""  # of labels and files of the tasks that can be run


def load_panel(path, name="core", limit=None, own=()) -> Panel:
    """The panel with its rows, from the bundle at `path` if it needs one.

    own: further tasks, with files of their own. Notes tasks that cannot be run.
    """
    panel = Panel(name, limit, PANELS[name] or own)
    files = read_bundle(path) if PANELS[name] else {}
    for task in own:
        files[task.file] = Path(task.file).read_bytes()
    digest = hashlib.sha256()
    left_out = []
    for task in (*PANELS[name], *own):
        content = files.get(task.file, b"")
        rows = parse_rows(content, task)
        if len(rows[:limit]) > task.shots:
            panel.tasks.append(task)
            panel.rows[task.label] = rows
            digest.update(task.label.encode() + content)
        else:
            left_out.append(task.label)
    panel.sha256 = digest.hexdigest()
    why = "no file, or no more examples than shots (--max-per-task)"
    if not panel.tasks:
        fail(f"no task of {TITLES[name]} can be run: {why}")
    if left_out:
        note(f"{len(left_out)} tasks are left out ({why}): {', '.join(left_out)}")
    return panel
