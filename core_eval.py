"""CORE (22 tasks), CORE Extended (46), LAMBADA perplexity or validation loss of a run, any depth.

    python core_eval.py RUN                             # CORE as the paper and the post report it
    python core_eval.py RUN --panel core-extended --depth 1,2,4,8,16 --max-per-task 100
    python core_eval.py RUN --panel own --task mine.jsonl:mc,shots=0,chance=25  # a task of your own
    torchrun --standalone --nproc_per_node=8 core_eval.py RUN

A score is a function of (weights, data, seed, depth). The initial loop states are those of (seed,
task, example), the same for all options of an example; losses are float32. ± is the standard
deviation over seeds; for one seed, the standard error over examples. Results go to
core_<panel>_<protocol>.json in RUN, task by task; the same command continues there, another one
overwrites it. On a CPU float32 is used, else the run's own dtype.
Sources: CORE is DCLM's (arXiv 2406.11794); the protocols are Parcae's, nanochat's (the same, at
seed 1234), and llm-foundry's (dclm). looped/core_tasks.py has the tasks, core_prompts.py the rules.
"""

import functools
import json
import math
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

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
    Place,
    connect,
    disconnect,
    environment,
    exact_products,
    to_device,
)
from looped.ops import hash_keys
from looped.randomness import FOR_EVAL
from looped.tokenizer import load_tokenizer
from looped.validation import HeldOut, validate
from model import load_run

# Whose rules, and the default seeds. nanochat's answers are Parcae's at its only seed.
PROTOCOLS = {"parcae": [1234, 2345, 3456], "nanochat": [1234], "dclm": [1234]}
SHOT_SEED = 1234  # of dclm's shots, whatever --seeds
BATCH_TOKENS = {"cpu": 1024, "mps": 65_536, "cuda": 65_536}
ODDITIES = {  # what is counted of a task's examples, and how it is said
    "cropped": "prompts cropped",
    "empty": "with an option of no tokens, which decides whatever the model says (try --protocol dclm)",
}
# of an example: the option chosen (of lm 0, or -1 where it is wrong), whether it is right, and the
# loss of all its scored tokens
COLUMNS = ["answer", "correct", "nats", *ODDITIES]

# -- scoring ---------------------------------------------------------------------------------------


@dataclass
class Settings:
    """How, and where, a panel is scored."""

    depths: list[int]  # increasing
    seeds: list[int]  # of shots (parcae) and initial states
    place: Place = ONE_PROCESS
    baselines: str = "v1"


def token_scores(model, x, targets):
    """Normed states (s, D) -> (2, s): the next token's loss in nats, and whether it is the greedy
    one.
    """
    logits = model.head(x.float()).float()  # (s, V)
    loss = F.cross_entropy(logits, targets, reduction="none")
    greedy = logits.argmax(-1) == targets
    return torch.stack([loss, greedy.float()])


@torch.inference_mode()
def score_batch(model, task: Task, settings: Settings, seed, batch: list[Row]) -> None:
    """Gives each option its scores: (depths, 2, s), the token_scores of its targets.

    Right padding is inert, as all is causal. All rows of an example have one key.
    """
    device = settings.place.device
    options = []
    places = []  # of the rows and positions just before each option's tokens
    for b, row in enumerate(batch):
        end = len(row.fed)
        for option in row.options.values():
            options.append(option)
            places.append((b, slice(end - len(option.targets), end)))
    ids = pad_sequence([row.fed for row in batch], batch_first=True)
    ids = to_device(ids.long(), device)
    targets = torch.cat([option.targets for option in options])
    targets = to_device(targets.long(), device)
    examples = [row.example for row in batch]
    keys = hash_keys(seed, FOR_EVAL, task.index, each=examples, device=device)
    found = []
    for _, h in model.states(ids, settings.depths, keys):
        x = model.coda(h, ids)  # (B, T, D)
        x = torch.cat([x[place] for place in places])
        pieces = zip(x.split(4096), targets.split(4096))
        scores = [token_scores(model, *piece) for piece in pieces]
        found.append(torch.cat(scores, 1))
    sizes = [len(option.targets) for option in options]
    of_options = torch.stack(found).cpu().split(sizes, -1)
    for option, scores in zip(options, of_options):
        option.scores = scores


