"""Byte-level BPE tokenizer: training (rustbpe), one JSON file, use through tiktoken.

    python tokenizer_train.py --texts data/stdlib --vocab-size 1024 --out data/tokenizer.json
    python tokenizer_train.py --texts data/fineweb-edu --vocab-size 32768 --out data/tokenizer.json

Text is cut into words by a GPT-4-style pattern with digit groups of at most two and no
normalisation; merges never cross words. The three specials are the last ids and count inside the
vocabulary. No validation document is trained on. Only the first 10,000 characters of a document are
used. The file's form: looped/tokenizer.py. Source: byte-pair encoding, arXiv 1508.07909.
"""

import time
from collections import Counter
from itertools import islice
from pathlib import Path

from looped.console import Parser, fail, number, run_cli
from looped.corpus import find_units, texts
from looped.files import file_hash
from looped.tokenizer import PATTERN, SPECIALS, encode, load_tokenizer, save_tokenizer

DOC_CHARS = 10_000  # used of a document
MAX_CHARS = 2 * 10**9  # used of the corpus


def train_bpe(documents, vocab_size):
    """The token bytes by id, specials apart, from an iterator of clean texts."""
    import rustbpe

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(documents, vocab_size - len(SPECIALS), pattern=PATTERN)
    ids = {bytes(token): i for token, i in trainer.get_mergeable_ranks()}
    return sorted(ids, key=ids.get)


def training_texts(units):
    """Their documents, each cut to DOC_CHARS, until MAX_CHARS have been given."""
    total = 0
    for unit in units:
        for text in texts(unit, Counter()):
            if total >= MAX_CHARS:
                return
            text = text[:DOC_CHARS]
            total += len(text)
            yield text


def bytes_per_token(enc, documents):
    """UTF-8 bytes that a token stands for: higher is shorter sequences."""
    tokens = sum(len(encode(enc, text)) for text in documents)
    return sum(len(text.encode()) for text in documents) / max(1, tokens)


def main(argv=None):
    parser = Parser(description=__doc__)
    add = parser.add_argument
    about = "folder of .parquet (column text), .jsonl (key text) or .txt; the last of several "
    about += ".parquet or .jsonl files, else some documents, are for validation"
    add("--texts", type=Path, required=True, help=about)
    vocab_size = number(int, 260, 65_536, "from 260 to 65536 (ids are stored in 16 bits)")
    about = "entries, three specials included (default: 1024, those of nano)"
    add("--vocab-size", type=vocab_size, default=1024, help=about)
    about = "tokenizer file to write, for example data/tokenizer.json"
    add("--out", type=Path, required=True, help=about)
    args = parser.parse_args(argv)
    out = args.out
    if out.exists():
        fail(f"--out {out} is there already; move it or choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    val, *train = find_units(args.texts)
    start = time.time()
    ranks = train_bpe(training_texts(train), args.vocab_size)
    entries = len(ranks) + len(SPECIALS)
    if entries < args.vocab_size:
        fail(f"{args.texts} yields only {entries} tokens; give more text or a smaller --vocab-size")
    save_tokenizer(out, ranks)
    print(f"{out}: {entries:,} entries in {time.time() - start:.1f} s, {file_hash(out)[:12]}")
    ratio = bytes_per_token(load_tokenizer(out), list(islice(texts(val, Counter()), 1000)))
    print(f"{ratio:.3f} bytes per token on validation text")


if __name__ == "__main__":
    run_cli(main)
