"""The comparisons of the sources: writes a page from results/ledger/, and trains what has no line there.

    python -m studies.experiments baseline                            # the page, from the ledger
    python -m studies.experiments gains --only "20 tokens" --train --seeds 8,9
    python -m studies.experiments baseline --scale 140m --data DATA --train --ranks 8 --core # GPUs
    python -m studies.experiments rdm --page rdm-nano --train -- --batch-size 32 # for every train.py

Written: results/PAGE.md and its figures. A training of --train is kept where tools.ablate keeps its own, and
enters the ledger when it is over. A run that diverges is a result.
"""

import itertools
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd

import train
from launch import training_flops
from looped.common import Parser, fail, ints, positive_int
from looped.machine import ROOT
from studies import ledger
from studies.comparisons import AS_PARCAE, EXPERIMENTS, SMALL, Experiment, arms_of
from studies.laws import rows_of, write_fit
from tools.arms import Arm
from tools.figures import frame_table, records_table
from tools.pages import curves_figure, write_page
from tools.runner import TORCHRUN, Training, default_side_by_side, train_arms

DIVERGED = (
    "A run diverged if three steps in a row had no finite loss, if its training loss ended above "
    "its start or more than 0.5 nats above its lowest, or if the state norm passed 10,000 times "
    "its value at step 1 (taken as at least 1)."
)
RUN_COLUMNS = {"run": "", "val loss": ".4f", "ρ(Ā)": ".4f", "diverges at step": ""}
HELD_OUT = {"baseline": "Parcae", "testtime": "mu_rec"}  # what the laws have to predict


# -------------------------------------------------------------------------------------------------
# Flags


def parse_args(argv):
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(description=__doc__, prog="python -m studies.experiments")
    add = parser.add_argument
    add("name", choices=EXPERIMENTS, help="the comparison")
    add("--scale", default=SMALL, help="size of the presets (default: %(default)s)")
    add("--only", default="", help="arms whose name has one of these texts, between semicolons")
    add("--page", help="name of the page (default: NAME-SCALE-stdlib, with --data NAME-SCALE)")
    add("--data", help="packed rows (default at nano: Python's own library)")
    add("--train", action="store_true", help="train what has no line in the ledger")
    add("--seeds", type=ints, help="of --train, between commas (default: the comparison's)")
    add("--jobs", type=positive_int, default=default_side_by_side(), help="trainings side by side")
    add("--ranks", type=positive_int, default=1, help="processes of a training, one a GPU")
    add("--core", nargs="?", const="--panel core-extended", help="also core_eval.py, these flags")
    args = parser.parse_args(argv[:cut])
    args.extra = argv[cut + 1 :]
    args.command = shlex.join(["python", "-m", "studies.experiments", *argv])
    experiment = EXPERIMENTS[args.name]
    if args.scale not in experiment.scales:
        sizes = ", ".join(experiment.scales)
        fail(f"--scale {args.scale} is not a size of {args.name}; choose from {sizes}")
    if args.extra and not args.page:
        fail("flags after -- are not what the comparison's page shows; name another with --page")
    rows = "" if args.data or args.scale != SMALL else "-stdlib"
    args.page = args.page or f"{args.name}-{args.scale}{rows}"
    args.seeds = args.seeds or range(experiment.seeds if args.scale == SMALL else 1)
    return args


def chosen(args) -> list[Arm]:
    """The arms that --only names, with all their flags."""
    arms = arms_of(args.name, args.scale)
    texts = [text.strip() for text in args.only.split(";")]
    found = [arm for arm in arms if any(text in arm.name for text in texts)]
    if not found:
        names = "; ".join(arm.name for arm in arms)
        fail(f"--only {args.only} fits no arm; there are: {names}")
    return found


# -------------------------------------------------------------------------------------------------
# Training


def complete(arms: list[Arm], args) -> None:
    """The flags that only training needs."""
    for arm in arms:
        if AS_PARCAE in arm.flags:
            of_group = [
                other for other in arms_of(args.name, args.scale) if other.group == arm.group
            ]
            looped = next(other for other in of_group if other.label == "Parcae")
            arm.flags[arm.flags.index(AS_PARCAE)] = f"{flops_of(looped.flags):.6g}"
        arm.flags += ["--data", args.data] if args.data else []
        arm.flags += args.extra


