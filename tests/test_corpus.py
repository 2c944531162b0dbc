"""The offline corpus, sources and the download, against a local server with bad days."""

import hashlib
import http.server
import os
import random
import re
import shutil
import signal
import subprocess
import sysconfig
import threading
import time
import tokenize
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers import command, documents, refused, write_parquet

import dataloader as dl
from looped import corpus


def test_txt_files_are_cut_at_blank_lines_and_lose_nothing(tmp_path):
    rng = random.Random(0)
    lines = []
    for i in range(3000):
        lines.append(
            f"line {i} " + "word " * rng.randrange(30) + rng.choice(["\n", "\n\n", "\r\n"])
        )
    book = "".join(lines)
    (tmp_path / "book.txt").write_bytes(book.encode() + b"\xff end")
    docs = list(corpus.txt_texts(tmp_path / "book.txt", Counter()))
    assert "".join(docs) == book + "\udcff end" and len(docs) > 5
    for doc in docs[:-1]:
        assert corpus.TXT_DOC <= len(doc) <= 4.1 * corpus.TXT_DOC and doc.endswith("\n")
    (tmp_path / "blob.txt").write_text("x" * 100_001)
    blob = [len(doc) for doc in corpus.txt_texts(tmp_path / "blob.txt", Counter())]
    assert blob == [40_000, 40_000, 20_001]


@pytest.mark.parametrize("many", [False, True])
def test_a_single_file_and_txt_folders_hold_out_documents_by_content(many, tmp_path):
    docs = documents(400, seed=5)
    (tmp_path / ".hidden.txt").write_text("never read")
    if many:
        for i, doc in enumerate(docs):
            (tmp_path / f"{i % 7}").mkdir(exist_ok=True)
            (tmp_path / f"{i % 7}" / f"{i}.txt").write_text(doc, newline="")
    else:
        write_parquet(tmp_path / "only.parquet", docs + docs[:50])
    units = corpus.find_units(tmp_path)
    assert [unit.holdout for unit in units] == [10, 10]
    val, train = (list(corpus.texts(unit, Counter())) for unit in units)
    assert len(train + val) == (400 if many else 450)
    held_out = set()
    for doc in docs:
        digest = hashlib.blake2b(doc.encode(), digest_size=8).digest()
        if int.from_bytes(digest, "little") % 10 == 0:
            held_out.add(doc)
    assert set(val) == held_out
    assert set(train) == set(docs) - held_out


def test_tables_are_shards_of_their_own_and_text_files_share(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "UNIT_BYTES", 100)
    for name, size in ("a.txt", 60), ("b.txt", 40), ("c.txt", 1), ("e.txt", 7):
        (tmp_path / name).write_text("x" * size)
    for name in "d.parquet", "f.jsonl", "g.jsonl":
        (tmp_path / name).write_text(name)
    val, *train = corpus.find_units(tmp_path)
    groups = {unit.name: [path.name for path in unit.paths] for unit in train}
    assert groups == {
        "a.txt": ["a.txt", "b.txt"], "c.txt": ["c.txt"], "d.parquet": ["d.parquet"],
        "e.txt": ["e.txt"], "f.jsonl": ["f.jsonl"],
    }  # fmt: skip
    assert val.name == "g.jsonl" and not val.holdout


def test_linked_folders_are_read_and_hidden_files_are_not(tmp_path):
    (tmp_path / "texts/.hidden").mkdir(parents=True)
    (tmp_path / "elsewhere/more").mkdir(parents=True)
    (tmp_path / "texts/linked").symlink_to(tmp_path / "elsewhere")
    for name in ("texts/a.txt", "texts/.b.txt", "texts/.hidden/c.txt", "elsewhere/more/d.txt"):
        (tmp_path / name).write_text("text")
    val, _ = corpus.find_units(tmp_path / "texts")
    names = [path.relative_to(tmp_path / "texts").as_posix() for path in val.paths]
    assert names == ["a.txt", "linked/more/d.txt"]


