"""
The columns of the paper's table 1 for finished runs: validation and WikiText perplexity, and
zero-shot tasks.

    python -m studies.zero_shot RUN… --wikitext wiki.test.raw # any text file
    python -m studies.zero_shot RUN… --tasks hellaswag,piqa,sciq # pip install lm_eval

Each run's numbers go to its zero_shot.json; a page of all of them to --out. Perplexities are
exp of nats a token, of the text in windows of the model's context, each token counted once; a
word is what stands between spaces.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import pad

from looped.console import Parser, fail, outside, run_cli
from looped.figures import fmt, table
from looped.files import write_atomic
from looped.logs import read_json, read_run
from looped.randomness import SEED_EVAL, sequence_key
from looped.tokenizer import SPECIALS, encode, load_tokenizer
from model import load_run

PAPER = {  # validation and WikiText perplexity, then the tasks of TASKS and their mean
    "rdm-100m": (14.23, 63.27, 27.16, 17.66, 42.38, 59.14, 51.35, 72.50, 45.03),
    "parcae-rdm-100m": (13.59, 60.33, 27.18, 18.09, 43.10, 59.30, 61.83, 71.50, 46.83),
    "rdm-350m": (10.76, 41.31, 28.55, 20.90, 47.26, 61.75, 61.53, 76.70, 49.45),
    "parcae-rdm-350m": (10.09, 37.53, 29.23, 21.08, 48.78, 62.08, 60.73, 78.80, 50.12),
}
TASKS = ("hellaswag", "arc_challenge", "arc_easy", "piqa", "boolq", "sciq")
WINDOWS_AT_ONCE = 8


@torch.no_grad()
def text_nats(model, ids: list[int], bos: int, depth: int) -> float:
    """The summed loss of all tokens, in windows that fill the context, each after one token of the
    window before.
    """
    length = model.cfg.seq_len
    device = next(model.parameters()).device
    ids = torch.tensor([bos, *ids], device=device)
    targets = len(ids) - 1
    padding = (0, -targets % length)
    before = pad(ids[:-1], padding).view(-1, length)
    after = pad(ids[1:], padding).view(-1, length)
    keys = [sequence_key(SEED_EVAL, window) for window in range(len(before))]
    keys = torch.tensor(keys, device=device)
    losses = []
    for some in torch.arange(len(before), device=device).split(WINDOWS_AT_ONCE):
        part = model.losses(before[some], after[some], [depth], keys[some])
        losses.append(part[depth].flatten())
    return torch.cat(losses)[:targets].double().sum().item()


def text_perplexities(path: Path, text: str, device: str) -> dict:
    """Perplexities of a text by a run, at depth mu_rec."""
    unusable = (FileNotFoundError, ValueError, RuntimeError)
    with outside(f"{path} cannot be loaded", "give a run of train.py", unusable):
        model, cfg, _ = load_run(path, device)
    enc = load_tokenizer(path / "tokenizer.json")
    ids = encode(enc, text)
    bos = enc.encode_single_token(SPECIALS[0])
    nats = text_nats(model, ids, bos, cfg.mu_rec)
    words = len(text.split())
    return {"by token": math.exp(nats / len(ids)), "by word": math.exp(nats / words)}


def harness(path: Path, tasks: str, device: str) -> dict:
    """Accuracies in percent of EleutherAI's harness, through tools/lm_eval.py; its own log stays in
    the run.
    """
    out = path / "lm_eval"
    command = [sys.executable, "-m", "tools.lm_eval", "--model", "looped"]
    command += ["--model_args", f"run={path}", "--tasks", tasks, "--output_path", str(out)]
    command += ["--device", device]
    if subprocess.run(command).returncode:
        fail(f"tools.lm_eval failed on {path}, see above")
    newest = max(out.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    results = read_json(newest)["results"]
    return {task: 100 * results[task]["acc,none"] for task in tasks.split(",")}


def measured(path: Path, args) -> dict:
    """What was asked for and what was measured before, kept in the run's zero_shot.json."""
    file = path / "zero_shot.json"
    found = read_json(file) if file.is_file() else {"wikitext": {}, "tasks": {}}
    if args.wikitext:
        text = args.wikitext.read_text(encoding="utf-8")
        found["wikitext"] = text_perplexities(path, text, args.device)
    if args.tasks:
        found["tasks"] |= harness(path, args.tasks, args.device)
    write_atomic(file, json.dumps(found, indent=1).encode())
    return found


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m studies.zero_shot")
    add = parser.add_argument
    page = Path("results/zero-shot.md")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    add("--wikitext", type=Path, help="a text file, e.g. the test part of WikiText")
    add("--tasks", default="", help=f"lm_eval's tasks, between commas, e.g. {','.join(TASKS)}")
    add("--out", type=Path, default=page, help="page (default: %(default)s)")
    add("--device", default=device, choices=("cpu", "cuda"), help="default: a GPU, if there is one")
    args = parser.parse_args(argv)
    rows = []
    for path in args.runs:
        run = read_run(path)
        found = measured(path, args)
        values = [math.exp(run.loss)]
        values += [found["wikitext"].get(unit) for unit in ("by token", "by word")]
        accuracies = [found["tasks"].get(task, math.nan) for task in TASKS]
        values += [*accuracies, np.mean(accuracies)]
        preset = run.config["args"]["preset"]
        rows.append([run.name, preset, *(fmt(value, ".2f") for value in values)])
        if preset in PAPER:
            validation, wikitext, *scores = PAPER[preset]
            rows.append([f"source, {preset}", preset, validation, wikitext, "–", *scores])
    columns = ["run", "preset", "validation", "WikiText, a token", "a word", *TASKS, "mean"]
    lines = ["# Perplexity and zero-shot accuracy, %, at T = mu_rec", "", *table(columns, rows)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(args.out, "\n".join(lines).encode())
    print(f"written: {args.out}")


if __name__ == "__main__":
    run_cli(main)
