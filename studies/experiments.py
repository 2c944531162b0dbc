"""
The comparisons of the sources: trains what the ledger lacks, several trainings side by side,
and writes a page.

    python -m studies.experiments baseline --data data/corpus-v1024/rows-256-split # nano
    python -m studies.experiments gains --only "20 tokens" --seeds 0,1,2,3
    python -m studies.experiments baseline --scale 140m --data DATA --ranks 8 --core # GPUs
    python -m studies.experiments stability -- --batch-size 32 # after --: for every train.py
    python -m studies.experiments gains --dry-run # only prints the commands that are left to do
    python -m studies.experiments gains --page # only writes the page, from the ledger
    python -m studies.experiments import RUN… # takes finished runs of train.py into the ledger

Runs are kept in runs/studies/: a begun one continues; one in results/runs.jsonl (same flags, seed
and data) is not repeated; one that another process is training counts as failed. Written:
results/NAME-SCALE.md (for the default rows NAME-SCALE-stdlib.md) and its figures, replacing older
ones. A run that diverges is a result.
"""

import argparse
import functools
import json
import os
import shlex
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

import torch

import train
from dataloader import PackedData
from looped.checkpoint import checkpoints
from looped.console import Parser, counts, fail, non_negative_int, positive_int, run_cli
from looped.machine import ONE_PROCESS
from model import ModelConfig, parameter_count
from studies import ledger
from studies.comparisons import EXPERIMENTS, SMALL, Arm, flat, tables_of
from studies.pages import write_page

ROOT = Path(__file__).resolve().parent.parent
RUNS = Path("runs/studies")
OWN = ("--seed", "--data", "--eval-depths", "--out", "--stop-at")  # train.py's, set here
CORE_PANEL = "--panel core-extended"


@dataclass
class Job:
    """One training, which several arms may share."""

    path: Path
    flags: list[str]  # of train.py
    settings: dict
    flops: float
    depths: list[int]
    arms: list[Arm] = field(default_factory=list)

    def finished(self) -> dict | None:
        """The line of the run directory, if the run is done and was evaluated at the depths."""
        line = ledger.record(self.path)
        if line and ledger.evaluated(line, self.depths):
            return line
        return None


# -- what to run


def preset(family: str, scale: str) -> str:
    if family == "parcae" and scale in SMALL:
        return scale
    return f"{family}-{scale}"


@functools.cache
def looped_model(scale: str, flags: tuple[str, ...]) -> ModelConfig:
    return train.model_config(train.parse_args(["--preset", preset("parcae", scale), *flags]))


def length_flags(arm: Arm, args) -> list[str]:
    """--tokens or --flops of an arm."""
    if arm.flops:
        return ["--flops", f"{arm.flops:g}"]
    tokens = arm.tokens
    shape = (*arm.shape.split(), *args.extra)
    if args.scale in SMALL and arm.budget:
        tokens = arm.budget * parameter_count(looped_model(args.scale, shape))
        recipe = train.recipe_of(preset("parcae", args.scale)).tokens
        times = round(tokens / recipe)
        if abs(times * recipe - tokens) < 0.03 * tokens:  # near the recipe's length: exactly that
            tokens = times * recipe
    if arm.equal_flops:
        flops = tokens * looped_model(args.scale, shape).flops_per_token()
        return ["--flops", f"{flops:.6g}"]
    return ["--tokens", f"{tokens:.0f}"]


def arm_flags(arm: Arm, args) -> list[str]:
    """All flags of an arm but --seed and --out. If a flag is repeated the last counts, so
    the user's own come last.
    """
    experiment = EXPERIMENTS[args.name]
    flags = ["--preset", preset(arm.preset, args.scale), *length_flags(arm, args)]
    flags += experiment.flags.split()
    # train.py's own choice of depths is measured at the end of a run only
    if arm.preset != "transformer" and experiment.depths != train.FINAL_DEPTHS:
        flags += ["--eval-depths", experiment.depths]
    flags += [*arm.shape.split(), *arm.flags.split()]
    if args.data:
        flags += ["--data", str(args.data)]
    return flags + args.extra


def jobs_of(args, tables) -> list[Job]:
    """The trainings of the arms that --only names, short ones first, then by seed; equal trainings
    are one job.
    """
    found = {}
    depths = counts(EXPERIMENTS[args.name].depths)
    for arm in flat(tables):
        if args.only and not any(text in arm.name() for text in args.only):
            continue
        flags = arm_flags(arm, args)
        settings, flops = ledger.wanted_settings(flags, args.ranks)
        told = json.dumps([settings, str(args.data)], sort_keys=True)
        name = f"{train.parse_args(flags).preset}-{zlib.crc32(told.encode()):08x}"
        at = depths if settings["n_core"] else [0]
        for seed in args.seeds:
            path = RUNS / f"{name}-s{seed}"
            own = [*flags, "--seed", str(seed), "--out", str(path), "--resume"]
            job = Job(path, own, settings | {"seed": seed}, flops, at)
            found.setdefault(path, job).arms.append(arm)
    return sorted(found.values(), key=lambda job: (job.flops, job.settings["seed"]))


