"""How the programs speak to whoever runs them: errors of one line, flags, numbers on the command
line, Ctrl-C.
"""

import argparse
import contextlib
import ctypes
import os
import re
import resource
import sys
import time
import traceback

# What a file that is not what it should be can raise when it is read.
DAMAGE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


def fail(message):
    """Ends the program with one line and exit code 2: for every mistake of the user's."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def refuse(message):
    """`fail` for what every rank of a node finds, since all read the same command line and files;
    only the first of them says it.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(1)  # lets the first speak before torchrun sees a rank end and ends all
        sys.exit(2)
    fail(message)


def note(message):
    """One line beside the output, from the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {message}", file=sys.stderr, flush=True)


def one_line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@contextlib.contextmanager
def outside(what, advice, errors=DAMAGE):
    """`with outside("x.json is damaged", "delete it"):` ends the program with one line if the block
    raises one of errors.
    """
    try:
        yield
    except errors as e:
        fail(f"{what} ({one_line(e)}); {advice}")


def run_cli(main):
    """Runs main(); an error of the operating system (full disk, no permission) is one line too."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        # glibc would return large blocks to the system when they are freed, and each training step
        # would fault them in again: a tenth of a step's time on a CPU.
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
    # packed rows keep a file open for every shard, and many systems begin with 1,024 at most, macOS
    # with 256: there "unlimited" is refused, and 10,240 is what its manual promises (OPEN_MAX)
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (most, max(now, 10_240)):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
            break
    # Where one was closed, the next file to be opened would get its number, and what libraries write.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has not
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name need not be UTF-8
    try:
        try:
            main()
        except OSError as e:
            fail(f"{e.filename or ''} {e.strerror or e}".strip())
    except BaseException as e:
        distributed = sys.modules.get("torch.distributed")
        is_rank = distributed is not None and distributed.is_initialized()
        interrupted = isinstance(e, KeyboardInterrupt)
        if not interrupted and not is_rank:
            raise
        # The interpreter's own end could wait for a thread at the network, or, while other ranks
        # are still in the group, hang or abort.
        if isinstance(e, Exception):
            traceback.print_exc()
        code = e.code if isinstance(e, SystemExit) else 1
        with contextlib.suppress(OSError):  # its reader may have ended
            sys.stdout.flush()
        os._exit(130 if interrupted else code)


def flag(name: str) -> str:
    """The command-line flag of a configuration field."""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """Shows the program's docstring as it is written; an error is one line and exit code 2."""

    def __init__(self, **options):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message):
        refuse(f"{message}; {self.prog} --help lists the flags")


def number(kind, low, high, wanted):
    """An argparse type: the text as kind (int or float) from low to high; wanted says this in
    words.
    """

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
        return value

    return parse


SMALLEST, LARGEST = sys.float_info.min, sys.float_info.max
positive_int = number(int, 1, 2**63 - 1, "a whole number of at least 1")
non_negative_int = number(int, 0, 2**63 - 1, "a whole number of at least 0")
positive_float = number(float, SMALLEST, LARGEST, "a number above 0")
non_negative_float = number(float, 0.0, LARGEST, "a number of at least 0")
fraction = number(float, 0.0, 1.0, "a number from 0 to 1")


def wait_until(ready, patience, what, caught=()):
    """Polls ready(), saying so now and then; ends the program after `patience` seconds, or when a
    signal is in `caught`.
    """
    pause = min(1.0, patience / 4)
    polls = 0
    while not ready():
        if caught:
            fail(f"ended by a signal, while it waited for {what}")
        if polls * pause > patience:
            fail(f"waited {patience:g} s for {what}; is that still running?")
        if polls % 30 == 2:
            print(f"waiting for {what}", flush=True)
        time.sleep(pause)
        polls += 1


def ints(text: str, least: int) -> list[int]:
    """Whole numbers from `least` on between commas, each once."""
    if not re.fullmatch(r"\d{1,18}(,\d{1,18})*", text):
        raise argparse.ArgumentTypeError(f"{text} must be whole numbers, e.g. 1,2,4")
    found = sorted({int(x) for x in text.split(",")})
    if found[0] < least:
        raise argparse.ArgumentTypeError(
            f"{text} must be whole numbers from {least} on, e.g. 1,2,4"
        )
    return found


def non_negative_ints(text: str) -> list[int]:
    """An argparse type: whole numbers from 0 on between commas, each once."""
    return ints(text, 0)


def positive_ints(text: str) -> list[int]:
    """An argparse type: whole numbers from 1 on between commas, each once."""
    return ints(text, 1)
