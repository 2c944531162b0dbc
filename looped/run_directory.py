"""A run directory: config.json, log.jsonl, tokenizer.json and checkpoints."""

import contextlib
import json
import os
import time
from pathlib import Path

import torch

from looped.checkpoint import differences, newest_checkpoint, set_aside_newer
from looped.console import DAMAGE, fail, note, outside
from looped.files import lock, write_atomic
from looped.logs import read_log
from looped.machine import peak_flops, peak_memory
from looped.settings import eval_depths
from looped.validation import rows_asked

# Settings that may change when a run is continued; all others decide its weights.
CHANGEABLE = {
    "out", "resume", "stop_at", "save_every", "keep_every", "log_every", "wandb", "data", "bundle",
    "eval_every", "eval_tokens", "eval_depths", "core_every",
    "device", "device_batch_size", "compile", "loss_chunk", "checkpoint_loops",
}  # fmt: skip


def default_directory(args, cfg) -> str:
    """Where a run goes that was given no --out."""
    gain = f"-{cfg.gain}" if cfg.n_core and cfg.injection == "diagonal" else ""
    return f"runs/{args.preset}{gain}-s{args.seed}"


def decisive(config: dict) -> dict:
    """Of config.json what must stay when a run is continued, in one dictionary."""
    flags = {name: value for name, value in config["args"].items() if name not in CHANGEABLE}
    hashes = {name: str(config[name]["sha256"])[:16] for name in ("tokenizer", "data")}
    return config["model"] | flags | hashes


def made_no_step(run: Path) -> bool:
    """Whether a run failed before its first step was recorded, and nothing else is in its directory:
    begun again, nothing of it is lost.
    """
    log = run / "log.jsonl"
    found = {path.name for path in run.glob("[!.]*")}
    made = {"config.json", "tokenizer.json", log.name}
    return found <= made and not (log.is_file() and read_log(log).train)


def begun_config(run: Path, resume: bool) -> dict | None:
    """config.json of the run to continue; None where none was begun, or none got anywhere."""
    file = run / "config.json"
    if not file.is_file():
        return None
    if not resume:
        if made_no_step(run):
            return None
        fail(f"{run} exists; add --resume to continue it, or name another with --out")
    with outside(f"{file} is damaged", "restore it, or name another run with --out"):
        begun = json.loads(file.read_text())
        decisive(begun)
        return begun


def prepare_run(run: Path, begun: dict | None, config: dict) -> Path | None:
    """Fills the directory of a new run, or checks that of the run to continue -> the checkpoint to
    continue from. What an older run's config.json lacks is checked with that checkpoint.
    """
    if begun:
        differing = ", ".join(differences(decisive(begun), decisive(config)))
        if differing:
            new = f"name another with --out; --init-from {run} begins that with these weights"
            advice = f"repeat them, or {new}"
            fail(f"{run} was begun with other settings: {differing}; {advice}")
    newest = newest_checkpoint(run)
    set_aside_newer(run, newest)
    if newest:
        if begun["code"] != config["code"]:
            note(f"{run} was begun by other code than this; a report says which steps are whose")
        begun["args"]["keep_every"] = config["args"]["keep_every"]  # may be given anew
        # the same, but they may have moved
        begun["data"] = config["data"]
        begun["tokenizer"] = config["tokenizer"]
        begun["args"]["data"] = config["args"]["data"]
        config = begun
    elif begun:  # the code may have changed since
        print(f"{run} has no whole checkpoint; beginning again at step 0", flush=True)
        if (run / "log.jsonl").exists():  # the steps of another run than the one that begins now
            os.replace(run / "log.jsonl", run / "log.before.jsonl")
    write_atomic(run / "config.json", json.dumps(config, indent=1).encode())
    write_atomic(run / "tokenizer.json", Path(config["tokenizer"]["path"]).read_bytes())
    for left in run.glob(".step_*.tmp"):  # of a killed run
        left.unlink()
    return newest


_held = contextlib.ExitStack()  # the lock of the run that this process trains


