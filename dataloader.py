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
from looped.corpus import text_hash
from looped.randomness import permute
from looped.tokenizer import BOS, encode, load_tokenizer

BUFFER = 1000  # documents the packer chooses from


# ---- packing


def tokenized(shard, enc, settings, counts, digest):
    """Each document's tokens after a BOS, at most a row of them: what is longer is cropped, or
    split into rows, each after a BOS. counts and digest are brought up to date.
    """
    bos = enc.encode_single_token(BOS)
    length = settings["seq_len"]
    for text in corpus.texts(shard, counts):
        ids = encode(enc, text)
        starts = range(0, len(ids), length) if settings["long_docs"] == "split" else range(1)
        digest.update(text_hash(text).to_bytes(8))
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
        # tuples sort by length first, and (n,) comes before every (n, number, tokens)
        fits = bisect_left(waiting, (room + 1,))  # how many documents fit
        chosen = fits - 1 if fits else 0  # the longest of them, else the shortest, cropped
        length = waiting[chosen][0]
        first = bisect_left(waiting, (length,))  # the first document of that length
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
    digest = hashlib.sha256()  # of the documents
    rows = 0

    def write(out):
        nonlocal rows
        write_header(out, 0, row)
        for tokens in best_fit(tokenized(shard, enc, settings, counts, digest), row):
            out.write(tokens)
            rows += 1
        write_header(out, rows, row)

    write_atomic(folder / file, write)
    counts["cropped tokens"] = counts["tokens"] - rows * row
    return {
        "file": file,
        "source": shard.name,
        "text_sha256": digest.hexdigest(),
        "rows": rows,
        "sha256": file_hash(folder / file),
        "counts": counts,
    }


def pack(args):
    """Packs the shards of a folder, several at a time. manifest.json is written last."""
    out = args.out
    val, *train = corpus.find_shards(args.texts, args.val, args.all_files)
    manifest = {
        "seq_len": args.seq_len,
        "vocab_size": load_tokenizer(args.tokenizer).n_vocab,
        "tokenizer_sha256": file_hash(args.tokenizer),
        "long_docs": args.long_docs,
        "validation": val.name,
        "files": corpus.fingerprints(args.texts, [val, *train]),
    }
    packed = out / "manifest.json"
    if packed.exists():
        corpus.check_same(out, args.texts, json.loads(packed.read_text()), manifest)
        print(f"{out} is there already, made of these texts")
        return
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "tokenizer.json", args.tokenizer.read_bytes())  # the rows' copy
    files = ["val.npy", *(f"shard_{i:05d}.npy" for i in range(len(train)))]
    spread = map
    if args.workers > 1:
        spread = ProcessPoolExecutor(args.workers, get_context("spawn")).map
    entries = []
    for entry in spread(partial(pack_shard, out, manifest), files, (val, *train)):
        entries.append(entry)
        print(f"{entry['file']}: {entry['rows']:,} rows from {entry['source']}", flush=True)
    finish(out, manifest, entries)


def finish(folder, manifest, entries):
    """Writes the manifest and says what is in the folder."""
    val, *train = entries
    rows = sum(entry["rows"] for entry in train)
    length = manifest["seq_len"]
    if not rows or not val["rows"]:
        split = "validation" if rows else "training"
        reason = f"too little {split} text, not one row of {length + 1} tokens"
        fail(f"{reason}; add text, or try a smaller --seq-len")
    counts = Counter()
    for entry in train:
        counts.update(entry["counts"])
    write_json(folder / "manifest.json", manifest | {"shards": entries, "counts": counts})
    print(f"{folder}: {rows * length:,} training tokens in full rows")
    print(f"training text: {', '.join(f'{n:,} {name}' for name, n in counts.items())}")


# ---- the training stream


def json_hash(content) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def where_rows_are(folder):
    """What to type where a folder is not one of packed rows."""
    below = sorted([*folder.glob("*/manifest.json"), *folder.glob("*/*/manifest.json")])
    if below:
        return f"they are below it: {' or '.join(f'--data {path.parent}' for path in below)}"
    if corpus.text_files(folder):
        tokenizer = f"tokenizer_train.py --texts {folder} --out tokenizer.json"
        pack = f"dataloader.py pack --texts {folder} --tokenizer tokenizer.json --seq-len 256"
        return f"it holds texts; python {tokenizer} and python {pack} --out ROWS make rows of them"
    return f"python dataloader.py pack … --out {folder} makes them"


