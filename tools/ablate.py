"""From an edit to an answer: is it better, and is that more than chance?

    python -m tools.ablate                            # the working tree against the last commit
    python -m tools.ablate --base main --seeds 8      # against a branch, at seeds 0 to 7
    python -m tools.ablate --patch studies/edits/half_gain.patch
    python -m tools.ablate --flags "--gain zoh"       # the same code, with flags and without
    python -m tools.ablate -- --tokens 3e6 --mu-rec 4 # after --: flags of every training

Both are copied, checked (tools.check), and trained at the same seeds on the same rows, side by
side. The answer, in runs/ablate/NAME/report.md, pairs them by seed. Trainings are kept under
runs/ablate/trainings: the base's are not repeated for the next edit, and an interrupted one
continues.
"""

import ast
import itertools
import math
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median_high

import numpy as np

from looped.common import Parser, fail, ints, positive_int, write_atomic
from looped.machine import ROOT, code_hash, deciding_files
from tools.figures import (
    Plot,
    depth_plot,
    figure,
    fmt,
    half_width,
    plus_minus,
    t_quantile,
    table,
)
from tools.report import COSTS, LoggedRun, cost_of, read_run
from tools.runner import Job, default_side_by_side, folder_of, rows_of, run_all, say

RUNS = Path("runs/ablate")
COPIED = (":(glob)*.py", "looped/*.py", "tools/*.py")  # for training and for tools.check
WHAT_IT_TAKES = (
    "At 20 tokens a parameter pairs of nano scatter by 0.002 to 0.01 nats: 4 seeds see 0.01, "
    "14 see 0.003. Shorter runs mislead: at 2e5 tokens seeds differ by 0.05."
)
RATES_HINT = (
    "The edit has new parameters or changes how they are trained, so the best rates may be others: "
    'try --sweep "--adam-lr 3e-2,6.4e-2,1.3e-1".'
)


@dataclass
class Arm:
    """Code and flags that are trained at every seed."""

    name: str
    code: Path  # a copy
    flags: list[str]  # of train.py
    runs: dict[int, LoggedRun] = field(default_factory=dict)  # by seed, those that have ended

    def diverged(self) -> int:
        return sum(map(diverged, self.runs.values()))

    def mean_loss(self) -> float:
        """Infinite if a seed diverges."""
        if self.diverged() or not self.runs:
            return math.inf
        return fmean(run.loss for run in self.runs.values())


def diverged(run: LoggedRun) -> bool:
    """Whether it was stopped, or ends above where it began."""
    return not (run.last.get("final") and run.loss < run.train[0]["loss"])


@dataclass
class Pair:
    """Two arms that are compared."""

    base: Arm
    edit: Arm

    def runs(self) -> list[tuple[LoggedRun, LoggedRun]]:
        """By seed, where neither diverged."""
        found = []
        for seed in sorted(self.base.runs.keys() & self.edit.runs.keys()):
            both = self.base.runs[seed], self.edit.runs[seed]
            if not any(map(diverged, both)):
                found.append(both)
        return found

    def differences(self) -> np.ndarray:
        """Of the loss at mu_rec, by seed: the edit's less the base's."""
        return np.array([b.loss - a.loss for a, b in self.runs()])

    def losses(self) -> dict[int, np.ndarray]:
        """{depth: last val losses (2, seeds), the base's and the edit's}"""
        base, edit = zip(*self.runs())
        depths = base[0].last["loss"].keys() & edit[0].last["loss"].keys()
        found = {}
        for depth in sorted(depths):
            before = [run.last["loss"][depth] for run in base]
            after = [run.last["loss"][depth] for run in edit]
            found[depth] = np.array([before, after])
        return found


# -------------------------------------------------------------------------------------------------
# Copies of the code


def git(*command, cwd=None) -> bytes:
    done = subprocess.run(["git", *command], capture_output=True, cwd=cwd or ROOT)
    if done.returncode:
        fail(f"git {command[0]}: {done.stderr.decode().strip()}")
    return done.stdout


def copy_commit(ref: str, copy: Path) -> Path:
    archive = git("archive", ref, "--", *COPIED)
    copy.mkdir()
    subprocess.run(["tar", "-x", "-C", copy], input=archive, check=True)
    return copy


def copy_tree(copy: Path) -> Path:
    """The working tree, files that are not yet added included."""
    names = git("ls-files", "-co", "--exclude-standard", "--", *COPIED).decode()
    for name in names.splitlines():
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


