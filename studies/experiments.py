"""
The comparisons of the sources: trains what the ledger lacks, several trainings side by side,
and writes a page.

    python -m studies.experiments baseline --data data/corpus-v1024/rows-256-split # nano
    python -m studies.experiments gains --only "20 tokens" --seeds 0,1,2,3
    python -m studies.experiments baseline --scale 140m --data DATA --ranks 8 --core # GPUs
    python -m studies.experiments stability -- --batch-size 32 # after --: for every train.py
    python -m studies.experiments gains --dry-run # what is left to do
    python -m studies.experiments rdm --page --data 62895bb6fe # only writes the page

Written: results/NAME-SCALE.md (for the default rows NAME-SCALE-stdlib.md) and its figures. A run in
results/ledger/ (same flags, seed and rows) is not repeated. The ledger is for the committed code:
if code that affects numbers is edited, only runs of the edited code count, and the page goes to
runs/studies/. Run directories are kept by code, flags and rows beside those of
tools.ablate. A run that diverges is a result.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import train
from dataloader import PackedData
from looped.common import Parser, fail, ints, positive_int
from looped.machine import ROOT, code_hash
from model import PRESETS, config_of, parameter_count
from studies import ledger
from studies.comparisons import EXPERIMENTS, SMALL, UP_TO_80, StudyArm, arms_of
from studies.laws import rows_of, write_fit
from studies.pages import write_page
from tools import runner
from tools.ablate import copy_commit
from tools.arms import Run

CORE_SPEED = 1e11  # training FLOPs a second of one core, as in most runs of the ledger
EDITED = (
    "# the code that decides numbers differs from the last commit's: the ledger does not count,\n"
    "# all runs are of the edited code"
)


@dataclass
class Training(runner.Job):
    """One training, which several arms may share."""

    settings: dict = field(default_factory=dict)  # flags and network
    steps: int = 0
    flops: float = 0
    depths: set[int] = field(default_factory=set)
    arms: list[StudyArm] = field(default_factory=list)
    run: Run | None = None  # of the ledger, or of its own folder

    def accepts(self, run: Run, rows: str) -> bool:
        """Whether a run of these settings had the length, the rows (their hash, or its beginning)
        and the dtype, and was evaluated at the depths; a diverged one need not be.
        """
        # a length in FLOPs is not always the same to the step: their count has changed a little
        other_length = abs(run.config["steps"] - self.steps) > 0.002 * self.steps
        other_dtype = self.settings["dtype"] not in ("auto", run.config["dtype"])
        other_rows = not run.config["data"]["sha256"].startswith(rows)
        if other_length or other_dtype or other_rows:
            return False
        return run.diverged_at is not None or self.depths <= run.last["loss"].keys()


# -- what to run


def preset(family: str, scale: str) -> list[str]:
    """The small scale's Parcae has the scale's name alone."""
    name = f"{family}-{scale}"
    return ["--preset", name if name in PRESETS else scale]


def settled(flags: list[str]):
    """-> train.py's arguments, network and steps for these flags, which it may refuse."""
    args = train.parse_args(flags)
    cfg = train.model_config(args)
    return args, cfg, train.settle(args, cfg)


def length_flags(arm: StudyArm, args) -> list[str]:
    if arm.equal_flops:
        _, looped, _ = settled([*preset("parcae", args.scale), *args.extra])
        return ["--flops", f"{arm.tokens * looped.flops_per_token():.6g}"]
    if arm.flops:
        return ["--flops", f"{arm.flops:g}"]
    return ["--tokens", f"{arm.tokens:.0f}"]


def arm_flags(arm: StudyArm, args) -> list[str]:
    """All flags of an arm but --seed and --out. If a flag is repeated the last counts, so
    the user's own come last.
    """
    experiment = EXPERIMENTS[args.name]
    flags = preset(arm.preset, args.scale) + length_flags(arm, args)
    flags += experiment.flags.split()
    # train.py's own choice of depths is measured at the end of a run only
    if arm.preset != "transformer" and ints(experiment.depths) != train.FINAL_DEPTHS:
        flags += ["--eval-depths", experiment.depths]
    flags += arm.flags.split()
    if args.data:
        flags += ["--data", args.data]
    return flags + args.extra


