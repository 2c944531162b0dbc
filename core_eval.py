"""CORE (22 tasks), CORE Extended (46), LAMBADA perplexity or validation loss of a run, any depth.

    python core_eval.py RUN                             # CORE as the paper and the post report it
    python core_eval.py RUN --panel core-extended --depth 1,2,4,8,16 --max-per-task 100
    python core_eval.py RUN --panel own --task mine.jsonl:mc,shots=0,chance=25  # a task of your own
    torchrun --standalone --nproc_per_node=8 core_eval.py RUN

A score is a function of (weights, data, seed, depth). The initial loop states are those of (seed,
task, example), the same for all options of an example; losses are float32. Rounding varies with the
batch and can flip near ties: different options whose mean losses are less than 1e-3 apart, or a
greedy token that leads by less than that. Their number, summed over seeds, is reported. Results:
core_<panel>_<protocol>.json in RUN; a file from other settings is kept as .json.old-… (except with
--panel val, which overwrites it). On a CPU float32 is used, else the run's own dtype.
Sources: CORE is DCLM's (arXiv 2406.11794); the protocols are Parcae's, nanochat's (the same, at
seed 1234), and llm-foundry's (dclm). looped/core_tasks.py has the tasks, core_prompts.py the rules.
"""

import functools
import itertools
import math
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from dataloader import PackedData
from looped.console import (
    DAMAGE,
    Parser,
    fail,
    flag,
    non_negative_ints,
    one_line,
    outside,
    positive_int,
    positive_ints,
    refuse,
    run_cli,
)
from looped.core_prompts import EncodedTask, Example, Option, encode_task
from looped.core_results import ODDITIES, describe, earlier, merge, save, summarise, task_entry
from looped.core_tasks import BUNDLE, OWN_TASK, PANELS, Panel, bundle_at, load_panel, own_task
from looped.depth import refuse_too_deep
from looped.files import file_hash, turn
from looped.machine import (
    DEVICES,
    ONE_PROCESS,
    Place,
    distributed,
    exact_products,
    leave,
    network_code,
    refuse_unlike,
    to_device,
)
from looped.ops import hash_keys
from looped.randomness import FOR_EVAL
from looped.tokenizer import load_tokenizer, token_bytes
from looped.validation import HeldOut, validate
from looped.workers import one_ahead
from model import load_run

# Whose rules, and the default seeds. nanochat's answers are Parcae's at its only seed.
PROTOCOLS = {"parcae": [1234, 2345, 3456], "nanochat": [1234], "dclm": [1234]}
WITHOUT_EFFECT = {  # flags, by panel or protocol
    "lambada": ("protocol", "baselines", "task"),  # it has rules of its own
    "own": ("baselines", "bundle"),
    "val": ("protocol", "baselines", "seeds", "max_per_task", "bundle", "task"),
    "nanochat": ("seeds",),
}
SHOT_SEED = 1234  # of dclm's shots, whatever --seeds
NEAR = 1e-3  # nats
BATCH_TOKENS = {"cpu": 1024, "mps": 65_536, "cuda": 65_536}
# of an example's result; answer: the option chosen, or of lm 0, and -1 where it is wrong; nats: the
# loss of an lm continuation, else the sum of the options' mean losses
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
    """x (s, D) normed states -> (3, s) of the tokens that come next: loss in nats, whether it is
    the greedy token, and its logit's lead over the best other one.
    """
    logits = model.head(x.float()).float()  # (s, V)
    loss = F.cross_entropy(logits, targets, reduction="none")
    greedy = logits.argmax(-1) == targets
    targets = targets[:, None]
    own = logits.gather(1, targets)[:, 0]
    others = logits.scatter_(1, targets, -math.inf).amax(1)
    return torch.stack([loss, greedy.float(), own - others])


def fill_batch(batch: list[list[Option]]) -> list[torch.Tensor]:
    """-> ids (B, T), and for the S scored tokens, row by row, option by option: the positions just
    before them in the flattened ids, and the tokens; int64, on the host.
    """
    fed = [torch.from_numpy(row[0].fed) for row in batch]
    ids = pad_sequence(fed, batch_first=True)
    at = []
    targets = []
    for b, row in enumerate(batch):
        for option in row:
            end = b * ids.shape[1] + len(option.fed)
            at.append(torch.arange(end - len(option.targets), end))
            targets.append(torch.from_numpy(option.targets))
    return [ids.long(), torch.cat(at), torch.cat(targets).long()]


