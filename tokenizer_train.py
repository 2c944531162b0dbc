"""Byte-level BPE tokenizer: training (rustbpe), one JSON file, use through tiktoken.

    python tokenizer_train.py --texts data/stdlib --vocab-size 1024 --out data/tokenizer.json
    python tokenizer_train.py --texts data/fineweb-edu --vocab-size 32768 --out data/tokenizer.json

Text is cut into words by a GPT-4-style pattern with digit groups of at most two and no
normalisation; merges never cross words. The three specials are the last ids and count inside the
vocabulary. No validation document is trained on. Only the first 10,000 characters of a document are
used, and 2 billion of all: 8 to 12 shards of FineWeb-Edu. Which files were read is written beside
the tokenizer (tokenizer.texts.json): run again with the same texts, the program returns at once. The file's form: looped/tokenizer.py. Source: byte-pair encoding, arXiv
1508.07909.
"""

import json
import time
from collections import Counter
from itertools import islice
from pathlib import Path

from looped.common import Parser, fail, file_hash, positive_int, write_json
from looped.corpus import find_shards, texts
from looped.tokenizer import PATTERN, SPECIALS, encode, load_tokenizer, save_tokenizer

DOC_CHARS = 10_000  # used of a document
MAX_CHARS = 2 * 10**9  # used of the corpus


def train_bpe(documents, vocab_size):
    """The token bytes by id, specials apart, from an iterator of texts."""
    import rustbpe

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(documents, vocab_size - len(SPECIALS), pattern=PATTERN)
    ids = {bytes(token): i for token, i in trainer.get_mergeable_ranks()}
    return sorted(ids, key=ids.get)


def training_texts(shards, record):
    """Their documents, each cut to DOC_CHARS, until MAX_CHARS have been given. record: what was
    read, of use at the end.
    """
    record |= {"files": [], "characters": 0}
    for shard in shards:
        record["files"].append(describe(shard))
        for text in texts(shard, Counter()):
            if record["characters"] >= MAX_CHARS:
                return
            text = text[:DOC_CHARS]
            record["characters"] += len(text)
            yield text


def describe(shard):
    return [shard.name, shard.bytes]


def made_of(record, shards, vocab_size):
    """Was a tokenizer with this record made of these texts?"""
    files = [describe(shard) for shard in shards]
    if record["characters"] >= MAX_CHARS:  # more were not read
        files = files[: len(record["files"])]
    return record["files"] == files and record["vocab_size"] == vocab_size


def bytes_per_token(enc, documents):
    """UTF-8 bytes that a token stands for: higher is shorter sequences."""
    tokens = sum(len(encode(enc, text)) for text in documents)
    return sum(len(text.encode()) for text in documents) / max(1, tokens)


def main(argv=None):
    parser = Parser(description=__doc__)
    add = parser.add_argument
    about = "folder of .parquet (column text), .jsonl (key text) or .txt files"
    add("--texts", type=Path, required=True, help=about)
    about = "entries, three specials included, at most 65536 (default: 1024, those of nano)"
    add("--vocab-size", type=positive_int, default=1024, help=about)
    about = "tokenizer file to write, for example data/tokenizer.json"
    add("--out", type=Path, required=True, help=about)
    args = parser.parse_args(argv)
    out = args.out
    vocab_size = args.vocab_size
    val, *train = find_shards(args.texts)
    beside = out.with_suffix(".texts.json")
    if out.exists():
        if not beside.exists() or not made_of(json.loads(beside.read_text()), train, vocab_size):
            fail(f"{out} is there, of other texts or another vocabulary; choose another --out")
        print(f"{out} is there already, made of these texts")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    start = time.time()
    record = {"vocab_size": vocab_size}
    ranks = train_bpe(training_texts(train, record), vocab_size)
    entries = len(ranks) + len(SPECIALS)
    if entries < vocab_size:
        fail(f"{args.texts} yields only {entries} tokens; give more text or a smaller --vocab-size")
    write_json(beside, record)
    save_tokenizer(out, ranks)
    print(f"{out}: {entries:,} entries in {time.time() - start:.1f} s, {file_hash(out)[:12]}")
    ratio = bytes_per_token(load_tokenizer(out), list(islice(texts(val, Counter()), 1000)))
    print(f"{ratio:.3f} bytes per token on validation text")


if __name__ == "__main__":
    main()
