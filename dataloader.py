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
import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from functools import partial
from itertools import accumulate, islice, takewhile
from pathlib import Path

import numpy as np

from looped import corpus
from looped.console import Parser, fail, number, outside, positive_int, run_cli, wait_until
from looped.files import file_hash, lock, read_checked, write_atomic, write_checked
from looped.randomness import permute
from looped.tokenizer import BOS, encode, load_tokenizer
from looped.workers import worker_pool

VAL_FILE = "val.npy"  # the validation shard
BUFFER = 1000  # documents the packer chooses from
PATIENCE = 1800.0  # seconds that a download or a packing in progress may stand still


# ---- packing


def tokenized(unit, enc, settings, counts):
    """Yields each document's tokens after a BOS. With long_docs "split", a document longer than a row
    is cut into rows, each after a BOS.
    """
    for text in corpus.texts(unit, counts):
        ids = encode(enc, text)
        counts["documents"] += 1
        counts["bytes"] += len(text.encode())
        size = settings["seq_len"] if settings["long_docs"] == "split" else len(ids)
        for start in range(0, len(ids), size):
            tokens = [settings["bos_id"], *ids[start : start + size]]
            counts["tokens"] += len(tokens)
            yield np.array(tokens, np.uint16)


def best_fit(documents, row):
    """Arrays of ids -> yields each row as an array of tokens; the last may be incomplete."""
    numbered = enumerate(documents)
    waiting = []  # (length, number, tokens), sorted
    parts = []
    room = row
    while True:
        for i, tokens in islice(numbered, BUFFER - len(waiting)):
            # more than a row of it is never used
            insort(waiting, (len(tokens), i, tokens[:row].copy()))
        if not waiting:
            break
        fits = bisect_left(waiting, (room + 1,))  # how many documents fit
        chosen = fits - 1 if fits else 0  # the longest of them, else the shortest, cropped
        length = waiting[chosen][0]
        first = bisect_left(waiting, (length,))  # of that length
        tokens = waiting.pop(first)[2][:room]
        parts.append(tokens)
        room -= len(tokens)
        if not room:
            yield np.concatenate(parts)
            parts = []
            room = row
    if parts:
        yield np.concatenate(parts)


def write_header(file, rows, row):
    """The head of a .npy file of uint16 rows: always 128 bytes, so it can be written again."""
    shape = {"descr": "<u2", "fortran_order": False, "shape": (rows, row)}
    file.seek(0)
    np.lib.format.write_array_header_1_0(file, shape)


def pack_shard(folder, file, unit, settings):
    """A Unit's documents -> a .npy file of rows in the folder, and its entry in the manifest."""
    enc = load_tokenizer(folder / "tokenizer.json")
    row = settings["seq_len"] + 1
    counts = Counter()  # of documents, bytes, tokens (BOS included), of what was cropped or skipped
    rows = 0

    def write(out):
        nonlocal rows
        write_header(out, 0, row)
        for tokens in best_fit(tokenized(unit, enc, settings, counts), row):
            if len(tokens) < row:
                counts["tokens of an incomplete last row"] = len(tokens)
                break
            out.write(tokens)
            rows += 1
        write_header(out, rows, row)

    write_atomic(folder / file, write)
    left = counts["tokens of an incomplete last row"]
    counts["cropped tokens"] = counts["tokens"] - left - rows * row
    return {
        "file": file,
        "source": unit.name,
        "source_sha256": file_hash(*unit.paths),
        "rows": rows,
        "sha256": file_hash(folder / file),
        "counts": dict(counts),
    }


def there(unit):
    return all(path.exists() for path in unit.paths)


def plan(args, manifest):
    """What all shards of a folder share, which stands at the head of its manifest, and
    {file: Unit} of the shards that the flags ask for; validation first, which training needs at
    once.
    """
    enc = load_tokenizer(args.tokenizer)
    if enc.n_vocab > 65_536:
        limit = "ids are stored in 16 bits, so at most 65536"
        fail(f"{args.tokenizer} has {enc.n_vocab} entries; {limit}")
    if args.stream:
        # none is taken away: a training may be using it
        units = corpus.shard_units(args.texts, max(args.stream, len(manifest.get("train", []))))
    else:
        units = corpus.find_units(args.texts)
    settings = {
        "version": 1,
        "seq_len": args.seq_len,
        "vocab_size": enc.n_vocab,
        "tokenizer_sha256": file_hash(args.tokenizer),
        "bos_id": enc.encode_single_token(BOS),
        # "all": one order of all rows; "shard": shard after shard, for a stream
        "shuffle": "shard" if args.stream else "all",
        "long_docs": args.long_docs,
        "holdout": units[0].holdout,
    }
    shards = {f"shard_{i:05d}.npy": unit for i, unit in enumerate(units[1:])}
    return settings, {VAL_FILE: units[0]} | shards


