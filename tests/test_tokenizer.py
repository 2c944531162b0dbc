"""The tokenizer file and tiktoken give what the BPE trainer itself gives; byte counts come from bytes."""

import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
import rustbpe
from helpers import refused, write_jsonl

import tokenizer_train as tt
from looped.corpus import Shard
from looped.tokenizer import (
    PATTERN,
    PIECE,
    encode,
    load_tokenizer,
    save_tokenizer,
    token_bytes,
)

ODD = [
    "",
    "a",
    "Hello, world!",
    "don't we'll I'VE they'd 'tis '' 'S",
    "0 12 345 6789 3.14159 1,000,000 ٣٤٥ ²³½",
    "   leading\t\ttabs \u00a0 no-break \u2003em  trailing   ",
    "\n\n\r\n  \r\n a\n \n\tb\r",
    "naïve café — “quotes” … ∑∫√ 你好，世界 こんにちは שלום",
    "🙂👨‍👩‍👧‍👦🇫🇷 🏳️‍🌈e\u0301\u0301",
    "nul\x00in\x00 the middle \x01\x1c\x1f\x7f\x85\u200b\ufeff",
    "<|bos|>not special<|eos|> <|pad|>",
    "def f(x):\n    return x**2  # 42\n" * 3,
    "a" * 700 + " " * 700 + "!" * 700 + "\n" * 700,
]


def corpus(seed=0, n=300):
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyzé🙂0123456789'-"
    words = ["".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(400)]
    return [" ".join(rng.choices(words, k=rng.randint(1, 200))) for _ in range(n)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(the trainer's own encoder, the same through the file and tiktoken)"""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    save_tokenizer(path, tt.train_bpe(iter(corpus() + ODD), 1000))
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(corpus() + ODD), 997, pattern=PATTERN)
    return trainer, load_tokenizer(path)


def test_ids_equal_the_trainers_own_and_give_the_text_back(trained):
    trainer, enc = trained
    rng = random.Random(1)
    planes = [chr(i) for i in (*range(128), *range(0x300, 0xD800, 7), *range(0xE000, 0x110000, 99))]
    noise = ["".join(rng.choices(planes, k=rng.randint(1, 80))) for _ in range(200)]
    sizes = token_bytes(enc)
    assert sizes.shape == (1000,) and sizes.dtype == np.int32
    for text in ODD + noise + corpus(2, 50):
        ids = encode(enc, text)
        assert ids == trainer.encode(text)
        assert enc.decode(ids) == text
        assert sizes[ids].sum() == len(text.encode())


def test_lone_surrogates_become_the_replacement_character(trained):
    enc = trained[1]
    assert enc.decode(encode(enc, "a\ud800b\udfff")) == "a\ufffdb\ufffd"
    assert enc.decode(encode(enc, "\ud83d\ude42")) == "🙂"  # a pair is the character it stands for


def test_specials_are_the_last_three_ids_and_never_come_from_text(trained):
    enc = trained[1]
    for i, name in enumerate(("<|bos|>", "<|eos|>", "<|pad|>")):
        assert enc.encode_single_token(name) == 997 + i
        assert token_bytes(enc)[997 + i] == 0
        assert max(encode(enc, f"x {name} y")) < 997


def test_long_text_is_encoded_as_in_one_go(trained):
    enc = trained[1]
    blanks_at_the_cut = "a" * (PIECE - 3) + " " * 6 + "bc"
    for text in "  \n ".join(corpus(5, 600)), blanks_at_the_cut:
        assert len(text) > PIECE
        assert encode(enc, text) == enc.encode_ordinary(text)


@pytest.mark.parametrize("unit", [" ", "x  "])
def test_a_million_equal_characters_survive(trained, unit):
    enc = trained[1]  # in one go, a run of a million blanks overflows the regex engine's stack
    text = unit * (1_000_000 // len(unit))
    assert enc.decode(encode(enc, text)) == text


def train(folder, out, vocab_size=600):
    """Trains on what is in the folder but b.jsonl."""
    line = ["--texts", folder, "--val", folder / "b.jsonl", "--vocab-size", vocab_size]
    tt.main([str(part) for part in (*line, "--out", out)])


def test_training_is_the_trainers_without_validation(tmp_path):
    docs = corpus(6, 200)
    write_jsonl(tmp_path / "a.jsonl", docs)
    write_jsonl(tmp_path / "b.jsonl", ["validation"] * 200)
    train(tmp_path, tmp_path / "one.json")
    reference = rustbpe.Tokenizer()
    reference.train_from_iterator(iter(docs), 597, pattern=PATTERN)
    ranks = load_tokenizer(tmp_path / "one.json")._mergeable_ranks
    assert {bytes(token): i for token, i in reference.get_mergeable_ranks()} == ranks


def test_a_tokenizer_belongs_to_its_texts(tmp_path, monkeypatch, capsys):
    out = tmp_path / "made" / "t.json"
    for name in ("b", "c", "d"):
        write_jsonl(tmp_path / f"{name}.jsonl", corpus(1, 50))
    write_jsonl(tmp_path / "b.jsonl", ["validation"])
    monkeypatch.setattr(tt, "MAX_CHARS", 1000)  # c.jsonl has more
    train(tmp_path, out, 300)
    before = out.stat().st_mtime_ns
    write_jsonl(tmp_path / "d.jsonl", ["is not read"])
    train(tmp_path, out, 300)
    assert out.stat().st_mtime_ns == before
    refused(capsys, partial(train, tmp_path, out, 301), "with vocab_size 300, not 301")
    write_jsonl(tmp_path / "c.jsonl", corpus(4, 50))
    refused(capsys, partial(train, tmp_path, out, 300), "c.jsonl has changed", f"delete {out}")


def test_of_a_document_its_beginning_is_used_and_of_the_corpus_so_much(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", ["x" * 30_000] * 3)
    monkeypatch.setattr(tt, "MAX_CHARS", 10_001)
    shard = Shard("a", [tmp_path / "a.jsonl"])
    assert [len(text) for text in tt.training_texts([shard], Counter())] == [10_000] * 2


def test_too_little_text_for_the_vocabulary_is_said(tmp_path, capsys):
    write_jsonl(tmp_path / "a.jsonl", ["abcabc abc"])
    write_jsonl(tmp_path / "b.jsonl", ["validation"])
    out = tmp_path / "made" / "t.json"
    refused(capsys, partial(train, tmp_path, out, 1000), "yields only", "a smaller --vocab-size")
    assert not out.parent.exists()
    refused(capsys, partial(load_tokenizer, out), "no tokenizer at", "tokenizer_train.py")
