"""After the warm-up nothing is compiled anew and nothing runs uncompiled: counted on the CPU, by dynamo and by calls."""

import copy
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import assert_same_gradients, gradients
from torch._dynamo.utils import counters

from looped.depth import sample_depths
from looped.layers import copied
from looped.machine import Place, choose_compile
from looped.memory import Step, activation_bytes, keep_less, warm_up
from looped.validation import HeldOut, validate
from model import Model, ModelConfig
from muon import AdamW, Optimizer, Rates
from train import Batch, training_step

CPU = Place(0, 1, torch.device("cpu"))
SMALL = ModelConfig(vocab_size=32, seq_len=8, d_model=16, n_head=1, d_mlp=16, mu_rec=4)
CASES = {
    "zoh": {"gain": "zoh"},
    "attnres": {"mechanism": "attnres"},
    "hyper": {"mechanism": "hyper"},
    "token depths": {"granularity": "token"},
    "recomputed loops": {"checkpoint_loops": True, "loss_chunk": 7, "injection": "concat"},
    "float32 residual": {"residual_dtype": torch.float32, "dtype": torch.bfloat16},
    "flat": {"n_core": 0},
    "for a CPU": {"for_cpu": True},
    "one row": {"rows": 1},
    "two rows, all loops with gradient": {"rows": 2, "sampling": "poisson-full"},
}
BOUND = 10  # graphs: six of the loop, two before it, one after it, one of validation


class Rows:
    """Seven rows of validation data."""

    seq_len = SMALL.seq_len

    def rows(self, split):
        return 7

    def get(self, split, ids):
        return np.random.default_rng(0).integers(0, 32, (7, self.seq_len + 1))[ids]


def batch(cfg, rows, step):
    """Two micro-batches of random tokens and depths."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 32, (2 * rows, cfg.seq_len + 1), generator=generator)
    n, k = sample_depths(cfg, 0, step, 2 * rows)
    return Batch(tokens, torch.arange(2 * rows), n, k, 2 * rows * cfg.seq_len)


def count_uncompiled(model, action) -> Counter:
    """Calls of the pieces' own Python while action() runs."""
    calls = Counter()
    codes = {getattr(type(model), name).__code__: name for name in (*model.PIECES, "run_blocks")}

    def profile(frame, event, arg):
        if event == "call" and frame.f_code in codes:
            calls[codes[frame.f_code]] += 1

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("recomputed", [False, True])
def test_all_rows_run_the_graphs_of_their_number(recomputed):
    """Others run the graphs for any number of rows, or for one."""
    torch._dynamo.reset()
    ran = []

    def backend(graph, inputs):
        sizes = [x for x in inputs if isinstance(x, torch.SymInt)]

        def run(*args):
            ran.append("any" if sizes else "own")
            return graph(*args)

        return run

    model = Model(SMALL)
    model.init_weights(0)
    model.checkpoint_loops = recomputed
    model.compile_pieces(backend=backend)
    warm_up(model, 4, Place(0, 1, torch.device("cpu")))
    some = batch(SMALL, 4, 0)
    inputs = (some.tokens[:4, :-1], some.tokens[:4, 1:], some.keys[:4])
    for n, k, expected in (
        ([3, 3, 3, 3], [2, 2, 2, 2], {"own"}),
        ([3, 2, 2, 2], [2, 2, 2, 2], {"own"}),  # one row is a number of its own
        ([3, 3, 3, 2], [2, 2, 2, 2], {"own", "any"}),
    ):
        ran.clear()
        model.loss(*inputs, np.array(n), np.array(k))[0].backward()
        assert set(ran) == expected


@pytest.mark.parametrize("for_cpu", [False, True])
def test_a_copy_of_a_compiled_model_computes_with_its_own_weights(for_cpu):
    """As an average of weights, or a frozen teacher, must."""
    torch._dynamo.reset()
    model, plain = Model(SMALL), Model(SMALL)
    model.init_weights(0)
    model.compile_pieces(backend="eager", for_cpu=for_cpu)
    own = copy.deepcopy(model)
    for other in (own, plain):
        other.init_weights(1)
    some = batch(SMALL, 4, 0)
    rows = (some.tokens[:, :-1], some.tokens[:, 1:], [1, 4], some.keys)
    want, found, others = plain.losses(*rows), own.losses(*rows), model.losses(*rows)
    for depth, losses in want.items():
        assert torch.equal(found[depth], losses) and not torch.equal(others[depth], losses)
    assert own.whole_step is None and model.whole_step is not None


def test_on_a_gpu_the_warm_up_meets_every_number_of_rows():
    """Inductor bound the graph of two rows to at most three: thirty were compiled in a step."""
    model = Model(SMALL)
    model.init_weights(0)
    step = model.core_step
    seen = set()

    def core_step(h, *rest):
        seen.add((len(h), torch.is_grad_enabled()))
        return step(h, *rest)

    model.core_step = core_step
    warm_up(model, 6, SimpleNamespace(is_gpu=True, device=torch.device("cpu")))
    assert seen == set(product(range(1, 7), (True, False)))


