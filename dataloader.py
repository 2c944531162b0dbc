"""Text in, rows of tokens out: corpus, download, packing, and the training stream.

    python dataloader.py stdlib --out data/stdlib                      # offline corpus: this Python's standard library
    python dataloader.py download --out data/fineweb-edu --shards 240  # FineWeb-Edu: shards 0 to 239 and validation
    python dataloader.py pack --data data/stdlib --tokenizer data/tokenizer.json --seq-len 256 --out data/packed

Packing (BestFit-Crop, arXiv 2404.10830): a row is seq_len + 1 tokens; each document follows a BOS, so every row begins
with one; of a buffer of 1,000 documents the longest that still fits is placed, and when none fits the shortest is
cropped to fill the row. No padding. The stream of training sequences is a pure function of (packed data, seed, index),
a keyed permutation worked out by arithmetic: the same for any number of ranks, and resuming is just a number.
"""

import argparse
import contextlib
import glob
import hashlib
import heapq
import itertools
import json
import multiprocessing
import os
import re
import shutil
import sys
import threading
import time
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

REPO, VAL_SHARD = "karpathy/fineweb-edu-100b-shuffle", 1822  # on huggingface.co; its last shard is for validation
BUFFER = 1000  # documents the packer chooses from
LONG_DOCS = ("crop", "own-row", "split")
TXT_DOC = 10_000  # characters after which a .txt file is cut at the next blank line
ATTEMPTS, BACK_OFF = 6, 1.0  # of a download; seconds before the second attempt, doubled after each


# ---- errors, files, waiting


