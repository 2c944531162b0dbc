"""
The comparisons of the sources: trains what the ledger lacks, several trainings side by side,
and writes a page.

    python -m studies.experiments baseline --data data/corpus-v1024/rows-256-split # nano
    python -m studies.experiments gains --only "20 tokens" --seeds 0,1,2,3
    python -m studies.experiments baseline --scale 140m --data DATA --ranks 8 --core # GPUs
    python -m studies.experiments stability -- --batch-size 32 # after --: for every train.py
    python -m studies.experiments gains --dry-run # only prints the commands that are left to do
    python -m studies.experiments rdm --page # only writes the page, from the ledger

Runs are kept in runs/studies/: a begun one continues; one in results/ledger/ (same flags, seed
and data) is not repeated; one that another process is training counts as failed. Written:
results/NAME-SCALE.md (for the default rows NAME-SCALE-stdlib.md) and its figures, replacing older
ones. A run that diverges is a result.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path

import torch

import train
from dataloader import PackedData
from looped.console import Parser, fail, non_negative_ints, positive_int, positive_ints, run_cli
from looped.machine import ONE_PROCESS
from model import PRESETS, parameter_count
from studies import ledger
from studies.comparisons import EXPERIMENTS, SMALL, Arm, tables_of
from studies.pages import write_page

ROOT = Path(__file__).resolve().parent.parent
RUNS = Path("runs/studies")
OWN = {"--seed", "--data", "--eval-depths", "--out", "--stop-at"}  # train.py's, set here


@dataclass
class Job:
    """One training, which several arms may share."""

    path: Path
    flags: list[str]  # of train.py
    settings: dict
    flops: float
    depths: set[int]
    dtype: str  # auto: either
    rows: str = ""  # their hash, or its beginning
    arms: list[Arm] = field(default_factory=list)
    line: dict | None = None  # of the ledger

    def accepts(self, line: dict) -> bool:
        """Whether a run of these settings had the rows and the dtype, and was evaluated at the
        depths; a diverged one need not be.
        """
        same_rows = line["data"].startswith(self.rows)
        same_dtype = self.dtype in ("auto", line["dtype"])
        evaluated = bool(line["diverged_at"]) or self.depths <= line["loss"].keys()
        return same_rows and same_dtype and evaluated

    def finished(self) -> dict | None:
        """The line of the run directory, if the run is done."""
        line = ledger.record(self.path)
        return line if line and self.accepts(line) else None

    def output(self) -> Path:
        """What train.py prints."""
        return Path(f"{self.path}.txt")


# -- what to run


def preset(family: str, scale: str) -> str:
    """The small scale's Parcae has the scale's name alone."""
    name = f"{family}-{scale}"
    return name if name in PRESETS else scale


def length_flags(arm: Arm, args) -> list[str]:
    """--tokens or --flops of an arm."""
    if arm.flops:
        return ["--flops", f"{arm.flops:g}"]
    tokens = arm.tokens
    if arm.equal_flops or args.scale == SMALL:
        name = preset("parcae", args.scale)
        looped = train.model_config(train.parse_args(["--preset", name, *args.extra]))
    if args.scale == SMALL and arm.budget:
        tokens = arm.budget * parameter_count(looped)
        recipe = train.recipe_of(name).tokens
        whole = round(tokens / recipe) * recipe
        if abs(whole - tokens) < 0.03 * tokens:  # near the recipe's length: exactly that
            tokens = whole
    if arm.equal_flops:
        return ["--flops", f"{tokens * looped.flops_per_token():.6g}"]
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
    flags += arm.flags.split()
    if args.data:
        flags += ["--data", args.data]
    return flags + args.extra


def jobs_of(args, arms: list[Arm]) -> list[Job]:
    """The trainings of the arms that --only names, short ones first, then by seed; equal trainings
    are one job.
    """
    found = {}
    for arm in arms:
        if not any(text in arm.name() for text in args.only):
            continue
        flags = arm_flags(arm, args)
        settings, flops = ledger.wanted_settings(flags, args.ranks)
        given = train.parse_args(flags)
        told = [settings, str(args.data)]
        if given.dtype != "auto":
            told.append(given.dtype)
        digest = zlib.crc32(json.dumps(told, sort_keys=True).encode())
        name = f"{given.preset}-{digest:08x}"
        depths = positive_ints(EXPERIMENTS[args.name].depths) if settings["n_core"] else []
        for seed in args.seeds:
            path = RUNS / f"{name}-s{seed}"
            own = [*flags, "--seed", str(seed), "--out", str(path), "--resume"]
            job = Job(path, own, settings | {"seed": seed}, flops, set(depths), given.dtype)
            found.setdefault(path, job).arms.append(arm)
    return sorted(found.values(), key=lambda job: (job.flops, job.settings["seed"]))


# -- running


def launcher(ranks: int) -> list[str]:
    """What starts a script on so many ranks."""
    if ranks == 1:
        return [sys.executable]
    torchrun = "-m torch.distributed.run --standalone --local-addr=localhost"  # as in speedrun.sh
    return [sys.executable, *torchrun.split(), f"--nproc_per_node={ranks}"]


def launch(job: Job, ranks: int, threads: int, children: list) -> None:
    """Runs one train.py, a new member of children, its output going to a .txt beside the run, and
    adds the finished run to the ledger.
    """
    if not job.finished():
        command = [*launcher(ranks), ROOT / "train.py", *job.flags]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        with open(job.output(), "a") as file:
            child = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
            children.append(child)
            child.wait()
    line = job.finished()
    if line:
        ledger.append(line)
        print(f"{job.path}: loss {line['loss']}, {line['minutes']:.1f} min", flush=True)


def run_all(jobs: list[Job], args) -> None:
    """Trains side by side, each with its share of the cores. A signal ends the trainings, which save."""
    RUNS.mkdir(parents=True, exist_ok=True)
    # however few are left to train: with other threads a run rounds otherwise
    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    children = []
    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            list(pool.map(launch, jobs, repeat(args.ranks), repeat(threads), repeat(children)))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.terminate()
            raise


def refuse_failed(jobs: list[Job]) -> None:
    text = jobs[0].output()
    last = text.read_text(errors="replace").strip().split("\n")[-1]
    fail(f"{len(jobs)} of the trainings failed; {text} ends with: {last}")


def evaluate_core(jobs: list[Job], args) -> None:
    """core_eval.py on finished runs that are here; adds their lines again, with scores."""
    for job in jobs:
        line = job.finished()
        if not line or line["diverged_at"]:
            continue
        command = [*launcher(args.ranks), ROOT / "core_eval.py", job.path, *args.core.split()]
        if subprocess.run(command).returncode:
            fail(f"core_eval.py failed on {job.path}, see above; the same command continues there")
        ledger.append(job.finished())


# -- the ledger


def look_up(jobs: list[Job]) -> list[Job]:
    """Gives each job its line of the ledger; -> jobs without one."""
    lines = ledger.read_ledger().items()
    used = set()
    for job in jobs:
        wanted = ledger.identity(job.settings)
        for (settings, data, _), line in lines:
            if settings == wanted and job.accepts(line):
                job.line = job.line or line  # of runs in both dtypes the one recorded first
                used.add(data[:10])
    if len(used) > 1:
        names = " and ".join(sorted(used))
        advice = "give one of these as --data, and a page's name as --out"
        fail(f"{ledger.LEDGER} has such runs on rows {names}; {advice}")
    return [job for job in jobs if not job.line]


def fill_arms(jobs: list[Job]) -> None:
    """Gives each arm the lines of its jobs, by seed."""
    for job in jobs:
        if job.line:
            for arm in job.arms:
                arm.runs.append(job.line)


def rows_hash(jobs: list[Job], args) -> str:
    """The hash of --data, or of train.py's default rows, which are made if need be. If they are not
    at hand, a page takes any that begins with --data, and a dry run none.
    """
    given = train.parse_args(jobs[0].flags)
    cfg = train.model_config(given)
    folder = Path(args.data or train.default_rows(cfg))
    if (folder / "manifest.json").is_file():
        return PackedData(folder).sha256()
    if args.page:
        return args.data or ""
    if args.dry_run:
        return "not at hand"
    if args.scale != SMALL and not args.data:
        fail(f"--scale {args.scale} needs --data, e.g. data/fineweb-edu-v32768/rows-2048-crop")
    return train.open_data(given, cfg, ONE_PROCESS).sha256()


# -- main


def texts(line: str) -> list[str]:
    """What stands between semicolons."""
    return [text.strip() for text in line.split(";") if text.strip()]


def parse_args(argv):
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(description=__doc__, prog="python -m studies.experiments")
    add = parser.add_argument
    add("name", choices=EXPERIMENTS, help="the comparison")
    add("--scale", default="nano", help="size of the presets (default: %(default)s)")
    seeds = "between commas (default: the comparison's own at nano, else 0)"
    add("--seeds", type=non_negative_ints, help=seeds)
    rows = "packed rows, or for --page the beginning of their hash"
    add("--data", help=f"{rows} (default at nano: Python's own library)")
    only = "arms whose name has one of these texts, between semicolons (default: all)"
    add("--only", type=texts, default=[""], help=only)
    jobs = 1 if torch.cuda.is_available() else os.cpu_count() or 1
    side = "trainings side by side, each with its share of the cores (default: %(default)s)"
    add("--jobs", type=positive_int, default=jobs, help=side)
    add(
        "--ranks",
        type=positive_int,
        default=1,
        help="processes of a training, one a GPU (default: %(default)s)",
    )
    panel = "--panel core-extended"
    core = f"also run core_eval.py, with these flags (default: {panel})"
    add("--core", nargs="?", const=panel, help=core)
    page = "results/NAME-SCALE, and -stdlib without --data"
    add("--out", type=Path, help=f"the page, without suffix (default: {page})")
    add("--page", action="store_true", help="train nothing, write the page")
    add("--dry-run", action="store_true", help="print the commands that are left to do, and stop")
    args = parser.parse_args(argv[:cut])
    args.extra = argv[cut + 1 :]
    told = [word for word in argv if word != "--page"]
    args.command = shlex.join(["python", "-m", "studies.experiments", *told])
    return args


def settle(args) -> None:
    """Fills in defaults that depend on others, and refuses what does not fit together."""
    experiment = EXPERIMENTS[args.name]
    small = args.scale == SMALL
    if args.scale not in experiment.scales:
        names = ", ".join(experiment.scales)
        fail(f"--scale {args.scale} is not a size of {args.name}; choose from {names}")
    for name in OWN.intersection(word.split("=")[0] for word in args.extra):
        fail(f"{name} after -- is not for you to set; leave it out, --seeds and --data go before")
    args.seeds = args.seeds or range(experiment.seeds if small else 1)
    if args.page and args.core:
        fail("--page evaluates nothing; leave --core out, or --page")
    rows = "-stdlib" if small and not args.data else ""
    if args.page and args.data and not (Path(args.data).is_dir() or args.out):
        fail(f"--page of rows {args.data}, which are no folder here, needs --out results/NAME")
    args.out = args.out or Path(f"results/{args.name}-{args.scale}{rows}")


def main(argv=None):
    args = parse_args(sys.argv[1:] if argv is None else argv)
    settle(args)
    tables = tables_of(args.name, args.scale)
    arms = list(chain.from_iterable(tables))
    jobs = jobs_of(args, arms)
    if not jobs:
        names = "; ".join(arm.name() for arm in arms)
        fail(f"--only {'; '.join(args.only)} fits no arm; there are: {names}")
    rows = rows_hash(jobs, args)
    for job in jobs:
        job.rows = rows
    todo = look_up(jobs)
    flops = sum(job.flops for job in todo)
    if args.dry_run:
        for job in todo:
            print(shlex.join(["python", "train.py", *job.flags]))
    print(f"# {len(todo)} of {len(jobs)} trainings are left to do, {flops:.3g} FLOPs", flush=True)
    if args.dry_run:
        return
    if todo and not args.page:
        run_all(todo, args)
    if args.core:
        evaluate_core(jobs, args)
    failed = look_up(jobs)
    fill_arms(jobs)
    if len(failed) < len(jobs) or args.page:
        write_page(args, tables)
    if failed and not args.page:
        refuse_failed(failed)


if __name__ == "__main__":
    run_cli(main)
