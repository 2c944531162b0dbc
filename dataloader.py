"""Text in, rows of tokens out: packing, and the order in which training visits the rows. The
documents come from looped/corpus.py.

    python dataloader.py stdlib --out data/stdlib                      # this Python's own library
    python dataloader.py download --out data/fineweb-edu --shards 240  # FineWeb-Edu
    python dataloader.py pack --texts data/stdlib --tokenizer data/tokenizer.json --seq-len 256 \\
        --out data/packed

Packing (BestFit-Crop, arXiv 2404.10830): a row is seq_len + 1 tokens; each document follows a BOS,
so every row begins with one. A document longer than a row is cropped to one, or, with --long-docs
split, cut into rows. Of a buffer of 1,000 documents the longest that still fits is placed; when
none fits, the shortest is cropped to fill the row. No padding. The order of the training rows is a
keyed permutation, a function of (rows, seed, index) alone: it is the same for any number of ranks,
and to resume takes only the index.
"""

import hashlib
import json
import os
import resource
from bisect import bisect_left, insort
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from looped import corpus
from looped.common import Parser, fail, file_hash, positive_int, write_atomic, write_json
from looped.randomness import permute
from looped.tokenizer import BOS, encode, load_tokenizer

BUFFER = 1000  # documents the packer chooses from


# ---- packing


def tokenized(shard, enc, settings, counts):
    """Each document's tokens after a BOS, at most a row of them: what is longer is cropped, or
    split into rows, each after a BOS.
    """
    bos = enc.encode_single_token(BOS)
    length = settings["seq_len"]
    for text in corpus.texts(shard, counts):
        ids = encode(enc, text)
        starts = range(0, len(ids), length) if settings["long_docs"] == "split" else range(1)
        counts["documents"] += 1
        counts["tokens"] += len(ids) + len(starts)
        for start in starts:
            yield np.array([bos, *ids[start : start + length]], np.uint16)


def best_fit(documents, row):
    """Arrays of at most `row` ids -> rows; an incomplete last row is dropped."""
    numbered = enumerate(documents)
    waiting = []  # (length, number, tokens), sorted
    parts = []
    room = row
    while True:
        for i, tokens in islice(numbered, BUFFER - len(waiting)):
            insort(waiting, (len(tokens), i, tokens))
        if not waiting:
            return
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


def write_header(file, rows, row):
    """The head of a .npy file of uint16 rows: always 128 bytes, so it can be written again."""
    shape = {"descr": "<u2", "fortran_order": False, "shape": (rows, row)}
    file.seek(0)
    np.lib.format.write_array_header_1_0(file, shape)


def pack_shard(folder, settings, file, shard):
    """Writes the rows of a Shard to a .npy file in the folder; returns its entry in the manifest."""
    enc = load_tokenizer(folder / "tokenizer.json")
    row = settings["seq_len"] + 1
    counts = Counter()  # of documents, of tokens (BOS included), of what was cropped or skipped
    rows = 0

    def write(out):
        nonlocal rows
        write_header(out, 0, row)
        for tokens in best_fit(tokenized(shard, enc, settings, counts), row):
            out.write(tokens)
            rows += 1
        write_header(out, rows, row)

    write_atomic(folder / file, write)
    counts["cropped tokens"] = counts["tokens"] - rows * row
    about = {"rows": rows, "sha256": file_hash(folder / file), "counts": counts}
    return {"file": file, "source": shard.name, "bytes": shard.bytes} | about


def is_packed(folder, settings, sources):
    """Are there complete rows of these texts? Rows of other settings are refused."""
    path = folder / "manifest.json"
    if not path.exists():
        return False
    made = json.loads(path.read_text())
    for name, now in settings.items():
        if made[name] != now:
            packed = f"{folder} was packed with {name} {made[name]} (now {now})"
            fail(f"{packed}; delete it or choose another --out")
    return sources == [[entry["source"], entry["bytes"]] for entry in made["shards"]]


def pack(args):
    """Packs the shards of a folder, several at a time. manifest.json is written last."""
    out = args.out
    val, *train = corpus.find_shards(args.texts)
    settings = {
        "seq_len": args.seq_len,
        "vocab_size": load_tokenizer(args.tokenizer).n_vocab,
        "tokenizer_sha256": file_hash(args.tokenizer),
        "long_docs": args.long_docs,
        "validation": val.name,
    }
    sources = [[shard.name, shard.bytes] for shard in (val, *train)]
    if is_packed(out, settings, sources):
        print(f"{out} is there already, made of these texts")
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "manifest.json").unlink(missing_ok=True)
    write_atomic(out / "tokenizer.json", args.tokenizer.read_bytes())  # the rows' copy
    files = ["val.npy", *(f"shard_{i:05d}.npy" for i in range(len(train)))]
    spread = map
    if args.workers > 1:
        spread = ProcessPoolExecutor(args.workers, get_context("spawn")).map
    entries = []
    for entry in spread(partial(pack_shard, out, settings), files, (val, *train)):
        entries.append(entry)
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
    """Writes the manifest and says what is in the folder."""
    val, *train = entries
    rows = sum(entry["rows"] for entry in train)
    if not rows or not val["rows"]:
        split = "validation" if rows else "training"
        row = f"not one row of {settings['seq_len'] + 1} tokens"
        fail(f"too little {split} text: {row}; add text, or try a smaller --seq-len")
    counts = Counter()
    for entry in train:
        counts.update(entry["counts"])
    nats = unigram_entropy(folder, val, train, settings["vocab_size"])
    manifest = settings | {"shards": entries, "counts": counts, "unigram_entropy": nats}
    write_json(folder / "manifest.json", manifest)
    tokens = rows * settings["seq_len"]
    print(f"{folder}: {tokens:,} training tokens in full rows; unigram entropy {nats:.3f} nats")
    print(f"training text: {', '.join(f'{n:,} {name}' for name, n in counts.items())}")


