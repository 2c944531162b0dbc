"""Changes that a researcher makes, each in one place of model.py or looped/depth.py, made in a copy of the text.

Each must then work with rows of mixed depths, with and without gradient, in validation, compiled, and in sampling.
"""

import importlib.util
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT, assert_same_gradients, gradients, small_model, token_batch
from torch._dynamo.utils import counters

from looped.cache import KVCache
from looped.settings import check_meaning
from model import ModelConfig
from muon import AdamW, Optimizer, Rates
from tools.sample import Depth, read
from train import Batch, training_step

SIZES = {"vocab_size": 32, "seq_len": 8, "d_model": 16, "n_head": 2, "d_mlp": 24, "mu_rec": 4}
N, K = np.array([3, 0, 1, 0, 5, 0]), np.array([2, 1, 2, 2, 2, 1])

GAIN = [  # as README has it; it may have been made here already
    (
        "GAINS = {",
        """
def midpoint_gain(a, dt):
    return dt * torch.exp(-dt * a / 2)

GAINS = {"midpoint": midpoint_gain, """,
    )
]
SELECTIVE = [  # decay and gain (B, T, D): the step length is a function of the token
    (
        "        self.B = nn.Parameter(torch.empty(cfg.d_model, cfg.d_model))\n",
        "        self.B = nn.Parameter(torch.empty(cfg.d_model, cfg.d_model))\n"
        "        self.S = nn.Parameter(torch.empty(cfg.d_model, cfg.d_model))\n",
    ),
    (
        '        if part == "B":\n',
        '        if part == "S":\n            return orthogonal(self.S.shape, std, generator)\n'
        '        if part == "B":\n',
    ),
    (
        "decay, gain = discretise(self.A_log, self.dt_bias, self.gain_rule)\n        if self.B",
        "dt_bias = self.dt_bias + F.linear(e.float(), self.S.float())\n"
        "        decay, gain = discretise(self.A_log, dt_bias, self.gain_rule)\n"
        "        if self.B",
    ),
]
LINEAR_PATH = [  # another class for it, which heeds --gain
    (
        "INJECTIONS = {\n",
        """
class Gated(DiagonalInjection):
    def decay_and_write(self, e):
        decay, write = super().decay_and_write(e)
        return decay, write * torch.sigmoid(e)

INJECTIONS = {
    "gated": Gated,
""",
    )
]
BY_INDEX = [  # a vector for each loop of a sequence
    (
        "        self.mechanism = MECHANISMS[cfg.mechanism](cfg)\n",
        "        self.mechanism = MECHANISMS[cfg.mechanism](cfg)\n"
        "        self.phase = nn.Parameter(torch.empty(4 * cfg.mu_rec, d))\n",
    ),
    (
        '        if part == "gate":\n',
        '        if part == "phase":\n            return torch.zeros(p.shape)\n'
        '        if part == "gate":\n',
    ),
    (
        "        x = self.injection.inject(h, inputs)\n",
        "        x = self.injection.inject(h, inputs) + at_index(self.phase, index).to(h.dtype)\n",
    ),
    ("import AttnRes, HyperConnected", "import at_index, AttnRes, HyperConnected"),
]
LEARNED_START = [
    (
        "        self.mechanism = MECHANISMS[cfg.mechanism](cfg)\n",
        "        self.mechanism = MECHANISMS[cfg.mechanism](cfg)\n"
        "        self.h0 = nn.Parameter(torch.empty(d))\n",
    ),
    (
        '        if part == "gate":\n',
        '        if part == "h0":\n            return torch.zeros(p.shape)\n'
        '        if part == "gate":\n',
    ),
    (
        "        B, T, D = e.shape\n        std, cut",
        "        return self.h0.to(e.dtype).expand_as(e)\n        std, cut",
    ),
]
MECHANISM = [
    (
        "MECHANISMS = {",
        """
class Damped(PlainLoop):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.share = nn.Parameter(torch.empty(cfg.d_model))

    def initial(self, part, std, generator):
        return torch.full_like(self.share, 0.7)

    def step(self, h, history, index, propose):
        return (h + self.share * (propose(h) - h)).to(h.dtype)

MECHANISMS = {"damped": Damped, """,
    )
]
STATISTIC = [
    (
        '            "state_norm": h.float()',
        '            "turn": F.cosine_similarity(h.float(), state.previous.float(), dim=-1).sum(),\n'
        '            "largest": h.float().abs().amax(-1).sum(),\n'
        '            "state_norm": h.float()',
    )
]
LAW = [  # of looped/depth.py
    (
        "DEPTH_LAWS = {",
        """
def uniform(mu_rec, mu_bwd, u, v):
    depth = 1 + (u * (2 * mu_rec - 1)).astype(np.int64)
    return np.maximum(depth - mu_bwd, 0), np.minimum(depth, mu_bwd)

DEPTH_LAWS = {
    "uniform": uniform,""",
    )
]
LOOSE = [  # a law in which k is drawn by itself: rows wait for each other
    (
        "DEPTH_LAWS = {",
        """
def loose(mu_rec, mu_bwd, u, v):
    depth = np.maximum(1, poisson_quantile(u, mu_rec))
    k = np.minimum(depth, 1 + (v * 3).astype(np.int64))
    return depth - k, k

DEPTH_LAWS = {
    "loose": loose,""",
    )
]
SUPERVISED = [  # the mean of the losses after each of a row's, or token's, loops with gradient
    (
        "        state = LoopState(self.mechanism, h, h)  # of a model without a loop\n"
        "        if inputs is not None:\n"
        "            for state in self.unroll(h, inputs, plan):  # noqa: B007\n"
        "                pass\n"
        "        loss = self.coda_loss(state.h, ids, targets)\n",
        """
        if inputs is None:
            return self.coda_loss(h, ids, targets), {}
        loss = 0.0
        for loop, state in zip(plan, self.unroll(h, inputs, plan), strict=True):
            took = torch.arange(len(h)) < loop.active if loop.live is None else loop.live
            if loop.gradient:
                share = took.numpy() / np.maximum(k, 1)
                losses = self.token_losses(state.h, ids, targets)
                loss = loss + (losses * torch.from_numpy(share).view(len(h), -1)).sum()
""",
    )
]
CHANGES = {
    "a third gain": (GAIN, {"gain": "midpoint"}),
    "selective decay and gain": (SELECTIVE, {"gain": "zoh"}),
    "selective, token depths": (SELECTIVE, {"granularity": "token"}),
    "a linear path": (LINEAR_PATH, {"injection": "gated", "gain": "zoh"}),
    "a parameter by loop index": (BY_INDEX, {}),
    "the same, token depths": (BY_INDEX, {"granularity": "token"}),
    "a learned h_0": (LEARNED_START, {}),
    "a mechanism": (MECHANISM, {"mechanism": "damped"}),
    "a statistic": (STATISTIC, {}),
    "a depth law": (LAW, {"sampling": "uniform"}),
    "a depth law with a k of its own": (LOOSE, {"sampling": "loose"}),
    "the same, streams": (LOOSE, {"sampling": "loose", "mechanism": "hyper"}),
    "a loss on several loops": (SUPERVISED, {}),
    "the same, a k of its own": (LOOSE + SUPERVISED, {"sampling": "loose"}),
    "the same, a k for each token": (SUPERVISED, {"granularity": "token"}),
    "all of them": (
        GAIN + SELECTIVE + BY_INDEX + MECHANISM + STATISTIC + LAW,
        {"gain": "midpoint", "mechanism": "damped", "sampling": "uniform"},
    ),
}