def fail(message):
    """The end of every user mistake: one line, exit code 2."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def run_cli(main):
    """Runs main(); what the operating system refuses (full disk, no permission) is one line too."""
    try:
        main()
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(130)  # at once: a thread may be waiting for the network, and whatever is half done is resumable
    except BrokenProcessPool:
        fail("a worker process died (out of memory?); run the command again with fewer --workers, it continues")
    except OSError as e:
        fail(f"{e.filename or ''} {e.strerror or e}".strip())


def write_atomic(path, content):
    """Writes bytes, or what content(file) writes, under a temporary name; fsync; rename. One writer a path."""
    path = Path(path)
    for dead in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):  # of a killed process
        dead.unlink(missing_ok=True)
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # so that a dying one cannot rename ours
    try:
        with open(temp, "wb") as f:
            content(f) if callable(content) else f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temp, path)
    except BaseException as e:
        temp.unlink(missing_ok=True)
        if isinstance(e, OSError):
            e.filename = e.filename or str(path)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # the rename, too, must reach the disk
    os.close(folder)


@contextlib.contextmanager
def sole_writer(folder):
    """Makes the folder and holds its lock, which goes with the process however that ends."""
    import fcntl

    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder) / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"another process is writing to {folder}; wait for it or choose another --out")
        yield


def file_hash(*paths):
    """sha256 of a file; of several, the hash of their hashes."""
    digests = []
    for path in paths:
        with open(path, "rb") as f:
            digests.append(hashlib.file_digest(f, "sha256").hexdigest())
    return digests[0] if len(paths) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def write_checked(path, data):
    """A JSON file that carries the checksum of its content."""
    checksum = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    write_atomic(path, (json.dumps(data | {"checksum": checksum}, indent=1) + "\n").encode())


def read_checked(path, advice):
    """What write_checked wrote, None where there is no file; a damaged one ends the program, with advice."""
    try:
        data = json.loads(Path(path).read_bytes())
        checksum = data.pop("checksum")
        if checksum != hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest():
            raise ValueError("its checksum does not fit its content")
        if data["version"] != 1:
            raise ValueError(f"version {data['version']}, this program reads 1")
        return data
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        fail(f"{path} is damaged ({first_line(e)}); {advice}")


def wait_until(ready, state, patience, what):
    """Polls ready(), saying so every 30 s; gives up when state() has not changed for `patience` seconds."""
    start = changed = said = time.monotonic()
    before = None
    while not ready():
        now, (last, before) = time.monotonic(), (before, state())
        changed = now if before != last else changed
        if now - changed > patience:
            fail(f"nothing has moved for {patience:g} s while waiting for {what}; is that still running?")
        if now - said >= 30:
            print(f"waiting for {what} ({now - start:.0f} s)", flush=True)
            said = now
        time.sleep(min(1.0, patience / 4))


def first_line(error):
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


# ---- documents


def parquet_texts(path, skipped):
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as e:
        fail(f"{path} is not a readable parquet file ({first_line(e)}); delete it or fetch it again")
    if file.schema_arrow.get_field_index("text") < 0:
        fail(f"{path} has no column 'text', only: {', '.join(file.schema_arrow.names)}")
    if (kind := file.schema_arrow.field("text").type) not in (pa.string(), pa.large_string()):
        fail(f"{path}: column 'text' holds {kind}, not strings")
    for group in range(file.num_row_groups):
        try:
            for batch in file.iter_batches(1024, [group], ["text"], use_threads=False):
                try:
                    docs = batch.column(0).to_pylist()
                except UnicodeDecodeError:
                    raw = batch.column(0).cast(pa.large_binary()).to_pylist()
                    docs = [doc and doc.decode("utf-8", "surrogateescape") for doc in raw]
                yield from docs
        except (pa.ArrowException, OSError) as e:
            print(f"skipped: {path}, row group {group}: {first_line(e)}", file=sys.stderr)
            skipped["unreadable row group"] += 1


def jsonl_texts(path, skipped):
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            line = line.removeprefix(b"\xef\xbb\xbf").strip()
            try:
                text = json.loads(line.decode("utf-8", "surrogateescape"))["text"] if line else None
                if not isinstance(text, str | None):
                    raise TypeError(f"'text' is {type(text).__name__}, not a string")
                yield text
            except (ValueError, TypeError, KeyError, RecursionError) as e:
                if not skipped["line without JSON text"]:
                    print(f"skipped: {path}, line {number}: {first_line(e)} (more are counted)", file=sys.stderr)
                skipped["line without JSON text"] += 1


def txt_texts(path, skipped):
    """A .txt file of any size: a document ends at the first blank line after TXT_DOC characters, or at 4 × TXT_DOC."""
    lines, size = [], 0
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as f:
        while line := f.readline(4 * TXT_DOC):
            lines.append(line)
            size += len(line)
            if size >= TXT_DOC and (line.isspace() or size >= 4 * TXT_DOC):
                yield "".join(lines)
                lines, size = [], 0
    if lines:
        yield "".join(lines)


READERS = {".parquet": parquet_texts, ".jsonl": jsonl_texts, ".txt": txt_texts}


def texts(paths, split, holdout, skipped):
    """(text, its UTF-8 bytes) of each document of the files; bytes that are not UTF-8 and lone surrogates become
    U+FFFD. With a hold-out of 1 in N, a document is "val" if its content hash is 0 modulo N: copies stay together."""
    for path in paths:
        for text in READERS[path.suffix](path, skipped):
            if not text or text.isspace():
                skipped["empty document"] += 1
                continue
            try:
                raw = text.encode()
            except UnicodeEncodeError:
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # as tiktoken does it
                raw = text.encode()
                skipped["bad characters replaced"] += 1  # not skipped, but counted
            bucket = holdout and int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") % holdout
            if not holdout or (bucket == 0) == (split == "val"):
                yield text, raw


def find_sources(data, val_file=None):
    """-> (train units, validation unit, holdout). A unit is (name, [files]) and becomes one shard: a .parquet or .jsonl
    file, or .txt files up to 64 MB. Validation is val_file, else the last of at least two .parquet or .jsonl files;
    other folders are divided by document: holdout is N > 0."""
    root = Path(data)
    files = {p.relative_to(root).as_posix(): p for p in sorted(root.rglob("*")) if p.suffix in READERS and p.is_file()}
    files = {name: path for name, path in files.items() if "/." not in f"/{name}"}
    if not files:
        fail(f"no .parquet, .jsonl or .txt file in {data}")
    if val_file is None and len(tables := [name for name in files if not name.endswith(".txt")]) > 1:
        val_file = tables[-1]
    if val_file is not None and (val_file not in files or len(files) == 1):
        fail(f"--val-file {val_file}: must be one of at least two files in {data} ({', '.join(list(files)[:3])}, …)")
    units, room = [], 0
    for name, path in files.items():
        size = path.stat().st_size
        if name == val_file:
            continue
        if path.suffix == ".txt" and size <= room:
            units[-1][1].append(path)
            room -= size
        else:
            units.append((name, [path]))
            room = (64 << 20) - size if path.suffix == ".txt" else 0
    if val_file:
        return units, (val_file, [files[val_file]]), 0
    total = sum(p.stat().st_size for p in files.values())
    holdout = 10 if total < 20e6 else 100 if total < 1e9 else 1000  # 0.2 to 10 MB of validation text, mostly
    return units, (f"1 document in {holdout} by content hash", list(files.values())), holdout


def stdlib_files():
    """(relative name, path) of the running interpreter's library modules; tests and generated tables left out."""
    import sysconfig

    root = Path(sysconfig.get_paths()["stdlib"])
    out = {"test", "tests", "idle_test", "lib2to3", "_bundled", "site-packages", "dist-packages"}
    out |= {"encodings", "pydoc_data"}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not out & set(relative.parts) and not path.name.startswith(("_sysconfigdata", "entities.py")):
            yield relative.as_posix(), path


