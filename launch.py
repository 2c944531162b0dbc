"""
What happens before train.py's first step, and is no part of its story: rows where none are given, the
flags that have no meaning together, FLOPs, the device batch that fits, compiling, the weights to begin
with, what config.json and the screen say. Signals and parameters that do not learn, too.
"""

import contextlib
import dataclasses
import math
import shlex
import signal
import sys
import uuid
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import dataloader
import tokenizer_train
from dataloader import PackedData
from looped.common import fail, file_hash, note
from looped.depth import deepest, sample_depths, staircase
from looped.machine import Rank, environment
from looped.ops import hash_keys
from looped.randomness import FOR_STATE
from looped.run import newest_checkpoint
from model import Model, ModelConfig, load_run, parameter_count

DEVICE_BATCH = 32  # sequences at once, where memory allows
MAX_LOGITS = 1 << 31  # of a device at once; more were not tried on a GPU
COMPILE_STEPS = 1500  # from so many on, compiling, which takes minutes, pays on a CPU (LOG.md)
MUON_FLAGS = ("muon_lr", "momentum_warmup", "weight_decay")


def default_rows(cfg: ModelConfig, rank: Rank) -> str:
    """The folder of Python's own library as packed rows, which are made if they are not there."""
    folder = f"data/stdlib-v{cfg.vocab_size}"
    rows = f"{folder}/rows-{cfg.seq_len}-split"
    if rank.number == 0 and not Path(rows, "manifest.json").exists():
        tokenizer = f"{folder}/tokenizer.json"
        texts = ["--texts", "data/stdlib"]
        dataloader.main(["stdlib", "--out", "data/stdlib"])
        tokenizer_train.main([*texts, "--vocab-size", str(cfg.vocab_size), "--out", tokenizer])
        length = ["--seq-len", str(cfg.seq_len), "--long-docs", "split"]
        options = [*texts, "--tokenizer", tokenizer, *length, "--workers", "1"]
        dataloader.main(["pack", *options, "--out", rows])
    rank.barrier()
    return rows


def refuse_idle_flags(args, cfg: ModelConfig, optimizer: str) -> None:
    """Refuses a flag that has no effect, which a comparison would take hours to show."""

    def refuse(name: str, why: str):
        fail(f"--{name.replace('_', '-')} has no meaning {why}; leave it out")

    for field in dataclasses.fields(cfg):
        needs = field.metadata["needs"]
        if needs and getattr(args, field.name) is not None:
            if cfg.n_core == 0:
                refuse(field.name, "without a loop")
            if needs == "diagonal" and cfg.injection != "diagonal":
                refuse(field.name, f"with --injection {cfg.injection}")
    for name in MUON_FLAGS:
        if optimizer == "adamw" and getattr(args, name) is not None:
            refuse(name, "with --optimizer adamw")
    if args.flops and args.tokens:
        refuse("tokens", "with --flops")


# -------------------------------------------------------------------------------------------------
# FLOPs


class NoModules(contextlib.nullcontext):
    """In place of FlopCounterMode's tracker of modules, whose hooks refuse views made without gradient."""

    parents = ("Global",)


