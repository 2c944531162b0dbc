"""The two mechanisms against the slow float64 network (oracle.py), their starts, and the whole family of loops."""

import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from helpers import (
    assert_same_gradients,
    check_against_oracle,
    gradients,
    small_model,
    token_batch,
)

from looped.depth import sample_depths
from model import CHOICES, GAINS, INJECTIONS, MECHANISMS, Model, ModelConfig, discretise
from muon import AdamW, Muon, Optimizer, Rates

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
    """Loss and every gradient, queries, gates and loop vectors included, for mixed depths out of order."""
    model = make(mechanism=mechanism, **changes)
    model.checkpoint_loops = changes.get("streams") == 1
    check_against_oracle(model, *MIXED)


@pytest.mark.parametrize("sampling", CHOICES["sampling"])
@BOTH
def test_every_law_equals_each_row_alone(mechanism, sampling):
    model = make(mechanism=mechanism, sampling=sampling, mu_rec=4)
    check_against_oracle(model, *sample_depths(model.cfg, 3, 5, 3))


@BOTH
def test_no_gradient_flows_through_the_first_loops(mechanism):
    """Four loops without gradient, two with: the first four learned vectors get exactly none."""
    model = make(mechanism=mechanism)
    ids, targets, keys = token_batch(SMALL, 2)
    name = "mechanism.query" if mechanism == "attnres" else "mechanism.phase"
    grad = gradients(model, model.loss(ids, targets, keys, [4, 4], [2, 2])[0])[name]
    assert (grad.norm(dim=-1) > 0).nonzero().flatten().tolist() == [4, 5]


# -- initialisation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("injection", INJECTIONS)
def test_at_initialisation_attnres_is_the_mean_of_its_history(injection):
    """q = 0 weighs h_0 and all changes alike."""
    model = make(0.0, injection=injection, init="scaled", mechanism="attnres")
    ids, _, keys = token_batch(SMALL)
    h, inputs = model.enter_loop(ids, keys)
    history = [h]
    for _, got in model.states(ids, [1, 2, 3, 4], keys):
        history.append(model.core_step(h, inputs, None) - h)
        h = sum(history) / len(history)
        assert torch.allclose(got, h, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("injection", INJECTIONS)
@pytest.mark.parametrize("streams", [1, 4])
@torch.no_grad()
def test_at_initialisation_hyper_is_the_plain_loop_but_for_its_carry(injection, streams):
    """The mean of the streams follows h <- σ(4) h + core(c) - c with c the mean (σ(4) of it for one stream).

    After one loop that differs from the plain loop by 1 - σ(4) = 1.8 % of h_0.
    """
    model = make(0.0, injection=injection, init="scaled", mechanism="hyper", streams=streams)
    ids, _, keys = token_batch(SMALL)
    r = 1 / (1 + math.exp(-4))
    h, inputs = model.enter_loop(ids, keys)
    for _, got in model.states(ids, list(range(9)), keys):
        assert (got - h).norm() < 1e-6 * h.norm()  # the initial biases are float32
        c = h * r if streams == 1 else h
        h = r * h + model.core_step(c, inputs, None) - c


def test_streams_part_from_each_other():
    """With equal initial gates they could not: their gradients would be equal for ever."""
    model = make(0.0, mechanism="hyper", injection="none", init="scaled")
    loss, _ = model.loss(*token_batch(SMALL), [0] * 6, [4] * 6)
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


# -- the family --------------------------------------------------------------------------------------------------------

LAWS = list(product(CHOICES["sampling"], CHOICES["granularity"]))


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("injection", INJECTIONS)
def test_all_combinations_train(injection, mechanism):
    """Two steps on one batch: finite and falling loss, for every depth law and granularity."""
    cfg = ModelConfig(vocab_size=16, seq_len=5, d_model=8, n_head=1, d_mlp=8, mu_rec=3, streams=2,
                      init="scaled", injection=injection, mechanism=mechanism)  # fmt: skip
    for sampling, granularity in LAWS:
        if mechanism != "none" and granularity == "token":
            continue
        model = Model(replace(cfg, sampling=sampling, granularity=granularity))
        model.init_weights(0)
        groups = {True: [], False: []}
        for name, p in model.named_parameters():
            groups[p.muon].append((name, p))
        optimizer = Optimizer([(AdamW(0.01), groups[False]), (Muon(0.01), groups[True])])
        n, k = sample_depths(model.cfg, 0, 0, 3)
        losses = []
        for _ in range(3):
            loss = model.loss(*token_batch(model.cfg, 3), n, k)[0] / 15
            losses.append(loss.item())
            loss.backward()
            out = optimizer.step(Rates(weight_decay=0.0), {"loss": loss.detach()})
            assert out["grad_norm2"].isfinite()
        assert all(b < a < 10 for a, b in pairwise(losses)), (sampling, granularity, losses)


def test_concat_reduces_to_the_other_injections():
    """W = [I I] is add, [Ā, Diag(gain) B] diagonal, [0 I] forgets the state, [I 0] sees no token."""
    same = {"init": "scaled", "value_embeds": False}
    concat = make(injection="concat", **same)
    eye, zero = torch.eye(16).double(), torch.zeros(16, 16).double()
    ids, targets, keys = token_batch(SMALL)

    def shared_gradients(model):
        found = gradients(model, model.loss(ids, targets, keys, *MIXED)[0])
        return {name: g for name, g in found.items() if not name.startswith("injection.")}

    def set_both(carry, write):
        concat.injection.W.data = torch.cat([carry, write], 1)

    for changes in ({"injection": "add"}, *({"gain": gain} for gain in GAINS)):
        other = make(**changes, **same)
        weights = concat.state_dict()
        del weights["injection.W"]
        other.load_state_dict(weights, strict=False)
        carry, write = eye, eye
        if "gain" in changes:
            path = other.injection
            decay, gain = discretise(path.A_log, path.dt_bias, path.gain_rule)
            carry, write = decay.diag().double(), gain[:, None] * path.B.data
        set_both(carry.detach(), write.detach())
        assert_same_gradients(shared_gradients(concat), shared_gradients(other), 2e-6)
    set_both(zero, eye)
    assert torch.equal(concat.hidden(ids, 1, keys), concat.hidden(ids, 9, keys))
    set_both(eye, zero)
    other = (ids + 1) % SMALL.vocab_size
    assert torch.equal(concat.hidden(ids, 5, keys), concat.hidden(other, 5, keys))
