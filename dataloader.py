"""Text in, rows of tokens out: packing, and the stream of training sequences. The documents come
from looped/corpus.py.

    python dataloader.py stdlib --out data/stdlib                      # this Python's own library
    python dataloader.py download --out data/fineweb-edu --shards 240  # FineWeb-Edu
    python dataloader.py pack --texts data/stdlib --tokenizer data/tokenizer.json --seq-len 256 \\
        --out data/packed

Packing (BestFit-Crop, arXiv 2404.10830): a row is seq_len + 1 tokens; each document follows a BOS,
so every row begins with one. Of a buffer of 1,000 documents the longest that still fits is placed;
when none fits, the shortest is cropped to fill the row. No padding. The stream of training
sequences is a pure function of (packed data, seed, index), a keyed permutation worked out by
arithmetic: it is the same for any number of ranks, and to resume takes only the index.
"""

import hashlib
import json
import os
import signal
import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, islice, takewhile
from pathlib import Path

import numpy as np

from looped import corpus
from looped.console import Parser, fail, number, outside, positive_int, run_cli, wait_until
from looped.files import (
    file_hash,
    lock,
    npy_header,
    read_checked,
    write_atomic,
    write_checked,
)
from looped.hashes import permute
from looped.tokenizer import BOS, encode_array, load_tokenizer
from looped.unigram import unigram_entropy
from looped.workers import worker_pool

VAL_FILE = "val.npy"  # the validation shard
BUFFER = 1000  # documents the packer chooses from
PATIENCE = 1800.0  # seconds that a download or a packing in progress may stand still


# ---- packing


@dataclass
class Settings:
    """What all shards of a folder share; stands at the head of its manifest."""

    version: int
    seq_len: int
    vocab_size: int
    tokenizer_sha256: str
    bos_id: int
    shuffle: str  # "all": one order of all rows; "shard": shard after shard, for a stream
    long_docs: str  # "crop", or "split" a document longer than a row into rows
    holdout: int  # N: one document in N of the files is for validation; 0: files are


def pieces(ids, settings):
    """A document's tokens as the packer takes them, each piece after a BOS: whole, or split into
    rows and a rest.
    """
    size = settings.seq_len if settings.long_docs == "split" else len(ids)
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        yield np.concatenate(([settings.bos_id], part), dtype=np.uint16, casting="unsafe")


def best_fit(documents, row):
    """Arrays of ids -> yields each row as an array of tokens; the last may be incomplete."""
    numbered = enumerate(documents)
    waiting = []  # (length, number, tokens), sorted
    parts = []
    room = row
    while True:
        for i, tokens in islice(numbered, BUFFER - len(waiting)):
            length = len(tokens)
            if length > row:
                tokens = tokens[:row].copy()  # more of it is never used
            insort(waiting, (length, i, tokens))
        if not waiting:
            break
        count = bisect_left(waiting, (room + 1,))  # how many fit; if none, the shortest is cropped
        longest = waiting[count - 1][0] if count else 0
        first = bisect_left(waiting, (longest,))  # of the longest that fit
        tokens = waiting.pop(first)[2][:room]
        parts.append(tokens)
        room -= len(tokens)
        if not room:
            yield np.concatenate(parts)
            parts = []
            room = row
    if parts:
        yield np.concatenate(parts)


def pack_shard(folder, file, unit, settings):
    """A Unit's documents -> a .npy file of rows in the folder, and its entry in the manifest."""
    enc = load_tokenizer(folder / "tokenizer.json")
    row = settings.seq_len + 1
    split = "val" if file == VAL_FILE else "train"
    counts = Counter()
    rows = 0

    def documents():
        for text in corpus.texts(unit.paths, split, settings.holdout, counts):
            counts["documents"] += 1
            counts["bytes"] += len(text.encode())
            for piece in pieces(encode_array(enc, text), settings):
                counts["tokens"] += len(piece)
                yield piece

    def write(out):
        nonlocal rows
        out.write(npy_header(0, row))
        for tokens in best_fit(documents(), row):
            if len(tokens) < row:
                counts["tokens of an incomplete last row"] = len(tokens)
                break
            out.write(tokens)
            rows += 1
        out.seek(0)
        out.write(npy_header(rows, row))

    path = folder / file
    write_atomic(path, write)
    left = counts["tokens of an incomplete last row"]
    counts["cropped tokens"] = counts["tokens"] - left - rows * row
    return {
        "file": file,
        "source": unit.name,
        "source_sha256": file_hash(*unit.paths),
        "rows": rows,
        "sha256": file_hash(path),
        # of documents, bytes and tokens (BOS included), of what was cropped or skipped
        "counts": dict(counts),
    }