def batches(rows: list[Row], budget: int):
    """Yields rows of similar length, longest first, as many together as fill `budget` tokens."""
    rows = sorted(rows, key=lambda row: -len(row.fed))
    while rows:
        n = max(1, budget // len(rows[0].fed))
        yield rows[:n]
        rows = rows[n:]


def score_rows(model, work: EncodedTask, settings: Settings, seed) -> None:
    """Gives every option of this rank its scores; on a CPU a batch is one thread's."""
    device = settings.place.device
    score = functools.partial(score_batch, model, work.task, settings, seed)
    with exact_products(device) as threads, ThreadPoolExecutor(threads) as pool:
        run = pool.map if device.type == "cpu" else map
        list(run(score, batches(work.rows, BATCH_TOKENS[device.type])))


def decide(scores: list[torch.Tensor], kind, protocol) -> int:
    """The scores of an example's options at one depth -> the option of lowest mean loss, first on
    ties. For lm: 0 if every token is greedy or none is scored, else -1; no option means the
    prompt is not a prefix, and counts as wrong.

    The mean of an empty span is NaN, which Python's min keeps where it comes first and passes over
    elsewhere. dclm compares exp(loss) in float32, where losses that differ may be equal.
    """
    if kind == "lm":
        right = scores and scores[0][1].all()
        return 0 if right else -1
    means = [loss.mean().item() for loss, _ in scores]
    if protocol == "dclm":
        means = torch.tensor(means).exp().tolist()
    return means.index(min(means))


class NotFiniteError(ValueError):
    """The model's answer is no number: training diverged, or the depth is too large."""


def run_task(model, work: EncodedTask, settings: Settings, seed) -> list[dict]:
    """A task with one seed -> {column: (n,) float64} at each depth, the same on every rank.

    Raises NotFiniteError on every rank if a loss on any rank is not finite.
    """
    score_rows(model, work, settings, seed)
    shape = len(settings.depths), len(COLUMNS), len(work.groups)
    table = torch.zeros(shape, dtype=torch.float64)
    for at in range(len(settings.depths)):
        for example in work.examples:
            scores = [option.scores[at] for option in example.options]
            answer = decide(scores, work.task.kind, work.protocol)
            nats = sum(loss.double().sum().item() for loss, _ in scores)
            values = [answer, answer == example.gold, nats, example.cropped, example.empty]
            table[at, :, example.number] = torch.tensor(values, dtype=torch.float64)
    if settings.place.world > 1:
        table = table.to(settings.place.device)
        dist.all_reduce(table)
    if not table.isfinite().all():
        depths = ", ".join(map(str, settings.depths))
        why = "training diverged, or that is too deep"
        raise NotFiniteError(f"not all answers at depth {depths} are finite: {why}")
    return [dict(zip(COLUMNS, of_depth)) for of_depth in table.cpu().numpy()]


def evaluate(model, enc, panel: Panel, settings: Settings, known=()):
    """Scores a panel's tasks except those in `known`: yields each label with its entries by depth.
    Every rank calls it.
    """
    model = model.uncompiled()
    context = model.cfg.seq_len
    for task in panel.tasks:
        if task.label in known:
            continue
        by_seed = []
        for seed in settings.seeds:
            shots = SHOT_SEED if panel.protocol == "dclm" else seed
            work = encode_task(task, panel, shots, enc, context, settings.place)
            by_seed.append(run_task(model, work, settings, seed))
        entries = {}
        for depth, results in zip(settings.depths, zip(*by_seed)):
            entries[depth] = task_entry(work, results, settings)
        yield task.label, entries


def quick_score(model, enc, panel: Panel, place: Place) -> dict:
    """The panel's average at mu_rec with one seed, for train.py. NotFiniteError: there is none."""
    depth = model.cfg.mu_rec
    settings = Settings([depth], [SHOT_SEED], place)
    entries = {}
    for label, found in evaluate(model, enc, panel, settings):
        entries[label] = found[depth]
    return summarise(panel, entries)["aggregate"]


# -- records ---------------------------------------------------------------------------------------

# An entry is a task's record at one depth: accuracy and centred accuracy, each with mean, ± and its
# value by seed, and counts of what was odd in its examples.


def spread(per_seed: list[float], error: float | None) -> dict:
    """The mean, and as std the population standard deviation over seeds; of one seed, its standard
    error, if that is known.
    """
    std = float(np.std(per_seed)) if len(per_seed) > 1 else error
    return {"mean": float(np.mean(per_seed)), "std": std, "per_seed": per_seed}


def accuracy(correct, groups) -> tuple[float, float]:
    """The share of right answers, and its binomial standard error.

    The share is a float32 mean, as in the public evaluators; over several groups (the categories of
    dclm) the plain mean of the groups' means. The error assumes one more right and one more wrong,
    since twelve right out of twelve is not certainty.
    """
    right = np.bincount(groups, correct).astype(np.float32)
    asked = np.bincount(groups).astype(np.float32)
    share = (right + 1) / (asked + 2)
    variances = share * (1 - share) / asked
    error = math.sqrt(variances.sum()) / len(asked)
    return float(np.mean(right / asked, dtype=np.float64)), error


def task_entry(work: EncodedTask, results: list[dict], settings: Settings) -> dict:
    """The record of a task at one depth, from the columns of each seed. Centred: 0 where guessing
    is, 1 where all answers are right.
    """
    chance = work.task.chance[settings.baselines] / 100
    shares = []
    for columns in results:
        share, error = accuracy(columns["correct"], work.groups)
        shares.append(share)
    centred = [(share - chance) / (1 - chance) for share in shares]
    entry = {"n": len(work.groups), "accuracy": spread(shares, error)}
    entry["centered"] = spread(centred, error / (1 - chance))
    for name in ODDITIES:
        counts = [columns[name].sum() for columns in results]
        entry[name] = int(sum(counts))
    if work.protocol == "lambada":
        nats = [columns["nats"].mean() for columns in results]
        entry["perplexity"] = spread(np.exp(nats).tolist(), None)
    return entry


def average(title: str, tasks: list[Task], entries: dict) -> dict:
    """The unweighted mean of the centred scores, seed by seed. If tasks are missing, its name says
    how many there are.
    """
    done = [entries[task.label]["centered"] for task in tasks if task.label in entries]
    if len(done) < len(tasks):
        title = f"{len(done)} of the {len(tasks)} tasks of {title}"
    by_task = [score["per_seed"] for score in done]
    means = [float(np.mean(of_seed)) for of_seed in zip(*by_task)]
    errors = [score["std"] for score in done]
    error = math.hypot(*errors) / len(done)
    counts = {"tasks_done": len(done), "tasks_total": len(tasks)}
    return {"name": title, **spread(means, error), **counts}


def averages(name: str, tasks: list[Task], entries: dict) -> dict:
    """{group: mean} of the tasks that are done, grouped by their "category" or "family"."""
    groups = defaultdict(list)
    for task in tasks:
        if task.label in entries:
            groups[getattr(task, name)].append(task)
    means = {}
    for title, done in groups.items():
        means[title] = average(title, done, entries)["mean"]
    return means


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
    line = f"{label:33} depth {depth}  {scores}  n {entry['n']:5d}"
    for name, text in ODDITIES.items():
        if entry[name]:
            line += f"  {entry[name]} {text}"
    return line


# -- the program -----------------------------------------------------------------------------------


def parse_args():
    p = Parser(description=__doc__)
    add = p.add_argument
    add("run", metavar="RUN", help="run directory")
    add(
        "--panel",
        default="core",
        choices=[*PANELS, "val"],
        help="what to evaluate (default: %(default)s)",
    )
    add(
        "--protocol",
        default="parcae",
        choices=list(PROTOCOLS),
        help="whose rules; nanochat: parcae's at seed 1234 (default: %(default)s)",
    )
    add(
        "--depth",
        type=ints,
        help="loops, one or several between commas (default: the run's mu_rec)",
    )
    add(
        "--seeds",
        type=ints,
        help="of shots and initial states (default: parcae 1234,2345,3456; others 1234)",
    )
    add("--max-per-task", type=positive_int, help="examples (default: all)")
    add(
        "--bundle",
        help=f"zip of the task data (default: {BUNDLE}, fetched once)",
    )
    add("--data", help="packed rows of --panel val (default: the run's)")
    add(
        "--task",
        type=own_task,
        action="append",
        default=[],
        metavar=OWN_TASK,
        help="a task of your own, beside the panel and in no average but that of --panel own; KIND: "
        "mc, schema or lm; chance: accuracy of guessing (default: 0, no centring); may be "
        "given again",
    )
    add(
        "--baselines",
        default="v1",
        choices=["v1", "v2"],
        help="chance: the paper's, or DCLM's of 2025-09 (default: %(default)s)",
    )
    add(
        "--device",
        default="auto",
        choices=DEVICES,
        help="auto: an NVIDIA GPU or the CPU; mps, an Apple GPU, is untried",
    )
    args = p.parse_args()
    if args.panel == "own" and not args.task:
        p.error("--panel own needs a --task")
    args.seeds = args.seeds or PROTOCOLS[args.protocol]
    return args


def open_run(run, device):
    """-> (model, tokenizer, config); a tokenizer that is not the checkpoint's is refused."""
    # cuDNN's attention would make a plan for every new shape
    torch.backends.cuda.enable_cudnn_sdp(False)
    dtype = torch.float32 if device.type == "cpu" else None
    try:
        model, _, config = load_run(run, device, dtype)
    except (FileNotFoundError, ValueError) as e:
        fail(f"{e}; name a run with a checkpoint, made by this code")
    path = Path(run) / "tokenizer.json"
    if not path.is_file() or file_hash(path) != config["tokenizer"]["sha256"]:
        mend = f"copy {config['tokenizer']['path']} there, or import the weights again"
        fail(f"{path} is not there, or not the tokenizer of the checkpoint; {mend}")
    return model, load_tokenizer(path), config


def validation(model, config, folder, settings: Settings) -> dict:
    """Loss over all packed validation rows, with the initial states of the run's own evaluations
    -> {depth: record}.
    """
    data = PackedData(folder)
    if data.manifest["tokenizer_sha256"] != config["tokenizer"]["sha256"]:
        fail(f"{folder} has rows of another tokenizer; pack with the run's, and give --data ROWS")
    held_out = HeldOut(data, math.inf, settings.place.device)
    found = validate(model, held_out, settings.depths, 16, settings.place)
    records = {}
    for depth in settings.depths:
        score = {"name": "validation loss", "mean": found["loss"][depth], "std": None}
        score |= {"bpb": found["bpb"][depth], "tasks_done": 1, "tasks_total": 1}
        records[str(depth)] = {"aggregate": score}
    return records


def read_records(path: Path, header: dict) -> dict:
    """{depth: record} of the results that are there, if they were made in the same way."""
    if not path.is_file():
        return {}
    old = json.loads(path.read_text())
    return old["depths"] if header.items() <= old.items() else {}


def open_panel(args, place: Place) -> Panel:
    protocol = args.protocol
    if args.panel == "lambada":
        protocol = "lambada"
    elif protocol == "nanochat":
        protocol = "parcae"
    bundle = None
    if args.panel != "own":
        bundle = bundle_at(args.bundle, place.rank)
    panel = load_panel(bundle, args.panel, protocol, args.max_per_task, args.task)
    if panel.left_out:
        labels = ", ".join(panel.left_out)
        few = "no file, or no more examples than shots (--max-per-task)"
        place.say(f"{len(panel.left_out)} tasks left out ({few}): {labels}")
    return panel


def run_panel(model, enc, panel: Panel, path: Path, header: dict, settings: Settings) -> dict:
    """-> {depth: record}, with the tasks that an earlier start has finished. The file is written
    after each task.
    """
    place = settings.place
    records = read_records(path, header)
    known = set(panel.rows)
    for depth in settings.depths:
        record = records.setdefault(str(depth), {"tasks": {}})
        known &= record["tasks"].keys()
    if known:
        place.say(f"{len(known)} tasks are in {path} already")
    for label, found in evaluate(model, enc, panel, settings, known):
        for depth, entry in found.items():
            tasks = records[str(depth)]["tasks"]
            tasks[label] = entry
            records[str(depth)] = summarise(panel, tasks)
            place.say(describe(label, depth, entry))
        if place.rank == 0:
            write_json(path, header | {"depths": records})
    last = records[str(settings.depths[-1])]["tasks"]
    if mostly_cropped(panel, last, len(settings.seeds)):
        context = f"the model's context, {model.cfg.seq_len} tokens"
        place.say(f"nearly all prompts with shots are cut to {context}: chance is what to expect")
    return records


def mostly_cropped(panel: Panel, entries: dict, seeds: int) -> bool:
    """Whether more than nine in ten of the prompts with shots are longer than the model reads."""
    few = [entries[task.label] for task in panel.tasks if task.shots]
    asked = sum(entry["n"] for entry in few)
    cropped = sum(entry["cropped"] for entry in few)
    return cropped > 0.9 * asked * seeds


def describe_settings(args, model, config) -> dict:
    """What decides the results, beside the depth: they are continued only if it is the same."""
    names = ("panel", "protocol", "baselines", "max_per_task", "seeds")
    told = {name: getattr(args, name) for name in names}
    checkpoint = Path(args.run) / config["checkpoint"]
    told["checkpoint"] = f"{checkpoint.name} {file_hash(checkpoint)}"
    told["dtype"] = str(model.dtype).removeprefix("torch.")
    told["code"] = environment()["code"]  # an edit of model.py is evaluated anew
    return told


def main():
    args = parse_args()
    place = connect(args.device)
    model, enc, config = open_run(args.run, place.device)
    if args.depth and not model.cfg.n_core:
        fail("the model has no loop; leave --depth out")
    depths = args.depth or [model.cfg.mu_rec]
    settings = Settings(depths, args.seeds, place, args.baselines)
    path = Path(args.run) / f"core_{args.panel}_{args.protocol}.json"
    header = describe_settings(args, model, config)
    if args.panel == "val":
        folder = args.data or config["data"]["path"]
        records = validation(model, config, folder, settings)
        if place.rank == 0:
            write_json(path, header | {"depths": records})
    else:
        panel = open_panel(args, place)
        header["bundle_sha256"] = panel.sha256
        try:
            records = run_panel(model, enc, panel, path, header, settings)
        except NotFiniteError as e:
            fail(str(e))
    for depth in depths:
        score = records[str(depth)]["aggregate"]
        place.say(f"depth {depth}: {score['name']} {plus_minus(score)}")
    place.say(f"written: {path}")
    disconnect(place)


if __name__ == "__main__":
    main()
