"""The two mechanisms against the slow float64 network (oracle.py), and their starts."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import check_against_oracle, gradients, small_model, token_batch

from model import INJECTIONS, MECHANISMS, Model, ModelConfig

SMALL = ModelConfig(vocab_size=32, seq_len=6, d_model=16, n_head=2, d_mlp=24, mu_rec=5, streams=3)
BOTH = pytest.mark.parametrize("mechanism", [name for name in MECHANISMS if name != "none"])
DEPTHS = np.array([2, 7, 1, 3, 12, 5])
MIXED = np.maximum(DEPTHS - 3, 0), np.minimum(DEPTHS, 3)


def make(noise=0.05, **changes) -> Model:
    return small_model(replace(SMALL, **{"mu_bwd": 0} | changes), noise)


VARIANTS = [
    *({"injection": name} for name in INJECTIONS),
    {"gain": "zoh", "n_core": 2, "streams": 1},
    {"block": "resnorm", "mlp": "swiglu", "value_embeds": False, "readout": False, "injection": "none"},
    {"mu_rec": 1},  # four learned loop indices, and loops beyond them
]  # fmt: skip


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@BOTH
def test_active_rows_equal_each_row_alone_with_detach(mechanism, changes):
    """Loss and every gradient, queries, gates and loop vectors included, for mixed depths."""
    model = make(mechanism=mechanism, **changes)
    model.checkpoint_loops = changes.get("streams") == 1
    check_against_oracle(model, *MIXED)


@pytest.mark.parametrize("streams", [1, 4])
@torch.no_grad()
def test_at_initialisation_hyper_is_the_plain_loop_but_for_its_carry(streams):
    """The mean of the streams follows h <- σ(4) h + core(c) - c with c the mean (σ(4) of it for one stream).

    After one loop that differs from the plain loop by 1 - σ(4) = 1.8 % of h_0.
    """
    model = make(0.0, init="scaled", mechanism="hyper", streams=streams)
    ids, _, keys = token_batch(SMALL)
    r = 1 / (1 + math.exp(-4))
    h, inputs = model.enter_loop(ids, keys)
    for _, got, _ in model.states(ids, list(range(9)), keys):
        assert (got - h).norm() < 1e-6 * h.norm()  # the initial biases are float32
        c = h * r if streams == 1 else h
        h = r * h + model.core_step(c, inputs, None) - c


def test_streams_part_from_each_other():
    """With equal initial gates they could not: their gradients would always be equal."""
    model = make(0.0, mechanism="hyper", injection="none", init="scaled")
    loss, _ = model.loss(*token_batch(SMALL), np.zeros(6, int), np.full(6, 4))
    bias = gradients(model, loss)["mechanism.bias"].view(3, 3)  # (gate, stream)
    assert ((bias - bias.roll(1, 1)).norm(dim=0) > 1e-2 * bias.norm()).all()


def test_mechanisms_add_only_their_own_parameters_and_leave_them_to_adamw():
    plain = make(0.0).state_dict()
    for mechanism, count in (("attnres", 20 * 16), ("hyper", 20 * 16 + 3 * 16 + 9 * 48 + 9)):
        model = make(0.0, mechanism=mechanism)
        weights = model.state_dict()
        own = weights.keys() - plain.keys()
        assert sum(weights[name].numel() for name in own) == count
        assert not any(p.muon for name, p in model.named_parameters() if name in own)
        assert all(torch.equal(weights[name], p) for name, p in plain.items())
