"""The optimiser against float64 formulas, torch's AdamW, and itself on other numbers of ranks."""

import math
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from oracle import SlowOptimizer

import muon
from looped.machine import Place, take_from_first
from model import Model, ModelConfig
from muon import POLAR_EXPRESS, AdamW, Muon, Optimizer, Rates, polar_express

SHAPES = {"a": (6, 4), "b": (6, 4), "c": (4, 6), "d": (5, 5), "e": (7, 3), "f": (11,)}
SHAPES |= dict.fromkeys("ghijk", (6, 4))
MATRICES = set(SHAPES) - {"e", "f"}
CLIPPED = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 0.0, "update_clip": True}


def parameters():
    g = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(s, generator=g)) for name, s in SHAPES.items()}


def gradient(name, step):
    g = torch.Generator().manual_seed(1000 * step + ord(name))
    return torch.randn(SHAPES[name], generator=g)


def both(params, **more):
    """Muon for the matrices, AdamW for the others."""
    rest = [(name, p) for name, p in params.items() if name not in MATRICES]
    matrices = [(name, p) for name, p in params.items() if name in MATRICES]
    return Optimizer([(AdamW(4e-3), rest), (Muon(8e-3), matrices)], **more)


def rates(step):
    """A schedule that moves everything."""
    return Rates(lr=1 - step / 10, weight_decay=1 - step / 20, momentum=0.85 + step / 50)


def loss_of(value):
    return {"loss": torch.tensor(value)}


def run(steps, **more):
    params = parameters()
    optimizer = both(params, **more)
    for t in range(1, steps + 1):
        for name, p in params.items():
            p.grad.add_(gradient(name, t))
        out = optimizer.step(rates(t), loss_of(2.5) | {"more": torch.tensor(4.0)})
    return params, optimizer, out


def slow_reference(steps):
    p = {name: p.detach().double() for name, p in parameters().items()}
    slow = SlowOptimizer(p, MATRICES, 8e-3, 4e-3)
    for t in range(1, steps + 1):
        given = rates(t)
        gradients = {name: gradient(name, t) for name in p}
        slow.step(gradients, given.lr, given.weight_decay, given.momentum)
    return p


def test_step_equals_slow_float64_reference():
    params, _, out = run(5)
    want = slow_reference(5)
    for name, p in params.items():
        assert (p.detach() - want[name]).abs().max() < 2e-5, name
    norm2 = sum((gradient(name, 5).double() ** 2).sum() for name in SHAPES)
    assert abs(out["grad_norm2"] / norm2 - 1) < 1e-5
    assert out["loss"] == 2.5 and out["more"] == 4.0


def test_adamw_equals_torchs():
    params = parameters()
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params.values()]
    optimizer = Optimizer([(AdamW(3e-3), list(params.items()))], clip=1e9)
    torchs = torch.optim.AdamW(twins, lr=3e-3, betas=(0.8, 0.95), eps=1e-10, weight_decay=0)
    for t in range(1, 6):
        for (name, p), twin in zip(params.items(), twins, strict=True):
            p.grad.add_(gradient(name, t))
            twin.grad = gradient(name, t)
        optimizer.step(Rates(), loss_of(0.0))
        torchs.step()
    for p, twin in zip(params.values(), twins, strict=True):
        assert torch.allclose(p, twin, atol=1e-6)


def test_update_clipping_equals_a_float64_formula():
    """AdamW without epsilon, rates clipped by tensor; an element that never had a gradient stays."""
    params = parameters()
    want = {name: p.detach().double().numpy() for name, p in params.items()}
    optimizer = Optimizer([(AdamW(**CLIPPED), list(params.items()))], clip=1e9)
    first, second = dict.fromkeys(want, 0.0), dict.fromkeys(want, 0.0)
    for t in range(1, 5):
        for name, p in params.items():
            g = gradient(name, t) * 10.0 ** (t - 2)  # growing, so that clipping acts
            g[0] = 0
            p.grad.add_(g)
            g = g.double().numpy()
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g**2
            hat = np.where(g == 0, 1, second[name] / (1 - 0.95**t))
            rms = np.sqrt((g**2 / hat).mean())
            assert t == 1 or rms > 1
            want[name] = want[name] - 3e-3 / max(1, rms) * first[name] / (1 - 0.9**t) / np.sqrt(hat)
        optimizer.step(Rates(), loss_of(0.0))
    for name, p in params.items():
        assert np.abs(p.detach().numpy() - want[name]).max() < 1e-6, name
        assert torch.equal(p[0], parameters()[name][0])


@pytest.mark.parametrize("size", [1e-15, 1e-19, 1e-23, 1e-30])
def test_without_epsilon_no_gradient_is_too_small(size):
    """Its square may be 0 in float32; no element moves further than Adam's do."""
    p = torch.nn.Parameter(torch.zeros(8))
    optimizer = Optimizer([(AdamW(**CLIPPED), [("p", p)])])
    for step in range(1, 20):
        p.grad.fill_(size)
        optimizer.step(Rates(), loss_of(0.0))
        assert p.abs().max() <= 1.01 * step * CLIPPED["lr"]
    if size == 1e-15:  # whose square is not 0: as far as Adam's
        assert p.abs().min() >= 0.99 * step * CLIPPED["lr"]


