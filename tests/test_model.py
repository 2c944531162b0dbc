"""The network against closed forms, a slow float64 network written from the equations (oracle.py), and naive loops."""

import functools
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    check_against_oracle,
    gradients,
    small_model,
    token_batch,
)
from oracle import Oracle, hashed_state
from torch.utils.flop_counter import FlopCounterMode

from launch import NoModules, loss_flops, steps_for, training_flops
from looped import randomness
from looped.depth import deepest, sample_depths, staircase, training_plan
from looped.ops import attend, attends_by_products, hashed_normal, ones, parameter
from looped.randomness import GOLDEN, finalise, hash_key, mix64, permute, uniforms
from model import (
    CHOICES,
    INJECTIONS,
    MLP,
    MLPS,
    PRESETS,
    LoopInputs,
    Model,
    ModelConfig,
    discretise,
    flat_twin,
    parameter_count,
)
from tools.sample import Depth, KVCache, read

SMALL = ModelConfig(vocab_size=40, seq_len=6, d_model=16, n_head=2, d_mlp=24, mu_rec=5)


PAPER = PRESETS["parcae-140m"]
KEYS = torch.tensor([[5], [hash_key(1, 2)], [-9]])


DEPTHS = np.array([2, 7, 1, 3, 12, 5])


DEEPEST_FIRST = np.sort(DEPTHS)[::-1]
MIXED = np.maximum(DEEPEST_FIRST - 3, 0), np.minimum(DEEPEST_FIRST, 3)


def make(**changes) -> Model:
    return small_model(replace(SMALL, **{"mu_bwd": 0} | changes))


