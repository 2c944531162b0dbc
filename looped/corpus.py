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
import shutil
import subprocess
import sys
import sysconfig
import time
import tokenize
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from looped.console import DAMAGE, fail, note, one_line
from looped.files import file_hash, lock, write_atomic
from looped.tokenizer import cleaned

REPO = "karpathy/fineweb-edu-100b-shuffle"  # on huggingface.co
VAL_SHARD = 1822  # its last shard
SHARD_BYTES = 100e6  # about
TXT_DOC = 10_000  # characters after which a .txt file is cut at the next blank line
UNIT_BYTES = 64 << 20  # .txt files up to this size in all become one shard
DOWNLOADS = 4  # at a time
ATTEMPTS = 10  # of a download
BACK_OFF = 2.0  # seconds before the second attempt; 4, 9, 16 … times as long before the next


# ---- reading


def whole_parquet(path):
    """Is there a file whose footer can be read and names a column text?"""
    from pyarrow import ArrowException, parquet

    try:
        return "text" in parquet.ParquetFile(path).schema_arrow.names
    except (ArrowException, OSError):
        return False


def parquet_texts(path, counts):
    from pyarrow import ArrowException, large_binary, parquet

    if not whole_parquet(path):
        fail(f"{path} is not a readable parquet file with a column 'text'; mend or delete it")
    file = parquet.ParquetFile(path, page_checksum_verification=True)
    for group in range(file.num_row_groups):
        try:
            for batch in file.iter_batches(1024, [group], ["text"], use_threads=False):
                # as bytes, which need not be UTF-8
                for raw in batch.column(0).cast(large_binary()).to_pylist():
                    yield raw.decode("utf-8", "surrogateescape") if raw else None
        except (ArrowException, OSError) as e:
            print(f"skipped: {path}, row group {group}: {one_line(e)}", file=sys.stderr)
            counts["unreadable row group"] += 1


def jsonl_texts(path, counts):
    reason = "line without JSON text"
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf").strip() or b'{"text": null}'
            try:
                text = json.loads(line.decode("utf-8", "surrogateescape"))["text"]
                if not isinstance(text, str | None):
                    raise TypeError(f"'text' is {type(text).__name__}, not a string")
                yield text
            except DAMAGE as e:
                if not counts[reason]:
                    why = f"no text under the key text: {one_line(e)} (more are counted)"
                    print(f"skipped: {path}, line {number}: {why}", file=sys.stderr)
                counts[reason] += 1


def txt_texts(path, counts):
    """A .txt file of any size: a document ends at the first blank line after TXT_DOC characters, or
    at 4 × TXT_DOC.
    """
    with open(path, "rb") as file:
        if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            fail(f"{path} is UTF-16; convert it to UTF-8, or remove it")
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


@dataclass
class Unit:
    """Files that become one shard: a .parquet or .jsonl file, or .txt files.

    holdout N > 0: a document of them is for validation if its content hash is 0 modulo N, so that
    copies of it stay on one side; the unit holds those documents, or all others.
    """

    name: str
    paths: list[Path]
    holdout: int = 0
    held_out: bool = False


def texts(unit, counts):
    """The documents of a Unit; bytes that are not UTF-8 and lone surrogates become U+FFFD. What is
    skipped or altered is counted.
    """
    for path in unit.paths:
        for text in READERS[path.suffix.lower()](path, counts):
            if not text or text.isspace():
                counts["empty document"] += 1
                continue
            try:
                raw = text.encode()
            except UnicodeEncodeError:
                text = cleaned(text)
                raw = text.encode()
                counts["bad characters replaced"] += 1
            if unit.holdout:
                digest = hashlib.blake2b(raw, digest_size=8).digest()
                held_out = int.from_bytes(digest, "little") % unit.holdout == 0
                if held_out != unit.held_out:
                    continue
            yield text


def names_in(folder) -> list[Path]:
    """The files in a folder and below, in order, each folder that links lead to once; none whose
    name, or whose folder's, begins with a dot.
    """
    names = []
    seen = set()
    for top, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if os.path.realpath(top) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(top))
        names += [Path(top, name).relative_to(folder) for name in files if not name.startswith(".")]
    return sorted(names)


def text_files(folder) -> dict[Path, int]:
    """The sizes of the folder's files of text, by name; one that links lead to twice counts once."""
    sizes = {}
    seen = set()
    others = []
    for name in names_in(folder):
        file = Path(os.path.realpath(folder / name))  # of a link to itself, that
        if not file.is_file() or file in seen:
            continue
        seen.add(file)
        if name.suffix.lower() in READERS:
            sizes[name] = file.stat().st_size
        else:
            others.append(str(name))
    if others:
        note(f"not read in {folder}: {len(others)} other files ({others[0]}, …)")
    return sizes


def refuse_copy(folder, val: Path, others: list[Path]) -> None:
    """Refuses a validation file that is also among the training files, under another name."""
    size = (folder / val).stat().st_size
    for name in others:
        same = (folder / name).stat().st_size == size
        if same and file_hash(folder / name) == file_hash(folder / val):
            fail(f"{folder / val}, for validation, has a copy, {name}; remove one of them")