def training_of(arm: StudyArm, seed: int, args) -> Training:
    flags = arm_flags(arm, args)
    folder = Path(f"{runner.folder_of(args.code, flags, args.rows)}-s{seed}")
    flags += ["--seed", str(seed)]
    given, cfg, steps = settled(flags)
    training = Training(f"{arm.name}, seed {seed}", flags, folder, arm=arm.name)
    training.settings = vars(given) | vars(cfg)
    training.steps = steps
    training.flops = steps * given.batch_size * cfg.seq_len * cfg.flops_per_token()
    if cfg.n_core:
        training.depths = set(ints(EXPERIMENTS[args.name].depths))
    return training


def trainings_of(args, arms: list[StudyArm]) -> list[Training]:
    """The trainings of the arms, short ones first, then by seed; equal ones are one."""
    found = {}
    for arm in arms:
        for seed in args.seeds:
            training = training_of(arm, seed, args)
            training = found.setdefault(tuple(training.flags), training)
            training.arms.append(arm)
    return sorted(found.values(), key=lambda x: (x.flops, x.settings["seed"]))


# -- the ledger


def is_edited() -> bool:
    """Whether the code that decides numbers is not the last commit's."""
    with tempfile.TemporaryDirectory() as folder:
        return code_hash(copy_commit("HEAD", Path(folder, "head"))) != code_hash(ROOT)


def look_up(trainings: list[Training], known: list[Run], rows: str) -> list[Training]:
    """Gives each training its run, of the ledger or of its own folder; -> those without one."""
    by_settings = {}
    for run in known:
        by_settings.setdefault(ledger.identity(run.flags), []).append(run)
    for training in trainings:
        same = by_settings.get(ledger.identity(training.settings), [])
        fitting = [run for run in same if training.accepts(run, rows)]
        # of runs in both dtypes the first recorded
        training.run = fitting[0] if fitting else ledger.record(training.folder)
    return [training for training in trainings if not training.run]


def rows_hash(args) -> str:
    """The hash of the packed rows; --data may also be the hash, or its beginning, for a page."""
    if args.data and not Path(args.data).is_dir():
        return args.data
    if args.data:
        return PackedData(Path(args.data)).sha256
    return runner.rows_of([*preset("parcae", args.scale), *args.extra])


def keep(training: Training, args) -> None:
    """Reads a run. Runs of committed code, with no extra flags or --out, go to the ledger."""
    training.run = ledger.record(training.folder)
    if args.tracked:
        ledger.append(training.run)


def held_out(fitted: list[Run], known: list[Run]) -> list[Run]:
    """The runs that the laws have to predict, see HELD_OUT of studies/laws.py."""
    wanted = family(fitted[-1])
    found = []
    for run in known:
        ratio = run.train[-1]["tokens"] / run.config["params"]
        off = [abs(ratio / usual - 1) for usual in UP_TO_80]
        asked = run.seed < 8 and min(off) < 0.05 and run.counts()
        if asked and run not in fitted and family(run) == wanted:
            found.append(run)
    return found


def family(run: Run) -> dict:
    """What held-out runs share with the fitted ones: all but length, seed and mu_rec."""
    known = ledger.defaults() | run.flags
    usual = config_of(known | {"mu_bwd": 0})
    half = known["mu_bwd"] == usual.mu_bwd
    ignored = dict.fromkeys(("seed", "mu_rec", "mu_bwd"))
    return known | ignored | {"data": run.config["data"], "half with gradient": half}


# -- main


def parse_args(argv):
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(description=__doc__, prog="python -m studies.experiments")
    add = parser.add_argument
    add("name", choices=EXPERIMENTS, help="the comparison")
    add("--scale", default=SMALL, help="size of the presets (default: %(default)s)")
    add("--seeds", type=ints, help="between commas (default: the comparison's own at nano, else 0)")
    add("--data", help="packed rows (default at nano: Python's own library); for --page their hash")
    add("--only", default="", help="arms whose name has one of these texts, between semicolons")
    jobs = runner.default_side_by_side()
    add("--jobs", type=positive_int, default=jobs, help="trainings side by side")
    add("--ranks", type=positive_int, default=1, help="processes of a training, one a GPU")
    add("--core", nargs="?", const="--panel core-extended", help="also core_eval.py, these flags")
    add("--out", type=Path, help="the page, without suffix")
    add("--page", action="store_true", help="train nothing, write the page")
    add("--dry-run", action="store_true", help="say what is left to do, and stop")
    args = parser.parse_args(argv[:cut])
    args.extra = argv[cut + 1 :]
    told = [word for word in argv if word != "--page"]
    args.command = shlex.join(["python", "-m", "studies.experiments", *told])
    return args