@pytest.mark.parametrize("case", CASES)
def test_nothing_compiles_after_the_warm_up(case):
    """Random depths, validation first as after --resume, its ragged last batch, validation between steps."""
    torch._dynamo.reset()
    counters.clear()
    changes = dict(CASES[case])
    rows = changes.pop("rows", 4)
    for_cpu = changes.pop("for_cpu", False)
    own = {name: changes.pop(name) for name in list(changes) if name in ("dtype", "residual_dtype", "checkpoint_loops", "loss_chunk")}  # fmt: skip
    model = Model(replace(SMALL, **{"mu_bwd": 0} | changes))
    model.init_weights(0)
    vars(model).update(own)
    some = batch(model.cfg, rows, 0)
    inputs = (some.tokens[:rows, :-1], some.tokens[:rows, 1:], some.keys[:rows])
    depths = some.n[:rows], some.k[:rows]
    want = gradients(model, model.loss(*inputs, *depths)[0])
    optimizer = Optimizer([(AdamW(1e-3), list(model.named_parameters()))])
    held_out = HeldOut(Rows(), torch.ones(32), 1e6)
    model.compile_pieces(backend="eager", for_cpu=for_cpu)
    warm_up(model, rows, CPU)
    optimizer.zero_grad()
    graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs <= BOUND
    wanted_depths = [1, model.cfg.mu_rec] if model.cfg.n_core else [0]

    def a_run():
        validate(model, held_out, wanted_depths, rows)
        for step in range(8):
            training_step(model, optimizer, batch(model.cfg, rows, step), rows, Rates(lr=0.0))
        validate(model, held_out, wanted_depths[-1:], rows)
        return gradients(model, model.loss(*inputs, *depths)[0])

    got = {}
    calls = count_uncompiled(model, lambda: got.update(a_run()))
    assert counters["stats"]["unique_graphs"] == graphs
    assert_same_gradients(got, want, 0.05 if "dtype" in own else 2e-5)
    if for_cpu:
        assert calls.keys() <= {"token_losses", "run_blocks"}
    else:
        assert not calls
        assert not counters["graph_break"]


@pytest.mark.skipif(not choose_compile("auto", 10_000, CPU), reason="no g++, or no Python.h")
def test_what_inductor_compiles_for_a_cpu_computes_the_same():
    torch._dynamo.reset()
    model = Model(replace(SMALL, mu_bwd=2, token_shift=True))
    model.init_weights(0)
    some = batch(model.cfg, 4, 0)
    inputs = some.tokens[:, :-1], some.tokens[:, 1:], some.keys, some.n, some.k
    want = gradients(model, model.loss(*inputs)[0])
    model.compile_pieces(for_cpu=True)
    assert_same_gradients(gradients(model, model.loss(*inputs)[0]), want, 1e-4)


def core_step_of(keeps_less: bool, **changes) -> tuple:
    """A compiled core step in bfloat16 -> (numbers kept for its backward pass, as bfloat16, state, gradients)."""
    torch._dynamo.reset()
    keep_less(keeps_less)
    cfg = ModelConfig(vocab_size=64, seq_len=520, d_model=64, n_head=1, d_mlp=256, **changes)
    model = Model(cfg)
    model.init_weights(0)
    model.dtype = torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data += 0.02 * torch.randn(p.shape, generator=generator)
    ids = torch.randint(0, 64, (2, cfg.seq_len), generator=generator)
    with torch.no_grad():
        h, inputs = model.enter_loop(ids, torch.arange(2))
    model.compile_pieces(backend="aot_eager_decomp_partition")  # torch's partitioner, no kernels
    h.requires_grad_()
    kept = {}

    def keep(x):
        if not isinstance(x, torch.nn.Parameter):
            kept[x.data_ptr()] = x.nbytes / 2
        return x

    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with saved, copied(model.blocks[1:2], model.dtype):
        out = model.core_step(h, inputs, torch.zeros(2, dtype=torch.int64))
    found = gradients(model, out.float().square().sum())
    return sum(kept.values()), out, found | {"h": h.grad}


@pytest.mark.parametrize("mlp", ["relu2", "swiglu"])
def test_keeping_less_keeps_what_is_predicted_and_changes_no_bit(mlp):
    try:
        for_all = core_step_of(False, mlp=mlp)
        for_less = core_step_of(True, mlp=mlp)
    finally:
        keep_less(False)
    cfg = ModelConfig(seq_len=520, d_mlp=256, n_prelude=0, n_coda=0, mlp=mlp)
    cfg = replace(cfg, mu_rec=1, mu_bwd=1, sampling="fixed")
    for less, (kept, _, _) in ((False, for_all), (True, for_less)):
        predicted = activation_bytes(cfg, Step(rows=2, keep_less=less)) / 2
        assert kept == pytest.approx(predicted, rel=0.05)
    assert torch.equal(for_all[1], for_less[1])
    for name, value in for_all[2].items():
        assert torch.equal(value, for_less[2][name]), name
