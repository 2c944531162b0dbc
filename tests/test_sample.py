"""Cache, exits and sampling against plain recomputation: no cache, one row, one token at a time."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from helpers import small_model

from core_eval import open_run
from looped.common import file_hash
from looped.randomness import FOR_SAMPLE, hash_key
from looped.tokenizer import save_tokenizer
from model import PRESETS, ModelConfig
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
            answer = model.head(model.coda(h, token, inputs, cache))[0, 0].log_softmax(-1)
            change = np.inf if last is None else (answer.exp() * (answer - last)).sum()
            if depth.threshold is not None and change < depth.threshold:
                break
        answers.append(answer)
        loops.append(cache.loop + 1)
    return torch.stack(answers), loops


@pytest.mark.parametrize("name", SHAPES)
def test_a_cache_equals_none_token_by_token(name):
    model = small_model(SHAPES[name], 0.1)
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
        model = small_model(SHAPES[name], 0.1)
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
    model = small_model(SHAPES[name], 0.1)
    ids, keys = batch(2, 5)
    for depth, loops in ((Depth(6, 0.0), 6), (Depth(6, 1e9), 2)):
        hidden, taken = read(model, ids, keys, KVCache(model, 12, 6), depth)
        assert (taken == loops).all()
        assert torch.allclose(hidden, model.hidden(ids, loops, keys), atol=1e-10)


def generate(model, prompt, keys, depth, **how):
    """The new tokens of each row."""
    steps = [tokens for tokens, _ in sample.draw(model, prompt, keys, depth, Sampling(**how))]
    return [list(row) for row in zip(*steps, strict=True)]


@pytest.mark.parametrize("depth", [Depth(4), Depth(8, 1e-4)])
def test_a_sample_depends_on_no_other_row(depth):
    model = small_model(LOOP, 0.1)
    prompts, keys = texts(3, 7)
    for prompt in prompts:
        together = generate(model, prompt, keys, depth, tokens=5)
        for key, made in zip(keys, together, strict=True):
            assert generate(model, prompt, [key], depth, tokens=5) == [made]
            longer = prompt + made[:2]  # the position decides, not when it was asked
            assert generate(model, longer, [key], depth, tokens=3) == [made[2:]]


@pytest.mark.parametrize("name", ["three core layers", "flat", "hyper"])
def test_greedy_text_is_the_argmax_of_the_whole_text_read_anew(name):
    model = small_model(SHAPES[name], 0.1)
    loops = 4 if model.cfg.n_core else 0
    (prompt,), _ = texts(3)
    keys = [hash_key(7, FOR_SAMPLE, i) for i in range(2)]
    rows = generate(model, prompt, keys, Depth(loops), tokens=6, temperature=0)
    whole = torch.tensor([prompt + made for made in rows])
    likeliest = model(whole, loops, seed=7).argmax(-1)
    assert likeliest[:, len(prompt) - 1 : -1].tolist() == rows


@pytest.mark.parametrize("length, count", [(2, 11), (10, 3), (12, 1)])
def test_a_text_ends_with_the_context(length, count, capsys):
    (prompt,), keys = texts(length)
    (made,) = generate(small_model(LOOP, 0.1), prompt, keys, Depth(4), tokens=20)
    assert len(made) == count  # a last token is never read
    assert "the context of 12 tokens is full" in capsys.readouterr().err


P = np.array([0.08, 0.5, 0.3, 0.02, 0.1])


@pytest.mark.parametrize("how, weights", [
    (Sampling(1, 0, 1), P), (Sampling(1e-320), P == 0.5), (Sampling(0.5, top_p=1), P**2),
    (Sampling(1, 2, 1), P * (P >= 0.3)), (Sampling(1, -1, 1), P), (Sampling(top_p=0), P == 0.5),
    (Sampling(1, 0, 0.85), P * (P >= 0.1)), (Sampling(1, 2, 0.6), P == 0.5),
])  # fmt: skip
def test_pick_follows_the_law_it_is_asked_for(how, weights):
    u = (torch.arange(20_000) + 0.5).double() / 20_000
    picked = pick(torch.tensor(P).log().expand(20_000, 5), u, how)
    share = np.bincount(picked, minlength=5) / 20_000
    assert np.abs(share - weights / weights.sum()).max() < 1e-4


@pytest.fixture
def run(tmp_path):
    """A run directory whose tokens are bytes."""
    cfg = dataclasses.replace(LOOP, vocab_size=259)
    save_tokenizer(tmp_path / "tokenizer.json", [bytes([i]) for i in range(256)])
    weights = small_model(cfg, 0.1).float().state_dict()
    torch.save({"model": weights}, tmp_path / "step_0000001.pt")
    tokenizer = {"path": "elsewhere", "sha256": file_hash(tmp_path / "tokenizer.json")}
    config = {"model": dataclasses.asdict(cfg), "tokenizer": tokenizer}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_the_program_prints_the_texts_that_generate_returns(run, capsys):
    model, enc, _ = open_run(run, torch.device("cpu"))
    line = f"{run} --device cpu --prompt ab --max-tokens 4".split()
    text = "ab" + sample.generate(model, enc, "ab", how=Sampling(tokens=4))
    sample.main(line)
    assert capsys.readouterr().out == f"{text}\n"
    sample.main([*line, "--num", "2"])
    assert capsys.readouterr().out.startswith(f"--- sample 1\n{text}\n--- sample 2\nab")


def test_a_text_ends_before_a_special_token(run):
    model, enc, _ = open_run(run, torch.device("cpu"))
    how = Sampling(tokens=8)
    (whole,), _ = sample.complete(model, enc, "ab", [1], Depth(5), how)
    enc.encode_single_token = {"<|bos|>": 256, "<|eos|>": whole[3], "<|pad|>": 258}.get
    (cut,), loops = sample.complete(model, enc, "ab", [1], Depth(5), how)
    assert cut == whole[: whole.index(whole[3])]
    assert loops == [5] * (3 + len(cut))
