"""
Checkpoints of a run directory: step_XXXXXXX.pt, each with its checksum beside it.

A checkpoint is a dict of the step, the model's settings and weights, and the optimiser's state; no
part of it belongs to a rank. It is written by a thread while training goes on.
"""

import errno
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

from looped.console import DAMAGE, fail, flag, outside
from looped.files import file_hash, write_atomic
from looped.settings import unheeded

MISFIT_ERRORS = (*DAMAGE, RuntimeError)  # what a checkpoint of another model can raise

_writer = ThreadPoolExecutor(1)
_pending: list[Future] = []  # the one save under way; a program that ends waits for it


def save_checkpoint(run: Path, step: int, model, optimizer, rank: int, keep_every: int = 0) -> None:
    """Every rank calls it; rank 0 copies the state, and the copy is written while training goes
    on.
    """
    join_writer()
    moments = optimizer.state_dict()
    if rank:
        return
    weights = {}
    for name, p in model.state_dict().items():
        # the parameters are views of shared buffers: clone them, or each file would hold every
        # buffer's padding
        weights[name] = p.to("cpu", copy=True)
    state = {"step": step, "config": asdict(model.cfg), "model": weights, "optimizer": moments}
    path = run / f"step_{step:07d}.pt"
    _pending.append(_writer.submit(write_checkpoint, path, state, keep_every))


def join_writer(wait: bool = True) -> None:
    """Re-raise the error of a failed background save; wait for it first if asked."""
    if _pending and (wait or _pending[0].done()):
        _pending.pop().result()


def write_checkpoint(path: Path, state: dict, keep_every: int = 0) -> None:
    """Writes it whole or not at all, then its checksum; then removes what need not stay: all but
    this one, the one before, and the multiples of keep_every.
    """
    checksum_file(path).unlink(missing_ok=True)  # of the one that this one replaces
    try:
        write_atomic(path, lambda file: torch.save(state, file))
    except RuntimeError as e:
        if isinstance(e.__context__, OSError):  # torch puts its own error before the system's
            raise OSError(*e.__context__.args, str(path)) from None
        raise
    write_atomic(checksum_file(path), file_hash(path).encode())
    older = [old for old in checkpoints(path.parent) if step_of(old) < step_of(path)]
    for old in older[:-1]:
        if keep_every == 0 or step_of(old) % keep_every:
            old.unlink()
            checksum_file(old).unlink(missing_ok=True)


def checksum_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def step_of(path: Path) -> int:
    """The step that a checkpoint's name tells."""
    return int(path.stem.removeprefix("step_"))


def checkpoints(run: Path) -> list[Path]:
    """A run's own checkpoints, oldest first; not files with like names, such as a user's copy."""
    own = [path for path in run.glob("step_*.pt") if path.stem[5:].isdecimal()]
    return sorted(own, key=step_of)


def newest_checkpoint(run: Path) -> Path | None:
    """The newest whose checksum matches; damaged ones are reported and skipped.

    One without a checksum counts as whole: the program was killed after writing it and before
    writing its checksum.
    """
    for path in reversed(checkpoints(run)):
        mark = checksum_file(path)
        if not mark.is_file() or mark.read_bytes().strip() == file_hash(path).encode():
            return path
        print(f"{path} is damaged (its checksum does not hold); trying the one before", flush=True)
    return None


def set_aside_newer(run: Path, whole: Path | None) -> None:
    """Renames the checkpoints after the newest whole one (None: all), which are damaged, so that none
    takes the place of a whole one.
    """
    for newer in checkpoints(run):
        if whole is None or step_of(newer) > step_of(whole):
            newer.rename(newer.with_name(f"{newer.name}.damaged"))
            checksum_file(newer).unlink(missing_ok=True)


def read_checkpoint(path: Path) -> dict:
    """The state, in CPU memory: tensors, numbers, containers; ValueError for anything else."""
    try:
        return dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    except MemoryError:
        raise
    except Exception as e:  # a damaged or hostile file may raise anything
        # of a file that was cut torch's reader looks for a place before its start
        if isinstance(e, OSError) and e.errno != errno.EINVAL:
            raise
        # it may be whole: torch opens no name that is not UTF-8
        why = f"is not a checkpoint, or its name is not UTF-8 ({type(e).__name__})"
        raise ValueError(f"{path} {why}; move it away") from None


def differences(old: dict, new: dict) -> list[str]:
    """In words, the settings of an older run that are others in `new`, or unknown there.

    A model without a loop heeds no setting of the loop.
    """
    idle = unheeded(new["n_core"])
    found = []
    for name, was in old.items():
        now = new.get(name)
        if was != now and name not in idle:
            found.append(f"{flag(name)} {was} (now {now})")
    return found


def same_settings(state: dict, cfg) -> None:
    """Raises ValueError if the checkpoint was made with other settings. A setting that it lacks had
    its default; imported weights have no settings and always pass.
    """
    new = asdict(cfg)
    old = asdict(type(cfg)()) | state.get("config", new)
    differing = differences(old, new)
    if differing:
        raise ValueError(", ".join(differing))


def restore(path: Path, model, optimizer) -> int:
    """Puts a checkpoint into model and optimiser -> its step. One of another model ends the
    program.
    """
    try:
        state = read_checkpoint(path)
    except ValueError as e:
        fail(f"{e} to use the one before")
    advice = "bring back its model.py and flags, or name another run with --out"
    with outside(f"{path} does not fit this model", advice, MISFIT_ERRORS):
        same_settings(state, model.cfg)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
