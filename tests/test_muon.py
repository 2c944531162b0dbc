"""The optimiser against float64 formulas, and itself on other numbers of ranks."""

import math
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from oracle import SlowOptimizer

from model import Model, ModelConfig
from muon import AdamW, Muon, Optimizer, Rates, polar_express

SHAPES = {"a": (6, 4), "b": (6, 4), "c": (4, 6), "d": (5, 5), "e": (7, 3), "f": (11,)}
SHAPES |= dict.fromkeys("ghijk", (6, 4))
MATRICES = set(SHAPES) - {"e", "f"}


def parameters():
    g = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(s, generator=g)) for name, s in SHAPES.items()}


def gradient(name, step):
    g = torch.Generator().manual_seed(1000 * step + ord(name))
    return torch.randn(SHAPES[name], generator=g)


def muon_and_adamw(params, **more):
    rest = [(name, p) for name, p in params.items() if name not in MATRICES]
    matrices = [(name, p) for name, p in params.items() if name in MATRICES]
    return Optimizer([(AdamW(4e-3), rest), (Muon(8e-3), matrices)], **more)


def clipped_adamw(params, **more):
    rule = AdamW(3e-3, betas=(0.9, 0.95), eps=0.0, update_clip=True)
    return Optimizer([(rule, list(params.items()))], **more)


def rates(step):
    """A schedule that moves everything."""
    return Rates(lr=1 - step / 10, weight_decay=1 - step / 20, momentum=0.85 + step / 50)


def take_steps(params, optimizer, steps, share=1.0):
    """Steps of which this rank has a share of the gradients -> the sums of the last one."""
    for t in steps:
        for name, p in params.items():
            (p * gradient(name, t) * share).sum().backward()
        summed = optimizer.step(rates(t), {"loss": torch.tensor(2.5 * share)})
    return summed


def test_step_equals_slow_float64_reference():
    params = parameters()
    want = {name: p.detach().double() for name, p in params.items()}
    slow = SlowOptimizer(want, MATRICES, 8e-3, 4e-3)
    summed = take_steps(params, muon_and_adamw(params), range(1, 6))
    for t in range(1, 6):
        gradients = {name: gradient(name, t) for name in SHAPES}
        slow.step(gradients, **vars(rates(t)))
    for name, p in params.items():
        assert (p - want[name]).abs().max() < 2e-5, name
    norm2 = sum((g.double() ** 2).sum() for g in gradients.values())
    assert abs(summed["grad_norm2"] / norm2 - 1) < 1e-5
    assert summed["loss"] == 2.5 and summed["ok"] == 1


def test_update_clipping_equals_a_float64_formula():
    """AdamW without epsilon, each tensor's rate clipped; an element that never had a gradient stays."""
    p = torch.nn.Parameter(torch.ones(12))
    optimizer = clipped_adamw({"p": p, "other": torch.nn.Parameter(torch.ones(5))}, clip=1e9)
    want, first, second = np.ones(12), 0.0, 0.0
    for t in range(1, 5):
        g = np.random.default_rng(t).normal(size=12) * 10.0 ** (t - 2)  # so that clipping acts
        g[0] = 0
        p.grad.add_(torch.from_numpy(g))
        optimizer.step(Rates(), {"loss": torch.tensor(0.0)})
        first = 0.9 * first + 0.1 * g
        second = 0.95 * second + 0.05 * g**2
        hat = np.where(g == 0, 1, second / (1 - 0.95**t))
        rms = np.sqrt((g**2 / hat).mean())
        want = want - 3e-3 / max(1, rms) * first / (1 - 0.9**t) / np.sqrt(hat)
    assert rms > 1 and p[0] == 1
    assert np.abs(p.detach().numpy() - want).max() < 1e-6


def test_a_parameter_may_carry_its_own_rate():
    p, q = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    q.lr = 0.25
    optimizer = Optimizer([(AdamW(4e-3), [("p", p), ("q", q)])])
    (p.sum() + q.sum()).backward()
    optimizer.step(Rates(), {"loss": torch.tensor(0.0)})
    assert (q == 0.25 * p).all() and (p < 0).all()


