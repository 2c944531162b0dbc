"""Corpus, packing, stream and download: each law against a second computation; damaged input: one line."""

import hashlib
import http.server
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import tokenize
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dataloader as dl
import tokenizer_train as tt

WORDS = ["the ", "loop ", "core", " and", "ing", "\n", "é", "42", ". ", "state ", "x"]


def documents(n, seed=0, mean=120):
    rng = random.Random(seed)
    return ["".join(rng.choices(WORDS, k=1 + int(rng.expovariate(1 / mean)))) + "." for _ in range(n)]


def write_parquet(path, docs, **options):
    pq.write_table(pa.table({"text": pa.array(docs, pa.string())}), path, **options)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tt.save_tokenizer(path, tt.train_bpe(iter(documents(200, seed=9)), 300)[0])
    return str(path)


@pytest.fixture
def corpus(tmp_path):
    """Four parquet files, the last for validation."""
    data = tmp_path / "data"
    data.mkdir()
    for i in range(4):
        write_parquet(data / f"shard_{i:05d}.parquet", documents(300, seed=i), row_group_size=100)
    return data


def pack(data, tokenizer, out, *flags, seq_len=64, workers=1):
    dl.main(["pack", "--data", str(data), "--tokenizer", tokenizer, "--out", str(out), "--seq-len", str(seq_len),
             "--workers", str(workers), *flags])  # fmt: skip
    return json.loads((Path(out) / "manifest.json").read_text())


def expect_error(capsys, action, *fragments):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        action()
    message = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and message.startswith("error: ")
    for fragment in fragments:
        assert fragment in message, message


def contents(folder):
    return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.suffix in (".npy", ".json")}


# ---- packing


def naive_pack(docs, row, mode, buffer=dl.BUFFER):
    """(rows, cropped tokens, tokens left over) by scanning a list: longest that fits, else crop the shortest."""
    bos, cropped, waiting = docs[0][0], 0, []
    for doc in docs:
        if mode == "own-row":
            cropped += max(0, len(doc) - row)
            waiting.append(doc[:row])
        elif mode == "split" and len(doc) > row:
            body = doc[1:]
            waiting += [[bos, *body[i : i + row - 1]] for i in range(0, len(body), row - 1)]
        else:
            waiting.append(doc)
    rows, current, pool = [], [], []
    while waiting or pool:
        while waiting and len(pool) < buffer:
            pool.append(waiting.pop(0))
        room = row - len(current)
        fitting = [doc for doc in pool if len(doc) <= room]
        doc = max(fitting, key=len) if fitting else min(pool, key=len)  # the first of equals, as documents came
        pool.remove(doc)
        cropped += max(0, len(doc) - room)
        current = current + doc[:room]
        if len(current) == row:
            rows.append(current)
            current = []
    return rows, cropped, len(current)


