"""`tools.convert export`: what transformers loads from the folder says what the run says."""

import json
import random

import numpy as np
import pytest
import torch
from helpers import documents, refused

import train
from core_eval import open_run
from looped.ops import hash_keys
from looped.randomness import FOR_SAMPLE
from looped.tokenizer import SPECIALS, encode
from tools import convert

transformers = pytest.importorskip("transformers")
NETWORK = "--seq-len 32 --vocab-size 300 --d-model 16 --d-mlp 16 --state-init like-init"
STEPS = "--batch-size 8 --tokens 768 --eval-tokens 512"
TEXTS = ["abc de fab", "a", "bad cab"]


@pytest.fixture(scope="module")
def run(packed, tmp_path_factory):
    path = tmp_path_factory.mktemp("share") / "run"
    train.main(f"{NETWORK} {STEPS} --data {packed} --out {path}".split())
    convert.main(["export", str(path), str(path.parent / "out")])
    with pytest.MonkeyPatch.context() as patch:  # where transformers copies the folder's code
        modules = str(path.parent / "modules")
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
        yield path


@pytest.fixture(scope="module")
def ours(run):
    """The run's model and tokenizer."""
    model, enc, _ = open_run(run, torch.device("cpu"))
    return model, enc


@pytest.fixture(scope="module")
def theirs(run):
    """The same, as transformers loads them."""
    kinds = (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    return [kind.from_pretrained(run.parent / "out", trust_remote_code=True) for kind in kinds]


def ids_and_keys(rows, tokens):
    ids = torch.randint(0, 300, (rows, tokens), generator=torch.manual_seed(1))
    return ids, hash_keys(0, FOR_SAMPLE, each=[0] * rows)


@torch.no_grad()
def test_logits_are_the_runs(ours, theirs):
    ids, keys = ids_and_keys(3, 20)
    for depth in (1, 3, 8):
        expected = ours[0].head(ours[0].hidden(ids, depth, keys))
        assert torch.equal(theirs[0](ids, depth=depth).logits, expected)


def test_labels_give_the_loss_and_gradient_of_truncated_backpropagation(ours, theirs):
    (ours, _), (theirs, _) = ours, theirs
    ids, keys = ids_and_keys(2, 20)  # 38 tokens are predicted; at depth 6 four loops carry gradient
    loss = theirs(ids, labels=ids, depth=6).loss
    loss.backward()
    expected, _ = ours.loss(ids[:, :-1], ids[:, 1:], keys, np.array([2, 2]), np.array([4, 4]))
    (expected / 38).backward()
    torch.testing.assert_close(loss, expected / 38)
    for p, q in zip(ours.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("use_cache", [False, True])
def test_the_greedy_text_is_the_runs(ours, theirs, use_cache):
    model, enc = ours
    ids = torch.tensor([encode(enc, TEXTS[0])])
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    found = theirs[0].generate(ids, depth=5, use_cache=use_cache, **how)
    for _ in range(12):
        best = model(ids, 5)[:, -1:].argmax(-1)
        ids = torch.cat([ids, best], 1)
    assert torch.equal(found, ids)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_inert(theirs, side):
    model, tokenizer = theirs
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side=side)
    found = model(**batch, labels=batch.input_ids)
    logits = []
    nats = predicted = 0
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        alone = model(ids, labels=ids)
        logits.append(alone.logits[0])
        if ids.size(1) > 1:
            nats += alone.loss * (ids.size(1) - 1)
            predicted += ids.size(1) - 1
    own = batch.attention_mask.bool()
    torch.testing.assert_close(found.logits[own], torch.cat(logits), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.loss, nats / predicted, atol=1e-4, rtol=0)


def test_padded_prompts_are_continued_as_alone(theirs):
    model, tokenizer = theirs
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    together = model.generate(**batch, **how)
    for text, row in zip(TEXTS, together):
        (alone,) = model.generate(**tokenizer(text, return_tensors="pt"), **how)
        assert torch.equal(row[-8:], alone[-8:])


def test_what_cannot_be_right_is_refused_in_one_line(theirs):
    model, _ = theirs
    ids, _ = ids_and_keys(1, 4)
    long, _ = ids_and_keys(1, 33)
    cache = model(ids, depth=2, use_cache=True).cache
    hole = torch.tensor([[1, 0, 1, 1]])
    padded = torch.tensor([[0, 1, 1, 1]])
    for message, arguments in (
        ("padding between tokens", {"attention_mask": hole}),
        ("padded rows cannot use a cache", {"attention_mask": padded, "cache": cache}),
        ("depth 2, not 3", {"cache": cache, "depth": 3}),
        ("33 tokens; the model takes 32", {"input_ids": long}),
        ("depth 0", {"depth": 0}),
    ):
        with pytest.raises(ValueError, match=message) as error:
            model(**{"input_ids": ids} | arguments)
        assert "\n" not in str(error.value)


def test_a_saved_model_loads_with_the_same_bits(theirs, tmp_path):
    model, _ = theirs
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, trust_remote_code=True, depth=2
    )
    ids, _ = ids_and_keys(2, 9)
    assert torch.equal(again(ids).logits, model(ids, depth=2).logits)
    weights = again.state_dict()
    for name, w in model.state_dict().items():
        assert torch.equal(weights.pop(name), w)
    assert not weights


def test_ids_and_texts_are_the_tokenizers(ours, theirs):
    (_, enc), (_, tokenizer) = ours, theirs
    rng = random.Random(0)
    pieces = [
        *documents(20),
        "'S it\u017fs 'll",
        "é🙂 你好\u00a0",
        "  \n\n \t x",
        "12345 6",
        "\r\n",
        *SPECIALS,
    ]
    for _ in range(1000):
        text = "".join(rng.choices(pieces, k=3))[: rng.randint(1, 60)]
        text += rng.choice(pieces)[:20]
        ids = tokenizer(text).input_ids
        assert ids == enc.encode(text, allowed_special="all")
        assert tokenizer(text, split_special_tokens=True).input_ids == encode(enc, text)
        assert tokenizer.decode(ids) == text


def test_import_reads_what_export_wrote(run, ours, tmp_path):
    convert.main(["import", str(run.parent / "out"), str(tmp_path / "again")])
    model, enc, _ = open_run(tmp_path / "again", torch.device("cpu"))
    ids, _ = ids_and_keys(2, 9)
    assert torch.equal(model(ids, 3), ours[0](ids, 3))
    tokenizers = [path / "tokenizer.json" for path in (run, tmp_path / "again")]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()


def test_the_card_tells_the_training(run):
    card = (run.parent / "out/README.md").read_text()
    config = json.loads((run / "config.json").read_text())
    parts = ["768 tokens", f"{config['params']:,} parameters", config["git"]["commit"], "| 8 |"]
    for part in (*parts, config["command"]):
        assert part in card


@pytest.mark.parametrize("given", [{"model_type": "ouro"}, {"model_type": "huginn_raven"}])
def test_weights_of_other_families_and_an_existing_folder_are_refused(given, capsys, run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(given))
    line = ["import", str(tmp_path), str(tmp_path / "run")]
    refused(capsys, lambda: convert.main(line), "not a Parcae model")
    refused(capsys, lambda: convert.main([*line[:2], str(run)]), "exists; name a new directory")
