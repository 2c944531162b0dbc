"""Checks an edit of the model, in under a minute on one core.

    python -m tools.check                            # small networks of several presets
    python -m tools.check --gain half --mu-rec 4     # one network; any flags of train.py
    python -m tools.check --expect validation        # an edit that changes the training loss fails that check rightly
    python -m tools.check --base ../before           # also says whether the networks compute what the code in ../before computes

Each check computes the same numbers in two ways, on tiny networks in float64 with random weights. All
of them run. A line FAILED says what differs, and what the edit has probably overlooked. The exit code
is 1 if a check fails that --expect does not name.
"""

import copy
import json
import math
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import train
from looped.common import Parser
from looped.depth import even_plan, sample_depths
from looped.ops import hash_keys
from looped.randomness import hash_key
from model import Model
from tools.sample import Depth, KVCache, logits_of, read

ROOT = Path(__file__).resolve().parent.parent
NETWORKS = (
    "--preset nano",
    "--preset transformer-nano",
    "--preset parcae-140m",
    "--preset rdm-nano",
    "--mechanism attnres --injection none --state-init normal",
    "--mechanism hyper --injection add --state-init like-init",
)  # flags of train.py
MOST = {
    "vocab_size": 64, "seq_len": 12, "d_model": 32, "n_head": 2, "d_mlp": 48,
    "n_prelude": 2, "n_core": 2, "n_coda": 1, "mu_rec": 3, "mu_bwd": 2,
}  # fmt: skip
SEQUENCES = 16
STEP = 3e-3  # of a parameter, for the slope of the loss


class Batch(NamedTuple):
    """The arguments of Model.loss, deepest sequence first."""

    ids: torch.Tensor  # (B, T)
    targets: torch.Tensor  # (B, T)
    keys: torch.Tensor  # (B,)
    n: np.ndarray  # (B,) loops without gradient
    k: np.ndarray  # (B,) loops with gradient

    def rows(self, rows) -> "Batch":
        return Batch(*[x[rows] for x in self])


# -------------------------------------------------------------------------------------------------
# Tiny networks


def make_network(flags: list[str], seed: int) -> Model:
    cfg = train.model_config(train.parse_args(flags))
    small = {name: min(most, getattr(cfg, name)) for name, most in MOST.items()}
    model = Model(replace(cfg, **small))
    model.init_weights(seed)
    for name, p in model.named_parameters():  # a weight of zero would hide errors
        p.data.add_(0.05 * random_like(p, seed, name))
    model.dtype = torch.float64
    return model.double()


def random_like(p, seed: int, name: str):
    """Standard normal numbers, by name, so that a parameter more changes no other's."""
    generator = torch.Generator().manual_seed(hash_key(seed, *name.encode()) & (2**63 - 1))
    return torch.randn(p.shape, generator=generator)


def make_batch(cfg, seed: int, progress: float = 1.0) -> Batch:
    """Random tokens; depths of the network's law, but one sequence loops at least twice mu_rec times."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(cfg.vocab_size, (SEQUENCES, cfg.seq_len + 1), generator=generator)
    keys = hash_keys(seed, each=range(SEQUENCES))
    n, k = sample_depths(cfg, seed, 0, SEQUENCES, progress)
    k[0] = k.max()
    n[0] = max(n[0], 2 * cfg.mu_rec - k[0])
    order = np.argsort(-(n + k), kind="stable")
    return Batch(tokens[:, :-1], tokens[:, 1:], keys, n[order], k[order])


def backward(model: Model, batch: Batch) -> dict:
    """The loss, summed over tokens, and the gradient of each parameter."""
    model.zero_grad()
    loss, _ = model.loss(*batch)
    loss.backward()
    numbers = {"loss": loss.detach()}
    for name, p in model.named_parameters():
        gradient = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        numbers[f"gradient of {name}"] = gradient
    return numbers


# -------------------------------------------------------------------------------------------------
# The checks: (model, batch) -> the same numbers twice, as dicts of tensors


def gradient(model, batch):
    """With gradient in all loops: its product with a direction, and the loss's slope along it."""
    batch = batch._replace(n=0 * batch.n, k=batch.n + batch.k)
    gradients = backward(model, batch)
    products = {}
    slopes = {}
    for name, p in model.named_parameters():
        slope = gradients[f"gradient of {name}"]
        noise = random_like(p, 1, name)
        direction = slope / (slope.norm() + 1e-12) + 0.1 * noise
        products[name] = (slope * direction).sum()
        losses = []
        for sign in (1, -1):
            p.data.add_(sign * STEP * direction)
            with torch.no_grad():
                losses.append(model.loss(*batch)[0].double())
            p.data.sub_(sign * STEP * direction)
        slopes[name] = (losses[0] - losses[1]) / (2 * STEP)
    return products, slopes