def hold_run(run: Path) -> None:
    """Makes the run directory, and keeps other processes from it until release_run, or until this
    one ends; refuses one that holds anything other than a run.
    """
    foreign = sorted(run.glob("[!.]*"))
    if foreign and not (run / "config.json").is_file():
        what = f"{run} holds {foreign[0].name} but no config.json: no run to continue"
        fail(f"{what}; restore that, or name another with --out")
    advice = "name another with --out"
    with outside(f"the run directory is {run}, and cannot be made", advice, OSError):
        _held.enter_context(lock(run))


def release_run() -> None:
    """Lets other processes have the run."""
    _held.close()


os.register_at_fork(after_in_child=release_run)  # the lock is its parent's


def is_finished(run: Path, args, cfg, data) -> bool:
    """Whether the log ends with the final validation, at the depths and on the tokens of args."""
    names = {str(depth) for depth in eval_depths(args, cfg, final=True)}
    tokens = rows_asked(data, args.eval_tokens) * cfg.seq_len
    with contextlib.suppress(OSError, *DAMAGE):
        last = json.loads((run / "log.jsonl").read_text().splitlines()[-1])
        return last["final"] and last["loss"].keys() == names and last["eval_tokens"] == tokens
    return False


# What the screen shows of a step, {name in its record: how}
COLUMNS = {
    "loss": "loss {:7.4f}",
    "lr_multiple": "lr × {:.3f}",
    "grad_norm": "grad {:7.3f}",
    "decay_max": "decay {:.4f}",
    "depth_mean": "depth {:5.2f}",
    "tok_s": "{:9,.0f} tok/s",
    "ms": "{:7.1f} ms",
    "mem_gb": "{:5.1f} GiB",
    "minutes_left": "left {:6.1f} min",
    "mfu": "mfu {:.3f}",
}


class RunLog:
    """Rank 0's record of a run: log.jsonl with every step, lines on the screen, optionally wandb."""

    def __init__(self, run: Path, config: dict, args, device: torch.device):
        self.config = config
        self.every = args.log_every
        self.device = device
        self.steps = 0  # that this process has made
        self.began = time.perf_counter()
        self.last = self.began
        path = run / "log.jsonl"
        self.file = open(path, "a")  # noqa: SIM115
        if path.read_bytes()[-1:] not in (b"", b"\n"):
            self.file.write("\n")  # a line that a kill cut off must not run into the next
        self.wandb = None
        if args.wandb:
            import wandb

            self.wandb = wandb.init(
                project="looped", name=run.name, id=config["id"], config=config, resume="allow"
            )

    def record(self, entry: dict) -> None:
        """A line of log.jsonl."""
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()
        if self.wandb:
            named = {f"{entry['kind']}/{name}": value for name, value in entry.items()}
            self.wandb.log(named, step=entry["step"])

    def pause(self) -> None:
        """What happened since the last step is not part of the next one's time."""
        self.last = time.perf_counter()

    def step(self, entry: dict) -> None:
        """entry: what the step was and gave; the clock is read here."""
        now = time.perf_counter()
        ms = (now - self.last) * 1e3
        self.last = now
        self.steps += 1
        tokens = entry["tokens"] // entry["step"]
        entry["tok_s"] = tokens * 1e3 / ms
        entry["ms"] = ms
        entry["time"] = now - self.began
        entry["mem_gb"] = peak_memory(self.device)
        self.record(entry)
        if entry["step"] % self.every == 0 or entry["step"] in (1, self.config["steps"]):
            self.show(entry)

    def show(self, entry: dict) -> None:
        """The line of a step."""
        step = entry["step"]
        steps = self.config["steps"]
        shown = dict(entry)
        shown["minutes_left"] = (steps - step) * entry["time"] / self.steps / 60
        peak = peak_flops(self.device)
        if peak:
            flops = entry["tok_s"] * self.config["flops_per_token"]
            shown["mfu"] = flops / (peak * self.config["ranks"])
        parts = [text.format(shown[name]) for name, text in COLUMNS.items() if name in shown]
        print(f"step {step:6d}/{steps}  " + "  ".join(parts), flush=True)