def copy_patched(ref: str, patch: Path, copy: Path) -> Path:
    git("apply", patch.resolve(), cwd=copy_commit(ref, copy))
    return copy


def difference_of(base: Path, edit: Path) -> str:
    """A patch. base and edit: copies beside each other."""
    line = ["git", "diff", "--no-index", "--no-prefix", base.name, edit.name]
    return subprocess.run(line, cwd=base.parent, capture_output=True, text=True).stdout


def functions(copy: Path) -> dict[str, str]:
    """{syntax tree: name} of the functions that can decide a training's numbers."""
    found = {}
    for file in deciding_files(copy):
        tree = ast.parse(file.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found[ast.dump(node)] = node.name
    return found


def first_change(base: Path, edit: Path) -> str:
    """What an edit is called: the first function that is new or changed, if there is one."""
    before = functions(base)
    for tree, name in functions(edit).items():
        if tree not in before:
            return name
    return "edit"


# -------------------------------------------------------------------------------------------------
# What is compared


def seed_list(text: str) -> list[int]:
    """4, or 0,1,2,3"""
    if "," in text:
        return ints(text)
    return list(range(positive_int(text)))


def slug(name: str) -> str:
    """A name for files."""
    return re.sub(r"[^\w.]+", "-", name).strip("-")


def parse_args(argv):
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(description=__doc__, prog="python -m tools.ablate")
    add = parser.add_argument
    add("--base", help="commit to compare with (default: the last one)")
    add("--patch", type=Path, help="compare the base with this patch applied to it")
    add("--flags", action="append", default=[], help="compare flags, not code; each is an arm")
    add("--seeds", type=seed_list, default="4", help="how many, or a list (default: 0,1,2,3)")
    add("--jobs", type=positive_int, default=default_side_by_side(),
        help="trainings side by side (default: one a GPU, or else a core)")  # fmt: skip
    add("--name", help="of the edit and its report (default: the first function changed)")
    add("--equal", choices=("tokens", "flops"), default="tokens",
        help="budget of the edit, matched to the base (default: %(default)s)")  # fmt: skip
    add("--sweep", help='a flag and its values, e.g. "--adam-lr 3e-2,6.4e-2": base and edit are '
        "trained with each, and compared each at its best")  # fmt: skip
    add("--no-check", action="store_true", help="train even if a check fails")
    args = parser.parse_args(argv[:cut])
    args.extra = argv[cut + 1 :]
    args.command = shlex.join(["python", "-m", "tools.ablate", *argv])
    return args


def arms_of(args, copies: Path) -> tuple[Arm, list[Arm]]:
    """The base, and what is compared with it."""
    ref = args.base or "HEAD"
    name = args.base or git("rev-parse", "--abbrev-ref", "HEAD").decode().strip()
    if args.flags:
        code = copies / "base"
        code = copy_commit(ref, code) if args.base else copy_tree(code)
        edits = []
        for flags in args.flags:
            edits.append(Arm(flags, code, [*args.extra, *flags.split()]))
        return Arm(name, code, args.extra), edits
    base = copy_commit(ref, copies / "base")
    edit = copies / "edit"
    edit = copy_patched(ref, args.patch, edit) if args.patch else copy_tree(edit)
    if code_hash(base) == code_hash(edit):
        fail(f"nothing that decides numbers differs from {ref}; edit model.py, or try --flags")
    edit_name = args.patch.stem if args.patch else first_change(base, edit)
    edited = Arm(args.name or edit_name, edit, args.extra)
    return Arm(name, base, args.extra), [edited]


def with_values(arm: Arm, sweep: str | None) -> list[Arm]:
    """The arm, with each value of a swept flag."""
    if not sweep:
        return [arm]
    flag, values = sweep.split()
    swept = []
    for value in values.split(","):
        name = f"{arm.name} {flag} {value}"
        swept.append(Arm(name, arm.code, [*arm.flags, flag, value]))
    return swept


COST = """
import sys, train
args = train.parse_args(sys.argv[1:])
cfg = train.model_config(args)
train.settle(args, cfg)
print(args.tokens, cfg.flops_per_token())
"""


def cost(arm: Arm) -> tuple[float, float]:
    """Tokens of a training, and FLOPs of a token, as the arm's own code has them."""
    line = [sys.executable, "-c", COST, *arm.flags]
    done = subprocess.run(line, cwd=arm.code, stdout=subprocess.PIPE, check=True)
    tokens, flops = done.stdout.split()
    return float(tokens), float(flops)


def equal_flops(base: Arm, arm: Arm) -> list[str]:
    """The arm's flags, with as many training FLOPs as the base has."""
    tokens, flops = cost(base)
    _, own = cost(arm)
    return [*arm.flags, "--tokens", f"{tokens * flops / own:.0f}"]


def check(arm: Arm) -> bool:
    """tools.check, of the arm's code."""
    line = [sys.executable, "-m", "tools.check", *arm.flags]
    return subprocess.run(line, cwd=arm.code).returncode == 0


# -------------------------------------------------------------------------------------------------
# Training


def train_arms(pairs: list[Pair], page: Path, args) -> None:
    """Fills in the arms' runs, with a line for each pair that has ended, and links to them beside
    the page. An arm that fails ends the program.
    """
    arms = {}
    for pair in pairs:
        arms[pair.base.name] = pair.base
        arms[pair.edit.name] = pair.edit
    folders = {}
    for name, arm in arms.items():
        folders[name] = folder_of(code_hash(arm.code), arm.flags, rows_of(arm.flags))
    jobs = []
    for seed, (name, arm) in itertools.product(args.seeds, arms.items()):
        folder = Path(f"{folders[name]}-s{seed}")
        flags = [*arm.flags, "--seed", str(seed)]
        jobs.append(Job(f"{name} s{seed}", flags, folder, arm.code, name))

    def ended(job: Job, failed: bool) -> None:
        if failed:
            fail(f"{job.arm} does not train, see above; the other trainings are saved")
        run = read_run(job.folder)
        seed = run.flags["seed"]
        arms[job.arm].runs[seed] = run
        link = page / slug(job.name)  # for tools.report, which calls a run by its folder
        link.unlink(missing_ok=True)
        link.symlink_to(job.folder.resolve())
        for pair in pairs:
            if job.arm in (pair.base.name, pair.edit.name):
                say_pair(pair, seed)

    say(WHAT_IT_TAKES)
    run_all(jobs, args.jobs, 1, ended)


def say_pair(pair: Pair, seed: int) -> None:
    """A line, once both have ended."""
    if seed in pair.base.runs and seed in pair.edit.runs:
        a = pair.base.runs[seed].loss
        b = pair.edit.runs[seed].loss
        losses = f"{pair.base.name} {a:.4f}, {pair.edit.name} {b:.4f}"
        say(f"seed {seed}: {losses}, difference {b - a:+.4f}")


# -------------------------------------------------------------------------------------------------
# The answer


def seeds_to_see(gap: float, deviation: float) -> int:
    """How many pairs, of differences that scatter so, have an interval of at most ± gap."""
    n = 2
    while t_quantile(n - 1) * deviation > gap * math.sqrt(n):
        n += 1
    return n


def answer(pair: Pair) -> str:
    """The one sentence."""
    name = pair.edit.name
    for arm in (pair.edit, pair.base):
        if arm.diverged():
            return f"{arm.name} diverges on {arm.diverged()} of {len(arm.runs)} seeds."
    gaps = pair.differences()
    if not len(gaps):
        return f"{name} does not train."
    _, run = pair.runs()[0]
    at = f"nats/token at {run.depth} loops" if run.depth else "nats/token without a loop"
    if len(gaps) == 1:
        return f"{name}: {gaps[0]:+.4f} {at}; one seed gives no interval."
    told = f"{at}, {len(gaps)} seeds, 95 %"
    mean = gaps.mean()
    half = half_width(gaps)
    if abs(mean) > half:
        word = "better" if mean < 0 else "worse"
        by = f"{abs(mean):.4f} ± {half:.4f} {told}"
        return f"{name} is {word} than {pair.base.name} by {by}."
    goal = float(f"{half / 2:.1g}")
    seeds = seeds_to_see(goal, gaps.std(ddof=1))
    shown = f"{mean:+.4f} ± {half:.4f} {told}"
    return f"{name}: no difference shown: {shown}; to see {goal:g} about {seeds} seeds are needed."


def depth_table(pair: Pair) -> list[str]:
    rows = []
    for depth, (a, b) in pair.losses().items():
        difference = plus_minus(b - a, "+.4f")
        rows.append([depth, fmt(a.mean()), fmt(b.mean()), difference])
    return table(["loops", pair.base.name, pair.edit.name, "difference"], rows)


def cost_table(pair: Pair) -> list[str]:
    """What a training takes, the median over seeds."""
    rows = []
    for name, form in COSTS.items():
        a = median_cost(pair.base, name)
        b = median_cost(pair.edit, name)
        rows.append([name, format(a, form), format(b, form), f"{b / a - 1:+.1%}"])
    return table(["cost", pair.base.name, pair.edit.name, "change"], rows)


def median_cost(arm: Arm, name: str) -> float:
    return median_high(cost_of(run)[name] for run in arm.runs.values())


def sweep_table(swept: list[Pair]) -> list[str]:
    rows = []
    for pair in swept:
        base = fmt(pair.base.mean_loss())
        edit = fmt(pair.edit.mean_loss())
        difference = plus_minus(pair.differences(), "+.4f")
        rows.append([pair.edit.name, base, edit, difference])
    return table(["val loss with", "base", "edit", "difference"], rows)


def depth_picture(pair: Pair) -> Plot:
    """Val loss by depth of both."""
    means = ({}, {})
    halves = ([], [])
    for depth, losses in pair.losses().items():
        for side, values in enumerate(losses):
            means[side][depth] = values.mean()
            halves[side].append(half_width(values))
    plot = depth_plot(means, "val loss, nats/token")
    plot.half_widths = halves
    return plot


def difference_picture(pair: Pair) -> Plot:
    """The difference of the val losses at mu_rec over training."""
    gaps = []  # by seed, then by validation
    for base, edit in pair.runs():
        tokens = []
        gap = []
        for a, b in zip(base.evals, edit.evals):
            tokens.append(a["tokens"])
            gap.append(b["loss"][edit.depth] - a["loss"][base.depth])
        gaps.append(gap)
    times = np.array(tokens) / 1e6
    halves = [half_width(values) for values in np.transpose(gaps)]
    curves = [(times, 0 * times), (times, np.mean(gaps, 0))]
    label = f"difference from {pair.base.name}, nats/token"
    return Plot("tokens trained, millions", label, curves, half_widths=[None, halves])


def report(swept: list[Pair], folder: Path) -> tuple[str, list[str]]:
    """The answer on one edit, and its pictures and tables. Of swept values, each side's best."""
    base = min((pair.base for pair in swept), key=Arm.mean_loss)
    edit = min((pair.edit for pair in swept), key=Arm.mean_loss)
    best = Pair(base, edit)
    lines = []
    if best.runs():
        plots = [depth_picture(best), difference_picture(best)]
        caption = "Loss by depth, and its difference over training; 95 % intervals over seeds."
        file = folder / f"{slug(edit.name)}.png"
        lines += figure(file, caption, [base.name, edit.name], plots)
        lines += depth_table(best) + cost_table(best)
    if len(swept) > 1:
        lines += sweep_table(swept)
    return answer(best), lines


def hints(pair: Pair, diff: str) -> list[str]:
    """Where the rates may be part of the edit."""
    before = median_cost(pair.base, "parameters")
    after = median_cost(pair.edit, "parameters")
    trains_otherwise = re.search(r"^\+\+\+ edit/(muon|train)\.py", diff, re.M)
    return [RATES_HINT, ""] if before != after or trains_otherwise else []


def compare(args, copies: Path) -> None:
    """Trains what is asked for, and writes the report."""
    base, edits = arms_of(args, copies)
    name = args.name or edits[0].name
    folder = RUNS / slug(name)
    folder.mkdir(parents=True, exist_ok=True)
    diff = difference_of(base.code, edits[0].code)
    for arm in edits:
        if not args.no_check and not check(arm):
            fail(f"{arm.name} fails a check, see above; --no-check trains it all the same")
        if args.equal == "flops":
            arm.flags = equal_flops(base, arm)
    bases = with_values(base, args.sweep)
    swept = []  # by edit, a pair for each value
    for arm in edits:
        pairs = map(Pair, bases, with_values(arm, args.sweep))
        swept.append(list(pairs))
    train_arms(sum(swept, []), folder, args)
    answers = []
    details = []
    for pairs in swept:
        sentence, lines = report(pairs, folder)
        answers += [sentence, ""]
        details += lines
    lines = [f"# {name}", "", *answers, *details, *hints(swept[0][0], diff)]
    lines += [WHAT_IT_TAKES, "", f"`{args.command}`", ""]
    say("\n".join(lines))
    if diff:
        lines += ["## The edit", "", "```diff", diff, "```", ""]
    write_atomic(folder / "report.md", "\n".join(lines))
    say(f"written: {folder}/report.md")


def main(argv=None):
    args = parse_args(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory() as copies:
        compare(args, Path(copies))


if __name__ == "__main__":
    main()
