"""A run directory: config.json, log.jsonl, tokenizer.json and checkpoints step_XXXXXXX.pt."""

import fcntl
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from looped.common import fail, finite, write_atomic, write_json
from looped.machine import Rank, peak_flops, peak_memory

# Flags that decide no weights: they may change when a run is continued.
MAY_CHANGE = {
    "out", "resume", "stop_at", "save_every", "keep_every", "wandb", "data", "dry_run",
    "eval_every", "eval_tokens", "eval_depths",
    "device", "device_batch_size", "compile", "checkpoint_loops",
}  # fmt: skip
# Flags that decide no number, or that others imply: the network and the rates imply the preset, the steps
# the length.
IMPLIED = {
    "out", "resume", "stop_at", "save_every", "keep_every", "wandb", "data", "dry_run",
    "preset", "tokens", "flops", "init_from",
}  # fmt: skip

# What the screen shows of a step, {name in its record: how}
COLUMNS = {
    "loss": "loss {:7.4f}",
    "lr_multiple": "lr × {:.3f}",
    "grad_norm": "grad {:7.3f}",
    "decay_max": "decay {:.4f}",
    "depth_mean": "depth {:5.2f}",
    "tok_s": "{:9,.0f} tokens/s",
    "mem_gb": "{:5.1f} GiB",
    "mfu": "mfu {:.3f}",
    "minutes_left": "left {:6.1f} min",
}


# -------------------------------------------------------------------------------------------------
# Checkpoints


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def checkpoints(folder) -> list[Path]:
    """A run's checkpoints, oldest first."""
    name = "step_" + "[0-9]" * 7 + ".pt"
    return sorted(Path(folder).glob(name))


def newest_checkpoint(folder) -> Path | None:
    return (checkpoints(folder) or [None])[-1]


def read_checkpoint(path: Path) -> dict:
    """{"step", "config", "model", "optimizer"}: settings and tensors by name, in CPU memory."""
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as e:
        raise ValueError(f"{path} cannot be read; delete it to use the one before") from e


def save_checkpoint(folder: Path, step: int, model, optimizer, rank: Rank, keep_every: int) -> None:
    """Every rank calls it; rank 0 writes. The newest two stay, and multiples of keep_every."""
    moments = optimizer.state_dict()
    if rank.number:
        return
    weights = {}
    for name, p in model.state_dict().items():
        # a copy: p is a view of a buffer, which torch would save whole
        weights[name] = p.to("cpu", copy=True)
    state = {"step": step, "config": asdict(model.cfg), "model": weights, "optimizer": moments}
    write_atomic(folder / f"step_{step:07d}.pt", lambda file: torch.save(state, file))
    for old in checkpoints(folder)[:-2]:
        if keep_every == 0 or step_of(old) % keep_every:
            old.unlink()


