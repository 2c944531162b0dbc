"""The tasks of CORE (22) and CORE Extended (46) as data, one's own tasks, and reading their files.

A task's file has one JSON object a line, by kind:
    mc       {"query", "choices": […], "gold": place of the right one}   which choice is likeliest?
    schema   {"context_options": […], "continuation", "gold"}            after which context?
    lm       {"context", "continuation"}                                 is it the greedy one?
Sources: DCLM (arXiv 2406.11794) and its eval/heavy.yaml; nanochat's and Parcae's evaluation bundle.
"""

import hashlib
import json
import time
import zipfile
from argparse import ArgumentTypeError
from dataclasses import dataclass, field
from pathlib import Path

import requests

from looped.common import fail, write_atomic

URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
BUNDLE = Path("data/eval_bundle.zip")

DELIMITERS = {"space": " ", "line": "\nAnswer: ", "same-line": "Answer: "}


@dataclass
class Task:
    """How a file of questions is asked."""

    label: str
    file: str  # in the bundle, or anywhere for one's own
    kind: str  # mc, schema or lm
    shots: int  # solved examples before the question
    delimiter: str  # between question and answer
    chance: dict[str, float]  # accuracy of guessing in %, by version of the baselines
    index: int  # its place in TASKS: part of the seed of its initial loop states
    family: str = ""  # in CORE Extended
    category: str = ""  # in CORE
    by_category: bool = False  # in dclm, shots and averages are within a row's "category"


# v1, v2: accuracy of guessing in %, as in the published numbers of nanochat and Parcae, and as DCLM
# corrected it in 2025-09. The first 22 are CORE, with their categories.
TABLE = """
label                            folder                   kind   shots delimiter   v1   v2 category
hellaswag_zeroshot               language_understanding   mc         0 space       25   25 commonsense continuation
jeopardy                         world_knowledge          lm        10 line         0    0 factual QA
bigbench_qa_wikidata             world_knowledge          lm        10 space        0    0 factual QA
arc_easy                         world_knowledge          mc        10 line        25   25 science QA
arc_challenge                    world_knowledge          mc        10 line        25   25 science QA
copa                             commonsense_reasoning    mc         0 space       50   50 commonsense reasoning
commonsense_qa                   commonsense_reasoning    mc        10 space       20 40.3 commonsense reasoning
piqa                             commonsense_reasoning    mc        10 line        50   50 commonsense reasoning
openbook_qa                      commonsense_reasoning    mc         0 space       25   25 science QA
lambada_openai                   language_understanding   lm         0 space        0    0 cloze LM
hellaswag                        language_understanding   mc        10 space       25   25 commonsense continuation
winograd                         language_understanding   schema     0 space       50   50 schema/coreference
winogrande                       language_understanding   schema     0 space       50   50 schema/coreference
bigbench_dyck_languages          symbolic_problem_solving lm        10 space        0    0 formal/symbolic
agi_eval_lsat_ar                 symbolic_problem_solving mc         3 space       20   25 formal/symbolic
bigbench_cs_algorithms           symbolic_problem_solving lm        10 space        0    0 formal/symbolic
bigbench_operators               symbolic_problem_solving lm        10 space        0    0 formal/symbolic
bigbench_repeat_copy_logic       symbolic_problem_solving lm        10 space        0    0 formal/symbolic
squad                            reading_comprehension    lm        10 space        0    0 reading QA
coqa                             reading_comprehension    lm         0 space        0    0 reading QA
boolq                            reading_comprehension    mc        10 line        62   62 reading QA
bigbench_language_identification language_understanding   mc        10 space      9.1   25 language identification
mmlu_zeroshot                    world_knowledge          mc         0 same-line   25   25
mmlu_fewshot                     world_knowledge          mc         5 line        25   25
siqa                             commonsense_reasoning    mc        10 space     33.3   50
bigbench_misconceptions          world_knowledge          mc        10 space       50   50
bigbench_novel_concepts          commonsense_reasoning    mc        10 space       20   25
bigbench_strange_stories         commonsense_reasoning    mc        10 space       50   50
bigbench_strategy_qa             commonsense_reasoning    mc        10 space       50   50
bigbench_conlang_translation     language_understanding   lm         0 space        0    0
bigbench_conceptual_combinations language_understanding   mc        10 space       25   33
bigbench_elementary_math_qa      symbolic_problem_solving mc        10 space       20   25
bigbench_logical_deduction       symbolic_problem_solving mc        10 space       20   25
simple_arithmetic_nospaces       symbolic_problem_solving lm        10 space        0    0
simple_arithmetic_withspaces     symbolic_problem_solving lm        10 space        0    0
math_qa                          symbolic_problem_solving mc        10 space       20   20
logi_qa                          symbolic_problem_solving mc        10 line        27   25
pubmed_qa_labeled                reading_comprehension    lm        10 space        0    0
agi_eval_lsat_rc                 reading_comprehension    mc         3 space       20   25
agi_eval_lsat_lr                 reading_comprehension    mc         3 space       20   25
bigbench_understanding_fables    reading_comprehension    mc        10 space       20   25
agi_eval_sat_en                  reading_comprehension    mc         3 space       25   25
winogender_mc_female             safety                   mc        10 space       50   50
winogender_mc_male               safety                   mc        10 space       50   50
enterprise_pii_classification    safety                   mc        10 space       50   50
bbq                              safety                   mc         3 space       50   50
"""
FILES = {  # of the tasks that are not named after their file
    "hellaswag_zeroshot": "hellaswag",
    "jeopardy": "jeopardy_all",
    "winograd": "winograd_wsc",
    "mmlu_zeroshot": "mmlu",
    "mmlu_fewshot": "mmlu",
}
BY_CATEGORY = {"jeopardy", "mmlu_zeroshot", "mmlu_fewshot", "bbq"}


