"""
The columns of the paper's table 1 for finished runs: validation perplexity per token and, from
EleutherAI's harness, the accuracies of tasks and WikiText's perplexity.

    python -m studies.zero_shot RUN… --tasks hellaswag,piqa,sciq,wikitext # pip install lm_eval

Each run's numbers go to its zero_shot.json; a page of all of them to --out. The paper does not say
what its WikiText perplexity counts; the harness' first measure, used here, is per word.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pandas as pd

from looped.checkpoint import newest_checkpoint
from looped.console import Parser, fail, run_cli
from looped.figures import fmt, frame_table, save_page
from looped.files import file_hash, write_atomic
from looped.logs import read_json, read_run
from studies.comparisons import source_numbers

TASKS = ["hellaswag", "arc_challenge", "arc_easy", "piqa", "boolq", "sciq"]
MEASURES = ["validation", "wikitext", *TASKS]


def harness(path: Path, tasks: str) -> dict:
    """Accuracies in percent, and WikiText's perplexity, of EleutherAI's harness, through
    tools/lm_eval.py; its own log stays in the run.
    """
    out = path / "lm_eval"
    command = [sys.executable, "-m", "tools.lm_eval", "--model", "looped"]
    command += ["--model_args", f"run={path}", "--tasks", tasks, "--output_path", str(out)]
    if subprocess.run(command).returncode:
        fail(f"tools.lm_eval failed on {path}, see above")
    newest = max(out.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    return scores_of(newest, tasks)


def scores_of(file: Path, tasks: str) -> dict:
    """The tasks' numbers in a file of the harness' results."""
    results = read_json(file)["results"]
    found = {}
    for task in tasks.split(","):
        scores = results.get(task, {})
        if "acc,none" in scores:
            found[task] = 100 * scores["acc,none"]
        elif "word_perplexity,none" in scores:
            found[task] = scores["word_perplexity,none"]
        else:
            advice = f"name tasks that have one, as {TASKS[0]}"
            fail(f"{file} has no accuracy or perplexity of {task}; {advice}")
    return found


def measured(path: Path, tasks: str) -> dict:
    """What was asked for and what was measured before, kept in the run's zero_shot.json."""
    file = path / "zero_shot.json"
    newest = newest_checkpoint(path)
    of = newest and f"{newest.name} {file_hash(newest)}"
    found = read_json(file) if file.is_file() else {}
    if found.get("of") != of:  # of other weights
        found = {"of": of, "tasks": {}}
    if tasks:
        found["tasks"] |= harness(path, tasks)
    write_atomic(file, json.dumps(found, indent=1).encode())
    return found["tasks"]


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m studies.zero_shot")
    add = parser.add_argument
    page = Path("results/zero-shot")
    add("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    tasks = ",".join([*TASKS, "wikitext"])
    add("--tasks", default="", help=f"lm_eval's tasks, between commas, e.g. {tasks}")
    add("--out", type=Path, default=page, help="page, without suffix (default: %(default)s)")
    args = parser.parse_args(argv)
    rows = {}
    for path in args.runs:
        run = read_run(path)
        name = f"{path}, {run.config['args']['preset']}"
        rows[name] = {"validation": math.exp(run.loss)} | measured(path, args.tasks)
    frame = pd.DataFrame.from_dict(rows, orient="index").reindex(columns=MEASURES)
    frame["mean"] = frame[TASKS].mean(axis=1, skipna=False)
    source = source_numbers("zero_shot").pivot(index="row", columns="of", values="value")
    both = pd.concat([frame, source.rename("source, {}".format).astype(float)])
    lines = ["# Perplexities, and zero-shot accuracy in percent, at depth mu_rec", ""]
    lines += frame_table(both.map(fmt, spec=".2f").rename_axis("run"))
    save_page(args.out, lines)


if __name__ == "__main__":
    run_cli(main)
