"""After the warm-up nothing is compiled anew: counted on the CPU, by dynamo."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_same_gradients, gradients
from torch._dynamo.utils import counters

from launch import try_deepest
from looped.depth import sample_depths, share_out
from looped.machine import ONE_PROCESS
from model import Model, ModelConfig

SMALL = ModelConfig(vocab_size=32, seq_len=8, d_model=16, n_head=1, d_mlp=16, mu_rec=4)
ROWS = 4
CASES = {
    "attnres": {"mechanism": "attnres"},
    "hyper": {"mechanism": "hyper"},
    "flat": {"n_core": 0},
    "recomputed loops": {"injection": "concat"},
    "bfloat16 with a float32 residual": {},
}
BOUND = 8  # graphs: three before the loop, two in it, two after it, and one to spare


def batch(cfg, step):
    """Arguments of Model.loss, sequences deepest first."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 32, (ROWS, cfg.seq_len + 1), generator=generator)
    n, k = sample_depths(cfg, 0, step, ROWS)
    (order,) = share_out(n, k, 1)
    return tokens[:, :-1], tokens[:, 1:], torch.arange(ROWS), n[order], k[order]


@pytest.mark.parametrize("case", CASES)
def test_nothing_compiles_after_the_warm_up(case):
    """Random depths, any number of rows in a loop, validation in between; gradients as uncompiled."""
    torch._dynamo.reset()
    counters.clear()
    model = Model(replace(SMALL, **{"mu_bwd": 0} | CASES[case]))
    model.init_weights(0)
    model.checkpoint_loops = case == "recomputed loops"
    if case == "bfloat16 with a float32 residual":
        model.dtype, model.residual_dtype = torch.bfloat16, torch.float32
    cfg = model.cfg
    want = gradients(model, model.loss(*batch(cfg, 8))[0])
    model.compile_pieces(backend="eager")
    try_deepest(model, SimpleNamespace(seed=0), ROWS, ONE_PROCESS)
    graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs <= BOUND and not counters["graph_break"]
    for step in range(1, 9):
        ids, targets, keys, n, k = batch(cfg, step)
        got = gradients(model, model.loss(ids, targets, keys, n, k)[0])
        model.losses(ids, targets, [1, cfg.mu_rec], keys)
    assert counters["stats"]["unique_graphs"] == graphs
    assert_same_gradients(got, want, 0.05 if model.dtype == torch.bfloat16 else 2e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a C++ compiler")
def test_what_inductor_compiles_for_a_cpu_computes_the_same():
    torch._dynamo.reset()
    model = Model(replace(SMALL, mu_bwd=2, token_shift=True))
    model.init_weights(0)
    want = gradients(model, model.loss(*batch(model.cfg, 0))[0])
    model.compile_pieces(for_cpu=True)
    assert_same_gradients(gradients(model, model.loss(*batch(model.cfg, 0))[0]), want, 1e-4)
