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

from looped.common import Parser, fail, ints, positive_int, write_atomic
from looped.machine import ROOT, code_hash, deciding_files
from tools.arms import (
    TRAINED,
    Arm,
    answer,
    comparison_figure,
    cost_table,
    loss_table,
    read_run,
    shown_depths,
)
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
class Edit(Arm):
    """Code and flags that are trained at every seed."""

    code: Path = ROOT  # a copy
    flags: list[str] = field(default_factory=list)  # of train.py

    def mean_loss(self) -> float:
        """Infinite if a seed diverges."""
        losses = self.losses([])[TRAINED]
        return math.inf if self.diverged() or losses.empty else losses.mean()


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


def arms_of(args, copies: Path) -> tuple[Edit, list[Edit]]:
    """The base, and what is compared with it."""
    ref = args.base or "HEAD"
    name = args.base or git("rev-parse", "--abbrev-ref", "HEAD").decode().strip()
    if args.flags:
        code = copies / "base"
        code = copy_commit(ref, code) if args.base else copy_tree(code)
        edits = []
        for flags in args.flags:
            edits.append(Edit(flags, code=code, flags=[*args.extra, *flags.split()]))
        return Edit(name, code=code, flags=args.extra), edits
    base = copy_commit(ref, copies / "base")
    edit = copies / "edit"
    edit = copy_patched(ref, args.patch, edit) if args.patch else copy_tree(edit)
    if code_hash(base) == code_hash(edit):
        fail(f"nothing that decides numbers differs from {ref}; edit model.py, or try --flags")
    edit_name = args.patch.stem if args.patch else first_change(base, edit)
    edited = Edit(args.name or edit_name, code=edit, flags=args.extra)
    return Edit(name, code=base, flags=args.extra), [edited]


def with_values(arm: Edit, sweep: str | None) -> list[Edit]:
    """The arm, with each value of a swept flag."""
    if not sweep:
        return [arm]
    flag, values = sweep.split()
    swept = []
    for value in values.split(","):
        name = f"{arm.name} {flag} {value}"
        swept.append(Edit(name, code=arm.code, flags=[*arm.flags, flag, value]))
    return swept


COST = """
import sys, train
args = train.parse_args(sys.argv[1:])
cfg = train.model_config(args)
train.settle(args, cfg)
print(args.tokens, cfg.flops_per_token())
"""


def cost(arm: Edit) -> tuple[float, float]:
    """Tokens of a training, and FLOPs of a token, as the arm's own code has them."""
    line = [sys.executable, "-c", COST, *arm.flags]
    done = subprocess.run(line, cwd=arm.code, stdout=subprocess.PIPE, check=True)
    tokens, flops = done.stdout.split()
    return float(tokens), float(flops)


def equal_flops(base: Edit, arm: Edit) -> list[str]:
    """The arm's flags, with as many training FLOPs as the base has."""
    tokens, flops = cost(base)
    _, own = cost(arm)
    return [*arm.flags, "--tokens", f"{tokens * flops / own:.0f}"]


def check(arm: Edit) -> bool:
    """tools.check, of the arm's code."""
    line = [sys.executable, "-m", "tools.check", *arm.flags]
    return subprocess.run(line, cwd=arm.code).returncode == 0


# -------------------------------------------------------------------------------------------------
# Training


def train_arms(arms: list[Edit], page: Path, args) -> None:
    """Fills in the arms' runs, with a line for each that has ended, and links to them beside the
    page. An arm that fails ends the program.
    """
    by_name = {arm.name: arm for arm in arms}
    folders = {}
    for arm in arms:
        folders[arm.name] = folder_of(code_hash(arm.code), arm.flags, rows_of(arm.flags))
    jobs = []
    for seed, arm in itertools.product(args.seeds, arms):
        folder = Path(f"{folders[arm.name]}-s{seed}")
        flags = [*arm.flags, "--seed", str(seed)]
        jobs.append(Job(f"{arm.name} s{seed}", flags, folder, arm.code, arm.name))

    def ended(job: Job, failed: bool) -> None:
        if failed:
            fail(f"{job.arm} does not train, see above; the other trainings are saved")
        run = read_run(job.folder, job.name)
        by_name[job.arm].runs.append(run)
        link = page / slug(job.name)  # for tools.report, which calls a run by its folder
        link.unlink(missing_ok=True)
        link.symlink_to(job.folder.resolve())
        base, *edits = arms
        for edit in edits:
            if job.arm in (base.name, edit.name):
                say_pair(base, edit, run.seed)

    say(WHAT_IT_TAKES)
    run_all(jobs, args.jobs, 1, ended)


def say_pair(base: Edit, edit: Edit, seed: int) -> None:
    """Their losses at a seed, if both have ended there, and the answer so far."""
    before = [run.loss for run in base.runs if run.seed == seed]
    after = [run.loss for run in edit.runs if run.seed == seed]
    for a, b in zip(before, after):
        losses = f"{base.name} {a:.4f}, {edit.name} {b:.4f}"
        say(f"seed {seed}: {losses}, difference {b - a:+.4f}")
        if len(edit.runs) > 1:
            say(f"so far: {answer(edit, base)}")


# -------------------------------------------------------------------------------------------------
# The answer


def best(arms: list[Edit]) -> Edit:
    return min(arms, key=Edit.mean_loss)


def report(base: Edit, edits: list[Edit], folder: Path) -> list[str]:
    """The answer on each edit, a picture and tables."""
    arms = [base, *edits]
    lines = []
    for edit in edits:
        lines += [answer(edit, base), ""]
    lines += comparison_figure(folder / f"{slug(edits[0].name)}.png", arms)
    return lines + loss_table(arms, shown_depths(arms)) + cost_table(arms)


def hints(base: Edit, edit: Edit, diff: str) -> list[str]:
    """Where the rates may be part of the edit."""
    more = base.runs[0].config["params"] != edit.runs[0].config["params"]
    trains_otherwise = re.search(r"^\+\+\+ edit/(muon|train)\.py", diff, re.M)
    return [RATES_HINT, ""] if more or trains_otherwise else []


def compare(args, copies: Path) -> None:
    """Trains what is asked for, and writes the report."""
    base, edits = arms_of(args, copies)
    name = args.name or edits[0].name
    folder = RUNS / slug(name)
    folder.mkdir(parents=True, exist_ok=True)
    diff = difference_of(base.code, edits[0].code)
    for edit in edits:
        if not args.no_check and not check(edit):
            fail(f"{edit.name} fails a check, see above; --no-check trains it all the same")
        if args.equal == "flops":
            edit.flags = equal_flops(base, edit)
    bases = with_values(base, args.sweep)
    swept = [with_values(edit, args.sweep) for edit in edits]
    arms = sum(swept, bases)
    train_arms(arms, folder, args)
    lines = [f"# {name}", "", *report(best(bases), list(map(best, swept)), folder)]
    if args.sweep:
        lines += ["## All values", "", *loss_table(arms, [])]
    lines += [*hints(bases[0], swept[0][0], diff), WHAT_IT_TAKES, "", f"`{args.command}`", ""]
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
