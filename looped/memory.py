"""
The memory that a training step takes: predicted, tried before the first step, and made to fit.

B rows, T tokens a row, D width, V vocabulary; a "block application" is one block run once, with
gradient unless said otherwise. The formula was fitted to the peaks that torch's allocator saw
beside a stand-in for the GPU's driver, which runs no kernel (results/rehearsal.md), and agrees with
them within 10 % (tests/test_gpu.py). What --mechanism keeps on top, up to 12 %, is left out.
"""

import gc
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.distributed as dist

from looped.console import fail
from looped.depth import deepest
from looped.machine import Place
from looped.randomness import SEED_STATE, sequence_keys

GIB = 2**30
HEADROOM = 0.08  # of the free memory: fragments of the allocator, what libraries take later
CHUNK = 8192  # tokens whose logits exist at once on a GPU that cannot hold all
CPU_CHUNK = 256

# Numbers that a block application keeps for the backward pass, per token: the first constant
# times D for norms, attention and residuals, the second times the MLP's width (relu²: its
# argument and its value; SwiGLU: both factors and their product).
KEPT_BESIDE_MLP = 11.2
KEPT_OF_MLP = {"relu2": 2.0, "swiglu": 3.0}
INTO_MLP = {"relu2": 1, "swiglu": 2}  # matrices
# The same where less is kept (keep_less).
LESS_BESIDE_MLP = 7.1
LESS_OF_MLP = {"relu2": 1.0, "swiglu": 2.0}
# If a device batch of at most this many tokens does not fit, it is tried with less kept for the
# backward pass before a smaller one is tried; larger batches are made smaller at once.
FEW_TOKENS = 16_384
ROUNDING = 1.02  # what the allocator rounds up, and small buffers
# Bytes of a logit where nothing is compiled. All at once: log-probabilities and two gradients in
# float32; of a chunk: the logits, and in float32 their copy, the probabilities and what these
# become.
EAGER_LOGIT = 12
EAGER_CHUNK_LOGIT = 13


# -------------------------------------------------------------------------------------------------
# Prediction


@dataclass(frozen=True)
class Step:
    """What decides a step's memory beside the network."""

    rows: int  # at once
    optimizer: str = "muon"
    world: int = 1
    number_bytes: int = 2  # of an activation: 2 in bfloat16, 4 in float32
    loss_chunk: int = 0
    checkpoint_loops: bool = False
    compiled: bool = True
    keep_less: bool = False  # only where compiled
    residual_bytes: int = 0  # of a number of the residual stream; 0: as an activation's


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, by part."""

    static: float  # weights, gradients and the optimiser's state
    activations: float  # and logits, at the start of the backward pass
    update: float  # temporary tensors of the optimiser's step, when the activations are gone

    def peak(self) -> float:
        return self.static + max(self.activations, self.update)


@dataclass(frozen=True)
class MatrixStack:
    """Matrices of one shape, which Muon updates together; on several ranks a third at a time."""

    count: int
    rows: int
    columns: int

    def numbers(self) -> int:
        return self.count * self.rows * self.columns


def of_mlp(table: dict, cfg):
    """The table's entry for the network's MLP; for an MLP that it does not list, the largest."""
    return table.get(cfg.mlp, max(table.values()))


def matrix_stacks(cfg) -> list[MatrixStack]:
    """The blocks' matrices by shape: attention's; into the MLP's width; and out of it."""
    layers = cfg.n_layer()
    into_mlp = of_mlp(INTO_MLP, cfg)
    return [
        MatrixStack(4 * layers, cfg.d_model, cfg.d_model),
        MatrixStack(into_mlp * layers, cfg.d_mlp, cfg.d_model),
        MatrixStack(layers, cfg.d_model, cfg.d_mlp),
    ]


def other_parameters(cfg) -> int:
    """Numbers in the tables and in the loop's own matrices; vectors and gates are left out."""
    tables = (1 + len(cfg.value_layers())) * cfg.vocab_size * cfg.d_model
    squares = {"diagonal": int(cfg.input_matrix), "concat": 2}.get(cfg.injection, 0) + cfg.readout
    return tables + (cfg.d_model**2 * squares if cfg.n_core else 0)


