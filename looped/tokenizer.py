"""The tokenizer file, and text to ids and back.

The file: {"version", "pattern", "ranks": [base64 of token 0, 1, …], "specials": {name: id},
"checksum"}; the checksum is the sha256 of the rest.
"""

import base64
import hashlib
import json
import re
from pathlib import Path

import numpy as np

from looped.common import fail, write_json

SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")
BOS = SPECIALS[0]

# fmt: off
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+"  # contractions, words
    r"|\p{N}{1,2}"  # digits by at most two
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"  # punctuation, line ends, white space
)
# fmt: on

# Characters given to the tokenizer at once: a run of a million blanks overflows its stack.
PIECE = 65_536
# A text is cut before the last space that follows a non-blank, which no token spans; if there is
# none, after PIECE characters.
PIECE_PATTERN = re.compile(
    rf".{{1,{PIECE}}}\Z|"  # all of the rest
    rf".{{1,{PIECE}}}(?<=\S)(?= )|"
    rf".{{1,{PIECE}}}",
    re.DOTALL,
)


def special_ids(ranks):
    """The special tokens follow the ordinary ones: {name: id}."""
    return {name: len(ranks) + i for i, name in enumerate(SPECIALS)}


def file_content(ranks, pattern=PATTERN):
    """What a tokenizer file holds. ranks: the bytes of each ordinary token."""
    encoded = [base64.b64encode(token).decode() for token in ranks]
    content = {"version": 1, "pattern": pattern, "ranks": encoded, "specials": special_ids(ranks)}
    text = json.dumps(content, sort_keys=True)
    return content | {"checksum": hashlib.sha256(text.encode()).hexdigest()}


def save_tokenizer(path, ranks):
    write_json(path, file_content(ranks))


def load_tokenizer(path):
    """The tokenizer file as a tiktoken.Encoding."""
    import tiktoken

    path = Path(path)
    if not path.exists():
        fail(f"no tokenizer at {path}; python tokenizer_train.py makes one")
    data = json.loads(path.read_text())
    ranks = {base64.b64decode(token): i for i, token in enumerate(data["ranks"])}
    specials = data["specials"]
    return tiktoken.Encoding(
        "bpe", pat_str=data["pattern"], mergeable_ranks=ranks, special_tokens=specials
    )


def token_bytes(enc):
    """Byte length of every id, 0 for specials: (V,) int32.

    Taken from the raw tokens: decoding to text would miscount those that hold only part of a
    character.
    """
    ordinary = range(enc.n_vocab - len(SPECIALS))
    sizes = [len(enc.decode_single_token_bytes(i)) for i in ordinary]
    return np.array(sizes + [0] * len(SPECIALS), np.int32)


def encode(enc, text):
    """Ids of a text of any length, special names taken as plain text.

    Lone surrogates, which UTF-8 cannot hold, become U+FFFD.
    """
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    ids = []
    for piece in PIECE_PATTERN.findall(text):
        ids += enc.encode_ordinary(piece)
    return ids