def repeat(model, batch):
    before = backward(model, batch)
    return backward(model, batch), before


def recompute(model, batch):
    wanted = backward(model, batch)
    model.checkpoint_loops = True
    return backward(model, batch), wanted


def sequences(model, batch):
    together = backward(model, batch)
    alone = dict.fromkeys(together, 0)
    for i in range(SEQUENCES):
        for name, value in backward(model, batch.rows(slice(i, i + 1))).items():
            alone[name] += value
    return together, alone


def future(model, batch):
    """The losses of a text's first half, with another second half and without."""
    half = batch.ids.size(1) // 2
    other = batch.ids.clone()
    other[:, half:] = batch.ids[:, half:].flip(0)
    losses = []
    for ids in (other, batch.ids):
        by_depth = model.losses(ids, batch.targets, [model.cfg.mu_rec], batch.keys)
        losses.append({"the loss of its first tokens": by_depth[model.cfg.mu_rec][:, : half - 1]})
    return losses


def validation(model, batch):
    depths = batch.n + batch.k
    losses = model.losses(batch.ids, batch.targets, sorted(set(depths)), batch.keys)
    validated = sum(losses[depth][i].sum() for i, depth in enumerate(depths))
    loss, _ = model.loss(*batch)
    return {"loss": validated}, {"loss": loss}


def read_in_pieces(model, batch, pieces: list[int], depth: Depth):
    """The final hidden states (B, T, D), through the cache of sampling."""
    cache = KVCache(model, batch.ids.size(1), depth.loops)
    hidden = [read(model, ids, batch.keys, cache, depth)[0] for ids in batch.ids.split(pieces, 1)]
    return {"final state": torch.cat(hidden, 1)}


def sampling(model, batch):
    loops = model.cfg.mu_rec
    rest = batch.ids.size(1) - 5
    whole = {"final state": model.hidden(batch.ids, loops, batch.keys)}
    return read_in_pieces(model, batch, [5] + [1] * rest, Depth(loops)), whole


def exits(model, batch):
    """--depth auto of single tokens, which leave the loop after as many loops as their answers say."""
    ids = batch.ids[:, :1]
    most = 2 * model.cfg.mu_rec
    hidden = torch.stack([model.hidden(ids, 1 + i, batch.keys)[:, 0] for i in range(most)])
    answers = logits_of(model, hidden).log_softmax(-1)  # (loops, B, V)
    changes = (answers[1:].exp() * (answers[1:] - answers[:-1])).sum(-1)
    threshold = changes.median()
    settled = changes < threshold
    settled[-1] = True  # at the latest
    loops = 2 + settled.int().argmax(0)  # (B,)
    expected = hidden[loops - 1, torch.arange(SEQUENCES)]
    cache = KVCache(model, 1, most)
    left, taken = read(model, ids, batch.keys, cache, Depth(most, threshold.item()))
    return (
        {"depth": taken[:, 0], "final state": left[:, 0]},
        {"depth": loops, "final state": expected},
    )


def live(model, batch):
    """The states at each sequence's own depth, where Model.unroll masks the tokens that are done."""
    depths = torch.from_numpy(batch.n + batch.k)
    most = int(depths.max())
    by_depth = {depth: h for depth, h, _ in model.states(batch.ids, range(1, most + 1), batch.keys)}
    wanted = [by_depth[int(depth)][i] for i, depth in enumerate(depths)]
    plan = []
    for loop in even_plan(SEQUENCES, most, "cpu"):
        takes = (depths > loop.number)[:, None].expand_as(batch.ids)
        plan.append(replace(loop, live=takes))
    with torch.no_grad():
        h, inputs = model.enter_loop(batch.ids, batch.keys)
        *_, state = model.unroll(h, inputs, plan)
    return {"state": model.mechanism.read(state)}, {"state": torch.stack(wanted)}


def bfloat16(model, batch):
    rounded = copy.deepcopy(model).float()
    rounded.dtype = torch.bfloat16
    return {"loss": rounded.loss(*batch)[0]}, {"loss": model.loss(*batch)[0]}


def tracing(model, batch):
    """Traced, and traced once more at another progress of the training."""
    early = make_batch(model.cfg, 0, progress=0.3)
    wanted = backward(model, batch)
    torch._dynamo.reset()
    model.compile_pieces(backend="eager")
    traced = backward(model, batch)
    backward(model, early)
    grow(model)
    with torch.compiler.set_stance("fail_on_recompile"):
        backward(model, early)
    return traced, wanted


def grow(model) -> None:
    """Changes the numbers that train.py sets on the model, such as model.progress = step / steps."""
    code = Path(train.__file__).read_text()
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) in (int, float) and re.search(rf"\.{name} [+*]?= ", code):
                setattr(module, name, value + 1)


