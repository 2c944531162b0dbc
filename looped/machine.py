"""The machine: ranks and devices, what the processor can do, versions, memory."""

import contextlib
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from looped.console import fail, note, outside, refuse
from looped.files import file_hash

NETWORK = (
    "model.py",
    "looped/depth.py",
    "looped/layers.py",
    "looped/mechanisms.py",
    "looped/ops.py",
    "looped/randomness.py",
)
DEVICES = ("auto", "cuda", "mps", "cpu")
COMPILE_STEPS = 1500  # from so many on, compiling, which takes minutes, pays on a CPU (LOG.md)
# How long a rank waits for another (one that dies is noticed at once, one whose machine is gone is
# not): until all have met; before and after training, since one machine may have checksums to read,
# graphs to compile or a checkpoint to write that another has not; and in training.
MEETING = timedelta(minutes=10)
PREPARING = timedelta(hours=1)
HANG = timedelta(minutes=5)
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


ONE_PROCESS = Place(0, 1, torch.device("cpu"))  # alone, on the CPU


def pick_device(name: str) -> str:
    """The device of that name, which must be here; auto: an NVIDIA GPU or the CPU. An Apple GPU is
    taken only where it is asked for: nothing has been tried on one.
    """
    here = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return "cuda" if here["cuda"] else "cpu"
    if not here[name]:
        fail(f"--device {name}: torch finds none here; try --device cpu")
    return name