def load(path, name, edits, folder, monkeypatch):
    """A module from a copy of the file with the edits made."""
    text = path.read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    copy = folder / path.name
    copy.write_text(text)
    spec = importlib.util.spec_from_file_location(name, copy)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=CHANGES)
def changed(request, tmp_path, monkeypatch):
    """(the changed modules depth and model, a small float64 model of theirs)."""
    edits, settings = CHANGES[request.param]
    laws = [edit for edit in edits if edit in LAW + LOOSE]
    others = [edit for edit in edits if edit not in laws]
    depth = load(ROOT / "looped/depth.py", "looped.depth", laws, tmp_path, monkeypatch)
    module = load(ROOT / "model.py", "model", others, tmp_path, monkeypatch)
    model = small_model(module.ModelConfig(**SIZES, **settings))
    return depth, model


def test_a_change_in_one_place_works_everywhere(changed):
    depth, model = changed
    cfg = model.cfg
    ids, targets, keys = token_batch(cfg)
    n, k = N, K
    if cfg.granularity == "token" or cfg.sampling in ("uniform", "loose"):
        n, k = depth.sample_depths(cfg, 0, 0, 6)
    loss, logged = model.loss(ids, targets, keys, n, k)
    want = gradients(model, loss)

    # mixed depths: each row by itself
    model.zero_grad()
    alone = 0.0
    for i in range(6):
        row = slice(i, i + 1)
        loss, stats = model.loss(ids[row], targets[row], keys[row], n[row], k[row])
        loss.backward()
        alone += stats["residual"].item()
    assert alone == pytest.approx(logged["residual"].item(), rel=1e-5)
    assert all(p.grad is not None for p in model.parameters())
    own = {name: p.grad for name, p in model.named_parameters()}
    assert all(g.norm() > 0 for name, g in own.items() if name.split(".")[-1] in "S phase share h0")
    assert_same_gradients(want, own, 1e-6)

    # without gradient: validation is training's loss of as many loops
    found = model.losses(ids, targets, [1, 3], keys)
    for loops, losses in found.items():
        many = np.full(n.shape, loops)
        with torch.no_grad():
            total, _ = model.loss(ids, targets, keys, many - 1, many * 0 + 1)
        assert abs(losses.sum() - total) < 1e-4

    # sampling: token by token with a cache
    with torch.no_grad():
        whole = model.hidden(ids, 3, keys)
        cache, parts = KVCache(model, cfg.seq_len, 3), []
        for at in range(cfg.seq_len):
            parts.append(read(model, ids[:, at : at + 1], keys, cache, Depth(3))[0])
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-6)

    # FLOPs follow the law
    means = [x.mean() for x in depth.sample_depths(cfg, 0, 1, 20_000 // cfg.seq_len)]
    assert np.allclose(depth.mean_loops(cfg.sampling, cfg.mu_rec, cfg.mu_bwd), means, atol=0.1)


@pytest.mark.parametrize("changed", ["a loss on several loops"], indirect=True)
def test_a_loss_on_several_loops_leaves_the_flat_twins_as_it_is(changed):
    _, model = changed
    cfg = model.cfg
    for flat in ({"n_core": 0}, {"n_core": 0, "n_prelude": 3, "n_coda": 0}):
        twin = small_model(type(cfg)(**SIZES, **flat))
        edited = type(model)(twin.cfg).double()
        edited.load_state_dict(twin.state_dict())
        edited.dtype = torch.float64
        inputs = (*token_batch(twin.cfg), N * 0, K * 0)
        assert torch.equal(edited.loss(*inputs)[0], twin.loss(*inputs)[0])


@pytest.mark.parametrize(
    "changed", ["all of them", "the same, token depths", "a loss on several loops"], indirect=True
)
def test_changes_compile(changed):
    torch._dynamo.reset()
    counters.clear()
    depth, model = changed
    inputs = (*token_batch(model.cfg), *depth.sample_depths(model.cfg, 0, 0, 6))
    want = gradients(model, model.loss(*inputs)[0])
    model.compile_pieces("eager")
    assert_same_gradients(gradients(model, model.loss(*inputs)[0]), want, 1e-6)
    assert counters["stats"]["unique_graphs"] > 2 and not counters["graph_break"]


def test_flags_of_the_linear_path_are_heeded_by_a_new_one():
    given = {"gain": "zoh", "input_matrix": True}
    settings = {"n_core": 1, "mechanism": "none", "sampling": "fixed", "injection": "gated"}
    check_meaning(given, settings)
    with pytest.raises(SystemExit):
        check_meaning(given, settings | {"injection": "add"})


@pytest.mark.parametrize("changed", ["a third gain"], indirect=True)
def test_a_third_gain_is_what_the_loop_writes_with(changed):
    _, model = changed
    path = model.injection
    with torch.no_grad():
        path.B.copy_(torch.eye(16))
        e = torch.randn(1, 8, 16, dtype=torch.float64)
        _, write = path.decay_and_write(e)
        dt = torch.log1p(path.dt_bias.exp())
        want = dt * torch.exp(-dt * path.A_log.exp() / 2) * e
    assert torch.allclose(write, want, atol=1e-6)


def test_tokens_that_all_loop_as_their_row_log_what_the_row_logs():
    model = small_model(ModelConfig(**SIZES, value_embeds=False))
    inputs = token_batch(model.cfg)
    _, by_row = model.loss(*inputs, N, K)
    n, k = (np.repeat(x[:, None], model.cfg.seq_len, 1) for x in (N, K))
    _, by_token = model.loss(*inputs, n, k)
    for name, value in by_row.items():
        assert by_token[name].item() == pytest.approx(value.item(), rel=1e-5), name


@pytest.mark.parametrize("changed", ["a statistic", "selective decay and gain"], indirect=True)
def test_what_is_logged_is_what_the_loops_used(changed):
    _, model = changed
    model = model.float()
    model.dtype = torch.float32
    cfg = model.cfg
    ids, targets, keys = token_batch(cfg)
    with torch.no_grad():
        _, inputs = model.enter_loop(ids, keys)
        states = dict(model.states(ids, [3, 4], keys))
    optimizer = Optimizer([(AdamW(0.0), list(model.named_parameters()))])
    tokens = torch.cat([ids, targets[:, -1:]], 1)
    many = np.full(6, 4)
    batch = Batch(tokens, keys, many - 2, many * 0 + 2, step_tokens=ids.numel())
    logged = training_step(model, optimizer, batch, 2, Rates())
    want = {
        "decay_max": inputs.decay.amax(-1).mean(),
        "decay_mean": inputs.decay.mean(),
        "residual": (states[4] - states[3]).norm(dim=-1).mean(),
        "turn": torch.cosine_similarity(states[4], states[3], dim=-1).mean(),
        "largest": states[4].abs().amax(-1).mean(),
    }
    for name in logged.keys() & want.keys():
        assert torch.allclose(logged[name], want[name], rtol=1e-4), name
    assert ("turn" in logged) == ("largest" in logged) == (inputs.decay.dim() == 1)
    assert inputs.decay.dim() == 1 or logged["decay_max"] > logged["decay_mean"] + 0.01