def test_validation_text_is_not_trained_on_by_way_of_links_or_copies(tmp_path, capsys):
    texts = tmp_path / "v1"
    texts.mkdir()
    for name in "ab":
        (texts / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    (tmp_path / "latest").symlink_to(texts)
    (tmp_path / "loop").symlink_to(tmp_path)
    units = corpus.find_units(tmp_path)
    assert len(units) == 2  # of the two files that there are
    last = units[0].paths[0]
    (tmp_path / "0.jsonl").write_bytes(last.read_bytes())
    refused(capsys, lambda: corpus.find_units(tmp_path), f"{last}, for validation, has a copy")


def test_utf16_is_refused(tmp_path, capsys):
    file = tmp_path / "a.txt"
    file.write_text("some text " * 1000, encoding="utf-16")
    (unit, *_) = corpus.find_units(tmp_path)
    refused(capsys, lambda: list(corpus.texts(unit, Counter())), f"{file} is UTF-16")


def test_stdlib_corpus_equals_the_files(tmp_path, capsys):
    dl.main(["stdlib", "--out", str(tmp_path)])
    shards = [pq.read_table(f)["text"].to_pylist() for f in sorted(tmp_path.glob("*.parquet"))]
    left_out = (
        "/(tests?|idle_test|lib2to3|_bundled|site-packages|dist-packages|encodings|pydoc_data)/"
        "|/_sysconfigdata[^/]*$|/entities.py$"
    )
    expected = []
    for path in Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"):
        if not re.search(left_out, str(path)):
            with open(path, "rb") as f:
                encoding = tokenize.detect_encoding(f.readline)[0]
            text = path.read_bytes().decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
            if text.strip():
                expected.append(text)
    assert sorted(sum(shards, [])) == sorted(expected) and len(expected) > 400
    assert len(shards) == 5 and len(shards[4]) == len(expected) // 16
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    dl.main(["stdlib", "--out", str(tmp_path)])
    assert "stays" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


class Host(http.server.BaseHTTPRequestHandler):
    """A Hugging Face host with bad days: `plan[name]` lists what befalls the next requests for a file."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        name = self.path.rsplit("/", 1)[-1]
        span = self.headers.get("Range")
        Host.seen.append((name, span))
        body = Host.files.get(name, b"")
        trouble = None if body else 404
        if Host.plan.get(name):
            trouble = Host.plan[name].pop(0)
        self.close_connection = True
        if isinstance(trouble, int):
            self.send_response(trouble)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        sha = hashlib.sha256(body).hexdigest()
        if trouble == "flip":
            body = body[:200] + b"?" + body[201:]
        start = int(span[6:-1]) if span and trouble != "no range" else 0
        sent = stated = body[start:]
        if trouble in ("drop", "short"):
            sent = sent[: len(sent) // 2]
        if trouble == "short":
            stated = sent
        if trouble == "wrong size":
            stated = sent + bytes(1000)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(stated)))
        if Host.with_sha:
            self.send_header("X-Linked-Etag", f'"{sha}"')
        self.end_headers()
        if trouble == "stall":
            Host.ended.wait(60)
        self.wfile.write(sent)


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A server on 127.0.0.1 with shards 0 to 3 and the validation shard."""
    Host.files, Host.plan, Host.seen = {}, {}, []
    Host.with_sha = True
    Host.ended = threading.Event()
    for i, unit in enumerate(corpus.shard_units(tmp_path, 4)):
        write_parquet(tmp_path / "x.parquet", documents(1000 if i == 1 else 100, seed=i))
        Host.files[unit.name] = (tmp_path / "x.parquet").read_bytes()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Host)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr(corpus, "BACK_OFF", 0.01)
    yield Host
    Host.ended.set()
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
    out = tmp_path / "out"
    fetch(out)
    assert downloaded(out) == host.files and not list(out.glob("*.part"))
    assert host.seen[0][0] == "shard_01822.parquet"
    assert {span for _, span in host.seen} > {"bytes=0-"}  # drops are resumed
    said = capsys.readouterr().out
    assert "5 of 5 shards, about 0.5 GB to fetch" in said and "GB are free" in said
    host.seen.clear()
    fetch(out)
    assert not host.seen  # nothing is missing: no network