# -- running


def launcher(ranks: int) -> list[str]:
    """What starts a script on so many ranks."""
    if ranks == 1:
        return [sys.executable]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
    ]


def launch(job: Job, ranks: int, threads: int) -> str:
    """Runs one train.py, its output going to a .txt beside the run, and adds the finished run to
    the ledger; -> what went wrong, or "". A run that diverges is no error.
    """
    text = job.path.with_name(f"{job.path.name}.txt")
    text.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    code = 0
    if not job.finished():
        command = [*launcher(ranks), ROOT / "train.py", *job.flags]
        with open(text, "a", encoding="utf-8") as file:
            code = subprocess.run(command, stdout=file, stderr=file, env=environment).returncode
    line = job.finished()
    if line:
        ledger.append(line)
        print(f"{job.path}: loss {line['loss']}, {line['minutes']:.1f} min", flush=True)
        return ""
    last = text.read_text(encoding="utf-8", errors="replace").strip().split("\n")[-1]
    return f"{job.path} ended with exit code {code}: {last} (all of it: {text})"


def run_all(jobs: list[Job], args) -> list[str]:
    """Trains side by side, a process and a thread a core; -> faults."""
    side_by_side = min(args.jobs, len(jobs))
    threads = max(1, (os.cpu_count() or 1) // side_by_side)
    with ThreadPoolExecutor(side_by_side) as pool:
        return list(filter(None, pool.map(launch, jobs, repeat(args.ranks), repeat(threads))))


def evaluate_core(jobs: list[Job], args) -> None:
    """core_eval.py on finished runs that are here; adds their lines again, with scores."""
    depths = EXPERIMENTS[args.name].core_depths
    for job in jobs:
        line = job.finished()
        if not line or line["diverged_at"] or not checkpoints(job.path):
            continue
        flags = shlex.split(args.core)
        if not job.settings["n_core"] and "--depth" in flags:  # which core_eval.py would refuse
            at = flags.index("--depth")
            del flags[at : at + 2]
        command = [*launcher(args.ranks), ROOT / "core_eval.py", str(job.path), *flags]
        if depths and job.settings["n_core"]:
            command += ["--depth", depths]
        if subprocess.run(command).returncode:
            fail(f"core_eval.py failed on {job.path}, see above; the same command continues there")
        ledger.append(ledger.record(job.path))


# -- the ledger


def fill_in(jobs: list[Job], rows: str | None) -> list[Job]:
    """Gives each job's arms the job's line of the ledger; -> jobs without a line."""
    lines = ledger.read_ledger()
    todo = []
    for job in jobs:
        line = ledger.find(lines, job.settings, rows, job.depths)
        if not line:
            todo.append(job)
            continue
        for arm in job.arms:
            arm.runs[job.settings["seed"]] = line
    return todo


def known_rows(jobs: list[Job], beginning: str) -> str | None:
    """The hash of the rows that these jobs' runs in the ledger were trained on; of several, the one
    with this beginning.
    """
    used = set()
    for line in ledger.read_ledger():
        if any(ledger.same_run(line, job.settings) for job in jobs):
            used.add(line["data"])
    named = sorted(rows for rows in used if rows.startswith(beginning))
    if used and len(named) != 1:
        short = " and ".join(sorted(rows[:10] for rows in used))
        fail(f"{ledger.LEDGER} has such runs on rows {short}; give one of these as --data")
    return named[0] if named else None


def rows_hash(jobs: list[Job], args) -> str | None:
    """The hash of --data, or of train.py's default rows, which are made if need be. If they are not
    at hand, a page takes it from the ledger, and a dry run has None.
    """
    given = train.parse_args(jobs[0].flags)
    cfg = train.model_config(given)
    folder = args.data or Path(f"data/stdlib-v{cfg.vocab_size}/rows-{cfg.seq_len}-split")
    if (folder / "manifest.json").is_file() or (args.data and not args.page):
        return PackedData(folder).sha256()
    if args.page:
        return known_rows(jobs, str(args.data or ""))
    if args.dry_run:
        return None
    return train.open_data(given, cfg, ONE_PROCESS).sha256()


def import_runs(paths: list[str]) -> None:
    """Adds finished runs to the ledger, up to the first that is damaged."""
    for path in paths:
        line = ledger.record(Path(path))
        if line is None:
            print(f"{path}: left out, it is no finished run")
            continue
        ledger.append(line)
        print(f"{path}: {line['tokens_per_param']:.3g} tokens a parameter, loss {line['loss']}")


# -- main


def numbers(line: str) -> list[int]:
    """Whole numbers between commas, each once."""
    return sorted({non_negative_int(text) for text in line.split(",")})


def texts(line: str) -> list[str]:
    """What stands between semicolons."""
    found = [text.strip() for text in line.split(";") if text.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{line!r} has no text")
    return found


def parse_args(argv):
    own, extra = argv, []
    if "--" in argv:
        cut = argv.index("--")
        own, extra = argv[:cut], argv[cut + 1 :]
    parser = Parser(description=__doc__, prog="python -m studies.experiments")
    add = parser.add_argument
    add("name", choices=EXPERIMENTS, help="the comparison")
    add("--scale", default="nano", help="size of the presets (default: %(default)s)")
    seeds = "between commas (default: the comparison's own at nano and tiny, else 0)"
    add("--seeds", type=numbers, help=seeds)
    rows = "packed rows, or for --page the beginning of their hash"
    add("--data", type=Path, help=f"{rows} (default at nano and tiny: Python's own library)")
    only = "arms whose name has one of these texts, between semicolons"
    add("--only", type=texts, default=[], help=only)
    jobs = 1 if torch.cuda.is_available() else os.cpu_count() or 1
    add("--jobs", type=positive_int, default=jobs, help="side by side (default: %(default)s)")
    add("--ranks", type=positive_int, default=1, help="GPUs of a training (default: %(default)s)")
    core = f"also run core_eval.py, with these flags (default: {CORE_PANEL})"
    add("--core", nargs="?", const=CORE_PANEL, help=core)
    page = "results/NAME-SCALE, and -stdlib without --data"
    add("--out", type=Path, help=f"the page, without suffix (default: {page})")
    add("--page", action="store_true", help="train nothing, write the page")
    add("--dry-run", action="store_true", help="print the commands that are left to do, and stop")
    args = parser.parse_args(own)
    args.extra = extra
    told = [word for word in argv if word != "--page"]
    args.command = shlex.join(["python", "-m", "studies.experiments", *told])
    check(args)
    return args


def check(args) -> None:
    """Fills in defaults that depend on others, and refuses what does not fit together."""
    experiment = EXPERIMENTS[args.name]
    small = args.scale in SMALL
    if args.scale not in experiment.scales:
        names = ", ".join(experiment.scales)
        fail(f"--scale {args.scale} is not a size of {args.name}; choose from {names}")
    if not (small or args.data or args.dry_run or args.page):
        fail(f"--scale {args.scale} needs --data, e.g. data/fineweb-edu-v32768/rows-2048-crop")
    for word in args.extra:
        name = word.split("=")[0]
        if name in OWN:
            advice = "leave it out; --seeds and --data go before the --"
            fail(f"{name} after -- would be overruled or leave trainings undone; {advice}")
    args.seeds = args.seeds or range(experiment.seeds if small else 1)
    rows = "-stdlib" if small and not args.data else ""
    if args.page and args.data and not (args.data.is_dir() or args.out):
        fail(f"--page of rows {args.data}, which are no folder here, needs --out results/NAME")
    args.out = args.out or Path(f"results/{args.name}-{args.scale}{rows}")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["import"]:
        import_runs(argv[1:])
        return
    args = parse_args(argv)
    tables = tables_of(args.name, args.scale)
    jobs = jobs_of(args, tables)
    if not jobs:
        names = "; ".join(arm.name() for arm in flat(tables))
        fail(f"--only {'; '.join(args.only)} fits no arm; there are: {names}")
    rows = rows_hash(jobs, args)
    todo = fill_in(jobs, rows)
    flops = sum(job.flops for job in todo)
    if args.dry_run:
        for job in todo:
            print(shlex.join(["python", "train.py", *job.flags]))
    print(f"# {len(todo)} of {len(jobs)} trainings are left to do, {flops:.3g} FLOPs", flush=True)
    if args.dry_run:
        return
    faults = []
    if todo and not args.page:
        faults = run_all(todo, args)
    if args.core:
        evaluate_core(jobs, args)
    fill_in(jobs, rows)
    write_page(args, tables)
    if faults:
        fail(f"{len(faults)} of the trainings failed: {faults[0]}; the same command continues")


if __name__ == "__main__":
    run_cli(main)