def build_stdlib(args):
    """The offline corpus in FineWeb-Edu's form: one document a module, in the order of the hashes of their names; four
    training shards and, last, the validation shard of one module in 16."""
    import tokenize

    import pyarrow as pa
    import pyarrow.parquet as pq

    docs = {}
    for name, path in stdlib_files():
        with contextlib.suppress(SyntaxError, UnicodeDecodeError), tokenize.open(path) as f:  # reads the coding line
            docs[name] = f.read()
    names = sorted((n for n in docs if docs[n].strip()), key=lambda n: hashlib.sha256(n.encode()).digest())
    if len(names) < 100:
        fail(f"only {len(names)} modules of the standard library are here as source; use a folder of text instead")
    cut = len(names) // 16
    with sole_writer(args.out):
        if foreign := {p.name for p in Path(args.out).glob("*.parquet")} - {f"shard_{i:05d}.parquet" for i in range(5)}:
            fail(f"{args.out} holds another corpus ({min(foreign)}); choose another --out")
        for i, shard in enumerate([*(names[cut + k :: 4] for k in range(4)), names[:cut]]):
            table, sink = pa.table({"text": [docs[name] for name in shard]}), pa.BufferOutputStream()
            pq.write_table(table, sink, row_group_size=256, compression="zstd", write_page_checksum=True)
            write_atomic(Path(args.out) / f"shard_{i:05d}.parquet", sink.getvalue())
    size = sum(len(docs[name].encode()) for name in names)
    print(f"{args.out}: {len(names)} modules, {size / 1e6:.1f} MB, in 5 shards; the last is for validation")


# ---- packing


def piece_lengths(n, row, mode):
    """A document of n tokens, BOS included, as the packer gets it: whole, cut to a row, or split into full rows and a
    rest, each with its own BOS."""
    if n <= row or mode == "crop":
        return [n]
    full, rest = divmod(n - 1, row - 1)
    return [row] if mode == "own-row" else [row] * full + [rest + 1] * (rest > 0)


def best_fit(lengths, row, buffer=BUFFER):
    """Yields each row as [(document number, its length, tokens taken), …]; the last may be incomplete. Documents wait
    in queues by length; bit n of `mask` says that queue n is not empty: the longest that fits is one bit_length()."""
    numbered, queues = enumerate(lengths), [deque() for _ in range(row + 1)]
    longer, mask, held = [], 0, 0  # `longer`: heap of the documents longer than a row
    while True:
        plan, room = [], row
        while room:
            while held < buffer and (document := next(numbered, None)):
                number, n = document
                held += 1
                if n > row:
                    heapq.heappush(longer, (n, number))
                else:
                    queues[n].append(number)
                    mask |= 1 << n
            if not held:
                break
            if mask:
                fits = mask & ((2 << room) - 1)
                n = (fits or mask & -mask).bit_length() - 1  # the longest that fits, else the shortest
                number = queues[n].popleft()
                mask ^= (not queues[n]) << n
            else:
                n, number = heapq.heappop(longer)
            plan.append((number, n, min(n, room)))
            room -= min(n, room)
            held -= 1
        if plan:
            yield plan
        if room:
            return


def cropped_tokens(lengths, row, mode):
    """Tokens that packing documents of these lengths throws away, the incomplete last row apart."""
    pieces = [piece for n in lengths for piece in piece_lengths(n, row, mode)]
    lost = sum(max(0, n - row) for n in lengths) if mode == "own-row" else 0
    return lost + sum(n - taken for plan in best_fit(pieces, row) for _, n, taken in plan)


def npy_header(rows, row):
    """The head of a .npy file (format 1.0) of uint16 rows: 128 bytes for any number, so that it can be written last."""
    text = f"{{'descr': '<u2', 'fortran_order': False, 'shape': ({rows}, {row}), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + f"{text:<117}\n".encode()


