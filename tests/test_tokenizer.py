"""The tokenizer file and tiktoken give what the BPE trainer itself gives; byte counts come from bytes."""

import copy
import json
import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
import regex
import rustbpe
from helpers import documents, refused, write_jsonl

import tokenizer_train as tt
from looped.corpus import find_units, texts
from looped.files import read_checked, write_checked
from looped.tokenizer import (
    PATTERN,
    PIECE,
    SPECIALS,
    encode,
    load_tokenizer,
    save_tokenizer,
    token_bytes,
)
from tools import hf_tokenizer

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
    texts = []
    for _ in range(n):
        text = " ".join(rng.choices(words, k=rng.randint(1, 200)))
        texts.append(text + rng.choice(["", ".", "\n", "!?"]))
    return texts


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(the trainer's encoder, the same through the file and tiktoken, the file)"""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    save_tokenizer(path, tt.train_bpe(iter(corpus() + ODD), 1000))
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(corpus() + ODD), 997, pattern=PATTERN)
    return trainer, load_tokenizer(path), path


def test_ids_equal_the_trainers_own_encoder(trained):
    trainer, enc, _ = trained
    rng = random.Random(1)
    noise = []
    for _ in range(200):
        planes = (range(128), range(0xD800), range(0xE000, 0x110000))
        noise.append(
            "".join(chr(rng.choice(rng.choice(planes))) for _ in range(rng.randint(1, 80)))
        )
    for text in ODD + noise + corpus(2, 50):
        assert encode(enc, text) == trainer.encode(text)


def test_text_survives_encoding_and_decoding(trained):
    enc = trained[1]
    for text in ODD + corpus(3, 50):
        assert enc.decode(encode(enc, text)) == text


def test_lone_surrogates_become_the_replacement_character(trained):
    enc = trained[1]
    assert enc.decode(encode(enc, "a\ud800b\udfff")) == "a\ufffdb\ufffd"
    assert (
        enc.decode(encode(enc, "\ud83d\ude42")) == "🙂"
    )  # a surrogate pair is the character it stands for


def test_token_bytes_sum_to_the_utf8_length(trained):
    enc = trained[1]
    sizes = token_bytes(enc)
    assert sizes.shape == (1000,) and sizes.dtype == np.int32
    for text in ODD + corpus(4, 50):
        assert sizes[encode(enc, text)].sum() == len(text.encode())


def test_specials_are_the_last_three_ids_and_never_come_from_text(trained):
    enc = trained[1]
    sizes = token_bytes(enc)
    assert enc.n_vocab == 1000
    for i, name in enumerate(("<|bos|>", "<|eos|>", "<|pad|>")):
        assert enc.encode_single_token(name) == 997 + i
        assert sizes[997 + i] == 0 and name == SPECIALS[i]
        assert max(encode(enc, f"x {name} y")) < 997


def test_digit_groups_hold_at_most_two(trained):
    enc = trained[1]
    tokens = [enc.decode_single_token_bytes(i) for i in range(997)]
    assert not any(sum(chr(b).isdigit() for b in token) > 2 for token in tokens)
    assert max(len(token) for token in tokens if token.isdigit()) == 2


def test_long_text_is_encoded_as_in_one_go(trained):
    enc = trained[1]
    text = "  \n ".join(corpus(5, 600))
    assert len(text) > 4 * PIECE
    assert encode(enc, text) == enc.encode_ordinary(text)


