"""Documents: the offline corpus, the FineWeb-Edu download, and reading folders of .parquet, .jsonl
and .txt.

    python dataloader.py stdlib --out data/stdlib                      # this Python's own library
    python dataloader.py download --out data/fineweb-edu --shards 240  # and the validation shard

Damaged input is named, then skipped and counted (a document, a row group) or refused (a file). A
file is visible under its name only when it is whole; every command can be run again and continues
where it was stopped.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import tokenize
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path

from looped.console import DAMAGE, fail, one_line, outside
from looped.files import file_hash, lock, write_atomic

REPO = "karpathy/fineweb-edu-100b-shuffle"  # on huggingface.co
VAL_SHARD = 1822  # its last shard
TXT_DOC = 10_000  # characters after which a .txt file is cut at the next blank line
UNIT_BYTES = 64 << 20  # .txt files up to this size in all become one shard
DOWNLOADS = 4  # at a time
ATTEMPTS = 10  # of a download
BACK_OFF = 1.0  # seconds before the second attempt, doubled after each


# ---- reading


def parquet_texts(path, skipped):
    from pyarrow import ArrowException, large_binary, parquet

    advice = "delete it or fetch it again"
    with outside(f"{path} is not a readable parquet file", advice, (ArrowException, OSError)):
        file = parquet.ParquetFile(path, page_checksum_verification=True)
    names = file.schema_arrow.names
    if "text" not in names:
        fail(f"{path} has no column 'text', only: {', '.join(names)}")
    for group in range(file.num_row_groups):
        try:
            for batch in file.iter_batches(1024, [group], ["text"], use_threads=False):
                # as bytes, which need not be UTF-8
                for raw in batch.column(0).cast(large_binary()).to_pylist():
                    yield raw.decode("utf-8", "surrogateescape") if raw else None
        except (ArrowException, OSError) as e:
            print(f"skipped: {path}, row group {group}: {one_line(e)}", file=sys.stderr)
            skipped["unreadable row group"] += 1


def jsonl_texts(path, skipped):
    reason = "line without JSON text"
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf").strip()
            text = None
            try:
                if line:
                    text = json.loads(line.decode("utf-8", "surrogateescape"))["text"]
                if not isinstance(text, str | None):
                    raise TypeError(f"'text' is {type(text).__name__}, not a string")
            except DAMAGE as e:
                if not skipped[reason]:
                    where = f"{path}, line {number}"
                    why = f"no text under the key text: {one_line(e)}"
                    print(f"skipped: {where}: {why} (more are counted)", file=sys.stderr)
                skipped[reason] += 1
            else:
                yield text


def txt_texts(path, skipped):
    """A .txt file of any size: a document ends at the first blank line after TXT_DOC characters, or
    at 4 × TXT_DOC.
    """
    lines = []
    size = 0
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        while line := file.readline(4 * TXT_DOC):
            lines.append(line)
            size += len(line)
            if size >= 4 * TXT_DOC or (size >= TXT_DOC and line.isspace()):
                yield "".join(lines)
                lines = []
                size = 0
    if lines:
        yield "".join(lines)


READERS = {".parquet": parquet_texts, ".jsonl": jsonl_texts, ".txt": txt_texts}


def texts(paths, split, holdout, skipped):
    """The documents of the files; bytes that are not UTF-8 and lone surrogates become U+FFFD.

    With a hold-out of 1 in N > 0, a document belongs to split "val" if its content hash is 0 modulo
    N, so that copies of it stay on one side, and else to "train". skipped: a Counter of reasons.
    """
    for path in paths:
        for text in READERS[path.suffix](path, skipped):
            if not text or text.isspace():
                skipped["empty document"] += 1
                continue
            try:
                raw = text.encode()
            except UnicodeEncodeError:
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                raw = text.encode()
                skipped["bad characters replaced"] += 1  # not skipped, but counted
            if holdout:
                digest = hashlib.blake2b(raw, digest_size=8).digest()
                held_out = int.from_bytes(digest, "little") % holdout == 0
                if held_out != (split == "val"):
                    continue
            yield text


@dataclass
class Unit:
    """Files that become one shard: a .parquet or .jsonl file, or .txt files."""

    name: str
    paths: list[Path]


@dataclass
class Sources:
    train: list[Unit]
    val: Unit
    holdout: int = 0  # N: one document in N of the same files is for validation


def find_sources(data, val_file=None):
    """The Sources in a folder. Validation is val_file, else the last of at least two .parquet or
    .jsonl files, else some documents of every file.
    """
    files = {}
    for name in sorted(map(Path, glob("**/*", root_dir=data, recursive=True))):
        path = Path(data) / name
        if path.suffix in READERS and path.is_file():
            files[name.as_posix()] = path
    if not files:
        fail(f"no .parquet, .jsonl or .txt file in {data}")
    tables = [name for name in files if not name.endswith(".txt")]
    if val_file is None and len(tables) > 1:
        val_file = tables[-1]
    if val_file is None:
        size = sum(path.stat().st_size for path in files.values())
        holdout = 1000  # 0.2 to 10 MB of validation text, mostly
        if size < 20e6:
            holdout = 10
        elif size < 1e9:
            holdout = 100
        val = Unit(f"1 document in {holdout} by content hash", list(files.values()))
        return Sources(units(files), val, holdout)
    if val_file not in files or len(files) == 1:
        some = ", ".join(list(files)[:3])
        fail(f"--val-file {val_file}: must be one of at least two files in {data} ({some}, …)")
    val = Unit(val_file, [files.pop(val_file)])
    return Sources(units(files), val)


def units(files):
    """{name: path} in order -> [Unit]; one takes the name of its first file."""
    found = []
    room = -1
    for name, path in files.items():
        size = path.stat().st_size
        is_text = path.suffix == ".txt"
        if not is_text or size > room:
            found.append(Unit(name, []))
            room = UNIT_BYTES
        found[-1].paths.append(path)
        room = room - size if is_text else -1  # nothing joins a table
    return found


def shard_name(i):
    return f"shard_{i:05d}.parquet"


# ---- the standard library

PROGRAMS = Path(__file__).parents[1]

LEFT_OUT = {
    "test", "tests", "idle_test", "lib2to3", "_bundled", "site-packages", "dist-packages",
    "encodings", "pydoc_data",
}  # fmt: skip


def stdlib_modules():
    """{name: text} of the interpreter's modules, tests and generated tables left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        generated = path.name.startswith(("_sysconfigdata", "entities.py"))
        if generated or not LEFT_OUT.isdisjoint(name.parts):
            continue
        try:
            with tokenize.open(path) as file:  # in the encoding that its first lines name
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        if text.strip():
            modules[name.as_posix()] = text
    return modules


