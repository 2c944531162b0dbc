"""Trains arms at several seeds, side by side, for tools.ablate and studies/.

Each training is kept in runs/ablate/trainings/KEY-sSEED, where KEY is its arm's. A finished one is not
started again, an interrupted one continues, and one that another command trains is waited for. What a
training prints is in its screen.txt.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

import train
from looped.common import fail
from looped.run import is_finished, read_log
from tools.arms import TRAININGS, Arm, Run, identity, read_run

TORCHRUN = "-m torch.distributed.run --standalone --local-addr=localhost"
STATUS_SECONDS = 30


@dataclass
class Training:
    arm: Arm
    seed: int
    began: float = 0.0  # seconds, of time.monotonic

    @property
    def name(self) -> str:
        return f"{self.arm.name} s{self.seed}"

    @property
    def folder(self) -> Path:
        return TRAININGS / f"{self.arm.key}-s{self.seed}"

    def is_over(self) -> bool:
        """Whether it is finished, or was stopped for want of finite losses."""
        if not (self.folder / "log.jsonl").exists():
            return False
        last = read_log(self.folder).train[-train.BAD_STEPS :]
        skipped = sum(record.get("skipped", 0) for record in last)
        return is_finished(self.folder) or skipped == train.BAD_STEPS

    def read(self) -> Run:
        """Its run, which must be what its arm says."""
        run = read_run(self.folder, self.name)
        if identity(run.config) != identity(self.arm.config):
            fail(f"{self.folder} holds another training than its name says; delete it")
        return run


# -------------------------------------------------------------------------------------------------
# Cores and cards


def cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def cards() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else map(str, range(torch.cuda.device_count()))
    return [*names][: torch.cuda.device_count()]


def default_side_by_side() -> int:
    """As many trainings as there are cards, or else cores for their threads."""
    threads = int(os.environ.get("OMP_NUM_THREADS", 1))
    return len(cards()) or max(1, cores() // threads)


def launch(training: Training, slot: int, side_by_side: int, ranks: int) -> subprocess.Popen:
    """Starts a training on the cores and cards of one of the places side by side."""
    threads = max(1, cores() // (side_by_side * ranks))
    env = {"OMP_NUM_THREADS": str(threads)} | os.environ
    names = cards()
    if names:
        first = slot * ranks
        places = range(first, first + ranks)
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names[i % len(names)] for i in places)
    line = [sys.executable]
    if ranks > 1:
        line += [*TORCHRUN.split(), f"--nproc_per_node={ranks}"]
    arm = training.arm
    line += [arm.code / "train.py", *arm.flags, "--seed", str(training.seed)]
    line += ["--out", training.folder, "--resume"]
    training.began = time.monotonic()
    with open(training.folder / "screen.txt", "a") as out:
        # a session of its own: Ctrl-C reaches this process alone, which passes it on
        return subprocess.Popen(line, stdout=out, stderr=out, env=env, start_new_session=True)


# -------------------------------------------------------------------------------------------------
# Running


def train_arms(
    trainings: list[Training], side_by_side: int, ranks: int = 1
) -> Iterator[Training | None]:
    """Trains what is not over, so many at a time. Yields each training that is over, its run added to its
    arm, and None from time to time. Who stops listening ends the others; they save.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    waiting = [training for training in trainings if not training.is_over()]
    say(f"{len(waiting)} of {len(trainings)} trainings are left, {side_by_side} side by side")
    for training in trainings:
        if training not in waiting:
            yield ended(training)
    running = {}  # {place: (training, its lock, process)}
    shown = time.monotonic()
    try:
        while waiting or running:
            start(waiting, running, side_by_side, ranks)
            time.sleep(0.2)
            over = [slot for slot, (*_, process) in running.items() if process.poll() is not None]
            for slot in over:
                training, lock, _ = running.pop(slot)
                lock.close()
                yield ended(training)
            if time.monotonic() - shown > STATUS_SECONDS:
                say(progress([training for training, *_ in running.values()], len(waiting)))
                shown = time.monotonic()
                yield None
    except KeyboardInterrupt:
        say("stopping: the trainings save; the same command continues")
        sys.exit(130)
    finally:
        for *_, process in running.values():
            process.terminate()
        for *_, process in running.values():
            process.wait()


def start(waiting: list[Training], running: dict, side_by_side: int, ranks: int) -> None:
    """Fills the free places with those that wait and that no other command trains."""
    for training in [*waiting]:
        free = set(range(side_by_side)) - running.keys()
        lock = claim(training) if free else None
        if lock:
            waiting.remove(training)
            slot = min(free)
            running[slot] = training, lock, launch(training, slot, side_by_side, ranks)


def claim(training: Training):
    """The training's lock, an open file; None while another command has it."""
    training.folder.mkdir(parents=True, exist_ok=True)
    lock = open(training.folder / ".claim", "w")  # noqa: SIM115
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    lock.close()
    return None


def ended(training: Training) -> Training:
    """Adds a training's run to its arm; one that failed ends the program."""
    if not training.is_over():
        say(f"{training.name} failed; {training.folder}/screen.txt ends with")
        say(error_of(training))
        fail(f"{training.arm.name} does not train, see above; the other trainings are saved")
    training.arm.runs.append(training.read())
    return training


# -------------------------------------------------------------------------------------------------
# The screen


def say(text: str) -> None:
    print(text, flush=True)


def error_of(training: Training, count: int = 40) -> str:
    """The traceback, or the error of one line, that a training ended with: its last lines."""
    screen = (training.folder / "screen.txt").read_text(errors="replace")
    last = []
    for line in screen.splitlines()[-count:]:
        if line.startswith(("Traceback", "error:")):
            last = []
        last.append(line)
    return "\n".join(last)


def progress(running: list[Training], waiting: int) -> str:
    """The step of each training, and the time left for all, starts and validations included."""
    parts = []
    left = []  # seconds, of each training
    whole = []
    for training in running:
        file = training.folder / "log.jsonl"
        log = read_log(file) if file.exists() else None
        done = log.train[-1]["step"] - log.starts[-1]["step"] if log and log.train else 0
        if done < 1:
            parts.append(f"{training.name} starts")
            continue
        total = json.loads((training.folder / "config.json").read_text())["steps"]
        step = log.train[-1]["step"]
        pace = (time.monotonic() - training.began) / done
        parts.append(f"{training.name} {step}/{total}")
        left.append((total - step) * pace)
        whole.append(total * pace)
    if left:
        seconds = (sum(left) + waiting * fmean(whole)) / len(left)
        parts.append(f"{waiting} waiting, {seconds / 60:.0f} min left")
    return "  ".join(parts)
