"""Files that are whole or not there: atomic writing, checksums, locks."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from pathlib import Path

from looped.console import fail, outside

LOCK = ".lock"  # in a folder that one process at a time may write to


def write_atomic(path, content):
    """Writes bytes, or what content(file) writes: the path holds all of it, or still what it held
    before.
    """
    path = Path(path)
    temp = path.with_name(f".{path.name}.tmp")
    try:
        with open(temp, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    except BaseException as e:
        temp.unlink(missing_ok=True)
        if isinstance(e, OSError) and not e.filename:
            e.filename = str(path)  # a full disk does not say which file
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename, too, must reach the disk
    except OSError as e:
        if e.errno != errno.EINVAL:  # as file systems say that have no such thing
            raise
    finally:
        os.close(folder)


@contextlib.contextmanager
def lock(folder):
    """Makes the folder; `with lock(folder):` keeps other processes out until the block ends, or
    this process does, even if killed. Programs that this one starts do not inherit the lock.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder) / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            advice = "wait for it, or name another with --out"
            fail(f"{folder} is being used by another process; {advice}")
        except OSError as e:  # Lustre without -o flock, NFS without its lock service
            advice = "mount it with locks, or name a folder elsewhere with --out"
            fail(f"{folder} is on a file system without file locks ({e.strerror}); {advice}")
        yield


@contextlib.contextmanager
def turn(path):
    """`with turn(path):` waits until no other process is in such a block for the same file."""
    path = Path(path)
    with open(path.with_name(f".{path.name}{LOCK}"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def file_hash(*paths):
    """sha256 of a file; of several, the hash of their hashes."""
    digests = []
    for path in paths:
        with open(path, "rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def json_hash(data):
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def write_checked(path, data):
    """A JSON file that carries the checksum of its content."""
    text = json.dumps(data | {"checksum": json_hash(data)}, indent=1)
    write_atomic(path, f"{text}\n".encode())


def read_checked(path):
    """What write_checked wrote, None where there is no file; a damaged one ends the program."""
    if not Path(path).exists():
        return None
    wrong = f"{path} is damaged, or not a file of this program"
    with outside(wrong, "name another, or move it away and make it again"):
        data = json.loads(Path(path).read_bytes())
        if data.pop("checksum") != json_hash(data) or data["version"] != 1:
            raise ValueError("wrong checksum or version")
    return data