def pack_shard(job):
    """One unit of source files -> one .npy of rows; returns its entry in the manifest. Runs in a worker process."""
    from tokenizer_train import BOS, encode, load_tokenizer

    enc, row, paths = load_tokenizer(job["tokenizer"]), job["seq_len"] + 1, job["paths"]
    bos, skipped, held, lengths, count = enc.encode_single_token(BOS), Counter(), {}, [], Counter()

    def pieces():
        for text, raw in texts(paths, job["split"], job["holdout"], skipped):
            ids, start = np.array(encode(enc, text), np.uint16), 0
            lengths.append(len(ids) + 1)
            count["bytes"] += len(raw)
            for n in piece_lengths(len(ids) + 1, row, job["long_docs"]):
                held[count["pieces"]] = np.append(np.uint16(bos), ids[start : start + min(n, row) - 1])
                start += n - 1
                count["pieces"] += 1
                yield n

    def write(f):
        f.write(npy_header(0, row))
        for plan in best_fit(pieces(), row):
            tokens = np.concatenate([held.pop(number)[:taken] for number, _, taken in plan])
            if len(tokens) < row:
                count["dropped_tokens"] = len(tokens)
                break
            f.write(tokens)
            count["rows"] += 1
            if count["rows"] == job["max_rows"]:
                break
        f.seek(0)
        f.write(npy_header(count["rows"], row))

    path = Path(job["out"]) / job["file"]
    source = {"source_bytes": sum(p.stat().st_size for p in paths), "source_stamp": stamp(paths)}
    write_atomic(path, write)
    return {key: job[key] for key in ("file", "source", "max_rows")} | source | {
        "source_sha256": file_hash(*paths),
        "sha256": file_hash(path),
        **{key: count[key] for key in ("rows", "bytes", "dropped_tokens")},
        "documents": len(lengths),
        "document_tokens": sum(lengths),
        "cropped": {mode: cropped_tokens(lengths, row, mode) for mode in LONG_DOCS},
        "skipped": {reason: n for reason, n in skipped.items() if n},
    }


def stamp(paths):
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()


def still_good(entry, job):
    """Is the shard of an earlier run whole on disk, and what this job would write? The same source by its stamp (names,
    sizes, times), else by its content; a source that was deleted since is trusted."""
    path, paths, limit = Path(job["out"]) / job["file"], job["paths"], job["max_rows"]
    whole = path.exists() and path.stat().st_size == 128 + entry["rows"] * (job["seq_len"] + 1) * 2
    if not whole or entry["source"] != job["source"]:
        return False
    if entry["max_rows"] != limit and (entry["rows"] == entry["max_rows"] or 0 < limit < entry["rows"]):
        return False  # --max-tokens cut it short, or would
    missing = not all(p.exists() for p in paths)
    return missing or entry["source_stamp"] == stamp(paths) or entry["source_sha256"] == file_hash(*paths)


def read_manifest(folder):
    return read_checked(Path(folder) / "manifest.json", f"delete {folder} and pack again")


def save_manifest(folder, settings, val, train, statistics=None):
    """Totals are sums over the shards, so the manifest is right after every one; statistics come when all is packed."""
    total = Counter()
    for entry in train:
        total.update({key: entry[key] for key in ("documents", "document_tokens", "bytes", "dropped_tokens")})
        total.update(entry["cropped"])
        total["tokens"] += entry["rows"] * settings["seq_len"]
    fractions = {mode: total[mode] / max(1, total["document_tokens"]) for mode in LONG_DOCS}
    counted = [*train, val] if val and not settings["holdout"] else train  # a hold-out reads the training files again
    manifest = settings | {
        "train": train,
        "val": val,
        **{key: total[key] for key in ("tokens", "documents", "document_tokens", "bytes", "dropped_tokens")},
        "cropped_tokens": total[settings["long_docs"]],
        "cropped_fraction": fractions[settings["long_docs"]],
        "cropped_fraction_by_mode": fractions,
        "skipped": dict(sum((Counter(entry["skipped"]) for entry in counted), Counter())),
        **(statistics or {"unigram_entropy": None, "val_bytes_per_token": None}),
        "complete": statistics is not None,
    }
    write_checked(Path(folder) / "manifest.json", manifest)
    return manifest


def text_statistics(folder, val, train, sizes):
    """Nats per validation target under the unigram law of the training tokens (+1 smoothed; 100M suffice), the line any
    model must beat; and the UTF-8 bytes one target stands for: bits per byte = nats / ln 2 / bytes. sizes: by token."""

    def counts(entry):
        rows = np.load(Path(folder) / entry["file"], mmap_mode="r")
        blocks = (rows[i : i + 4096, 1:].ravel() for i in range(0, len(rows), 4096))
        return sum(np.bincount(block, minlength=len(sizes)) for block in blocks)

    seen, law, targets = 0, np.ones(len(sizes)), counts(val)
    for entry in train:
        if entry["rows"] and seen < 100e6:
            law, seen = law + (new := counts(entry)), seen + new.sum()
    nats = -(targets * np.log(law / law.sum())).sum() / targets.sum()
    return {"unigram_entropy": float(nats), "val_bytes_per_token": float(targets @ sizes / targets.sum())}