def plan(args):
    """The Settings, and {file: Unit} of the shards that the flags ask for; validation first, which
    training needs at once.
    """
    enc = load_tokenizer(args.tokenizer)
    if enc.n_vocab > 65_536:
        limit = "ids are stored in 16 bits, so at most 65536"
        fail(f"{args.tokenizer} has {enc.n_vocab} entries; {limit}")
    if args.stream:
        sources = corpus.shard_sources(args.texts, args.stream)
    else:
        sources = corpus.find_sources(args.texts, args.val_file)
    settings = Settings(
        version=1,
        seq_len=args.seq_len,
        vocab_size=enc.n_vocab,
        tokenizer_sha256=file_hash(args.tokenizer),
        bos_id=enc.encode_single_token(BOS),
        shuffle="shard" if args.stream else "all",
        long_docs=args.long_docs,
        holdout=sources.holdout,
    )
    units = {VAL_FILE: sources.val}
    for i, unit in enumerate(sources.train):
        units[f"shard_{i:05d}.npy"] = unit
    return settings, units


def check_settings(folder, manifest, settings):
    """Refuses a folder that holds rows of other settings."""
    changed = []
    for name, new in asdict(settings).items():
        if manifest[name] != new:
            changed.append(f"{name} {manifest[name]} (now {new})")
    if changed:
        fail(f"{folder} was packed with {', '.join(changed)}; delete it or choose another --out")


def earlier_shards(folder, manifest, units, row):
    """{file: entry} of the shards that an earlier run has packed: whole on disk, and their sources
    unchanged or deleted since.
    """
    entries = {entry["file"]: entry for entry in [manifest["val"], *manifest["train"]] if entry}
    good = {}
    for file, unit in units.items():
        path = folder / file
        entry = entries.get(file)
        if not entry or entry["source"] != unit.name or not path.exists():
            continue
        if path.stat().st_size != 128 + 2 * entry["rows"] * row:
            continue
        deleted = not all(source.exists() for source in unit.paths)
        if deleted or entry["source_sha256"] == file_hash(*unit.paths):
            good[file] = entry
    return good


def save_manifest(folder, settings, entries, **more):
    """Lists the shards, validation first; more is there when all is packed."""
    manifest = asdict(settings)
    manifest["val"] = entries[0] if entries else None
    manifest["train"] = entries[1:]
    manifest["complete"] = bool(more)
    write_checked(folder / "manifest.json", manifest | more)


def pack_units(pool, workers, folder, units, settings):
    """Yields the manifest's entry of each shard in order. One is begun when its files are there and
    one of the workers is free.
    """
    waiting = deque(units.items())
    running = deque()

    def can_start():
        return all(path.exists() for path in waiting[0][1].paths)

    while waiting or running:
        if running and running[0].done():
            yield running.popleft().result()
            continue
        busy = sum(not future.done() for future in running)
        if waiting and busy < workers and can_start():
            # workers inherit the block, so that Ctrl-C reaches this process alone
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            file, unit = waiting.popleft()
            running.append(pool.submit(pack_shard, folder, file, unit, settings))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        elif running:
            time.sleep(0.01)
        else:
            wait_until(can_start, PATIENCE, f"{waiting[0][1].name} to come")


def refuse_foreign(out, files):
    """Refuses a folder that holds any of the files to be written, but of another making."""
    for file in files:
        if (out / file).exists():
            fail(
                f"{out} holds a {file} of another making and no manifest.json; "
                "move it or choose another --out"
            )