class Check(NamedTuple):
    numbers: Callable  # one of the functions above; its name is the check's
    law: str
    advice: str  # what an edit that fails has probably overlooked
    tolerance: float = 1e-4  # of the difference's norm, beside the number's own plus `floor`
    floor: float = 1e-4
    looped: bool = False  # needs a loop


CHECKS = [  # what fails first explains more
    Check(
        repeat,
        "the same batch twice gives the same",
        "Random numbers must follow from the sequences' keys (LoopInputs.uniform), and a call must "
        "leave no trace: no counter, no memory, nothing changed in place.",
    ),
    Check(
        recompute,
        "--checkpoint-loops changes nothing",
        "A loop that is run again in the backward pass must find what it found at first: no counter, "
        "no torch.rand, nothing changed in place.",
        looped=True,
    ),
    Check(
        sequences,
        "sequences of mixed depths give what each gives by itself",
        "No sequence may depend on another, nor on how many there are; what a loop reads beside h must "
        "be cut to the sequences that take it (LoopInputs.first).",
    ),
    Check(
        future,
        "no token sees a later one",
        "Look for a mean, norm, softmax or shift along the tokens (dimension 1), and at `sees`.",
    ),
    Check(
        gradient,
        "the gradient is the slope of the loss",
        "Between these parameters and the loss, look for detach, no_grad, .data, .item(), or a "
        "backward pass of one's own.",
        tolerance=0.1,
        floor=0.5,  # the loss is float32, so that a slope of 0 may look like 0.03
    ),
    Check(
        validation,
        "the validation loss is the training loss of the same depths",
        "Model.loss and Model.losses part at coda_loss and token_losses: edit what both call. (Rightly "
        "so where the edit changes what is trained for: --expect validation.)",
    ),
    Check(
        sampling,
        "a text read token by token, with a cache, gives what it gives at once",
        "A token's position comes from the cache, past keys and values from KVCache.extend, the mask "
        "from `sees`; each layer keeps its keys once a loop.",
    ),
    Check(
        exits,
        "--depth auto gives a token the answer of the loop at which it leaves",
        "See read_token in tools/sample.py: tokens that have left keep their state.",
        looped=True,
    ),
    Check(
        live,
        "a token that Loop.live leaves out keeps its state",
        "See Model.unroll; a state is (B, T, ...), whatever a mechanism adds.",
        looped=True,
    ),
    Check(
        bfloat16,
        "in bfloat16 the loss is nearly that of float64",
        "Weights are cast to the activations' dtype where they are used; what must be exact (decays, "
        "softmax, sums over many) stays float32.",
        tolerance=0.01,
    ),
    Check(
        tracing,
        "traced by torch.compile it computes the same, and is not compiled anew",
        "A compiled piece may read arguments, parameters and buffers. Any other number is frozen: one "
        "that changes in training is compiled anew at every step; keep it in a buffer.",
    ),
]


# -------------------------------------------------------------------------------------------------
# Running them


def differences(check: Check, left: dict, right: dict) -> list[str]:
    """The names of tensors that differ, by how much they do."""
    gaps = {}
    for name, value in right.items():
        value = value.detach().double()
        difference = left[name].detach().double() - value
        gap = (difference.norm() / (value.norm() + check.floor)).item()
        if not gap <= check.tolerance:  # NaN is not
            gaps[name] = gap
    worst_first = sorted(gaps, key=gaps.get, reverse=True)
    return [f"{name} ({100 * gaps[name]:.2g} %)" for name in worst_first]


def crash_of(error: Exception) -> str:
    """An error's line, and the last line of the code under test that led to it."""
    what, *_ = traceback.format_exception_only(error)
    place = "tools/check.py"
    # the compiler writes such lines, too, into its messages
    frames = re.findall(r'File "(.+)", line (\d+), in .+\n +(.+)', traceback.format_exc())
    for file, line, code in frames:
        path = Path(file)
        if path.is_relative_to(ROOT) and path != Path(__file__):
            place = f"{path.relative_to(ROOT)}:{line}: {code}"
    return f"{what.strip()}\n        at {place}"


def failure_of(check: Check, flags: list[str], seed: int) -> str | None:
    """What a network fails a check by, in lines; None if it passes."""
    try:
        model = make_network(flags, seed)
        left, right = check.numbers(model, make_batch(model.cfg, seed))
    except Exception as error:
        return crash_of(error)
    names = differences(check, left, right)
    if not names:
        return None
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def check_network(flags: list[str], seed: int, expected: list[str]) -> list[str]:
    """Runs the checks, prints a line of each that fails and one of all that pass; returns the names of
    those that fail.
    """
    print(f"{' '.join(flags)}:")
    try:
        model = make_network(flags, seed)
    except Exception as error:
        print(f"FAILED  building: {crash_of(error)}")
        return ["building"]
    passed = []
    failed = []
    for check in CHECKS:
        name = check.numbers.__name__
        if check.looped and not model.cfg.n_core:
            continue
        failure = failure_of(check, flags, seed)
        if failure is None:
            passed.append(name)
            continue
        failed.append(name)
        word = "expected" if name in expected else "FAILED"
        print(f"{word}  {name}: not so, {failure}", flush=True)
    print(f"ok      {', '.join(passed)}", flush=True)
    return failed


