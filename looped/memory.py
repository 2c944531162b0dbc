"""
The memory that a training step takes: predicted, tried before the first step, and made to fit.

The prediction is for compiled steps in bfloat16, as GPUs take them. It was fitted to the peaks that
torch's allocator saw beside a stand-in for the GPU's driver, which runs no kernel
(results/rehearsal.md), and agrees with them within 10 % (tests/test_gpu.py). What --mechanism keeps
on top, up to 12 %, is left out. Other steps are tried from what is predicted for these.
"""

import gc
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from looped.console import fail, note, refuse
from looped.depth import deepest
from looped.machine import Place
from looped.ops import hash_keys
from looped.randomness import FOR_STATE

GIB = 2**30
DEVICE_BATCH = 32  # sequences, where memory allows and nothing else is asked for
HEADROOM = 0.08  # of the free memory: fragments of the allocator, what libraries take later
CHUNK = 8192  # tokens whose logits exist at once on a GPU that cannot hold all
CPU_CHUNK = 256
# Of more tokens than this at once the logits may be taken in chunks, whose own buffers are larger
# than the logits of fewer. Of fewer, less may be kept for the backward pass (keep_less), which
# costs less time than half as many rows would: the work done once a micro-batch, casting weights
# and summing their gradients, is then a large part of a step.
FEW_TOKENS = 16_384


# -------------------------------------------------------------------------------------------------
# Prediction


@dataclass(frozen=True)
class Step:
    """What decides a step's memory beside the network."""

    rows: int  # at once
    optimizer: str = "muon"
    world: int = 1
    loss_chunk: int = 0
    checkpoint_loops: bool = False
    keep_less: bool = False


def predict_memory(cfg, step: Step) -> float:
    """Peak bytes of one device: at the start of the backward pass, at the deepest depth to be
    expected, or in the update.
    """
    backward = activation_bytes(cfg, step) + logit_bytes(cfg, step)
    update = 0.0
    if step.optimizer == "muon":
        stack = 4 * cfg.n_layer() * cfg.d_model**2  # attention's matrices, updated all at once
        update = 4.15 * 4 * stack / step.world  # copies, in float32
    return static_bytes(cfg, step.optimizer, step.world) + max(backward, update)


def static_bytes(cfg, optimizer: str, world: int) -> float:
    """Bytes of weights, gradients and the optimiser's state, in float32; vectors are left out.

    Every device keeps all weights and gradients, its part of the moments and, with several devices,
    a buffer for that part of the reduced gradient. Left out: Muon's second moment, one number a
    row, and what pads its stacks on several devices, up to 7 % on eight.
    """
    tables = (1 + len(cfg.value_layers())) * cfg.vocab_size * cfg.d_model
    parameters = tables + cfg.n_layer() * cfg.block_matmul()
    shared = parameters + (tables if optimizer == "muon" else parameters)
    if world > 1:
        shared += parameters
    return 1.03 * 4 * (2 * parameters + shared / world)  # what the allocator rounds up


def activation_bytes(cfg, step: Step) -> float:
    """Bytes alive at the start of the backward pass, logits left out."""
    _, k = deepest(cfg, 1)
    loops = int(k[0])  # with gradient
    # numbers that a block keeps per token: of norms, attention and residuals, and of the MLP, whose
    # width counts once for each of its matrices
    width = cfg.d_model
    mlp = cfg.block_matmul() / width - 4 * width
    block = 11.2 * width + mlp
    if step.keep_less:
        block = 7.1 * width + mlp - cfg.d_mlp
    ends = cfg.n_prelude + cfg.n_coda
    kept = block * (ends + cfg.n_core * loops)
    copies = cfg.n_core * cfg.block_matmul()  # of the core's weights, for all loops
    if step.checkpoint_loops and loops:
        starts = 2 * width * loops  # what a recomputed loop starts from
        kept = starts + block * max(ends, cfg.n_prelude + cfg.n_core)
        copies = 0
    return 2.0 * (step.rows * cfg.seq_len * kept + copies)


def logit_bytes(cfg, step: Step) -> float:
    """Bytes of a micro-batch's logits; or of a chunk's, its probabilities and head gradient."""
    tokens = step.rows * cfg.seq_len
    if step.loss_chunk == 0:
        return 2.0 * tokens * cfg.vocab_size
    chunk = min(step.loss_chunk, tokens)
    return cfg.vocab_size * (6.0 * chunk + 4.0 * cfg.d_model)


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