def build_stdlib(out):
    """Writes the standard library in FineWeb-Edu's form: a document a module, ordered by the hash
    of its name; four training shards and, last, one module in 16 for validation. A folder
    that already has a first shard is left alone.
    """
    from pyarrow import parquet, table

    first = Path(out) / shard_name(0)
    if first.exists():
        print(f"{first} is there already, and stays; delete it to build the corpus again")
        return
    modules = stdlib_modules()
    names = sorted(modules, key=lambda name: hashlib.sha256(name.encode()).digest())
    cut = len(names) // 16
    options = {"row_group_size": 256, "compression": "zstd", "write_page_checksum": True}
    with lock(out):
        for i in (4, 3, 2, 1, 0):  # validation first: when shard 0 is there, all are
            chosen = names[:cut] if i == 4 else names[cut + i :: 4]
            rows = table({"text": [modules[name] for name in chosen]})
            write_atomic(Path(out) / shard_name(i), partial(parquet.write_table, rows, **options))
    size = sum(len(text.encode()) for text in modules.values()) / 1e6
    print(f"{out}: {len(names)} modules, {size:.1f} MB, in 5 shards; the last is for validation")


def prepare_stdlib(folder: Path, vocab_size: int, seq_len: int) -> None:
    """The standard library as packed rows, with its own tokenizer, as speedrun.sh makes them."""
    tokenizer = folder.parent / "tokenizer.json"
    commands = (
        "dataloader.py stdlib --out data/stdlib",
        f"tokenizer_train.py --texts data/stdlib --vocab-size {vocab_size} --out {tokenizer}",
        f"dataloader.py pack --texts data/stdlib --tokenizer {tokenizer} --seq-len {seq_len} "
        f"--long-docs split --out {folder}",
    )
    for command in commands:
        script, *flags = command.split()
        if script == "tokenizer_train.py" and tokenizer.is_file():
            continue  # it is whole, or not there
        if subprocess.run([sys.executable, str(PROGRAMS / script), *flags]).returncode:
            fail("the default data could not be made (see above); give packed rows with --data")


# ---- download


def shard_names(count):
    """The files of so many shards, that for validation first."""
    return [shard_name(i) for i in (VAL_SHARD, *range(count))]


def shard_sources(data, count):
    """The Sources of a download of so many shards, whether they are there yet or not."""
    val, *train = [Unit(name, [Path(data) / name]) for name in shard_names(count)]
    return Sources(train, val)


def whole_parquet(path):
    """Is there a file whose footer can be read?"""
    from pyarrow import ArrowException, parquet

    try:
        return "text" in parquet.ParquetFile(path).schema_arrow.names
    except (ArrowException, OSError):
        return False