def exit_with_parent(parent):
    """Worker set-up: a worker whose parent was killed ends too, instead of waiting for work for ever."""

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_jobs(jobs, good, workers, patience):
    """Yields the manifest entry of each job in order: that of an earlier run, else its shard is packed now, `workers`
    at a time. A source not there yet is waited for while any download into its folder grows."""
    todo, running = deque(jobs), deque()
    context, parent = multiprocessing.get_context("spawn"), (os.getpid(),)  # fork and pyarrow's threads do not mix
    pool = ProcessPoolExecutor(workers, context, exit_with_parent, parent) if workers > 1 else None
    try:
        while todo or running:
            while todo and len(running) < 2 * workers:
                job, missing = todo[0], [p for p in todo[0]["paths"] if not p.exists()]
                if missing and job["file"] not in good:
                    break
                future = pool.submit(pack_shard, job) if pool and job["file"] not in good else None
                running.append((todo.popleft(), future))
            if running:
                job, future = running.popleft()
                yield good.get(job["file"]) or (future.result() if future else pack_shard(job))
            else:
                parts = missing[0].parent.glob
                source = f"{missing[0]} from a download"
                wait_until(missing[0].exists, lambda: [p.stat().st_size for p in parts("*.part")], patience, source)
    finally:
        if pool:
            pool.shutdown(wait=True, cancel_futures=True)


