"""Documents: the offline corpus, the FineWeb-Edu download, and reading .parquet, .jsonl and .txt.

A folder of texts becomes shards, the first for validation. Validation is the file that --val names;
else, in a folder of FineWeb-Edu's form (shard_00000.parquet, shard_00001.parquet, …), the last
shard; else one document in so many, chosen by its hash, over all files. A folder with a file whose
name says that it is held out (test, validation, …) is refused without --val or --all-files. A
validation document is never trained on, wherever else it stands.
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

import numpy as np
import requests

from looped.common import Parser, fail, note, write_atomic

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
    cut: int = 0  # of a split by hash: documents whose hash is below it are for validation
    below: bool = False  # True: the documents below the cut; False: the others
    held_out: frozenset = frozenset()  # hashes of validation documents, which are left out


def text_hash(text):
    """A number of 64 bits."""
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
            if (key < shard.cut) != shard.below:
                continue
            if key in shard.held_out:
                counts["left out, being in validation"] += 1
                continue
            yield text


# ---- the shards of a folder


# fmt: off
def add_text_flags(add):
    """The flags that find_shards needs."""
    add("--texts", type=Path, required=True,
        help="folder of .parquet (column text), .jsonl (key text) or .txt files; a .txt document "
             "ends at a line such as <|endoftext|>, or at the first blank line after 10,000 "
             "characters")
    add_choice_flags(add)


def add_choice_flags(add):
    """The flags that choose among a folder's files."""
    add("--val", type=Path, metavar="FILE",
        help="file whose documents are the validation (default: the last of FineWeb-Edu's shards, "
             "or one document in so many of all files)")
    add("--all-files", action="store_true",
        help="train on files whose names say that they are held out (test, validation, …), too")
# fmt: on


LETTER = r"[^\W\d_]"
# A word between non-letters: my_validation_file, test2019, devset, flores/devtest; not latest, valley
HELD_OUT = re.compile(
    rf"(?<!{LETTER})(test|testing|val|valid|validation|dev|eval|evaluation)"
    rf"(set|data|split|file|test)?s?(?!{LETTER})",
    re.IGNORECASE,
)
SHARD_NAME = re.compile(r"shard_\d{5}\.parquet")  # FineWeb-Edu's


def find_shards(folder, val=None, all_files=False):
    """The Shards of a folder, that for validation first. val: the file that is the validation."""
    if val and not (val.is_file() and val.suffix.lower() in READERS):
        fail(f"--val {val} is no .parquet, .jsonl or .txt file")
    names = [n for n in text_files(folder) if not val or not (folder / n).samefile(val)]
    if not all_files:
        names = without_held_out(folder, names, val)
    if not names:
        fail(f"no .parquet, .jsonl or .txt file to train on in the folder {folder}")
    if not val and len(names) > 1 and all(SHARD_NAME.fullmatch(str(name)) for name in names):
        val = folder / names.pop()
    if not val:
        return shards_by_hash(folder, names)
    validation = Shard(val.name, [val])
    hashes = frozenset(map(text_hash, texts(validation, Counter())))
    return [validation, *make_shards(folder, names, held_out=hashes)]


def text_files(folder):
    """Their names, in order; none that begins with a dot, nor below a folder that does."""
    names = sorted(map(Path, glob.glob("**/*", root_dir=folder, recursive=True)))
    return [n for n in names if n.suffix.lower() in READERS and (folder / n).is_file()]


def without_held_out(folder, names, val):
    """The names that do not say "held out". Others are refused, or, beside val, left out."""
    held_out = [name for name in names if HELD_OUT.search(name.as_posix())]
    if not held_out:
        return names
    named = f"{folder} has {listed(held_out)}, named like held-out data"
    if not val:
        fail(f"{named}; move it away, or give --val FILE (the validation) or --all-files")
    note(f"{named}, which is left out; with --all-files it is trained on")
    return [name for name in names if not HELD_OUT.search(name.as_posix())]


def listed(names):
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{others}"