COUNTS = {  # the papers' tables, but for parcae-rdm-100m, where they print the RDM's; README's for nano
    "nano": 344_704, "transformer-nano": 344_576,
    "transformer-140m": 143_141_184, "transformer-370m": 385_903_104, "transformer-770m": 773_375_040,
    "transformer-1.3b": 1_333_868_544, "parcae-140m": 144_323_136, "parcae-370m": 388_003_328,
    "parcae-770m": 776_655_680, "parcae-1.3b": 1_338_591_744, "rdm-100m": 114_242_560, "rdm-350m": 382_765_056,
    "parcae-rdm-100m": 113_189_888, "parcae-rdm-350m": 378_558_464,
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_the_papers(name):
    assert parameter_count(PRESETS[name]) == COUNTS[name]


def test_presets_are_the_papers():
    assert PAPER.value_layers() == [1, 3, 5] and PAPER.rope_theta == 50_000
    for name, mu_rec in {"rdm-100m": 16, "parcae-rdm-100m": 16, "rdm-350m": 8}.items():
        assert (PRESETS[name].mu_rec, PRESETS[name].mu_bwd) == (mu_rec, mu_rec / 2)


@pytest.mark.parametrize("name", ["parcae-140m", "transformer-140m", "rdm-100m"])
def test_flops_are_those_of_the_matrices_and_of_attention(name):
    """Of every matrix that multiplies activations, the head's and the gates' too (paper, appendix)."""
    c = PRESETS[name]
    d, tables = c.d_model, len(c.value_layers())
    layer = 4 * d * d + (3 if c.mlp == "swiglu" else 2) * d * c.d_mlp
    gate = 32 * c.n_head
    layers = c.n_layer()
    core = c.n_core * layer + tables * gate // 3 + (d * d if c.injection == "concat" else 0)
    once = (layers - c.n_core) * layer + c.vocab_size * d + c.readout * (c.n_core > 0) * d * d
    once += tables * gate * 2 // 3 + (d * d if c.n_core else 0)  # B, or the RDM's write
    core, once = (core, once) if c.n_core else (0, once + tables * gate // 3)
    n, k = c.mu_rec - c.mu_bwd, c.mu_bwd
    attention = 4 * c.seq_len * d * (3 * (layers - c.n_core) + c.n_core * (n + 3 * k))
    a_token = 2 * n * core + 6 * (k * core + once) + attention
    assert loss_flops(c, np.array([n, n]), np.array([k, k])) == 2 * c.seq_len * a_token


def test_flops_of_a_run_are_those_that_its_batches_run():
    c = replace(SMALL, mu_bwd=2, sampling="poisson-fill")
    model = Model(c).to("meta")
    ids = torch.zeros(4, c.seq_len, dtype=torch.int64, device="meta")
    keys = torch.zeros(4, dtype=torch.int64, device="meta")
    flops = 0
    for step in range(3):
        n, k = sample_depths(c, 5, step, 4)
        order = np.argsort(-(n + k), kind="stable")
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = NoModules()
        with counter:
            loss, _ = model.loss(ids, ids, keys, n[order], k[order])
            loss.backward()
        flops += counter.get_total_flops()
    assert training_flops(c, 5, 4, 3) == flops
    assert steps_for(flops, c, 5, 4) == 3 and steps_for(flops + 1, c, 5, 4) == 4


def test_a_law_is_told_how_much_of_the_training_has_passed(monkeypatch):
    def growing(mu_rec, mu_bwd, u, v, progress):
        depth = np.full(u.shape, 1 + int(4 * progress))
        return depth - 1, np.ones_like(depth)

    monkeypatch.setitem(CHOICES["sampling"], "growing", growing)
    c = replace(SMALL, sampling="growing")
    loops = [loss_flops(c, np.array([n]), np.array([1])) for n in range(4)]
    assert training_flops(c, 0, 2, 8) == 4 * sum(loops)


def test_zoh_gain_equals_float64_formula():
    for product in np.logspace(-12, math.log10(50), 60):
        for dt in (0.05, 0.8047, 3.0):
            a_log = torch.tensor([math.log(product / dt)])
            bias = torch.tensor([dt + math.log(-math.expm1(-dt))])
            a, d = a_log.double().exp(), F.softplus(bias.double())  # of the float32 parameters
            decay, gain = discretise(a_log, bias, "zoh")
            assert abs(gain.double() / (-torch.expm1(-d * a) / a) - 1) < 1e-5
            if product >= 2.0**-23:
                assert abs(decay.double() - torch.exp(-d * a)) < 3e-6


def test_decay_lies_strictly_between_0_and_1_for_every_float32():
    ends = [0.0, 1.0, 40.0, 41.0, 200.0, 3.4e38, math.inf]
    worst = torch.tensor([-x for x in ends] + ends)
    for rule in CHOICES["gain"]:
        decay, gain = discretise(*torch.meshgrid(worst, worst, indexing="ij"), rule)
        assert ((decay > 0) & (decay < 1) & (gain > 0) & torch.isfinite(gain)).all()


@torch.no_grad()
def test_spectra_equal_numpys():
    diagonal, concat = make(gain="zoh"), make(injection="concat")
    path, both = diagonal.injection, concat.injection.W
    decay, gain = discretise(path.A_log, path.dt_bias, "zoh")
    for model, carry, write in (
        (diagonal, decay.diag(), gain[:, None] * path.B),
        (concat, both[:, :16], both[:, 16:]),
    ):
        got = model.spectra()
        rho = abs(np.linalg.eigvals(carry.numpy())).max()
        assert got["rho"] == pytest.approx(rho, abs=1e-5)
        matrices = {"carry_norm": carry, "write_norm": write, "readout_norm": model.C.weight}
        for name, matrix in matrices.items():
            assert got[name] == pytest.approx(np.linalg.norm(matrix.numpy(), 2), abs=1e-5)


def test_the_raw_loop_keeps_its_state_where_the_core_adds_nothing():
    """To the last bit: under "hyper" rounding would be a gradient, and AdamW makes any into a step."""
    model = Model(replace(SMALL, injection="none", state_init="normal"))
    model.init_weights(0)  # attention and MLP outputs are 0
    ids, _, keys = token_batch(SMALL)
    h, inputs = model.enter_loop(ids, keys)
    assert torch.equal(model.core_step(h, inputs, None), h)


VARIANTS = [
    *({"injection": name} for name in INJECTIONS),
    {"gain": "zoh", "n_core": 2, "n_prelude": 2, "n_coda": 2},
    {"block": "resnorm", "mlp": "swiglu", "value_embeds": False, "qk_norm": False, "readout": False},
    {"prelude_norm": False, "state_init": "zero"},
    {"state_init": "normal", "rope_theta": 100.0, "token_shift": True},
    {"input_matrix": False, "readout": False},
    {"n_core": 0, "n_prelude": 3, "n_coda": 0, "token_shift": True},
]  # fmt: skip


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_active_rows_equal_each_row_alone_with_detach(changes):
    """Loss and every gradient for mixed depths: the loop over active rows, and each row by itself."""
    model = make(**changes)
    flat = np.zeros(6, np.int64)
    check_against_oracle(model, *(MIXED if model.cfg.n_core else (flat, flat)))


@pytest.mark.parametrize("changes", [
    {"granularity": "batch", "sampling": "poisson-truncated-full"},
    {"injection": "none", "sampling": "poisson-full"},
    {"sampling": "poisson-fill"},
], ids=str)  # fmt: skip
def test_every_laws_batches_equal_each_row_alone(changes):
    model = make(mu_rec=3, **changes)
    model.checkpoint_loops = "granularity" in changes
    check_against_oracle(model, *sample_depths(model.cfg, 3, 5, 3))


def test_states_and_losses_at_several_depths_equal_the_oracles():
    model = make()
    ids, targets, keys = token_batch(SMALL, 2)
    oracle = Oracle(model.cfg, model.state_dict())
    rows = [oracle.states(ids[i], int(keys[i]), 7, 0) for i in (0, 1)]
    losses = model.losses(ids, targets, [7, 1, 0, 3], keys)
    for depth, h, inputs in model.states(ids, [7, 1, 0, 3], keys):
        assert torch.allclose(h, torch.stack([row[depth] for row in rows]), atol=1e-5)
        assert torch.allclose(model.coda(h, ids, inputs), model.hidden(ids, depth, keys), atol=1e-9)
        for i in (0, 1):
            want = oracle.token_losses(rows[i][depth], ids[i], targets[i])
            assert torch.allclose(losses[depth][i].double(), want, atol=1e-5)
    assert list(losses) == [0, 1, 3, 7]


def test_right_padding_and_batch_do_not_change_a_row():
    model = make()
    ids, _, keys = token_batch(SMALL)
    part = model.hidden(ids[2:4, :4], 5, keys[2:4])
    assert torch.allclose(model.hidden(ids, 5, keys)[2:4, :4], part, atol=1e-9)


def test_a_window_is_seen_by_every_kernel(monkeypatch):
    """Three layers of three tokens each reach six tokens back, and no further; in bfloat16 too."""
    monkeypatch.setattr("model.sees", lambda query, key: (key <= query) & (key > query - 3))
    for dtype in (torch.float64, torch.bfloat16):
        model = make(seq_len=12)
        model.dtype = dtype
        ids, _, keys = token_batch(model.cfg, 2)
        other = ids.clone()
        other[:, 2] = (ids[:, 2] + 1) % 40
        changed = model.hidden(ids, 1, keys) != model.hidden(other, 1, keys)
        assert changed.any(-1).any(0).nonzero().flatten().tolist() == list(range(2, 9))
    model.dtype = torch.float64
    cache = KVCache(model, 12, 2)
    pieces = [read(model, token, keys, cache, Depth(2))[0] for token in ids.split(1, dim=1)]
    assert torch.allclose(torch.cat(pieces, 1), model.hidden(ids, 2, keys), atol=1e-9)


def poisson_pmf(mean, size=60):
    k = np.arange(size)
    log_factorial = np.cumsum(np.log(np.maximum(k, 1)))
    return np.exp(k * np.log(mean) - mean - log_factorial)


def law_of_depth(sampling):
    """The distribution of n + k at mu_rec 8, mu_bwd 4, from the papers' formulas."""
    if sampling == "fixed":
        return np.eye(60)[8]
    if sampling == "poisson-fill":
        return np.roll(poisson_pmf(4), 4)
    if sampling == "poisson-lognormal-fill":
        x = np.linspace(-8, 8, 2001)
        weight = np.exp(-x * x / 2) / np.exp(-x * x / 2).sum()
        rates = np.exp(math.log(4) - 0.5**2 / 2 + 0.5 * x)
        mixture = sum(w * poisson_pmf(rate, 400) for w, rate in zip(weight, rates, strict=True))
        return np.roll(mixture, 5)[:60]
    p = poisson_pmf(8)
    p[1] += p[0]
    p[0] = 0
    return p


@pytest.mark.parametrize("sampling", CHOICES["sampling"])
def test_depths_follow_their_law(sampling):
    c = replace(PAPER, sampling=sampling)
    n, k = np.concatenate([sample_depths(c, 0, step, 256) for step in range(400)], axis=1)
    depth = n + k
    want = law_of_depth(sampling) * len(depth)
    count = np.bincount(depth, minlength=60)[:60]
    keep = want > 5
    chi2 = ((count - want)[keep] ** 2 / want[keep]).sum()
    assert chi2 < keep.sum() + 5 * math.sqrt(2 * keep.sum()) and count[want == 0].sum() == 0
    gradient_loops = {"poisson-full": depth, "poisson-truncated-full": np.minimum(depth, 4)}
    assert (k == gradient_loops.get(sampling, 4)).all()


@pytest.mark.parametrize("sampling", CHOICES["sampling"])
def test_no_draw_of_a_long_run_is_deeper_than_the_probe(sampling):
    c = replace(PAPER, sampling=sampling)
    probe_n, probe_k = deepest(c, 2)
    n, k = np.concatenate([sample_depths(c, 5, step, 256) for step in range(1000)], axis=1)
    assert n.max() <= probe_n[0] <= 80 and k.max() <= probe_k[0] <= 30


def test_granularity_says_what_shares_a_depth():
    depth = sum(sample_depths(replace(PAPER, granularity="batch"), 0, 0, 256)).reshape(8, 32)
    assert (depth == depth[:, :1]).all() and len(set(depth[:, 0])) > 1
    assert len(sum(sample_depths(replace(PAPER, granularity="batch"), 0, 0, 40))) == 40


def test_depths_that_rise_are_refused():
    """So is a late sequence with loops without gradient: a loop would run the wrong sequences."""
    for n, k in (([0, 1], [2, 2]), ([1, 1], [2, 1])):
        with pytest.raises(ValueError, match="deepest first|fewer loops"):
            training_plan(np.array(n), np.array(k), "cpu")


def test_the_staircase_meets_every_number_of_active_sequences():
    for mu_bwd in (1, 2, 4):
        met = {True: set(), False: set()}
        for n, k in staircase(replace(SMALL, mu_bwd=mu_bwd), 9):
            for loop in training_plan(n, k, "cpu"):
                met[loop.gradient].add(loop.active)
        assert met[True] == met[False] == set(range(1, 10))


def test_hash_is_splitmix64():
    """The published first numbers of the generator seeded with 1234567."""
    state, golden = 1234567, 0x9E3779B97F4A7C15
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix64((state + i * golden) % 2**64) for i in range(4)] == wanted


@pytest.mark.parametrize("cut", [3.0, 5.0])
def test_the_initial_state_is_the_oracles_and_a_function_of_key_and_place(cut):
    keys = torch.tensor([hash_key(0, i) for i in range(64)])
    x = hashed_normal(keys, 64, 96, 0.5, cut)
    for row in (0, 5):
        want = hashed_state(int(keys[row]), 64, 96, 0.5, cut)
        assert (x[row] - want).abs().max() < 3e-4 and (x[row] - want).norm() < 1e-5 * want.norm()
    assert torch.equal(hashed_normal(keys[5:7], 20, 96, 0.5, cut), x[5:7, :20])
    places = torch.tensor([7, 3])
    assert torch.equal(hashed_normal(keys[5:7], 2, 96, 0.5, cut, places), x[5:7, places])


def test_what_published_runs_drew_can_be_drawn_again():
    """These numbers were drawn by the code of the first results; other ones would be other runs."""
    purposes = [value for name, value in vars(randomness).items() if name.startswith("FOR_")]
    assert purposes == [1, 2, 3, 4, 6]
    n, k = sample_depths(PRESETS["parcae-140m"], 1, 2, 8)
    assert n.tolist() == [9, 2, 4, 5, 4, 3, 9, 5] and k.tolist() == [4] * 8
    assert hash_key(1, 2, 3) == -3459936354030841973
    assert uniforms(5, np.arange(2)).tolist() == [0.9798413679101445, 0.8807895827318415]
    assert permute(np.arange(5), 1000, "k").tolist() == [794, 716, 45, 471, 561]


WIDE = ModelConfig(d_model=128, n_head=2, d_mlp=512)  # enough numbers for their spread


def test_initialisation_follows_its_table():
    m = Model(replace(WIDE, init="scaled", n_core=2))
    m.init_weights(0)
    std = math.sqrt(2 / (5 * 128))
    inputs = (m.wte.weight, m.blocks[1].attn.q.weight, m.blocks[0].mlp.fc.weight, m.C.weight)
    for w in inputs:
        assert abs(w.std() / std - 1) < 0.02
        gram = (w.T @ w) if w.size(0) >= w.size(1) else (w @ w.T)
        assert torch.allclose(gram, torch.eye(len(gram)) * gram[0, 0], atol=1e-5)
    for w in (m.blocks[0].attn.o.weight, m.blocks[2].mlp.proj.weight):
        assert abs(w.std() / (std / math.sqrt(2 * (1 + 2 * 8 + 1))) - 1) < 0.02
    assert abs(m.ve["1"].weight.std() - 1) < 0.01 and (m.norm_f.weight == 1).all()
    assert m.blocks[1].attn.gate.weight.abs().max() <= 32**-0.5
    path = m.injection
    assert torch.equal(path.B, torch.eye(128)) and (path.A_log == 0).all()
    decay, gain = discretise(path.A_log, path.dt_bias, "zoh")
    assert torch.allclose(decay, torch.tensor(math.sqrt(0.2))) and torch.allclose(gain, 1 - decay)
    zero = Model(WIDE)
    zero.init_weights(0)
    assert not zero.blocks[0].attn.o.weight.any() and not zero.blocks[1].mlp.proj.weight.any()


class Scaled(MLP):
    def __init__(self, cfg, layer):
        super().__init__(cfg, layer)
        self.proj_gate = parameter((cfg.d_model, 2), ones, muon=True, lr=0.1)


def test_a_parameter_says_itself_how_it_begins_and_learns(monkeypatch):
    monkeypatch.setitem(MLPS, "relu2", Scaled)
    model = Model(SMALL)
    model.init_weights(0)
    own = model.blocks[1].mlp.proj_gate
    assert (own == 1).all() and own.lr == 0.1 and own.muon


def test_a_parameter_without_an_init_is_named_with_what_to_write():
    model = Model(SMALL)
    model.spare = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"spare.weight.*parameter.*Linear"):
        model.init_weights(0)


