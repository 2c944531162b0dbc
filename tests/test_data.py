"""Packing and the stream: each law against a second computation; damaged input ends in one line. See test_corpus.py."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import ENV, ROOT, command, documents, naive_pack, refused, write_jsonl, write_parquet

import dataloader as dl
from looped import corpus
from looped.files import lock, read_checked, write_checked
from looped.tokenizer import save_tokenizer
from tokenizer_train import train_bpe


@pytest.fixture
def folder(tmp_path):
    """Four parquet files, the last for validation."""
    (tmp_path / "data").mkdir()
    for i in range(4):
        path = tmp_path / "data" / f"shard_{i:05d}.parquet"
        write_parquet(path, documents(300, seed=i), row_group_size=100)
    return tmp_path / "data"


@pytest.fixture
def rows(folder, tokenizer, tmp_path):
    """Packed rows of it."""
    pack(folder, tokenizer, tmp_path / "rows")
    return tmp_path / "rows"


def packing(data, tokenizer, out, *more, seq_len=64):
    required = ["--texts", data, "--tokenizer", tokenizer, "--out", out, "--seq-len", seq_len]
    return ["pack", *map(str, required), "--workers", "1", *more]


def pack(data, tokenizer, out, *more, seq_len=64):
    dl.main(packing(data, tokenizer, out, *more, seq_len=seq_len))
    return json.loads((Path(out) / "manifest.json").read_text())


def contents(out):
    return {p.name: p.read_bytes() for p in Path(out).iterdir() if p.suffix in (".npy", ".json")}


# ---- packing


@pytest.mark.parametrize("mode", ["crop", "split"])
@pytest.mark.parametrize("seq_len", [32, 256])
def test_packing_equals_a_naive_list_scan(mode, seq_len, tokenizer, enc, tmp_path, monkeypatch):
    monkeypatch.setattr(dl, "BUFFER", 50)
    docs = documents(300, seed=1)
    write_parquet(tmp_path / "a.parquet", docs)
    write_parquet(tmp_path / "b.parquet", documents(50, seed=2))
    manifest = pack(tmp_path, tokenizer, tmp_path / "out", "--long-docs", mode, seq_len=seq_len)
    ids = [[manifest["bos_id"], *enc.encode_ordinary(doc)] for doc in docs]
    expected, cropped, left = naive_pack(ids, seq_len + 1, mode == "split", 50)
    assert np.load(tmp_path / "out" / "shard_00000.npy").tolist() == expected
    assert all(row[0] == manifest["bos_id"] for row in expected)
    counts = manifest["counts"]
    assert counts["documents"] == len(docs)
    assert counts["bytes"] == sum(len(doc.encode()) for doc in docs)
    assert counts["cropped tokens"] == cropped
    assert counts.get("tokens of an incomplete last row", 0) == left
    assert manifest["tokens"] == len(expected) * seq_len
    assert counts["tokens"] == len(expected) * (seq_len + 1) + cropped + left
    if mode == "crop":  # nothing is lost but the cropped tails; split adds a BOS to each piece
        assert counts["tokens"] == sum(len(doc) for doc in ids)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


def test_best_fit_is_exact_at_the_edges():
    def fit(lengths, row):
        """Each row as the number of the document of each of its tokens."""
        made = dl.best_fit([np.full(n, number) for number, n in enumerate(lengths)], row)
        return [tokens.tolist() for tokens in made]

    assert fit([], 4) == []
    assert fit([4, 4], 4) == [[0] * 4, [1] * 4]
    assert fit([9, 7, 8], 4) == [[1] * 4, [2] * 4, [0] * 4]  # the shortest first
    assert fit([1] * 5, 2) == [[0, 1], [2, 3], [4]]
    assert fit([2, 3, 3], 4) == [[1, 1, 1, 0], [2, 2, 2]]


def test_workers_do_not_change_a_bit(folder, tokenizer, rows, tmp_path):
    pack(folder, tokenizer, tmp_path / "three", "--workers", "3")
    assert contents(rows) == contents(tmp_path / "three")


def test_unigram_entropy_equals_a_direct_count(rows):
    manifest = dl.PackedData(rows).manifest
    counts = np.ones(300)
    for entry in manifest["train"]:
        for token in np.load(rows / entry["file"])[:, 1:].ravel():
            counts[token] += 1
    targets = np.load(rows / "val.npy")[:, 1:].ravel()
    nats = -np.mean([np.log(counts[token] / counts.sum()) for token in targets])
    assert manifest["unigram_entropy"] == pytest.approx(nats, rel=1e-12)


def test_documents_of_megabytes_are_packed(tokenizer, tmp_path):
    docs = [" " * 10 + "x" * 1_000_000, "the loop " * 99_999, *documents(20), "\n" * 999 + "end" * 99_999]  # fmt: skip
    write_parquet(tmp_path / "a.parquet", docs)
    write_parquet(tmp_path / "b.parquet", documents(50, seed=2))
    manifest = pack(tmp_path, tokenizer, tmp_path / "out", "--long-docs", "split", seq_len=256)
    counts = manifest["counts"]
    assert counts["documents"] == 23
    assert counts["bytes"] == sum(len(doc.encode()) for doc in docs)
    assert counts["cropped tokens"] < 0.01 * counts["tokens"]


# ---- running again, being killed


def times(out):
    return {path.name: path.stat().st_mtime_ns for path in out.glob("*.npy")}


def test_a_second_run_does_nothing_and_a_changed_source_is_packed_again(folder, tokenizer, rows, tmp_path):  # fmt: skip
    before, earlier = contents(rows), times(rows)
    pack(folder, tokenizer, rows)
    assert contents(rows) == before and times(rows) == earlier
    write_parquet(folder / "shard_00001.parquet", documents(300, seed=77))
    (rows / "val.npy").unlink()
    with open(rows / "shard_00000.npy", "r+b") as file:
        file.truncate(1000)
    (rows / "tokenizer.json").write_text("altered")  # the rows' copy is written anew
    pack(folder, tokenizer, rows)
    changed = {name for name, now in times(rows).items() if now != earlier[name]}
    assert changed == {"shard_00000.npy", "shard_00001.npy", "val.npy"}
    pack(folder, tokenizer, tmp_path / "fresh")
    assert contents(rows) == contents(tmp_path / "fresh")


def test_other_settings_are_refused(folder, tokenizer, rows, tmp_path, capsys):
    before, other = contents(rows), tmp_path / "other.json"
    save_tokenizer(other, train_bpe(iter(documents(200, seed=10)), 300))

    def again(*more, tokenizer=tokenizer, seq_len=64):
        return partial(pack, folder, tokenizer, rows, *more, seq_len=seq_len)

    refused(capsys, again(seq_len=32), "seq_len 64 (now 32)")
    refused(capsys, again(tokenizer=other), "tokenizer_sha256")
    refused(capsys, again("--long-docs", "split"), "long_docs crop (now split)")
    with lock(rows):
        refused(capsys, again(), "another process")
    assert contents(rows) == before
    (rows / "manifest.json").unlink()  # a tokenizer there may be the only copy of somebody's
    refused(capsys, again(tokenizer=other), "holds a tokenizer.json of another making")
    again()()
    assert contents(rows) == before
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "val.npy").write_bytes(b"somebody's")
    refused(capsys, partial(pack, folder, tokenizer, foreign), "holds a val.npy of another making")
    assert (foreign / "val.npy").read_bytes() == b"somebody's"
    readme = partial(pack, folder, ROOT / "README.md", tmp_path / "x")
    line = refused(capsys, readme, "README.md is damaged, or not a file of this program")
    assert "delete" not in line
    void = read_checked(tokenizer) | {"pattern": ""}
    write_checked(tmp_path / "void.json", void)
    refused(
        capsys, partial(pack, folder, tmp_path / "void.json", tmp_path / "x"), "void.json is not"
    )


def test_a_single_file_gives_no_document_to_both_splits(tokenizer, tmp_path):
    texts = list(dict.fromkeys(documents(400, seed=5)))
    write_parquet(tmp_path / "only.parquet", texts)
    manifest = pack(tmp_path, tokenizer, tmp_path / "out")
    held = 0
    for text in texts:
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        held += int.from_bytes(digest, "little") % 10 == 0
    assert manifest["val"]["counts"]["documents"] == held
    assert manifest["counts"]["documents"] == len(texts) - held


def test_the_name_of_rows_is_of_all_shards_and_the_hold_out_is_kept(
    rows, folder, tokenizer, capsys
):
    data = dl.PackedData(rows)
    name = data.sha256()
    data.manifest["train"][-1]["sha256"] = "0"
    assert data.sha256() != name
    manifest = read_checked(rows / "manifest.json")
    write_checked(rows / "manifest.json", manifest | {"holdout": 100})
    refused(capsys, partial(pack, folder, tokenizer, rows), "holdout 100 (now 0)")


def test_shards_of_a_stream_are_each_in_an_order_of_their_own(rows):
    data = dl.PackedData(rows)
    n = data.rows("val")
    data.manifest["shuffle"] = "shard"
    data.shards["train"] = data.shards["val"] * 2  # two equal shards
    ids = data.stream_ids(0, 0, 2 * n)
    assert (ids[:n] != ids[n:] - n).any()


def test_much_cropped_text_is_said(tokenizer, tmp_path, capsys):
    for name, n in ("a", 60), ("b", 20):
        write_jsonl(tmp_path / f"{name}.jsonl", documents(n, mean=2000))
    advice = "of the text was cropped; try --long-docs split"
    pack(tmp_path, tokenizer, tmp_path / "crop")
    assert advice in capsys.readouterr().out
    pack(tmp_path, tokenizer, tmp_path / "split", "--long-docs", "split")
    assert advice not in capsys.readouterr().out


def start(data, tokenizer, out, *more):
    """A packing in a process group of its own."""
    line = command("dataloader.py", *packing(data, tokenizer, out, *more))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, **quiet, env=ENV, start_new_session=True)


def wait_for(ready, seconds=30):
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.02)


def group_is_empty(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("workers", ["1", "3"])
def test_killed_packing_shows_no_partial_shard_and_continues(workers, folder, tokenizer, tmp_path):
    make_long(folder, repeats=4)
    pack(folder, tokenizer, tmp_path / "rows")
    whole, out = contents(tmp_path / "rows"), tmp_path / "out"
    for _ in range(3):
        process = start(folder, tokenizer, out, "--workers", workers)
        wait_for(partial(writes_or_ends, process, out))
        process.kill()
        process.communicate()
        wait_for(partial(group_is_empty, process.pid))  # workers end with it
        found = contents(out) if out.exists() else {}
        listed = json.loads(found.pop("manifest.json", b'{"train": []}'))["train"]
        assert all(content == whole[file] for file, content in found.items())
        assert all(entry["file"] in found for entry in listed)
    pack(folder, tokenizer, out, "--workers", workers)
    assert contents(out) == whole and not list(out.glob(".*.tmp"))


def writes_or_ends(process, out):
    """Whether a file is being written; a packing that is killed later continues from more files."""
    return any(out.glob(".*.tmp")) or process.poll() is not None


def make_long(folder, repeats=40):
    """For seconds of packing."""
    for i in range(3):
        texts = documents(500, seed=i, mean=500) * repeats
        write_parquet(folder / f"shard_{i:05d}.parquet", texts)


@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_ctrl_c_ends_packing_without_a_word(send, folder, tokenizer, tmp_path):
    make_long(folder)
    for delay in 0.0, 1.0:  # while workers begin and while they pack
        out = tmp_path / str(delay)
        process = start(folder, tokenizer, out, "--workers", "3")
        wait_for((out / "manifest.json").exists)
        time.sleep(delay)
        send(process.pid, signal.SIGINT)
        said = process.communicate(timeout=20)[1]  # until no worker holds stderr any more
        assert (process.returncode, said) == (130, b""), delay


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux tells a process's children")
def test_a_killed_worker_ends_packing_in_one_line(folder, tokenizer, tmp_path):
    make_long(folder)
    process = start(folder, tokenizer, tmp_path / "out", "--workers", "2")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def workers():
        lines = {
            int(c): Path(f"/proc/{c}/cmdline").read_bytes() for c in children.read_text().split()
        }
        return [child for child, line in lines.items() if b"spawn_main" in line]

    wait_for(workers)
    time.sleep(1)  # they pack
    os.kill(workers()[0], signal.SIGKILL)
    said = process.communicate(timeout=90)[1].decode()
    assert process.returncode == 2 and said.count("\n") == 1
    assert said.startswith("error: a worker process was killed") and "--workers 1" in said


@pytest.mark.parametrize("workers", ["1", "3"])
def test_a_full_disk_ends_packing_in_one_line_and_damages_nothing(workers, folder, tokenizer, rows, tmp_path):  # fmt: skip
    out = tmp_path / "out"
    out.mkdir()
    # the rows of this one exceed the limit, the others' do not
    write_parquet(folder / "shard_00001.parquet", documents(3000, seed=1))
    line = command("dataloader.py", *packing(folder, tokenizer, out, "--workers", workers))
    limited = ["sh", "-c", 'ulimit -f 300; exec "$@"', "sh", *line]
    done = subprocess.run(limited, capture_output=True, text=True, env=ENV)
    assert done.returncode == 2
    assert done.stderr == f"error: {out / 'shard_00001.npy'} File too large\n"
    found = {path.name for path in out.glob("*.npy")}
    assert {"shard_00000.npy", "val.npy"} <= found and "shard_00001.npy" not in found
    assert not list(out.glob(".*.tmp"))
    assert (out / "shard_00000.npy").read_bytes() == (rows / "shard_00000.npy").read_bytes()
    assert pack(folder, tokenizer, out)["complete"]


# ---- the stream


def test_permute_is_a_permutation_that_the_key_changes():
    for n in [*range(1, 70), 255, 256, 257, 1000, 4097, 65_537]:
        image = dl.permute(np.arange(n), n, "0 0 0")
        assert sorted(image.tolist()) == list(range(n))
        assert (dl.permute(np.arange(n)[::-1], n, "0 0 0") == image[::-1]).all()
    keys = ("0 0 0", "1 0 0", "0 1 0", "0 0 1")
    assert len({tuple(dl.permute(np.arange(1000), 1000, key)) for key in keys}) == 4
    image = dl.permute(np.arange(20_000), 20_000, "k")
    assert abs(np.corrcoef(image, np.arange(20_000))[0, 1]) < 0.03  # 4 standard errors
    # where 0 goes under 2,400 keys: to each of 6 places 400 times, give or take 5 deviations
    places = [dl.permute(np.array([0]), 6, str(key)).item() for key in range(2400)]
    assert abs(np.bincount(places, minlength=6) - 400).max() < 92


def test_stream_is_the_same_for_any_rank_count_and_micro_batch(rows):
    data = dl.PackedData(rows)
    n = data.rows("train")
    stream = data.stream_ids(7, 0, 2 * n + 10)
    assert sorted(stream[:n]) == sorted(stream[n : 2 * n]) == list(range(n))
    assert (stream[:n] != stream[n : 2 * n]).any()
    assert (stream[:n] != data.stream_ids(8, 0, n)).any()
    # as in published runs: the key of a permutation is seed, epoch, block
    assert (stream[n : 2 * n] == dl.permute(np.arange(n), n, "7 1 0")).all()
    for world, micro in (1, 24), (2, 4), (3, 8), (8, 3), (24, 1):
        merged = np.full(240, -1)
        for rank in range(world):
            for first in range(rank * micro, 240, world * micro):
                merged[first : first + micro] = data.stream_ids(7, first, micro)
        assert (merged == stream[:240]).all()
    # resuming is arithmetic: a new process asks for the rest
    assert (dl.PackedData(rows).stream_ids(7, n - 5, n + 15) == stream[n - 5 :]).all()


def test_get_returns_the_rows_of_the_files(rows, folder, tokenizer, tmp_path):
    data = dl.PackedData(rows)
    train = np.concatenate([np.load(rows / entry["file"]) for entry in data.manifest["train"]])
    val = np.load(rows / "val.npy")
    ids = np.random.default_rng(0).integers(0, len(train), 500)
    assert (data.get("train", ids) == train[ids]).all()
    assert data.get("train", ids).dtype == np.int64
    assert (data.get("val", [0, 3]) == val[[0, 3]]).all()
    assert data.seq_len == 64 and data.rows("val") == len(val)
    shutil.copytree(rows, tmp_path / "copy")
    assert dl.PackedData(tmp_path / "copy").sha256() == data.sha256()
    pack(folder, tokenizer, tmp_path / "other", "--long-docs", "split")
    assert dl.PackedData(tmp_path / "other").sha256() != data.sha256()


def test_a_packing_process_does_not_load_torch():
    """It would take seconds and half a gigabyte, each."""
    check = "import sys, dataloader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_streaming_waits_for_shards_and_equals_packing_at_once(workers, tokenizer, tmp_path, capsys, monkeypatch):  # fmt: skip
    every, late, out = tmp_path / "every", tmp_path / "late", tmp_path / "out"
    every.mkdir()
    late.mkdir()
    names = {i: f"shard_{i:05d}.parquet" for i in (0, 1, 2, 1822)}
    for i, name in names.items():
        write_parquet(every / name, documents(60, seed=i))

    def arrive(i):
        shutil.copy2(every / names[i], late / "x")
        (late / "x").rename(late / names[i])

    whole = pack(every, tokenizer, tmp_path / "whole", "--stream", "3")
    assert [entry["source"] for entry in whole["train"]] == [names[i] for i in range(3)]
    flags = ("--stream", "3", "--workers", workers)
    thread = threading.Thread(target=pack, args=(late, tokenizer, out, *flags))
    thread.start()
    wait_for((out / "manifest.json").exists)
    arrive(1822)
    arrive(0)
    data = dl.PackedData(out)  # waits for validation and the first shard
    first = whole["train"][0]["rows"]
    assert data.rows("train") == first and not data.manifest["complete"]
    early = data.stream_ids(3, 0, first)
    arrive(2)  # out of order, as parallel downloads come
    arrive(1)
    edges = np.cumsum([0] + [entry["rows"] for entry in whole["train"]])
    stream = data.stream_ids(3, 0, edges[-1] + 7)  # waits for the rest
    thread.join()
    reference = dl.PackedData(tmp_path / "whole")
    assert (stream == reference.stream_ids(3, 0, edges[-1] + 7)).all()
    assert (stream[:first] == early).all()
    assert data.sha256() == reference.sha256()
    for a, b in zip(edges, edges[1:]):  # shard after shard, each in its own order
        assert sorted(stream[a:b]) == list(range(a, b))
        assert stream[a] != a or stream[a + 1] != a + 1
    (every / names[1]).unlink()  # waiting has an end
    monkeypatch.setattr(dl, "PATIENCE", 1)
    flags = ("--stream", "2", "--workers", workers)
    refused(capsys, lambda: pack(every, tokenizer, tmp_path / "cut", *flags), "shard_00001", "1 s")


def test_a_stream_that_is_whole_may_be_lengthened_and_is_not_cut(tokenizer, tmp_path):
    texts, out = tmp_path / "texts", tmp_path / "out"
    texts.mkdir()
    for i in (0, 1, 2, 1822):
        write_parquet(texts / f"shard_{i:05d}.parquet", documents(60, seed=i))
    whole = dl.PackedData(pack_to(texts, tokenizer, tmp_path / "whole", "3"))
    data = dl.PackedData(pack_to(texts, tokenizer, out, "1"))
    first = data.rows("train")
    pack_to(texts, tokenizer, out, "3")
    assert sorted(data.stream_ids(3, first, first)) == list(range(first))  # an open one stays
    longer = dl.PackedData(out)
    assert (longer.stream_ids(3, 0, first + 9) == whole.stream_ids(3, 0, first + 9)).all()
    pack_to(texts, tokenizer, out, "2")
    assert dl.PackedData(out).rows("train") == whole.rows("train")


def test_rows_of_other_texts_are_not_replaced(tokenizer, rows, tmp_path, capsys):
    before = contents(rows)
    (tmp_path / "other").mkdir()
    for name in "ab":
        write_parquet(tmp_path / "other" / f"{name}.parquet", documents(200, seed=7 + ord(name)))
    line = partial(pack, tmp_path / "other", tokenizer, rows)
    refused(capsys, line, "holds rows of other texts (shard_00000.parquet, ")
    assert contents(rows) == before


def test_files_that_are_not_read_are_named(tmp_path, capsys):
    for name in ("a.TXT", "b.txt", "c.json", "d.jsonl.gz"):
        (tmp_path / name).write_text("some words. " * 400)
    assert set(corpus.text_files(tmp_path)) == {Path("a.TXT"), Path("b.txt")}
    assert "2 other files (c.json, …)" in capsys.readouterr().err


def pack_to(texts, tokenizer, out, shards):
    pack(texts, tokenizer, out, "--stream", shards)
    return out


def test_a_late_row_is_waited_for_while_shards_come(rows, capsys, monkeypatch):
    monkeypatch.setattr(dl, "PATIENCE", 1.0)
    manifest = read_checked(rows / "manifest.json")
    entries = manifest["train"]

    def show(n):
        some = {"shuffle": "shard", "complete": False, "train": entries[:n]}
        write_checked(rows / "manifest.json", manifest | some)

    show(1)
    data = dl.PackedData(rows)
    for n in 1, 2:  # each shard comes in time, the last not within a second of the first
        threading.Timer(0.7 * n, show, (n + 1,)).start()
    last = sum(entry["rows"] for entry in entries) - 1
    assert data.stream_ids(0, last, 1) >= data.rows("train") - entries[-1]["rows"]
    refused(capsys, lambda: data.stream_ids(0, last + 1, 1), "waited 1 s")  # nothing more comes


# ---- damaged input


def test_bad_documents_are_counted_and_the_rest_is_packed(tokenizer, tmp_path, capsys):
    good = documents(60)
    lines = [json.dumps({"text": doc}).encode() for doc in good]
    lines[10:10] = [b"{not json", b'{"text": 5}', b'{"body": "x"}', b"[1]", b"[" * 99999]
    lines[20:20] = [b'{"text": null}', b'{"text": " \\n"}', b""]
    lines[40:40] = [b'{"text": "bad \xff\xfe bytes"}', b'{"text": "lone \\ud800 surrogate"}']
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    raw = pa.array([d.encode() for d in good[:30]] + [b"caf\xe9 latin", None, b""], pa.binary())
    valid, offsets, content = raw.buffers()
    text = pa.StringArray.from_buffers(len(raw), offsets, content, valid)
    pq.write_table(pa.table({"text": text}), tmp_path / "b.parquet")
    write_parquet(tmp_path / "c.parquet", good)
    counts = pack(tmp_path, tokenizer, tmp_path / "out", "--long-docs", "split")["counts"]
    assert counts["documents"] == 60 + 2 + 30 + 1
    assert counts["line without JSON text"] == 5
    assert counts["empty document"] == 3 + 2
    assert counts["bad characters replaced"] == 3
    said = capsys.readouterr()
    assert "a.jsonl, line 11" in said.err and "5 line without JSON text" in said.out
    paths = [tmp_path / "a.jsonl", tmp_path / "b.parquet"]
    fixed = set(corpus.texts(corpus.Unit("both", paths), Counter()))
    assert fixed == {*good, "bad \ufffd\ufffd bytes", "lone \ufffd surrogate", "caf\ufffd latin"}


def test_a_file_name_that_is_not_utf8_is_packed_and_printed(tokenizer, tmp_path):
    for seed, name in enumerate((b"a.jsonl", b"caf\xe9.jsonl")):
        file = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))
        write_jsonl(file, documents(60, seed))
    line = command("dataloader.py", *packing(tmp_path, tokenizer, tmp_path / "out"))
    env = ENV | {"PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(line, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and r"rows from caf\udce9.jsonl" in done.stdout


def test_a_damaged_row_group_is_named_and_skipped(folder, tokenizer, tmp_path, capsys):
    path = folder / "shard_00001.parquet"
    write_parquet(path, documents(300, seed=1), row_group_size=100, write_page_checksum=True)
    raw, column = bytearray(path.read_bytes()), pq.ParquetFile(path).metadata.row_group(1).column(0)
    raw[column.data_page_offset + 60] ^= 0xFF
    path.write_bytes(raw)
    counts = pack(folder, tokenizer, tmp_path / "out")["counts"]
    assert counts["unreadable row group"] == 1 and counts["documents"] == 800
    assert f"{path}, row group 1" in capsys.readouterr().err


def test_a_bit_flipped_in_a_compressed_page_changes_no_text(tmp_path):
    path = tmp_path / "a.parquet"
    texts = documents(300, seed=1)
    write_parquet(path, texts, compression="zstd", write_page_checksum=True)
    whole = path.read_bytes()
    for at in np.linspace(200, len(whole) - 2000, 25).astype(int):
        raw = bytearray(whole)
        raw[at] ^= 4
        path.write_bytes(raw)
        counts = Counter()
        read = list(corpus.parquet_texts(path, counts))
        assert read == texts[: len(read)] and (len(read) == 300 or counts["unreadable row group"])


def test_a_manifest_lists_no_shard_after_a_missing_one(tmp_path):
    shard = {"rows": 1}
    dl.save_manifest(
        tmp_path, {"version": 1}, {"val.npy": shard, "0": shard, "1": None, "2": shard}
    )
    assert read_checked(tmp_path / "manifest.json")["train"] == [shard]


def test_links_to_their_own_folder_are_followed_once(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("x")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "y.txt").write_text("y")
    (tmp_path / "itself.txt").symlink_to(tmp_path / "itself.txt")
    for name in ("here", "there"):
        (tmp_path / "a" / name).symlink_to(tmp_path)
    assert list(corpus.text_files(tmp_path)) == [Path("a/x.txt")]


def test_unusable_input_ends_in_one_line(folder, tokenizer, tmp_path, capsys):
    def no(*fragments, flags="", data=folder, tokenizer=tokenizer):
        action = partial(pack, data, tokenizer, tmp_path / "refused", *flags.split())
        refused(capsys, action, *fragments)

    no("no .parquet", data=tmp_path / "nowhere")
    ranks = [bytes([i]) for i in range(256)]
    ranks += [b"x" + i.to_bytes(3, "big") for i in range(65_536 - 256 - 2)]
    save_tokenizer(tmp_path / "big.json", ranks)
    no("65537 entries", tokenizer=tmp_path / "big.json")
    damaged = folder / "shard_00002.parquet"
    whole = damaged.read_bytes()
    bad_length = whole[:-8] + b"\xff\xff\xff\x7fPAR1"
    for content in (whole[: len(whole) // 2], b"", b"PAR1" * 100, bad_length):
        damaged.write_bytes(content)
        no("shard_00002.parquet is not a readable parquet file")
    pq.write_table(pa.table({"body": ["x"]}), damaged)
    no("shard_00002.parquet is not a readable parquet file with a column 'text'")
    pq.write_table(pa.table({"text": [1, 2]}), damaged)
    for name in "shard_00000", "shard_00001":
        write_parquet(folder / f"{name}.parquet", ["short", None])
    no("too little training text")
    write_parquet(folder / "shard_00000.parquet", documents(100))
    write_parquet(folder / "shard_00003.parquet", ["short"])
    no("too little validation text", "one row of 65")
    refused(capsys, lambda: dl.PackedData(tmp_path / "refused"), "not finished")
    for flag in "--seq-len 0", "--workers -1", "--long-docs x", "--stream 0", "--stream 9999":
        no(flag.split()[0], flags=flag)


def test_damaged_rows_and_manifests_end_in_one_line(rows, capsys):
    shard = (rows / "shard_00001.npy").read_bytes()
    manifest = (rows / "manifest.json").read_bytes()
    other = manifest.replace(b'"seq_len": 64', b'"seq_len": 32')
    cases = [("val.npy", b"\x93NUMPY" + bytes(300), "val.npy is damaged")]
    for bad in shard[:-50], shard[:100], b"", shard[130:]:
        cases.append(("shard_00001.npy", bad, "damaged or missing"))
    for bad in manifest[:500], b"[]", b"", other, b"\xff", b"[" * 99999:
        cases.append(("manifest.json", bad, "manifest.json is damaged"))

    def read():
        data = dl.PackedData(rows, check=(0, 1))
        data.get("train", range(data.rows("train")))

    for file, content, message in cases:
        before = (rows / file).read_bytes()
        (rows / file).write_bytes(content)
        refused(capsys, read, message)
        (rows / file).write_bytes(before)
    read()
    (rows / "manifest.json").unlink()
    refused(capsys, read, "no manifest.json")


def test_checksums_find_a_changed_token_and_a_manifest_of_others(rows, capsys):
    for file, check in (
        ("shard_00001.npy", (1, 2)),
        ("val.npy", (0, 0)),
    ):
        before = (rows / file).read_bytes()
        changed = bytearray(before)
        changed[150] ^= 1  # still a token
        (rows / file).write_bytes(changed)
        opening = partial(dl.PackedData, rows, check=check)
        refused(capsys, opening, f"{file} is damaged or missing (ValueError: its checksum")
        (rows / file).write_bytes(before)
        opening()
    manifest = read_checked(rows / "manifest.json")
    for key in "shuffle", "train", "tokenizer_sha256":  # whole, but not what pack writes
        write_checked(rows / "manifest.json", {k: v for k, v in manifest.items() if k != key})
        refused(capsys, partial(dl.PackedData, rows), "manifest.json is damaged")


def test_speedrun_refuses_what_it_cannot_use_in_one_line(tmp_path):
    for path in [*ROOT.glob("*.py"), ROOT / "speedrun.sh"]:
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "looped", tmp_path / "looped")
    (tmp_path / "mine" / "text").mkdir(parents=True)
    (tmp_path / "data" / "text-v1024").mkdir(parents=True)
    (tmp_path / "data" / "text-v1024" / "source").write_text("/others/text\n")
    of_others = "data/text-v1024 was made from /others/text, not "  # whose tokenizer it would take
    for name, value, why in (
        ("TOKENS", "many", "TOKENS=many is not a number"),
        ("JOBS", "0", "JOBS=0 is not a whole number"),
        ("DATA", "mine/text", of_others),
    ):
        own = {"PY": sys.executable, "PRESET": "nano", "DATA": "mine/text", name: value}
        line = ["bash", tmp_path / "speedrun.sh"]
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)} | own
        done = subprocess.run(line, env=env, capture_output=True, text=True)
        assert done.returncode == 2, done
        assert done.stderr.startswith(f"error: {why}") and done.stderr.count("\n") == 1