def distributed(name: str) -> Place:
    """Joins the ranks that torchrun started, if any, each with a device of the given kind."""
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(pick_device(name))
    if device.type == "mps" and world > 1:
        fail("--device mps is one GPU; start one process, or --device cpu")
    if device.type == "cuda":
        # Freed memory of one shape serves another: the loop's active rows change all the time.
        if "PYTORCH_ALLOC_CONF" not in os.environ:  # newer versions' name of the same
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        if local >= torch.cuda.device_count():
            fail(
                f"--device cuda: process {local} finds {torch.cuda.device_count()} GPUs; "
                "start as many, or --device cpu"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    if world > 1 and not dist.is_initialized():
        # unnamed, a barrier's GPU is (rank modulo the visible GPUs), which may be another card
        gpu = device if device.type == "cuda" else None
        backend = "nccl" if gpu else "gloo"
        # gloo gives the others the address that the machine's name leads to, often 127.0.1.1
        if not dist.is_torchelastic_launched():
            note(f"waiting for all {world} processes; to train with one: unset RANK WORLD_SIZE")
        advice = "if they are on several machines, name each one's network: GLOO_SOCKET_IFNAME=eth0"
        with (
            outside("ranks cannot meet", "start them with torchrun", ValueError),
            outside("ranks cannot reach each other", advice, () if gpu else RuntimeError),
        ):
            dist.init_process_group(backend, timeout=MEETING, device_id=gpu)
        limit_waiting(Place(rank, world, device), training=False)
    return Place(rank, world, device)


def limit_waiting(place: Place, training: bool) -> None:
    """Once all ranks are here: how long one waits for another from now on."""
    if place.world > 1:
        dist.barrier()
        c10d = dist.distributed_c10d
        set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout  # until torch 2.13
        set_timeout(HANG if training else PREPARING)


def refuse_unlike(own: dict, place: Place) -> None:
    """Ends all ranks where one has other values than the first, by name: each machine has a command
    line, and may have code and rows, of its own.
    """
    if place.world == 1:
        return
    all_told = [None] * place.world
    dist.all_gather_object(all_told, (platform.node(), own))
    _, first = all_told[0]
    for rank, (machine, values) in enumerate(all_told):
        unlike = [name for name in first if values.get(name) != first[name]]
        if unlike:
            found = ", ".join(f"{name} {values.get(name)} (there {first[name]})" for name in unlike)
            advice = "give all machines the same command, code and rows"
            refuse(f"rank {rank}, on {machine}, is unlike rank 0: {found}; {advice}")


def seconds_at_rest(stat: Path = Path("/proc/stat")) -> np.ndarray:
    """Of each core that this process may use, since the system began. Linux only."""
    own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = []
    for line in stat.read_text().splitlines():
        name, *values = line.split()
        if name in own:
            ticks.append(int(values[3]) + int(values[4]))  # idle, waiting for a disk
    return np.array(ticks) / os.sysconf("SC_CLK_TCK")


def note_busy_cores(place: Place) -> None:
    """On a CPU: says if other programs are busy on cores that this one has threads for. Threads
    wait for each other, so one that shares its core delays all (results/cpu.md). The number of
    threads is left alone: it changes rounding, and what else runs here must not change a result.
    """
    if place.device.type != "cpu" or place.world > 1 or "OMP_NUM_THREADS" in os.environ:
        return
    try:
        before = seconds_at_rest()
        time.sleep(0.25)
        rested = seconds_at_rest() - before
    except (OSError, AttributeError):  # not Linux
        return
    busy = (rested < 0.125).sum()
    free = max(1, len(rested) - busy)
    if busy and free < torch.get_num_threads():
        cost = "which can make this run several times slower"
        note(f"other programs are at work here, {cost}; try OMP_NUM_THREADS={free}")


def take_from_first(model, place: Place) -> None:
    """Gives every rank the first one's weights."""
    if place.world > 1:
        for p in model.parameters():
            dist.broadcast(p.data, 0)


def leave(place: Place) -> None:
    """Ends the process group, when rank 0 has written everything."""
    if place.world > 1:
        dist.barrier()
        dist.destroy_process_group()


def best_dtype(device: torch.device) -> str:
    """Whichever this device's matrix products are faster in; on Apple's GPUs, and on NVIDIA's before
    Ampere, bfloat16 is not.
    """
    fast = False
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if fast else "float32"


def choose_compile(wish: str, steps: int, place: Place) -> bool:
    """Whether to compile the model's pieces. wish: auto, on or off."""
    compilers = [os.environ.get("CXX", "g++")]
    if place.is_gpu:  # for Triton's launcher
        compilers = [os.environ.get("CC", "gcc"), "clang"]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    able = header.is_file() and any(map(shutil.which, compilers))
    if place.is_gpu and wish != "off" and not able:
        needs = "compiling takes gcc and Python's headers, not all of which are here"
        fail(f"{needs}; install them (python3-dev), or try --compile off")
    if place.is_gpu or wish != "auto":
        return wish != "off"
    on_linux = sys.platform == "linux" and place.device.type == "cpu"
    return able and on_linux and steps >= COMPILE_STEPS


def network_code() -> str:
    """A hash of the source that decides what given weights compute."""
    root = Path(__file__).parents[1]
    return file_hash(*(root / name for name in NETWORK))


def program_code() -> str:
    """A hash of the source that decides a training's numbers, and of little else."""
    root = Path(__file__).parents[1]
    files = [root / name for name in ("train.py", "model.py", "muon.py", "dataloader.py")]
    return file_hash(*files, *sorted((root / "looped").glob("[!.]*.py")))  # no editor's lock


def note_other_code(run: Path, config: dict) -> None:
    """Says so where a run was made by other code than this; config: its config.json."""
    if config.get("network_code") not in (None, network_code()):
        files = ", ".join(NETWORK)
        note(f"{run} was trained with another version of {files}; its config.json has the commit")


def environment() -> dict:
    """Versions and source state, for config.json."""
    return {
        "git": {"commit": git("rev-parse", "HEAD"), "diff": code_changes()},
        "network_code": network_code(),
        "code": program_code(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "machine": machine_name(),
    }


def git(*command) -> str | None:
    """The output of a git command in the program's folder; None without git or a checkout."""
    folder = Path(__file__).parents[1]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        line = ("git", *command)
        out = subprocess.run(line, capture_output=True, cwd=folder, check=True)
        return out.stdout.decode(errors="replace").strip()
    return None


def code_changes() -> str | None:
    """What of the program is not committed, files that git does not know yet included."""
    changes = git("diff", "HEAD", "--", "*.py")
    if changes is None:  # no git, no checkout, or nothing committed yet
        return None
    own = (":(glob)*.py", "looped/*.py", "tools/*.py", "studies/*.py")
    unknown = git("ls-files", "--others", "--exclude-standard", "--", *own)
    for name in (unknown or "").splitlines():
        file = Path(__file__).parents[1] / name
        if file.is_file():  # git quotes odd names
            changes += f"\n+++ {name}\n{file.read_text(encoding='utf-8', errors='replace')}"
    return changes


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
    """GiB: of the device, if it is a GPU, since its peak was last reset; else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 2**20 if sys.platform == "linux" else 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def to_device(tensor: torch.Tensor, device) -> torch.Tensor:
    """One copy to the device; a copy to a GPU is asynchronous."""
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def from_device(numbers: dict[str, torch.Tensor], place: Place) -> Callable[[], dict[str, float]]:
    """Starts copying scalars from the device -> a function that waits for them and returns them by
    name; a GPU keeps working meanwhile.
    """
    values = torch.stack(list(numbers.values()))
    arrived = None
    if place.is_gpu:
        values = values.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

    def wait() -> dict[str, float]:
        if arrived:
            arrived.synchronize()
        return dict(zip(numbers, values.tolist(), strict=True))

    return wait


def set_products(tf32: bool, cudnn: bool, threads: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.set_num_threads(threads)


@contextlib.contextmanager
def exact_products(device):
    """A context: float32 products are exact, not TF32, and attention is not cuDNN's, which makes a
    plan for every new shape. On a CPU torch gets one thread, since each core takes batches of its
    own: such small products gain little from being split.
    """
    tf32 = torch.backends.cuda.matmul.allow_tf32
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    threads = torch.get_num_threads()
    set_products(False, False, 1 if device.type == "cpu" else threads)
    try:
        yield threads
    finally:
        set_products(tf32, cudnn, threads)