def hub():
    """Where the corpus is downloaded from."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def get(url, start=0):
    """The response to a GET of the bytes from `start` on."""
    import requests

    headers = {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    token = os.environ.get("HF_TOKEN")
    if token and url.startswith(f"{hub()}/"):
        # requests drops it when redirected to another host
        headers["Authorization"] = f"Bearer {token}"
    response = requests.get(url, headers=headers, stream=True, timeout=(10, 60))
    if response.status_code == 416 and start:
        return get(url)  # the .part file is no shorter than the whole file: start over
    response.raise_for_status()
    return response


def size_of(response):
    """Bytes of the whole file, also where the response is a part of it."""
    name = "Content-Range" if response.status_code == 206 else "Content-Length"
    return int(response.headers[name].split("/")[-1])


def stated_hash(response):
    """The file's sha256, which Hugging Face states before it redirects; None from other hosts."""
    for answer in (*response.history, response):
        tag = answer.headers.get("X-Linked-Etag", "").strip('"')
        if re.fullmatch("[0-9a-f]{64}", tag):
            return tag
    return None


def fetch_file(url, path, whole=whole_parquet):
    """One attempt: continues the .part file, checks it (whole(path) -> bool), and only then gives
    it its name.
    """
    part = path.with_name(path.name + ".part")
    with get(url, part.stat().st_size if part.exists() else 0) as response:
        size = size_of(response)
        sha = stated_hash(response)
        with open(part, "ab" if response.status_code == 206 else "wb") as file:
            for block in response.iter_content(1 << 16):
                file.write(block)
    have = part.stat().st_size
    if have < size:
        raise ValueError(f"{have:,} of {size:,} bytes came")
    if have > size or not whole(part) or sha not in (None, file_hash(part)):
        part.unlink()
        raise ValueError("what came is damaged")
    os.replace(part, path)


class GivenUpError(Exception):
    """No attempt succeeded; says why."""


def with_retries(action, *args):
    """action(*args), tried again after errors that may pass; raises GivenUpError(reason)."""
    import requests

    reason = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            wait = BACK_OFF * 2 ** (attempt - 1)
            print(f"{reason}; trying again in {wait:g} s", flush=True)
            time.sleep(wait)
        try:
            return action(*args)
        except requests.HTTPError as e:
            status = e.response.status_code
            reason = f"HTTP {status}"  # not str(e): URLs can be signed
            if status < 500 and status not in (408, 429):
                break
        except (requests.RequestException, ValueError, KeyError) as e:
            reason = one_line(e)
    raise GivenUpError(reason)


def file_size(url):
    with get(url) as response:
        return size_of(response)


def check_disk(out, todo, size):
    """Says what will be fetched; ends the program where the disk has no room for it. size: bytes of
    a shard.
    """
    need = len(todo) * size
    free = shutil.disk_usage(out).free
    about = f"{len(todo)} shards, about {need / 1e9:.3f} GB"
    print(f"{out}: {about} to fetch; {free / 1e9:.3f} GB are free", flush=True)
    if need > free:
        fail(f"{about}, do not fit into {out}; ask for fewer")


def download(out, shards):
    """Fetches the missing shards, validation first. Needs no network when none is missing."""
    base = f"{hub()}/datasets/{REPO}/resolve/main/"
    again = "run the same command again, it continues"
    out = Path(out)
    names = shard_names(shards)

    def fetch_shard(name):
        """Fetches a file; -> why that failed, or None."""
        reason = None
        try:
            with_retries(fetch_file, base + name, out / name)
        except GivenUpError as e:
            reason = str(e)
        print(f"{name}: {reason or 'here'}", flush=True)
        return reason

    with lock(out):
        todo = [name for name in names if not whole_parquet(out / name)]
        if not todo:
            print(f"{out}: all {len(names)} shards are here")
            return
        try:
            size = with_retries(file_size, base + todo[-1])  # they are about equal
        except GivenUpError as e:  # an unreachable host is reported once, not by each shard
            fail(f"missing: {', '.join(todo)} ({e}); {again}")
        check_disk(out, todo, size)
        first = fetch_shard(todo[0])
        # Not `with`, which would make Ctrl-C wait. The pool has a name because Ctrl-C would be lost
        # in what Python calls when it frees a pool.
        pool = ThreadPoolExecutor(DOWNLOADS)
        reasons = [first, *pool.map(fetch_shard, todo[1:])]
    missing = [f"{name} ({reason})" for name, reason in zip(todo, reasons) if reason]
    if missing:
        fail(f"missing: {', '.join(missing)}; {again}")
