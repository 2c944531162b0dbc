"""CORE (22 tasks), CORE Extended (46), LAMBADA perplexity or validation loss of a run, any depth.

    python core_eval.py RUN                             # CORE as the paper and the post report it
    python core_eval.py RUN --panel core-extended --depth 1,2,4,8,16 --max-per-task 100
    python core_eval.py RUN --panel own --task mine.jsonl:mc,shots=0,chance=0.25  # your own task
    torchrun --standalone --nproc_per_node=8 core_eval.py RUN

A score is a function of (weights, data, seed, depth). The initial loop states are those of (seed,
task, example), the same for all options of an example; losses are float32. ± is the standard
deviation over seeds; for one seed, the standard error over examples. On a CPU the model computes in
float32, else in the run's dtype.

Scores are written to core_eval_PANEL_HASH.json in RUN when all tasks are done. HASH is that of tasks,
flags and code: files of one name compare, and the scores of edited code never replace others.
Sources: CORE is DCLM's (arXiv 2406.11794). The rules are Parcae's; `--seeds 1234` is nanochat's CORE.
looped/core_tasks.py has the tasks and the format of your own, core_prompts.py the rules.
"""

import functools
import hashlib
import json
import math
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from dataloader import PackedData
from looped.common import Parser, fail, file_hash, ints, positive_int, write_json
from looped.core_prompts import EncodedTask, Row, encode_task
from looped.core_tasks import (
    BUNDLE,
    LAMBADA,
    OWN_TASK,
    PANELS,
    TASKS,
    TITLES,
    Panel,
    Task,
    bundle_at,
    load_panel,
    own_task,
)
from looped.machine import (
    DEVICES,
    ONE_PROCESS,
    Rank,
    code_hash,
    connect,
    disconnect,
    to_device,
)
from looped.ops import hash_keys
from looped.randomness import FOR_EVAL
from looped.tokenizer import load_tokenizer
from looped.validation import HeldOut, validate
from model import load_run

SEEDS = [1234, 2345, 3456]  # Parcae's
BATCH_TOKENS = {"cpu": 1024, "mps": 65_536, "cuda": 65_536}

# -- scoring ---------------------------------------------------------------------------------------


@dataclass
class Settings:
    """How, and where, a panel is scored."""

    depths: list[int]  # increasing
    seeds: list[int]  # of shots and initial states
    rank: Rank = ONE_PROCESS


def token_scores(model, x, targets):
    """Normed states (s, D) -> (2, s): the next token's loss in nats, and whether it is the greedy
    one.
    """
    logits = model.head(x.float()).float()  # (s, V)
    loss = F.cross_entropy(logits, targets, reduction="none")
    greedy = logits.argmax(-1) == targets
    return torch.stack([loss, greedy.float()])


@torch.inference_mode()
def score_batch(model, task: Task, settings: Settings, seed, batch: list[Row]) -> dict:
    """{(example, option): (depths, 2, s), the token_scores of its s targets}.

    Right padding is inert, as all is causal. All rows of an example have one key.
    """
    device = settings.rank.device
    names = []  # (example, option)
    targets = []  # of each option
    spans = []  # the row and the positions just before each option's targets
    for b, row in enumerate(batch):
        end = len(row.fed)
        for option, tokens in row.targets.items():
            names.append((row.example, option))
            targets.append(tokens)
            spans.append((b, slice(end - len(tokens), end)))
    sizes = [len(tokens) for tokens in targets]
    targets = to_device(torch.cat(targets).long(), device)
    ids = pad_sequence([row.fed for row in batch], batch_first=True)
    ids = to_device(ids.long(), device)
    numbers = [row.example for row in batch]
    keys = hash_keys(seed, FOR_EVAL, task.index, each=numbers, device=device)
    by_depth = []
    for _, h, inputs in model.states(ids, settings.depths, keys):
        x = model.coda(h, ids, inputs)  # (B, T, D)
        x = torch.cat([x[span] for span in spans])
        pieces = zip(x.split(4096), targets.split(4096))
        scores = [token_scores(model, *piece) for piece in pieces]
        by_depth.append(torch.cat(scores, 1))
    by_option = torch.stack(by_depth).cpu().split(sizes, -1)
    return dict(zip(names, by_option))