def settle(args) -> None:
    """Fills in defaults that depend on others."""
    experiment = EXPERIMENTS[args.name]
    small = args.scale == SMALL
    if args.scale not in experiment.scales:
        names = ", ".join(experiment.scales)
        fail(f"--scale {args.scale} is not a size of {args.name}; choose from {names}")
    if not small and not args.data:
        fail(f"--scale {args.scale} needs --data, e.g. data/fineweb-edu-v32768/rows-2048-crop")
    args.seeds = args.seeds or range(experiment.seeds if small else 1)
    args.code = code_hash(ROOT)
    args.edited = is_edited()
    folder = Path("results")
    if args.edited:
        folder = Path("runs/studies")
        print(EDITED, flush=True)
    rows = "" if args.data else "-stdlib"
    args.tracked = not (args.edited or args.extra or args.out)
    args.out = args.out or folder / f"{args.name}-{args.scale}{rows}"
    args.rows = rows_hash(args)


def chosen(args) -> list[StudyArm]:
    """The arms that --only names."""
    arms = arms_of(args.name, args.scale)
    texts = [text.strip() for text in args.only.split(";")]
    found = [arm for arm in arms if any(text in arm.name for text in texts)]
    if not found:
        names = "; ".join(arm.name for arm in arms)
        fail(f"--only {args.only} fits no arm; there are: {names}")
    if args.extra:
        rename_groups(found, args)
    return found


def rename_groups(arms: list[StudyArm], args) -> None:
    """Flags after -- may change the length that is in a group's name."""
    names = {}
    for arm in arms:
        if arm.group not in names:
            given, cfg, steps = settled(arm_flags(arm, args))
            ratio = steps * given.batch_size * cfg.seq_len / parameter_count(cfg)
            names[arm.group] = re.sub(r"\d+(?= tokens/parameter)", f"{ratio:.2g}", arm.group)
        arm.group = names[arm.group]


def list_trainings(trainings: list[Training]) -> None:
    """What a dry run says."""
    for training in trainings:
        print(f"{training.name}: {training.flops:.2g} FLOPs")
        print(f"    {shlex.join(['python', 'train.py', *training.flags])}")
    total = sum(training.flops for training in trainings)
    print(f"# in all {total:.3g} FLOPs, {total / CORE_SPEED / 3600:.3g} hours of a CPU's core")


def train_all(trainings: list[Training], args) -> None:
    """Trains side by side; what is finished goes to the ledger at once."""

    def ended(training: Training, failed: bool) -> None:
        if not failed:
            keep(training, args)

    runner.run_all(trainings, args.jobs, args.ranks, ended)


def evaluate_core(trainings: list[Training], args) -> None:
    """core_eval.py on finished runs that are here; keeps them again, with scores."""
    launcher = [sys.executable]
    if args.ranks > 1:
        launcher += [*runner.TORCHRUN.split(), f"--nproc_per_node={args.ranks}"]
    for training in trainings:
        run = ledger.record(training.folder)
        if not run or not run.counts():
            continue
        command = [*launcher, ROOT / "core_eval.py", training.folder, *args.core.split()]
        if subprocess.run(command).returncode:
            fail(f"core_eval.py failed on {training.folder}, see above")
        keep(training, args)


def show(args, arms: list[StudyArm], trainings: list[Training], known: list[Run]) -> None:
    """Writes the page, and the fits of a scaling experiment."""
    done = [training for training in trainings if training.run]
    for training in done:
        for arm in training.arms:
            arm.runs.append(training.run)
    experiment = EXPERIMENTS[args.name]
    if done:
        write_page(args, experiment, arms)
    good = [training.run for training in done if training.run.counts()]
    if good and experiment.fits:
        unseen = held_out(good, known)
        write_fit(rows_of(good), rows_of(unseen), args.out)


def main(argv=None):
    args = parse_args(sys.argv[1:] if argv is None else argv)
    settle(args)
    arms = chosen(args)
    trainings = trainings_of(args, arms)
    known = [] if args.edited else ledger.read_ledger()
    todo = look_up(trainings, known, args.rows)
    print(f"# {len(todo)} of {len(trainings)} trainings are left to do", flush=True)
    if args.dry_run:
        list_trainings(todo)
        return
    if not args.page:
        train_all(todo, args)
    if args.core:
        evaluate_core(trainings, args)
    show(args, arms, trainings, known)


if __name__ == "__main__":
    main()