def pack(args):
    """Packs the missing shards, several at a time. If killed, it loses only those in progress."""
    out = Path(args.out)
    own = out / "tokenizer.json"
    if args.stream:  # none is taken away: a training may be using it
        known = read_checked(out / "manifest.json") or {"train": []}
        args.stream = max(args.stream, len(known["train"]))
    settings, units = plan(args)
    with lock(out):
        manifest = read_checked(out / "manifest.json")
        good = {}
        if manifest:
            with outside(f"{out}/manifest.json is damaged", "delete it and pack again"):
                check_settings(out, manifest, settings)
                good = earlier_shards(out, manifest, units, args.seq_len + 1)
        elif not own.exists() or file_hash(own) != settings.tokenizer_sha256:
            refuse_foreign(out, [own.name, *units])
        write_atomic(own, Path(args.tokenizer).read_bytes())  # the rows' copy
        missing = {file: unit for file, unit in units.items() if file not in good}

        def listed():
            """The shards up to the first that is missing: no file that is being replaced, and none
            out of order.
            """
            return [good[file] for file in takewhile(good.get, units)]

        if missing:
            save_manifest(out, settings, listed())
        with worker_pool(args.workers) as pool:
            for entry in pack_units(pool, args.workers, out, missing, settings):
                good[entry["file"]] = entry
                save_manifest(out, settings, listed())
                print(f"{entry['file']}: {entry['rows']:,} rows from {entry['source']}", flush=True)
        finish(out, settings, listed())


def finish(folder, settings, entries):
    """Completes the manifest and says what is in the folder."""
    val, *train = entries
    rows = 0
    counts = Counter()
    for entry in train:
        rows += entry["rows"]
        counts.update(entry.get("counts", {}))  # earlier versions wrote none
    for part, some in ("validation", val["rows"]), ("training", rows):
        if not some:
            fail(f"too little {part} text: not one row of {settings.seq_len + 1} tokens")
    tokens = rows * settings.seq_len
    nats = unigram_entropy(folder, entries, settings.vocab_size)
    save_manifest(folder, settings, entries, tokens=tokens, counts=counts, unigram_entropy=nats)
    print(f"{folder}: {tokens:,} training tokens in full rows; unigram entropy {nats:.3f} nats")
    cropped = counts["cropped tokens"] / max(1, counts["tokens"])
    advice = "; try --long-docs split" if cropped > 0.5 else ""
    print(f"training text: {', '.join(f'{n:,} {name}' for name, n in counts.items())}")
    print(f"{cropped:.1%} of the text was cropped{advice}")


# ---- the training stream


