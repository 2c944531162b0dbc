"""A GPU against the CPU, without rustbpe, pyarrow or a network; skipped where there is no GPU."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from helpers import (
    assert_same_gradients,
    documents,
    gradients,
    run_program,
    small_model,
    token_batch,
    write_jsonl,
)

import dataloader
from looped.depth import sample_depths, share_out
from looped.ops import attend, hashed_normal
from looped.run import read_log
from looped.tokenizer import save_tokenizer
from model import PRESETS, ModelConfig

CARD = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SMALL = ModelConfig(vocab_size=97, seq_len=24, d_model=32, n_head=2, d_mlp=64, mu_rec=4)
HEADS = sorted({cfg.n_head for cfg in PRESETS.values() if cfg.seq_len == 2048})


def by_products(q, k, v):
    """Causal attention from its definition."""
    tokens = q.size(2)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT / math.sqrt(q.size(3))).masked_fill(later, -math.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", [1, 3])
def test_attention_and_its_gradients_are_right_in_bfloat16(rows, heads):
    """Which kernel computes them is torch's choice, and differs by card and version."""
    shape = (rows, 2048, heads, 128)
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for _ in range(4):  # q, k, v and the output's gradient, laid out as in Attention
        x = torch.randn(shape, generator=generator).bfloat16().to(CARD)
        tensors.append(x.transpose(1, 2))

    def results(function, dtype):
        *inputs, g = [x.to(dtype) for x in tensors]
        inputs = [x.requires_grad_() for x in inputs]
        y = function(*inputs)
        return y, *torch.autograd.grad(y, inputs, g)

    want = results(by_products, torch.float64)
    for got, right in zip(results(attend, torch.bfloat16), want, strict=True):
        assert (got.double() - right).norm() < 0.01 * right.norm()


@pytest.mark.parametrize("compiled", [False, True])
def test_random_states_are_the_cpus(compiled):
    """Triton takes the hash's 64-bit arithmetic, and one row or three give the same numbers."""
    draw = torch.compile(hashed_normal) if compiled else hashed_normal
    keys = torch.tensor([5, -7, 1 << 62])
    want = hashed_normal(keys, 300, 768, 1.0)
    for rows in (3, 1):
        got = draw(keys[:rows].to(CARD), 300, 768, 1.0).cpu()
        assert (got - want[:rows]).abs().max() < 1e-3


def both(changes):
    """A model on the CPU and its copy on the card, in float32, and each one's arguments of `loss`."""
    cfg = replace(SMALL, **changes)
    model = small_model(cfg).float()
    model.dtype = torch.float32
    card = copy.deepcopy(model).to(CARD)
    tensors = token_batch(cfg)
    n, k = sample_depths(cfg, 3, 5, len(tensors[0]))
    (order,) = share_out(n, k, 1)
    depths = n[order], k[order]
    return model, card, (*tensors, *depths), (*(x.to(CARD) for x in tensors), *depths)


@pytest.mark.parametrize("changes", [
    {}, {"gain": "zoh"}, {"injection": "concat", "block": "resnorm"}, {"injection": "none"}, {"token_shift": True},
    {"mechanism": "attnres"}, {"mechanism": "hyper"}, {"n_core": 0},
], ids=str)  # fmt: skip
def test_losses_and_gradients_are_the_cpus(changes):
    model, card, there, here = both(changes)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        got = gradients(card, card.loss(*here)[0])
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    want = gradients(model, model.loss(*there)[0])
    assert_same_gradients({name: g.cpu() for name, g in got.items()}, want, 1e-3)


def test_compiled_bfloat16_gradients_are_those_of_float32():
    model, card, there, here = both({"token_shift": True})
    want = gradients(model, model.loss(*there)[0])
    card.dtype = torch.bfloat16
    card.compile_pieces()
    got = gradients(card, card.loss(*here)[0])
    for name, g in want.items():
        assert (got[name].cpu() - g).norm() <= 0.1 * g.norm() + 1e-6, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_ends_where_the_cpus_does(dtype, tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    save_tokenizer(tokenizer, [bytes([number]) for number in range(256)])
    texts = tmp_path / "texts"
    texts.mkdir()
    write_jsonl(texts / "a.jsonl", documents(200))
    pack = f"pack --texts {texts} --tokenizer {tokenizer} --seq-len 32 --out {tmp_path}/rows"
    dataloader.main([*pack.split(), "--workers", "1"])
    sizes = "--vocab-size 259 --seq-len 32 --d-model 32 --d-mlp 64 --batch-size 12 --tokens 8000"
    losses = []
    for device in ("cpu", CARD):
        run = tmp_path / f"on-{device}-{len(losses)}"
        where = f"--data {tmp_path}/rows --out {run} --device {device} --eval-tokens 1000"
        run_program("train.py", *sizes.split(), *where.split(), "--compile=off", "--dtype", dtype)
        losses.append(read_log(run / "log.jsonl").evals[-1]["loss"])
    want, got = losses
    for depth, loss in want.items():
        assert abs(got[depth] - loss) < 0.03, depth  # Muon in bfloat16, as on a GPU: 0.007
