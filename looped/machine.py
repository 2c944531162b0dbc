"""The machine: ranks and devices, what the processor can do, and what is recorded of code and versions."""

import ast
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import resource
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group exists: its defaults would keep the group alive

from looped.common import fail

ROOT = Path(__file__).parents[1]
DEVICES = ("auto", "cuda", "mps", "cpu")
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "4090": 165e12,
}  # dense bfloat16; the first whose name is part of the device's


class Rank(NamedTuple):
    """This process among those that torchrun started."""

    number: int
    world: int  # how many ranks there are
    device: torch.device

    def say(self, text: str) -> None:
        """Prints on rank 0."""
        if self.number == 0:
            print(text, flush=True)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def all(self, fine: bool) -> bool:
        """Whether all ranks are fine; every rank calls it."""
        if self.world == 1:
            return fine
        least = torch.tensor(float(fine), device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return least.item() > 0


ONE_PROCESS = Rank(0, 1, torch.device("cpu"))


def connect(device_name: str) -> Rank:
    """Joins the ranks that torchrun started, if any, each with a device of the given kind."""
    number = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    device = pick_device(device_name, int(os.environ.get("LOCAL_RANK", 0)))
    tune_malloc()
    if world > 1:
        gpu = device if device.type == "cuda" else None
        # ranks wait for rank 0 while it packs rows, fetches data or writes to a slow disk
        patience = timedelta(hours=1)
        dist.init_process_group("nccl" if gpu else "gloo", device_id=gpu, timeout=patience)
    return Rank(number, world, device)


def pick_device(name: str, local: int) -> torch.device:
    """The device of this machine's process number `local`. Ends the program where a GPU is there that
    torch cannot use: a large model on the CPU would seem to hang.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        if name == "cpu" and Path("/dev/nvidia0").exists() and not hidden:
            fail(
                f"torch {torch.__version__} cannot use this machine's GPU: its driver is older than "
                f"CUDA {torch.version.cuda}; update the driver, or say --device cpu"
            )
    if name != "cuda":
        return torch.device(name)
    # freed memory of one shape serves another: the loop's active rows change all the time
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if local >= torch.cuda.device_count():
        fail(f"--device cuda: process {local} finds {torch.cuda.device_count()} GPUs")
    torch.cuda.set_device(local)
    torch.backends.cuda.matmul.allow_tf32 = True
    return torch.device("cuda", local)


def tune_malloc() -> None:
    """glibc would return large blocks to the system when they are freed, and each training step would
    fault them in again: a tenth of a step's time on a CPU.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD


def disconnect(rank: Rank) -> None:
    """Waits until rank 0 has written everything."""
    rank.barrier()
    if rank.world > 1:
        dist.destroy_process_group()


def best_dtype(device: torch.device) -> str:
    """The name of the dtype in which this device multiplies matrices faster."""
    fast = False
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if fast else "float32"


def to_device(tensor: torch.Tensor, device) -> torch.Tensor:
    """One copy to the device; a copy to a GPU is asynchronous."""
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


# -------------------------------------------------------------------------------------------------
# What is recorded of a run's code and machine


def code_files(root: Path = ROOT, script: str = "train.py") -> list[Path]:
    """The files of ours that a script imports, in functions too."""
    files = set()
    waiting = [root / script]
    while waiting:
        file = waiting.pop()
        if file.exists() and file not in files:
            files.add(file)
            for name in imports(file):
                module = root.joinpath(*name.split("."))
                waiting += [module.with_suffix(".py"), module / "__init__.py"]
    return sorted(files)


def imports(file: Path) -> set[str]:
    """Names that may be modules: of `from a.b import c` a, a.b and a.b.c."""
    names = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in found:
            parts = name.split(".")
            names |= {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    return names


def syntax_tree(file: Path) -> ast.Module:
    """A file's code without docstrings, comments and layout."""
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        may_have_one = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if may_have_one and ast.get_docstring(node):
            node.body = node.body[1:]
    return tree


@functools.cache
def code_hash(root: Path = ROOT, script: str = "train.py") -> str:
    """A hash of the syntax trees of what decides a script's numbers."""
    digest = hashlib.sha256()
    for file in code_files(root, script):
        digest.update(ast.dump(syntax_tree(file)).encode())
    return digest.hexdigest()


def git(*command: str) -> str | None:
    """The output of a git command in the program's folder; None without git or a checkout."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(("git", *command), capture_output=True, cwd=ROOT, check=True)
        return done.stdout.decode(errors="replace").strip()
    return None


def environment() -> dict:
    """Source, versions and machine, for config.json."""
    return {
        "git": {
            "commit": git("rev-parse", "HEAD"),
            "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
            "diff": git("diff", "HEAD", "--", "*.py"),
        },
        "code": code_hash(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "machine": machine_name(),
    }


def machine_name() -> str:
    """Processor and GPUs, as far as the system tells them."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.is_file() else None
    processor = found[1] if found else platform.processor() or platform.machine()
    name = f"{processor}, {os.cpu_count()} cores"
    if torch.cuda.is_available():
        name += f", {torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    return name


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s that the device's maker states; None for an unknown one."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for card, flops in PEAK_FLOPS.items():
            if card in name:
                return flops
    return None


def peak_memory(device: torch.device) -> float:
    """GiB: of the device, if it is a GPU; else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 2**20 if sys.platform == "linux" else 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
