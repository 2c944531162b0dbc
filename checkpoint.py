"""
A run directory: config.json, log.jsonl, tokenizer.json and checkpoints step_XXXXXXX.pt, each with its checksum.

A checkpoint is a dict of the step, the model's settings and weights, and the optimiser's state; no part of it belongs
to a rank.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path

import torch

from dataloader import fail, file_hash, first_line, write_atomic
from model import Model, ModelConfig
from muon import MuonAdamW

WRITER, WRITING = ThreadPoolExecutor(1), []  # the one checkpoint on its way; a program that ends waits for it


def save_checkpoint(run: Path, step: int, model: Model, opt: MuonAdamW, rank: int) -> None:
    """Every rank calls it; rank 0 copies the state, and the copy is written while training goes on."""
    written()
    optimizer = opt.state_dict()
    if rank:
        return
    # the parameters are views of shared buffers: clone them, or each file would hold every buffer's padding
    weights = {k: v.cpu().clone() for k, v in model.state_dict().items()}
    state = {"step": step, "config": asdict(model.cfg), "model": weights, "optimizer": optimizer}
    WRITING.append(WRITER.submit(write_checkpoint, run / f"step_{step:07d}.pt", state))


def written(wait: bool = True) -> None:
    """Raises what befell the checkpoint on its way, if that is known or is to be waited for."""
    if WRITING and (wait or WRITING[0].done()):
        WRITING.pop().result()


def write_checkpoint(path: Path, state: dict) -> None:
    """Whole or not at all; then its checksum; then the last two stay."""
    try:
        write_atomic(path, lambda f: torch.save(state, f))
    except RuntimeError as e:  # torch puts its own error before the system's
        raise OSError(*e.__context__.args, str(path)) if isinstance(e.__context__, OSError) else e from None
    write_atomic(f"{path}.sha256", file_hash(path).encode())
    for old in sorted(path.parent.glob("step_*.pt"))[:-2]:
        old.unlink()
        Path(f"{old}.sha256").unlink(missing_ok=True)


def newest_checkpoint(run: Path) -> Path | None:
    """The newest whose checksum holds; damaged ones are named and passed over. One without a checksum is whole as far
    as this program goes (killed between writing the two)."""
    for path in sorted(run.glob("step_*.pt"), reverse=True):
        mark = Path(f"{path}.sha256")
        if not mark.is_file() or mark.read_bytes().strip() == file_hash(path).encode():
            return path
        print(f"{path} is damaged (its checksum does not hold); trying the one before", flush=True)
    return None


def read_checkpoint(path: Path) -> dict:
    """Through CPU memory; tensors, numbers and containers only. ValueError for anything else."""
    try:
        return dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    except (OSError, MemoryError):
        raise
    except Exception as e:  # a damaged or hostile file may raise anything
        reason = "more than tensors in it" if "weights_only" in str(e) else type(e).__name__
        raise ValueError(f"{path} is not a checkpoint of this program ({reason}); delete it") from None


def same_settings(state: dict, cfg: ModelConfig) -> None:
    """ValueError where the settings a checkpoint was made with are not these."""
    old, new = state.get("config", {}), asdict(cfg)
    if diff := [f"{k} {old[k]} (here {new[k]})" for k in new if k in old and old[k] != new[k]]:
        raise ValueError(", ".join(diff))


def restore(path: Path, model: Model, opt: MuonAdamW) -> int:
    """Puts a checkpoint into model and optimiser; -> its step. One of another model ends the program."""
    try:
        state = read_checkpoint(path)
        same_settings(state, model.cfg)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])
        return int(state["step"])
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as e:
        fail(f"{path} does not fit this model ({first_line(e)}); delete it to use the one before")


def load_run(run_dir, device: str = "cpu", dtype: torch.dtype | None = None):
    """A finished or running training run -> (model in eval state, ModelConfig, config.json as a dict).

    config["checkpoint"] names the file. Raises FileNotFoundError when there is no configuration or whole checkpoint,
    ValueError when they are damaged or do not fit.
    """
    run = Path(run_dir)
    if not (run / "config.json").is_file():
        raise FileNotFoundError(f"{run} is not a run directory: it has no config.json")
    path = newest_checkpoint(run)
    if path is None:
        raise FileNotFoundError(f"{run} has no whole checkpoint (step_*.pt)")
    state = read_checkpoint(path)
    try:
        config = json.loads((run / "config.json").read_text())
        known = {f.name for f in fields(ModelConfig)}
        cfg = ModelConfig(**{k: v for k, v in config["model"].items() if k in known})
        same_settings(state, cfg)
        model = Model(cfg)
        model.load_state_dict(state["model"])
        model.dtype = dtype or getattr(torch, config.get("dtype", "float32"))
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as e:
        raise ValueError(f"{run}/config.json and {path.name} do not fit ({first_line(e)})") from None
    return model.to(device).eval(), cfg, config | {"checkpoint": path.name}
