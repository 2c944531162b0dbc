"""Checks an edit of the model, in under a minute on one core.

    python -m tools.check                            # small networks of several presets
    python -m tools.check --gain half --mu-rec 4     # one network; any flags of train.py
    python -m tools.check --expect validation        # for an edit that is meant to change the training loss
    python -m tools.check --against ../before        # compare with that code, not with the last commit

Each check computes the same numbers in two ways, on tiny networks in float64 with random weights. All
of them run. A line FAILED says what differs, and below stands what the edit has probably overlooked.
Where the edit touches the model, its numbers are compared with the base's. The exit code is 1 if a
check fails that --expect does not name.
"""

import copy
import inspect
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
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
from looped.machine import ROOT, code_hash
from looped.ops import hash_keys
from looped.randomness import hash_key
from model import Model
from tools.ablate import copy_commit
from tools.sample import Depth, KVCache, read

NETWORKS = [
    "--preset nano",
    "--preset transformer-nano",
    "--preset parcae-140m",
    "--preset rdm-nano",
    "--mechanism attnres --injection none --state-init normal",
    "--mechanism hyper --injection add --state-init like-init",
]  # flags of train.py
MOST = {
    "vocab_size": 64, "seq_len": 12, "d_model": 32, "n_head": 2, "d_mlp": 48,
    "n_prelude": 1, "n_core": 2, "n_coda": 1, "mu_rec": 3, "mu_bwd": 2,
}  # fmt: skip
SEQUENCES = 16
STEP = 3e-3  # of a parameter, for the slope of the loss
EXIT = 5e-3  # threshold of --depth auto, at which such networks leave after 2 loops to all


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


def make_network(flags: str, seed: int) -> Model:
    cfg = train.model_config(train.parse_args(shlex.split(flags)))
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
# The checks: (model, batch) -> the same numbers twice, as dicts of tensors. A docstring is the law, and
# what an edit that breaks it has probably overlooked.


def repeat(model, batch):
    """The same batch once more, with --checkpoint-loops, gives the same.

    Random numbers must follow from the sequences' keys (LoopInputs.uniform). A call must leave no trace,
    and a loop that runs again in the backward pass must find what it found at first: no counter, no
    memory, nothing changed in place.
    """
    before = backward(model, batch)
    model.checkpoint_loops = True
    return backward(model, batch), before


def sequences(model, batch):
    """Sequences of mixed depths give what each gives by itself.

    No sequence may depend on another, nor on how many there are; what a loop reads beside h must be
    cut to the sequences that take it (LoopInputs.first).
    """
    together = backward(model, batch)
    alone = dict.fromkeys(together, 0)
    for i in range(SEQUENCES):
        for name, value in backward(model, batch.rows(slice(i, i + 1))).items():
            alone[name] += value
    return together, alone


def future(model, batch):
    """No token sees a later one.

    Look for a mean, norm, softmax or shift along the tokens (dimension 1), and at `sees`.
    """
    half = batch.ids.size(1) // 2
    other = batch.ids.clone()
    other[:, half:] = batch.ids[:, half:].flip(0)
    one, two = [model.hidden(ids, model.cfg.mu_rec, batch.keys) for ids in (batch.ids, other)]
    return {"state of the first half": two[:, :half]}, {"state of the first half": one[:, :half]}


def gradient(model, batch):
    """The gradient is the slope of the loss, where all loops carry gradient.

    Between these parameters and the loss, look for detach, no_grad, .data, .item(), or a backward pass
    of one's own.
    """
    batch = batch._replace(n=0 * batch.n, k=batch.n + batch.k)
    gradients = backward(model, batch)
    products = {}
    slopes = {}
    for name, p in model.named_parameters():
        computed = gradients[f"gradient of {name}"]
        direction = computed / (computed.norm() + 1e-12) + 0.1 * random_like(p, 1, name)
        products[name] = (computed * direction).sum()
        losses = []
        for sign in (1, -1):
            p.data.add_(sign * STEP * direction)
            with torch.no_grad():
                losses.append(model.loss(*batch)[0].double())
            p.data.sub_(sign * STEP * direction)
        slopes[name] = (losses[0] - losses[1]) / (2 * STEP)
    return products, slopes


def validation(model, batch):
    """The validation loss is the training loss of the same depths.

    Model.loss and Model.losses part at coda_loss and token_losses: edit what both call. (Where the
    edit is meant to change what is trained for: --expect validation.)
    """
    depths = batch.n + batch.k
    losses = model.losses(batch.ids, batch.targets, sorted(set(depths)), batch.keys)
    validated = sum(losses[depth][i].sum() for i, depth in enumerate(depths))
    loss, _ = model.loss(*batch)
    return {"loss": validated}, {"loss": loss}