def earlier_shards(folder, manifest, units, row):
    """{file: entry} of each shard that an earlier run has packed: of the right length (training
    checks the checksum), its sources unchanged or deleted since; of others {file: None}. row:
    tokens of a row.
    """
    entries = dict.fromkeys(units)
    for entry in filter(None, [manifest.get("val"), *manifest.get("train", [])]):
        file = entry["file"]
        unit = units.get(file)
        path = folder / file
        if not unit or entry["source"] != unit.name or not path.exists():
            continue
        if path.stat().st_size != 128 + 2 * entry["rows"] * row:
            continue
        if not there(unit) or entry["source_sha256"] == file_hash(*unit.paths):
            entries[file] = entry
    return entries


def save_manifest(folder, settings, entries, **more):
    """Lists the shards up to the first that is missing: no file that is being replaced, and none
    out of order. more is there when all is packed.
    """
    listed = list(takewhile(bool, entries.values()))
    shards = {"val": entries[VAL_FILE], "train": listed[1:], "complete": bool(more)}
    write_checked(folder / "manifest.json", settings | shards | more)


def pack_units(pool, folder, units, settings):
    """Yields the manifest's entry of each shard in order. One is begun when its files are there."""
    waiting = deque(units.items())
    running = deque()
    while waiting or running:
        if running and running[0].done():
            yield running.popleft().result()
        elif waiting and there(waiting[0][1]):
            running.append(pool.submit(pack_shard, folder, *waiting.popleft(), settings))
        elif running:
            time.sleep(0.01)
        else:
            unit = waiting[0][1]
            wait_until(partial(there, unit), PATIENCE, f"{unit.name} to come")


def pack(args):
    """Packs the missing shards, several at a time. If killed, it loses only those in progress."""
    out = args.out
    own = out / "tokenizer.json"
    with lock(out):
        manifest = read_checked(out / "manifest.json") or {}
        settings, units = plan(args, manifest)
        for name, new in settings.items():
            was = manifest.get(name, new)
            if was != new:
                changed = f"{name} {was} (now {new})"
                fail(f"{out} was packed with {changed}; delete it or choose another --out")
        packed = {entry["source"]: None for entry in manifest.get("train", [])}
        if packed and packed.keys().isdisjoint(unit.name for unit in units.values()):
            names = ", ".join(islice(packed, 3))
            fail(f"{out} holds rows of other texts ({names}); delete it or choose another --out")
        interrupted = own.exists() and file_hash(own) == settings["tokenizer_sha256"]
        if not manifest and not interrupted:
            for file in (own.name, *units):
                if (out / file).exists():
                    fail(f"{out} holds a {file} of another making; move it or choose another --out")
        write_atomic(own, args.tokenizer.read_bytes())  # the rows' copy
        entries = earlier_shards(out, manifest, units, args.seq_len + 1)
        missing = {file: units[file] for file, entry in entries.items() if not entry}
        if missing:
            save_manifest(out, settings, entries)
        with worker_pool(min(args.workers, len(missing) or 1)) as pool:
            for entry in pack_units(pool, out, missing, settings):
                entries[entry["file"]] = entry
                save_manifest(out, settings, entries)
                print(f"{entry['file']}: {entry['rows']:,} rows from {entry['source']}", flush=True)
        finish(out, settings, entries)


