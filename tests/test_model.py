"""The network against closed forms, a slow float64 network written from the equations (oracle.py), and naive loops."""

import contextlib
import functools
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    assert_same_gradients,
    check_against_oracle,
    gradients,
    refused,
    small_model,
    token_batch,
)
from oracle import Oracle, hashed_state

from looped import randomness
from looped.depth import (
    DEPTH_LAWS,
    deepest,
    even_plan,
    poisson_quantile,
    sample_depths,
    training_plan,
)
from looped.layers import Linear
from looped.mechanisms import PlainLoop
from looped.memory import chunks_agree, settle_chunks
from looped.ops import attend, attends_by_products, hashed_normal, orthogonal
from looped.randomness import hash_key, mix64, permute, uniforms
from model import (
    CHOICES,
    INJECTIONS,
    MECHANISMS,
    MLP,
    MLPS,
    PRESETS,
    ChunkedCrossEntropy,
    Injection,
    Model,
    ModelConfig,
    config_of,
    discretise,
    flat,
    parameter_count,
)

SMALL = ModelConfig(vocab_size=40, seq_len=6, d_model=16, n_head=2, d_mlp=24, mu_rec=5)
PAPER = PRESETS["parcae-140m"]
DEPTHS = np.array([2, 7, 1, 3, 12, 5])
MIXED = np.maximum(DEPTHS - 3, 0), np.minimum(DEPTHS, 3)


def make(**changes) -> Model:
    return small_model(replace(SMALL, **{"mu_bwd": 0} | changes))


COUNTS = {  # the papers' tables, but for parcae-rdm-100m, where they print the RDM's; README's for nano
    "nano": 344_704, "transformer-nano": 344_576,
    "transformer-140m": 143_141_184, "transformer-370m": 385_903_104, "transformer-770m": 773_375_040,
    "transformer-1.3b": 1_333_868_544, "parcae-140m": 144_323_136, "parcae-370m": 388_003_328,
    "parcae-770m": 776_655_680, "parcae-1.3b": 1_338_591_744, "rdm-100m": 114_242_560, "rdm-350m": 382_765_056,
    "parcae-rdm-100m": 113_189_888, "parcae-rdm-350m": 378_558_464,
}  # fmt: skip


@pytest.mark.parametrize("name", [*COUNTS, "rdm-nano"])
def test_parameter_counts_are_the_papers_and_the_sum_of_the_parts(name):
    c = PRESETS[name]
    layers, d = c.n_prelude + c.n_core + c.n_coda, c.d_model
    tables = math.ceil(layers / 2) if c.value_embeds else 0
    matrices, norms = (3, 2) if c.mlp == "swiglu" else (2, 2)
    norms = 4 if c.block == "resnorm" else norms
    count = c.vocab_size * d * (1 + tables) + tables * min(32, d) * c.n_head + d
    count += layers * (4 * d * d + matrices * d * c.d_mlp + norms * d)
    if c.n_core:
        count += 2 * d * d if c.injection == "concat" else d * d * c.input_matrix + 2 * d
        count += d * c.prelude_norm + d * d * c.readout
    assert parameter_count(c) == count == COUNTS.get(name, count)


