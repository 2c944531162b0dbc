"""Packing and the order of rows: each law against a second computation. See test_corpus.py."""

import json
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import documents, refused, write_parquet

import dataloader as dl
from looped.tokenizer import BOS


@pytest.fixture
def folder(tmp_path):
    """Four parquet files, the last for validation."""
    (tmp_path / "data").mkdir()
    for i in range(4):
        write_parquet(tmp_path / "data" / f"shard_{i:05d}.parquet", documents(300, seed=i))
    return tmp_path / "data"


@pytest.fixture
def rows(folder, tokenizer, tmp_path):
    """Packed rows of it."""
    pack(folder, tokenizer, tmp_path / "rows")
    return tmp_path / "rows"


def pack(data, tokenizer, out, *more, seq_len=64):
    """Packs in this process, and returns the manifest."""
    flags = {"--texts": data, "--tokenizer": tokenizer, "--out": out, "--seq-len": seq_len}
    line = [str(part) for pair in flags.items() for part in pair]
    dl.main(["pack", *line, "--workers", "1", *more])
    return json.loads((Path(out) / "manifest.json").read_text())


def contents(out):
    return {path.name: path.read_bytes() for path in Path(out).iterdir()}


# ---- packing


def naive_pack(documents, row, split, buffer):
    """Best-fit packing by scanning a list -> rows.

    documents: lists of ids, each with its BOS. With split, longer documents are cut into rows first.
    """
    bos = documents[0][0]
    waiting = []
    for doc in documents:
        if split and len(doc) > row:
            body = doc[1:]
            for start in range(0, len(body), row - 1):
                waiting.append([bos, *body[start : start + row - 1]])
        else:
            waiting.append(doc)
    rows, current, pool = [], [], []
    while waiting or pool:
        while waiting and len(pool) < buffer:
            pool.append(waiting.pop(0))
        room = row - len(current)
        fitting = [doc for doc in pool if len(doc) <= room]
        # the longest that fits, else the shortest; the first of equals
        doc = max(fitting, key=len) if fitting else min(pool, key=len)
        pool.remove(doc)
        current = current + doc[:room]
        if len(current) == row:
            rows.append(current)
            current = []
    return rows


@pytest.mark.parametrize("mode", ["crop", "split"])
@pytest.mark.parametrize("seq_len", [32, 256])
def test_packing_equals_a_naive_list_scan(mode, seq_len, tokenizer, enc, tmp_path, monkeypatch):
    monkeypatch.setattr(dl, "BUFFER", 50)
    docs = documents(300, seed=1)
    write_parquet(tmp_path / "a.parquet", docs)
    write_parquet(tmp_path / "b.parquet", documents(50, seed=2))
    counts = pack(tmp_path, tokenizer, tmp_path, "--long-docs", mode, seq_len=seq_len)["counts"]
    bos = enc.encode_single_token(BOS)
    ids = [[bos, *enc.encode_ordinary(doc)] for doc in docs]
    if mode == "crop":
        ids = [doc[: seq_len + 1] for doc in ids]
    expected = naive_pack(ids, seq_len + 1, mode == "split", 50)
    assert np.load(tmp_path / "shard_00000.npy").tolist() == expected
    assert counts["documents"] == len(docs)
    assert counts["tokens"] == len(expected) * (seq_len + 1) + counts["cropped tokens"]


def test_workers_do_not_change_a_bit(folder, tokenizer, rows, tmp_path):
    pack(folder, tokenizer, tmp_path / "two", "--workers", "2")
    assert contents(rows) == contents(tmp_path / "two")


def test_unigram_entropy_equals_a_direct_count(rows):
    law = Counter(range(300))
    for file in rows.glob("shard_*.npy"):
        law.update(np.load(file)[:, 1:].ravel().tolist())
    targets = np.load(rows / "val.npy")[:, 1:].ravel().tolist()
    nats = -np.mean([np.log(law[token] / law.total()) for token in targets])
    assert dl.PackedData(rows).manifest["unigram_entropy"] == pytest.approx(nats, rel=1e-12)


def test_packing_again_does_nothing_until_the_texts_change(folder, tokenizer, rows, tmp_path):
    before = (rows / "val.npy").stat().st_mtime_ns
    pack(folder, tokenizer, rows)
    assert (rows / "val.npy").stat().st_mtime_ns == before
    write_parquet(folder / "shard_00001.parquet", documents(290, seed=77))
    pack(folder, tokenizer, rows)
    pack(folder, tokenizer, tmp_path / "fresh")
    assert contents(rows) == contents(tmp_path / "fresh")