@pytest.mark.parametrize("unit", [" ", "a", "\n", "7", "é", "'", " \n", "x  ", "🙂"])
def test_a_million_equal_characters_survive(trained, unit):
    enc = trained[1]  # in one go, a run of a million blanks overflows the regex engine's stack
    text = unit * (1_000_000 // len(unit))
    assert enc.decode(encode(enc, text)) == text


def test_training_is_reproducible_and_leaves_out_validation(tmp_path, capsys):
    train = corpus(6, 200)
    write_jsonl(tmp_path / "a.jsonl", train)
    write_jsonl(tmp_path / "b.jsonl", ["zqzqzq zqzqzq"] * 200)
    for out in "one", "two":
        tt.main(["--texts", str(tmp_path), "--vocab-size", "600", "--out", str(tmp_path / out)])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    again = ["--texts", str(tmp_path), "--out", str(tmp_path / "one")]
    refused(capsys, partial(tt.main, again), "one is there already")
    reference = rustbpe.Tokenizer()
    reference.train_from_iterator(iter(train), 597, pattern=PATTERN)
    enc = load_tokenizer(tmp_path / "one")
    assert {bytes(token): i for token, i in reference.get_mergeable_ranks()} == enc._mergeable_ranks
    assert not any(b"zqzq" in token for token in enc._mergeable_ranks)


def test_damaged_tokenizer_files_end_in_one_line(trained, tmp_path, capsys):
    good = json.loads(trained[2].read_text())
    bad = {
        "not json": b'{"version": 1',
        "one bit": trained[2].read_bytes().replace(b'"YQ=="', b'"YA=="'),
        "not utf-8": b"\xff\xfe\x00",
        "a list": b"[1, 2]",
        "version": json.dumps(good | {"version": 2}).encode(),
        "no ranks": json.dumps({"version": 1, "pattern": "x", "specials": {}}).encode(),
        "twice": json.dumps(good | {"ranks": good["ranks"][:-1] + good["ranks"][:1]}).encode(),
        "no byte": json.dumps(good | {"ranks": good["ranks"][1:]}).encode(),
        "no checksum": json.dumps({key: good[key] for key in good if key != "checksum"}).encode(),
        "base64": json.dumps(
            good | {"ranks": ["$" + good["ranks"][0], *good["ranks"][1:]]}
        ).encode(),
        "specials": json.dumps(good | {"specials": good["specials"] | {"<|bos|>": 0}}).encode(),
        "pattern": json.dumps(good | {"pattern": "(("}).encode(),
        "pattern type": json.dumps(good | {"pattern": 5}).encode(),
        "deep": b"[" * 200_000,
    }
    path = tmp_path / "tokenizer.json"
    for name, content in bad.items():
        path.write_bytes(content)
        for read in load_tokenizer, hf_tokenizer.read_tokenizer:
            assert "token" in refused(capsys, partial(read, path)), name
    refused(capsys, partial(load_tokenizer, tmp_path / "nowhere.json"), "tokenizer_train.py")
    good = read_checked(trained[2])
    doubled = [*good["ranks"][1:], good["ranks"][1]]
    for wrong in (
        {"pattern": 5},
        {"pattern": "("},
        {"specials": {}},
        {"ranks": doubled},
        {"ranks": ["?"]},
    ):
        write_checked(path, good | wrong)  # whole by its checksum
        refused(capsys, partial(load_tokenizer, path), "not a tokenizer of this program")


def test_a_hugging_face_tokenizer_that_tiktoken_cannot_take_is_refused(trained, tmp_path, capsys):
    data = hf_tokenizer.tokenizer_to_hf(trained[2])
    no_byte, no_pattern = copy.deepcopy(data), copy.deepcopy(data)
    del no_byte["model"]["vocab"][hf_tokenizer.visible(b"\xff")]
    no_pattern["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(("
    path = tmp_path / "tokenizer.json"
    for bad, why in (no_byte, "tokens are missing"), (no_pattern, "closing parenthesis"):
        path.write_text(json.dumps(bad))
        refused(capsys, partial(hf_tokenizer.read_tokenizer, path), why)


@pytest.mark.parametrize("flag", ["--vocab-size 100", "--vocab-size 70000", "--out ."])
def test_flags_out_of_range_end_in_one_line(flag, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text")
    line = ["--texts", str(tmp_path), "--out", str(tmp_path / "t.json"), *flag.split()]
    refused(capsys, partial(tt.main, line), *flag.split())


def test_too_little_text_for_the_vocabulary_is_said(tmp_path, capsys):
    write_jsonl(tmp_path / "a.jsonl", ["abcabc abc"])
    write_jsonl(tmp_path / "b.jsonl", ["validation"])
    out = tmp_path / "t.json"
    line = ["--texts", str(tmp_path), "--vocab-size", "1000", "--out", str(out)]
    refused(capsys, partial(tt.main, line), "smaller --vocab-size")
    assert not out.exists()


def test_the_pattern_cuts_as_it_says():
    text = "x'reason we'll it's  12345 !? (x)\n\n y"
    parts = ["x", "'re", "ason", " we", "'ll", " it", "'s", " ", " ", "12", "34", "5"]
    assert regex.findall(PATTERN, text) == [*parts, " !?", " (", "x", ")\n\n", " y"]


def test_a_long_run_of_blanks_is_cut_where_no_token_spans(trained):
    enc = trained[1]
    text = "a" * (PIECE - 3) + " " * 6 + "bc"
    assert encode(enc, text) == enc.encode_ordinary(text)


def test_no_validation_text_is_trained_on_and_of_a_document_its_beginning(
    tmp_path, enc, monkeypatch
):
    write_jsonl(tmp_path / "a.jsonl", ["x" * 30_000] * 3)
    write_jsonl(tmp_path / "b.jsonl", ["y"])
    with monkeypatch.context() as m:
        m.setattr(tt, "MAX_CHARS", 10_001)
        found = tt.training_texts(find_units(tmp_path)[1:])
        assert [len(text) for text in found] == [10_000] * 2
    (tmp_path / "b.jsonl").unlink()
    write_jsonl(tmp_path / "a.jsonl", documents(200))
    val, *train = find_units(tmp_path)
    held = set(texts(val, Counter()))
    assert held and held.isdisjoint(tt.training_texts(train))
    assert tt.bytes_per_token(enc, ["é" * 4]) == 8 / len(encode(enc, "é" * 4))
