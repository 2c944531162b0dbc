"""Documents: the offline corpus, the FineWeb-Edu download, and reading .parquet, .jsonl and .txt.

A folder of texts becomes shards, the first for validation. Files named test, val, valid,
validation, dev or eval are never trained on, and validation comes from them. Where there are none,
validation is the last .parquet or .jsonl file of several, else one document in so many, chosen by
its hash. A document of the validation set is never trained on, wherever else it stands.
"""

import glob
import hashlib
import json
import os
import re
import shutil
import sysconfig
import time
import tokenize
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import requests

from looped.common import fail, note, write_atomic

REPO = "karpathy/fineweb-edu-100b-shuffle"  # on huggingface.co
VAL_SHARD = 1822  # its last shard
SHARD_BYTES = 100e6  # about
TXT_DOC = 10_000  # characters after which a .txt file is cut at the next blank line
DOWNLOADS = 4  # at a time
ATTEMPTS = 10  # of a download
LASTING = re.compile("Failed to resolve|40[134] Client Error")  # no use in trying again
BACK_OFF = 2.0  # seconds before the second attempt; 4, 9, 16 … times as long before the next


# ---- reading


def parquet_texts(path, counts):
    from pyarrow import large_binary, parquet

    file = parquet.ParquetFile(path)
    columns = file.schema_arrow.names
    if "text" not in columns:
        fail(f"{path} has no column text; it has {', '.join(columns)}")
    for batch in file.iter_batches(1024, columns=["text"], use_threads=False):
        # as bytes, which need not be UTF-8
        for raw in batch.column(0).cast(large_binary()).to_pylist():
            yield raw.decode("utf-8", "replace") if raw else None


def jsonl_texts(path, counts):
    read = 0
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for line in file:
            try:
                text = json.loads(line)["text"]
            except (ValueError, LookupError, TypeError, RecursionError):
                counts["lines without the key text"] += 1
                continue
            read += 1
            yield text if isinstance(text, str) else None
    if not read:
        fail(f"{path} has no line with text under the key text")


SEPARATOR = re.compile(r"<\|\w+\|>|</s>")  # <|endoftext|> and its like, a line of its own


def txt_texts(path, counts):
    """A document ends at a separator line, at the first blank line after TXT_DOC characters, or at
    4 × TXT_DOC.
    """
    lines = []
    size = 0
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        while line := file.readline(4 * TXT_DOC):
            separates = SEPARATOR.fullmatch(line.strip())
            if separates:
                counts[f"separator lines such as {separates[0]}"] += 1
            else:
                lines.append(line)
                size += len(line)
            full = size >= 4 * TXT_DOC or (size >= TXT_DOC and line.isspace())
            if lines and (separates or full):
                yield "".join(lines)
                lines = []
                size = 0
    if lines:
        yield "".join(lines)


READERS = {".parquet": parquet_texts, ".jsonl": jsonl_texts, ".txt": txt_texts}


@dataclass
class Shard:
    """Files whose documents become one file of rows, and which of their documents."""

    name: str
    paths: list[Path]
    one_in: int = 0  # one document in so many is for validation; 0: by files
    validation: bool = False
    held_out: frozenset = frozenset()  # hashes of validation documents, which are left out
    published: bool = False  # FineWeb-Edu's own split: they are counted only

    @property
    def bytes(self):
        return sum(path.stat().st_size for path in self.paths)


def text_hash(text):
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def texts(shard, counts):
    """The documents of a Shard; what is skipped is counted."""
    for path in shard.paths:
        for text in READERS[path.suffix.lower()](path, counts):
            if not text or text.isspace():
                counts["empty documents"] += 1
                continue
            key = text_hash(text)
            if shard.one_in and (key % shard.one_in == 0) != shard.validation:
                continue
            if key in shard.held_out and shard.published:
                counts["also in validation (the published split, kept)"] += 1
            elif key in shard.held_out:
                counts["left out, being in validation"] += 1
                continue
            yield text


# A file or folder whose name ends so, numbers apart: test, GPT4-valid, validation-00000-of-00001
HELD_OUT = re.compile(
    r"(.*[-_. ])?(test|val|valid|validation|dev|eval)([-_.]?(of|[0-9a-f]*\d[0-9a-f]*))*", re.I
)


def held_out_name(name):
    """The name that keeps a file out of training, "" if none does."""
    for part in (*name.parent.parts, name.stem):
        match = HELD_OUT.fullmatch(part)
        if match:
            return match[2].lower()
    return ""


def is_table(name):
    return name.suffix.lower() != ".txt"