def test_what_belongs_to_sequences_is_cut_to_the_active_ones():
    inputs = LoopInputs(torch.ones(3), torch.ones(3, 2, 3), [None, torch.ones(3, 2, 3)], KEYS)
    first = inputs.first(2)
    assert torch.equal(first.decay, inputs.decay) and first.ve[0] is None
    assert len(first.write) == len(first.ve[1]) == len(first.rng_keys) == 2


def test_a_uniform_number_is_the_hash_of_sequence_and_loop():
    inputs = LoopInputs(None, None, [], KEYS)
    index = torch.tensor([0, 3, 7])
    for stream in (0, 5):
        u = inputs.uniform(index, stream)
        for got, key, loop in zip(u.tolist(), KEYS[:, 0].tolist(), index.tolist()):
            counter = -1 - (stream << 32) - loop
            bits = finalise((key + counter * GOLDEN) % 2**64) & 0xFFFFFF
            assert got == pytest.approx((bits + 0.5) / 2**24)
    many = LoopInputs(None, None, [], torch.arange(20_000)[:, None])
    u = many.uniform(torch.full((20_000,), 2))
    assert abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.01


def test_matched_models_share_initial_weights():
    """Changing the gain, the injection or the looping changes no parameter that both models have."""
    configs = [ModelConfig(), ModelConfig(gain="zoh"), ModelConfig(injection="concat")]
    models = [Model(c) for c in (*configs, flat_twin({}))]
    for m in models:
        m.init_weights(3)
    for a, b in pairwise(models):
        a, b = a.state_dict(), b.state_dict()
        assert len(a.keys() & b.keys()) > 20
        assert all(torch.equal(a[name], b[name]) for name in a.keys() & b.keys())