def test_rows_of_an_interrupted_packing_are_not_trained_on(folder, tokenizer, rows, capsys):
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), folder / "shard_00002.parquet")
    again = partial(pack, folder, tokenizer, rows)
    refused(capsys, again, "shard_00002.parquet has no column text; it has body, id")
    refused(capsys, partial(dl.PackedData, rows), "no packed rows in", "python dataloader.py pack")


def test_rows_of_other_settings_are_not_mixed(folder, tokenizer, rows, capsys):
    before = contents(rows)
    other = partial(pack, folder, tokenizer, rows, seq_len=32)
    refused(capsys, other, "was packed with seq_len 64 (now 32)", "choose another --out")
    write_parquet(folder / "shard_00009.parquet", documents(10))  # would be validation from now on
    moved = "validation shard_00003.parquet (now shard_00009.parquet)"
    refused(capsys, partial(pack, folder, tokenizer, rows), moved)
    assert contents(rows) == before


def test_too_little_text_is_said(folder, tokenizer, tmp_path, capsys):
    write_parquet(folder / "shard_00003.parquet", ["short"])
    action = partial(pack, folder, tokenizer, tmp_path / "out")
    refused(capsys, action, "too little validation text: not one row of 65 tokens")
    shutil.rmtree(folder)
    refused(capsys, action, "no .parquet, .jsonl or .txt file to train on in")


def test_a_validation_document_is_never_trained_on(tokenizer, tmp_path, capsys):
    docs = list(dict.fromkeys(documents(200)))
    for names, trained, said in (
        (("a", "b"), 50, "50 left out, being in validation"),
        (("shard_00000", "shard_01822"), 100, "50 also in validation (the published split, kept)"),
    ):
        folder = tmp_path / names[0]
        folder.mkdir()
        write_parquet(folder / f"{names[0]}.parquet", docs[:100])
        write_parquet(folder / f"{names[1]}.parquet", docs[50:])
        counts = pack(folder, tokenizer, folder / "rows")["counts"]
        assert counts["documents"] == trained
        assert said in capsys.readouterr().out


# ---- the order of rows


def test_permute_is_a_permutation_that_the_key_changes():
    for n in [*range(1, 70), 255, 256, 257, 1000, 4097, 65_537]:
        assert sorted(dl.permute(np.arange(n), n, "0 0 0")) == list(range(n))
    # where 0 goes under 2,400 keys: to each of 6 places 400 times, give or take 5 deviations
    places = [dl.permute(np.array([0]), 6, str(key)).item() for key in range(2400)]
    assert abs(np.bincount(places, minlength=6) - 400).max() < 92


def test_the_order_of_rows_is_a_function_of_seed_and_index(rows):
    data = dl.PackedData(rows)
    n = data.rows("train")
    stream = data.stream_ids(7, 0, 2 * n)
    assert sorted(stream[:n]) == sorted(stream[n:]) == list(range(n))
    assert (stream[:n] != data.stream_ids(8, 0, n)).any()
    # as in published runs: the key of a permutation is seed, epoch, 0
    assert (stream[n:] == dl.permute(np.arange(n), n, "7 1 0")).all()
    assert (dl.PackedData(rows).stream_ids(7, n - 5, 10) == stream[n - 5 : n + 5]).all()


def test_get_returns_the_rows_of_the_files(rows):
    data = dl.PackedData(rows)
    train = np.concatenate([np.load(rows / f"shard_0000{i}.npy") for i in range(3)])
    ids = np.random.default_rng(0).integers(0, len(train), 500)
    assert (data.get("train", ids) == train[ids]).all()
    assert (data.get("val", [0, 3]) == np.load(rows / "val.npy")[[0, 3]]).all()


def test_rows_that_do_not_fit_the_model_are_refused(rows, capsys):
    data = dl.PackedData(rows)
    n = data.rows("train")
    data.check(64, 300, n)
    for asked, said in (
        ((32, 300), "packed with seq_len 64, not 32; try --seq-len 64"),
        ((64, 1024), "packed with vocab_size 300, not 1024"),
        ((64, 300, n + 1), f"{n} training rows are fewer than --batch-size {n + 1}"),
    ):
        refused(capsys, partial(data.check, *asked), said)
