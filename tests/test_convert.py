"""convert.py against a slow second implementation of the reference, and real libraries where they
are installed.

The reference's conventions are written out here once more, in plain loops and float64, from its
weights' names on.
"""

import json
import math

import pytest
import torch
from helpers import documents, refused

from looped.tokenizer import PATTERN, SPECIALS, load_tokenizer
from model import Model, load_run
from tools import convert

V, D, H, M = 300, 64, 2, 96
PARCAE = {"n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 2, "n_layers_in_coda": 2, "mean_recurrence": 8,
          "mean_backprop_depth": 4, "prelude_norm": True, "state_init": "like-init", "injection_type": "diagonal",
          "sampling_scheme": "poisson-truncated-full", "recurrent_iteration_method": "per-sequence",
          "recurrent_embedding_dimension": D, "recurrent_intermediation_embedding_dimension": M,
          "recurrent_num_attention_heads": None, "lockstep_n": False}  # fmt: skip


def settings(**change):
    """The reference's config.json: a looped model, or with n_layer its baseline."""
    every = {"name": "x", "block_size": 16, "n_embd": D, "intermediate_size": M, "num_attention_heads": H, "bias": False,
             "num_key_value_heads": H, "vocab_size": V, "padded_vocab_size": V, "qk_norm": True, "tie_embeddings": True,
             "rope_settings": {"use_rope": True, "rope_condense_ratio": 1, "rope_base": 50000}, "nonlin_name": "ReLU2",
             "init_strategy": "scaled-zero", "norm_eps": 1e-5, "logit_softcap": None}  # fmt: skip
    return every | ({} if "n_layer" in change else PARCAE) | change


def groups(c):
    """Names of the reference's layers in order."""
    if "n_layer" in c:
        return [f"transformer.h.{i}" for i in range(c["n_layer"])]
    counts = {
        "prelude": c["n_layers_in_prelude"],
        "core_block": c["n_layers_in_recurrent_block"],
        "coda": c["n_layers_in_coda"],
    }
    names = []
    for part, count in counts.items():
        names += [f"transformer.{part}.{i}" for i in range(count)]
    return names


def reference_shapes(c):
    shapes = {"transformer.wte.weight": (V, D), "transformer.ln_f.weight": (D,)}
    layers = groups(c)
    for i, layer in enumerate(layers):
        for part in ("norm_1", "norm_2"):
            shapes[f"{layer}.{part}.weight"] = (D,)
        for part in ("c_q", "c_k", "c_v", "c_proj"):
            shapes[f"{layer}.attn.{part}.weight"] = (D, D)
        shapes[f"{layer}.mlp.fc.weight"] = (M, D)
        shapes[f"{layer}.mlp.proj.weight"] = (D, M)
        if i % 2 == (len(layers) - 1) % 2:
            shapes[f"{layer}.attn.ve_gate.weight"] = (H, 32)
            shapes[f"value_embeds.{i}.weight"] = (V, D)
    if "n_layer" in c:
        return shapes
    shapes["transformer.C.weight"] = (D, D)
    if c["prelude_norm"]:
        shapes["transformer.ln_prelude.weight"] = (D,)
    adapter = {
        "diagonal": {"A_log": (D,), "dt_bias": (D,), "B": (D, D)},
        "linear": {"adapter.weight": (D, 2 * D)},
        "add": {},
    }
    for part, shape in adapter[c["injection_type"]].items():
        shapes[f"transformer.adapter.{part}"] = shape
    return shapes