def count_targets(folder, entry, vocab_size):
    """How often each id is a target in the rows of a shard: (V,)."""
    rows = np.load(folder / entry["file"], mmap_mode="r")
    counts = np.zeros(vocab_size, np.int64)
    for some in np.array_split(rows, len(rows) // 4096 + 1):
        counts += np.bincount(some[:, 1:].ravel(), minlength=vocab_size)
    return counts


def unigram_entropy(folder, val, train, vocab_size):
    """Nats per validation target under the frequencies of the training tokens (+1 smoothed; 100M
    suffice): the line that any model must beat.
    """
    targets = count_targets(folder, val, vocab_size)
    law = np.ones(vocab_size)
    for entry in train:
        if law.sum() < 100e6:
            law += count_targets(folder, entry, vocab_size)
    return float(-(targets * np.log(law / law.sum())).sum() / targets.sum())


def finish(folder, settings, entries):
    """Completes the manifest and says what is in the folder."""
    val, *train = entries.values()
    rows = sum(entry["rows"] for entry in train)
    if not rows or not val["rows"]:
        split = "validation" if rows else "training"
        row = f"not one row of {settings['seq_len'] + 1} tokens"
        fail(f"too little {split} text: {row}; add text, or try a smaller --seq-len")
    counts = Counter()
    for entry in train:
        counts.update(entry["counts"])
    tokens = rows * settings["seq_len"]
    nats = unigram_entropy(folder, val, train, settings["vocab_size"])
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

    def __init__(self, folder, check=(0, 0)):
        """check = (i, n): verify the checksums of every n-th shard from the i-th on, not only of
        the validation rows.
        """
        self.folder = Path(folder)
        self.caught: list = []  # signals, which end a wait
        self.check = check
        self.shards = {"val": [], "train": []}  # maps of (rows, seq_len + 1) uint16
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
        if m["val"] and not self.shards["val"]:
            self.shards["val"].append(self._open(m["val"], check=True))
        train = self.shards["train"]
        first, every = self.check
        for entry in m["train"][len(train) :]:
            train.append(self._open(entry, check=every and len(train) % every == first))

    def _open(self, entry, check):
        """Maps a shard that is as the manifest says."""
        path = self.folder / entry["file"]
        # Exception: whatever a damaged file makes of its reader
        with outside(f"{path} is damaged or missing", "delete it and run pack again", Exception):
            rows = np.asarray(np.lib.format.open_memmap(path, "r"))
            if rows.shape != (entry["rows"], self.seq_len + 1) or rows.dtype != np.uint16:
                raise ValueError(f"it holds {rows.shape} {rows.dtype}")
            if check and file_hash(path) != entry["sha256"]:
                raise ValueError("its checksum does not hold")
        return rows

    def _wait(self, split, i):
        """Until row i is there or all is packed; ends the program where no shard comes for PATIENCE
        seconds.
        """

        def grown():
            before = self.rows(split)
            self._read()
            return self.manifest["complete"] or self.rows(split) > before

        while i >= self.rows(split) and not self.manifest["complete"]:
            what = f"data: row {i:,} for {split}, from pack --stream to {self.folder}"
            wait_until(grown, PATIENCE, what, self.caught)

    def edges(self, split):
        """The ids at which shards begin, and the number of all rows."""
        return [0, *accumulate(map(len, self.shards[split]))]

    def rows(self, split):
        return self.edges(split)[-1]

    def get(self, split, ids):
        """Rows by id: (n, seq_len + 1) int64."""
        edges = self.edges(split)
        shards = np.searchsorted(edges, ids, "right") - 1
        rows = [self.shards[split][s][i - edges[s]] for s, i in zip(shards, ids)]
        return np.array(rows, np.int64)

    def stream_ids(self, seed, start, count):
        """Row ids of the training sequences start … start + count - 1. An epoch visits every row
        once: in one seeded order of all rows, or, for a stream, shard after shard, each in its own
        order. Waits for rows not packed yet.
        """
        ids = []
        while count:
            self._wait("train", start)
            edges = self.edges("train")
            epoch, index = divmod(start, edges[-1])
            if self.manifest["shuffle"] == "all":
                edges = [0, edges[-1]]
            block = bisect_right(edges, index) - 1
            first, last = edges[block : block + 2]
            n = min(count, last - index)
            within = np.arange(index - first, index - first + n)
            ids += (first + permute(within, last - first, f"{seed} {epoch} {block}")).tolist()
            start += n
            count -= n
        return np.array(ids, np.int64)

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
    p.add_argument("--out", type=Path, required=True, help="folder for the parquet shards")
    p = commands.add_parser("download", help=f"fetch shards of {corpus.REPO}")
    p.add_argument("--out", type=Path, required=True, help="folder for the parquet shards")
    about = "number of shards, about 250M characters each"
    p.add_argument("--shards", type=shards, required=True, help=about)
    p = commands.add_parser("pack", help="tokenize and pack a folder of text")
    about = "folder of .parquet (column text), .jsonl (key text) or .txt files"
    p.add_argument("--texts", type=Path, required=True, help=about)
    p.add_argument("--tokenizer", type=Path, required=True, help="tokenizer file")
    about = "tokens predicted per row; a row holds one more"
    p.add_argument("--seq-len", type=positive_int, required=True, help=about)
    p.add_argument("--out", type=Path, required=True, help="folder for the rows and the manifest")
    about = "documents longer than a row (default: crop)"
    p.add_argument("--long-docs", choices=("crop", "split"), default="crop", help=about)
    about = "processes, a file each (default: cores)"
    p.add_argument("--workers", type=positive_int, default=os.cpu_count(), help=about)
    about = "follow a download of so many shards: pack each as it comes"
    p.add_argument("--stream", type=shards, help=about)
    args = parser.parse_args(argv)
    if args.command == "stdlib":
        corpus.build_stdlib(args.out)
    elif args.command == "download":
        corpus.download(args.out, args.shards)
    else:
        pack(args)


if __name__ == "__main__":
    run_cli(main)
