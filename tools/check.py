"""Checks an edit of the model, in under a minute.

    python -m tools.check                          # small networks of several presets
    python -m tools.check --gain half --mu-rec 4   # that network alone; any flags of train.py

The same numbers are computed in two ways, one line a check. The first check that fails says what
the edit has overlooked. Networks are tiny and computed in float64, with weights at random.
"""

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

import train
from looped.depth import sample_depths
from looped.machine import ONE_PROCESS
from looped.ops import hash_keys
from model import Model
from muon import Rates
from tools.sample import Depth, KVCache, read

NETWORKS = (
    "--preset nano",
    "--preset transformer-nano",
    "--preset parcae-140m",
    "--preset rdm-nano",
    "--mechanism attnres",
    "--mechanism hyper",
)  # flags of train.py
MOST = {
    "vocab_size": 64, "seq_len": 12, "d_model": 32, "n_head": 2, "d_mlp": 48,
    "n_prelude": 2, "n_core": 2, "n_coda": 1, "mu_rec": 3, "mu_bwd": 2,
}  # fmt: skip
ROWS = 6
STEPS = 5
RATES = Rates(lr=1.0, weight_decay=0.0, momentum=0.95)


@dataclass
class Case:
    """A tiny network and a batch for it."""

    flags: list[str]
    model: Model
    batch: tuple  # arguments of Model.loss: ids (B, T), targets (B, T), keys (B,), n (B,), k (B,)


def make_case(flags: list[str], noise: float = 0.05) -> Case:
    """noise: added to the initial weights, of which zeros would hide errors."""
    cfg = train.model_config(train.parse_args(flags))
    small = {name: min(getattr(cfg, name), most) for name, most in MOST.items()}
    cfg = replace(cfg, **small)
    model = Model(cfg)
    model.init_weights(0)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data.add_(noise * torch.randn(p.shape, generator=generator))
    model.dtype = torch.float64
    tokens = torch.randint(cfg.vocab_size, (ROWS, cfg.seq_len + 1), generator=generator)
    granularity = "sequence" if cfg.granularity == "token" else cfg.granularity
    n, k = sample_depths(replace(cfg, granularity=granularity), 0, 0, ROWS)
    keys = hash_keys(0, each=range(ROWS))
    batch = tokens[:, :-1], tokens[:, 1:], keys, n, k
    return Case(flags, model.double(), batch)


# -------------------------------------------------------------------------------------------------
# Checks: Case -> two dicts that should be equal; None where the network has no such thing


def loss_of(case: Case) -> dict:
    loss, _ = case.model.loss(*case.batch)
    return {"loss": loss}


def backward(model: Model, batch) -> dict:
    """Loss and gradients."""
    model.zero_grad()
    loss, _ = model.loss(*batch)
    loss.backward()
    found = {"loss": loss.detach()}
    for name, p in model.named_parameters():
        found[f"gradient of {name}"] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
    return found


def row_by_row(case: Case):
    """The sum over rows, and the batch at once."""
    rows = []
    for i in range(ROWS):
        row = [x[i : i + 1] for x in case.batch]
        rows.append(backward(case.model, row))
    summed = {name: sum(row[name] for row in rows) for name in rows[0]}
    return summed, backward(case.model, case.batch)


def token_depths(case: Case):
    """Depths given by token, of which a row's are all the same."""
    cfg = case.model.cfg
    if cfg.n_core == 0 or cfg.mechanism != "none":
        return None
    ids, targets, keys, n, k = case.batch
    n, k = (np.repeat(x[:, None], ids.size(1), axis=1) for x in (n, k))
    by_token = (ids, targets, keys, n, k)
    return backward(case.model, by_token), backward(case.model, case.batch)


def validation(case: Case):
    ids, targets, keys, n, k = case.batch
    depths = (n + k).tolist()
    losses = case.model.losses(ids, targets, sorted(set(depths)), keys)
    summed = sum(losses[depth][row].sum() for row, depth in enumerate(depths))
    return {"loss": summed}, loss_of(case)


