# ruff: noqa: E402
"""
The whole GPU path beside a card that is not there: train, resume, validate, CORE, sample, bench, on cards of many sizes.

    bash tests/rehearsal/run.sh ROWS-2048-V32768 BUNDLE      # an hour of one core; the page is results/rehearsal.md

Python, torch's CUDA build, its allocator and Inductor are real; the driver (fakecuda.c) hands out memory, refuses what
the card does not have, and launches nothing. So values on the card mean nothing, and no speed is measured: what the host
reads from the card is zeros, a single byte or eight of them 1, so that "is all finite?" is answered by yes. Replaced are:
the drawing of weights, the decompositions of torch.linalg, erfinv where it is not compiled (torch makes it with NVRTC,
which needs a driver) and cuDNN's attention, for which FlashAttention stands in.

A case that ended well is kept, and not run again until the program or the case changes: a rehearsal that was stopped
goes on where it was.
"""

import contextlib
import gc
import hashlib
import io
import json
import os
import re
import shutil
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import core_eval
import model
import train
from dataloader import PackedData
from looped.depth import DEPTH_LAWS
from looped.figures import table
from looped.files import write_checked
from tools import bench, sample

ERFINV = torch.erfinv
PROGRAMS = {
    "train.py": train.main,
    "core_eval.py": core_eval.main,
    "tools.sample": sample.main,
    "tools.bench": bench.main,
}
SHORT = (
    "--batch-size 32 --eval-every 1 --eval-tokens 20000 --tokens 131072 --warmup 0 --cooldown 0.5"
)
PAGE = ROOT / "results" / "rehearsal.md"
NO_ROOM = "does not fit the GPU's memory"
KEPT = "## Beside the table"  # what the page has from here on was written by hand
REHEARSED = (
    "*.py",
    "looped/*.py",
    "tools/bench.py",
    "tools/sample.py",
    "tests/rehearsal/fakecuda.c",
)
PRESETS = ("transformer-140m", "rdm-100m", "parcae-rdm-100m", "parcae-370m", "transformer-370m", "parcae-770m",
           "transformer-770m", "parcae-1.3b", "transformer-1.3b", "rdm-350m", "parcae-rdm-350m")  # fmt: skip
CARDS = (79.1, 23.5, 15.6, 39.4, 139.8)  # GiB: of 80, 24, 16, 40 and 141 GB


@dataclass
class Case:
    """One program on one card."""

    what: str
    card: float  # GiB
    arguments: str  # of the program; RUN, BUNDLE: paths
    program: str = "train.py"
    run: str = ""  # the run that the cases of a preset, one after the other, work on
    ends_run: bool = False
    compiled: bool = False


def training(card: float, preset: str, flags: str = "", what: str = "train, validate") -> Case:
    about = f"{preset} {flags}".strip()
    return Case(f"{what}: {about}", card, f"--preset {about} {SHORT}")


def cases() -> list[Case]:
    """Everything, what matters most first."""
    found = [training(card, "parcae-140m") for card in CARDS]
    found += following("parcae-140m")
    for flags in ("--mechanism hyper", "--mechanism attnres", "--granularity token", "--dtype float32",
                  "--loss-chunk 8192", "--checkpoint-loops", "--residual-dtype float32", "--gain zoh",
                  "--no-input-matrix"):  # fmt: skip
        found.append(training(79.1, "parcae-140m", flags))
    for law in list(DEPTH_LAWS)[1:]:
        found.append(training(79.1, "parcae-140m", f"--sampling {law}"))
    found.append(training(79.1, "parcae-140m", "--granularity batch"))
    panel = training(79.1, "parcae-140m", "--core-every 1 --bundle BUNDLE", what="train with CORE")
    found.append(panel)
    for preset in PRESETS:
        for card in CARDS:
            found.append(training(card, preset))
    for preset in ("transformer-140m", "rdm-100m --vocab-size 32768", "parcae-rdm-100m --vocab-size 32768",
                   "parcae-140m --mechanism hyper", "parcae-140m --mechanism attnres", "parcae-370m"):  # fmt: skip
        found += following(preset)
    return found + compiled_cases() + large_cases()