class PackedData:
    """A folder written by pack, memory-mapped: rows by id, and the seeded order in which training
    visits them.
    """

    def __init__(self, folder, wait_s=PATIENCE, check=(0, 0)):
        """wait_s: seconds that a stream still being packed may stand still before the program gives
        up. check = (i, n): verify the checksums of every n-th shard from the i-th on, not only of
        the validation rows.
        """
        self.folder = Path(folder)
        self.wait_s = wait_s
        self.caught: list = []  # signals, which end a wait
        self.check = check
        self.maps = {}  # by file: (rows, seq_len + 1) uint16
        with outside(f"{self.folder}/manifest.json is damaged", "delete it and pack again"):
            self._read()
            self._wait("val", 0)
            self._wait("train", 0)
            self.sha256()

    def _read(self):
        """Reads the manifest and maps the shards not seen yet."""
        m = read_checked(self.folder / "manifest.json")
        if m is None:
            make = f"python dataloader.py pack … --out {self.folder}"
            fail(f"no manifest.json in {self.folder}; make it with {make}")
        if m["shuffle"] == "all" and not m["complete"]:
            again = "run the same python dataloader.py pack command again"
            fail(f"packing of {self.folder} is not finished; {again}")
        self.manifest = m
        self.seq_len = m["seq_len"]
        self.files = {"val": [m["val"]] if m["val"] else [], "train": m["train"]}
        self.edges = {}
        for split, entries in self.files.items():
            self.edges[split] = [0, *accumulate(entry["rows"] for entry in entries)]
            for entry in entries:
                if entry["rows"] and entry["file"] not in self.maps:
                    self.maps[entry["file"]] = self._open(entry, split)

    def _open(self, entry, split):
        """Maps a shard, checked against the manifest."""
        path = self.folder / entry["file"]
        errors = (FileNotFoundError, ValueError)
        with outside(f"{path} is damaged or missing", "run pack again", errors):
            rows = np.lib.format.open_memmap(path, "r")
            if rows.shape != (entry["rows"], self.seq_len + 1) or rows.dtype != np.uint16:
                raise ValueError(f"it holds {rows.shape} {rows.dtype}")
        i, n = self.check
        checked = split == "val" or (n and len(self.maps) % n == i)
        if checked and file_hash(path) != entry["sha256"]:
            fail(f"{path} is damaged (its checksum does not hold); delete it and run pack again")
        return rows

    def _wait(self, split, i):
        """Until row i is there or all is packed; ends the program where no shard comes for wait_s
        seconds.
        """
        if i >= self.rows(split) and self.manifest["shuffle"] == "shard":
            self._read()  # a stream may have been lengthened
        while i >= self.rows(split) and not self.manifest["complete"]:
            what = f"data: row {i:,} for {split}, from pack --stream to {self.folder}"
            wait_until(partial(self._grown, len(self.maps)), self.wait_s, what, self.caught)

    def _grown(self, shards):
        self._read()
        return self.manifest["complete"] or len(self.maps) > shards

    def rows(self, split):
        return self.edges[split][-1]

    def get(self, split, ids):
        """Rows by id: (n, seq_len + 1) int64."""
        ids = np.asarray(ids, np.int64)
        edges = self.edges[split]
        shards = np.searchsorted(edges, ids, "right") - 1
        out = np.empty((len(ids), self.seq_len + 1), np.int64)
        for s in np.unique(shards):
            here = shards == s
            file = self.files[split][s]["file"]
            out[here] = self.maps[file][ids[here] - edges[s]]
        return out

    def stream_ids(self, seed, start, count):
        """Row ids of the training sequences start … start + count - 1. An epoch visits every row
        once: in one seeded order of all rows, or, for a stream, shard after shard, each in its own
        order. Waits for rows not packed yet.
        """
        ids = np.empty(count, np.int64)
        done = 0
        while done < count:
            number = start + done
            self._wait("train", number)
            total = self.rows("train")
            epoch, index = divmod(number, total)
            edges = self.edges["train"] if self.manifest["shuffle"] == "shard" else [0, total]
            block = bisect_right(edges, index) - 1
            first, last = edges[block : block + 2]
            n = min(count - done, last - index)
            within = np.arange(index - first, index - first + n)
            ids[done : done + n] = first + permute(within, last - first, f"{seed} {epoch} {block}")
            done += n
        return ids

    def sha256(self):
        """Names the data of a run: tokenizer, packing, rows (of a stream: validation and first
        shard).
        """
        m = self.manifest
        train = m["train"][:1] if m["shuffle"] == "shard" else m["train"]
        hashes = [entry["sha256"] for entry in (m["val"], *train)]
        content = [m["tokenizer_sha256"], m["seq_len"], m["long_docs"], *hashes]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def main(argv=None):
    shards = number(int, 1, corpus.VAL_SHARD, f"a number of shards, 1 to {corpus.VAL_SHARD}")
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="stdlib|download|pack")
    p = commands.add_parser("stdlib", help="write this Python's standard library as a corpus")
    p.add_argument("--out", required=True, help="folder for the parquet shards")
    p = commands.add_parser("download", help=f"fetch shards of {corpus.REPO}")
    p.add_argument("--out", required=True, help="folder for the parquet shards")
    p.add_argument(
        "--shards", type=shards, required=True, help="number of shards, about 250M characters each"
    )
    p = commands.add_parser("pack", help="tokenize and pack a folder of text")
    add = p.add_argument
    add(
        "--texts",
        required=True,
        help="folder of .parquet (column text), .jsonl (key text) or .txt files",
    )
    add("--tokenizer", required=True, help="tokenizer file")
    add(
        "--seq-len",
        type=positive_int,
        required=True,
        help="tokens predicted per row; a row holds one more",
    )
    add("--out", required=True, help="folder for the rows and the manifest")
    add(
        "--long-docs",
        choices=("crop", "split"),
        default="crop",
        help="documents longer than a row (default: crop)",
    )
    add(
        "--workers",
        type=positive_int,
        default=os.cpu_count(),
        help="processes, a file each (default: cores)",
    )
    source = p.add_mutually_exclusive_group()  # --stream has its own validation shard
    source.add_argument(
        "--val-file", help="file held out as validation (default: as in tokenizer_train.py)"
    )
    source.add_argument(
        "--stream", type=shards, help="follow a download of so many shards: pack each as it comes"
    )
    args = parser.parse_args(argv)
    if args.command == "stdlib":
        corpus.build_stdlib(args.out)
    elif args.command == "download":
        corpus.download(args.out, args.shards)
    else:
        pack(args)


if __name__ == "__main__":
    run_cli(main)
