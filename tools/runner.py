"""Runs trainings side by side, for tools.ablate and studies/.

A training that is finished is not started again; one that was interrupted continues. What it
prints goes to screen.txt in its folder.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

import train
from dataloader import PackedData
from looped.machine import ONE_PROCESS, ROOT, best_dtype
from looped.run import is_finished, read_log

TRAININGS = Path("runs/ablate/trainings")
TORCHRUN = "-m torch.distributed.run --standalone --local-addr=localhost"
STATUS_SECONDS = 30


@dataclass
class Job:
    """One training."""

    name: str  # on the screen
    flags: list[str]  # of train.py, without --out and --resume
    folder: Path  # the run directory
    code: Path = ROOT  # the checkout whose train.py runs
    arm: str = ""  # when a training fails, those of its arm that wait are dropped


def is_over(folder: Path) -> bool:
    """Whether a training is finished, or was stopped for want of finite losses."""
    if not (folder / "log.jsonl").exists():
        return False
    last = read_log(folder).train[-train.BAD_STEPS :]
    skipped = sum(record.get("skipped", 0) for record in last)
    return is_finished(folder) or skipped == train.BAD_STEPS


def rows_of(flags: list[str]) -> str:
    """The hash of a training's rows. Train.py's default ones are made if they are not there."""
    args = train.parse_args(flags)
    rows = args.data or train.default_rows(train.model_config(args), ONE_PROCESS)
    return PackedData(rows).sha256


def folder_of(code: str, flags: list[str], rows: str) -> Path:
    """Where trainings are kept: by all that decides their numbers (hashes of the code and of the
    rows, flags, dtype), the seed aside.
    """
    dtype = train.parse_args(flags).dtype
    if dtype == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = best_dtype(torch.device(device))
    told = json.dumps([code, flags, rows, dtype])
    return TRAININGS / hashlib.sha256(told.encode()).hexdigest()[:12]


def default_side_by_side() -> int:
    """As many trainings as there are cards, or else cores."""
    return torch.cuda.device_count() or os.cpu_count()


# -------------------------------------------------------------------------------------------------
# Running


def launch(job: Job, slot: int, side_by_side: int, ranks: int) -> subprocess.Popen:
    """Starts a training on the cores and cards of one of the places side by side."""
    threads = max(1, os.cpu_count() // (side_by_side * ranks))
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    cards = torch.cuda.device_count()
    if cards:
        first = slot * ranks
        own = [str(i % cards) for i in range(first, first + ranks)]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    line = [sys.executable]
    if ranks > 1:
        line += [*TORCHRUN.split(), f"--nproc_per_node={ranks}"]
    line += [job.code / "train.py", *job.flags, "--out", job.folder, "--resume"]
    job.folder.mkdir(parents=True, exist_ok=True)
    with open(job.folder / "screen.txt", "a") as out:
        # a session of its own: Ctrl-C reaches this process alone, which passes it on
        return subprocess.Popen(line, stdout=out, stderr=out, env=env, start_new_session=True)


def run_all(jobs: list[Job], side_by_side: int, ranks: int, ended) -> None:
    """Trains what is not over, so many at a time.

    ended(job, failed) is called for each training that is over, at once for those of before. An
    exception from it ends the others, as Ctrl-C does; they save.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    over = [job for job in jobs if is_over(job.folder)]
    waiting = [job for job in jobs if job not in over]
    say(f"{len(waiting)} of {len(jobs)} trainings are left, {side_by_side} side by side")
    for job in over:
        ended(job, False)
    running = {}  # {place: (job, process)}
    shown = time.monotonic()
    try:
        while waiting or running:
            free = set(range(side_by_side)) - running.keys()
            for slot, job in zip(free, waiting):
                running[slot] = job, launch(job, slot, side_by_side, ranks)
            del waiting[: len(free)]
            time.sleep(0.2)
            over = [slot for slot, (_, process) in running.items() if process.poll() is not None]
            for slot in over:
                job, _ = running.pop(slot)
                failed = not is_over(job.folder)
                if failed:
                    waiting = [other for other in waiting if other.arm != job.arm]
                    say(f"{job.name} failed; {job.folder}/screen.txt ends with")
                    say(error_of(job))
                ended(job, failed)
            if running and time.monotonic() - shown > STATUS_SECONDS:
                going = [job for job, _ in running.values()]
                say(progress(going, len(waiting)))
                shown = time.monotonic()
    except KeyboardInterrupt:
        say("stopping: the trainings save; the same command continues")
        sys.exit(130)
    finally:
        stop(running)


def stop(running: dict) -> None:
    """Asks the trainings to save and end, and waits for them."""
    for _, process in running.values():
        process.terminate()
    for _, process in running.values():
        process.wait()


# -------------------------------------------------------------------------------------------------
# The screen


def say(text: str) -> None:
    print(text, flush=True)


def error_of(job: Job, count: int = 40) -> str:
    """The traceback, or the error of one line, that a training ended with: its last lines."""
    screen = (job.folder / "screen.txt").read_text(errors="replace")
    found = []
    for line in screen.splitlines()[-count:]:
        if line.startswith(("Traceback", "error:")):
            found = []
        found.append(line)
    return "\n".join(found)


def progress(running: list[Job], waiting: int) -> str:
    """The step of each training, and the time left for all."""
    parts = []
    left = []  # seconds, of each training
    whole = []
    for job in running:
        file = job.folder / "log.jsonl"
        steps = read_log(file).train if file.exists() else []
        if not steps:
            parts.append(f"{job.name} starts")
            continue
        step = steps[-1]["step"]
        total = json.loads((job.folder / "config.json").read_text())["steps"]
        seconds = fmean(record["ms"] for record in steps[-50:]) / 1e3
        parts.append(f"{job.name} {step}/{total}")
        left.append((total - step) * seconds)
        whole.append(total * seconds)
    if left:
        seconds = (sum(left) + waiting * fmean(whole)) / len(left)
        parts.append(f"{waiting} waiting, {seconds / 60:.0f} min left")
    return "  ".join(parts)