def test_in_bfloat16_the_linear_path_is_rounded_once():
    model = make(ssm_decay=0.98).float()
    model.dtype = torch.bfloat16
    ids, _, keys = token_batch(SMALL)
    h, inputs = model.enter_loop(ids, keys)
    path = model.injection
    decay, gain = discretise(path.A_log, path.dt_bias, "euler")
    e = F.linear(model.prelude(ids), path.B.bfloat16())
    assert torch.equal(inputs.write, (gain * e).bfloat16())
    assert torch.equal(path.inject(h, inputs), (decay * h + inputs.write).bfloat16())


@pytest.mark.parametrize("residual", [torch.bfloat16, torch.float32])
def test_bfloat16_loses_no_gradient_and_the_residual_stream_has_its_own_dtype(residual):
    """A no-grad pass before the gradient pass must not cut the core out of the graph, as autocast's cache can."""
    model = make().float()
    model.dtype = torch.float32
    batch = token_batch(SMALL)
    exact = gradients(model, model.loss(*batch, *MIXED)[0])
    model.dtype, model.residual_dtype = torch.bfloat16, residual
    seen = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    rounded = gradients(model, model.loss(*batch, *MIXED)[0])
    assert set(seen) == {residual}
    for name, g in exact.items():
        if g.norm() > 0:
            assert (rounded[name] - g).norm() < 0.1 * g.norm(), name