def plan_jobs(args):
    """-> (settings that all shards share, jobs). The validation shard comes first: training needs it from the start."""
    from tokenizer_train import BOS, load_tokenizer, tokenizer_hash

    enc = load_tokenizer(args.tokenizer)
    if enc.n_vocab > 65_536:
        fail(f"{args.tokenizer} has {enc.n_vocab} entries; ids are stored in 16 bits, so at most 65536")
    if args.stream:
        names, holdout = shard_names(args.stream), 0
        val_unit, *units = [(name, [Path(args.data) / name]) for name in names]
    else:
        units, val_unit, holdout = find_sources(args.data, args.val_file)
    settings = {"version": 1, "seq_len": args.seq_len, "vocab_size": enc.n_vocab}
    settings |= {"tokenizer_sha256": tokenizer_hash(args.tokenizer), "bos_id": enc.encode_single_token(BOS)}
    settings |= {"shuffle": "shard" if args.stream else "all", "long_docs": args.long_docs, "holdout": holdout}
    settings["expected"] = [name for name, _ in units]
    common = settings | {"out": args.out, "tokenizer": args.tokenizer}
    jobs = [common | {"file": "val.npy", "split": "val", "source": val_unit[0], "paths": val_unit[1], "max_rows": 0}]
    for i, (source, paths) in enumerate(units):
        job = {"file": f"shard_{i:05d}.npy", "split": "train", "source": source, "paths": paths}
        jobs.append(common | job | {"max_rows": -(-args.max_tokens // args.seq_len)})
    return settings, jobs


def earlier_shards(out, settings, jobs):
    """The manifest entries of an earlier run that are still good, by file. Other settings are refused; what is not good
    is said, no longer listed, and removed."""
    old = read_manifest(out)
    entries = {entry["file"]: entry for entry in [old["val"], *old["train"]] if entry} if old else {}
    if changed := [key for key in settings if old and key != "expected" and old.get(key) != settings[key]]:
        was = ", ".join(f"{key} {old.get(key)} (now {settings[key]})" for key in changed)
        fail(f"{out} was packed with {was}; delete it or choose another --out")
    good = {j["file"]: entries[j["file"]] for j in jobs if j["file"] in entries and still_good(entries[j["file"]], j)}
    if stale := sorted(entries.keys() - good.keys()):
        print(f"packed again, as the source has changed or the file is damaged: {', '.join(stale)}")
    if stale or not old:
        first = itertools.takewhile(bool, (good.get(job["file"]) for job in jobs[1:]))
        save_manifest(out, settings, good.get("val.npy"), list(first))
    for junk in {*out.glob(".*.tmp"), *out.glob("shard_?????.npy")} - {out / file for file in good}:
        junk.unlink()
    return good


def pack(args):
    """Packs what is new, in order. The manifest is replaced after each shard: killed, only those begun are lost."""
    from tokenizer_train import load_tokenizer, token_bytes

    (settings, jobs), out = plan_jobs(args), Path(args.out)
    with sole_writer(out):
        good = earlier_shards(out, settings, jobs)
        val, train, new, start = None, [], Counter(), time.time()
        workers = max(1, min(args.workers, len(jobs) - len(good)))
        for entry in run_jobs(jobs, good, workers, args.patience):
            val, train = (val, [*train, entry]) if val else (entry, train)
            if entry["file"] not in good:
                new.update(shards=1, tokens=entry["document_tokens"])
                save_manifest(out, settings, val, train)
                print(f"{entry['file']}: {entry['rows']:,} rows from {entry['source']}", flush=True)
            if 0 < jobs[-1]["max_rows"] <= sum(entry["rows"] for entry in train):
                break
        for part, entries in ("validation", [val]), ("training", train):
            if not any(entry["rows"] for entry in entries):
                tokens = sum(entry["document_tokens"] for entry in entries)
                fail(f"too little {part} text in {args.data}: {tokens} tokens, and one row takes {args.seq_len + 1}")
        sizes = token_bytes(load_tokenizer(args.tokenizer))
        manifest = save_manifest(out, settings, val, train, text_statistics(out, val, train, sizes))
    print_packing(out, manifest, new, time.time() - start)


def print_packing(out, manifest, new, seconds):
    m = argparse.Namespace(**manifest)
    speed = f"{new['shards']} new shards, {new['tokens'] / seconds / 1e6:.2f}M tokens/s" if new else "nothing new"
    print(f"{out}: {m.documents:,} documents, {m.document_tokens:,} tokens, {m.tokens:,} in full rows; {speed}")
    modes = [f"{mode} {x:.1%}" + " (used)" * (mode == m.long_docs) for mode, x in m.cropped_fraction_by_mode.items()]
    print(f"cropped: {', '.join(modes)}; {m.dropped_tokens:,} tokens in incomplete last rows", end="")
    print(f"; skipped: {', '.join(f'{n} × {reason}' for reason, n in m.skipped.items()) or 'nothing'}")
    print(f"validation: unigram entropy {m.unigram_entropy:.3f} nats, {m.val_bytes_per_token:.3f} bytes per token")


# ---- the training stream


def permute(index, n, key):
    """Where a keyed permutation of 0…n-1 sends the given indices: a Feistel network on the next power of two (it is
    one-to-one: each half is altered by a function of the other), applied until the image is below n, under twice on
    average."""
    high_bits, low_bits = (n - 1).bit_length() // 2, ((n - 1).bit_length() + 1) // 2
    high_mask, low_mask, shift = (np.uint64(x) for x in ((1 << high_bits) - 1, (1 << low_bits) - 1, low_bits))
    keys = np.frombuffer(hashlib.blake2b(key.encode()).digest(), "<u8")  # 8 rounds

    def mix(x, k):  # the finaliser of SplitMix64
        x = (x + k) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    out = np.array(index, np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        high, low = out[walking] >> shift, out[walking] & low_mask
        for k1, k2 in keys.reshape(-1, 2):
            high ^= mix(low, k1) & high_mask
            low ^= mix(high, k2) & low_mask
        out[walking] = high << shift | low
        walking = walking[out[walking] >= n]
    return out.astype(np.int64)


class PackedData:
    """A folder written by pack, memory-mapped: rows by id, and the seeded order in which training visits them."""

    def __init__(self, folder, wait_s=1800.0):
        """wait_s: seconds that a stream still being packed may stand still before the program gives up."""
        self.folder, self.wait_s, self.maps = Path(folder), wait_s, {}
        self._read()
        if self.manifest["shuffle"] == "all" and not self.manifest["complete"]:
            fail(f"packing of {folder} is not finished; run the same python dataloader.py pack command again")
        self._wait(lambda: self.rows("val") and self.rows("train"), "validation rows and the first shard")

    def _read(self):
        """Reads the manifest and maps the shards not seen yet, each checked against it."""
        self.manifest = m = read_manifest(self.folder)
        if m is None:
            fail(f"no manifest.json in {self.folder}; make it with python dataloader.py pack … --out {self.folder}")
        self.seq_len = m["seq_len"]
        self.files = {"train": m["train"], "val": [m["val"]] if m["val"] else []}
        self.edges = {split: np.cumsum([0] + [entry["rows"] for entry in self.files[split]]) for split in self.files}
        for entry in self.files["val"] + self.files["train"]:
            if entry["rows"] and entry["file"] not in self.maps:
                path, shape = self.folder / entry["file"], (entry["rows"], self.seq_len + 1)
                with contextlib.suppress(FileNotFoundError), open(path, "rb") as f:
                    head, size = f.read(128), os.fstat(f.fileno()).st_size
                    if head == npy_header(*shape) and size == 128 + 2 * shape[0] * shape[1]:
                        self.maps[entry["file"]] = np.memmap(f, "<u2", "r", 128, shape)
                if entry["file"] not in self.maps:
                    fail(f"{path} is damaged or missing (the manifest says {shape[0]} × {shape[1]}); run pack again")

    def _wait(self, ready, what):
        def done():
            if ready() or self.manifest["complete"]:
                return True
            self._read()

        wait_until(done, lambda: self.rows("train"), self.wait_s, f"data: {what} from pack --stream to {self.folder}")

    def rows(self, split):
        return int(self.edges[split][-1])

    def get(self, split, ids):
        """Rows by id: (n, seq_len + 1) int64."""
        ids, edges = np.asarray(ids, np.int64), self.edges[split]
        shards = np.searchsorted(edges, ids, "right") - 1
        out = np.empty((len(ids), self.seq_len + 1), np.int64)
        for s in np.unique(shards):
            file = self.files[split][s]["file"]
            out[shards == s] = rows = self.maps[file][ids[shards == s] - edges[s]]
            if rows.max() >= self.manifest["vocab_size"] or (rows[:, 0] != self.manifest["bos_id"]).any():
                fail(f"{self.folder / file} is damaged (no BOS, or unknown ids, in a row); delete it and pack again")
        return out

    def stream_ids(self, seed, start, count):
        """Row ids of the training sequences start … start + count - 1. An epoch visits every row once: in one seeded
        order of all rows, or, for a stream, shard after shard, each in its own order. Waits for rows not packed yet."""
        out, done = np.empty(count, np.int64), 0
        while done < count:
            self._wait(lambda i=start + done: i < self.rows("train"), f"row {start + done:,}")
            epoch, index = divmod(start + done, self.rows("train"))
            edges = self.edges["train"] if self.manifest["shuffle"] == "shard" else self.edges["train"][[0, -1]]
            block = int(np.searchsorted(edges, index, "right")) - 1
            first, last = int(edges[block]), int(edges[block + 1])
            n = min(count - done, last - index)
            order = permute(np.arange(index - first, index - first + n), last - first, f"{seed} {epoch} {block}")
            out[done : done + n] = first + order
            done += n
        return out

    def sha256(self):
        """Names the data of a run: tokenizer, packing, rows (of a stream: validation and first shard)."""
        m = self.manifest
        entries = [m["val"], *(m["train"][:1] if m["shuffle"] == "shard" else m["train"])]
        content = [m["tokenizer_sha256"], m["seq_len"], m["long_docs"], *(entry["sha256"] for entry in entries)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


# ---- download


def shard_names(spec):
    """"N" (shards 0…N-1) or "A-B" -> file names, the validation shard first."""
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", spec)
    a, b = (0, 0) if not match else (int(match[1]), int(match[2])) if match[2] else (0, int(match[1]) - 1)
    if not match or not a <= b < VAL_SHARD:
        fail(f"shards {spec}: give N (1 to {VAL_SHARD}) or A-B, up to {VAL_SHARD - 1}; validation is added")
    return [f"shard_{i:05d}.parquet" for i in (VAL_SHARD, *range(a, b + 1))]


def whole_parquet(path):
    """Does the file end like a parquet file, and can its metadata be read?"""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return "text" in pq.ParquetFile(path).schema_arrow.names
    except (pa.ArrowException, OSError):
        return False


def request(method, url, **headers):
    """One HTTP request; HF_TOKEN goes into the header, and requests drops it when redirected to another host."""
    import requests

    headers |= {"Accept-Encoding": "identity"}
    if token := os.environ.get("HF_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    response = requests.request(method, url, headers=headers, allow_redirects=True, timeout=(10, 60), stream=True)
    response.raise_for_status()
    return response


def persistently(action):
    """action() with retries after a dropped connection, 429, 5xx, damaged content: (result, None) or (None, reason)."""
    import requests

    for attempt in range(ATTEMPTS):
        wait = BACK_OFF * 2**attempt
        try:
            return action(), None
        except requests.HTTPError as e:
            reason, status = f"HTTP {e.response.status_code}", e.response.status_code
            if status not in (408, 416, 429) and status < 500:
                break
            after = e.response.headers.get("Retry-After", "")
            wait = max(wait, min(60, int(after))) if after.isdecimal() else wait
        except (requests.RequestException, ValueError) as e:
            reason = first_line(e)
        except OSError as e:  # ours, not the network's: full disk, no permission
            reason = first_line(e)
            break
        if attempt + 1 < ATTEMPTS:
            time.sleep(wait)
    return None, reason


def remote_size(url):
    """-> (bytes, sha256 or None) as the host states them; Hugging Face does so before it redirects."""
    with request("HEAD", url) as response:
        headers = [r.headers for r in (*response.history, response)]
    size = [h["X-Linked-Size"] for h in headers if "X-Linked-Size" in h] or [headers[-1].get("Content-Length", "")]
    tags = [h.get(key, "").removeprefix("W/").strip('"') for h in headers for key in ("X-Linked-Etag", "ETag")]
    if not size[0].isdecimal():
        raise ValueError("the host does not state the size")
    return int(size[0]), next((tag for tag in tags if re.fullmatch("[0-9a-f]{64}", tag)), None)


def fetch(url, path, size, sha):
    """One attempt: continues the .part file, checks it, and only then gives it its name."""
    part = path.with_name(path.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    if have < size:
        with request("GET", url, **({"Range": f"bytes={have}-"} if have else {})) as response:
            resumed = response.status_code == 206 and f" {have}-" in response.headers.get("Content-Range", "")
            with open(part, "ab" if resumed else "wb") as f:
                for block in response.iter_content(1 << 20):
                    f.write(block)
    if (have := part.stat().st_size) < size:
        raise ValueError(f"{have:,} of {size:,} bytes came")
    if have > size or not whole_parquet(part) or (sha and file_hash(part) != sha):
        part.unlink()
        raise ValueError("what came is damaged" if have == size else f"{have:,} bytes came instead of {size:,}")
    os.replace(part, path)


def download(args):
    """Fetches what is missing, the validation shard first. Needs no network when nothing is."""
    base = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')}/datasets/{REPO}/resolve/main/"
    out, names = Path(args.out), shard_names(args.shards)
    with sole_writer(out), ThreadPoolExecutor(args.workers) as pool:
        todo = [name for name in names if not (out / name).exists() or not whole_parquet(out / name)]
        if not todo:
            return print(f"{out}: all {len(names)} shards are here")
        first = persistently(lambda: remote_size(base + todo[0]))  # an unreachable host is met once, not by each shard
        rest = todo[1:] if first[0] else []
        stated = [first, *pool.map(lambda name: persistently(lambda: remote_size(base + name)), rest)]
        sizes = {name: size for name, (size, _) in zip(todo, stated) if size}
        missing = {name: reason for name, (_, reason) in itertools.zip_longest(todo, stated, fillvalue=first) if reason}
        parts = sum((out / f"{name}.part").stat().st_size for name in sizes if (out / f"{name}.part").exists())
        need, free = sum(size for size, _ in sizes.values()) - parts, shutil.disk_usage(out).free
        print(f"{out}: {len(sizes)} shards to fetch, {need / 1e9:.3f} GB; {free / 1e9:.3f} GB are free", flush=True)
        if need > free:
            fail(f"{need / 1e9:.3f} GB do not fit into {out} ({free / 1e9:.3f} GB free); ask for fewer shards")

        def get(name):
            _, reason = persistently(lambda: fetch(base + name, out / name, *sizes[name]))
            print(f"{name}: {reason or f'{sizes[name][0] / 1e6:.1f} MB'}", flush=True)
            return reason

        order = list(sizes)
        reasons = [get(name) for name in order[:1]] + list(pool.map(get, order[1:]))
        missing |= {name: reason for name, reason in zip(order, reasons) if reason}
    if missing:
        listing = ", ".join(f"{name} ({reason})" for name, reason in missing.items())
        fail(f"missing: {listing}; run the same command again, it continues")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="stdlib|download|pack")
    p = commands.add_parser("stdlib", help="write this Python's standard library as a corpus")
    p.add_argument("--out", required=True, help="folder for the parquet shards")
    p.set_defaults(run=build_stdlib)
    p = commands.add_parser("download", help=f"fetch shards of {REPO}")
    p.add_argument("--out", required=True, help="folder for the parquet shards")
    p.add_argument("--shards", required=True, help="N for shards 0 to N-1, or A-B; about 90 MB and 55M tokens each")
    p.add_argument("--workers", type=positive, default=4, help="downloads at a time (default: 4)")
    p.set_defaults(run=download)
    p = commands.add_parser("pack", help="tokenize and pack a folder of text")
    p.add_argument("--data", required=True, help="folder of .parquet (column text), .jsonl (key text) or .txt files")
    p.add_argument("--tokenizer", required=True, help="tokenizer file")
    p.add_argument("--seq-len", type=positive, required=True, help="tokens predicted per row; a row holds one more")
    p.add_argument("--out", required=True, help="folder for the rows and the manifest")
    p.add_argument("--long-docs", choices=LONG_DOCS, default="crop", help="documents longer than a row (default: crop)")
    p.add_argument("--max-tokens", type=positive, default=0, help="stop after so many training tokens (default: all)")
    p.add_argument("--val-file", help="file held out as validation (default: the last .parquet or .jsonl)")
    p.add_argument("--workers", type=positive, default=os.cpu_count(), help="processes (default: one per core)")
    p.add_argument("--stream", metavar="SHARDS", help="follow a download of these shards: pack each when it has come")
    p.add_argument("--patience", type=positive, default=1800, help="seconds without progress until --stream gives up")
    p.set_defaults(run=pack)
    args = parser.parse_args(argv)
    args.run(args)


def positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


if __name__ == "__main__":
    run_cli(main)