class PackedData:
    """A folder written by pack, memory-mapped: rows by id, and the seeded order in which training
    visits them.

    With rows=N training visits N of the training rows: a random part, the same for every seed, and
    within that of every larger N.
    """

    def __init__(self, folder, rows=None):
        self.folder = Path(folder)
        path = self.folder / "manifest.json"
        if not path.exists():
            fail(f"no packed rows in {folder}; {where_rows_are(self.folder)}")
        self.manifest = m = json.loads(path.read_text())
        self.seq_len = m["seq_len"]
        # each shard keeps a file open; FineWeb-Edu has 1,823, and many systems allow 1,024
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, len(m["shards"]) + 1024), hard))
        val, *train = [np.load(self.folder / e["file"], mmap_mode="r") for e in m["shards"]]
        self.shards = {"val": [val], "train": train}  # (rows, seq_len + 1) uint16
        # the ids at which shards begin, and the number of all rows
        self.edges = {split: np.cumsum([0, *map(len, s)]) for split, s in self.shards.items()}
        self.part = np.arange(self.edges["train"][-1])  # the ids that training visits, rising
        if rows is not None:
            self.part = self.random_part(rows)
        packing = [m["tokenizer_sha256"], m["seq_len"], m["long_docs"]]
        # names the data of a run: tokenizer, packing, all rows
        self.sha256 = json_hash([*packing, *(entry["sha256"] for entry in m["shards"])])
        validation = m["shards"][0]
        text = validation.get("text_sha256", validation["sha256"])  # older rows lack the first
        # What a validation measures with. Losses compare where all of it is equal; bits per byte
        # also where rows and tokenizer differ.
        self.yardstick = {
            "text": json_hash([text, m["long_docs"]]),
            "rows": validation["sha256"],
            "tokenizer": m["tokenizer_sha256"],
            "seq_len": m["seq_len"],
        }

    def random_part(self, rows):
        """The ids of so many training rows."""
        total = len(self.part)
        if rows > total:
            fail(f"--rows {rows} is more than the {total} training rows in {self.folder}")
        return np.sort(permute(np.arange(rows), total, "part"))

    def check(self, seq_len, vocab_size, batch_size=1):
        """Refuses rows of another length or vocabulary, or too few for one step."""
        for name, asked in (("seq_len", seq_len), ("vocab_size", vocab_size)):
            packed = self.manifest[name]
            if packed != asked:
                advice = f"try --{name.replace('_', '-')} {packed} or pack again"
                fail(f"{self.folder} was packed with {name} {packed}, not {asked}; {advice}")
        rows = self.rows("train")
        if rows < batch_size:
            advice = f"give more text, or try --batch-size {rows}"
            fail(f"{rows} training rows are fewer than --batch-size {batch_size}; {advice}")

    def rows(self, split):
        """How many rows training visits ("train"), or the validation has ("val")."""
        return len(self.part) if split == "train" else int(self.edges["val"][-1])

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
            chosen = epochs == epoch
            # the 0 has no meaning; without it the orders of all recorded runs would change
            ids[chosen] = permute(within[chosen], n, f"{seed} {epoch} 0")
        return self.part[ids]


# fmt: off
def parse_args(argv):
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="stdlib|download|pack")
    add = commands.add_parser("stdlib", help="write this Python's standard library").add_argument
    add("--out", type=Path, required=True, help="folder for the parquet shards")
    add = commands.add_parser("download", help=f"fetch shards of {corpus.REPO}").add_argument
    add("--out", type=Path, required=True, help="folder for the parquet shards")
    add("--shards", type=positive_int, required=True,
        help=f"number of training shards, up to {corpus.VAL_SHARD}, about 250M characters each")
    add = commands.add_parser("pack", help="tokenize and pack a folder of text").add_argument
    corpus.add_text_flags(add)
    add("--tokenizer", type=Path, required=True, help="tokenizer file")
    add("--seq-len", type=positive_int, required=True,
        help="tokens predicted per row; a row holds one more")
    add("--out", type=Path, required=True, help="folder for the rows and the manifest")
    add("--long-docs", choices=("crop", "split"), default="crop",
        help="crop a document longer than a row to one row, or split it into rows (default: crop)")
    add("--workers", type=positive_int, default=os.cpu_count(),
        help="number of processes; each packs one file at a time (default: number of cores)")
    return parser.parse_args(argv)
# fmt: on


def main(argv=None):
    args = parse_args(argv)
    if args.command == "stdlib":
        corpus.build_stdlib(args.out)
    elif args.command == "download":
        corpus.download(args.out, args.shards)
    else:
        pack(args)


if __name__ == "__main__":
    main()