def predict_memory(cfg, step: Step) -> Memory:
    """The peak by part, at the deepest depth to be expected.

    Every device keeps all weights and gradients in float32, its part of the two moments and, with
    several devices, a buffer for that part of the reduced gradient. Muon's second moment is one
    number a row or column: left out.
    """
    # Copies of AdamW's largest buffer, a table. Compiled: one, the gradient's square for its norm;
    # else three, its steps; two more with update clipping. Of Muon's largest buffer: four.
    copies = 1 if step.compiled else 3
    if step.optimizer == "adamw":
        copies += 2
    update = copies * cfg.vocab_size * cfg.d_model
    by_muon = 0
    by_adamw = other_parameters(cfg)
    for stack in matrix_stacks(cfg):
        if step.optimizer != "muon":
            by_adamw += stack.numbers()
            continue
        # padded, so that every device owns equally many matrices; updated in thirds: muon.py (small
        # stacks whole, which is a few MB)
        own = math.ceil(stack.count / step.world)
        at_once = math.ceil(own / 3) if step.world > 1 else own
        row_of_ranks = step.world * stack.rows * stack.columns  # a matrix of each
        by_muon += own * row_of_ranks
        update = max(update, 4.15 * (at_once * row_of_ranks))
    parameters = by_adamw + by_muon
    state = parameters + by_adamw + (parameters if step.world > 1 else 0)
    return Memory(
        static=ROUNDING * (4.0 * parameters + 4.0 * parameters + 4.0 * state / step.world),
        activations=activation_bytes(cfg, step) + logit_bytes(cfg, step),
        update=4.0 * update / step.world,
    )


def activation_bytes(cfg, step: Step) -> float:
    """Bytes alive at the start of the backward pass, logits left out."""
    _, k = deepest(cfg, 1)
    loops = int(k[0])  # with gradient
    block = KEPT_BESIDE_MLP * cfg.d_model + of_mlp(KEPT_OF_MLP, cfg) * cfg.d_mlp
    if step.keep_less:
        block = LESS_BESIDE_MLP * cfg.d_model + of_mlp(LESS_OF_MLP, cfg) * cfg.d_mlp
    ends = cfg.n_prelude + cfg.n_coda
    blocks = ends + cfg.n_core * loops
    starts = 0
    if step.checkpoint_loops and loops:
        blocks = max(ends, cfg.n_prelude + cfg.n_core)
        starts = 2 * cfg.d_model * loops  # what a recomputed loop starts from
    tokens = step.rows * cfg.seq_len
    kept = step.number_bytes * tokens * (starts + block * blocks)
    if step.residual_bytes > step.number_bytes:
        # what the two norms of a block, a loop's decay, the readout and the last norm read
        residual = cfg.d_model * (2 * blocks + loops + 2)
        kept += (step.residual_bytes - step.number_bytes) * tokens * residual
    if step.number_bytes == 4:
        return kept
    # copies of the weights: one of the core's for all loops; uncompiled, one for every other use
    once = 0 if step.checkpoint_loops else cfg.n_core
    if step.compiled:
        copies = once * cfg.block_matmul()
    else:
        layers = blocks - once * (loops - 1)
        copies = layers * cfg.block_matmul() + cfg.vocab_size * cfg.d_model
    return kept + step.number_bytes * copies


def logit_bytes(cfg, step: Step) -> float:
    """Bytes of a micro-batch's logits; or of a chunk's, its probabilities and head gradient."""
    tokens = step.rows * cfg.seq_len
    if step.loss_chunk == 0:
        each = step.number_bytes if step.compiled else EAGER_LOGIT
        return float(each * tokens * cfg.vocab_size)
    chunk = min(step.loss_chunk, tokens)
    each = 4 + step.number_bytes if step.compiled else EAGER_CHUNK_LOGIT
    return float(each * chunk * cfg.vocab_size + 4 * cfg.vocab_size * cfg.d_model)


# -------------------------------------------------------------------------------------------------
# Fitting


def device_batches(most: int, batch: int, world: int) -> list[int]:
    """Device batches up to `most` that divide each rank's share of the batch, the largest first."""
    return [rows for rows in range(most, 0, -1) if batch % (world * rows) == 0]


