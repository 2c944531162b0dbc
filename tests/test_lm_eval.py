"""tools/lm_eval.py: the harness is told what the model says, one token at a time. Needs lm_eval."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import refused
from safetensors.torch import save_file

import tokenizer_train as tt
from looped.tokenizer import save_tokenizer
from model import Model, ModelConfig
from tools import convert

pytest.importorskip("lm_eval")
from tools import lm_eval as adapter  # noqa: E402

V = 300


@pytest.fixture
def harness(tmp_path):
    """A run with random weights as the harness sees it."""
    tokenizer = tmp_path / "tokenizer.json"
    rng = random.Random(0)
    words = []
    for _ in range(300):
        letters = rng.choices("abcdeéf 12 '\n", k=rng.randint(1, 9))
        words.append("".join(letters))
    text = " ".join(words)
    ranks = tt.train_bpe(iter([text]), V)
    save_tokenizer(tokenizer, ranks)
    c = ModelConfig(vocab_size=V, seq_len=16, d_model=32, n_head=1, d_mlp=64)
    model = Model(c)
    model.init_weights(0)
    for name, w in model.named_parameters():
        if name.endswith(("o.weight", "proj.weight")):
            torch.nn.init.normal_(w, 0, 0.2)
    made = tmp_path / "made"
    made.mkdir()
    save_file(model.state_dict(), made / "model.safetensors")
    config = {"model_type": "looped"} | vars(c)
    (made / "config.json").write_text(json.dumps(config))
    run = str(tmp_path / "run")
    convert.main(["import", str(made), run, "--tokenizer", str(tokenizer)])
    return adapter.Looped(run, depth=3, batch=2, device="cpu")


def asked(*args):
    return SimpleNamespace(args=args)


def next_logits(lm, ids, context):
    key = torch.tensor([lm.key(context)])
    hidden = lm.model.hidden(torch.tensor([ids]), 3, key)
    return lm.model.head(hidden[0, -1])


def direct(lm, context, continuation):
    """Log-probability and greediness, one token at a time, from the last 16 tokens before each."""
    total = 0.0
    greedy = True
    ids = (context + continuation)[-17:]
    for i in range(len(ids) - len(continuation), len(ids)):
        token = ids[i]
        logits = next_logits(lm, ids[:i], context)
        total += F.log_softmax(logits, -1)[token].item()
        greedy = greedy and int(logits.argmax()) == token
    return total, greedy


PAIRS = [
    ("abc de", " fab"),
    ("", "bad cab"),
    ("a b  ", "c"),
    ("deaf " * 9, "face"),
    ("abc de", " e12"),
    ("abc", ""),
]  # nothing is certain; fmt: skip


def test_harness_values_equal_direct_ones(harness):
    lm = harness
    enc = lm.enc
    found = lm.loglikelihood([asked(*pair) for pair in PAIRS])
    for (context, continuation), got in zip(PAIRS, found, strict=True):
        first = enc.encode_ordinary(context.rstrip()) if context else []
        rest = enc.encode_ordinary(context + continuation)[len(first) :]
        nats, greedy = direct(lm, first or [lm.prefix_token_id], rest)
        assert got[0] == pytest.approx(nats, abs=1e-4)
        assert got[1] == greedy


def test_rolling_windows_count_every_token_once(harness):
    text = "abc bad face de éf " * 5
    ids = [harness.prefix_token_id, *harness.enc.encode_ordinary(text)]
    total, _ = direct(harness, ids[:1], ids[1:17])
    for a in range(17, len(ids), 16):  # each later window is full, and scores what is new
        new = ids[a : a + 16]
        before = ids[a + len(new) - 17 : a]
        nats, _ = direct(harness, before, new)
        total += nats
    (found,) = harness.loglikelihood_rolling([asked(text)])
    assert found == pytest.approx(total, abs=1e-3)


def test_harness_generates_the_greedy_text(harness):
    lm = harness
    prompt = lm.enc.encode_ordinary("abc de")
    made = list(prompt)
    for _ in range(6):
        token = int(next_logits(lm, made, prompt).argmax())
        if token in lm.stop:
            break
        made.append(token)
    text = lm.enc.decode(made[len(prompt) :])
    stop = text[2:4]
    whole = asked("abc de", {"until": [], "max_gen_toks": 6})
    cut = asked("abc de", {"until": [stop], "max_gen_toks": 6})
    assert lm.generate_until([whole, cut]) == [text, text.split(stop)[0]]


def test_sampling_follows_the_harness_settings(harness, monkeypatch):
    seen = []
    monkeypatch.setattr(adapter, "generate", lambda *args: seen.append(args[-1]) or [])
    cases = (
        ({"do_sample": True, "top_k": 3, "top_p": 0.5}, (1.0, 3, 0.5)),
        ({"do_sample": True, "temperature": 0.2}, (0.2, 0, 1.0)),
        ({"top_k": 3}, (0, 3, 1.0)),
    )
    for settings, want in cases:
        harness.generate_until([asked("abc", settings | {"max_gen_toks": 6})])
        how = seen.pop()
        assert (how.temperature, how.top_k, how.top_p) == want


def test_a_prompt_must_have_room_and_an_answer_must_be_a_number(harness, capsys):
    long = asked("abc " * 20, {"until": [], "max_gen_toks": 16})  # the context is 16
    refused(capsys, lambda: harness.generate_until([long], True), "max_gen_toks=16 leaves no room")
    torch.nn.init.constant_(harness.model.norm_f.weight, torch.nan)
    refused(capsys, lambda: harness.score([([1], [2])]), "at depth 3 is not finite")


@pytest.mark.parametrize("given", [{"detph": 4}, {"depth": 0}, {"depth": 10**9}, {"batch": "auto"}])
def test_unknown_and_unusable_model_args_are_named(harness, tmp_path, capsys, given):
    run = str(tmp_path / "run")
    (name,) = given
    refused(capsys, lambda: adapter.Looped(run, **given), name)
    adapter.Looped(run, batch_size="1", max_batch_size=None, trust_remote_code=True)


def test_the_harness_own_default_device(monkeypatch):
    """It passes "cuda" where nobody named a device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert adapter.usable_device("cuda:0") == adapter.usable_device(None)
    assert adapter.usable_device("cpu") == "cpu"
