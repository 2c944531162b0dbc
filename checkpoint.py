"""
A run directory: config.json, log.jsonl, tokenizer.json and checkpoints step_XXXXXXX.pt, each with its checksum.

A checkpoint is a dict of the step, the model's weights and the optimiser's state; no part of it belongs to a rank.
"""

import hashlib
import json
from dataclasses import fields
from pathlib import Path

import torch

from dataloader import write_atomic
from model import Model, ModelConfig
from muon import MuonAdamW


def save_checkpoint(run: Path, step: int, model: Model, opt: MuonAdamW, rank: int) -> None:
    """Every rank calls it, rank 0 writes, whole or not at all; the last two stay."""
    optimizer = opt.state_dict()
    if rank:
        return
    # the parameters are views of shared buffers: clone them, or each file would hold every buffer's padding
    state = {"step": step, "model": {k: v.cpu().clone() for k, v in model.state_dict().items()}, "optimizer": optimizer}
    path = run / f"step_{step:07d}.pt"
    write_atomic(path, lambda f: torch.save(state, f))
    write_atomic(run / f"{path.name}.sha256", digest(path).encode())
    for old in sorted(run.glob("step_*.pt"))[:-2]:
        old.unlink()
        (run / f"{old.name}.sha256").unlink(missing_ok=True)


def digest(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def newest_checkpoint(run: Path) -> dict | None:
    """The newest checkpoint whose checksum holds, loaded through CPU memory; damaged ones are named and passed over."""
    for path in sorted(run.glob("step_*.pt"), reverse=True):
        mark = run / f"{path.name}.sha256"
        if mark.is_file() and mark.read_text().strip() == digest(path):
            return torch.load(path, map_location="cpu", weights_only=True)
        print(f"{path} is damaged or incomplete (its checksum does not hold); trying the one before")
    return None


def load_run(run_dir, device: str = "cpu", dtype: torch.dtype | None = None):
    """A finished or running training run -> (model in eval state, ModelConfig, config.json as a dict).

    Raises FileNotFoundError when there is no configuration or checkpoint, ValueError when they do not fit.
    """
    run = Path(run_dir)
    if not (run / "config.json").is_file():
        raise FileNotFoundError(f"{run} is not a run directory: it has no config.json")
    config = json.loads((run / "config.json").read_text())
    known = {f.name for f in fields(ModelConfig)}
    cfg = ModelConfig(**{k: v for k, v in config["model"].items() if k in known})
    files = sorted(run.glob("step_*.pt"))
    if not files:
        raise FileNotFoundError(f"{run} has no checkpoint (step_*.pt)")
    state = torch.load(files[-1], map_location="cpu", weights_only=True, mmap=True)
    model = Model(cfg)
    model.load_state_dict(state["model"])
    model.dtype = dtype or getattr(torch, config.get("dtype", "float32"))
    return model.to(device).eval(), cfg, config