def steps_to_try(
    cfg, base: Step, batch: int, rows=None, chunks=(0, CHUNK), less=True
) -> list[Step]:
    """Steps of so many rows, or else of each device batch, the best first, with each loss chunk.

    less: whether less may be kept for the backward pass, as in compiled steps. Those of few tokens
    or of given rows are then tried once more with less; and few tokens gain nothing by chunks.
    """
    steps = []
    for count in [rows] if rows else device_batches(DEVICE_BATCH, batch, base.world):
        few = count * cfg.seq_len <= FEW_TOKENS
        ways = [{"loss_chunk": chunk} for chunk in chunks]
        if less and few:
            ways = ways[:1]
        if less and (few or rows):
            ways += [way | {"keep_less": True} for way in ways]
        steps += [replace(base, rows=count, **way) for way in ways]
    return steps


@dataclass
class MemoryFit:
    """What is held at once, and what finding it took."""

    step: Step
    peak: float  # GiB on a GPU, at the deepest depth to be expected; elsewhere 0
    seconds: float  # with all compiling


def settle_chunks(model, args) -> None:
    """Keeps an edited head or loss from a loss by chunks, which has both written out."""
    if args.loss_chunk == 0 or chunks_agree(model):
        return
    what = "Model.head or head_loss is not what ChunkedCrossEntropy of looped/ops.py computes"
    if args.loss_chunk:
        refuse(f"--loss-chunk {args.loss_chunk}: {what}; change that too, or leave the flag out")
    note(f"{what}: all logits are kept (--loss-chunk 0)")
    args.loss_chunk = 0


