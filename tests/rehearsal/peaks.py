# ruff: noqa: E402
"""
Peaks of memory that torch's own CUDA allocator sees in training steps on the card that is not there.

    PY=… bash tests/rehearsal/dry.sh tests/rehearsal/peaks.py parcae-140m:8 parcae-140m:32:loss_chunk=8192 rdm-100m:8:eager
    … peaks.py parcae-140m:8:keep_less parcae-140m:8:residual_dtype=\"float32\"

One JSON line a case: GiB at rest, at the peak of forward and backward at the deepest depth, at the peak of the
optimiser's step. Inductor's kernels are written but not compiled. Loops without gradient keep nothing: two of them do.
"""

import gc
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from looped.depth import deepest
from looped.memory import keep_less
from model import PRESETS, Model, config_of
from muon import Optimizer, Rates
from train import OPTIMIZERS, recipe_of

GIB = 2**30
ERFINV = torch.erfinv


class Launches:
    """Inductor's kernels of a step: how many, and the bytes of the tensors that they are given."""

    count = 0
    bytes = 0


def write_kernels_only() -> None:
    """Lets Inductor write its kernels, and neither compile nor launch them: a launch is counted."""
    from torch._inductor.runtime import triton_heuristics

    def launch(self, *args, **settings):
        Launches.count += 1
        Launches.bytes += sum(x.nbytes for x in args if isinstance(x, torch.Tensor))

    tuner = triton_heuristics.CachingAutotuner
    for kind in [tuner, *tuner.__subclasses__()]:
        kind.precompile = lambda self, *args, **settings: None
        kind.run = launch


def build(name: str, compiled: bool, world: int = 1, **settings):
    """Model and optimiser of a preset on the card, for the last of `world` ranks, weights undefined; settings: of ModelConfig or of Model."""
    network = vars(PRESETS[name]) | settings
    cfg = config_of(network)
    with torch.device("cuda"):
        model = Model(cfg)
    model.to("cuda")
    model.dtype = torch.bfloat16
    for setting, value in settings.items():
        if setting == "residual_dtype":
            model.residual_dtype = getattr(torch, value)
        elif setting not in vars(cfg):
            setattr(model, setting, value)
    recipe = recipe_of(name)
    args = SimpleNamespace(muon_lr=1e-3, adam_lr=1e-3, weight_decay=0.0)
    optimizer = Optimizer(
        OPTIMIZERS[recipe.optimizer](model, args, compiled), rank=world - 1, world=world
    )
    if compiled:
        model.compile_pieces()
    return model, optimizer


def reset() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def peaks(name: str, rows: int, compiled: bool = True, **settings) -> dict:
    """GiB at rest, and at the peaks of a second step and a second update."""
    reset()
    model, optimizer = build(name, compiled, **settings)
    cfg = model.cfg
    found = {"static": torch.cuda.memory_allocated()}
    tokens = torch.zeros(rows, cfg.seq_len + 1, dtype=torch.int64, device="cuda")
    keys = torch.zeros(rows, dtype=torch.int64, device="cuda")
    n, k = deepest(cfg, rows)
    n = np.minimum(n, 2)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        Launches.count = Launches.bytes = 0
        loss, _ = model.loss(tokens[:, :-1], tokens[:, 1:], keys, n, k)
        found["forward"] = torch.cuda.memory_allocated()
        loss.backward()
        found["peak"] = torch.cuda.max_memory_allocated()
        found["reserved"] = torch.cuda.max_memory_reserved()
        del loss
    found["kernels' bytes"] = Launches.bytes
    kernels = Launches.count
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        optimizer.step(Rates(), torch.zeros(3, device="cuda"))
        found["update"] = torch.cuda.max_memory_allocated()
    gib = {what: round(size / GIB, 2) for what, size in found.items()}
    return gib | {"kernels": kernels}


def main(cases: list[str]) -> None:
    write_kernels_only()
    torch.backends.cuda.enable_cudnn_sdp(False)
    for case in cases:
        name, rows, *more = case.split(":")
        settings = {}
        for setting in more:
            key, _, value = setting.partition("=")
            settings[key] = json.loads(value) if value else True
        compiled = not settings.pop("eager", False)
        keep_less(settings.pop("keep_less", False))
        # torch makes the GPU's erfinv with NVRTC, which needs a driver; this takes the same memory
        torch.erfinv = ERFINV if compiled else torch.atan
        start = time.process_time()
        found = peaks(name, int(rows), compiled, **settings)
        seconds = round(time.process_time() - start)
        print(json.dumps({"case": case, **found, "cpu_seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
