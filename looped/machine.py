"""The machine: ranks and devices, what the processor can do, versions."""

import ast
import contextlib
import ctypes
import hashlib
import os
import platform
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group exists: its defaults would keep the group alive

from looped.common import fail

ROOT = Path(__file__).parents[1]
UNDECIDING = {"core_eval.py", "tokenizer_train.py"}
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


class Place(NamedTuple):
    """Where this process runs."""

    rank: int
    world: int  # ranks in all
    device: torch.device

    def say(self, text: str) -> None:
        """Prints on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def all(self, fine: bool) -> bool:
        """Whether it is so on every rank."""
        if self.world == 1:
            return fine
        found = torch.tensor(float(fine), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return found.item() > 0


ONE_PROCESS = Place(0, 1, torch.device("cpu"))


def connect(device_name: str) -> Place:
    """Joins the ranks that torchrun started, if any, each with a device of the given kind."""
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    if device_name == "auto":
        device_name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device_name)
    if device_name == "cuda":
        # freed memory of one shape serves another: the loop's active rows change all the time
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        if local >= torch.cuda.device_count():
            fail(f"--device cuda: process {local} finds {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        # glibc would return large blocks to the system when they are freed, and each training step
        # would fault them in again: a tenth of a step's time on a CPU
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
    if world > 1:
        gpu = device if device_name == "cuda" else None
        dist.init_process_group("nccl" if gpu else "gloo", device_id=gpu)
    return Place(rank, world, device)


def disconnect(place: Place) -> None:
    """Waits until rank 0 has written everything."""
    place.barrier()
    if place.world > 1:
        dist.destroy_process_group()


def best_dtype(device: torch.device) -> str:
    """Whichever this device's matrix products are faster in."""
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


def code_hash(root: Path = ROOT) -> str:
    """A hash of the syntax trees of the files that decide a training's numbers, docstrings left out:
    comments and layout change nothing.
    """
    digest = hashlib.sha256()
    for file in deciding_files(root):
        tree = ast.parse(file.read_bytes())
        for node in ast.walk(tree):
            may_have_one = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            if may_have_one and ast.get_docstring(node):
                node.body = node.body[1:]
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()


def deciding_files(root: Path) -> list[Path]:
    """Scripts beside train.py, added ones included, and looped/."""
    beside = [path for path in root.glob("*.py") if path.name not in UNDECIDING]
    return sorted(beside) + sorted(root.glob("looped/*.py"))


def git(*command: str) -> str | None:
    """The output of a git command in the program's folder; None without git or a checkout."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(("git", *command), capture_output=True, cwd=ROOT, check=True)
        return done.stdout.decode(errors="replace").strip()
    return None


def environment() -> dict:
    """Source, versions and machine, for config.json."""
    return {
        "git": {"commit": git("rev-parse", "HEAD"), "diff": git("diff", "HEAD", "--", "*.py")},
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


@contextlib.contextmanager
def exact_products(device: torch.device):
    """A context: float32 products are exact, not TF32, and attention is not cuDNN's, which makes a
    plan for every new shape. Yields the number of torch's threads, which on a CPU is one meanwhile.
    """
    tf32 = torch.backends.cuda.matmul.allow_tf32
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    threads = torch.get_num_threads()
    set_products(False, False, 1 if device.type == "cpu" else threads)
    try:
        yield threads
    finally:
        set_products(tf32, cudnn, threads)


def set_products(tf32: bool, cudnn: bool, threads: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.set_num_threads(threads)
