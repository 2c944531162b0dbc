"""How a run ends early: by an error from outside, a signal, or divergence."""

import contextlib
import gc
import os
import re
import select
import signal
import stat
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from looped.checkpoint import checkpoints, join_writer
from looped.console import one_line
from looped.memory import less_memory

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def lacks_memory(e: Exception) -> bool:
    no_memory = isinstance(e, MemoryError | torch.OutOfMemoryError)
    return no_memory or bool(re.search("allocate memory|bad_alloc", str(e)))


def explain(e: Exception, args, progress: dict) -> None:
    """Ends the run after an error: one from outside (memory, disk, another rank) as one line; a
    fault of the program keeps its traceback.
    """
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    step = progress["step"]
    if lacks_memory(e):
        rows = args.device_batch_size or 1  # it may not be settled yet
        advice = less_memory(rows, args.batch_size or 1, world)
        what = f"out of memory with --device-batch-size {rows} ({one_line(e)}); {advice}"
    elif "NCCL error" in str(e):  # this machine's fault (a small /dev/shm, say), or another rank's
        cause = str(e).partition("Last error:")[2] or str(e)
        what = f"NCCL failed here, or another rank ended: {' '.join(cause.split())}"
    elif isinstance(e, dist.DistError) or (world > 1 and "gloo" in str(e)):
        # gloo's message, without its place in the source and its advice
        reason = str(e).splitlines()[0].split("] ", 1)[-1].split(". ")[0]
        what = f"another rank ended or hangs, and said why if it could ({reason})"
    elif isinstance(e, OSError) and step:
        what = f"{e.filename or args.out}: {e.strerror or e}"
    else:
        raise e
    with contextlib.suppress(OSError):
        join_writer()
    end = f"{last_checkpoint(args.out)}; the same command with --resume continues"
    where = f"rank {rank} of {world}, after step {step}"
    print(f"error: {where}: {what}; {end}", file=sys.stderr, flush=True)
    sys.exit(1)


def last_checkpoint(run: str | Path | None) -> str:
    found = checkpoints(Path(run)) if run else []
    return f"last checkpoint: {found[-1] if found else 'none'}"


@contextlib.contextmanager
def process_as_before():
    """Afterwards signals do what they did before, and garbage is collected if it was: a run may be one
    of several in a program, or in a notebook.
    """
    handlers = [signal.getsignal(number) for number in SIGNALS]
    collects = gc.isenabled()
    try:
        yield
    finally:
        for number, handler in zip(SIGNALS, handlers, strict=True):
            signal.signal(number, handler or signal.SIG_DFL)
        gc.unfreeze()
        if collects:
            gc.enable()


def catch_signals() -> list[int]:
    """From now on SIGTERM, SIGINT and, unless it is ignored (nohup), SIGHUP only append their number
    to the list that is returned.
    """
    caught: list[int] = []

    def catch(number, frame):
        caught.append(number)
        if number != signal.SIGTERM:
            leave_readers(number)

    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, catch)
    return caught


def leave_readers(number: int) -> None:
    """Writing to a terminal that has closed (SIGHUP) would be an error, and so it would to a pipe whose
    reader, such as `tee`, Ctrl-C (SIGINT) has ended, too. What is still to be said goes to the terminal
    after Ctrl-C, nowhere after SIGHUP.
    """
    other = os.open(os.devnull, os.O_WRONLY)
    if number == signal.SIGINT:
        with contextlib.suppress(OSError):  # torchrun's processes have none
            other = os.open("/dev/tty", os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        mode = 0
        with contextlib.suppress(OSError):  # macOS takes a terminal from all who have it open
            mode = os.fstat(stream.fileno()).st_mode
        stays = stat.S_ISREG(mode)
        if number == signal.SIGINT:
            stays = stays or stat.S_ISCHR(mode) or is_read(stream.fileno())
        if not stays:
            os.dup2(other, stream.fileno())


def is_read(pipe: int) -> bool:
    """Whether it still has a reader half a second after Ctrl-C, which may have reached both. One that
    a program sends (`kill -INT`) reaches this process alone.
    """
    poll = select.poll()
    poll.register(pipe, 0)  # for its end alone
    return not poll.poll(500)


def save_last_step(run, step: int) -> None:
    """Saves a run (train.py's Run) that waited for rows in vain or until a signal, which ends it.

    Saving waits for all ranks. So with several it saves only after a signal, which all ranks of a
    machine get, and only if there is one machine: a single rank, or machine, may be what ends.
    """
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    all_know = run.data.caught and ranks_here == run.place.world
    if run.place.world == 1 or all_know:
        run.save(step)
        join_writer()
    if run.data.caught:
        exit_by_signal(run.data.caught)


def exit_by_signal(caught: list[int]) -> None:
    """Ends this rank with its signal's exit code, or SIGTERM's if only another rank got one: at a 0 the
    torchrun of its machine would take the run for finished, and wait five minutes for the others.
    """
    sys.exit(128 + (caught[0] if caught else signal.SIGTERM))


def sequences(run, step: int, count: int) -> str:
    """Which training sequences the last `count` steps saw."""
    batch = run.args.batch_size
    return f"sequences {(step - count) * batch} to {step * batch - 1}"


def stop_diverged(run, step: int) -> None:
    """Ends a run (train.py's Run) whose last run.bad steps had no finite loss or gradient."""
    join_writer()
    if run.place.rank == 0:
        which = sequences(run, step, count=run.bad)
        print(
            f"stopped at step {step}: {run.bad} steps in a row, {which}, had no finite loss or "
            f"gradient; {last_checkpoint(run.folder)}; lower --adam-lr (now {run.args.adam_lr:g}) "
            "and, where Muon is used, --muon-lr",
            file=sys.stderr,
        )
    sys.exit(1)