def following(about: str) -> list[Case]:
    """Cases of a preset, with flags, that use the run of the one before."""
    flags = f"--preset {about} {SHORT} --out RUN"
    other = f"--preset {about} {SHORT} --seed 1 --init-from RUN --stop-at 1"
    found = [
        Case(f"train, stop, save: {about}", 79.1, f"{flags} --stop-at 1"),
        Case(f"resume: {about}", 79.1, f"{flags} --resume"),
        Case(f"train from another run: {about}", 79.1, other),
        Case(f"sample: {about}", 79.1, "RUN --prompt The --max-tokens 8", "tools.sample"),
        Case(f"CORE: {about}", 79.1, "RUN --bundle BUNDLE --max-per-task 11", "core_eval.py"),
    ]
    if not about.startswith("transformer"):
        adaptive = "RUN --prompt The --max-tokens 8 --depth auto"
        found.insert(4, Case(f"sample, --depth auto: {about}", 79.1, adaptive, "tools.sample"))
    for case in found:
        case.run = about.replace(" ", "")
    found[-1].ends_run = True
    return found


def large_cases() -> list[Case]:
    """Whole runs of the presets whose checkpoints take minutes to write."""
    found = []
    for preset in ("transformer-370m", "rdm-350m --vocab-size 32768", "parcae-rdm-350m --vocab-size 32768",
                   "parcae-770m", "transformer-770m", "parcae-1.3b", "transformer-1.3b"):  # fmt: skip
        found += following(preset)
    return found


def compiled_cases() -> list[Case]:
    """Through Inductor and Triton: some minutes each."""
    found = []
    for card, about in ((7.8, "parcae-140m"), (79.1, "parcae-140m"), (79.1, "parcae-370m")):
        found.append(training(card, about, what="compiled: train, validate"))
    for flags in ("--mechanism attnres", "--mechanism hyper", "--granularity token", "--gain zoh",
                  "--injection concat", "--injection add", "--injection none", "--sampling poisson-lognormal-fill",
                  "--residual-dtype float32", "--checkpoint-loops", "--block resnorm --mlp swiglu"):  # fmt: skip
        found.append(training(79.1, "parcae-140m", flags, "compiled: train, validate"))
    timed = "--preset parcae-140m --batch-size 32"
    found.append(Case("compiled: bench: parcae-140m", 79.1, timed, "tools.bench"))
    for case in found:
        case.compiled = True
    return found


def nothing(*args, **settings) -> None:
    """In place of work whose result means nothing here."""


def matrix_norm(x, *rest):
    return x.square().sum().sqrt()


def eigenvalues(x):
    return x.new_zeros(x.size(-1))  # torch makes the absolute of complex numbers with NVRTC


def stand_ins(case: Case) -> None:
    """Replaces what needs a real driver."""
    torch._dynamo.reset()  # else a case after others runs pieces uncompiled
    torch.linalg.matrix_norm = matrix_norm
    torch.linalg.eigvals = eigenvalues
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.erfinv = ERFINV if case.compiled else torch.atan
    model.Model.init_weights = nothing
    train.save_checkpoint = SAVE if case.run else nothing
    for name, part in STEP.items():
        setattr(train, name, without_waiting(part))


SAVE = train.save_checkpoint
STEP = {name: getattr(train, name) for name in ("next_batch", "training_step", "from_device")}


def without_waiting(part):
    """The function, which fails if it waits for the device."""

    def run(*given, **named):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return part(*given, **named)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return run


def rows_of(case: Case, rows: Path, folder: Path) -> Path:
    """The packed rows under the vocabulary of the case's preset; a larger one has the same tokens."""
    preset = re.search(r"--preset (\S+)", case.arguments)[1]
    size = model.PRESETS[preset].vocab_size
    if "--vocab-size" in case.arguments or size == PackedData(rows).manifest["vocab_size"]:
        return rows
    renamed = folder / f"rows-{size}"
    if not renamed.exists():
        shutil.copytree(rows, renamed)
        write_checked(renamed / "manifest.json", PackedData(rows).manifest | {"vocab_size": size})
    return renamed


