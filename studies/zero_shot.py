"""
The columns of the paper's table 1 for finished runs: validation and WikiText perplexity, and
zero-shot tasks.

    python -m studies.zero_shot RUN… --wikitext wiki.test.raw # any text file
    python -m studies.zero_shot RUN… --tasks hellaswag,piqa,sciq # pip install lm_eval

Each run's numbers go to its zero_shot.json; a page of all of them to --out. Perplexities are
exp of nats a token, of the text in windows of the model's context, each token counted once; a
word is what stands between spaces. The paper's perplexities are a token's.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pandas as pd
import torch

from core_eval import open_run
from looped.checkpoint import newest_checkpoint
from looped.console import Parser, fail, outside, run_cli
from looped.figures import fmt, frame_table, save_page
from looped.files import file_hash, write_atomic
from looped.logs import read_json, read_run
from looped.randomness import SEED_EVAL, sequence_keys
from looped.tokenizer import BOS, encode
from studies.comparisons import source_numbers
from studies.spectra import DEVICE

TASKS = ["hellaswag", "arc_challenge", "arc_easy", "piqa", "boolq", "sciq"]
MEASURES = ["validation", "by token", "by word", *TASKS]


@torch.no_grad()
def text_nats(model, ids: list[int], bos: int, depth: int) -> float:
    """The summed loss of all tokens, in windows that fill the context, each after one token of the
    window before.
    """
    length = model.cfg.seq_len
    device = model.wte.weight.device
    ids = torch.tensor([bos, *ids], device=device)
    nats = 0.0
    for window, start in enumerate(range(0, len(ids) - 1, length)):
        row = ids[None, start : start + length + 1]
        keys = sequence_keys(SEED_EVAL, each=[window], device=device)
        losses = model.losses(row[:, :-1], row[:, 1:], [depth], keys)
        nats += losses[depth].double().sum().item()
    return nats


def text_perplexities(path: Path, text: str) -> dict:
    """Perplexities of a text by a run, at depth mu_rec."""
    model, enc, _ = open_run(path, DEVICE)
    ids = encode(enc, text)
    nats = text_nats(model, ids, enc.encode_single_token(BOS), model.cfg.mu_rec)
    words = len(text.split())
    return {"by token": math.exp(nats / len(ids)), "by word": math.exp(nats / words)}


def harness(path: Path, tasks: str) -> dict:
    """Accuracies in percent of EleutherAI's harness, through tools/lm_eval.py; its own log stays in
    the run.
    """
    out = path / "lm_eval"
    command = [sys.executable, "-m", "tools.lm_eval", "--model", "looped"]
    command += ["--model_args", f"run={path}", "--tasks", tasks, "--output_path", str(out)]
    if subprocess.run(command).returncode:
        fail(f"tools.lm_eval failed on {path}, see above")
    newest = max(out.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    results = read_json(newest)["results"]
    found = {}
    for task in tasks.split(","):
        if "acc,none" not in results.get(task, {}):
            fail(f"{newest} has no accuracy of {task}; name tasks that have one, as {TASKS[0]}")
        found[task] = 100 * results[task]["acc,none"]
    return found


def measured(path: Path, args) -> dict:
    """What was asked for and what was measured before, kept in the run's zero_shot.json."""
    file = path / "zero_shot.json"
    newest = newest_checkpoint(path)
    of = newest and f"{newest.name} {file_hash(newest)}"
    found = read_json(file) if file.is_file() else {}
    if found.get("of") != of:  # of other weights
        found = {"of": of, "wikitext": {}, "tasks": {}}
    if args.wikitext:
        with outside(f"{args.wikitext} is no text in UTF-8", "give another file"):
            text = args.wikitext.read_text(encoding="utf-8")
        if not text.strip():
            fail(f"{args.wikitext} is empty; give a file with text")
        found["wikitext"] = text_perplexities(path, text)
    if args.tasks:
        found["tasks"] |= harness(path, args.tasks)
    write_atomic(file, json.dumps(found, indent=1).encode())
    return found["wikitext"] | found["tasks"]


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m studies.zero_shot")
    add = parser.add_argument
    page = Path("results/zero-shot")
    add("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    add("--wikitext", type=Path, help="a text file, e.g. the test part of WikiText")
    add("--tasks", default="", help=f"lm_eval's tasks, between commas, e.g. {','.join(TASKS)}")
    add("--out", type=Path, default=page, help="page, without suffix (default: %(default)s)")
    args = parser.parse_args(argv)
    rows = {}
    for path in args.runs:
        run = read_run(path)
        name = f"{path}, {run.config['args']['preset']}"
        rows[name] = {"validation": math.exp(run.loss)} | measured(path, args)
    frame = pd.DataFrame.from_dict(rows, orient="index").reindex(columns=MEASURES)
    frame["mean"] = frame[TASKS].mean(axis=1, skipna=False)
    source = source_numbers("zero_shot").pivot(index="row", columns="of", values="value")
    both = pd.concat([frame, source.rename("source, {}".format).astype(float)])
    lines = ["# Perplexity and zero-shot accuracy, %, at depth mu_rec", ""]
    lines += frame_table(both.map(fmt, spec=".2f").rename_axis("run"))
    save_page(args.out, lines)


if __name__ == "__main__":
    run_cli(main)
