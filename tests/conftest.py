"""Fixtures that several test files share. Helpers that are no fixtures: helpers.py."""

import random
import signal

import numpy as np
import pytest
from helpers import documents, write_jsonl

import dataloader
from looped.tokenizer import load_tokenizer, save_tokenizer
from tokenizer_train import train_bpe

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it


def make_tokenizer(path, texts, vocab_size=300):
    ranks = train_bpe(iter(texts), vocab_size)
    save_tokenizer(path, ranks)
    return path


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A tokenizer file of 300 entries, from odd words and documents()."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdeéf é🙂12 '\n", k=rng.randint(1, 9))) for _ in range(300)]
    texts = [" ".join(words), *documents(200, seed=9)]
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", texts)


@pytest.fixture(scope="session")
def enc(tokenizer):
    """The same, loaded."""
    return load_tokenizer(tokenizer)


@pytest.fixture(scope="session")
def packed(tmp_path_factory):
    """A folder of packed rows of 32 tokens (300 entries) of made-up prose: training rows and validation rows."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghij"), rng.integers(2, 7))) for _ in range(60)]
    texts = [" ".join(rng.choice(words, rng.integers(5, 60))) for _ in range(600)]
    write_jsonl(folder / "a.jsonl", texts[:500])
    write_jsonl(folder / "b.jsonl", texts[500:])
    tokens = make_tokenizer(folder / "tokenizer.json", texts[:500])
    arguments = f"pack --texts {folder} --tokenizer {tokens} --seq-len 32 --out {folder}/rows"
    dataloader.main([*arguments.split(), "--workers", "1"])
    return folder / "rows"