@pytest.mark.parametrize("mode", dl.LONG_DOCS)
@pytest.mark.parametrize("seq_len", [32, 256])
def test_packing_equals_a_naive_list_scan(mode, seq_len, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(dl.best_fit, "__defaults__", (50,))
    docs = documents(400, seed=1)
    write_parquet(tmp_path / "a.parquet", docs)
    write_parquet(tmp_path / "b.parquet", documents(50, seed=2))
    manifest = pack(tmp_path, tokenizer, tmp_path / "out", "--long-docs", mode, seq_len=seq_len)
    enc = tt.load_tokenizer(tokenizer)
    ids = [[manifest["bos_id"], *enc.encode_ordinary(doc)] for doc in docs]
    rows, cropped, dropped = naive_pack(ids, seq_len + 1, mode, buffer=50)
    assert np.load(tmp_path / "out" / "shard_00000.npy").tolist() == rows
    assert manifest["cropped_tokens"] == cropped == manifest["train"][0]["cropped"][mode]
    assert manifest["dropped_tokens"] == dropped
    total = sum(map(len, ids))
    assert manifest["document_tokens"] == total and manifest["cropped_fraction"] == pytest.approx(cropped / total)
    assert manifest["tokens"] == len(rows) * seq_len and manifest["documents"] == len(docs)
    assert manifest["bytes"] == sum(len(doc.encode()) for doc in docs)
    if mode != "split":  # which adds a BOS for each further piece
        assert len(rows) * (seq_len + 1) + cropped + dropped == total
    for other in dl.LONG_DOCS:
        assert manifest["cropped_fraction_by_mode"][other] == naive_pack(ids, seq_len + 1, other, buffer=50)[1] / total


@pytest.mark.parametrize("mode", ["crop", "split"])
def test_rows_hold_whole_documents_but_for_cropped_tails(mode, corpus, tokenizer, tmp_path):
    pack(corpus, tokenizer, tmp_path / "out", "--long-docs", mode, seq_len=128)
    data, enc = dl.PackedData(tmp_path / "out"), tt.load_tokenizer(tokenizer)
    bos = data.manifest["bos_id"]
    rows = data.get("train", range(data.rows("train")))
    assert (rows[:, 0] == bos).all() and rows.dtype == np.int64
    originals = [tuple(enc.encode_ordinary(doc)) for i in range(3) for doc in documents(300, seed=i)]
    prefixes = {doc[:k] for doc in originals for k in range(len(doc) + 1)}
    whole, packed = set(originals), []
    for row in rows.tolist():
        starts = [i for i, token in enumerate(row) if token == bos] + [len(row)]
        pieces = [tuple(row[a + 1 : b]) for a, b in zip(starts, starts[1:])]
        assert all(piece in whole for piece in pieces[:-1]) or mode == "split"  # only the last of a row may be cropped
        assert all(piece in prefixes for piece in pieces) or mode == "split"
        packed += pieces
    if mode == "split":  # every piece occurs in the text, and in total nothing is lost but the cropped tails
        lost = data.manifest["cropped_tokens"] + data.manifest["dropped_tokens"]
        assert sum(map(len, originals)) - lost <= sum(map(len, packed)) <= sum(map(len, originals))
        joined = "|".join(" ".join(map(str, (-1, *doc, -1))) for doc in originals)
        assert all(f" {' '.join(map(str, piece))} " in joined for piece in packed[:500] if piece)


def test_best_fit_is_exact_at_the_edges():
    assert list(dl.best_fit([], 4)) == []
    assert list(dl.best_fit([4, 4], 4)) == [[(0, 4, 4)], [(1, 4, 4)]]
    assert list(dl.best_fit([9, 7, 8], 4)) == [[(1, 7, 4)], [(2, 8, 4)], [(0, 9, 4)]]  # longer ones: the shortest first
    assert list(dl.best_fit([1] * 5, 2)) == [[(0, 1, 1), (1, 1, 1)], [(2, 1, 1), (3, 1, 1)], [(4, 1, 1)]]
    assert [dl.piece_lengths(n, 5, "split") for n in (5, 6, 9, 10)] == [[5], [5, 2], [5, 5], [5, 5, 2]]


def test_workers_do_not_change_a_bit(corpus, tokenizer, tmp_path):
    pack(corpus, tokenizer, tmp_path / "one")
    pack(corpus, tokenizer, tmp_path / "two", workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_statistics_equal_a_direct_count(corpus, tokenizer, tmp_path):
    manifest = pack(corpus, tokenizer, tmp_path / "out")
    enc = tt.load_tokenizer(tokenizer)
    counts = np.ones(300)
    for entry in manifest["train"]:
        for token in np.load(tmp_path / "out" / entry["file"])[:, 1:].ravel():
            counts[token] += 1
    targets = np.load(tmp_path / "out" / "val.npy")[:, 1:].ravel()
    nats = -np.mean([np.log(counts[t] / counts.sum()) for t in targets])
    sizes = [len(enc.decode_single_token_bytes(int(t))) * (t != manifest["bos_id"]) for t in targets]
    assert manifest["unigram_entropy"] == pytest.approx(nats, rel=1e-12)
    assert manifest["val_bytes_per_token"] == pytest.approx(np.mean(sizes), rel=1e-12)


def test_max_tokens_stops_early_and_can_be_raised(corpus, tokenizer, tmp_path, capsys):
    full = pack(corpus, tokenizer, tmp_path / "full")
    some = pack(corpus, tokenizer, tmp_path / "out", "--max-tokens", "1000")
    assert some["tokens"] == 1024 and len(some["train"]) == 1 and some["complete"]
    first = np.load(tmp_path / "full" / "shard_00000.npy")
    assert (np.load(tmp_path / "out" / "shard_00000.npy") == first[:16]).all()
    more = pack(corpus, tokenizer, tmp_path / "out", "--max-tokens", str(full["train"][0]["rows"] * 64 + 1))
    assert [e["rows"] for e in more["train"]] [0] == len(first) and len(more["train"]) == 2
    assert "shard_00000.npy" in capsys.readouterr().out


# ---- running again, being killed


def test_a_second_run_does_nothing_and_a_changed_source_is_packed_again(corpus, tokenizer, tmp_path, capsys):
    out = tmp_path / "out"
    pack(corpus, tokenizer, out)
    before, times = contents(out), {p.name: p.stat().st_mtime_ns for p in out.glob("*.npy")}
    for path in corpus.iterdir():
        os.utime(path)  # a copied corpus has other times and the same content
    assert pack(corpus, tokenizer, out)["complete"] and contents(out) == before
    assert {p.name: p.stat().st_mtime_ns for p in out.glob("*.npy")} == times
    write_parquet(corpus / "shard_00001.parquet", documents(300, seed=77))
    capsys.readouterr()
    pack(corpus, tokenizer, out)
    assert "packed again" in (said := capsys.readouterr().out) and "shard_00001.npy" in said
    changed = {p.name for p in out.glob("*.npy") if p.stat().st_mtime_ns != times[p.name]}
    assert changed == {"shard_00001.npy"}
    pack(corpus, tokenizer, tmp_path / "fresh")
    assert contents(out).keys() == contents(tmp_path / "fresh").keys()
    assert {k: v for k, v in contents(out).items() if k != "manifest.json"} == {
        k: v for k, v in contents(tmp_path / "fresh").items() if k != "manifest.json"}  # fmt: skip


def test_other_settings_are_refused(corpus, tokenizer, tmp_path, capsys):
    out = tmp_path / "out"
    pack(corpus, tokenizer, out)
    before = contents(out)
    other = str(tmp_path / "other.json")
    tt.save_tokenizer(other, tt.train_bpe(iter(documents(200, seed=10)), 300)[0])
    expect_error(capsys, lambda: pack(corpus, tokenizer, out, seq_len=32), "seq_len 64 (now 32)")
    expect_error(capsys, lambda: pack(corpus, other, out), "tokenizer_sha256")
    expect_error(capsys, lambda: pack(corpus, tokenizer, out, "--long-docs", "split"), "long_docs crop (now split)")
    assert contents(out) == before


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_packing_shows_no_partial_shard_and_continues(workers, corpus, tokenizer, tmp_path):
    pack(corpus, tokenizer, tmp_path / "whole")
    whole, out = contents(tmp_path / "whole"), tmp_path / "out"
    command = [sys.executable, dl.__file__, "pack", "--data", str(corpus), "--tokenizer", tokenizer, "--seq-len", "64",
               "--out", str(out), "--workers", str(workers)]  # fmt: skip
    rng = random.Random(workers)
    for _ in range(4):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.1, 1.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        for file, content in (contents(out) if out.exists() else {}).items():
            assert file == "manifest.json" or content == whole[file]
        if (out / "manifest.json").exists():
            listed = json.loads((out / "manifest.json").read_text())
            assert all((out / entry["file"]).exists() for entry in listed["train"])
    for _ in range(100):  # orphaned workers end within a second or two and give the lock back at once
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            break
        assert "another process" in done.stderr
        time.sleep(0.1)
    assert contents(out) == whole and not list(out.glob(".*.tmp"))


def test_two_writers_of_one_folder_are_refused(corpus, tokenizer, tmp_path, capsys):
    with dl.sole_writer(tmp_path / "out"):
        expect_error(capsys, lambda: pack(corpus, tokenizer, tmp_path / "out"), "another process")


def test_a_full_disk_ends_packing_in_one_line_and_damages_nothing(corpus, tokenizer, tmp_path):
    pack(corpus, tokenizer, tmp_path / "whole")
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, dl.__file__, "pack", "--data", str(corpus), "--tokenizer", tokenizer, "--seq-len", "64",
               "--out", str(out), "--workers", "1"]  # fmt: skip
    write_parquet(corpus / "shard_00001.parquet", documents(3000, seed=1))  # its rows exceed the limit, the others' not
    done = subprocess.run(["sh", "-c", 'ulimit -f 150; exec "$@"', "sh", *command], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == f"error: {out / 'shard_00001.npy'} File too large\n"
    assert sorted(p.name for p in out.glob("*.npy")) == ["shard_00000.npy", "val.npy"] and not list(out.glob(".*.tmp"))
    assert (out / "shard_00000.npy").read_bytes() == (tmp_path / "whole" / "shard_00000.npy").read_bytes()
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert len(dl.PackedData(out).manifest["train"]) == 3


def test_a_failed_write_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "file"
    dl.write_atomic(path, b"earlier")
    (tmp_path / ".file.999999999.tmp").write_bytes(b"of a killed process")

    def fails(f):
        f.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        dl.write_atomic(path, fails)
    assert path.read_bytes() == b"earlier" and [p.name for p in tmp_path.iterdir()] == ["file"]
    dl.write_atomic(path, lambda f: f.write(b"later"))
    assert path.read_bytes() == b"later"


# ---- the stream


def test_permute_is_a_permutation_that_seed_and_epoch_change():
    for n in [*range(1, 130), 255, 256, 257, 1000, 4097, 65_537]:
        image = dl.permute(np.arange(n), n, "0 0 0")
        assert sorted(image.tolist()) == list(range(n))
        assert (dl.permute(np.arange(n)[::-1], n, "0 0 0") == image[::-1]).all()
    orders = {key: tuple(dl.permute(np.arange(1000), 1000, key)) for key in ("0 0 0", "1 0 0", "0 1 0", "0 0 1")}
    assert len(set(orders.values())) == 4
    assert dl.permute(np.array([10**12 - 1]), 10**12, "k").item() < 10**12  # O(1) memory
    image = dl.permute(np.arange(20_000), 20_000, "k")
    assert abs(np.corrcoef(image, np.arange(20_000))[0, 1]) < 0.03  # 4 standard errors
    assert abs(np.corrcoef(np.diff(image), np.arange(19_999))[0, 1]) < 0.03
    assert 0.3 < np.mean(np.diff(image) > 0) < 0.7


def test_permute_mixes_small_sets_evenly():
    """Where 0 goes under 6,000 keys, for n = 6: each place 1,000 times, give or take 5 standard deviations (29)."""
    places = np.bincount([dl.permute(np.array([0]), 6, str(key)).item() for key in range(6000)], minlength=6)
    assert abs(places - 1000).max() < 145


@pytest.fixture
def packed(corpus, tokenizer, tmp_path):
    pack(corpus, tokenizer, tmp_path / "out")
    return tmp_path / "out"


def test_stream_is_the_same_for_any_rank_count_and_micro_batch(packed):
    data = dl.PackedData(packed)
    n = data.rows("train")
    stream = data.stream_ids(7, 0, 2 * n + 10)
    assert sorted(stream[:n].tolist()) == sorted(stream[n : 2 * n].tolist()) == list(range(n))
    assert (stream[:n] != stream[n : 2 * n]).any() and (stream[:n] != data.stream_ids(8, 0, n)).any()
    for world, micro in (1, 24), (2, 4), (3, 8), (8, 3), (24, 1):
        merged = np.full(240, -1)
        for rank in range(world):
            for start in range(rank * micro, 240, world * micro):
                merged[start : start + micro] = data.stream_ids(7, start, micro)
        assert (merged == stream[:240]).all()
    # resuming is arithmetic: a new process asks for the rest
    assert (dl.PackedData(packed).stream_ids(7, n - 5, n + 15) == stream[n - 5 :]).all()


def test_get_returns_the_rows_of_the_files(packed):
    data = dl.PackedData(packed)
    rows = np.concatenate([np.load(packed / entry["file"]) for entry in data.manifest["train"]])
    ids = np.random.default_rng(0).integers(0, len(rows), 500)
    assert (data.get("train", ids) == rows[ids]).all() and data.get("train", ids).dtype == np.int64
    assert (data.get("val", [0, 3]) == np.load(packed / "val.npy")[[0, 3]]).all()
    assert data.seq_len == 64 and data.rows("val") == len(np.load(packed / "val.npy"))
    assert len(data.get("train", [])) == 0


def test_data_hash_follows_the_rows(packed, corpus, tokenizer, tmp_path):
    one = dl.PackedData(packed).sha256()
    shutil.copytree(packed, tmp_path / "copy")
    assert dl.PackedData(tmp_path / "copy").sha256() == one
    pack(corpus, tokenizer, tmp_path / "other", "--long-docs", "split")
    assert dl.PackedData(tmp_path / "other").sha256() != one


def stream_corpus(data, shards, mean=120):
    data.mkdir()
    for name in dl.shard_names(str(shards)):
        write_parquet(data / name, documents(60, seed=int(name[6:11]), mean=mean))


def test_streaming_waits_for_shards_and_equals_packing_at_once(tokenizer, tmp_path):
    stream_corpus(tmp_path / "all", 3)
    late = tmp_path / "late"
    late.mkdir()
    whole = pack(tmp_path / "all", tokenizer, tmp_path / "whole", "--stream", "3")
    assert whole["shuffle"] == "shard" and whole["expected"] == [f"shard_{i:05d}.parquet" for i in range(3)]
    assert [entry["source"] for entry in whole["train"]] == whole["expected"]
    thread = threading.Thread(target=pack, args=(late, tokenizer, tmp_path / "out", "--stream", "3"))
    thread.start()
    for _ in range(500):
        if (tmp_path / "out" / "manifest.json").exists():
            break
        time.sleep(0.02)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["expected"] == whole["expected"]
    shutil.copy2(tmp_path / "all" / "shard_01822.parquet", late)
    shutil.copy2(tmp_path / "all" / "shard_00000.parquet", late)
    data = dl.PackedData(tmp_path / "out", wait_s=20)  # waits for the first shard
    known, first = data.rows("train"), whole["train"][0]["rows"]
    assert known == first and not data.manifest["complete"]
    early = data.stream_ids(3, 0, first)
    for i in (2, 1):  # out of order, as parallel downloads come
        (late / f"shard_{i:05d}.parquet.part").write_bytes(b"")
        shutil.copy2(tmp_path / "all" / f"shard_{i:05d}.parquet", late / f".{i}")
        os.replace(late / f".{i}", late / f"shard_{i:05d}.parquet")
    count = sum(entry["rows"] for entry in whole["train"]) + 7
    stream = data.stream_ids(3, 0, count)  # waits for the rest
    thread.join()
    reference = dl.PackedData(tmp_path / "whole")
    assert (stream == reference.stream_ids(3, 0, count)).all() and (stream[:first] == early).all()
    assert data.sha256() == reference.sha256()
    edges = np.cumsum([0] + [entry["rows"] for entry in whole["train"]])
    for a, b in zip(edges, edges[1:]):  # shard after shard, each in its own order
        assert sorted(stream[a:b].tolist()) == list(range(a, b)) and stream[a:b].tolist() != list(range(a, b))


def test_waiting_gives_up_with_one_line(tokenizer, tmp_path, capsys):
    stream_corpus(tmp_path / "data", 2)
    (tmp_path / "data" / "shard_00001.parquet").unlink()
    flags = ("--stream", "2", "--patience", "1")
    expect_error(capsys, lambda: pack(tmp_path / "data", tokenizer, tmp_path / "out", *flags), "shard_00001", "1 s")
    data = dl.PackedData(tmp_path / "out", wait_s=0.2)
    expect_error(capsys, lambda: data.stream_ids(0, data.rows("train"), 1), "data: row", "0.2 s")


# ---- damaged input


def test_bad_documents_are_counted_and_the_rest_is_packed(tokenizer, tmp_path, capsys):
    good = documents(60)
    lines = [json.dumps({"text": doc}).encode() for doc in good]
    lines[10:10] = [b"{not json", b'{"text": 5}', b'{"body": "x"}', b"[1]", b"[" * 99999]
    lines[20:20] = [b'{"text": null}', b'{"text": " \\n"}', b""]
    lines[40:40] = [b'{"text": "bad \xff\xfe bytes"}', b'{"text": "lone \\ud800 surrogate"}']
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    raw = pa.array([d.encode() for d in good[:30]] + [b"caf\xe9 latin", None, b""], pa.binary())
    text = pa.StringArray.from_buffers(len(raw), raw.buffers()[1], raw.buffers()[2], raw.buffers()[0])
    pq.write_table(pa.table({"text": text}), tmp_path / "b.parquet")
    write_parquet(tmp_path / "c.parquet", good)
    manifest = pack(tmp_path, tokenizer, tmp_path / "out", "--long-docs", "split")
    assert manifest["documents"] == 60 + 2 + 30 + 1
    assert manifest["skipped"] == {"line without JSON text": 5, "empty document": 3 + 2, "bad characters replaced": 3}
    said = capsys.readouterr()
    assert "a.jsonl, line 11" in said.err and "5 × line without JSON text" in said.out
    fixed = {text for text, _ in dl.texts([tmp_path / "a.jsonl", tmp_path / "b.parquet"], "train", 0, dl.Counter())}
    assert fixed == {*good, "bad \ufffd\ufffd bytes", "lone \ufffd surrogate", "caf\ufffd latin"}


def test_a_damaged_row_group_is_named_and_skipped(corpus, tokenizer, tmp_path, capsys):
    path = corpus / "shard_00001.parquet"
    write_parquet(path, documents(300, seed=1), row_group_size=100, write_page_checksum=True)
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    raw = bytearray(path.read_bytes())
    raw[column.data_page_offset + 60] ^= 0xFF
    path.write_bytes(raw)
    manifest = pack(corpus, tokenizer, tmp_path / "out")
    assert manifest["skipped"] == {"unreadable row group": 1} and manifest["documents"] == 800
    assert f"{path}, row group 1" in capsys.readouterr().err


def test_unusable_input_ends_in_one_line(corpus, tokenizer, tmp_path, capsys):
    def refused(*fragments, flags=(), data=corpus):
        expect_error(capsys, lambda: pack(data, tokenizer, tmp_path / "refused", *flags), *fragments)

    refused("no .parquet", data=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refused("no .parquet", data=tmp_path / "empty")
    refused("--val-file", flags=("--val-file", "nothing.parquet"))
    whole = (corpus / "shard_00002.parquet").read_bytes()
    for content in whole[: len(whole) // 2], b"", b"PAR1" * 100, whole[:-8] + b"\xff\xff\xff\x7fPAR1":
        (corpus / "shard_00002.parquet").write_bytes(content)
        refused("shard_00002.parquet is not a readable parquet file")
    pq.write_table(pa.table({"body": ["x"]}), corpus / "shard_00002.parquet")
    refused("no column 'text'", "body")
    pq.write_table(pa.table({"text": [1, 2]}), corpus / "shard_00002.parquet")
    refused("holds int64, not strings")
    for name in "shard_00000", "shard_00001", "shard_00002":
        write_parquet(corpus / f"{name}.parquet", ["short", None])
    refused("too little training text")
    write_parquet(corpus / "shard_00000.parquet", documents(100))
    write_parquet(corpus / "shard_00003.parquet", ["short"])
    refused("too little validation text", "one row takes 65")
    expect_error(capsys, lambda: dl.PackedData(tmp_path / "refused"), "not finished")
    for flags in ["--seq-len", "0"], ["--workers", "-1"], ["--long-docs", "x"], ["--stream", "0"], ["--stream", "9999"]:
        with pytest.raises(SystemExit) as stop:
            pack(corpus, tokenizer, tmp_path / "refused", *flags)
        assert stop.value.code == 2


def test_a_vocabulary_beyond_16_bits_is_refused(corpus, tmp_path, capsys):
    ranks = [bytes([i]) for i in range(256)] + [b"x" + i.to_bytes(3, "big") for i in range(65_536 - 256 - 2)]
    tt.save_tokenizer(tmp_path / "big.json", ranks)
    expect_error(capsys, lambda: pack(corpus, str(tmp_path / "big.json"), tmp_path / "out"), "65537 entries")


def test_damaged_rows_and_manifests_end_in_one_line(packed, tmp_path, capsys):
    def damaged(*fragments, action=lambda folder: dl.PackedData(folder)):
        expect_error(capsys, lambda: action(copy), *fragments)
        shutil.rmtree(copy)
        shutil.copytree(packed, copy)

    copy = tmp_path / "copy"
    shutil.copytree(packed, copy)
    shard = (copy / "shard_00001.npy").read_bytes()
    for content in shard[: len(shard) // 2], shard[:100], b"", shard + b"\0", b"\x93NUMPY" + bytes(300):
        (copy / "shard_00001.npy").write_bytes(content)
        damaged("shard_00001.npy is damaged or missing")
    np.save(copy / "val.npy", np.load(copy / "val.npy").astype(np.int64))
    damaged("val.npy is damaged")
    np.save(copy / "val.npy", np.array([{"a": 1}]), allow_pickle=True)
    damaged("val.npy is damaged")
    (copy / "shard_00000.npy").unlink()
    damaged("shard_00000.npy is damaged or missing")
    (copy / "manifest.json").unlink()
    damaged("no manifest.json")
    manifest = (copy / "manifest.json").read_text()
    for content in manifest[:500], "[]", "", manifest.replace('"seq_len": 64', '"seq_len": 32'), "\xff", "[" * 99999:
        (copy / "manifest.json").write_text(content)
        damaged("manifest.json is damaged")
    rows = np.load(copy / "shard_00000.npy", mmap_mode="r+")
    rows[0, 5] = 60_000
    damaged("unknown ids", action=lambda folder: dl.PackedData(folder).get("train", [0]))
    rows = np.load(copy / "shard_00000.npy", mmap_mode="r+")
    rows[1, 0] = 3
    damaged("no BOS", action=lambda folder: dl.PackedData(folder).get("train", [0, 1]))


# ---- sources


def test_txt_files_are_cut_at_blank_lines_and_lose_nothing(tmp_path):
    rng = random.Random(0)
    book = "".join(f"line {i} " + "word " * rng.randrange(30) + rng.choice(["\n", "\n\n", "\r\n"]) for i in range(3000))
    (tmp_path / "book.txt").write_bytes(book.encode() + b"\xff end")
    docs = list(dl.txt_texts(tmp_path / "book.txt", dl.Counter()))
    assert "".join(docs) == book + "\udcff end" and len(docs) > 5
    assert all(dl.TXT_DOC <= len(doc) <= 4.1 * dl.TXT_DOC and doc.endswith("\n") for doc in docs[:-1])
    (tmp_path / "blob.txt").write_text("x" * 100_001)
    assert [len(doc) for doc in dl.txt_texts(tmp_path / "blob.txt", dl.Counter())] == [40_000, 40_000, 20_001]


def test_a_single_file_and_txt_folders_hold_out_documents_by_content(tokenizer, tmp_path):
    docs = documents(400, seed=5)
    (tmp_path / "one").mkdir()
    write_parquet(tmp_path / "one" / "only.parquet", docs + docs[:50])
    for i, doc in enumerate(docs):
        (tmp_path / "many" / f"{i % 7}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "many" / f"{i % 7}" / f"{i}.txt").write_text(doc, newline="")
    (tmp_path / "many" / ".hidden.txt").write_text("never read")
    for name, copies in ("one", 50), ("many", 0):
        units, val, holdout = dl.find_sources(tmp_path / name)
        split = {s: [text for text, _ in dl.texts(val[1], s, holdout, dl.Counter())] for s in ("train", "val")}
        assert holdout == 10 and len(units) == 1 and len(split["train"] + split["val"]) == 400 + copies
        assert set(split["train"]).isdisjoint(split["val"]) and set(split["train"] + split["val"]) == set(docs)
        digests = {doc: hashlib.blake2b(doc.encode(), digest_size=8).digest() for doc in docs}
        by_hash = {doc for doc, digest in digests.items() if int.from_bytes(digest, "little") % 10 == 0}
        assert set(split["val"]) == by_hash and 15 < len(by_hash) < 75
        manifest = pack(tmp_path / name, tokenizer, tmp_path / f"{name}-rows")
        assert manifest["holdout"] == 10 and manifest["documents"] == len(split["train"])
        assert dl.PackedData(tmp_path / f"{name}-rows").rows("val") > 0


def test_the_validation_file_is_pinned_by_name(corpus, tokenizer, tmp_path):
    manifest = pack(corpus, tokenizer, tmp_path / "last")
    assert manifest["val"]["source"] == "shard_00003.parquet"
    assert [e["source"] for e in manifest["train"]] == [f"shard_0000{i}.parquet" for i in range(3)]
    manifest = pack(corpus, tokenizer, tmp_path / "named", "--val-file", "shard_00001.parquet")
    (corpus / "zz_notes.txt").write_text("a .txt file beside tables is text to train on")
    units, (name, _), holdout = dl.find_sources(corpus)
    assert name == "shard_00003.parquet" and units[-1][0] == "zz_notes.txt" and not holdout
    assert manifest["val"]["source"] == "shard_00001.parquet"
    assert [e["source"] for e in manifest["train"]] == [f"shard_0000{i}.parquet" for i in (0, 2, 3)]


def test_stdlib_corpus_equals_the_files(tmp_path, capsys):
    for name in "one", "two":
        dl.main(["stdlib", "--out", str(tmp_path / name)])
    files = sorted((tmp_path / "one").glob("*.parquet"))
    assert [f.read_bytes() for f in files] == [f.read_bytes() for f in sorted((tmp_path / "two").glob("*.parquet"))]
    shards = [pq.read_table(f)["text"].to_pylist() for f in files]
    docs = sorted(doc for shard in shards for doc in shard)
    expected = []
    for path in Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"):
        left_out = "tests?|idle_test|lib2to3|_bundled|site-packages|dist-packages|encodings|pydoc_data"
        if re.search(f"/({left_out})/", str(path)):
            continue
        if path.name.startswith("_sysconfigdata") or path.name == "entities.py":
            continue
        with open(path, "rb") as f:
            raw = f.read()
            f.seek(0)
            text = raw.decode(tokenize.detect_encoding(f.readline)[0]).replace("\r\n", "\n").replace("\r", "\n")
        expected += [text] if text.strip() else []
    assert docs == sorted(expected) and len(docs) > 400
    write_parquet(tmp_path / "two" / "shard_00009.parquet", ["of another corpus"])
    expect_error(capsys, lambda: dl.main(["stdlib", "--out", str(tmp_path / "two")]), "another corpus")
    assert len(shards) == 5 and len(shards[4]) == len(docs) // 16 and not set(shards[4]) & set(sum(shards[:4], []))


# ---- download


class Host(http.server.BaseHTTPRequestHandler):
    """A Hugging Face host with bad days: `plan[name]` lists what befalls the next GETs of a file."""

    files, plan, seen, with_sha, wrong_size = {}, {}, [], True, set()

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.reply(head=True)

    def do_GET(self):
        self.reply(head=False)

    def reply(self, head):
        name = self.path.rsplit("/", 1)[-1]
        Host.seen.append((self.command, name, self.headers.get("Range"), self.headers.get("Authorization")))
        body = Host.files.get(name)
        trouble = Host.plan[name].pop(0) if not head and Host.plan.get(name) else None
        if body is None or isinstance(trouble, int):
            self.send_response(trouble or 404)
            self.send_header("Content-Length", "0")
            self.send_header("Retry-After", "0")
            return self.end_headers()
        sha = hashlib.sha256(body).hexdigest()
        if trouble == "flip":
            body = body[:200] + bytes([body[200] ^ 1]) + body[201:]
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1]) if trouble != "no range" else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        part = body[start:]
        stated = len(part) + 1000 * (name in Host.wrong_size)
        sent = part[: len(part) // 2] if trouble in ("drop", "short") else part
        self.send_header("Content-Length", str(len(sent) if trouble == "short" else stated))
        if Host.with_sha:
            self.send_header("X-Linked-Etag", f'"{sha}"')
        self.end_headers()
        if not head:
            self.wfile.write(sent)
        self.close_connection = True


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A server on 127.0.0.1 with shards 0 to 3 and the validation shard."""
    names = dl.shard_names("4")
    for i, name in enumerate(names):
        write_parquet(tmp_path / "x.parquet", documents(100, seed=i))
        Host.files[name] = (tmp_path / "x.parquet").read_bytes()
    Host.plan, Host.seen, Host.with_sha, Host.wrong_size = {}, [], True, set()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Host)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(dl, "BACK_OFF", 0.01)
    yield Host
    server.shutdown()
    server.server_close()


def fetch(out, shards="4"):
    dl.main(["download", "--out", str(out), "--shards", shards])


def downloaded(out):
    return {p.name: p.read_bytes() for p in Path(out).glob("*.parquet")}


def test_download_ends_right_through_drops_truncation_429_and_503(host, tmp_path, capsys):
    host.plan = {
        "shard_00000.parquet": ["drop", "drop", 503],
        "shard_00001.parquet": [429, "short", 500, "drop"],
        "shard_00002.parquet": ["flip", "drop", "no range"],
        "shard_01822.parquet": ["short", 429, 429],
    }
    fetch(tmp_path / "out")
    assert downloaded(tmp_path / "out") == host.files and not list((tmp_path / "out").glob("*.part"))
    gets = [(name, span) for method, name, span, _ in host.seen if method == "GET"]
    assert gets[0][0] == "shard_01822.parquet" and any(span for _, span in gets)  # validation first; drops are resumed
    said = capsys.readouterr().out
    assert "5 shards to fetch" in said and "GB are free" in said
    host.seen.clear()
    fetch(tmp_path / "out")
    assert not host.seen  # nothing is missing: no network


def test_download_resumes_what_an_earlier_one_left(host, tmp_path):
    body = host.files["shard_00000.parquet"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "shard_00000.parquet.part").write_bytes(body[:1000])
    (tmp_path / "out" / "shard_00001.parquet").write_bytes(host.files["shard_00001.parquet"][:-5])  # not whole
    (tmp_path / "out" / "shard_00002.parquet.part").write_bytes(b"\0" * 1000)  # of another file: the checksum finds it
    fetch(tmp_path / "out", "0-2")
    assert downloaded(tmp_path / "out") == {k: v for k, v in host.files.items() if k != "shard_00003.parquet"}
    assert ("GET", "shard_00000.parquet", "bytes=1000-", None) in host.seen


def test_download_lists_what_is_missing(host, tmp_path, capsys):
    saved = host.files.pop("shard_00002.parquet")
    host.plan = {"shard_00001.parquet": [503] * 99, "shard_00003.parquet": ["drop", 403]}
    host.wrong_size = {"shard_00000.parquet"}
    missing = [f"shard_0000{i}.parquet ({reason}" for i, reason in enumerate(["", "HTTP 503", "HTTP 404", "HTTP 403"])]
    expect_error(capsys, lambda: fetch(tmp_path / "out"), *missing, "run the same command again")
    assert list(downloaded(tmp_path / "out")) == ["shard_01822.parquet"]
    host.files["shard_00002.parquet"], host.plan, host.wrong_size = saved, {}, set()
    fetch(tmp_path / "out")
    assert downloaded(tmp_path / "out") == host.files


def test_download_without_checksum_still_checks_the_parquet_footer(host, tmp_path):
    host.with_sha = False
    (tmp_path / "out").mkdir()
    size = len(host.files["shard_00000.parquet"])
    (tmp_path / "out" / "shard_00000.parquet.part").write_bytes(b"\0" * size)  # the right length, no footer
    fetch(tmp_path / "out", "1")
    assert downloaded(tmp_path / "out")["shard_00000.parquet"] == host.files["shard_00000.parquet"]


def test_an_unreachable_host_is_one_line_and_soon(host, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    start = time.time()
    expect_error(capsys, lambda: fetch(tmp_path / "out"), "missing: shard_01822.parquet (ConnectionError", "_00003")
    assert time.time() - start < 10


def test_too_little_disk_is_refused_before_the_first_byte(host, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dl.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    expect_error(capsys, lambda: fetch(tmp_path / "out"), "do not fit")
    assert all(method == "HEAD" for method, *_ in host.seen)


def test_the_token_is_sent_and_never_shown(host, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    host.plan = {"shard_00001.parquet": [401]}
    expect_error(capsys, lambda: fetch(tmp_path / "out"), "HTTP 401")
    assert all(auth == "Bearer hf_secret" for *_, auth in host.seen)
    said = capsys.readouterr()
    assert "hf_secret" not in said.out + said.err
    assert not any(b"hf_secret" in p.read_bytes() for p in (tmp_path / "out").iterdir())


def test_shard_names(capsys):
    assert dl.shard_names("2") == ["shard_01822.parquet", "shard_00000.parquet", "shard_00001.parquet"]
    assert dl.shard_names("7-8")[1:] == ["shard_00007.parquet", "shard_00008.parquet"]
    assert len(dl.shard_names("1822")) == 1823
    for spec in "0", "1823", "5-4", "0-1822", "-1", "x", "", "1-2-3", "../1":
        expect_error(capsys, lambda spec=spec: dl.shard_names(spec), "give N")