def loss_flops(cfg: ModelConfig, n: np.ndarray, k: np.ndarray) -> float:
    """FLOPs of `Model.loss` and its backward pass for sequences of n loops without gradient and k with it,
    (B,) each, counted as they run: all matrix products, in attention those of all pairs of tokens.
    """
    deepest_first = np.argsort(-(n + k), kind="stable")
    with torch.device("meta"):  # tensors with shapes and no numbers
        model = Model(cfg).to("meta")
        ids = torch.zeros(len(n), cfg.seq_len, dtype=torch.int64)
        keys = torch.zeros(len(n), dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = NoModules()
    with counter:
        loss, _ = model.loss(ids, ids, keys, n[deepest_first], k[deepest_first])
        loss.backward()
    return float(counter.get_total_flops())


def training_flops(cfg: ModelConfig, seed: int, batch: int, steps: int) -> float:
    """FLOPs of all forward and backward passes of a run: each sequence's depth is known beforehand, since it
    is a function of (seed, step, sequence).
    """
    depths = [sample_depths(cfg, seed, step, batch, step / steps) for step in range(steps)]
    pairs, counts = np.unique(np.hstack(depths), axis=1, return_counts=True)  # (2, pairs): n and k
    groups = [slice(None)]
    if len(np.unique(pairs[1, pairs[0] > 0])) > 1:
        # a law that changes with progress: sequences of all steps fit no common plan
        groups = [pairs[1] == k for k in np.unique(pairs[1])]
    flops = 0.0
    for group in groups:
        for unit in (1, 1 << 18):  # in digits, so that no count makes too large a batch
            digits = counts[group] // unit % (1 << 18)
            rows = np.repeat(pairs[:, group], digits, axis=1)
            if rows.size:
                flops += unit * loss_flops(cfg, *rows)
    return flops


def steps_for(flops: float, cfg: ModelConfig, seed: int, batch: int) -> int:
    """The fewest steps that take so many FLOPs."""
    one_loop = np.array([min(1, cfg.n_core)])
    least = batch * loss_flops(cfg, 0 * one_loop, one_loop)  # of a step
    low, high = 1, int(flops / least) + 2
    steps = high
    while low < high:
        taken = training_flops(cfg, seed, batch, steps)
        if taken >= flops:
            high = steps
        else:
            low = steps + 1
        in_proportion = round(steps * flops / taken)
        steps = max(low, min(in_proportion, high - 1))
    return low


# -------------------------------------------------------------------------------------------------
# Memory and compiling


def device_batch(batch: int, wanted: int | None, cfg: ModelConfig, rank: Rank) -> int:
    """Sequences at once: what is wanted, or the largest number up to DEVICE_BATCH that divides a rank's
    share of the batch and has at most MAX_LOGITS logits.
    """
    unit = rank.world * (wanted or 1)
    if batch % unit:
        more = math.ceil(batch / unit) * unit
        what = f"is not a multiple of ranks × device batch = {rank.world} × {wanted or 1}"
        fail(f"--batch-size {batch} {what}; try {more}")
    if wanted:
        return wanted
    share = batch // rank.world
    most = min(DEVICE_BATCH, MAX_LOGITS // (cfg.seq_len * cfg.vocab_size))
    fitting = [size for size in range(1, most + 1) if share % size == 0]
    return max(fitting, default=1)


def will_compile(choice: str, steps: int, rank: Rank) -> bool:
    if choice == "auto":
        return rank.is_gpu or (sys.platform == "linux" and steps >= COMPILE_STEPS)
    return choice == "on"


def try_deepest(model: Model, args, size: int, rank: Rank) -> None:
    """Forward and backward passes of depths as the law draws them, then of the deepest, and a validation's
    pass: compiles what is compiled, and takes the most memory that training will. On a GPU also of
    every number of active sequences, since cuDNN plans its attention for each: some 40 times 50 ms to a
    second, which else the first hundred steps pay one by one.
    """
    cfg = model.cfg
    tokens = torch.zeros(size, cfg.seq_len + 1, dtype=torch.int64, device=rank.device)
    ids = tokens[:, :-1]
    targets = tokens[:, 1:]
    keys = hash_keys(FOR_STATE, each=range(size), device=rank.device)
    n, k = sample_depths(cfg, args.seed, 0, size)
    order = np.argsort(-(n + k), kind="stable")
    batches = [(n[order], k[order]), deepest(cfg, size)]
    if rank.is_gpu:
        batches += staircase(cfg, size)
    for n, k in batches:
        loss, _ = model.loss(ids, targets, keys, n, k)
        loss.backward()
    model.losses(ids, targets, [cfg.mu_rec], keys)


@contextlib.contextmanager
def less_memory(rank: Rank):
    """Within, a GPU has 7 % less for torch: NCCL, cuDNN and kernels that load later need some, too."""
    if not rank.is_gpu:
        yield
        return
    share = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.set_per_process_memory_fraction(0.93 * share)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(share)


def lacks_memory(error: Exception) -> bool:
    """Whether it tells of a GPU's memory: Triton, cuBLAS and NCCL do not raise torch's own error."""
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "out of memory" in text
        or "ALLOC_FAILED" in text
    )


def warm_up(model: Model, optimizer, args, rank: Rank, compiled: bool) -> int:
    """Compiles, and halves the device batch until the deepest step fits on every rank -> sequences at once.

    What is to be done is decided by all ranks together. On a CPU, training goes on uncompiled where
    --compile auto fails; on a GPU that would cost half the speed, and the program ends.
    """
    size = args.device_batch_size
    if compiled:
        rank.say("compiling takes some minutes, less where torch's cache has these shapes")
        model.compile_pieces(for_cpu=not rank.is_gpu)
    while True:
        error = None
        try:
            with less_memory(rank):
                try_deepest(model, args, size, rank)
        except Exception as e:  # torch's compiler may raise anything
            error = e
        optimizer.zero_grad()
        if rank.all(error is None):
            return size
        if rank.all(error is None or lacks_memory(error)):
            size = halve(size, rank)
            continue
        if error is not None:
            text = str(error).strip().splitlines()
            print(f"rank {rank.number}: {type(error).__name__} {text[:1]}", file=sys.stderr)
        if not compiled or rank.is_gpu or args.compile != "auto":
            raise error or SystemExit("another rank failed")
        rank.say("training without torch.compile, which failed")
        model.uncompile()
        compiled = False


def halve(size: int, rank: Rank) -> int:
    """A device batch of at most half the size that divides it."""
    if size == 1:
        fail(
            "out of memory with one sequence at once; try --checkpoint-loops, or a smaller --preset"
        )
    smaller = max(d for d in range(1, size // 2 + 1) if size % d == 0)
    rank.say(f"out of memory with {size} sequences at once; trying {smaller}")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return smaller


# -------------------------------------------------------------------------------------------------
# The run


def run_config(args, cfg: ModelConfig, data: PackedData, rank: Rank) -> dict:
    """config.json: all that decides a run's numbers, and what it ran on."""
    network = dataclasses.asdict(cfg)
    flags = {name: value for name, value in vars(args).items() if name not in network}
    steps = flags.pop("steps")
    tokens = steps * args.batch_size * cfg.seq_len
    flops = training_flops(cfg, args.seed, args.batch_size, steps)
    tokenizer = str(data.folder / "tokenizer.json")
    return {
        "args": flags,
        "model": network,
        "params": parameter_count(cfg),
        "flops": flops,
        "flops_per_token": flops / tokens,
        "steps": steps,
        "tokenizer": {"path": tokenizer, "sha256": data.manifest["tokenizer_sha256"]},
        "data": {"path": str(data.folder), "sha256": data.sha256, "rows": data.rows("train")},
        "init_from": weights_of(args.init_from),
        "device": rank.device.type,
        "dtype": args.dtype,
        "ranks": rank.world,
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "id": uuid.uuid4().hex,
        **environment(),
    }


def weights_of(run: str | None) -> dict | None:
    """The checkpoint that --init-from begins with, by content."""
    if run is None:
        return None
    path = newest_checkpoint(run)
    if path is None:
        fail(f"--init-from {run} has no checkpoint (step_*.pt); name a run that has made one")
    return {"path": str(path), "sha256": file_hash(path)}


def begin_from(run: str, model: Model, data: PackedData, args) -> None:
    """Gives the model another run's newest weights."""
    other, config = load_run(run)
    if config["tokenizer"]["sha256"] != data.manifest["tokenizer_sha256"]:
        fail(
            f"--init-from {run} has another tokenizer than the rows; pack them with {run}/tokenizer.json"
        )
    try:
        model.load_state_dict(other.state_dict())
    except RuntimeError as e:
        fail(f"--init-from {run} is another model: {str(e).splitlines()[-1].strip()}")
    if config["data"]["sha256"] == data.sha256 and config["args"]["seed"] == args.seed:
        note(f"this run will see the same rows in the same order as {run} did; try another --seed")


def announce(config: dict, size: int, rank: Rank) -> None:
    """The first lines on the screen; size: sequences at once."""
    args = config["args"]
    steps = config["steps"]
    length = config["model"]["seq_len"]
    B = args["batch_size"]
    unique = config["data"]["rows"] * length
    times = steps * B * length / unique
    mflops = config["flops_per_token"] / 1e6
    say = rank.say
    say(f"run    {args['out']}, {args['preset']}, seed {args['seed']}")
    say(f"model  {config['params']:,} parameters, {mflops:,.1f} MFLOPs a token")
    say(f"data   {args['data']}: {unique:,} tokens, read {times:.2f} times")
    say(f"steps  {steps:,} of {B} × {length} tokens; {rank.world} × {size} sequences at once")
    say(f"on     {config['device']}, {torch.get_num_threads()} threads a process, {args['dtype']}")


@contextlib.contextmanager
def catch_signals():
    """Within, SIGTERM and SIGINT only append their number to the list that is yielded."""
    caught: list[int] = []
    before = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def parameter_sums(model: Model) -> dict:
    return {name: p.detach().double().sum() for name, p in model.named_parameters()}


def note_idle_parameters(model: Model, optimizer, first_sums: dict, rank: Rank) -> None:
    """Names the parameters that no gradient has reached, or that have not moved: an edit forgot them, or
    their rate is 0. Every rank calls it.
    """
    state = optimizer.state_dict()
    if rank.number:
        return
    moments = [tensors for name, tensors in state.items() if name != "steps"]
    sums = parameter_sums(model)
    for name, p in model.named_parameters():
        if p.requires_grad:
            reached = any(tensors[name].any() for tensors in moments if name in tensors)
            if not reached:
                note(f"{name} has had no gradient so far")
            elif sums[name] == first_sums[name]:
                note(f"{name} has not moved so far")
