"""tools/lm_eval.py: the harness is told what the model says, one token at a time."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from looped.tokenizer import special_ids
from model import Model, ModelConfig
from tools import lm_eval as adapter
from tools.lm_eval import encode_pair, sampling_of, windows
from tools.sample import Sampling


@pytest.fixture
def lm(enc, monkeypatch):
    """A model with random weights and a context of 16 tokens, as the harness sees it."""
    model = Model(ModelConfig(vocab_size=300, seq_len=16, d_model=32, n_head=1, d_mlp=64))
    model.init_weights(0)
    for name, w in model.named_parameters():
        if name.endswith(("o.weight", "proj.weight")):
            torch.nn.init.normal_(w, 0, 0.2, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(adapter, "open_run", lambda run, device: (model.eval(), enc, {}))
    return adapter.Looped("run", depth=3, batch=2, device="cpu")


def asked(*args):
    return SimpleNamespace(args=args)


def next_logits(lm, ids, context):
    key = torch.tensor([lm.key(context)])
    with torch.no_grad():
        return lm.model.head(lm.model.hidden(torch.tensor([ids]), 3, key)[0, -1])


def direct(lm, context, continuation):
    """Log-probability and greediness, one token at a time, from the last 16 tokens before each."""
    total = 0.0
    greedy = True
    ids = (context + continuation)[-17:]
    for i in range(len(ids) - len(continuation), len(ids)):
        logits = next_logits(lm, ids[:i], context)
        total += F.log_softmax(logits, -1)[ids[i]].item()
        greedy = greedy and int(logits.argmax()) == ids[i]
    return total, greedy


def test_harness_values_equal_direct_ones(lm):
    pairs = [("abc de", " fab"), ("", "bad cab"), ("a b  ", "c"), ("deaf " * 9, "face"), ("a", "b")]
    found = lm.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), got in zip(pairs, found, strict=True):
        first = lm.enc.encode_ordinary(context.rstrip())
        rest = lm.enc.encode_ordinary(context + continuation)[len(first) :]
        nats, greedy = direct(lm, first or [lm.bos], rest)
        assert got[0] == pytest.approx(nats, abs=1e-4) and got[1] == greedy


class Joins:
    """A tokenizer of words, which takes "self" as one."""

    def encode_ordinary(self, text):
        return text.split()


def test_a_continuation_has_a_token_of_its_own():
    assert encode_pair(Joins(), "x = s", "elf") == (["x", "=", "s"], ["elf"])
    assert encode_pair(Joins(), "x = ", "self") == (["x", "="], ["self"])
    with pytest.raises(ValueError, match="continuation of 'import' is empty"):
        encode_pair(Joins(), "import", "")


@pytest.mark.parametrize("bos_first", [False, True])
def test_rolling_windows_score_every_token_once(bos_first):
    ids = list(range(1, 44))
    pairs = list(windows(ids, 0, 16, bos_first))
    assert sum((new for _, new in pairs), []) == ids
    assert all(len(before) + len(new) <= 17 for before, new in pairs)
    text = [0, *ids]
    for before, new in pairs:
        end = text.index(new[0])
        expected = text[end - len(before) : end]
        assert before == ([0, *expected[1:]] if bos_first else expected)
    assert len(pairs[-1][0]) == 17 - len(pairs[-1][1])  # the last window is full, too


def test_a_whole_text_is_the_sum_of_its_windows(lm):
    text = "abc bad face de éf " * 5
    ids = lm.enc.encode_ordinary(text)
    for lm.bos_first in (False, True):
        pairs = windows(ids, lm.bos, 16, lm.bos_first)
        total = sum(direct(lm, before, new)[0] for before, new in pairs)
        (found,) = lm.loglikelihood_rolling([asked(text)])
        assert found == pytest.approx(total, abs=1e-3)


def test_the_harness_generates_the_greedy_text(lm):
    prompt = lm.enc.encode_ordinary("abc de")
    made = list(prompt)
    specials = special_ids(range(297)).values()
    for _ in range(6):
        token = int(next_logits(lm, made, prompt).argmax())
        if token in specials:
            break
        made.append(token)
    text = lm.enc.decode(made[len(prompt) :])
    stop = text[2:4]
    requests = [asked("abc de", {"until": until, "max_gen_toks": 6}) for until in ([], stop)]
    assert lm.generate_until(requests, disable_tqdm=True) == [text, text.split(stop)[0]]


def test_generation_settings_mean_what_they_say():
    assert sampling_of({"do_sample": True, "top_k": 3}) == Sampling(1.0, 3, 1.0, 256)
    assert sampling_of({"temperature": 0.2, "top_k": -1}) == Sampling(0.2, -1, 1.0, 256)
    assert sampling_of({"top_p": 0.5, "max_tokens": 9}) == Sampling(0, 0, 0.5, 9)
    assert sampling_of({"do_sample": False, "temperature": 0.7}).temperature == 0
    with pytest.raises(ValueError, match="temperature=-1"):
        sampling_of({"temperature": -1})


def test_unknown_model_args_are_named():
    with pytest.raises(ValueError, match="detph"):
        adapter.Looped("run", detph=4)