def make_shards(folder, names, **options):
    """A Shard of each table, and one of all .txt files."""
    groups = [[name] for name in names if is_table(name)]
    groups.append([name for name in names if not is_table(name)])
    return [as_shard(folder, group, **options) for group in groups if group]


def as_shard(folder, names, **options):
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return Shard(f"{names[0]}{others}", [folder / name for name in names], **options)


def text_files(folder):
    """Their names, in order; none that begins with a dot, nor below a folder that does."""
    names = sorted(map(Path, glob.glob("**/*", root_dir=folder, recursive=True)))
    return [n for n in names if n.suffix.lower() in READERS and (folder / n).is_file()]


def shards_by_hash(folder, names):
    """The Shards of files of which one document in so many is for validation."""
    size = sum((folder / name).stat().st_size for name in names)
    one_in = 1000  # 0.2 to 10 MB of validation text, mostly
    if size < 20e6:
        one_in = 10
    elif size < 1e9:
        one_in = 100
    val = as_shard(folder, names, one_in=one_in, validation=True)
    val.name = f"1 document in {one_in} by content hash"
    return [val, *make_shards(folder, names, one_in=one_in)]


def find_shards(folder):
    """The Shards of a folder, that for validation first."""
    kinds = {name: held_out_name(name) for name in text_files(folder)}
    train = [name for name, kind in kinds.items() if not kind]
    apart = [name for name, kind in kinds.items() if kind]
    tables = list(filter(is_table, train))
    if not train:
        fail(f"no .parquet, .jsonl or .txt file to train on in {folder}")
    if apart:
        chosen = [name for name in apart if kinds[name] != "test"] or apart
        note(f"validation is {', '.join(map(str, chosen))}; no file named so is trained on")
    elif len(tables) > 1:
        chosen = tables[-1:]
        train.remove(tables[-1])
    else:
        return shards_by_hash(folder, train)
    val = as_shard(folder, chosen)
    hashes = frozenset(map(text_hash, texts(val, Counter())))
    published = val.name == shard_name(VAL_SHARD)
    return [val, *make_shards(folder, train, held_out=hashes, published=published)]


def shard_name(i):
    return f"shard_{i:05d}.parquet"


# ---- the standard library

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
    of its name; four training shards and, last, one module in 16 for validation. A folder that
    already has a first shard is left alone.
    """
    from pyarrow import parquet, table

    first = out / shard_name(0)
    if first.exists():
        print(f"{first} is there already, and stays; delete it to build the corpus again")
        return
    out.mkdir(parents=True, exist_ok=True)
    modules = stdlib_modules()
    names = sorted(modules, key=lambda name: hashlib.sha256(name.encode()).digest())
    cut = len(names) // 16
    for i in (4, 3, 2, 1, 0):  # when shard 0 is there, all are
        chosen = names[:cut] if i == 4 else names[cut + i :: 4]
        rows = table({"text": [modules[name] for name in chosen]})
        write_atomic(out / shard_name(i), partial(parquet.write_table, rows, compression="zstd"))
    print(f"{out}: {len(names)} modules in 5 shards; the last is for validation")


# ---- download


def fetch_once(url, path):
    with requests.get(url, stream=True, timeout=(10, 60)) as response:
        response.raise_for_status()

        def write(file):
            file.writelines(response.iter_content(1 << 20))

        write_atomic(path, write)


def fetch_file(url, path):
    """Fetches a file; errors that may pass are tried again. -> None, or why it failed."""
    for attempt in range(ATTEMPTS):
        time.sleep(BACK_OFF * attempt**2)
        try:
            return fetch_once(url, path)
        except requests.RequestException as e:
            reason = str(e)
        print(f"{path.name}: {reason}", flush=True)
        if LASTING.search(reason):
            break
    return reason


def download(out, shards):
    """Fetches the shards that are not there, and that for validation, several at a time, until one
    cannot be had.
    """
    host = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / shard_name(i) for i in (VAL_SHARD, *range(shards))]
    todo = [path for path in paths if not path.exists()]
    urls = [f"{host}/datasets/{REPO}/resolve/main/{path.name}" for path in todo]
    need = len(todo) * SHARD_BYTES / 1e9
    free = shutil.disk_usage(out).free / 1e9
    about = f"{len(todo)} of {len(paths)} shards to fetch, about {need:.1f} GB"
    print(f"{out}: {about}; {free:.1f} GB are free", flush=True)
    pool = ThreadPoolExecutor(DOWNLOADS)
    for path, reason in zip(todo, pool.map(fetch_file, urls, todo)):
        if reason:
            pool.shutdown(cancel_futures=True)
            fail(f"{path.name} is missing ({reason}); run the same command again, it continues")
        print(f"{path.name}: here", flush=True)