@pytest.mark.parametrize("size", [1e-15, 1e-19, 1e-23, 1e-30])
def test_without_epsilon_no_gradient_is_too_small(size):
    """Its square may be 0 in float32; no element moves further than Adam's do."""
    p = torch.nn.Parameter(torch.zeros(8))
    optimizer = clipped_adamw({"p": p})
    for step in range(1, 20):
        p.grad.fill_(size)
        optimizer.step(Rates(), {"loss": torch.tensor(0.0)})
        assert p.abs().max() <= 1.01 * step * 3e-3


@pytest.mark.parametrize("shape", [(8, 8), (32, 8), (8, 32)])
def test_polar_express_approaches_the_polar_factor(shape):
    """U Vᵀ, but for singular values that end within 0.15 of 1."""
    g = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    u, _, vt = torch.linalg.svd(g, full_matrices=False)
    values = u.mT @ polar_express(g) @ vt.mT
    assert (values - torch.eye(8)).abs().max() < 0.15


@pytest.mark.parametrize("bad", ["gradient", "loss"])
def test_a_step_that_is_not_finite_changes_nothing_and_says_so(bad):
    params, clean = parameters(), parameters()
    optimizer, twin = muon_and_adamw(params), muon_and_adamw(clean)
    take_steps(params, optimizer, [1, 2])
    params["c"].grad[0, 0] = math.nan if bad == "gradient" else 1.0
    loss = torch.tensor(math.inf if bad == "loss" else 2.5)
    assert optimizer.step(rates(3), {"loss": loss})["ok"] == 0
    take_steps(params, optimizer, [3])
    take_steps(clean, twin, [1, 2, 3])
    assert all(torch.equal(p, clean[name]) for name, p in params.items())


def test_adamw_takes_what_the_paper_lists():
    """The loop's own parameters, gates, norms and tables; Muon the six matrices of each block."""
    named = list(Model(ModelConfig()).named_parameters())
    rest = {name for name, p in named if not p.muon and "norm" not in name}
    gates = {f"blocks.{layer}.attn.gate.weight" for layer in (0, 2)}
    tables = {"wte.weight", "ve.0.weight", "ve.2.weight", "C.weight"}
    assert rest == {"injection.A_log", "injection.dt_bias", "injection.B"} | gates | tables
    assert sum(p.muon for _, p in named) == 3 * 6


def continued(make, state, rank=0, world=1):
    """Two more steps from a state -> weights and moments by name, and the step's sums."""
    params = parameters()
    optimizer = make(params, rank=rank, world=world)
    optimizer.load_state_dict(state)
    share = (rank + 1) * 2 / (world * (world + 1))  # over the ranks they add up to 1
    summed = take_steps(params, optimizer, [2, 3], share)
    moments = optimizer.state_dict()
    weights = {name: p.detach() for name, p in params.items()}
    return {"weights": weights, "sums": summed, **moments}


def worker(rank, world, make, state, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world)
    torch.save(continued(make, state, rank, world), folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 5])
@pytest.mark.parametrize("make", [muon_and_adamw, clipped_adamw])
def test_ranks_go_on_from_the_state_of_one_as_one_does(world, make, tmp_path):
    params = parameters()
    optimizer = make(params)
    take_steps(params, optimizer, [1])
    state = optimizer.state_dict()
    # macOS ends a forked process that looks up its host, as gloo does; elsewhere forking is faster
    start = "spawn" if sys.platform == "darwin" else "fork"
    mp.start_processes(worker, (world, make, state, tmp_path), nprocs=world, start_method=start)
    want = continued(make, state)
    first, *others = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]
    for kind in ("weights", "sums", "first", "second"):
        for name, wanted in want[kind].items():
            assert torch.allclose(first[kind][name], wanted, rtol=1e-5, atol=2e-6), (kind, name)
    for other in others:  # no rank drifts off
        assert all(torch.equal(w, first["weights"][name]) for name, w in other["weights"].items())