def flops_of(flags: list[str]) -> float:
    args = train.parse_args(flags)
    cfg = train.model_config(args)
    batch = train.RECIPES[args.preset].batch_size
    steps = round(args.tokens / (batch * cfg.seq_len))
    return training_flops(cfg, 0, batch, steps)


def train_missing(arms: list[Arm], args) -> None:
    """Trains the arms at --seeds where the ledger has no line, side by side, and enters them."""
    fresh = {}  # copies, since an arm with runs has them already
    missing = []
    for seed, arm in itertools.product(args.seeds, arms):
        if seed not in {run.seed for run in arm.runs}:
            copy = fresh.setdefault(arm.name, Arm(arm.label, arm.flags, arm.group))
            missing.append(Training(copy, seed))
    by_name = {arm.name: arm for arm in arms}
    for training in train_arms(missing, args.jobs, args.ranks):
        if training:
            if args.core:
                evaluate_core(training, args)
            run = training.arm.runs[-1]
            ledger.append(args.page, training.arm, run)
            by_name[training.arm.name].runs.append(run)


def evaluate_core(training: Training, args) -> None:
    """core_eval.py on a training that is over."""
    launcher = [sys.executable]
    if args.ranks > 1:
        launcher += [*TORCHRUN.split(), f"--nproc_per_node={args.ranks}"]
    command = [*launcher, ROOT / "core_eval.py", training.folder, *args.core.split()]
    if subprocess.run(command).returncode:
        fail(f"core_eval.py failed on {training.folder}, see above")
    training.arm.runs[-1] = training.read()


# -------------------------------------------------------------------------------------------------
# The page


def source_table(arms: list[Arm]) -> list[str]:
    """The paper's or the post's numbers, at their own scale and on their own data."""
    rows = {}
    for arm in arms:
        if arm.source:
            numbers = [f"{of}: {number}" for of, number in arm.source.items()]
            rows[arm.name] = {
                "by depth or score (of a perplexity the logarithm)": "; ".join(numbers)
            }
    if not rows:
        return []
    return ["## The source", "", *frame_table(pd.DataFrame(rows).T.rename_axis("arm"))]


def run_table(arms: list[Arm]) -> list[str]:
    rows = []
    for arm in arms:
        for run in arm.runs:
            row = {"run": f"{arm.name}, seed {run.seed}", "val loss": run.loss}
            rows.append(row | {"ρ(Ā)": run.last.get("rho"), "diverges at step": run.diverged_at})
    return ["## Runs", "", *records_table(rows, RUN_COLUMNS)]


def held_out(args) -> list:
    """The looped runs of two other comparisons, on the same rows."""
    runs = {}
    for name, label in HELD_OUT.items():
        if args.scale in EXPERIMENTS[name].scales:
            arms = [arm for arm in arms_of(name, args.scale) if arm.label.startswith(label)]
            ledger.fill(args.page.replace(args.name, name), arms)
            for arm in arms:
                for run in arm.runs:
                    if "one loop" not in arm.label and run.counts():
                        runs[run.name] = run
    return list(runs.values())


def show(experiment: Experiment, arms: list[Arm], left_out: list[str], args) -> None:
    """Writes the page, and the fits of a scaling experiment."""
    out = Path("results") / args.page
    arms = [arm for arm in arms if arm.runs]
    sections = [*left_out, *source_table(arms)]
    sections += curves_figure(Path(f"{out}-training.png"), arms, experiment.curves)
    sections += [DIVERGED, "", *run_table(arms)]
    write_page(out, f"{experiment.title}: {args.scale}", arms, args.command, sections)
    runs = [run for arm in arms for run in arm.runs if run.counts()]
    if experiment.fits and runs:
        write_fit(rows_of(runs), rows_of(held_out(args)), out)


def main(argv=None):
    args = parse_args(sys.argv[1:] if argv is None else argv)
    arms = chosen(args)
    left_out = ledger.fill(args.page, arms)
    if args.train:
        complete(arms, args)
        train_missing(arms, args)
    if not any(arm.runs for arm in arms):
        fail(f"results/ledger has no run of the page {args.page}; --train trains them")
    show(EXPERIMENTS[args.name], arms, left_out, args)


if __name__ == "__main__":
    main()