def chunks_agree(model) -> bool:
    """Whether the loss by chunks and its gradients are those of all logits at once, on made-up states
    with logits of some five nats. Of large vocabularies not every token is a target.
    """
    targets = torch.arange(model.cfg.vocab_size)
    if len(targets) > 1024:
        targets = torch.cat([targets[:: len(targets) // 24], targets[-16:]])  # the last are special
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(targets), model.cfg.d_model, generator=generator)
    try:
        with torch.no_grad():
            x *= 5 / model.head(x).std().clamp_min(1e-6)
        whole = head_gradients(model, x, targets, chunk=0)
        chunked = head_gradients(model, x, targets, chunk=max(1, len(x) // 3))
    except RuntimeError:  # a loss that knows the rows' length
        return False
    if whole.keys() != chunked.keys():
        return False
    return all((chunked[name] - g).norm() <= 1e-4 * g.norm() for name, g in whole.items())


def head_gradients(model, x, targets, chunk: int) -> dict[str, torch.Tensor]:
    """The loss of states x (N, D) by chunks of so many, and its gradient for x and every parameter
    that has one.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    leaves = {"x": x.clone().requires_grad_(), **trained}
    before = model.loss_chunk
    model.loss_chunk = chunk
    loss = model.head_loss(leaves["x"], targets)
    model.loss_chunk = before
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {"loss": loss.detach()}
    for name, g in zip(leaves, gradients, strict=True):
        if g is not None:
            found[name] = g
    return found


def check_memory(cfg, optimizer: str, place: Place) -> None:
    """Ends the program where a GPU could not even hold weights, gradients and their moments."""
    if not place.is_gpu:
        return
    need = static_bytes(cfg, optimizer, place.world)
    free = free_memory(place)
    if need > free:
        fail(
            f"the model does not fit the GPU's memory: {free / GIB:.1f} GiB are free, and its weights, "
            f"gradients and optimiser state alone need some {need / GIB:.1f}; try more GPUs or a "
            "smaller --preset"
        )


def fit_memory(model, optimizer, args, place: Place) -> MemoryFit:
    """Settles device batch and loss chunk, in args and model: what the user gave, or what fits on
    all ranks. The first try is the best that is predicted to fit; a try must leave HEADROOM free.
    """
    started = time.perf_counter()
    if model.is_compiled:
        place.say("compiling: some minutes, much less where torch's cache has these shapes")
    chunks = (0, CHUNK) if place.is_gpu else (CPU_CHUNK,)
    if args.loss_chunk is not None:
        chunks = (args.loss_chunk,)
    base = Step(1, args.optimizer, place.world, checkpoint_loops=model.checkpoint_loops)
    less = place.is_gpu and model.is_compiled
    given = args.device_batch_size
    steps = steps_to_try(model.cfg, base, args.batch_size, given, chunks, less)
    if place.is_gpu:
        room = (1 - HEADROOM) * free_memory(place)
        total = torch.cuda.get_device_properties(place.device).total_memory
        # what would leave less than HEADROOM free raises OutOfMemoryError
        torch.cuda.set_per_process_memory_fraction(min(room / total, 1.0), place.device)
        while len(steps) > 1 and predict_memory(model.cfg, steps[0]) > room:
            steps.pop(0)
    for step in steps:
        args.device_batch_size = step.rows
        model.loss_chunk = step.loss_chunk
        if try_step(model, optimizer, step, place):
            break
    else:
        advice = less_memory(step.rows, args.batch_size, place.world)
        fail(
            f"--device-batch-size {step.rows} does not fit the GPU's memory, of which "
            f"{HEADROOM:.0%} must stay free; {advice}"
        )
    peak = 0.0
    if place.is_gpu:
        torch.cuda.set_per_process_memory_fraction(1.0, place.device)
        peak = torch.cuda.max_memory_allocated(place.device) / GIB
        torch.cuda.reset_peak_memory_stats(place.device)  # training's own peak is logged
    return MemoryFit(step, peak, time.perf_counter() - started)


def free_memory(place: Place) -> float:
    """Bytes that this program can have on the GPU that has the least, its own cache included."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(place.device)
    return least(free + torch.cuda.memory_reserved(place.device), place)


def least(value: float, place: Place) -> float:
    """The least of the ranks' values."""
    if place.world == 1:
        return value
    shared = torch.tensor(float(value), device=place.device)
    dist.all_reduce(shared, dist.ReduceOp.MIN)
    return shared.item()


def keep_less(less: bool) -> None:
    """Whether graphs compiled from now on keep less for the backward pass.

    The backward pass then recomputes what is elementwise; otherwise torch's partitioner keeps what
    that pass reads as a matrix, such as relu² of the MLP's product. No product is made twice. Every
    rank must make the same choice, before anything is compiled or after torch._dynamo.reset().
    """
    from torch._functorch import config

    config.ban_recompute_materialized_backward = not less


def try_step(model, optimizer, step: Step, place: Place) -> bool:
    """Whether the warm-up and an update, where anything is to be found out, fit on every rank."""
    if not (model.is_compiled or place.is_gpu):
        return True
    if model.is_compiled:
        keep_less(step.keep_less)
    if place.is_gpu:
        torch.cuda.reset_peak_memory_stats(place.device)
    fits = 1.0
    try:
        warm_up(model, step.rows, place)
        if place.world == 1:
            optimizer.rehearse()
    except torch.OutOfMemoryError:
        fits = 0.0
    if least(fits, place) > 0:
        if place.world > 1:  # ranks wait for each other in it: one that lacks memory ends the run
            optimizer.rehearse()
        return True
    optimizer.zero_grad()
    if model.is_compiled:
        # else the next try's rows would share a slower graph for any number of rows
        torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return False


def warm_up(model, rows: int, place: Place) -> None:
    """Compiles all graphs of training and validation, and takes the most memory that they do.

    The order matters, since a graph is made for the first sizes that it sees: all rows alike; rows
    that leave one by one, then rows that join one by one, which gives several rows and one. On a
    GPU then every number of rows, since Inductor may bind a graph to a range of them; and all rows
    as deep as one draw in ten million. Last, a batch without gradient.
    """
    cfg = model.cfg
    tokens = torch.zeros(rows, cfg.seq_len + 1, dtype=torch.int64, device=place.device)
    keys = hash_keys(FOR_STATE, each=range(rows), device=place.device)
    ids = tokens[:, :-1]
    targets = tokens[:, 1:]
    none = np.zeros(rows, np.int64)
    depths = [(none, none)]  # loops without and with gradient
    if cfg.n_core:
        ones = none + 1
        ragged = np.maximum(3 - np.arange(rows), 1)
        depths = [(ones, ones), (ragged, ones), (none, ragged)]
        if place.is_gpu:
            for active in range(rows - 1, 2, -1):
                first = (np.arange(rows) < active).astype(np.int64)
                depths.append((first, ones + first))  # loops of so many rows, without and with
            depths.append(deepest(cfg, rows))
    for n, k in depths:
        if cfg.granularity == "token":  # a row's tokens are as deep as the row
            n = np.repeat(n[:, None], cfg.seq_len, axis=1)
            k = np.repeat(k[:, None], cfg.seq_len, axis=1)
        loss, _ = model.loss(ids, targets, keys, n, k)
        loss.backward()
    model.losses(ids, targets, [cfg.mu_rec], keys)