def reference_state(c):
    """Random weights under the reference's names; none is at its start, norms are near 1."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in reference_shapes(c).items():
        w = torch.randn(shape, generator=generator)
        if "norm" in name or "ln_" in name:
            w = 1 + 0.2 * w
        elif len(shape) == 2:
            w = w * shape[1] ** -0.5
        state[name] = w
    head = state["transformer.wte.weight"]
    return state | {"lm_head.weight": head, "freqs_cis": torch.zeros(1, 16, 1, 16, 2)}


def rms(x, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotate(x):
    """Rotary embedding of x (T, K) whose neighbours are a pair: a complex number that is turned."""
    angle = torch.outer(
        torch.arange(len(x)), 50000.0 ** (-torch.arange(0, x.size(1), 2) / x.size(1))
    )
    pairs = torch.view_as_complex(x.view(len(x), -1, 2).contiguous())
    return torch.view_as_real(pairs * torch.exp(1j * angle.double())).flatten(1)


def slow_block(c, w, name, x, table):
    """A layer of the reference: x (T, D) float64, table (T, D) the tokens' value rows or None."""
    n = rms(x) * w[f"{name}.norm_1.weight"]
    q, k, v = (n @ w[f"{name}.attn.c_{part}.weight"].T for part in "qkv")
    mask = torch.full((len(x), len(x)), -math.inf).triu(1)
    heads = []
    for h in range(H):
        own = slice(h * D // H, (h + 1) * D // H)
        queries, keys, values = rotate(q[:, own]), rotate(k[:, own]), v[:, own]
        if c["qk_norm"]:
            queries, keys = rms(queries, 2.0**-23), rms(keys, 2.0**-23)
        if table is not None:
            gate = 1 / (1 + torch.exp(-n[:, :32] @ w[f"{name}.attn.ve_gate.weight"][h]))
            values = values + 2 * gate[:, None] * table[:, own]
        scores = (queries @ keys.T / math.sqrt(D // H) + mask).exp()
        heads.append(scores / scores.sum(1, keepdim=True) @ values)
    x = x + torch.cat(heads, 1) @ w[f"{name}.attn.c_proj.weight"].T
    n = rms(x) * w[f"{name}.norm_2.weight"]
    hidden = (n @ w[f"{name}.mlp.fc.weight"].T).clamp(min=0).square() / 2
    return x + hidden @ w[f"{name}.mlp.proj.weight"].T


def slow_inject(c, w, h, e):
    """The reference's adapter."""
    if c["injection_type"] == "diagonal":
        dt = torch.log1p(w["transformer.adapter.dt_bias"].exp())
        decay = torch.exp(-dt * w["transformer.adapter.A_log"].exp())
        return h * decay + dt * (e @ w["transformer.adapter.B"].T)
    if c["injection_type"] == "linear":
        return torch.cat([h, e], -1) @ w["transformer.adapter.adapter.weight"].T
    return h + e


def slow_logits(c, state, ids, depth, h):
    """The reference's logits of ids (T,) from the state h (T, D); depth 0: its baseline."""
    w = {name: x.double() for name, x in state.items()}

    def run(x, part):
        for i, name in enumerate(groups(c)):
            table = w.get(f"value_embeds.{i}.weight")
            if part in name:
                x = slow_block(c, w, name, x, None if table is None else table[ids])
        return x

    x = run(w["transformer.wte.weight"][ids], "prelude" if depth else ".h.")
    if depth:
        if c["prelude_norm"]:
            x = rms(x) * w["transformer.ln_prelude.weight"]
        for _ in range(depth):
            h = run(slow_inject(c, w, h, x), "core_block")
        x = run(h @ w["transformer.C.weight"].T, "coda")
    return rms(x) * w["transformer.ln_f.weight"] @ w["transformer.wte.weight"].T


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "published").mkdir()
    (tmp_path / "published/config.json").write_text(json.dumps(settings()))
    torch.save(reference_state(settings()), tmp_path / "published/pytorch_model.bin")
    return tmp_path / "published"


@pytest.mark.parametrize("change", [
    {}, dict(injection_type="linear", prelude_norm=False), dict(n_layer=6), dict(n_layer=3),
    dict(injection_type="add", qk_norm=False, n_layers_in_coda=1),
])  # fmt: skip
def test_logits_equal_the_references(change):
    c = settings(**change)
    cfg = convert.reference_config(c)
    state = reference_state(c)
    depth = 3 if cfg.n_core else 0
    model = Model(cfg)
    model.load_state_dict(convert.from_reference(state, cfg))
    keys = torch.tensor([5, 6])
    ids = torch.randint(V, (2, 9), generator=torch.manual_seed(1))
    with torch.no_grad():
        ours = model.head(model.hidden(ids, depth, keys)).double()
        start = model.initial_state(torch.zeros(2, 9, D), keys).double()
    slow = torch.stack([slow_logits(c, state, row, depth, h) for row, h in zip(ids, start)])
    # some sixty roundings of 6e-8
    assert (ours - slow).abs().max() < 4e-6 * slow.abs().max()


def test_import_export_import_keeps_every_bit(folder, tokenizer, tmp_path):
    one, out, two = tmp_path / "one", tmp_path / "out", tmp_path / "two"
    convert.main(["import", str(folder), str(one), "--tokenizer", str(tokenizer)])
    convert.main(["export", str(one), str(out)])
    convert.main(["import", str(out), str(two)])
    (a, before), (b, after) = load_run(one), load_run(two)
    assert before["model"] == after["model"] and before["dtype"] == after["dtype"]
    weights = b.state_dict()
    for name, w in a.state_dict().items():
        assert torch.equal(w, weights.pop(name))
    assert not weights
    assert a.residual_dtype == b.residual_dtype == torch.float32  # as the authors'
    for run in (one, two):
        assert (run / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


def trained_by_the_library(texts):
    """A byte-level BPE of Hugging Face's, its special tokens first."""
    library = pytest.importorskip("tokenizers")
    level = library.pre_tokenizers.ByteLevel
    made = library.Tokenizer(library.models.BPE())
    split = library.pre_tokenizers.Split(library.Regex(PATTERN), "isolated")
    parts = [split, level(add_prefix_space=False, use_regex=False)]
    made.pre_tokenizer = library.pre_tokenizers.Sequence(parts)
    trainer = library.trainers.BpeTrainer(
        vocab_size=V,
        special_tokens=list(SPECIALS),
        initial_alphabet=level.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def test_a_tokenizer_of_the_library_reads_alike_and_its_rows_are_renumbered(folder, tmp_path):
    theirs = trained_by_the_library(documents(200))
    theirs.save(str(folder / "tokenizer.json"))
    convert.main(["import", str(folder), str(tmp_path / "run")])
    model, _ = load_run(tmp_path / "run")
    ours = load_tokenizer(tmp_path / "run/tokenizer.json")
    state = reference_state(settings())
    text = "naïve 你好 🙂 the core state\n and loops 12345  'LL\u00a0x"
    at, rows = ours.encode_ordinary(text), theirs.encode(text).ids
    assert len(at) < len(text.encode())  # some pairs were merged
    assert torch.equal(model.wte.weight[at], state["transformer.wte.weight"][rows])
    for i, table in model.ve.items():
        assert torch.equal(table.weight[at], state[f"value_embeds.{i}.weight"][rows])
    specials = [ours.encode_single_token(name) for name in SPECIALS]
    assert torch.equal(model.wte.weight[specials], state["transformer.wte.weight"][:3])


@pytest.mark.parametrize("change", [
    {"normalizer": {"type": "NFC"}}, {"pre_tokenizer": {"type": "Whitespace"}}, {"merges": []},
])  # fmt: skip
def test_a_tokenizer_that_would_read_otherwise_is_refused(folder, change):
    theirs = trained_by_the_library(documents(200))
    data = json.loads(theirs.to_str())
    data["model"]["merges"] = change.pop("merges", data["model"]["merges"])
    with pytest.raises(ValueError, match="tokenizer"):
        convert.tokenizer_from_hf(data | change)


@pytest.mark.parametrize("change", [{"norm_eps": 1e-6}, {"num_key_value_heads": 1}, {"magic": 7}])
def test_settings_that_are_not_implemented_are_refused_by_name(change, capsys):
    (name,) = change
    refused(capsys, lambda: convert.reference_config(settings(**change)), f"{name} {change[name]}")


def test_settings_and_names_that_the_tests_above_leave_alone():
    cfg = convert.reference_config(settings(recurrent_iteration_method="per-batch"))
    assert cfg.granularity == "batch"
    for rope, base in ((None, 50_000), ({"rope_base": 10_000}, 10_000)):
        assert convert.reference_config(settings(rope_settings=rope)).rope_theta == base
    compiled = "_orig_mod.transformer.wte.weight"  # as torch.compile names it
    assert convert.our_name(compiled, cfg) == "wte.weight"