@torch.inference_mode()
def score_batch(model, task, depths, seed, device, batch: list[list[Option]]):
    """-> (depths, 3, S): token_scores of the scored tokens, row by row, option by option. Right
    padding is inert, as all is causal.
    """
    examples = [row[0].example for row in batch]
    keys = hash_keys(seed, FOR_EVAL, task.index, each=examples)  # one for all options
    made = [*fill_batch(batch), keys]
    ids, at, targets, keys = [to_device(x, device) for x in made]
    found = []
    for _, h in model.states(ids, depths, keys):
        x = model.coda(h, ids).flatten(0, 1)[at]  # (S, D)
        pieces = zip(x.split(4096), targets.split(4096))
        parts = [token_scores(model, some, theirs) for some, theirs in pieces]
        found.append(torch.cat(parts, 1))
    return torch.stack(found)


def batches(rows: list[list[Option]], budget: int) -> list[list[list[Option]]]:
    """Rows of similar length, longest first, as many together as fill `budget` tokens."""
    found = []
    for row in sorted(rows, key=lambda row: -len(row[0].fed)):
        if not found or (len(found[-1]) + 1) * len(found[-1][0][0].fed) > budget:
            found.append([])
        found[-1].append(row)
    return found


def score_rows(model, work: EncodedTask, settings: Settings, seed) -> dict:
    """-> {option: (depths, 3, s), token_scores of its tokens}; nothing scored has s = 0."""
    device = settings.place.device
    groups = batches(work.rows, BATCH_TOKENS[device.type])
    score = functools.partial(score_batch, model, work.task, settings.depths, seed, device)
    with exact_products(device) as threads, ThreadPoolExecutor(threads) as pool:
        run = pool.map if device.type == "cpu" else map
        parts = list(run(score, groups))
    scores = defaultdict(functools.partial(torch.empty, len(settings.depths), 3, 0))
    for group, part in zip(groups, parts):
        options = list(itertools.chain(*group))
        sizes = [len(option.targets) for option in options]
        scores |= zip(options, part.cpu().split(sizes, -1))
    return scores


def decide_lm(example: Example, scores: dict, at: int) -> dict:
    """At the depth of that place: right if every scored token is the greedy one, or none is scored."""
    if not example.options:
        return {"answer": -1}
    loss, greedy, lead = scores[example.options[0]][at]
    near = abs(min(lead.tolist(), default=math.inf)) < NEAR
    answer = 0 if greedy.all() else -1
    return {"answer": answer, "nats": loss.double().sum().item(), "near_ties": near}


def decide(example: Example, scores: dict, at: int, protocol) -> dict:
    """The option of least mean loss, of equals the first. The mean of an empty span is NaN, which
    Python's min keeps where it comes first and passes over elsewhere. dclm compares exp(loss) in
    float32, where losses that differ may be equal.
    """
    means = {option: scores[option][at, 0].mean().item() for option in example.options}
    values = [means[option] for option in example.options]
    if protocol == "dclm":
        values = torch.tensor(values).exp().tolist()
    ranked = sorted(means[option] for option in means if len(option.targets))
    near = len(ranked) > 1 and ranked[1] - ranked[0] < NEAR
    return {"answer": values.index(min(values)), "nats": sum(ranked), "near_ties": near}


class NotFiniteError(ValueError):
    """The model's answer is no number: training diverged, or the depth is too large."""


def run_task(model, work: EncodedTask, settings: Settings, seed) -> dict[int, dict]:
    """A task with one seed -> {depth: {column: (n,) float64}}, the same on every rank.

    Raises NotFiniteError on every rank if a loss on any rank is not finite.
    """
    place = settings.place
    scores = score_rows(model, work, settings, seed)
    table = np.zeros((len(settings.depths), len(COLUMNS), len(work.groups)))
    for at in range(len(settings.depths)):
        for example in work.examples:
            if work.task.kind == "lm":
                found = decide_lm(example, scores, at)
            else:
                found = decide(example, scores, at, work.protocol)
            found["correct"] = found["answer"] == example.gold
            found |= dict.fromkeys(example.odd, 1)
            for name, value in found.items():
                table[at, COLUMNS.index(name), example.number] = value
    if place.world > 1:
        told = torch.from_numpy(table).to(place.device)
        dist.all_reduce(told)
        table = told.cpu().numpy()
    results = {}
    for depth, of_depth in zip(settings.depths, table):
        if not np.isfinite(of_depth).all():
            why = "training diverged, or that is too deep"
            raise NotFiniteError(f"the model's answer at depth {depth} is not finite: {why}")
        results[depth] = dict(zip(COLUMNS, of_depth))
    return results


