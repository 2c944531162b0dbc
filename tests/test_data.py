"""Packing and the order of rows: each law against a second computation. See test_corpus.py."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import make_tokenizer
from helpers import documents, refused, write_parquet

import dataloader as dl
import tokenizer_train
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
    dl.main(["pack", *line, "--workers", "1", *map(str, more)])
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
    flags = ("--val", tmp_path / "b.parquet", "--long-docs", mode)
    counts = pack(tmp_path, tokenizer, tmp_path, *flags, seq_len=seq_len)["counts"]
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


def test_packing_again_does_nothing_until_the_texts_change(folder, tokenizer, rows, capsys):
    before = (rows / "val.npy").stat().st_mtime_ns
    again = partial(pack, folder, tokenizer, rows)
    again()
    (folder / "new.txt").write_text("new")
    refused(capsys, again, f"{folder} is not what {rows} was made of: new.txt was added; delete")
    (folder / "new.txt").unlink()
    shard = folder / "shard_00001.parquet"
    shard.write_bytes(shard.read_bytes()[::-1])
    refused(capsys, again, "shard_00001.parquet has changed")
    shard.unlink()
    refused(capsys, again, "shard_00001.parquet is gone")
    assert (rows / "val.npy").stat().st_mtime_ns == before


def test_rows_of_an_interrupted_packing_are_not_trained_on(folder, tokenizer, tmp_path, capsys):
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), folder / "shard_00002.parquet")
    action = partial(pack, folder, tokenizer, tmp_path / "rows")
    refused(capsys, action, "shard_00002.parquet has no column text; it has body, id")
    said = "no packed rows in", "python dataloader.py pack"
    refused(capsys, partial(dl.PackedData, tmp_path / "rows"), *said)


def test_where_the_rows_are_is_said(folder, rows, capsys):
    refused(capsys, partial(dl.PackedData, rows.parent), f"below it: --data {rows}")
    refused(capsys, partial(dl.PackedData, folder), "holds texts", f"pack --texts {folder}")


def test_rows_of_other_settings_are_not_mixed(folder, tokenizer, rows, capsys):
    again = partial(pack, folder, tokenizer, rows)
    refused(
        capsys, partial(again, seq_len=32), "was made with seq_len 64, not 32", f"delete {rows}"
    )
    other = partial(again, "--val", folder / "shard_00001.parquet")
    refused(capsys, other, "with validation shard_00003.parquet, not shard_00001.parquet")


def test_too_little_text_is_said(folder, tokenizer, tmp_path, capsys):
    write_parquet(folder / "shard_00003.parquet", ["short"])
    action = partial(pack, folder, tokenizer, tmp_path / "out")
    refused(capsys, action, "too little validation text, not one row of 65 tokens")
    shutil.rmtree(folder)
    refused(capsys, action, "no .parquet, .jsonl or .txt file to train on in the folder")


def test_a_text_of_100_kb_is_enough(tmp_path, capsys):
    source = Path(dl.__file__).with_name("model.py").read_text() * 3
    (tmp_path / "a.txt").write_text(source[:100_000])
    tokenizer = tmp_path / "made/tokenizer.json"
    tokenizer_train.main(["--texts", str(tmp_path), "--out", str(tokenizer)])
    split = ("--long-docs", "split")
    manifest = pack(tmp_path, tokenizer, tmp_path / "made/rows", *split, seq_len=256)
    assert all(shard["rows"] > 1 for shard in manifest["shards"])
    assert "rows from 1 of " in capsys.readouterr().out


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
    # the key of a permutation is seed, epoch, 0, so that recorded runs can be repeated
    assert (stream[n:] == dl.permute(np.arange(n), n, "7 1 0")).all()
    assert (dl.PackedData(rows).stream_ids(7, n - 5, 10) == stream[n - 5 : n + 5]).all()


def test_a_part_of_the_rows_is_the_same_for_all_seeds_and_within_every_larger_part(rows, capsys):
    total = dl.PackedData(rows).rows("train")
    larger = set(range(total))
    for n in (total, 20, 10):
        data = dl.PackedData(rows, n)
        assert data.rows("train") == n
        part = set(data.stream_ids(0, 0, n))
        assert len(part) == n and part <= larger
        assert sorted(data.stream_ids(1, n, n)) == sorted(part)  # another seed and epoch
        larger = part
    refused(capsys, partial(dl.PackedData, rows, total + 1), f"--rows {total + 1}", f"the {total} ")


def test_yardsticks_differ_where_the_validation_does(folder, tokenizer, rows, tmp_path):
    def differs(*flags, tokenizer=tokenizer):
        other = tmp_path / str(len(list(tmp_path.iterdir())))
        pack(folder, tokenizer, other, *flags)
        ours, theirs = dl.PackedData(rows).yardstick, dl.PackedData(other).yardstick
        return {name for name in ours if ours[name] != theirs[name]}

    write_parquet(folder / "shard_00001.parquet", documents(5))  # of the training text
    assert differs() == set()
    assert differs("--long-docs", "split") == {"rows", "text"}
    vowels = make_tokenizer(tmp_path / "vowels.json", ["ae io ou ei"] * 9, vocab_size=262)
    assert differs(tokenizer=vowels) == {"rows", "tokenizer"}
    write_parquet(folder / "shard_00003.parquet", documents(300, seed=5))
    assert differs() == {"rows", "text"}


def test_get_returns_the_rows_of_the_files(rows):
    data = dl.PackedData(rows)
    train = np.concatenate([np.load(rows / f"shard_0000{i}.npy") for i in range(3)])
    assert (data.get("train", range(len(train))) == train).all()
    assert (data.get("val", [3, 0]) == np.load(rows / "val.npy")[[3, 0]]).all()


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