def restore(folder: Path, model, optimizer) -> int:
    """Loads the newest checkpoint -> its step; 0 where there is none."""
    path = newest_checkpoint(folder)
    if path is None:
        return 0
    state = read_checkpoint(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


# -------------------------------------------------------------------------------------------------
# Beginning and continuing


def settings_of(config: dict) -> dict:
    """What must stay when a run is continued: {flag: value}."""
    settings = config["model"] | config["args"] | {"rows (--data)": config["data"]["sha256"][:16]}
    return {name: value for name, value in settings.items() if name not in MAY_CHANGE}


def decisive(config: dict) -> dict:
    """All that decides a run's numbers: equal means the same losses, to the last bit on one machine."""
    settings = config["model"] | config["args"]
    decides = {name: value for name, value in settings.items() if name not in IMPLIED}
    decides["rows (--data)"] = config["data"]["sha256"]
    decides["weights of --init-from"] = config["init_from"] and config["init_from"]["sha256"]
    decides["torch"] = config["versions"]["torch"]
    for name in ("code", "steps", "ranks", "dtype"):
        decides[name] = config[name]
    return decides


def begun_config(folder: Path, resume: bool) -> dict | None:
    """config.json of the run to continue, None for a new one."""
    file = folder / "config.json"
    if not file.exists():
        return None
    if not resume:
        fail(f"{folder} exists; add --resume to continue it, or name another with --out")
    return json.loads(file.read_text())


def check_same_settings(folder: Path, begun: dict, config: dict) -> None:
    """Refuses to continue a run with other settings."""
    now = settings_of(config)
    changed = []
    for name, was in settings_of(begun).items():
        value = now.get(name)
        if value != was:
            flag = name.replace("_", "-")
            changed.append(f"{flag} {was} (now {value})")
    if changed:
        fail(
            f"{folder} was begun with other settings: {', '.join(changed)}; repeat them, or name "
            "another run with --out"
        )


def is_finished(folder: Path) -> bool:
    """Whether the validation at the end of a run is in its log."""
    evals = read_log(folder).evals
    return bool(evals) and evals[-1].get("final", False)


class RunLog:
    """A run's record, written by rank 0: log.jsonl with every step, lines on the screen, optionally
    wandb. While it is open, no other process can train the run.
    """

    def __init__(self, config: dict, first: int, tokenizer: Path, rank: Rank):
        self.config = config
        self.folder = Path(config["args"]["out"])
        self.steps = config["steps"]
        self.first = first
        self.rank = rank
        self.step_tokens = config["args"]["batch_size"] * config["model"]["seq_len"]
        self.wandb = None
        if rank.number == 0:
            self.open(tokenizer)
        self.began = self.last = time.perf_counter()

    def open(self, tokenizer: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.folder / ".lock", "w")  # noqa: SIM115
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"another process trains {self.folder}; wait, or name another run with --out")
        if not (self.folder / "config.json").exists():
            write_json(self.folder / "config.json", self.config)
            write_atomic(self.folder / "tokenizer.json", tokenizer.read_bytes())
        self.file = open(self.folder / "log.jsonl", "a")  # noqa: SIM115
        if self.config["args"]["wandb"]:
            import wandb

            self.wandb = wandb.init(
                project="looped",
                name=self.folder.name,
                id=self.config["id"],
                config=self.config,
                resume="allow",
            )
        self.record("start", self.first, code=self.config["code"], ranks=self.rank.world)

    def record(self, kind: str, step: int, **numbers) -> None:
        """Writes a line of log.jsonl and resets the clock, so that an evaluation's time is not counted as
        part of the next step.
        """
        if self.rank.number == 0:
            entry = {"kind": kind, "step": step, "tokens": step * self.step_tokens, **numbers}
            self.file.write(json.dumps(finite(entry), allow_nan=False) + "\n")
            self.file.flush()
            if self.wandb:
                self.wandb.log({f"{kind}/{name}": x for name, x in numbers.items()}, step=step)
        self.last = time.perf_counter()

    def step(self, step: int, numbers: dict) -> None:
        """A training step's line, here and on the screen."""
        now = time.perf_counter()
        seconds = now - self.last
        speed = {"tok_s": self.step_tokens / seconds, "ms": seconds * 1e3}
        numbers = numbers | speed | {"mem_gb": peak_memory(self.rank.device)}
        self.record("train", step, **numbers)
        if step % 10 == 0 or step in (1, self.steps):
            pace = (now - self.began) / (step - self.first)
            left = (self.steps - step) * pace
            self.show(step, numbers | {"minutes_left": left / 60})

    def show(self, step: int, numbers: dict) -> None:
        peak = peak_flops(self.rank.device)
        if peak:
            flops = numbers["tok_s"] * self.config["flops_per_token"]
            numbers["mfu"] = flops / (peak * self.rank.world)
        parts = [f"step {step:6d}/{self.steps}"]
        for name, text in COLUMNS.items():
            if name in numbers:
                parts.append(text.format(numbers[name]))
        self.rank.say("  ".join(parts))

    def close(self) -> None:
        if self.rank.number == 0:
            self.file.close()
            self.lock.close()


# -------------------------------------------------------------------------------------------------
# Reading


class Log(NamedTuple):
    """The records of log.jsonl by kind, each in order of its steps."""

    train: list[dict]  # one a step
    evals: list[dict]
    starts: list[dict]  # of the beginning and of each --resume


def read_log(path) -> Log:
    """A run's log; of a step that was repeated after --resume the last record counts. Numbers that
    were not finite, null in the file, are NaN.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "log.jsonl"
    by_kind = {"train": {}, "eval": {}, "start": {}}
    for line in file.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # cut off by a kill
            continue
        kind = record.pop("kind")
        step = record["step"]
        if kind == "train":
            record = with_nan(record)
        elif kind == "eval":
            record["loss"] = by_depth(record["loss"])
            record["bpb"] = by_depth(record["bpb"])
        elif kind == "start":  # a run that began again from an earlier step
            starts = by_kind[kind].items()
            by_kind[kind] = {at: start for at, start in starts if at < step}
        by_kind[kind][step] = record
    return Log(in_order(by_kind["train"]), in_order(by_kind["eval"]), in_order(by_kind["start"]))


def in_order(by_step: dict) -> list[dict]:
    return [by_step[step] for step in sorted(by_step)]


def with_nan(values: dict) -> dict:
    return {name: math.nan if x is None else x for name, x in values.items()}


def by_depth(values: dict) -> dict[int, float]:
    """JSON's keys are strings."""
    return {int(depth): x for depth, x in with_nan(values).items()}