def evaluate(model, enc, panel: Panel, settings: Settings, known=()):
    """Scores the tasks of a panel but those whose labels are known: yields (label, {depth: entry})
    of each. Every rank calls it. The next task is rendered and tokenised while one runs.
    """
    model = model.uncompiled()
    dclm = panel.protocol == "dclm"

    def encode(task):
        where = model.cfg.seq_len, settings.place
        if task.shots and not dclm:
            return [encode_task(task, panel, seed, enc, *where) for seed in settings.seeds]
        return [encode_task(task, panel, SHOT_SEED, enc, *where)] * len(settings.seeds)

    todo = [task for task in panel.tasks if task.label in panel.rows and task.label not in known]
    for works in one_ahead(encode, todo):
        found = {depth: {} for depth in settings.depths}
        results = {}
        for seed, work in zip(settings.seeds, works):
            # without a loop no state is random: the same shots give the same answers
            if model.cfg.n_core or not results or work is not works[0]:
                results = run_task(model, work, settings, seed)
            for depth, result in results.items():
                found[depth][str(seed)] = result
        entries = {}
        for depth, of_depth in found.items():
            entries[depth] = task_entry(work, of_depth, settings.baselines)
        yield work.task.label, entries


def quick_score(model, enc, panel: Panel, place: Place) -> dict:
    """The panel's average at mu_rec with one seed, for train.py. NotFiniteError: there is none."""
    depth = model.cfg.mu_rec
    settings = Settings([depth], [1234], place)
    entries = {}
    for label, found in evaluate(model, enc, panel, settings):
        entries[label] = found[depth]
    return summarise(panel, entries)["aggregate"]


# -- the program -----------------------------------------------------------------------------------


def parse_args():
    p = Parser(description=__doc__, allow_abbrev=False)
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
        choices=list(PROTOCOLS),
        help="whose rules; nanochat: parcae's at seed 1234 (default: parcae)",
    )
    add(
        "--depth",
        type=positive_ints,
        help="loops, one or several between commas (default: the run's mu_rec)",
    )
    add(
        "--seeds",
        type=non_negative_ints,
        help="of shots and initial states (default: parcae 1234,2345,3456; others 1234)",
    )
    add("--max-per-task", type=positive_int, help="examples (default: all)")
    add(
        "--bundle",
        help=f"zip or folder of the task data (default: {BUNDLE}, fetched once)",
    )
    add(
        "--task",
        type=own_task,
        action="append",
        default=[],
        metavar=OWN_TASK,
        help="a task of your own, beside the panel and in no average but that of --panel own; KIND: "
        "mc, schema or lm; chance: of guessing (default: 0, and centred is the accuracy); may be "
        "given again",
    )
    add(
        "--baselines",
        choices=["v1", "v2"],
        help="chance: the paper's, or DCLM's of 2025-09 (default: v1)",
    )
    add(
        "--device",
        default="auto",
        choices=DEVICES,
        help="auto: an NVIDIA GPU or the CPU; mps, an Apple GPU, is untried",
    )
    args = p.parse_args()
    for choice in (args.panel, args.protocol):
        for name in WITHOUT_EFFECT.get(choice, ()):
            if getattr(args, name):
                refuse(f"{flag(name)} has no effect on {choice}; leave it out")
    if args.panel == "own" and not args.task:
        refuse("--panel own needs a --task; give one, or leave --panel out")
    args.protocol = args.protocol or "parcae"
    args.baselines = args.baselines or "v1"
    args.seeds = args.seeds or PROTOCOLS[args.protocol]
    return args


def open_run(run, device):
    """-> (model, tokenizer, config); a tokenizer that is not the checkpoint's is refused."""
    path = Path(run) / "tokenizer.json"
    # cuDNN's attention would make a plan for every new shape
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        model, _, config = load_run(run, device, torch.float32 if device.type == "cpu" else None)
        known = config["tokenizer"]["sha256"]
        source = config["tokenizer"]["path"]
    except (FileNotFoundError, RuntimeError, *DAMAGE) as e:
        # maybe on this rank alone: a run in training removes older checkpoints
        fail(f"{run}: {one_line(e)}; name a run with a checkpoint, made by this code")
    if not path.is_file() or file_hash(path) != known:
        mend = f"copy {source} there, or import the weights again"
        refuse(f"{path} is not there, or not the tokenizer of the checkpoint; {mend}")
    return model, load_tokenizer(path), config