@pytest.mark.parametrize("tokens", [1, 40, 200])
def test_short_attention_and_its_gradient_are_as_exact_as_torchs(tokens):
    dtype = torch.bfloat16
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(3, 2, tokens, 16, generator=g).to(dtype) for _ in range(3)]
    assert attends_by_products("cpu", dtype, tokens)
    torchs = functools.partial(F.scaled_dot_product_attention, is_causal=True)

    def results(function, inputs):
        inputs = [x.requires_grad_() for x in inputs]
        y = function(*inputs)
        grads = torch.autograd.grad(y.square().sum(), inputs)
        return torch.cat([x.detach().double().flatten() for x in (y, *grads)])

    want = results(torchs, [x.double() for x in given])
    own = (results(attend, given) - want).norm()
    assert own <= 2 * (results(torchs, given) - want).norm() + 1e-12


def test_checkpointed_loops_are_computed_again_in_the_backward_pass():
    model, calls = make(), []
    step = model.core_step
    model.checkpoint_loops = True
    model.core_step = lambda *args, **named: calls.append(1) or step(*args, **named)
    n, k = MIXED
    loss, _ = model.loss(*token_batch(SMALL), n, k)
    assert len(calls) == n.max() + k.max()
    loss.backward()
    assert len(calls) == n.max() + 2 * k.max()