def test_presets_are_the_papers():
    assert PRESETS["transformer-140m"].value_layers() == PAPER.value_layers() == [1, 3, 5]
    for name, (mu_rec, mu_bwd) in {"rdm-100m": (16, 8), "rdm-350m": (8, 4)}.items():
        for preset in (name, "parcae-" + name):
            c = PRESETS[preset]
            assert (c.mu_rec, c.mu_bwd, c.d_model // c.n_head) == (mu_rec, mu_bwd, 128)
            assert (c.init, c.qk_norm) == ("scaled", False)
    assert PAPER.rope_theta == 50_000
    assert ModelConfig(mu_rec=5).mu_bwd == 3  # half, rounded up


def expected_flops(c, n, k, loop_matrices, end_matrices):
    """2 N1 + 6 N2 + attention of four layers outside the loop and two in it, at means n and k."""
    d = c.d_model
    n1, n2 = n * loop_matrices, k * loop_matrices + end_matrices + c.vocab_size * d
    return 2 * n1 + 6 * n2 + 4 * c.seq_len * d * (3 * 4 + 2 * (n + 3 * k))


@pytest.mark.parametrize("sampling", CHOICES["sampling"])
def test_flops_follow_each_laws_own_means(sampling):
    """Against Monte Carlo."""
    c = replace(PAPER, sampling=sampling)
    draws = [sample_depths(c, 1, step, 256) for step in range(400)]
    n, k = np.concatenate(draws, axis=1).mean(1)
    d, block = 768, 12 * 768**2
    want = expected_flops(c, n, k, 2 * block, 4 * block + 2 * d * d)
    assert abs(c.flops_per_token() / want - 1) < (1e-12 if sampling == "fixed" else 5e-3)


@pytest.mark.parametrize(
    "changes, matrices", [({}, 2), ({"input_matrix": False}, 1), ({"injection": "add"}, 1)]
)
def test_flops_count_the_matrices_of_the_linear_path(changes, matrices):
    c = replace(PAPER, sampling="fixed", **changes)  # C, and B where there is one
    block = 12 * 768**2
    assert c.flops_per_token() == expected_flops(c, 4, 4, 2 * block, 4 * block + matrices * 768**2)


def test_flops_of_a_flat_model():
    c, block = PRESETS["transformer-140m"], 12 * 768**2
    assert c.flops_per_token(attention=False) == 6 * (6 * block + 32768 * 768)
    assert c.flops_per_token() - c.flops_per_token(attention=False) == 4 * 2048 * 768 * 3 * 6


def test_flops_of_the_rdm():
    """Eight loops without gradient and eight with; three matrices an MLP; [carry, write] of the concatenation."""
    c = replace(PRESETS["rdm-100m"], sampling="fixed")
    d = 1024
    block = 4 * d**2 + 3 * d * 3520
    once = 2 * block + 65_536 * d + d**2
    want = 2 * 8 * (block + d**2) + 6 * (8 * (block + d**2) + once)
    assert c.flops_per_token(attention=False) == want


class Halved(MLP):
    def __init__(self, cfg):
        super().__init__(replace(cfg, d_mlp=cfg.d_mlp // 2))


def test_flops_are_those_of_the_layers_that_there_are(monkeypatch):
    usual = SMALL.block_matmul()
    assert usual == 4 * 16**2 + 2 * 16 * 24
    monkeypatch.setitem(MLPS, "relu2", Halved)
    assert SMALL.block_matmul() == usual - 16 * 24


# -- the control path --------------------------------------------------------------------------------------------------


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


def test_zoh_gain_tends_to_euler():
    bias = torch.tensor([0.3])
    for a, order in ((math.exp(-35), 0), (1e-3, 1)):  # to first order gain/Δ is 1 - Δa/2
        a_log = torch.tensor([math.log(a)])
        zoh, dt = [discretise(a_log, bias, rule)[1].double() for rule in ("zoh", "euler")]
        assert abs(zoh / dt - (1 - order * dt * a / 2)) < 1e-6


def test_zoh_is_euler_with_rescaled_rows():
    """Diag(g) B e = Diag(Δ) B' e with B' = Diag(g / Δ) B, on random full matrices: a whole model, both gains."""
    zoh, euler = make(gain="zoh"), make(gain="euler")
    torch.nn.init.normal_(zoh.injection.B, generator=torch.Generator().manual_seed(3))
    euler.load_state_dict(zoh.state_dict())
    ids, _, keys = token_batch(SMALL)
    want = zoh.hidden(ids, 4, keys)
    assert not torch.allclose(euler.hidden(ids, 4, keys), want, atol=1e-2)
    path = zoh.injection
    g, dt = [discretise(path.A_log, path.dt_bias, rule)[1] for rule in ("zoh", "euler")]
    euler.injection.B.data = (g / dt)[:, None] * path.B.data
    assert torch.allclose(euler.hidden(ids, 4, keys), want, atol=1e-6)


def test_decay_lies_strictly_between_0_and_1_for_every_float32():
    ends = [0.0, 1.0, 40.0, 41.0, 200.0, 3.4e38, math.inf]
    worst = torch.tensor([-x for x in ends] + ends)
    for rule in CHOICES["gain"]:
        decay, gain = discretise(*torch.meshgrid(worst, worst, indexing="ij"), rule)
        assert ((decay > 0) & (decay < 1) & (gain > 0) & torch.isfinite(gain)).all()


def test_spectra_equal_numpys():
    changed = (
        {},
        {"gain": "zoh"},
        {"input_matrix": False},
        {"injection": "concat"},
        {"injection": "none"},
    )
    for changes in changed:
        model = make(**changes)
        w = {name: p.detach().numpy() for name, p in model.named_parameters()}
        if model.cfg.injection == "diagonal":
            a, dt = np.exp(w["injection.A_log"]), np.log1p(np.exp(w["injection.dt_bias"]))
            gain = dt if model.cfg.gain == "euler" else (1 - np.exp(-dt * a)) / a
            B = w.get("injection.B", np.eye(16))
            carry, write = np.diag(np.exp(-dt * a)), gain[:, None] * B
        else:
            both = w.get("injection.W", np.eye(16, 32))
            carry, write = both[:, :16], both[:, 16:]
        got = model.spectra()
        assert abs(got["rho"] - abs(np.linalg.eigvals(carry)).max()) < 1e-5
        assert abs(got["carry_norm"] - np.linalg.norm(carry, 2)) < 1e-5
        if model.cfg.injection == "none":
            assert got["write_norm"] is None
        else:
            assert abs(got["write_norm"] - np.linalg.norm(write, 2)) < 1e-5
        assert abs(got["readout_norm"] - np.linalg.norm(w["C.weight"], 2)) < 1e-5
    assert make(n_core=0).spectra()["rho"] is None
    assert set(Injection(SMALL).spectra().values()) == {None}  # one's own says them itself, or none


def test_the_raw_loop_keeps_its_state_where_the_core_adds_nothing():
    """To the last bit: under "hyper" rounding would be a gradient, and AdamW makes any into a step."""
    model = Model(replace(SMALL, injection="none", state_init="normal"))
    model.init_weights(0)  # attention and MLP outputs are 0
    ids, _, keys = token_batch(SMALL)
    h, inputs = model.enter_loop(ids, keys)
    assert torch.equal(model.core_step(h, inputs, None), h)


# -- the loop and truncated backpropagation ----------------------------------------------------------------------------

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
    """Loss and every gradient for mixed depths out of order: the loop over active rows, and each row by itself."""
    model = make(**changes)
    flat = np.zeros(6, np.int64)
    check_against_oracle(model, *(MIXED if model.cfg.n_core else (flat, flat)))


@pytest.mark.parametrize("granularity", CHOICES["granularity"])
@pytest.mark.parametrize("sampling", CHOICES["sampling"])
def test_every_law_and_granularity_equals_each_row_alone(sampling, granularity):
    model = make(sampling=sampling, granularity=granularity, mu_rec=3)
    model.checkpoint_loops = granularity == "batch"
    n, k = sample_depths(model.cfg, 3, 5, 3)
    check_against_oracle(model, n, k)


def test_states_and_losses_at_several_depths_equal_the_oracles():
    model = make()
    ids, targets, keys = token_batch(SMALL, 2)
    oracle = Oracle(model.cfg, model.state_dict())
    rows = [oracle.states(ids[i], int(keys[i]), 7, 0) for i in (0, 1)]
    losses = model.losses(ids, targets, [7, 1, 0, 3], keys)
    for depth, h in model.states(ids, [7, 1, 0, 3], keys):
        assert torch.allclose(h, torch.stack([row[depth] for row in rows]), atol=1e-5)
        assert torch.allclose(model.coda(h, ids), model.hidden(ids, depth, keys), atol=1e-9)
        for i in (0, 1):
            want = oracle.token_losses(rows[i][depth], ids[i], targets[i])
            assert torch.allclose(losses[depth][i].double(), want, atol=1e-5)
    assert list(losses) == [0, 1, 3, 7]


def test_right_padding_and_batch_do_not_change_a_row():
    model = make()
    ids, _, keys = token_batch(SMALL)
    part = model.hidden(ids[2:4, :4], 5, keys[2:4])
    assert torch.allclose(model.hidden(ids, 5, keys)[2:4, :4], part, atol=1e-9)


def test_the_loop_index_counts_each_rows_own_loops():
    """core_step sees 0, 1, 2 … for every row, whenever it joins or leaves; and so for tokens."""
    for granularity in CHOICES["granularity"]:
        model, seen = make(granularity=granularity), []
        step = model.core_step
        model.core_step = lambda h, inputs, t, _: seen.append(t.clone()) or step(h, inputs, t)  # noqa: B023
        n, k = sample_depths(model.cfg, 0, 1, 6)
        model.loss(*token_batch(SMALL), n, k)
        if granularity != "token":
            want = sorted((n + k).tolist(), reverse=True)
            for row in range(6):
                taken = [int(t[row]) for t in seen if len(t) > row]
                assert taken == list(range(want[row]))
        else:
            assert torch.equal(seen[0], torch.zeros_like(seen[0]))
            assert torch.equal(seen[n.max()], torch.from_numpy(n))
            assert torch.equal(seen[-1], torch.from_numpy(n) + k.max() - 1)


# -- depths ------------------------------------------------------------------------------------------------------------


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


def test_poisson_quantile_inverts_the_distribution_function():
    for mean in (0.5, 4.0, 20.0, 900.0):
        cdf = np.cumsum(poisson_pmf(mean, 60 + int(2 * mean)))
        u = np.random.default_rng(0).random(1000)
        assert (poisson_quantile(u, mean) == np.searchsorted(cdf, u, side="right")).all()


def test_granularity_says_what_shares_a_depth():
    depth = sum(sample_depths(replace(PAPER, granularity="batch"), 0, 0, 256)).reshape(8, 32)
    assert (depth == depth[:, :1]).all() and len(set(depth[:, 0])) > 1
    assert len(sum(sample_depths(replace(PAPER, granularity="batch"), 0, 0, 40))) == 40
    tokens = sum(sample_depths(replace(PAPER, granularity="token"), 0, 0, 2))
    assert tokens.shape == (2, 2048) and abs(tokens.mean() - 8) < 0.3


# -- randomness --------------------------------------------------------------------------------------------------------


def test_hash_is_splitmix64():
    """The published first numbers of the generator seeded with 1234567."""
    state, golden = 1234567, 0x9E3779B97F4A7C15
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix64((state + i * golden) % 2**64) for i in range(4)] == wanted


@pytest.mark.parametrize("cut", [3.0, 5.0])
def test_initial_state_is_the_oracles_and_depends_on_key_and_place_only(cut):
    keys = torch.tensor([hash_key(0, i) for i in range(64)])
    x = hashed_normal(keys, 64, 96, 0.5, cut)
    for row in (0, 5):
        want = hashed_state(int(keys[row]), 64, 96, 0.5, cut)
        assert (x[row] - want).abs().max() < 3e-4 and (x[row] - want).norm() < 1e-5 * want.norm()
    assert torch.equal(hashed_normal(keys[5:7], 20, 96, 0.5, cut), x[5:7, :20])
    places = torch.tensor([[7, 3], [0, 63]])
    some = hashed_normal(keys[5:7], 2, 96, 0.5, cut, places)
    assert torch.equal(some, torch.stack([x[5, places[0]], x[6, places[1]]]))
    z = x.flatten() / 0.5
    normal = torch.distributions.Normal(0.0, 1.0)
    quantiles = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
    inside = math.erf(cut / math.sqrt(2))
    want = normal.icdf((quantiles - 0.5) * inside + 0.5)
    assert (torch.quantile(z, quantiles) - want).abs().max() < 1e-2 and z.abs().max() <= cut
    assert abs((z[1:] * z[:-1]).mean()) < 5e-3


def test_what_published_runs_drew_can_be_drawn_again():
    """These numbers were drawn by the code of the first results; other ones would be other runs."""
    purposes = [value for name, value in vars(randomness).items() if name.startswith("FOR_")]
    assert purposes == [1, 2, 3, 4, 6]
    n, k = sample_depths(PRESETS["parcae-140m"], 1, 2, 8)
    assert n.tolist() == [9, 2, 4, 5, 4, 3, 9, 5] and k.tolist() == [4] * 8
    assert hash_key(1, 2, 3) == -3459936354030841973
    assert uniforms(5, np.arange(2)).tolist() == [0.9798413679101445, 0.8807895827318415]
    assert permute(np.arange(5), 1000, "k").tolist() == [794, 716, 45, 471, 561]


def test_seeds_draw_other_depths():
    first, second = [sum(sample_depths(PAPER, seed, 0, 64)) for seed in (0, 1)]
    assert (first != second).any()


def test_keys_and_uniforms():
    keys = [hash_key(*p) for p in ((0, 1), (1, 0), (0, 0, 1), (0, 1, 0), (5,), (-5,))]
    assert len(set(keys)) == 6 and all(-(2**63) <= k < 2**63 for k in keys)
    u = uniforms(hash_key(1, 2), np.arange(100_000))
    assert abs(u.mean() - 0.5) < 4e-3 and abs(u.var() - 1 / 12) < 2e-3
    assert u.min() > 0 and u.max() < 1 and abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.01
    assert (uniforms(hash_key(1, 2), np.array([17, 3])) == u[[17, 3]]).all()


# -- initial weights ---------------------------------------------------------------------------------------------------


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


class OwnInjection(Injection):
    """Parameters with the names of a block's."""

    def __init__(self, cfg):
        super().__init__(cfg)
        for name in ("proj", "norm", "gate", "q"):
            setattr(self, name, torch.nn.Parameter(torch.empty(cfg.d_model)))

    def initial(self, part, std, generator):
        return torch.full((16,), float(len(part)))


def test_no_two_matrices_are_drawn_alike_and_both_signs_occur():
    model = Model(replace(WIDE, init="scaled"))
    model.init_weights(0)
    drawn = [p for name, p in model.named_parameters() if p.dim() == 2 and "injection" not in name]
    for i, p in enumerate(drawn):
        assert not any(torch.equal(p, other) for other in drawn[:i])
    gate = model.blocks[0].attn.gate.weight * math.sqrt(32)  # uniform in ±1/√32
    assert -1 <= gate.min() < -0.8 and 0.8 < gate.max() <= 1
    corners = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        corners.append(orthogonal((4, 4), 1.0, generator)[0, 0])
    assert min(corners) < 0 < max(corners)


def test_an_injection_draws_its_own_parameters_whatever_their_names(monkeypatch):
    monkeypatch.setitem(INJECTIONS, "add", OwnInjection)
    model = Model(ModelConfig(vocab_size=32, seq_len=8, d_model=16, d_mlp=16, injection="add"))
    model.init_weights(0)
    for name, p in model.injection.named_parameters():
        assert (p == len(name)).all()


class Named(MLP):
    """With parameters whose names remind of others."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.denormal = torch.nn.Parameter(torch.empty(2, 2))
        self.proj.factor = torch.nn.Parameter(torch.empty(2, 2))


def test_a_parameter_is_what_its_whole_name_says(monkeypatch):
    monkeypatch.setitem(MLPS, "relu2", Named)
    model = Model(SMALL)
    assert not any(name.endswith("factor") for name in model.muon_parameters())
    with pytest.raises(AssertionError, match="denormal has no initial value"):
        model.init_weights(0)


class FromInput(Model):
    """h_0 is e, of which the prelude's weights learn too."""

    def initial_state(self, e, keys, positions=None):
        return e


def test_a_start_that_depends_on_weights_gets_their_gradient():
    model = small_model(SMALL)
    model.__class__ = FromInput
    ids, targets, keys = token_batch(SMALL)
    h, inputs = model.enter_loop(ids, keys)
    for t in range(2):
        h = model.core_step(h, inputs, torch.full((6,), t))
    want = gradients(model, model.coda_loss(h, ids, targets))
    none = np.zeros(6, int)
    got = gradients(model, model.loss(ids, targets, keys, none, none + 2)[0])
    assert_same_gradients(got, want, 1e-9)


class Rounded(Injection):
    def decay_and_write(self, e):
        return torch.sigmoid(e), e


def test_a_decay_in_bfloat16_is_refused(monkeypatch):
    monkeypatch.setitem(INJECTIONS, "add", Rounded)
    model = Model(replace(SMALL, injection="add"))
    model.init_weights(0)
    ids, _, keys = token_batch(SMALL)
    model.hidden(ids, 2, keys)
    model.dtype = torch.bfloat16
    with pytest.raises(TypeError, match="decay is torch.bfloat16"):
        model.hidden(ids, 2, keys)


def test_muon_takes_no_bias():
    model = Model(SMALL)
    model.blocks[0].mlp.fc = torch.nn.Linear(16, 24)
    assert "blocks.0.mlp.fc.weight" in model.muon_parameters()
    assert "blocks.0.mlp.fc.bias" not in model.muon_parameters()


class Drawn(PlainLoop):
    """A mechanism with random weights, which makes a bfloat16 state float32."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.share = torch.nn.Parameter(torch.empty(cfg.d_model))

    def initial(self, part, std, generator):
        return torch.randn(16, generator=generator)

    def step(self, h, history, index, propose):
        return self.share * propose(h)


def test_a_mechanism_draws_by_the_seed_and_keeps_the_states_dtype(monkeypatch):
    monkeypatch.setitem(MECHANISMS, "none", Drawn)
    model = Model(ModelConfig(vocab_size=32, seq_len=8, d_model=16, d_mlp=16))
    drawn = []
    for seed in (0, 0, 1):
        model.init_weights(seed)
        drawn.append(model.mechanism.share.tolist())
    assert drawn[0] == drawn[1] != drawn[2]
    model.dtype = torch.bfloat16
    ids, _, keys = token_batch(model.cfg)
    with pytest.raises(TypeError, match="a loop made torch.float32 of torch.bfloat16"):
        model.hidden(ids, 2, keys)


def negative(mu_rec, mu_bwd, u, v):
    depth = poisson_quantile(u, mu_rec)
    return depth - mu_bwd, np.full(u.shape, mu_bwd)


def rational(mu_rec, mu_bwd, u, v):
    return u * mu_rec, np.full(u.shape, mu_bwd)


def none(mu_rec, mu_bwd, u, v):
    return np.zeros(u.shape, int), np.zeros(u.shape, int)


@pytest.mark.parametrize("law", [negative, rational, none, lambda a, b, u, v: (a, b)])
def test_a_law_that_gives_no_depths_is_named(law, monkeypatch):
    monkeypatch.setitem(DEPTH_LAWS, "fixed", law)
    cfg = replace(SMALL, sampling="fixed")
    with pytest.raises(ValueError, match="the depth law fixed must"):
        sample_depths(cfg, 0, 0, 500)


def test_rows_without_a_gradient_loop_may_loop_together():
    none = np.zeros(4, int)
    assert all(loop.live is None for loop in training_plan(none + 3, none, "cpu"))


def test_a_law_with_draws_of_its_own_is_named(monkeypatch):
    draws = np.random.default_rng(0)
    law = lambda mu_rec, mu_bwd, u, v: (draws.poisson(mu_rec, u.shape), np.ones(u.shape, int))  # noqa: E731
    monkeypatch.setitem(DEPTH_LAWS, "own draws", law)
    with pytest.raises(ValueError, match="the depth law own draws draws from other numbers"):
        replace(SMALL, sampling="own draws").flops_per_token()


def test_matched_models_share_initial_weights():
    """Changing the gain, the injection or the looping changes no parameter that both models have."""
    configs = [ModelConfig(), ModelConfig(gain="zoh"), ModelConfig(injection="concat")]
    models = [Model(c) for c in (*configs, flat(ModelConfig()))]
    for m in models:
        m.init_weights(3)
    for a, b in pairwise(models):
        a, b = a.state_dict(), b.state_dict()
        assert len(a.keys() & b.keys()) > 20
        assert all(torch.equal(a[name], b[name]) for name in a.keys() & b.keys())


# -- numerics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [7, 32, 1000])
def test_chunked_loss_equals_the_plain_one(chunk):
    model = make()
    ids, targets, keys = token_batch(SMALL)
    want = model.loss(ids, targets, keys, *MIXED)[0] / 3
    wanted, tokens = gradients(model, want), model.losses(ids, targets, [4], keys)[4]
    model.loss_chunk = chunk
    assert torch.allclose(model.losses(ids, targets, [4], keys)[4], tokens, atol=1e-5)
    got = model.loss(ids, targets, keys, *MIXED)[0] / 3
    assert abs(got - want) < 1e-5 * want
    assert_same_gradients(gradients(model, got), wanted)


class Capped(Model):
    def head(self, x):
        return 30 * torch.tanh(super().head(x) / 30)


class Untied(Model):
    def head(self, x):
        return F.linear(x, self.ve["0"].weight.to(x.dtype))


class Smoothed(Model):
    def head_loss(self, x, targets):
        if self.loss_chunk:
            return super().head_loss(x, targets)
        return F.cross_entropy(self.head(x), targets, reduction="sum", label_smoothing=0.05)


class Weighted(Smoothed):
    def head_loss(self, x, targets):
        if self.loss_chunk:
            return super().head_loss(x, targets)
        losses = F.cross_entropy(self.head(x), targets, reduction="none")
        return (losses * (1 + (targets == 10))).sum()


class ByPosition(Smoothed):
    def head_loss(self, x, targets):
        if self.loss_chunk:
            return super().head_loss(x, targets)
        losses = F.cross_entropy(self.head(x), targets, reduction="none")
        return losses.view(-1, self.cfg.seq_len)[:, 1:].sum()


@pytest.mark.parametrize("edited", [Capped, Untied, Smoothed, Weighted, ByPosition])
def test_an_edited_head_or_loss_is_not_taken_by_chunks(edited, capsys):
    model = small_model(SMALL).float()
    for asked in (None, 256, 0):
        args = SimpleNamespace(loss_chunk=asked)
        settle_chunks(model, args)
        assert args.loss_chunk == asked
    with torch.no_grad():
        blank = Model(SMALL)
        for p in blank.parameters():
            p.zero_()
    assert chunks_agree(blank)
    model.__class__ = edited
    refused(
        capsys, lambda: settle_chunks(model, SimpleNamespace(loss_chunk=256)), "--loss-chunk 256"
    )
    args = SimpleNamespace(loss_chunk=None)
    settle_chunks(model, args)
    assert args.loss_chunk == 0 and "note: " in capsys.readouterr().err


def test_the_chunked_loss_of_an_unlikely_token_is_its_own():
    weight = torch.tensor([[1.0], [0.0]])
    for lead, want in ((60.0, 60.0), (200.0, -math.log(1e-38))):  # the largest loss there is
        loss = ChunkedCrossEntropy.apply(torch.tensor([[lead]]), weight, torch.tensor([1]), 4)
        assert abs(loss - want) < 1e-4


def test_the_chunked_losses_gradient_takes_1_over_tokens_in_float32():
    h = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    weight, target = torch.eye(5, 4), torch.arange(8) % 5
    found = []
    for tokens in (1, 1536):  # 1 / 1536 rounded to bfloat16 is 0.2 % off
        loss = ChunkedCrossEntropy.apply(h, weight, target, 3) / tokens
        found.append(torch.autograd.grad(loss, h)[0])
    assert torch.equal(found[1], (found[0].float() * (1 / 1536)).bfloat16())


def test_the_loops_shared_copies_change_no_bit_and_are_gone_afterwards(monkeypatch):
    """Loss and gradients in bfloat16 against a cast at every use; a pass that is cut off leaves no copy either."""
    model = make(n_core=2)
    model.dtype = torch.bfloat16
    ids, targets, keys = token_batch(model.cfg, 4)
    n, k = np.array([3, 1, 0, 2]), np.array([2, 2, 1, 2])

    def gradients_now():
        return gradients(model, model.loss(ids, targets, keys, n, k)[0])

    shared = gradients_now()
    for _ in model.unroll(*model.enter_loop(ids, keys), even_plan(4, 3, ids.device)):
        break
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert all(linear.copy is None for linear in linears)
    monkeypatch.setattr("model.copied", lambda blocks, dtype: contextlib.nullcontext())
    for name, value in gradients_now().items():
        assert torch.equal(value, shared[name]), name


def test_chunked_loss_in_bfloat16_is_exact_for_sure_tokens():
    """p - 1 of a token that is all but sure must not be rounded to bfloat16 in between."""
    g = torch.Generator().manual_seed(0)
    rows, d, vocab = 1536, 64, 512
    weight = torch.randn(vocab, d, generator=g) * 0.3
    target = torch.randint(vocab, (rows,), generator=g)
    h = (torch.randn(rows, d, generator=g) + 8 * weight[target]).bfloat16()

    def gradient(h, weight, loss):
        leaves = h.clone().requires_grad_(), weight.clone().requires_grad_()
        (loss(*leaves) / rows).backward()
        return [leaf.grad.double() for leaf in leaves]

    def plain(h, w):
        return F.cross_entropy((h @ w.to(h.dtype).T).to(w.dtype), target, reduction="sum")

    def chunked(h, w):
        return ChunkedCrossEntropy.apply(h, w, target, 256)

    exact = gradient(h.double(), weight.bfloat16().double(), plain)
    rounded = gradient(h, weight, plain)
    for want, ours, theirs in zip(exact, gradient(h, weight, chunked), rounded, strict=True):
        assert (ours - want).norm() < 1.1 * (theirs - want).norm()


def in_bfloat16(**changes) -> Model:
    model = make(**changes).float()
    model.dtype = torch.bfloat16
    return model


def test_in_bfloat16_losses_are_float32_of_the_logits():
    model = in_bfloat16()
    ids, targets, keys = token_batch(SMALL)
    ((_, h),) = model.states(ids, [2], keys)
    logits = model.head(model.coda(h, ids)).float().flatten(0, 1)
    want = F.cross_entropy(logits, targets.flatten(), reduction="none")
    assert torch.equal(model.token_losses(h, ids, targets).flatten(), want)
    assert abs(model.coda_loss(h, ids, targets) / want.sum() - 1) < 1e-6


def test_in_bfloat16_the_linear_path_is_rounded_once():
    model = in_bfloat16(ssm_decay=0.98)
    ids, _, keys = token_batch(SMALL)
    h, inputs = model.enter_loop(ids, keys)
    path = model.injection
    decay, gain = discretise(path.A_log, path.dt_bias, "euler")
    e = F.linear(model.prelude(ids), path.B.bfloat16())
    assert torch.equal(inputs.write, (gain * e).bfloat16())
    assert torch.equal(path.inject(h, inputs), (decay * h + inputs.write).bfloat16())


def test_a_float32_residual_stream_is_float32_in_every_block():
    model = in_bfloat16()
    model.residual_dtype = torch.float32
    seen = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    ids, _, keys = token_batch(SMALL)
    model.hidden(ids, 2, keys)
    assert len(seen) == 4 and set(seen) == {torch.float32}


@pytest.mark.parametrize("residual", [None, torch.float32])
def test_bfloat16_loses_no_gradient_and_keeps_the_decay(residual):
    """A no-grad pass before the gradient pass must not cut the core out of the graph, as autocast's cache can."""
    model = make().float()
    model.dtype = torch.float32
    ids, targets, keys = token_batch(SMALL)
    exact = gradients(model, model.loss(ids, targets, keys, *MIXED)[0])
    model.dtype, model.residual_dtype = torch.bfloat16, residual
    h, inputs = model.enter_loop(ids, keys)
    assert h.dtype == (residual or torch.bfloat16) and inputs.write.dtype == torch.bfloat16
    assert inputs.decay.dtype == torch.float32 and model.hidden(ids, 2, keys).dtype == model.dtype
    rounded = gradients(model, model.loss(ids, targets, keys, *MIXED)[0])
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


@pytest.mark.parametrize("granularity", CHOICES["granularity"])
def test_checkpointed_loops_are_computed_again_and_give_the_same_gradients(granularity):
    model, calls = make(granularity=granularity), []
    ids, targets, keys = token_batch(SMALL)
    n, k = sample_depths(model.cfg, 0, 1, 6)
    want = gradients(model, model.loss(ids, targets, keys, n, k)[0])
    step = model.core_step
    model.checkpoint_loops = True
    model.core_step = lambda *args: calls.append(1) or step(*args)
    loss = model.loss(ids, targets, keys, n, k)[0]
    assert len(calls) == n.max() + k.max()
    assert_same_gradients(gradients(model, loss), want, 1e-12)
    assert len(calls) == n.max() + 2 * k.max()


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED = (
    ({"n_head": 3}, "--n-head 3; try --d-model 18"), ({"d_model": 33, "n_head": 1}, "try --d-model 34"),
    ({"d_model": 18, "n_head": 1, "token_shift": True}, "no multiple of 4 × --n-head 1; try --d-model 20"),
    ({"n_coda": 0, "token_shift": True}, "outside the loop; try --no-token-shift"),
    ({"n_core": 0, "n_prelude": 1, "n_coda": 0, "token_shift": True}, "outside the loop; try --no-token-shift"),
    ({"mu_bwd": 9}, "--mu-bwd 9"), ({"mu_rec": 0}, "--mu-rec 0"), ({"streams": 0}, "--streams 0"),
    ({"ssm_decay": 1.0}, "--ssm-decay 1.0"), ({"rope_theta": 0.0}, "--rope-theta 0.0"),
    ({"mechanism": "attnres", "granularity": "token"}, "--mechanism attnres .*--granularity token"),
    ({"mechanism": "hyper", "n_core": 0}, "--mechanism hyper .*--n-core"),
    *(({name: "new"}, f"--{name.replace('_', '-')} new is not one of") for name in CHOICES),
)  # fmt: skip


@pytest.mark.parametrize("changes,words", REFUSED, ids=str)
def test_configuration_errors_name_flag_value_and_remedy(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(SMALL, **changes)


def test_unknown_gain_is_refused_also_where_no_configuration_checks_it():
    with pytest.raises(KeyError):
        discretise(torch.zeros(2), torch.zeros(2), "exact")


def test_settings_that_an_older_run_lacks_take_their_defaults():
    assert config_of({"mu_rec": 3}) == ModelConfig(mu_rec=3)