def sampling(model, batch):
    """A text read token by token, with a cache, gives what it gives at once.

    A token's position comes from the cache, past keys and values from KVCache.extend, the mask from
    `sees`; a layer runs once a loop, and keeps its keys once a loop.
    """
    depth = Depth(model.cfg.mu_rec)
    cache = KVCache(model, batch.ids.size(1), depth.loops)
    prompt, *rest = batch.ids.split([5] + [1] * 7, dim=1)
    hidden = [read(model, ids, batch.keys, cache, depth)[0] for ids in (prompt, *rest)]
    whole = model.hidden(batch.ids, depth.loops, batch.keys)
    return {"final state": torch.cat(hidden, 1)}, {"final state": whole}


def exits(model, batch):
    """--depth auto gives a token the state of the loop at which it leaves.

    See read_token in tools/sample.py: tokens that have left keep their state.
    """
    first = batch.ids[:, :1]
    depth = Depth(2 * model.cfg.mu_rec, EXIT)
    cache = KVCache(model, 1, depth.loops)
    left, taken = read(model, first, batch.keys, cache, depth)
    by_depth = {loops: model.hidden(first, loops, batch.keys) for loops in taken.unique().tolist()}
    wanted = [by_depth[loops][i] for i, loops in enumerate(taken[:, 0].tolist())]
    return {"final state": left}, {"final state": torch.stack(wanted)}


def live(model, batch):
    """A token that Loop.live leaves out keeps its state.

    See Model.unroll; a state is (B, T, ...), whatever a mechanism adds.
    """
    early, late = [h for _, h, _ in model.states(batch.ids, [1, 3], batch.keys)]
    live = torch.arange(SEQUENCES)[:, None].expand_as(batch.ids) % 2 == 0
    plan = list(even_plan(SEQUENCES, 3, "cpu"))
    for loop in plan[1:]:
        loop.live = live
    with torch.no_grad():
        h, inputs = model.enter_loop(batch.ids, batch.keys)
        *_, state = model.unroll(h, inputs, plan)
    wanted = torch.where(live[..., None], late, early)
    return {"state": model.mechanism.read(state)}, {"state": wanted}


def bfloat16(model, batch):
    """In bfloat16 the loss is nearly that of float64.

    Weights are cast to the activations' dtype where they are used; what must be exact (decays,
    softmax, sums over many) stays float32.
    """
    rounded = copy.deepcopy(model).float()
    rounded.dtype = torch.bfloat16
    return {"loss": rounded.loss(*batch)[0]}, {"loss": model.loss(*batch)[0]}


def tracing(model, batch):
    """Traced by torch.compile, the model computes the same, and later in the training it is not compiled
    anew.

    A compiled piece may read arguments, parameters and buffers. Any other number is frozen: one that
    changes in training is compiled anew at every step; keep it in a buffer.
    """
    early = make_batch(model.cfg, 0, progress=0.3)
    wanted = backward(model, batch)
    torch._dynamo.reset()
    model.compile_pieces(backend="eager")
    traced = backward(model, batch)
    backward(model, early)
    progress(model)
    with torch.compiler.set_stance("fail_on_recompile"):
        backward(model, early)
    return traced, wanted


def progress(model) -> None:
    """Changes the numbers that train.py sets on the model, such as model.progress = step / steps."""
    for name in re.findall(r"model\.(\w+) = ", Path(train.__file__).read_text()):
        value = getattr(model, name, None)
        if isinstance(value, int | float):
            setattr(model, name, value + 1)


# what fails first explains more
CHECKS = (
    repeat, sequences, future, gradient, validation, sampling, exits, live, bfloat16, tracing,
)  # fmt: skip
NEED_A_LOOP = (exits, live)
UNTRUE = "not so for"
# of a difference's norm, relative to the number's norm plus a floor: (tolerance, floor)
EXACT = (1e-4, 1e-4)
TOLERANCES = {
    gradient: (0.1, 0.5),  # the loss is float32, so that a slope of 0 may look like 0.03
    bfloat16: (0.01, 1e-4),
}


# -------------------------------------------------------------------------------------------------
# Running them


def differences(check: Callable, left: dict, right: dict) -> str:
    """The tensors that differ most, and by how much of their size; "" if none does."""
    tolerance, floor = TOLERANCES.get(check, EXACT)
    gaps = {}
    for name, value in right.items():
        value = value.detach().double()
        difference = left[name].detach().double() - value
        gap = (difference.norm() / (value.norm() + floor)).item()
        if not gap <= tolerance:  # NaN is not
            gaps[name] = gap
    worst = sorted(gaps, key=gaps.get, reverse=True)
    names = [f"{name} ({100 * gaps[name]:.2g} %)" for name in worst[:3]]
    more = f" and {len(worst) - 3} more" if len(worst) > 3 else ""
    return f"{UNTRUE} {', '.join(names)}{more}" if worst else ""


def crash_of(error: Exception) -> str:
    """An error's first and last line, and the last line of the code under test that led to it."""
    message = [type(error).__name__, *str(error).strip().splitlines()]
    what = dict.fromkeys([*message[:2], message[-1].strip(" -")])
    lines = [": ".join(what)]
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        ours = path.is_relative_to(ROOT) and "site-packages" not in path.parts
        if ours and path != Path(__file__):
            lines[1:] = [f"at {path.relative_to(ROOT)}:{frame.lineno}: {frame.line}"]
    return "\n        ".join(lines)