def validation(model, enc, config, settings: Settings) -> dict:
    """Loss over all packed validation rows, with the initial states of the run's own evaluations
    -> {depth: record}.
    """
    with outside("the run's config.json names no rows", "restore it, or import the weights again"):
        folder = Path(config["data"]["path"])
        known = config["data"].get("sha256")
    data = PackedData(folder)
    of_run = data.manifest["tokenizer_sha256"] == config["tokenizer"]["sha256"]
    if not of_run or data.seq_len > model.cfg.seq_len:
        refuse(
            f"{data.folder} does not fit the run; pack it with its tokenizer.json, "
            f"--seq-len {model.cfg.seq_len}"
        )
    if known not in (None, data.sha256()):
        refuse(f"{data.folder} holds other rows than those of the run; pack those again")
    rank, world, device = settings.place
    sizes = torch.from_numpy(token_bytes(enc)).to(device)
    held_out = HeldOut(data, sizes, math.inf)
    found = validate(model, held_out, settings.depths, 16, rank, world)
    records = {}
    for depth, loss, bpb in zip(settings.depths, found["loss"].values(), found["bpb"].values()):
        if not math.isfinite(loss):
            refuse(f"the loss at depth {depth} is {loss}: training diverged, or that is too deep")
        score = {"name": "validation loss", "tasks_done": 1, "tasks_total": 1}
        score |= {"mean": loss, "std": 0.0, "bpb": bpb}
        records[depth] = {"aggregate": score, "tasks": {}}
    return records


def tasks_done(kept: dict, panel: Panel, settings: Settings) -> set[str]:
    """Labels of the tasks that an earlier start has evaluated at all depths; rank 0 knows them from
    its {depth: {label: entry}}, and shows them.
    """
    labels = [set(kept.get(depth, ())) for depth in settings.depths]
    done = [set.intersection(*labels)]
    for task in panel.tasks:
        if task.label in done[0]:
            entry = kept[settings.depths[-1]][task.label]
            print(describe(task.label, entry), "(kept)", flush=True)
    if settings.place.world > 1:
        dist.broadcast_object_list(done)
    return done[0]


def run_panel(args, model, enc, path, header: dict, settings: Settings) -> dict:
    """-> {depth: record}, on rank 0. What an earlier start has finished is kept; every task is
    saved when it is done.
    """
    place = settings.place
    protocol = "parcae" if args.protocol == "nanochat" else args.protocol
    if args.panel == "lambada":
        protocol = "lambada"
    bundle = bundle_at(args.bundle, place.rank) if args.panel != "own" else None
    panel = load_panel(bundle, args.panel, protocol, args.max_per_task, args.task)
    for label, why in panel.missing.items():
        place.say(f"left out: {label}: {why}")
    refuse_unlike({"bundle": panel.sha256}, place)  # it may be at another path
    header |= {"bundle_sha256": panel.sha256, "missing": panel.missing}
    kept = earlier(path, header) if place.rank == 0 else {}
    done = tasks_done(kept, panel, settings)
    try:
        for label, found in evaluate(model, enc, panel, settings, done):
            place.say(describe(label, found[settings.depths[-1]]))
            if place.rank == 0:
                for depth, entry in found.items():
                    kept.setdefault(depth, {})[label] = entry
                merge(path, header, panel, kept)
    except NotFiniteError as e:
        refuse(str(e))
    return merge(path, header, panel, kept) if place.rank == 0 else {}


def main():
    args = parse_args()
    place = distributed(args.device)
    model, enc, config = open_run(args.run, place.device)
    if args.depth and not model.cfg.n_core:
        refuse("the model has no loop; leave --depth out")
    depths = args.depth or [model.cfg.mu_rec]  # 0 without a loop
    refuse_too_deep("--depth", depths)
    settings = Settings(depths, args.seeds, place, args.baselines)
    path = Path(args.run) / f"core_{args.panel}_{args.protocol}.json"
    checkpoint = Path(args.run) / config["checkpoint"]
    told = ("panel", "protocol", "baselines", "max_per_task", "seeds")
    header = {name: getattr(args, name) for name in told}
    header["dtype"] = str(model.dtype)[6:]
    header["network_code"] = network_code()  # an edit of model.py is evaluated anew
    header["checkpoint"] = f"{checkpoint.name} {file_hash(checkpoint)}"
    own = [task.label for task in args.task]
    # a run in training may have got a newer checkpoint between two ranks
    refuse_unlike(header | {"depth": depths, "task": own}, place)
    header["command"] = " ".join(sys.argv)
    header["date"] = datetime.now().isoformat(timespec="seconds")
    if args.panel == "val":
        records = validation(model, enc, config, settings)
        if place.rank == 0:
            with turn(path):
                save(path, header, records)
    else:
        records = run_panel(args, model, enc, path, header, settings)
    if place.rank == 0:
        for depth in depths:
            score = "{name} {mean:.4f} ± {std:.4f}".format(**records[depth]["aggregate"])
            print(f"depth {depth}: {score}")
        print(f"written: {path}")
    leave(place)


if __name__ == "__main__":
    run_cli(main)