# -------------------------------------------------------------------------------------------------
# Two trees


def numbers_of(networks: list[str]) -> dict:
    """What the tiny networks compute: {flags: {name: number}}."""
    by_network = {}
    for seed, network in enumerate(networks):
        model = make_network(network.split(), seed)
        batch = make_batch(model.cfg, seed)
        gradients = backward(model, batch)
        loss = gradients.pop("loss") / batch.ids.numel()
        size = torch.stack([g.norm() for g in gradients.values()]).norm()
        validated, _ = validation(model, batch)
        numbers = {
            "training loss": loss,
            "gradient": size,
            "validation loss": validated["loss"] / batch.ids.numel(),
        }
        by_network[network] = {name: value.item() for name, value in numbers.items()}
    return by_network


def numbers_in(folder: Path, flags: list[str]) -> dict | None:
    """The same, by the code in a folder; None, and a line, if it fails."""
    line = [sys.executable, "-m", "tools.check", "--numbers", *flags]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        print(f"notice  {folder} has no such network: {done.stderr.strip().splitlines()[-1]}")
        return None
    return json.loads(done.stdout)


def compare(base: Path, flags: list[str]) -> None:
    """Says in which networks this code computes other numbers than the base."""
    before = numbers_in(base, flags)
    after = numbers_in(ROOT, flags)
    if before is None or after is None:
        return
    print(f"compared with {base}:")
    same = True
    for network, numbers in after.items():
        changes = []
        for name, value in numbers.items():
            old = before[network][name]
            if not math.isclose(value, old, rel_tol=1e-6):
                changes.append(f"{name} {value:.6g}, there {old:.6g}")
        same = same and not changes
        print(f"        {network}: {'; '.join(changes) or 'the same'}")
    if same:
        print(
            "notice  the network computes the same with these flags; what the edit changes in "
            "training is not tested here"
        )


# -------------------------------------------------------------------------------------------------
# The program


def parse_args(argv):
    parser = Parser(description=__doc__, prog="python -m tools.check")
    add = parser.add_argument
    names = [check.numbers.__name__ for check in CHECKS]
    add("--expect", metavar="NAME", action="append", default=[], choices=names,
        help=f"a check that the edit fails by intent, may be repeated: {', '.join(names)}")  # fmt: skip
    add("--base", metavar="DIR", type=Path,
        help="a checkout; also compare the networks with what its code computes")  # fmt: skip
    add(
        "--numbers",
        action="store_true",
        help="print what the networks compute, as JSON, and check nothing",
    )
    args, flags = parser.parse_known_args(argv)
    return args, flags


def networks_of(flags: list[str]) -> list[str]:
    """Flags of the networks to check."""
    if not flags:
        return NETWORKS
    cfg = train.model_config(train.parse_args(flags))
    asked = " ".join(flags)
    return [asked, f"{asked} --state-init like-init"] if cfg.n_core else [asked]


def explain(failed: set[str], expected: set[str]) -> None:
    """What the failures mean, and in the last line what all of it means."""
    for check in CHECKS:
        name = check.numbers.__name__
        if name in failed - expected:
            print(f"{name} says that {check.law}. {check.advice}")
    for name in sorted(expected - failed):
        print(f"notice  {name} was expected to fail, and passes")
    if failed - expected:
        print(
            "FAILED: losses of this edit would mislead. Mend the first of these, the others may follow "
            "from it; a check that the edit fails by intent is named with --expect"
        )
        return
    but = f" but {', '.join(sorted(failed))}, as expected" if failed else ""
    print(
        f"All checks pass{but}. Whether the edit is better, training says: python -m tools.ablate"
    )


def main(argv=None):
    torch.set_num_threads(1)  # the networks are too small for more
    args, flags = parse_args(argv)
    networks = networks_of(flags)
    if args.numbers:
        print(json.dumps(numbers_of(networks)))
        return
    failed = set()
    for seed, network in enumerate(networks):
        failed.update(check_network(network.split(), seed, args.expect))
    if args.base and "building" not in failed:
        compare(args.base, flags)
    expected = set(args.expect)
    explain(failed, expected)
    sys.exit(1 if failed - expected else 0)


if __name__ == "__main__":
    main()
