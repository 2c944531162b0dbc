"""Cache, exits and sampling against plain recomputation: no cache, one row, one token at a time."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import refused

from core_eval import open_run
from looped.common import file_hash
from looped.randomness import FOR_SAMPLE, hash_key
from looped.tokenizer import save_tokenizer
from model import PRESETS, Model, ModelConfig
from tools import sample
from tools.sample import Depth, KVCache, Sampling, pick, read

SMALL = {"vocab_size": 64, "seq_len": 12, "d_model": 16, "n_head": 2, "d_mlp": 24, "mu_bwd": 0}
LOOP = ModelConfig(**SMALL, mu_rec=5)
SHAPES = {
    "plain": LOOP,
    "value shift": dataclasses.replace(LOOP, token_shift=True),
    "three core layers": dataclasses.replace(LOOP, n_core=3),
    "no prelude or coda": dataclasses.replace(LOOP, n_prelude=0, n_coda=0),
    "attnres": dataclasses.replace(LOOP, mechanism="attnres"),
    "hyper": dataclasses.replace(LOOP, mechanism="hyper"),
    "rdm": dataclasses.replace(PRESETS["rdm-nano"], **SMALL),
    "flat": dataclasses.replace(PRESETS["transformer-nano"], **SMALL),
}


def make(cfg, dtype=torch.float64) -> Model:
    model = Model(cfg)
    model.init_weights(0)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():  # a weight of zero would hide errors
        p.data.add_(0.1 * torch.randn(p.shape, generator=generator))
    model.dtype = dtype
    return model.to(dtype)


def texts(*lengths):
    """-> (lists of random tokens, their keys)."""
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 64, n).tolist() for n in lengths]
    return rows, [hash_key(3, i) for i in range(len(lengths))]


def batch(rows, tokens):
    """-> random ids (rows, tokens), and their keys."""
    made, keys = texts(*[tokens] * rows)
    return torch.tensor(made), torch.tensor(keys)


class SlowCache:
    """A cache for one row by definition: all that was written stays and is looked up by rule."""

    def __init__(self, cfg):
        self.core = range(cfg.n_prelude, cfg.n_prelude + cfg.n_core)
        self.kept = {}  # {layer: {position: {loop: (key, value)}}}

    def entry(self, layer, position):
        """What the token wrote at this loop, or at its last."""
        written = self.kept[layer][position]
        return written.get(self.loop, written[max(written)])

    def extend(self, layer, k, v):
        position = int(self.positions)
        loops = self.kept.setdefault(layer, {}).setdefault(position, {})
        loops[self.loop if layer in self.core else 0] = (k[:, :, 0], v[:, :, 0])
        entries = [self.entry(layer, j) for j in range(position + 1)]
        return [torch.stack(part, dim=2) for part in zip(*entries, strict=True)]


@torch.no_grad()
def slow(model, row, key, depth):
    """-> (log-probabilities (T, V), loops of each token), token by token, without Model.unroll."""
    cache = SlowCache(model.cfg)
    answers, loops = [], []
    for i, token in enumerate(row):
        token = torch.tensor([[token]])
        cache.positions = torch.tensor([i])
        cache.loop = 0
        h, inputs = model.enter_loop(token, torch.tensor([key]), cache)
        answer = None
        for cache.loop in range(depth.loops):
            last = answer
            h = model.core_step(h, inputs, torch.tensor([cache.loop]), cache)
            answer = model.head(model.coda(h, token, cache))[0, 0].log_softmax(-1)
            change = np.inf if last is None else (answer.exp() * (answer - last)).sum()
            if depth.threshold is not None and change < depth.threshold:
                break
        answers.append(answer)
        loops.append(cache.loop + 1)
    return torch.stack(answers), loops


class Twice(Model):
    def core_step(self, h, inputs, index, cache=None):
        return super().core_step(super().core_step(h, inputs, index, cache), inputs, index, cache)


def test_a_core_that_runs_twice_a_loop_has_keys_of_each_run():
    model = make(LOOP)
    model.__class__ = Twice
    ids, keys = batch(1, 8)
    cache = KVCache(model, 12, 5)
    parts = [read(model, token, keys, cache, Depth(5))[0] for token in ids.split(1, 1)]
    assert torch.allclose(torch.cat(parts, 1), model.hidden(ids, 5, keys), atol=1e-10)


@pytest.mark.parametrize("name", SHAPES)
def test_a_cache_equals_none_token_by_token(name):
    model = make(SHAPES[name])
    ids, keys = batch(2, 8)
    depth = Depth(4 if model.cfg.n_core else 0)
    cache = KVCache(model, 12, depth.loops)
    pieces = [3, 1, 1, 1, 1, 1]  # a prompt, then token by token
    hidden = []
    for piece in ids.split(pieces, 1):
        h, taken = read(model, piece, keys, cache, depth)
        assert (taken == depth.loops).all()
        hidden.append(h)
    expected = model.hidden(ids, depth.loops, keys)
    assert torch.allclose(torch.cat(hidden, 1), expected, atol=1e-10)


@pytest.mark.parametrize("threshold", [None, 1e-3])
def test_exits_equal_their_definition(threshold):
    ids, keys = batch(3, 6)
    depth = Depth(7, threshold)
    seen = set()
    for name in ("three core layers", "rdm", "value shift"):
        model = make(SHAPES[name])
        hidden, taken = read(model, ids, keys, KVCache(model, 12, 7), depth)
        logits = model.head(hidden).log_softmax(-1)
        for i in range(3):
            expected, loops = slow(model, ids[i].tolist(), int(keys[i]), depth)
            seen |= set(loops)
            assert taken[i].tolist() == loops
            assert torch.allclose(logits[i], expected, atol=1e-9)
    assert len(seen) > 2 if threshold else seen == {7}


@pytest.mark.parametrize("name", ["plain", "attnres", "hyper"])
def test_threshold_0_is_the_fixed_depth_and_a_huge_one_the_least(name):
    model = make(SHAPES[name])
    ids, keys = batch(2, 5)
    for depth, loops in ((Depth(6, 0.0), 6), (Depth(6, 1e9), 2)):
        hidden, taken = read(model, ids, keys, KVCache(model, 12, 6), depth)
        assert (taken == loops).all()
        assert torch.allclose(hidden, model.hidden(ids, loops, keys), atol=1e-10)


def test_threshold_0_leaves_no_loop_where_rounding_makes_the_change_negative():
    model = make(LOOP, torch.float32)
    ids, keys = batch(2, 4)
    _, taken = read(model, ids, keys, KVCache(model, 12, 40), Depth(40, 0.0))
    assert (taken == 40).all()


def generate(model, prompt, keys, depth, stop=(), **how):
    """-> the new tokens of each row, and the loops of all tokens read."""
    rows, loops = [[] for _ in keys], []
    for event, taken in sample.draw(model, prompt, keys, depth, Sampling(**how), stop):
        loops += taken.flatten().tolist()
        for i, token in event.items():
            rows[i].append(token)
    return rows, loops


@pytest.mark.parametrize("depth", [Depth(4), Depth(8, 1e-4)])
def test_a_sample_depends_on_no_other_row(depth):
    model = make(LOOP)
    prompts, keys = texts(3, 7)
    for prompt in prompts:
        together, _ = generate(model, prompt, keys, depth, tokens=5)
        for key, made in zip(keys, together, strict=True):
            assert generate(model, prompt, [key], depth, tokens=5)[0] == [made]
            longer = prompt + made[:2]  # the position decides, not when it was asked
            assert generate(model, longer, [key], depth, tokens=3)[0] == [made[2:]]


@pytest.mark.parametrize("name", ["three core layers", "flat", "hyper"])
def test_greedy_text_is_the_argmax_of_the_whole_text_read_anew(name):
    model = make(SHAPES[name])
    loops = 4 if model.cfg.n_core else 0
    (prompt,), _ = texts(3)
    keys = [hash_key(7, FOR_SAMPLE, i) for i in range(2)]
    rows, _ = generate(model, prompt, keys, Depth(loops), tokens=6, temperature=0)
    whole = torch.tensor([prompt + made for made in rows])
    likeliest = model(whole, loops, seed=7).argmax(-1)
    assert likeliest[:, len(prompt) - 1 : -1].tolist() == rows


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match="13 tokens; the model takes 12"):
        make(LOOP)(torch.zeros(1, 13, dtype=torch.int64))


def test_a_row_ends_at_a_stop_at_its_tokens_and_at_the_end_of_the_context(capsys):
    model = make(LOOP)
    prompts, keys = texts(2, 10, 12)
    for prompt, count in zip(prompts, (11, 3, 1), strict=True):
        out, loops = generate(model, prompt, keys, Depth(4), tokens=20)
        assert [len(made) for made in out] == [count] * 3
        assert loops == [4] * 36  # a last token is never read
        assert "the context of 12 tokens is full" in capsys.readouterr().err
    out, _ = generate(model, prompts[0], keys, Depth(4), tokens=20)
    stop = out[0][4]
    cut, _ = generate(model, prompts[0], keys, Depth(4), tokens=20, stop={stop})
    assert cut == [made[: made.index(stop)] if stop in made else made for made in out]


P = np.array([0.08, 0.5, 0.3, 0.02, 0.1])


@pytest.mark.parametrize("how, weights", [
    (Sampling(), P), (Sampling(temperature=1e-320), P == 0.5), (Sampling(temperature=0.5), P**2),
    (Sampling(top_k=2), P * (P >= 0.3)), (Sampling(top_k=-1), P), (Sampling(top_p=0.0), P == 0.5),
    (Sampling(top_p=0.85), P * (P >= 0.1)), (Sampling(top_k=2, top_p=0.6), P == 0.5),
])  # fmt: skip
def test_pick_follows_the_law_it_is_asked_for(how, weights):
    u = (torch.arange(20_000) + 0.5).double() / 20_000
    picked = pick(torch.tensor(P).log().expand(20_000, 5), u, how)
    share = np.bincount(picked, minlength=5) / 20_000
    assert np.abs(share - weights / weights.sum()).max() < 1e-4


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Calls tools.sample on a run whose tokens are bytes."""
    cfg = dataclasses.replace(LOOP, vocab_size=259)
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    save_tokenizer("run/tokenizer.json", [bytes([i]) for i in range(256)])
    torch.save({"model": make(cfg, torch.float32).state_dict()}, "run/step_0000001.pt")
    tokenizer = {"path": "elsewhere", "sha256": file_hash("run/tokenizer.json")}
    config = {"model": dataclasses.asdict(cfg), "tokenizer": tokenizer, "data": {"path": "rows"}}
    Path("run/config.json").write_text(json.dumps(config))

    def run(*words):
        sample.main(["run", "--device", "cpu", *words])

    return run


