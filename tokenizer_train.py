"""Byte-level BPE tokenizer: training (rustbpe), one JSON file, use through tiktoken.

    python tokenizer_train.py --texts data/stdlib --vocab-size 1024 --out data/tokenizer.json
    python tokenizer_train.py --texts data/fineweb-edu --vocab-size 32768 --out data/tokenizer.json

Text is cut into words by a GPT-4-style pattern with digit groups of at most two and no
normalisation; merges never cross words. The three specials are the last ids and count inside the
vocabulary. No validation document is trained on. Only the first 10,000 characters of a document are
used, and 2 billion of all: 8 to 12 shards of FineWeb-Edu. Which files were read is written beside
the tokenizer (tokenizer.texts.json): run again with the same texts, the program returns at once.
The file's form: looped/tokenizer.py. Source: byte-pair encoding, arXiv 1508.07909.
"""

import json
import time
from collections import Counter
from itertools import islice
from pathlib import Path

from looped.common import Parser, fail, file_hash, positive_int, write_json
from looped.corpus import add_text_flags, check_same, find_shards, fingerprints, texts
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


def training_texts(shards, counts):
    """Their documents, each cut to DOC_CHARS, until MAX_CHARS have been read. counts: of the shards
    and characters read so far.
    """
    for shard in shards:
        counts["shards"] += 1
        for text in texts(shard, Counter()):
            if counts["characters"] >= MAX_CHARS:
                return
            text = text[:DOC_CHARS]
            counts["characters"] += len(text)
            yield text


def bytes_per_token(enc, documents):
    """UTF-8 bytes that a token stands for: higher is shorter sequences."""
    tokens = sum(len(encode(enc, text)) for text in documents)
    return sum(len(text.encode()) for text in documents) / max(1, tokens)


# fmt: off
def parse_args(argv):
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add_text_flags(add)
    add("--vocab-size", type=positive_int, default=1024,
        help="entries, three specials included, at most 65536 (default: 1024, those of nano)")
    add("--out", type=Path, required=True,
        help="tokenizer file to write, for example data/tokenizer.json")
    return parser.parse_args(argv)
# fmt: on


def main(argv=None):
    args = parse_args(argv)
    out = args.out
    val, *train = find_shards(args.texts, args.val, args.all_files)
    settings = {"vocab_size": args.vocab_size, "validation": val.name}
    beside = out.with_suffix(".texts.json")
    if out.exists():
        if not beside.exists():
            fail(f"{out} is there, but not {beside.name}, its list of texts; choose another --out")
        before = json.loads(beside.read_text())
        if before["characters"] >= MAX_CHARS:
            train = train[: before["shards"]]  # the others were not read
        now = settings | {"files": fingerprints(args.texts, train)}
        check_same(out, args.texts, before, now)
        print(f"{out} is there already, made of these texts")
        return
    start = time.time()
    counts = Counter()
    ranks = train_bpe(training_texts(train, counts), args.vocab_size)
    entries = len(ranks) + len(SPECIALS)
    if entries < args.vocab_size:
        fail(f"{args.texts} yields only {entries} tokens; give more text or a smaller --vocab-size")
    out.parent.mkdir(parents=True, exist_ok=True)
    files = fingerprints(args.texts, train[: counts["shards"]])
    write_json(beside, settings | counts | {"files": files})
    save_tokenizer(out, ranks)
    print(f"{out}: {entries:,} entries in {time.time() - start:.1f} s, {file_hash(out)[:12]}")
    ratio = bytes_per_token(load_tokenizer(out), list(islice(texts(val, Counter()), 1000)))
    print(f"{ratio:.3f} bytes per token on validation text")


if __name__ == "__main__":
    main()