def less_memory(rows: int, batch: int, world: int) -> str:
    """What to type where a device batch does not fit."""
    smaller = device_batches(rows // 2, batch, world)
    if smaller:
        return f"try --device-batch-size {smaller[0]}"
    return "try --checkpoint-loops, if the model has a loop, or a smaller --preset"


@dataclass
class MemoryFit:
    """What is held at once, and what finding it took."""

    step: Step
    peak: float  # GiB on a GPU, at the deepest depth to be expected; elsewhere 0
    seconds: float  # with all compiling


def check_memory(cfg, optimizer: str, place: Place) -> None:
    """Ends the program where a GPU could not even hold weights, gradients and their moments."""
    if not place.is_gpu:
        return
    need = predict_memory(cfg, Step(1, optimizer, place.world)).static
    free = free_memory(place)
    if need > free:
        fail(
            f"the model does not fit the GPU's memory: {free / GIB:.1f} GiB are free, and its weights, "
            f"gradients and optimiser state alone need some {need / GIB:.1f}; try more GPUs or a "
            "smaller --preset"
        )


def fit_memory(model, optimizer, args, place: Place, rows_given: bool) -> MemoryFit:
    """Settles device batch and loss chunk: what the user gave, or what fits on all ranks.

    The first try is the largest that is predicted to fit; a try runs the warm-up, which must leave
    HEADROOM free.
    """
    started = time.perf_counter()
    if model.is_compiled:
        place.say("compiling: some minutes, much less where torch's cache has these shapes")
    steps = possible_steps(model, optimizer, args, place, rows_given)
    room = math.inf
    if place.is_gpu:
        room = usable_memory(free_memory(place))
        total = torch.cuda.get_device_properties(place.device).total_memory
        # what would leave less than HEADROOM free raises OutOfMemoryError
        torch.cuda.set_per_process_memory_fraction(min(room / total, 1.0), place.device)
        while len(steps) > 1 and predict_memory(model.cfg, steps[0]).peak() > room:
            steps.pop(0)
    for step in steps:
        model.loss_chunk = step.loss_chunk
        peak = 0.0
        if model.is_compiled or place.device.type != "cpu":
            peak = try_step(model, optimizer, step, place)
        if peak is not None:
            break
    else:
        need = predict_memory(model.cfg, step).peak()
        fail(
            f"--device-batch-size {step.rows} does not fit the GPU's memory: {room / GIB:.1f} GiB "
            f"may be taken, and the deepest depth needs some {need / GIB:.1f}; "
            f"{less_memory(step.rows, args.batch_size, place.world)}"
        )
    if place.is_gpu:
        torch.cuda.set_per_process_memory_fraction(1.0, place.device)
    return MemoryFit(step, peak, time.perf_counter() - started)


def possible_steps(model, optimizer, args, place: Place, rows_given: bool) -> list[Step]:
    """What may be tried, the best first."""
    counts = [args.device_batch_size]
    if not rows_given:
        counts = device_batches(args.device_batch_size, args.batch_size, place.world)
    chunks = [0, CHUNK] if place.is_gpu else [CPU_CHUNK]
    if args.loss_chunk is not None:
        chunks = [args.loss_chunk]
    base = Step(
        rows=args.device_batch_size,
        optimizer="muon" if any(rule.stacked for rule, _ in optimizer.buffers) else "adamw",
        world=place.world,
        number_bytes=model.dtype.itemsize,
        checkpoint_loops=model.checkpoint_loops,
        compiled=model.is_compiled,
        residual_bytes=(model.residual_dtype or model.dtype).itemsize,
    )
    less_up_to = 0
    if place.is_gpu and model.is_compiled:
        less_up_to = math.inf if rows_given else FEW_TOKENS
    return steps_to_try(model.cfg, base, counts, chunks, less_up_to)


def steps_to_try(cfg, base: Step, counts: list, chunks: list, less_up_to: float) -> list[Step]:
    """Steps of so many rows, each with the first loss chunk, then with those that take less memory.

    Those of at most `less_up_to` tokens at once are tried once more with less kept for the backward
    pass. That costs less time than half as many rows would: with few tokens, the work done once a
    micro-batch, casting weights and summing their gradients, takes a large part of a step
    (parcae-1.3b: some 23 GB of kernels' tensors, plus 17 GB a row).
    """
    steps = []
    for count, less, chunk in product(counts, (False, True), chunks):
        first = replace(base, rows=count, keep_less=less, loss_chunk=chunks[0])
        step = replace(first, loss_chunk=chunk)
        # a chunk's own buffers may be larger than the logits of a few rows
        smaller = step == first or logit_bytes(cfg, step) < logit_bytes(cfg, first)
        if smaller and not (less and count * cfg.seq_len > less_up_to):
            steps.append(step)
    return steps


def free_memory(place: Place) -> float:
    """Bytes that this program can have on the GPU that has the least, its own cache included."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(place.device)
    free += torch.cuda.memory_reserved(place.device)
    return least(float(free), place)


def least(value: float, place: Place) -> float:
    """The least of the ranks' values."""
    if place.world == 1:
        return value
    shared = torch.tensor(value, device=place.device)
    dist.all_reduce(shared, dist.ReduceOp.MIN)
    return shared.item()


def usable_memory(free: float) -> float:
    """Bytes that training may take of what is free."""
    return (1 - HEADROOM) * free


def keep_less(less: bool) -> None:
    """Whether graphs compiled from now on keep less for the backward pass.

    The backward pass then recomputes what is elementwise; otherwise torch's partitioner keeps what
    that pass reads as a matrix, such as relu² of the MLP's product. No product is made twice. Every
    rank must make the same choice, before anything is compiled or after torch._dynamo.reset().
    """
    from torch._functorch import config

    config.ban_recompute_materialized_backward = not less


def try_step(model, optimizer, step: Step, place: Place) -> float | None:
    """The warm-up's peak, GiB on a GPU; None where it did not fit on every rank."""
    if model.is_compiled:
        keep_less(step.keep_less)
    if place.is_gpu:
        torch.cuda.reset_peak_memory_stats(place.device)
    fits = succeeds(partial(warm_up, model, step.rows, place), optimizer, place)
    if fits and place.world == 1:
        fits = succeeds(optimizer.rehearse, optimizer, place)
    elif fits:  # the ranks wait for each other in it, so one that lacks memory must end the run
        optimizer.rehearse()
    if not fits:
        if model.is_compiled:
            # else the next try's rows would share a slower graph for any number of rows
            torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        return None
    if not place.is_gpu:
        return 0.0
    peak = torch.cuda.max_memory_allocated(place.device) / GIB
    torch.cuda.reset_peak_memory_stats(place.device)  # training's own peak is logged
    return peak


def succeeds(part, optimizer, place: Place) -> bool:
    """Whether part() finds memory on every rank."""
    fits = 1.0
    try:
        part()
    except torch.OutOfMemoryError:
        fits = 0.0
    optimizer.zero_grad()
    return least(fits, place) > 0


def warm_up(model, rows: int, place: Place) -> None:
    """Compiles all graphs of training and validation, and takes the most memory that they do.

    The order matters, since a graph is made for the first sizes that it sees: all rows alike; rows
    that leave one by one, then rows that join one by one, which gives several rows and one; on a
    GPU, all rows as deep as one draw in ten million; last, a batch without gradient.
    """
    cfg = model.cfg
    tokens = torch.zeros(rows, cfg.seq_len + 1, dtype=torch.int64, device=place.device)
    keys = sequence_keys(SEED_STATE, each=range(rows), device=place.device)
    ids = tokens[:, :-1]
    targets = tokens[:, 1:]
    for n, k in warm_up_depths(cfg, rows, place.is_gpu):
        if cfg.granularity == "token":  # a row's tokens are as deep as the row
            n = np.repeat(n[:, None], cfg.seq_len, axis=1)
            k = np.repeat(k[:, None], cfg.seq_len, axis=1)
        loss, _ = model.loss(ids, targets, keys, n, k)
        loss.backward()
    model.losses(ids, targets, [cfg.mu_rec], keys)


def warm_up_depths(cfg, rows: int, deep: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Loops without and with gradient, (n, k), of the warm-up's batches."""
    none = np.zeros(rows, np.int64)
    if cfg.n_core == 0:
        return [(none, none)]
    ones = np.ones(rows, np.int64)
    ragged = ones.copy()
    ragged[0] = 3
    ragged[1:2] = 2
    depths = [(ones, ones), (ragged, ones), (none, ragged)]
    if deep:
        depths.append(deepest(cfg, rows))
    return depths
