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
import zlib
from argparse import ArgumentTypeError
from dataclasses import dataclass, field
from pathlib import Path

from looped.console import DAMAGE, fail, non_negative_int, number, outside
from looped.corpus import fetch_file
from looped.files import file_hash

URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
BUNDLE = Path("data/eval_bundle.zip")
UNREADABLE = (*DAMAGE, OSError, zipfile.BadZipFile, EOFError, RuntimeError, zlib.error)

FAMILIES = {  # by folder
    "language_understanding": "language understanding",
    "world_knowledge": "world knowledge",
    "commonsense_reasoning": "commonsense",
    "symbolic_problem_solving": "symbolic/math",
    "reading_comprehension": "reading",
    "safety": "safety/bias",
}
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
    category: str = ""  # in CORE
    by_category: bool = False  # in dclm, shots and averages are within a row's "category"

    @property
    def family(self) -> str:
        return FAMILIES.get(self.file.split("/")[0], "")


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


def delimiter(name: str) -> str:
    if name not in DELIMITERS:
        raise ValueError(f"delimiter {name} is not one of {', '.join(DELIMITERS)}")
    return DELIMITERS[name]


# how the settings of one's own task are read
OWN_TASK_SETTINGS = {
    "shots": non_negative_int,
    "chance": number(float, 0, 99.9, "a percentage below 100"),
    "delimiter": delimiter,
}


def own_task(text: str) -> Task:
    """FILE:KIND[,shots=N][,chance=PERCENT][,delimiter=space|line] -> a task in no average.

    Its label ends in a hash of the file and of these settings: a result belongs to just them.
    """
    path, _, settings = text.rpartition(":")
    path = str(Path(path).resolve())  # never the name of a file in the bundle
    kind, *pairs = settings.split(",")
    given = {"shots": 0, "chance": 0.0, "delimiter": DELIMITERS["space"]}
    form = "give FILE:mc, :schema or :lm, then e.g. ,shots=5,chance=25,delimiter=line"
    with outside(f"--task {text}", form, (*UNREADABLE, ArgumentTypeError)):
        if kind not in FIELDS:
            raise ValueError(f"{kind!r} is no kind of task")
        content = Path(path).read_bytes() + settings.encode()
        for pair in pairs:
            name, _, value = pair.partition("=")
            if name not in OWN_TASK_SETTINGS:
                raise ValueError(f"{name} is not one of {', '.join(OWN_TASK_SETTINGS)}")
            given[name] = OWN_TASK_SETTINGS[name](value)
    digest = hashlib.sha256(content).hexdigest()
    label = f"{Path(path).stem}-{digest[:8]}"
    chances = dict.fromkeys(("v1", "v2"), given["chance"])
    index = int(digest[:12], 16)
    return Task(label, path, kind, given["shots"], given["delimiter"], chances, index)


# -- rows -----------------------------------------------------------------------------------------

FIELDS = {
    "mc": {"query": str, "gold": int, "choices": list},
    "schema": {"continuation": str, "gold": int, "context_options": list},
    "lm": {"context": str, "continuation": str},
}


def check_row(task: Task, row: dict, with_category: bool) -> None:
    """Raises ValueError with what is wrong with a row."""
    if type(row) is not dict:
        raise ValueError("not a JSON object")
    wanted = dict(FIELDS[task.kind])
    if with_category:
        wanted["category"] = str
    for name, kind in wanted.items():
        if name not in row:
            raise ValueError(f"{name} is missing")
        value = row[name]
        if type(value) is not kind:
            raise ValueError(f"{name} must be {kind.__name__}, and is {value!r:.40}")
        if kind is list:
            check_options(name, value, row["gold"])


def check_options(name: str, options: list, gold: int) -> None:
    for option in options:
        if type(option) is not str:
            raise ValueError(f"{name} must be texts, and one is {option!r:.40}")
    if not 0 <= gold < len(options):
        raise ValueError(f"gold {gold} is no place in the {len(options)} {name}")


