"""The tokenizer file, and text to ids and back.

The file: {"version", "pattern", "ranks": [base64 of token 0, 1, …], "specials": {name: id},
"checksum"}.
"""

import base64
import re

import numpy as np

from looped.console import fail, outside
from looped.files import read_checked, write_checked

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


def encoding(data):
    """What a tokenizer file holds -> tiktoken.Encoding; ValueError or the like if it is none."""
    import tiktoken

    ranks = {base64.b64decode(token): i for i, token in enumerate(data["ranks"])}
    doubled = len(ranks) < len(data["ranks"])
    missing = any(bytes([i]) not in ranks for i in range(256))
    specials = special_ids(data["ranks"])
    if doubled or missing or data["specials"] != specials:
        raise ValueError("tokens are missing, doubled or misplaced")
    if not data["pattern"]:  # at which tiktoken would abort
        raise ValueError("the pattern is empty")
    return tiktoken.Encoding(
        "bpe", pat_str=data["pattern"], mergeable_ranks=ranks, special_tokens=specials
    )


def load_tokenizer(path):
    """The tokenizer file as a tiktoken.Encoding; a damaged file ends the program with one line."""
    data = read_checked(path)
    if data is None:
        fail(f"no tokenizer at {path}; python tokenizer_train.py makes one")
    with outside(f"{path} is not a tokenizer of this program", "make it again"):
        return encoding(data)


def token_bytes(enc):
    """Byte length of every id, 0 for specials: (V,) int32.

    Taken from the raw tokens: decoding to text would miscount those that hold only part of a
    character.
    """
    ordinary = range(enc.n_vocab - len(SPECIALS))
    sizes = [len(enc.decode_single_token_bytes(i)) for i in ordinary]
    return np.array(sizes + [0] * len(SPECIALS), np.int32)


def cleaned(text: str) -> str:
    """The text with U+FFFD for each lone surrogate, which UTF-8 cannot hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encode(enc, text):
    """Ids of a text of any length, special names taken as plain text; cleaned."""
    ids = []
    for piece in PIECE_PATTERN.findall(cleaned(text)):
        ids += enc.encode_ordinary(piece)
    return ids


def file_content(ranks, pattern=PATTERN):
    """What a tokenizer file holds, its checksum apart. ranks: the bytes of each ordinary token, by
    id.
    """
    encoded = [base64.b64encode(token).decode() for token in ranks]
    return {"version": 1, "pattern": pattern, "ranks": encoded, "specials": special_ids(ranks)}


def save_tokenizer(path, ranks):
    write_checked(path, file_content(ranks))
