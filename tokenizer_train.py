"""Byte-level BPE tokenizer: training (rustbpe), one JSON file, use through tiktoken.

    python tokenizer_train.py --data data/stdlib --vocab-size 4096 --out data/tokenizer.json
    python tokenizer_train.py --data data/fineweb-edu --vocab-size 32768 --out data/tokenizer.json  # 2B characters

Text is cut into words by a GPT-4-style pattern with digit groups of at most two and no normalisation; merges never
cross words. The three specials are the last ids and count inside the vocabulary. No validation document is trained on.
Lone surrogates, which UTF-8 cannot hold, become U+FFFD (a pair becomes its character), in training and in encoding.
The file: {"version", "pattern", "ranks": [base64 of token 0, 1, …], "specials": {name: id}, "checksum"}.
Source: byte-pair encoding, arXiv 1508.07909.
"""

import argparse
import base64
import hashlib
import os
import threading
import time
from collections import Counter

import numpy as np

from dataloader import fail, find_sources, read_checked, run_cli, texts, write_checked

BOS, EOS, PAD = SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"  # contractions, words, digits by at most two
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"  # punctuation, line ends, white space
)
PIECE = 65_536  # characters given to the regex engine at once: it overflows its stack on a run of 1M blanks


def load_tokenizer(path):
    """The tokenizer file as a tiktoken.Encoding; a damaged file ends the program with one line."""
    import tiktoken

    data = read_checked(path, "train it again") or fail(f"no tokenizer at {path}; python tokenizer_train.py makes one")
    ranks = {base64.b64decode(token): i for i, token in enumerate(data["ranks"])}
    return tiktoken.Encoding("bpe", pat_str=data["pattern"], mergeable_ranks=ranks, special_tokens=data["specials"])


def tokenizer_hash(path):
    """sha256 of the file: packed data and checkpoints name their tokenizer by it."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def token_bytes(enc):
    """Byte length of every id from the raw token bytes, 0 for specials: (V,) int32. Decoding to text first would
    miscount the tokens that hold only part of a character."""
    sizes = np.zeros(enc.n_vocab, np.int32)
    for token in range(enc.n_vocab - len(SPECIALS)):
        sizes[token] = len(enc.decode_single_token_bytes(token))
    return sizes


def encode(enc, text):
    """Ids of a text of any length, special names taken as plain text. No token spans a non-blank and a space after it,
    so cutting there gives the ids of encoding in one go; without such a place in PIECE characters it is cut anyway."""
    if len(text) <= PIECE:
        return enc.encode_ordinary(text)
    ids, start = [], 0
    while start < len(text):
        cut = start + PIECE
        space = text.rfind(" ", start + 1, cut) if cut < len(text) else -1
        while space > 0 and text[space - 1].isspace():
            space = text.rfind(" ", start + 1, space)
        end = space if space > 0 else cut
        ids += enc.encode_ordinary(text[start:end])
        start = end
    return ids


def train_bpe(documents, vocab_size):
    """The `ranks` list (token bytes by id) and the trainer's own encoder, from an iterator of clean texts."""
    import rustbpe

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(documents, vocab_size - len(SPECIALS), pattern=PATTERN)
    ranks = [bytes(token) for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])]
    return ranks, trainer


def save_tokenizer(path, ranks):
    specials = {name: len(ranks) + i for i, name in enumerate(SPECIALS)}
    ranks = [base64.b64encode(token).decode() for token in ranks]
    write_checked(path, {"version": 1, "pattern": PATTERN, "ranks": ranks, "specials": specials})


def training_texts(units, holdout, max_chars, doc_cap, kept):
    """Training documents, each cut to doc_cap characters, until max_chars; the first 1M characters are also kept."""
    total = 0
    for _, paths in units:
        for text, _ in texts(paths, "train", holdout, Counter()):
            text = text[:doc_cap]
            if total < 1_000_000:
                kept.append(text)
            yield text
            total += len(text)
            if total >= max_chars:
                return


def public_encodings(seconds=20.0):
    """GPT-2's and cl100k's encodings if tiktoken has or can fetch them in time, else the reason; never hangs."""
    import tiktoken

    found = {}

    def load(name):
        try:
            found[name] = tiktoken.get_encoding(name)
        except Exception as e:  # no network, a proxy's page instead of the file, an unwritable cache: all the same here
            found[name] = f"{type(e).__name__}: {e}"

    threads = [threading.Thread(target=load, args=(name,), daemon=True) for name in ("gpt2", "cl100k_base")]
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return {name: found.get(name, f"no answer in {seconds:g} s") for name in ("gpt2", "cl100k_base")}


def print_compression(enc, train, val):
    """Bytes per token, ours beside the public tokenizers': higher is shorter sequences."""
    public = public_encodings()
    absent = {name: reason for name, reason in public.items() if isinstance(reason, str)}
    for name, other in {f"this tokenizer ({enc.n_vocab:,})": enc, **public}.items():
        if name in absent:
            continue
        ratios = []
        for docs in (train, val):
            tokens = sum(len(encode(other, doc)) for doc in docs)
            ratios.append(f"{sum(len(doc.encode()) for doc in docs) / tokens:.3f}" if tokens else "no text")
        print(f"  {name}: {ratios[0]} train, {ratios[1]} validation")
    if absent:
        print(f"  {', '.join(absent)}: not loaded ({next(iter(absent.values())).splitlines()[0][:90]})")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of .parquet (column text), .jsonl (key text) or .txt")
    parser.add_argument("--val-file", help="file held out (default: the last .parquet or .jsonl)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="entries, three specials included (default: 4096)")
    parser.add_argument("--max-chars", type=int, default=2_000_000_000, help="characters to train on (default: 2e9)")
    parser.add_argument("--doc-cap", type=int, default=10_000, help="characters used of a document (default: 10000)")
    parser.add_argument("--out", required=True, help="tokenizer file to write, for example data/tokenizer.json")
    args = parser.parse_args(argv)
    if not 260 <= args.vocab_size <= 65_536:
        fail(f"--vocab-size {args.vocab_size}: must be 260 to 65536 (ids are stored in 16 bits)")
    if args.max_chars < 1 or not 1 <= args.doc_cap <= PIECE:
        fail(f"--max-chars {args.max_chars} must be at least 1 and --doc-cap {args.doc_cap} from 1 to {PIECE}")
    units, val_unit, holdout = find_sources(args.data, args.val_file)
    train, start = [], time.time()
    ranks, _ = train_bpe(training_texts(units, holdout, args.max_chars, args.doc_cap, train), args.vocab_size)
    if len(ranks) + len(SPECIALS) < args.vocab_size:
        fail(f"{args.data} yields only {len(ranks) + len(SPECIALS)} tokens; give more text or a smaller --vocab-size")
    os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)
    save_tokenizer(args.out, ranks)
    print(f"{args.out}: {args.vocab_size:,} entries in {time.time() - start:.1f} s, {tokenizer_hash(args.out)[:12]}")
    val = [text for text, _ in texts(val_unit[1], "val", holdout, Counter())][:1000]
    print("bytes per token:")
    print_compression(load_tokenizer(args.out), train, val)


if __name__ == "__main__":
    run_cli(main)