def parse_rows(blob: bytes, task: Task, with_category: bool = False) -> list[dict]:
    """The rows of a file, a line each; a bad one ends the program.

    Lines end at \\n only: U+0085 occurs inside strings.
    """
    rows = []
    for i, line in enumerate(blob.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            check_row(task, row, with_category)
        except (ValueError, RecursionError) as e:
            fail(f"{task.file}, line {i}: {e}; mend that line or get the file again")
        rows.append(row)
    return rows


# -- the bundle ------------------------------------------------------------------------------------


def fetch_bundle(path=BUNDLE, url=URL):
    """Downloads once, continuing where it was interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {url} to {path}; without a network: --bundle PATH", flush=True)
    reason = fetch_file(url, path, zipfile.is_zipfile)
    if reason:
        advice = "try again, it continues, or give the zip or its folder with --bundle PATH"
        fail(f"cannot fetch {url} ({reason}); {advice}")


def bundle_at(path, rank=0):
    """The path given, or that of the public bundle, which rank 0 fetches once. Every rank calls
    it.
    """
    if path:
        return path
    if rank == 0 and not BUNDLE.is_file():
        fetch_bundle()
    while not BUNDLE.is_file():  # polling, since a collective would give up after minutes
        time.sleep(1)
    return BUNDLE


def open_bundle(path) -> tuple[dict[str, bytes], str]:
    """The zip, or the folder it holds -> ({folder/file: content}, SHA-256)."""
    path = Path(path).resolve()
    if path.is_dir():
        names = sorted(path.rglob("*.jsonl"))
        files = {short: name.read_bytes() for short, name in short_names(path, names).items()}
        return files, file_hash(*names)
    advice = "give another one, or its folder, with --bundle PATH"
    with outside(f"{path} is not a usable zip file", advice, UNREADABLE):
        with zipfile.ZipFile(path) as z:
            names = [name for name in z.namelist() if name.endswith(".jsonl")]
            files = {short: z.read(name) for short, name in short_names(path, names).items()}
        return files, file_hash(path)


def short_names(path, names) -> dict:
    """{folder/file: name} of the files in a bundle."""
    found = {}
    for name in names:
        short = "/".join(Path(name).parts[-2:])
        if short in found:
            two = f"{found[short]} and {name}"
            fail(f"{path} holds two files {short}: {two}; remove one of them")
        found[short] = name
    return found


# -- the panel -------------------------------------------------------------------------------------


@dataclass
class Panel:
    """Tasks to be scored by one protocol's rules, and their rows."""

    name: str
    protocol: str  # parcae, dclm or lambada
    limit: int | None  # examples a task
    tasks: list[Task]
    rows: dict[str, list[dict]] = field(default_factory=dict)  # by label
    missing: dict[str, str] = field(default_factory=dict)  # label -> why it cannot be run
    sha256: str | None = None  # of the bundle

    @property
    def averaged(self) -> list[Task]:
        """The tasks whose mean is the panel's score; a user's own count only in panel "own"."""
        return self.tasks if self.name == "own" else PANELS[self.name]


def load_panel(path, name="core", protocol="parcae", limit=None, own=()) -> Panel:
    """The panel with its rows, from a bundle, if it needs one; own: further tasks, with files of
    their own.
    """
    files, sha256 = {}, None
    if name != "own":
        files, sha256 = open_bundle(path)
    files |= {task.file: Path(task.file).read_bytes() for task in own}
    panel = Panel(name, protocol, limit, [*PANELS[name], *own], sha256=sha256)
    for task in panel.tasks:
        if task.file not in files:
            panel.missing[task.label] = f"{task.file} is not there"
            continue
        with_category = task.by_category and protocol == "dclm"
        rows = parse_rows(files[task.file], task, with_category)
        n = min(len(rows), limit or len(rows))
        # dclm takes fewer shots rather than fail
        needed = 0 if protocol in ("dclm", "lambada") else task.shots
        if n > needed:
            panel.rows[task.label] = rows
        else:
            why = f"{task.shots} shots need more than the {n} examples of {task.file}"
            if task in own:
                fail(f"--task: {why}; give more examples or fewer shots")
            panel.missing[task.label] = why
    if not any(task.label in panel.rows for task in panel.averaged):
        advice = "give the zip, or the folder it holds, with --bundle PATH"
        fail(f"{path} has no task of {TITLES[name]}; {advice}")
    return panel