# ---- the training stream


class PackedData:
    """A folder written by pack, memory-mapped: rows by id, and the seeded order in which training
    visits them.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        path = self.folder / "manifest.json"
        if not path.exists():
            make = f"python dataloader.py pack … --out {folder} makes them"
            fail(f"no packed rows in {folder}: {path.name} is missing; {make}")
        self.manifest = m = json.loads(path.read_text())
        self.seq_len = m["seq_len"]
        # each shard keeps a file open; FineWeb-Edu has 1,823, and many systems allow 1,024
        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, len(m["shards"]) + 1024), most))
        val, *train = [np.load(self.folder / e["file"], mmap_mode="r") for e in m["shards"]]
        self.shards = {"val": [val], "train": train}  # (rows, seq_len + 1) uint16
        # the ids at which shards begin, and the number of all rows
        self.edges = {split: np.cumsum([0, *map(len, s)]) for split, s in self.shards.items()}
        content = [m["tokenizer_sha256"], m["seq_len"], m["long_docs"]]
        content += [entry["sha256"] for entry in m["shards"]]
        # names the data of a run: tokenizer, packing, rows
        self.sha256 = hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def check(self, seq_len, vocab_size, batch_size=1):
        """Refuses rows of another length or vocabulary, or too few for one step."""
        for name, wanted in (("seq_len", seq_len), ("vocab_size", vocab_size)):
            made = self.manifest[name]
            if made != wanted:
                advice = f"try --{name.replace('_', '-')} {made} or pack again"
                fail(f"{self.folder} was packed with {name} {made}, not {wanted}; {advice}")
        rows = self.rows("train")
        if rows < batch_size:
            advice = f"give more text, or try --batch-size {rows}"
            fail(f"{rows} training rows are fewer than --batch-size {batch_size}; {advice}")

    def rows(self, split):
        return int(self.edges[split][-1])

    def get(self, split, ids):
        """Rows by id: (n, seq_len + 1) int64."""
        edges = self.edges[split]
        shards = np.searchsorted(edges, ids, "right") - 1
        rows = [self.shards[split][s][i - edges[s]] for s, i in zip(shards, ids)]
        return np.array(rows, np.int64)

    def stream_ids(self, seed, start, count):
        """Row ids of the training sequences start … start + count - 1. An epoch visits every row
        once, in an order of its own.
        """
        n = self.rows("train")
        epochs, within = np.divmod(np.arange(start, start + count), n)
        ids = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            ids[here] = permute(within[here], n, f"{seed} {epoch} 0")
        return ids


def main(argv=None):
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="stdlib|download|pack")
    add = commands.add_parser("stdlib", help="write this Python's standard library").add_argument
    add("--out", type=Path, required=True, help="folder for the parquet shards")
    add = commands.add_parser("download", help=f"fetch shards of {corpus.REPO}").add_argument
    add("--out", type=Path, required=True, help="folder for the parquet shards")
    about = f"number of training shards, up to {corpus.VAL_SHARD}, about 250M characters each"
    add("--shards", type=positive_int, required=True, help=about)
    add = commands.add_parser("pack", help="tokenize and pack a folder of text").add_argument
    about = """folder of .parquet (column text), .jsonl (key text) or .txt files; a .txt document
        ends at a line such as <|endoftext|>, or at the first blank line after 10,000 characters"""
    add("--texts", type=Path, required=True, help=about)
    add("--tokenizer", type=Path, required=True, help="tokenizer file")
    about = "tokens predicted per row; a row holds one more"
    add("--seq-len", type=positive_int, required=True, help=about)
    add("--out", type=Path, required=True, help="folder for the rows and the manifest")
    about = "documents longer than a row (default: crop)"
    add("--long-docs", choices=("crop", "split"), default="crop", help=about)
    about = "processes, a file each (default: cores)"
    add("--workers", type=positive_int, default=os.cpu_count(), help=about)
    args = parser.parse_args(argv)
    if args.command == "stdlib":
        corpus.build_stdlib(args.out)
    elif args.command == "download":
        corpus.download(args.out, args.shards)
    else:
        pack(args)


if __name__ == "__main__":
    main()