def test_several_samples_are_those_made_one_by_one(call, capsys):
    call("--prompt", "ab", "--max-tokens", "4")
    one = capsys.readouterr()
    assert one.out.startswith("ab") and one.err.startswith("4 tokens, ")
    call("--prompt", "ab", "--max-tokens", "4", "--prompt", "xyz", "--num", "2")
    many = capsys.readouterr().out
    assert many.startswith("--- sample 1\n" + one.out) and many.count("---") == 4
    call("--prompt", "", "--max-tokens", "4")  # the beginning of a text
    assert capsys.readouterr().err.startswith("4 tokens, ")


@pytest.mark.parametrize("words, says", [
    ("--depth 4", "required: --prompt"), ("--depth x --prompt a", "argument --depth"),
    ("--prompt a --top-p 1.5", "top_p 1.5"), ("--prompt a --temperature -1", "temperature -1"),
    ("--prompt a --top-k -2", "top_k -2"),
])  # fmt: skip
def test_a_mistake_is_one_line(words, says, call, capsys):
    refused(capsys, lambda: call(*words.split()), says)


def test_a_text_in_python_is_that_of_the_program(call, capsys):
    call("--prompt", "ab", "--depth", "3", "--max-tokens", "4", "--temperature", "0")
    model, enc, _ = open_run("run", torch.device("cpu"))
    how = Sampling(temperature=0, tokens=4)
    assert capsys.readouterr().out.rstrip("\n") == "ab" + sample.generate(model, enc, "ab", 3, how)
