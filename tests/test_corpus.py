"""The offline corpus, reading texts, and the download against a local server with bad days."""

import hashlib
import http.server
import json
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import documents, refused, write_jsonl, write_parquet

import dataloader as dl
from looped import corpus

# ---- reading


def test_txt_files_are_cut_at_blank_lines_and_lose_nothing(tmp_path):
    lines = [f"line {i}\n" + "\r\n" * (i % 5 == 0) for i in range(9000)]
    book = "".join(lines)
    (tmp_path / "book.txt").write_bytes(b"\xef\xbb\xbf" + book.encode() + b"\xff end")
    docs = list(corpus.txt_texts(tmp_path / "book.txt", Counter()))
    assert "".join(docs) == book + "\ufffd end" and len(docs) > 5
    for doc in docs[:-1]:
        assert 0 <= len(doc) - corpus.TXT_DOC < 60 and doc.endswith("\r\n")


@pytest.mark.parametrize("mark", ["<|endoftext|>", "</s>"])
def test_txt_files_are_split_at_separator_lines(mark, tmp_path):
    stories = ["Once upon a time.\nThe end.\n", f"Not here: {mark} but\n\nhere\n", "One more.\n"]
    (tmp_path / "a.txt").write_text(f"{mark}\n".join(stories) + f"{mark}\n")
    counts = Counter()
    assert list(corpus.txt_texts(tmp_path / "a.txt", counts)) == stories
    assert counts == {f"separator lines such as {mark}": 3}


def test_what_cannot_be_read_is_skipped_and_counted(tmp_path):
    bad = [b"{not json", b'{"body": "x"}', b'{"text": null}', b'{"text": " \\n"}']
    good = [b'{"text": "one"}', b'{"text": "bad \xff\xfe bytes"}']
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(bad + good))
    raw = pa.array([b"caf\xe9 latin", None, b""], pa.binary())
    valid, offsets, content = raw.buffers()
    text = pa.StringArray.from_buffers(len(raw), offsets, content, valid)
    pq.write_table(pa.table({"text": text}), tmp_path / "b.parquet")
    counts = Counter()
    shard = corpus.Shard("both", [tmp_path / "a.jsonl", tmp_path / "b.parquet"])
    read = list(corpus.texts(shard, counts))
    assert read == ["one", "bad \ufffd\ufffd bytes", "caf\ufffd latin"]
    assert counts == {"lines without the key text": 2, "empty documents": 4}


# ---- shards


def documents_of(folder, *options):
    """The documents of each shard of a folder."""
    return [list(corpus.texts(s, Counter())) for s in corpus.find_shards(folder, *options)]


def hash_of(document):
    return int.from_bytes(hashlib.blake2b(document.encode(), digest_size=8).digest(), "little")


def test_validation_is_one_document_in_ten_by_content_over_all_files(tmp_path):
    docs = documents(400, seed=5)
    write_jsonl(tmp_path / "books.jsonl", docs[:300])
    write_jsonl(tmp_path / "wiki.jsonl", docs[200:])
    shards = documents_of(tmp_path)
    held_out = {doc for doc in docs if hash_of(doc) / 2**64 < 0.1}
    rest = [set(docs[:300]) - held_out, set(docs[200:]) - held_out]
    assert [set(shard) for shard in shards] == [held_out, *rest]


@pytest.mark.parametrize("sizes", [[10] * 3, [10] * 60, [1000, 1, 1, 1], [5, 5000]])
def test_of_few_documents_validation_is_a_tenth_of_the_text_or_all_but_one(sizes, tmp_path):
    docs = [chr(0x100 + i) * size for i, size in enumerate(sizes)]
    write_jsonl(tmp_path / "a.jsonl", docs)
    docs.sort(key=hash_of)
    n = 1
    while n < len(docs) - 1 and len("".join(docs[:n])) < sum(sizes) / 10:
        n += 1
    val, train = documents_of(tmp_path)
    assert set(val) == set(docs[:n]) and set(train) == set(docs[n:])