@pytest.mark.parametrize("with_sha", [True, False])
def test_download_resumes_what_an_earlier_one_left(with_sha, host, tmp_path):
    host.with_sha = with_sha
    out, body = tmp_path / "out", host.files["shard_00000.parquet"]
    out.mkdir()
    (out / "shard_00000.parquet.part").write_bytes(body[:1000])
    (out / "shard_00001.parquet").write_bytes(host.files["shard_00001.parquet"][:-5])  # not whole
    of_another = b"0" * (1000 if with_sha else len(body) * 2)
    (out / "shard_00002.parquet.part").write_bytes(of_another)
    fetch(out, "3")
    expected = dict(host.files)
    del expected["shard_00003.parquet"]
    assert downloaded(out) == expected
    assert ("shard_00000.parquet", "bytes=1000-") in host.seen


def test_download_lists_what_is_missing(host, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    for trouble, reason in (
        (["wrong size"], ""),
        ([503], "HTTP 503"),
        ([404], "HTTP 404"),
        (["drop", 403], "HTTP 403"),
    ):
        host.plan = {"shard_00002.parquet": trouble * 99}
        (out / "shard_00003.parquet").unlink(missing_ok=True)  # may be fetched beside it, or not
        said = ("missing: shard_00002.parquet", f"({reason}", "run the same command again")
        refused(capsys, lambda: fetch(out), *said)
        whole = {"shard_01822.parquet", "shard_00000.parquet", "shard_00001.parquet"}
        assert set(downloaded(out)) - {"shard_00003.parquet"} == whole
    host.plan = {}
    fetch(out)
    assert downloaded(out) == host.files
    with monkeypatch.context() as m:
        m.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
        said = ("missing: shard_01822.parquet, shard_00000.parquet, ", "(ConnectionError")
        refused(capsys, lambda: fetch(tmp_path / "off"), *said)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    refused(capsys, lambda: fetch(tmp_path / "full"), "do not fit")
    assert not list((tmp_path / "full").glob("shard*"))


def test_ctrl_c_ends_a_download_that_stalls_at_once(host, tmp_path):
    host.plan = {"shard_00001.parquet": ["stall"]}
    line = command("dataloader.py", "download", "--out", tmp_path / "out", "--shards", "4")
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not (tmp_path / "out" / "shard_00001.parquet.part").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=20)[1]
    assert process.returncode == 130 and said == b""
    assert (tmp_path / "out" / "shard_01822.parquet").exists()


def test_shard_names(capsys):
    names = ["shard_01822.parquet", "shard_00000.parquet", "shard_00001.parquet"]
    assert [unit.name for unit in corpus.shard_units(Path("x"), 2)] == names
    for count in "0", "1823", "-1", "x", "1-2":
        refused(capsys, lambda count=count: fetch("nowhere", count), "number of shards, 1 to 1822")


def test_the_hold_out_follows_the_size_and_a_byte_order_mark_is_no_text(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfhello")
    assert list(corpus.txt_texts(file, Counter())) == ["hello"]
    for size, one_in in ((30_000_000, 100), (2_000_000_000, 1000)):
        os.truncate(file, size)  # sparse
        assert corpus.find_units(tmp_path)[0].holdout == one_in


def test_modules_are_in_an_order_of_their_hashes(tmp_path):
    """Else the validation text would be the alphabet's first modules."""
    dl.main(["stdlib", "--out", str(tmp_path)])
    modules = corpus.stdlib_modules()
    order = sorted(modules, key=lambda name: hashlib.sha256(name.encode()).digest())
    texts = pq.read_table(tmp_path / "shard_00004.parquet")["text"].to_pylist()
    assert texts == [modules[name] for name in order[: len(modules) // 16]]


def test_what_is_not_there_is_asked_for_once_and_waits_grow(host, monkeypatch, tmp_path):
    waits = []
    monkeypatch.setattr(corpus.time, "sleep", waits.append)
    url = f"{os.environ['HF_ENDPOINT']}/none.parquet"
    assert corpus.fetch_file(url, tmp_path / "none") == "HTTP 404"
    assert len(host.seen) == 1
    host.plan = {"shard_00000.parquet": [503] * 3}
    assert not corpus.fetch_file(url.replace("none", "shard_00000"), tmp_path / "shard")
    assert waits == [0, 0, 0.01, 0.04, 0.09]