@pytest.mark.parametrize("shape", [(8, 8), (32, 8), (8, 32)])
def test_polar_express_approaches_the_polar_factor(shape):
    g = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, vt = torch.linalg.svd(g, full_matrices=False)
    s = s / (s.norm(dim=-1, keepdim=True) * 1.02 + 1e-6)
    for a, b, c in POLAR_EXPRESS:  # an odd matrix polynomial acts on the singular values alone
        s = a * s + b * s**3 + c * s**5
    assert torch.allclose(polar_express(g, torch.float64), u @ torch.diag_embed(s) @ vt, atol=1e-10)
    assert (s - 1).abs().max() < 0.15


def test_bad_gradient_or_loss_changes_nothing_and_the_next_step_is_as_if_it_had_not_been():
    """Whatever stands beside the loss decides nothing."""
    clean, _, _ = run(3)
    params = parameters()
    optimizer = both(params)
    for t in (1, 2, 99, 98, 3):
        for name, p in params.items():
            p.grad.add_(gradient(name, t))
        if t == 99:
            params["c"].grad[0, 0] = float("nan")
        own = {"more": torch.tensor(math.nan)} | loss_of(math.inf if t == 98 else 2.5)
        optimizer.step(rates(t), own)
    for name in params:
        assert torch.equal(params[name], clean[name]), name


def test_a_rehearsal_changes_nothing():
    params, optimizer, _ = run(2)
    wanted, twin, _ = run(2)
    optimizer.rehearse()
    assert all(torch.equal(p, wanted[name]) for name, p in params.items())
    a, b = optimizer.state_dict(), twin.state_dict()
    assert a["steps"] == b["steps"]
    for key in ("first", "second"):
        assert all(torch.equal(x, b[key][name]) for name, x in a[key].items())


def test_state_survives_a_save_in_another_number_of_ranks(monkeypatch):
    """State written by one rank, read by three and put together from their parts."""
    monkeypatch.setattr(muon, "LARGE", 20)
    _, whole, _ = run(3)
    state = whole.state_dict()
    assert set(state["first"]) == set(SHAPES) and state["first"]["c"].shape == (4, 6)
    parts = []
    for rank in range(3):
        part = both(parameters(), rank=rank, world=3)
        part.load_state_dict(state)
        parts.append(part)
    for i, (_, buffer) in enumerate(parts[0].buffers):
        for key in buffer.state:
            data = torch.cat([part.buffers[i][1].state[key] for part in parts])
            for name, view in parts[0]._views(buffer, data):
                assert torch.equal(view, state[key][name]), (key, name)


def test_groups_cover_every_parameter_as_the_paper_lists():
    model = Model(ModelConfig())
    muon = model.muon_parameters()
    assert len(muon) == 3 * 6 and all(p.ndim == 2 for n, p in model.named_parameters() if n in muon)
    rest = {name for name, _ in model.named_parameters()} - muon
    path = {"injection.A_log", "injection.dt_bias", "injection.B"}
    gates = {f"blocks.{layer}.attn.gate.weight" for layer in (0, 2)}
    tables = {"wte.weight", "ve.0.weight", "ve.2.weight", "C.weight"}
    assert rest == path | gates | tables | {name for name in rest if "norm" in name}


def updated(rank=0, world=1):
    """Three steps of two micro-batches with Muon, then three of the clipped AdamW, on this rank's share of the
    gradient.
    """
    params = parameters()
    share = (rank + 1) * 2 / (world * (world + 1))  # over the ranks they add up to 1
    clipped = [(AdamW(**CLIPPED), list(params.items()))]
    for make in (lambda: both(params, rank=rank, world=world),
                 lambda: Optimizer(clipped, rank=rank, world=world)):  # fmt: skip
        optimizer = make()
        for t in range(1, 4):
            for part in (0.25, 0.75):
                terms = [(p * gradient(name, t)).sum() for name, p in params.items()]
                (sum(terms) * share * part).backward()
            out = optimizer.step(rates(t), loss_of(1.0))
    weights = {name: p.detach().clone() for name, p in params.items()}
    return {"weights": weights, "state": optimizer.state_dict(), "out": out}


def worker(rank, world, folder, large):
    torch.set_num_threads(1)
    muon.LARGE = large
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world)
    result = updated(rank, world)
    own = torch.cat([w.flatten() for w in result["weights"].values()])
    first = own.clone()
    dist.broadcast(first, 0)
    assert torch.equal(own, first)  # no rank drifts off
    layer = torch.nn.Linear(3, 2)  # of random weights
    torch.nn.init.constant_(layer.weight, rank)
    take_from_first(layer, Place(rank, world, torch.device("cpu")))
    assert (layer.weight == 0).all()
    if rank == 0:
        torch.save(result, folder / "out.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("large", [20, muon.LARGE])
def test_ranks_equal_one(world, large, tmp_path):
    """Where they share the update, and where each does all of it."""
    # macOS ends a forked process that looks up its host, as gloo does; elsewhere forking is faster
    start = "spawn" if sys.platform == "darwin" else "fork"
    mp.start_processes(worker, (world, tmp_path, large), nprocs=world, start_method=start)
    one, many = updated(), torch.load(tmp_path / "out.pt", weights_only=True)
    for name in SHAPES:
        assert torch.allclose(many["weights"][name], one["weights"][name], atol=2e-6), name
        for key in ("first", "second"):
            a, b = many["state"][key][name], one["state"][key][name]
            assert torch.allclose(a, b, atol=1e-6), (key, name)
    norms2 = many["out"]["grad_norm2"], one["out"]["grad_norm2"]
    assert abs(norms2[0] / norms2[1] - 1) < 1e-5 and many["out"]["loss"] == world