def shards_by_hash(folder, names):
    """The Shards of files of which one document in so many is for validation."""
    size = sum((folder / name).stat().st_size for name in names)
    one_in = 1000  # 0.2 to 10 MB of validation text, mostly
    if size < 20e6:
        one_in = 10
    elif size < 1e9:
        one_in = 100
    paths = [folder / name for name in names]
    cut, rule = split_by_hash(texts(Shard("", paths), Counter()), one_in)
    return [Shard(rule, paths, cut, below=True), *make_shards(folder, names, cut=cut)]


def split_by_hash(documents, one_in):
    """-> (the hash below which a document is for validation, the rule in words).

    Of few documents a fixed part of the hashes may hold none, or all. So the documents of the
    lowest hashes are taken, until they hold 1/one_in of the text or one document is left.
    """
    sizes = Counter()  # characters by hash
    for text in documents:
        sizes[text_hash(text)] += len(text)
        if len(sizes) == 10 * one_in:
            return 2**64 // one_in, f"1 document in {one_in} by content hash"
    if not sizes:
        fail("the files to train on hold no text")
    hashes = sorted(sizes)
    totals = np.cumsum([sizes[key] for key in hashes])
    n = 1 + int(np.searchsorted(totals, totals[-1] / one_in))
    n = min(n, len(hashes) - 1)
    return hashes[n], f"{n} of {len(hashes)} documents by content hash"


def make_shards(folder, names, **options):
    """A Shard of each .parquet and .jsonl file, and one of all .txt files."""
    groups = [[name] for name in names if name.suffix.lower() != ".txt"]
    groups.append([name for name in names if name.suffix.lower() == ".txt"])
    shards = []
    for group in filter(None, groups):
        shards.append(Shard(listed(group), [folder / name for name in group], **options))
    return shards


# ---- what rows and tokenizers are made of

HASHED = 1 << 24  # bytes of a file: all of most files, and seconds for 100 GB of shards


def fingerprints(folder, shards):
    """{name of a file, as seen from the folder: its bytes, and the hash of its beginning}"""
    prints = {}
    for path in sorted({path for shard in shards for path in shard.paths}):
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read(HASHED))
        prints[os.path.relpath(path, folder)] = f"{path.stat().st_size} {digest.hexdigest()}"
    return prints


def check_same(path, texts, before, now):
    """Refuses what was made of other files or with other settings. before, now: {setting: value},
    "files" among them.
    """
    advice = f"delete {path}, or choose another --out"
    old, new = before["files"], now["files"]
    changed = [f"{name} was added" for name in new if name not in old]
    changed += [f"{name} is gone" for name in old if name not in new]
    changed += [f"{name} has changed" for name in new if new[name] != old.get(name, new[name])]
    if changed:
        fail(f"{texts} is not what {path} was made of: {listed(changed)}; {advice}")
    for name, value in now.items():
        if before[name] != value:
            fail(f"{path} was made with {name} {before[name]}, not {value}; {advice}")


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
        path.parent.mkdir(parents=True, exist_ok=True)

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
    paths = [out / shard_name(i) for i in (VAL_SHARD, *range(shards))]
    todo = [path for path in paths if not path.exists()]
    urls = [f"{host}/datasets/{REPO}/resolve/main/{path.name}" for path in todo]
    need = len(todo) * SHARD_BYTES / 1e9
    disk = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(disk).free / 1e9
    amount = f"{len(todo)} of {len(paths)} shards to fetch, about {need:.1f} GB"
    print(f"{out}: {amount}; {free:.1f} GB are free", flush=True)
    pool = ThreadPoolExecutor(DOWNLOADS)
    for path, reason in zip(todo, pool.map(fetch_file, urls, todo)):
        if reason:
            pool.shutdown(cancel_futures=True)
            fail(f"{path.name} is missing ({reason}); run the same command again, it continues")
        print(f"{path.name}: here", flush=True)


# ---- python -m looped.corpus FOLDER: a key of one's own texts, other where a file is added or changed


def main():
    parser = Parser(description="Prints a short hash of a folder's text files.")
    parser.add_argument("folder", type=Path)
    add_choice_flags(parser.add_argument)
    args = parser.parse_args()
    prints = fingerprints(args.folder, find_shards(args.folder, args.val, args.all_files))
    content = json.dumps([str(args.folder.resolve()), prints])
    print(hashlib.sha256(content.encode()).hexdigest()[:8])


if __name__ == "__main__":
    main()
