"""
Hugging Face's tokenizer.json (byte-level BPE) from ours and back, without its library; see
convert.py.

Its file lists the pairs to merge, ours the tokens in the order in which they arise. Within a
token's bytes, merging takes the same steps in any text as alone, so a token arises from only one
pair, and either list gives the other. The library reads "<|bos|>" in a text as the special
token, our `encode` as those seven characters.
"""

import base64
import json
from itertools import pairwise
from pathlib import Path

from looped.console import DAMAGE, outside
from looped.tokenizer import SPECIALS, encoding, file_content, load_tokenizer

# Theirs writes a byte as the character of that number, or one from 256 on where that is not visible
HIDDEN = [*range(33), *range(127, 161), 173]
VISIBLE = {byte: 256 + i for i, byte in enumerate(HIDDEN)}
RAW = {char: byte for byte, char in VISIBLE.items()}


def visible(token: bytes) -> str:
    return token.decode("latin-1").translate(VISIBLE)


def raw(text: str) -> bytes:
    return text.translate(RAW).encode("latin-1")


def merges(tokens: list[str]) -> list[list[str]]:
    """The pair that each token arises from, in order; a token that no merges lead to has none."""
    ranks = {token: i for i, token in enumerate(tokens)}
    pairs = []
    for token, rank in ranks.items():
        parts = list(token)
        while len(parts) > 2:
            joined = [a + b for a, b in pairwise(parts)]
            earliest = min(joined, key=lambda pair: ranks.get(pair, rank))
            if ranks.get(earliest, rank) >= rank:
                break
            first = joined.index(earliest)
            parts[first : first + 2] = [earliest]
        if len(parts) == 2:
            pairs.append(parts)
    return pairs


def tokenizer_to_hf(path) -> dict:
    """Our file, checked before, -> theirs. ignore_merges: as in tiktoken, a word that is a token
    becomes it.
    """
    data = json.loads(Path(path).read_text())
    tokens = [visible(base64.b64decode(token)) for token in data["ranks"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = {
        "type": "BPE",
        "ignore_merges": True,
        "vocab": vocab | data["specials"],
        "merges": merges(tokens),
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = []
    for name, i in data["specials"].items():
        added.append({"id": i, "content": name, **flags, "special": True})
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    pattern = {"Regex": data["pattern"]}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "decoder": level,
        "model": model,
    }


def tokenizer_from_hf(data: dict) -> tuple[dict, list[int]]:
    """Their file -> ours, and their id for each of ours: our specials have the last ids, theirs
    often the first.

    Raises ValueError, or whatever a malformed file leads to, if it is not plain byte-level BPE.
    """
    model = data["model"]
    split, level = data["pre_tokenizer"]["pretokenizers"]
    other = data["normalizer"] or level["add_prefix_space"] or level["use_regex"]
    if model["type"] != "BPE" or other:
        raise ValueError("this is not plain byte-level BPE")
    specials = {token["content"]: token["id"] for token in data["added_tokens"]}
    if set(specials) != set(SPECIALS):
        raise ValueError(f"its special tokens are not {', '.join(SPECIALS)}")
    vocab = {text: i for text, i in model["vocab"].items() if text not in specials}
    tokens = sorted(vocab, key=vocab.get)
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    if pairs != merges(tokens):
        raise ValueError("its merges are not in the order of its ids")
    if len(pairs) < len(tokens) - 256 and not model.get("ignore_merges"):
        raise ValueError("some of its tokens have no merge")
    ours = file_content([raw(token) for token in tokens], split["pattern"]["Regex"])
    encoding(ours)  # is every byte a token, can tiktoken read the pattern?
    return ours, sorted(vocab.values()) + [specials[name] for name in SPECIALS]


def read_tokenizer(path: Path) -> tuple[dict, list[int]]:
    """A tokenizer file, ours or theirs -> ours, and for each of our ids the file's."""
    advice = "give with --tokenizer a file of tokenizer_train.py, or byte-level BPE in Hugging "
    advice += "Face's format"
    with outside(f"{path} is no such tokenizer", advice, (OSError, *DAMAGE)):
        data = json.loads(path.read_text())
        if "model" in data:
            return tokenizer_from_hf(data)
    count = load_tokenizer(path).n_vocab
    del data["checksum"]
    return data, list(range(count))