def run(case: Case, rows: Path, bundle: str, folder: Path) -> dict:
    """Runs it; -> what the page says of it."""
    stand_ins(case)
    os.environ["FAKE_GB"] = str(case.card)  # the driver reads it at every question
    arguments = case.arguments.replace("RUN", str(folder / case.run)).replace("BUNDLE", bundle)
    arguments = arguments.split()
    if case.program == "train.py":
        data = rows_of(case, rows, folder)
        arguments += ["--data", str(data), "--compile", "on" if case.compiled else "off"]
        if "--out" not in arguments:
            arguments += ["--out", str(folder / "other")]
    shutil.rmtree(folder / "other", ignore_errors=True)
    screen = io.StringIO()
    given = sys.argv
    start = time.process_time()
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
        try:
            sys.argv = [case.program, *arguments]
            PROGRAMS[case.program]()
            outcome = "ok"
        except SystemExit as end:
            outcome = f"exit {end.code}"
        except BaseException:
            outcome = "failed"
            traceback.print_exc()
    sys.argv = given
    text = screen.getvalue()
    seconds = time.process_time() - start
    if NO_ROOM in text:
        outcome = "refused, none fits: " + text.partition(NO_ROOM)[2].splitlines()[0].strip(": ")
    elif outcome != "ok":
        outcome += ": " + text.strip().splitlines()[-1][:200]
        print(text[-3000:])
    if case.ends_run:
        shutil.rmtree(folder / case.run, ignore_errors=True)
    return {
        "case": case.what,
        "GiB": case.card,
        "outcome": outcome,
        **facts(text),
        "CPU s": f"{seconds:.0f}",
    }


def facts(text: str) -> dict:
    """What the program said of memory, and whether more was asked for later."""
    found = {}
    for name, pattern in (
        ("rows", r"device batch: (\d+)"),
        ("chunk", r"loss chunk: (\w+)"),
        ("peak GiB", r"memory: peak ([\d.]+)"),
    ):
        match = re.search(pattern, text)
        found[name] = match[1] if match else ""
    return found


def clean_up() -> float:
    """Forgets the last case; -> GiB that stay allocated."""
    gc.enable()
    gc.unfreeze()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() / 2**30


def write_page(found: list[dict], planned: int) -> None:
    """The table of the cases so far, above what stands below it."""
    lines = [
        "# The GPU path, rehearsed without a GPU",
        "",
        f"`bash tests/rehearsal/run.sh ROWS BUNDLE`, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, Triton "
        f"{triton.__version__}, Python {sys.version.split()[0]}: {len(found)} of {planned} cases. See "
        "tests/rehearsal/rehearse.py for what is real and what is not: no kernel runs, values mean nothing, no speed is "
        "measured. Two steps of 32 rows and three validations a case, uncompiled unless it says so; rows and chunk are "
        "what the trainer chose for the card, the peak is that of its warm-up, within 92 % of the card.",
        "",
        *table(list(found[0]), [row.values() for row in found]),
    ]
    _, mark, rest = PAGE.read_text().partition(KEPT) if PAGE.is_file() else ("", "", "")
    PAGE.write_text("\n".join(lines) + "\n" + mark + rest)


def code() -> str:
    """A name for what is rehearsed."""
    known = hashlib.sha256()
    for pattern in REHEARSED:
        for path in sorted(ROOT.glob(pattern)):
            known.update(path.read_bytes())
    return known.hexdigest()[:12]


def kept(path: Path) -> dict:
    """{(case, card, arguments): row of the page} of earlier starts."""
    found = {}
    if path.is_file():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found[row["case"], row["GiB"], row.pop("arguments")] = row
    return found


def main() -> None:
    rows, bundle = sys.argv[1:]
    limit = float(os.environ.get("REHEARSE_SECONDS", "inf"))  # of wall time
    only = os.environ.get("REHEARSE_ONLY", "")  # a regular expression
    assert PackedData(Path(rows)).manifest["seq_len"] == 2048
    os.environ["FAKE_GB"] = "400"  # torch asks once, and takes fractions of it
    torch.cuda.get_device_properties(0)
    folder = Path.home() / ".cache" / "looped-rehearsal" / code()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "done.jsonl"
    done = kept(log)
    planned = cases()
    start = time.perf_counter()
    for case in planned:
        key = case.what, case.card, case.arguments
        late = time.perf_counter() - start > limit
        if key in done or late or not re.search(only, case.what):
            continue
        row = run(case, Path(rows), bundle, folder)
        stays = clean_up()
        if stays > 0.1:
            row["outcome"] = f"{stays:.1f} GiB stay allocated; {row['outcome']}"
        print(row, flush=True)
        done[key] = row
        if row["outcome"].startswith(("ok", "refused")):
            with log.open("a") as lines:
                lines.write(json.dumps(row | {"arguments": case.arguments}) + "\n")
        found = [done.get((case.what, case.card, case.arguments)) for case in planned]
        write_page([row for row in found if row], len(planned))


if __name__ == "__main__":
    main()