def sampling(case: Case):
    """A text read in pieces, and at once."""
    ids, _, keys, _, _ = case.batch
    depth = Depth(max(1, case.model.cfg.mu_rec))
    cache = KVCache(case.model, ids.size(1), depth.loops)
    hidden = []
    for piece in (ids[:, :5], *ids[:, 5:].split(1, dim=1)):
        h, _ = read(case.model, piece, keys, cache, depth)
        hidden.append(h)
    whole = case.model.hidden(ids, depth.loops, keys)
    return {"final state": torch.cat(hidden, 1)}, {"final state": whole}


def dynamo(case: Case):
    torch._dynamo.reset()
    traced = make_case(case.flags)
    traced.model.compile_pieces(backend="eager")
    return backward(traced.model, case.batch), backward(case.model, case.batch)


def bfloat16(case: Case):
    rounded = make_case(case.flags)
    rounded.model.float()
    rounded.model.dtype = torch.bfloat16
    return loss_of(rounded), loss_of(case)


def moved(case: Case):
    """Whether training changes each parameter."""
    args = train.parse_args(case.flags)
    model = make_case(case.flags, noise=0).model.float()
    model.dtype = torch.float32
    train.settle(args, model.cfg)
    optimizer = train.make_optimizer(model, args, ONE_PROCESS, False)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    for _ in range(STEPS):
        loss, _ = model.loss(*case.batch)
        loss.backward()
        optimizer.step(RATES, {"loss": loss.detach()})
    found = {}
    for name, p in trained.items():
        found[f"{name} after {STEPS} steps"] = (p != before[name]).any()
    return found, dict.fromkeys(found, torch.tensor(True))


@dataclass
class Check:
    label: str
    function: Callable[[Case], tuple[dict, dict] | None]
    overlooked: str  # where they differ
    tolerance: float = 1e-4  # of the difference's norm, relative


CHECKS = [
    Check("rows of mixed depths, as each row by itself", row_by_row,
        "A loop runs only the rows that still need it: what it reads beside h must be cut to them "
        "(LoopInputs). No row may depend on another, nor on an earlier call."),
    Check("depths by token, as by row", token_depths,
        "A loop's index is (B,) or, where each token has its own depth, (B, T)."),
    Check("validation, as the training loss at those depths", validation,
        "Model.loss and Model.losses must compute the same, so edit what both call. (If the edit "
        "changes what is trained for, this is as it should be.)"),
    Check("sampling with a cache, as the whole text at once", sampling,
        "A token sees earlier ones only, through the cache where there is one, and its position "
        "comes from it."),
    Check("traced by torch.compile, as run by Python", dynamo,
        "What is compiled must read arguments and parameters only: other numbers are frozen when "
        "it is traced."),
    Check("bfloat16, nearly as float64", bfloat16,
        "Weights are cast to the activations' dtype at use; what must be exact stays in float32.",
        tolerance=0.01),
    Check("every parameter is trained", moved,
        "The loss does not depend on it, or its gradient begins at zero, or its rate is 0."),
]  # fmt: skip


# -------------------------------------------------------------------------------------------------


def difference(found: dict, wanted: dict) -> tuple[float, str]:
    """The largest relative difference, and whose it is."""
    gaps = {}
    for name, value in wanted.items():
        value = value.double()
        gap = (found[name].double() - value).norm()
        gaps[name] = (gap / (value.norm() + 1e-4)).item()
    name = max(gaps, key=lambda name: np.nan_to_num(gaps[name], nan=np.inf))
    return gaps[name], name


def run_check(check: Check, case: Case) -> None:
    """Ends the program where it fails."""
    network = " ".join(case.flags)
    try:
        pair = check.function(case)
    except Exception:
        traceback.print_exc()
        print(f"FAILED  {check.label}: {network} raises the error above")
        sys.exit(1)
    gap, name = difference(*pair) if pair else (0.0, "")
    if not gap <= check.tolerance:
        print(f"FAILED  {check.label}: with {network}, {name} differs by {gap:.1g} of its size")
        print(f"        {check.overlooked}")
        sys.exit(1)


def main(argv=None):
    flags = sys.argv[1:] if argv is None else argv
    train.parse_args(flags, "python -m tools.check", __doc__)
    networks = [flags] if flags else [text.split() for text in NETWORKS]
    cases = [make_case(network) for network in networks]
    for check in CHECKS:
        for case in cases:
            run_check(check, case)
        print(f"ok      {check.label}", flush=True)


if __name__ == "__main__":
    main()