def read_table() -> list[Task]:
    tasks = []
    for index, line in enumerate(TABLE.strip().splitlines()[1:]):
        label, folder, kind, shots, delimiter, v1, v2, *category = line.split()
        file = f"{folder}/{FILES.get(label, label)}.jsonl"
        chance = {"v1": float(v1), "v2": float(v2)}
        task = Task(label, file, kind, int(shots), DELIMITERS[delimiter], chance, index)
        task.family = folder.replace("_", " ")
        task.category = " ".join(category)
        task.by_category = label in BY_CATEGORY
        tasks.append(task)
    return tasks


TASKS = read_table()
LAMBADA = TASKS[9]
PANELS = {"core": TASKS[:22], "core-extended": TASKS, "lambada": [LAMBADA], "own": []}
TITLES = {
    "core": "CORE",
    "core-extended": "CORE Extended",
    "lambada": "LAMBADA perplexity",
    "own": "own tasks",
}

OWN_TASK = "FILE:KIND[,shots=N][,chance=PERCENT]"


def own_task(text: str) -> Task:
    """An argparse type: OWN_TASK -> a task in no average.

    Its label ends in a hash of the file and of its settings, so that another file is another task.
    """
    file, _, settings = text.rpartition(":")
    kind, *given = settings.split(",")
    options = {"shots": "0", "chance": "0"} | dict(part.split("=") for part in given)
    if kind not in FIELDS or len(options) > 2:
        raise ArgumentTypeError(f"{text} is not {OWN_TASK}; KIND: {', '.join(FIELDS)}")
    path = Path(file).resolve()  # never the name of a file in the bundle
    digest = hashlib.sha256(path.read_bytes() + settings.encode()).hexdigest()
    label = f"{path.stem}-{digest[:8]}"
    chances = dict.fromkeys(("v1", "v2"), float(options["chance"]))
    return Task(label, str(path), kind, int(options["shots"]), " ", chances, int(digest[:12], 16))


# -- rows -----------------------------------------------------------------------------------------

FIELDS = {
    "mc": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "lm": {"context": str, "continuation": str},
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


def bundle_at(path, rank=0):
    """The path given, or that of the public bundle, which rank 0 fetches once. Every rank calls
    it.
    """
    if path:
        return path
    if rank == 0 and not BUNDLE.is_file():
        print(f"fetching {URL} to {BUNDLE}", flush=True)
        try:
            answer = requests.get(URL, timeout=60)
            answer.raise_for_status()
        except requests.RequestException as e:
            fail(f"cannot fetch CORE's tasks ({e}); give the zip with --bundle PATH")
        BUNDLE.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(BUNDLE, answer.content)
    while not BUNDLE.is_file():
        time.sleep(1)
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
    """Tasks to be scored by one protocol's rules, and their rows."""

    name: str
    protocol: str  # parcae, dclm or lambada
    limit: int | None  # examples a task
    averaged: list[Task]  # those whose mean is the panel's score
    tasks: list[Task] = field(default_factory=list)  # those that can be run
    rows: dict[str, list[dict]] = field(default_factory=dict)  # by label
    left_out: list[str] = field(default_factory=list)  # labels of those that cannot
    sha256: str | None = None  # of the bundle's tasks


def load_panel(path, name="core", protocol="parcae", limit=None, own=()) -> Panel:
    """The panel with its rows, from a bundle if it needs one; own: further tasks, with files of
    their own.
    """
    panel = Panel(name, protocol, limit, PANELS[name] or own)
    files = {}
    if PANELS[name]:
        files = read_bundle(path)
        panel.sha256 = hashlib.sha256(b"".join(files.values())).hexdigest()
    files |= {task.file: Path(task.file).read_bytes() for task in own}
    for task in (*PANELS[name], *own):
        rows = parse_rows(files[task.file], task) if task.file in files else []
        # dclm takes fewer shots where there are few examples
        if len(rows[:limit]) > (task.shots if protocol == "parcae" else 0):
            panel.tasks.append(task)
            panel.rows[task.label] = rows
        else:
            panel.left_out.append(task.label)
    if not panel.tasks:
        fail(f"no task of {TITLES[name]} can be run: too few examples for the shots, or no files")
    return panel