def batches(rows: list[Row], budget: int):
    """Yields rows of similar length, longest first, as many together as fill `budget` tokens."""
    rows = sorted(rows, key=lambda row: -len(row.fed))
    while rows:
        n = max(1, budget // len(rows[0].fed))
        yield rows[:n]
        rows = rows[n:]


def score_rows(model, work: EncodedTask, settings: Settings, seed) -> dict:
    """The scores of this rank's options, as score_batch has them; on a CPU a batch is one thread's."""
    kind = settings.rank.device.type
    score = functools.partial(score_batch, model, work.task, settings, seed)
    scores = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(threads) as pool:
        run = pool.map if kind == "cpu" else map
        for part in run(score, batches(work.rows, BATCH_TOKENS[kind])):
            scores |= part
    torch.set_num_threads(threads)
    return scores


def decide(scores: list[torch.Tensor], kind: str) -> int:
    """The scores (2, s) of an example's options at one depth -> the option of lowest mean loss, first
    on ties. Of a kind with one option: 0 if every token is greedy or none is scored, else -1.

    The mean of an empty span, of a choice whose tokens begin another's, is NaN: as in the public
    evaluators, Python's min keeps it where it comes first and passes over it elsewhere.
    """
    if kind in ("lm", "last-word"):
        return 0 if scores[0][1].all() else -1
    means = [loss.mean().item() for loss, _ in scores]
    return means.index(min(means))


class Answers(NamedTuple):
    """What became of a task's n examples with one seed; float64, the same on every rank."""

    correct: torch.Tensor  # (depths, n): 1 where the answer is right
    nats: torch.Tensor  # (depths, n): summed loss of all scored tokens
    cropped: torch.Tensor  # (n,): 1 where a prompt is longer than the model's context


def run_task(model, work: EncodedTask, settings: Settings, seed) -> Answers:
    """Scores a task with one seed. Every rank calls it, and ends with an error if a loss on any rank
    is not finite.
    """
    by_example = defaultdict(list)
    for (example, _), scores in sorted(score_rows(model, work, settings, seed).items()):
        by_example[example].append(scores)
    shape = len(settings.depths), len(work.golds)
    correct = torch.zeros(shape, dtype=torch.float64)
    nats = torch.zeros(shape, dtype=torch.float64)
    for example, options in by_example.items():
        for d in range(len(settings.depths)):
            scores = [option[d] for option in options]
            correct[d, example] = decide(scores, work.task.kind) == work.golds[example]
            nats[d, example] = sum(loss.double().sum() for loss, _ in scores)
    answers = Answers(correct, nats, work.cropped)
    if settings.rank.world > 1:
        answers = Answers(*(x.to(settings.rank.device) for x in answers))
        for x in answers:
            dist.all_reduce(x)
        answers = Answers(*(x.cpu() for x in answers))
    if not answers.nats.isfinite().all():
        depths = ", ".join(map(str, settings.depths))
        why = "training diverged, or that is too deep"
        fail(f"not all losses of {work.task.label} at depth {depths} are finite: {why}")
    return answers


def score_task(model, enc, panel: Panel, task: Task, settings: Settings) -> dict:
    """The task's entries by depth, on every rank."""
    by_seed = []
    for seed in settings.seeds:
        work = encode_task(task, panel, seed, enc, model.cfg.seq_len, settings.rank)
        by_seed.append(run_task(model, work, settings, seed))
    entries = {}
    for d, depth in enumerate(settings.depths):
        entries[depth] = task_entry(task, by_seed, d)
    return entries


def score_panel(model, enc, panel: Panel, settings: Settings) -> dict:
    """{depth: record}. Every rank calls it; rank 0 prints each task's line when it is scored."""
    rank = settings.rank
    by_depth = {depth: {} for depth in settings.depths}
    for task in panel.tasks:
        for depth, entry in score_task(model, enc, panel, task, settings).items():
            by_depth[depth][task.label] = entry
            rank.say(describe(task.label, depth, entry))
    entries = by_depth[settings.depths[0]].values()
    cropped = sum(entry["cropped"] for entry in entries)
    if cropped:
        prompts = len(settings.seeds) * sum(entry["n"] for entry in entries)
        context = f"the model's context of {model.cfg.seq_len} tokens"
        rank.say(f"{cropped} of {prompts} prompts lost their beginning: longer than {context}")
    return {str(depth): summarise(panel, tasks) for depth, tasks in by_depth.items()}


def score_validation(model, data: PackedData, settings: Settings) -> dict:
    """{depth: record}: the loss over all packed validation rows, with the initial states of the run's
    evaluations while it trained.
    """
    held_out = HeldOut(data, math.inf, settings.rank.device)
    result = validate(model, held_out, settings.depths, 16, settings.rank)
    records = {}
    for depth in settings.depths:
        score = {"name": "validation loss", "mean": result["loss"][depth], "std": None}
        records[str(depth)] = {"aggregate": score | {"bpb": result["bpb"][depth]}}
    return records


# -- records ---------------------------------------------------------------------------------------

# An entry is a task's record at one depth: accuracy and centred accuracy, each with mean, ± and its
# value by seed, and how many of its examples were cropped.


def spread(per_seed: list[float], error: float | None) -> dict:
    """The mean, and as std the population standard deviation over seeds; of one seed, its standard
    error, if that is known.
    """
    std = float(np.std(per_seed)) if len(per_seed) > 1 else error
    return {"mean": float(np.mean(per_seed)), "std": std, "per_seed": per_seed}


def accuracy(correct: torch.Tensor) -> tuple[float, float]:
    """(n,) of 1 and 0 -> the share of right answers, a float32 as in the public evaluators, and its
    binomial standard error.
    """
    right = np.float32(correct.sum())
    n = np.float32(len(correct))
    # one more right and one more wrong: twelve right out of twelve is not certainty
    share = (right + 1) / (n + 2)
    error = math.sqrt(share * (1 - share) / n)
    return float(right / n), error


def task_entry(task: Task, by_seed: list[Answers], d: int) -> dict:
    """The record of a task at the depth of index d. Centred: 0 where guessing is, 1 where all answers
    are right.
    """
    shares = []
    for answers in by_seed:
        share, error = accuracy(answers.correct[d])
        shares.append(share)
    centred = [(share - task.chance) / (1 - task.chance) for share in shares]
    entry = {
        "n": len(answers.cropped),
        "accuracy": spread(shares, error),
        "centered": spread(centred, error / (1 - task.chance)),
        "cropped": int(sum(answers.cropped.sum() for answers in by_seed)),
    }
    if task.kind == "last-word":
        nats = [answers.nats[d].mean().item() for answers in by_seed]
        entry["perplexity"] = spread(np.exp(nats).tolist(), None)
    return entry


def average(title: str, tasks: list[Task], entries: dict) -> dict:
    """The unweighted mean of the centred scores, seed by seed. If tasks are missing, its name says
    how many there are.
    """
    done = [entries[task.label]["centered"] for task in tasks if task.label in entries]
    if len(done) < len(tasks):
        title = f"{len(done)} of the {len(tasks)} tasks of {title}"
    by_seed = zip(*(score["per_seed"] for score in done))
    means = [float(np.mean(scores)) for scores in by_seed]
    errors = [score["std"] for score in done]
    error = math.hypot(*errors) / len(done)
    return {"name": title, **spread(means, error)}


def averages(name: str, tasks: list[Task], entries: dict) -> dict:
    """{group: mean} of the scored tasks, grouped by their "category" or "family"."""
    groups = defaultdict(list)
    for task in tasks:
        if task.label in entries:
            groups[getattr(task, name)].append(entries[task.label]["centered"]["mean"])
    return {group: float(np.mean(means)) for group, means in groups.items()}


def summarise(panel: Panel, entries: dict) -> dict:
    """Entries of the tasks at one depth -> the record of that depth."""
    cut = f", at most {panel.limit} examples a task" if panel.limit else ""
    total = average(TITLES[panel.name] + cut, panel.averaged, entries)
    record = {"aggregate": total, "tasks": entries}
    if panel.name == "lambada":
        total |= entries[LAMBADA.label]["perplexity"]
    if panel.name == "core-extended":
        record["core"] = average("CORE" + cut, PANELS["core"], entries)
        record["categories_ext"] = averages("family", TASKS, entries)
    if panel.name.startswith("core"):
        record["categories_fine"] = averages("category", PANELS["core"], entries)
    return record


def plus_minus(score: dict) -> str:
    if score["std"] is None:
        return f"{score['mean']:.4f}"
    return f"{score['mean']:.4f} ± {score['std']:.4f}"


def describe(label: str, depth: int, entry: dict) -> str:
    """The line on the screen for a task."""
    scores = f"{plus_minus(entry['accuracy'])}  centred {entry['centered']['mean']:+.4f}"
    return f"{label:33} depth {depth}  {scores}  n {entry['n']:5d}"


# -- the program -----------------------------------------------------------------------------------


# fmt: off
def parse_args():
    p = Parser(description=__doc__)
    add = p.add_argument
    add("run", metavar="RUN", help="run directory")
    add("--panel", default="core", choices=[*PANELS, "val"],
        help="what to evaluate (default: %(default)s)")
    add("--depth", type=ints,
        help="number of loops, one or several between commas (default: the run's mu_rec)")
    add("--seeds", type=ints, default=SEEDS,
        help="seeds of shots and initial states, one or several between commas (default: Parcae's, "
        f"{','.join(map(str, SEEDS))})")
    add("--max-per-task", type=positive_int, help="examples scored of each task (default: all)")
    add("--bundle", help=f"zip of the task data (default: {BUNDLE}, fetched once)")
    add("--data", help="folder of packed rows, for --panel val (default: the run's)")
    add("--task", type=own_task, action="append", default=[], metavar=OWN_TASK,
        help="a task of your own, scored beside the panel; it counts in no average but that of "
        "--panel own. KIND is mc, schema or lm, N the number of shots, P the accuracy of guessing, "
        "such as 0.25 (default: 0, no centring). May be given again")
    add("--device", default="auto", choices=DEVICES,
        help="device; auto is an NVIDIA GPU or the CPU; mps, an Apple GPU, is untried")
    args = p.parse_args()
    if args.panel == "own" and not args.task:
        p.error("--panel own needs a --task")
    return args
# fmt: on


def open_run(run, device):
    """-> (model, tokenizer, config); a tokenizer that is not the checkpoint's is refused."""
    # cuDNN's attention would make a plan for every new shape
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_tf32 = False  # losses are float32
    dtype = torch.float32 if device.type == "cpu" else None
    try:
        model, config = load_run(run, device, dtype)
    except (FileNotFoundError, ValueError) as e:
        fail(f"{e}; name a run with a checkpoint, made by this code")
    path = Path(run) / "tokenizer.json"
    if not path.is_file() or file_hash(path) != config["tokenizer"]["sha256"]:
        mend = f"copy {config['tokenizer']['path']} there, or import the weights again"
        fail(f"{path} is not there, or not the tokenizer of the checkpoint; {mend}")
    return model, load_tokenizer(path), config


def open_rows(folder, config) -> PackedData:
    """The packed rows; those of another tokenizer than the run's are refused."""
    data = PackedData(folder)
    if data.manifest["tokenizer_sha256"] != config["tokenizer"]["sha256"]:
        fail(f"{folder} has rows of another tokenizer; pack with the run's, and give --data ROWS")
    return data


def score_file(run, header: dict) -> Path:
    """The file in RUN for scores with this header, which says what decides them beside the weights."""
    digest = hashlib.sha256(json.dumps(header).encode()).hexdigest()
    return Path(run) / f"core_eval_{header['panel']}_{digest[:8]}.json"


def main():
    args = parse_args()
    rank = connect(args.device)
    model, enc, config = open_run(args.run, rank.device)
    if args.depth and not model.cfg.n_core:
        fail("the model has no loop; leave --depth out")
    checkpoint = f"{config['checkpoint']} {file_hash(Path(args.run) / config['checkpoint'])}"
    settings = Settings(args.depth or [model.cfg.mu_rec], args.seeds, rank)
    header = {name: getattr(args, name) for name in ("panel", "depth", "seeds", "max_per_task")}
    header["dtype"] = str(model.dtype).removeprefix("torch.")
    header["code"] = code_hash(script="core_eval.py")
    if args.panel == "val":
        data = open_rows(args.data or config["data"]["path"], config)
        header["tasks"] = data.yardstick
        records = score_validation(model, data, settings)
    else:
        bundle = bundle_at(args.bundle, rank) if PANELS[args.panel] else None
        panel = load_panel(bundle, args.panel, args.max_per_task, args.task)
        header["tasks"] = panel.sha256
        records = score_panel(model, enc, panel, settings)
    path = score_file(args.run, header)
    if rank.number == 0:
        write_json(path, header | {"checkpoint": checkpoint, "depths": records})
    for depth, record in records.items():
        score = record["aggregate"]
        rank.say(f"depth {depth}: {score['name']} {plus_minus(score)}")
    rank.say(f"written: {path}")
    disconnect(rank)


if __name__ == "__main__":
    main()