def check_network(flags: str, seed: int, expected: set[str]) -> dict[str, str]:
    """Runs the checks, prints a line of each that fails and one of all that pass; returns those that fail,
    {name: by what}.
    """
    print(f"{flags}:", flush=True)
    try:
        network = make_network(flags, seed)
    except Exception as error:
        crash = crash_of(error)
        print(f"FAILED  building: {crash}")
        return {"building": crash}
    passed = []
    failed = {}
    for check in CHECKS:
        name = check.__name__
        if check in NEED_A_LOOP and not network.cfg.n_core:
            continue
        try:
            left, right = check(copy.deepcopy(network), make_batch(network.cfg, seed))
            failure = differences(check, left, right)
        except Exception as error:
            failure = crash_of(error)
        if failure:
            failed[name] = failure
            word = "expected" if name in expected else "FAILED"
            print(f"{word}  {name}: {failure}", flush=True)
        else:
            passed.append(name)
    print(f"ok      {', '.join(passed)}", flush=True)
    return failed


# -------------------------------------------------------------------------------------------------
# Base and edit


def numbers_of(networks: list[str]) -> dict:
    """What the tiny networks compute: {flags: {"loss", "gradient of …": its norm}}."""
    by_network = {}
    for seed, flags in enumerate(networks):
        model = make_network(flags, seed)
        tensors = backward(model, make_batch(model.cfg, seed))
        by_network[flags] = {name: tensor.norm().item() for name, tensor in tensors.items()}
    return by_network


def compare(base: Path, networks: list[str], flags: list[str]) -> None:
    """Says in which networks this code computes other numbers than the base's."""
    if code_hash(base, "model.py") == code_hash(ROOT, "model.py"):
        print("notice  the edit does not touch the model: nothing to compare with the base")
        return
    line = [sys.executable, "-P", __file__, "--numbers", *flags]  # this file, the base's modules
    environment = os.environ | {"PYTHONPATH": str(base.resolve())}
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    if done.returncode:
        *_, reason = done.stderr.strip().splitlines()
        print(f"notice  not compared, since the base fails: {reason}")
        return
    before = json.loads(done.stdout)
    same = True
    for network, numbers in numbers_of(networks).items():
        old = before[network]
        other = [x for x in numbers if not math.isclose(numbers[x], old.get(x, -1), rel_tol=1e-6)]
        same = same and not other
        losses = f"loss {old['loss']:.6g} of the base, {numbers['loss']:.6g} of the edit"
        print(f"{network}: {losses}; {len(other)} of {len(numbers)} numbers differ")
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
    names = [check.__name__ for check in CHECKS]
    add("--expect", metavar="NAME", action="append", default=[], choices=names,
        help=f"a check that the edit fails by intent, may be repeated: {', '.join(names)}")  # fmt: skip
    add("--against", metavar="DIR", type=Path,
        help="code of the base, which the networks' numbers are compared with (default: the last commit)")  # fmt: skip
    add("--numbers", action="store_true",
        help="print what the networks compute, as JSON, and check nothing")  # fmt: skip
    return parser.parse_known_args(argv)


def networks_of(flags: list[str]) -> list[str]:
    """Flags of the networks to check."""
    if not flags:
        return NETWORKS
    cfg = train.model_config(train.parse_args(flags))
    asked = shlex.join(flags)
    return [asked, f"{asked} --state-init like-init"] if cfg.n_core else [asked]


def conclude(failed: dict[str, str], expected: set[str]) -> None:
    """What the first failure means, and in the last line what all of it means."""
    for name in sorted(expected - failed.keys()):
        print(f"notice  {name} was expected to fail, and passes")
    unexpected = failed.keys() - expected
    if unexpected:
        for check in CHECKS:
            if failed.get(check.__name__, "").startswith(UNTRUE) and check.__name__ in unexpected:
                print(f"\n{check.__name__}: {inspect.getdoc(check)}\n")
                break
        print(
            "FAILED: losses of this edit would mislead. Mend the first failure, the others may follow "
            "from it; a check that the edit fails by intent is named with --expect."
        )
        return
    but = f" but {', '.join(sorted(failed))}, as expected" if failed else ""
    print(f"All checks pass{but}. Whether the edit is better, python -m tools.ablate says.")


def main(argv=None):
    torch.set_num_threads(1)  # the networks are too small for more
    args, flags = parse_args(argv)
    networks = networks_of(flags)
    if args.numbers:
        print(json.dumps(numbers_of(networks)))
        return
    expected = set(args.expect)
    failed = {}
    for seed, network in enumerate(networks):
        failed = check_network(network, seed, expected) | failed
    fine = failed.keys() <= expected
    if fine and args.against:
        compare(args.against, networks, flags)
    elif fine and (ROOT / ".git").exists():
        with tempfile.TemporaryDirectory() as folder:
            compare(copy_commit("HEAD", Path(folder, "base")), networks, flags)
    conclude(failed, expected)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
