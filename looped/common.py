"""What every program here needs: errors of one line, flags, files that are whole or absent."""

import argparse
import hashlib
import json
import math
import os
import signal
import sys
import time
from pathlib import Path


def fail(message: str):
    """Ends the program with one line and exit code 2. Where all ranks fail, the first one's line ends the
    others before they print theirs.
    """
    if os.environ.get("RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3)
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def note(message: str) -> None:
    """One line on stderr, from the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {message}", file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """Shows the program's docstring as it is written; an error is one line."""

    def __init__(self, **options):
        kind = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=kind, allow_abbrev=False, **options)

    def error(self, message):
        fail(f"{message}; {self.prog} --help lists the flags")


def number(kind: type, least: float):
    """An argparse type: a finite number, at least `least`."""

    def parse(text: str):
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least:g}")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text is no number
    return parse


positive_int = number(int, 1)
non_negative_int = number(int, 0)
non_negative_float = number(float, 0)


def ints(text: str) -> list[int]:
    """An argparse type: whole numbers between commas."""
    return sorted({non_negative_int(part) for part in text.split(",")})


def file_hash(path) -> str:
    """sha256, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomic(path, content) -> None:
    """Writes bytes, text, or what content(file) writes: path holds all of it, or what it held before."""
    path = Path(path)
    temp = path.with_name(f".{path.name}.tmp")
    with open(temp, "wb") as file:
        if callable(content):
            content(file)
        else:
            file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temp, path)


def write_json(path, data) -> None:
    """NaN and infinity, which JSON does not have, are written as null."""
    write_atomic(path, json.dumps(finite(data), indent=1, allow_nan=False) + "\n")


def finite(data):
    """A copy with None in place of every number that is not finite."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data