def shards_of(folder, names, *options):
    """The files that each shard of a folder with these files is made of."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, [name]) if path.suffix == ".jsonl" else path.write_text(name)
    shards = corpus.find_shards(folder, *options)
    return [[path.relative_to(folder).as_posix() for path in shard.paths] for shard in shards]


def test_tables_are_shards_of_their_own_and_text_files_share_one(tmp_path):
    names = ("b.jsonl", "c/d.txt", "a.txt", "f.jsonl", "readme.md", ".x.txt")
    val, *train = shards_of(tmp_path, names)
    assert val == ["a.txt", "b.jsonl", "c/d.txt", "f.jsonl"]
    assert train == [["b.jsonl"], ["f.jsonl"], ["a.txt", "c/d.txt"]]


HELD_OUT = (
    "test-file my_validation_file testing-00000 test_sft evaluation validation_matched test_part1"
    " eval_en v2-valid val2 dev/x c/Test/x devset devtest"
)


@pytest.mark.parametrize("name", HELD_OUT.split())
def test_a_file_named_like_held_out_data_is_refused_or_left_out(name, tmp_path, capsys):
    names = ["a.txt", "b.txt", f"{name}.txt"]
    said = f"{tmp_path} has {name}.txt, named like", "--val FILE", "--all-files"
    refused(capsys, partial(shards_of, tmp_path, names), *said)
    assert shards_of(tmp_path, names, tmp_path / names[2]) == [[names[2]], ["a.txt", "b.txt"]]
    assert shards_of(tmp_path, names, tmp_path / "a.txt") == [["a.txt"], ["b.txt"]]
    assert shards_of(tmp_path, names, None, True)[1] == names


def test_other_names_are_trained_on(tmp_path):
    names = [f"{name}.txt" for name in ("attested", "contest/x", "development", "latest", "values")]
    assert shards_of(tmp_path, names)[1] == names


def test_of_numbered_shards_the_last_is_validation(tmp_path):
    for i in (0, 1, 1822):
        write_parquet(tmp_path / f"shard_{i:05d}.parquet", [f"text {i}"])
    assert documents_of(tmp_path) == [["text 1822"], ["text 0"], ["text 1"]]


def test_a_validation_document_is_never_trained_on(tmp_path):
    for name in ("a", "b", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"only in {name}", "in all"])
    val, *train = documents_of(tmp_path, tmp_path / "b.jsonl")
    assert val == ["only in b", "in all"] and train == [["only in a"], ["only in c"]]


# ---- the standard library


def test_stdlib_corpus_holds_modules_in_the_order_of_their_hashes(tmp_path):
    dl.main(["stdlib", "--out", str(tmp_path)])
    shards = [pq.read_table(f)["text"].to_pylist() for f in sorted(tmp_path.glob("*.parquet"))]
    modules = corpus.stdlib_modules()
    assert modules["json/decoder.py"] == Path(json.decoder.__file__).read_text()
    assert not [name for name in modules if name.startswith("test/")]
    order = sorted(modules, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert len(shards) == 5
    assert shards[4] == [modules[name] for name in order[: len(order) // 16]]
    assert sorted(sum(shards, [])) == sorted(modules.values())


# ---- the download


class Host(http.server.BaseHTTPRequestHandler):
    """A Hugging Face host with bad days: `plan[name]` lists what befalls the next requests for a file."""

    files: dict = {}
    plan: dict = {}
    seen: list = []

    def log_message(self, *args):
        pass

    def do_GET(self):
        name = self.path.rsplit("/", 1)[-1]
        Host.seen.append(name)
        body = Host.files.get(name, b"")
        trouble = Host.plan[name].pop(0) if Host.plan.get(name) else 200
        self.close_connection = True
        self.send_response(200 if trouble == "drop" else trouble)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if trouble == "drop" else body)


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A server on 127.0.0.1 with shards 0 to 2 and the validation shard."""
    Host.files, Host.plan, Host.seen = {}, {}, []
    for i in (0, 1, 2, 1822):
        write_parquet(tmp_path / "x.parquet", documents(100, seed=i))
        Host.files[f"shard_{i:05d}.parquet"] = (tmp_path / "x.parquet").read_bytes()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Host)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(corpus, "BACK_OFF", 0.001)
    yield Host
    server.shutdown()
    server.server_close()


def fetch(out, shards="3"):
    dl.main(["download", "--out", str(out), "--shards", shards])
    return {path.name: path.read_bytes() for path in out.glob("*.parquet")}


def test_download_ends_right_through_drops_429_and_503(host, tmp_path):
    host.plan = {
        "shard_00000.parquet": ["drop", "drop", 503],
        "shard_00001.parquet": [429, "drop", 500, "drop"],
    }
    assert fetch(tmp_path / "out") == host.files
    assert len(host.seen) == 4 + 7
    fetch(tmp_path / "out")
    assert len(host.seen) == 4 + 7  # nothing is missing: no network


@pytest.mark.parametrize("trouble, times", [("drop", corpus.ATTEMPTS), (404, 1)])
def test_download_lists_what_is_missing_and_continues(trouble, times, host, tmp_path, capsys):
    host.plan = {"shard_00002.parquet": [trouble] * times}
    said = "shard_00002.parquet is missing", "run the same command again"
    refused(capsys, lambda: fetch(tmp_path / "out"), *said)
    assert host.seen.count("shard_00002.parquet") == times
    assert fetch(tmp_path / "out") == host.files