def find_units(folder):
    """The Units of a folder, that for validation first: the last of at least two .parquet or .jsonl
    files, else some documents of every file.
    """
    sizes = text_files(folder)
    if not sizes:
        fail(f"no .parquet, .jsonl or .txt file in {folder}")
    tables = [name for name in sizes if name.suffix.lower() != ".txt"]
    if len(tables) > 1:
        holdout = 0
        val = tables.pop()
        del sizes[val]
        refuse_copy(folder, val, tables)
        units = [Unit(str(val), [folder / val])]
    else:
        total = sum(sizes.values())
        holdout = 1000  # 0.2 to 10 MB of validation text, mostly
        if total < 20e6:
            holdout = 10
        elif total < 1e9:
            holdout = 100
        every = [folder / name for name in sizes]
        units = [Unit(f"1 document in {holdout} by content hash", every, holdout, held_out=True)]
    sizes |= dict.fromkeys(tables, UNIT_BYTES + 1)  # so that each is alone
    room = -1  # bytes that may still join the last unit
    for name, size in sizes.items():
        if size > room:
            units.append(Unit(str(name), [], holdout))
            room = UNIT_BYTES
        units[-1].paths.append(folder / name)
        room -= size
    return units


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

    first = out / shard_name(0)
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
            write_atomic(out / shard_name(i), partial(parquet.write_table, rows, **options))
    print(f"{out}: {len(names)} modules in 5 shards; the last is for validation")


def prepare_stdlib(folder: Path, vocab_size: int, seq_len: int) -> None:
    """The standard library as packed rows, with its own tokenizer, as speedrun.sh makes them."""
    tokenizer = folder.parent / "tokenizer.json"
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(folder.parent / "source", b"data/stdlib\n")  # as speedrun.sh does
    commands = [
        "dataloader.py stdlib --out data/stdlib",
        f"tokenizer_train.py --texts data/stdlib --vocab-size {vocab_size} --out {tokenizer}",
        f"dataloader.py pack --texts data/stdlib --tokenizer {tokenizer} --seq-len {seq_len} "
        f"--long-docs split --out {folder}",
    ]
    if tokenizer.is_file():  # it is whole, or not there
        del commands[1]
    for command in commands:
        script, *flags = command.split()
        if subprocess.run([sys.executable, PROGRAMS / script, *flags]).returncode:
            fail("the default data could not be made (see above); give packed rows with --data")


# ---- download


def shard_units(folder, count):
    """The Units of a download of so many shards, that for validation first, whether they are there
    yet or not.
    """
    names = [shard_name(i) for i in (VAL_SHARD, *range(count))]
    return [Unit(name, [folder / name]) for name in names]


def try_fetch(url, path, whole):
    """Continues the .part file, checks it, and only then gives it its name."""
    import requests

    part = path.with_name(path.name + ".part")
    with open(part, "ab") as file:
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={file.tell()}-"}
        with requests.get(url, headers=headers, stream=True, timeout=(10, 60)) as response:
            if response.status_code in (200, 416):  # all of it comes, or there is no more of it
                file.truncate(0)
            response.raise_for_status()
            for block in response.iter_content(1 << 16):
                file.write(block)
    damaged = not whole(part)
    for answer in (*response.history, response):
        # Hugging Face states the file's sha256 before it redirects
        tag = answer.headers.get("X-Linked-Etag", "").strip('"')
        damaged |= len(tag) == 64 and tag != file_hash(part)
    if damaged:
        part.unlink()
        raise ValueError("what came is damaged")
    os.replace(part, path)


def fetch_file(url, path, whole=whole_parquet):
    """Fetches a file for which whole(path) holds; errors that may pass are tried again. -> None, or
    why it failed.
    """
    import requests

    for attempt in range(ATTEMPTS):
        time.sleep(BACK_OFF * attempt**2)
        try:
            try_fetch(url, path, whole)
            return None
        except requests.HTTPError as e:
            status = e.response.status_code
            reason = f"HTTP {status}"  # not str(e): URLs can be signed
            if status < 500 and status not in (408, 416, 429):
                break
        except (requests.exceptions.InvalidURL, requests.exceptions.MissingSchema) as e:
            return one_line(e)
        except (requests.RequestException, ValueError) as e:
            reason = one_line(e)
        print(f"{path.name}: {reason}", flush=True)
    return reason


def download(out, shards):
    """Fetches the missing shards, validation first, several at a time, until one cannot be had."""
    host = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")

    def fetch(path):
        return fetch_file(f"{host}/datasets/{REPO}/resolve/main/{path.name}", path)

    with lock(out):
        paths = [unit.paths[0] for unit in shard_units(out, shards)]
        todo = [path for path in paths if not whole_parquet(path)]
        need = len(todo) * SHARD_BYTES
        free = shutil.disk_usage(out).free
        about = f"{len(todo)} of {len(paths)} shards, about {need / 1e9:.1f} GB"
        print(f"{out}: {about} to fetch; {free / 1e9:.1f} GB are free", flush=True)
        if need > free:
            fail(f"{about}, do not fit into {out}; ask for fewer")
        pool = ThreadPoolExecutor(DOWNLOADS)  # not in `with`, where Ctrl-C would wait for it
        for some in (todo[:1], todo[1:]):  # first validation, which training needs at once
            for path, reason in zip(some, pool.map(fetch, some)):
                if reason:
                    pool.shutdown(cancel_futures=True)
                    missing = ", ".join(path.name for path in todo if not whole_parquet(path))
                    fail(f"missing: {missing} ({reason}); run the same command again, it continues")
                print(f"{path.name}: here", flush=True)
