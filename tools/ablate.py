"""From an edit to an answer: is it better, and is that more than chance?

    python -m tools.ablate                            # the working tree against the last commit
    python -m tools.ablate --base main --seeds 8      # against a branch, at seeds 0 to 7
    python -m tools.ablate --patch studies/edits/half_gain.patch
    python -m tools.ablate --flags "--gain zoh"       # the same code, with flags and without
    python -m tools.ablate -- --tokens 3e6 --mu-rec 4 # after --: flags of every training
    python -m tools.ablate --history                  # all answers so far, as a table

Base and edit are copied, checked (tools.check), and trained at the same seeds on the same rows, side by
side. The answer pairs them by seed. It is written to runs/ablate/NAME-HASH/report.md, for programs also to
verdict.json beside it and to runs/ablate/history.jsonl. Trainings are kept under runs/ablate/trainings:
the base's are not repeated for the next edit, and an interrupted one continues.

Exit code: 0 where there is an answer, whatever it says; 2 otherwise.
"""

import ast
import hashlib
import itertools
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd

from looped.common import Parser, fail, finite, ints, positive_int, write_atomic
from looped.machine import ROOT, code_files, syntax_tree
from looped.run import read_log
from tools.arms import Arm, Run, change_nothing, compare, compared_in, unlike_in_words
from tools.figures import fmt, plus_minus, table
from tools.pages import cost_of, loss_table, write_page
from tools.runner import Training, default_side_by_side, say, train_arms

RUNS = Path("runs/ablate")
HISTORY = RUNS / "history.jsonl"
COPIED = (":(glob)*.py", ":(glob)looped/**/*.py", ":(glob)tools/**/*.py")  # to train and to check
PACKING = ("dataloader.py", "tokenizer_train.py", "looped/corpus.py", "looped/tokenizer.py")
FIRST_STEPS = 20
RATES_HINT = (
    "The edit has new parameters or changes how they are trained, so the best rates may be others: "
    'try --sweep "--adam-lr 3e-2,6.4e-2,1.3e-1".'
)
APART = "Some of these trainings are older than this command: their tokens/s do not compare."


# -------------------------------------------------------------------------------------------------
# Flags


def seed_list(text: str) -> list[int]:
    """4, or 0,1,2,3"""
    if "," in text:
        return ints(text)
    return list(range(positive_int(text)))


def parse_args(argv):
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(description=__doc__, prog="python -m tools.ablate")
    add = parser.add_argument
    add("--base", help="commit to compare with (default: the last one)")
    add("--patch", type=Path, action="append", default=[],
        help="compare the base with this patch applied to it; several are applied in order")  # fmt: skip
    add("--flags", action="append", default=[],
        help="compare the code, with its patches, with these flags and without; each is an arm")  # fmt: skip
    add("--seeds", type=seed_list, default="4", help="how many, or a list (default: 0,1,2,3)")
    add("--jobs", type=positive_int, default=default_side_by_side(),
        help="trainings side by side (default: one a GPU, or else a core)")  # fmt: skip
    add("--name", help="what pages call the edit (default: the first function changed)")
    add("--equal", choices=("tokens", "flops"), default="tokens",
        help="budget of the edit, matched to the base (default: %(default)s)")  # fmt: skip
    add("--sweep", help='a flag and its values, e.g. "--adam-lr 3e-2,6.4e-2": base and edit are '
        "trained with each, and compared each at its best")  # fmt: skip
    add("--no-check", action="store_true", help="do not run tools.check on the edit")
    add(
        "--expect",
        action="append",
        default=[],
        help="a check of tools.check that the edit fails on purpose",
    )
    add("--history", nargs="?", const=HISTORY, type=Path, metavar="FILE",
        help="print the verdicts of a file as a table, and stop (default: %(const)s)")  # fmt: skip
    args = parser.parse_args(argv[:cut])
    args.extra = argv[cut + 1 :]
    args.command = shlex.join(["python", "-m", "tools.ablate", *argv])
    return args


# -------------------------------------------------------------------------------------------------
# Copies of the code


def git(*command, cwd=None) -> str:
    done = subprocess.run(["git", *command], capture_output=True, cwd=cwd or ROOT, text=True)
    if done.returncode:
        fail(f"git {command[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def copy_commit(ref: str, copy: Path) -> Path:
    archive = copy.with_suffix(".tar")
    git("archive", "-o", archive, ref, "--", *COPIED)
    shutil.unpack_archive(archive, copy, filter="data")
    return copy


def copy_tree(copy: Path) -> Path:
    """The working tree, files that are not yet added included."""
    for name in git("ls-files", "-co", "--exclude-standard", "--", *COPIED).splitlines():
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


def copy_patched(ref: str, patches: list[Path], copy: Path) -> Path:
    copy_commit(ref, copy)
    for patch in patches:
        git("apply", patch.resolve(), cwd=copy)
    return copy


def difference_of(base: Path, edit: Path) -> str:
    """A patch. base and edit: copies beside each other."""
    line = ["git", "diff", "--no-index", "--no-prefix", base.name, edit.name]
    return subprocess.run(line, cwd=base.parent, capture_output=True, text=True).stdout


def packing_code(code: Path) -> list[str]:
    """Of what makes tokenizers and packed rows; PackedData reads them in training."""
    trees = []
    for name in PACKING:
        tree = syntax_tree(code / name)
        trees += [ast.dump(node) for node in tree.body if getattr(node, "name", "") != "PackedData"]
    return trees


def functions(code: Path) -> dict[str, str]:
    """{syntax tree: name} of the functions that can decide a training's numbers."""
    names = {}
    for file in code_files(code):
        for node in ast.walk(syntax_tree(file)):
            if isinstance(node, ast.FunctionDef):
                names[ast.dump(node)] = node.name
    return names


def first_change(base: Path, edit: Path) -> str:
    """What an edit is called: the first function that is new or changed, if there is one."""
    before = functions(base)
    for tree, name in functions(edit).items():
        if tree not in before:
            return name
    return "edit"


# -------------------------------------------------------------------------------------------------
# What is compared


def arms_of(args, copies: Path) -> list[Arm]:
    """The base, and what is compared with it."""
    ref = args.base or "HEAD"
    commit = git("rev-parse", "--short=10", ref)
    branch = args.base or git("rev-parse", "--abbrev-ref", "HEAD")
    clean = f"{branch} {commit}"
    with_patches = "".join(f" with {patch.name}" for patch in args.patch)
    tree_is_base = not args.base and not args.patch
    edits = f"{clean} with edits" if git("status", "--porcelain") else clean
    if args.flags:
        code = copies / "base"
        code = copy_tree(code) if tree_is_base else copy_patched(ref, args.patch, code)
        origin = edits if tree_is_base else clean + with_patches
        arms = [Arm(branch + with_patches, args.extra, code=code, origin=origin)]
        for flags in args.flags:
            arms.append(Arm(flags, [*args.extra, *flags.split()], code=code, origin=origin))
        return arms
    base = copy_commit(ref, copies / "base")
    edit = copies / "edit"
    edit = copy_patched(ref, args.patch, edit) if args.patch else copy_tree(edit)
    if packing_code(base) != packing_code(edit):
        fail(
            "the edit changes how rows are packed, and both are trained on the same packed rows: pack "
            "some with the edited dataloader.py, then compare with --flags '--data FOLDER'"
        )
    patches = " and ".join(patch.stem for patch in args.patch)
    name = args.name or patches or first_change(base, edit)
    origin = clean + with_patches if args.patch else edits
    arms = [Arm(branch, args.extra, code=base, origin=clean)]
    return [*arms, Arm(name, args.extra, code=edit, origin=origin)]


def refuse(base: Arm, edits: list[Arm]) -> None:
    """Ends the program where two arms are one, or do not compare."""
    by_key = {base.key: base}
    for edit in edits:
        other = by_key.setdefault(edit.key, edit)
        if other is not edit:
            fail(
                f"nothing that decides numbers differs between {edit.label} and {other.label}: code, "
                "settings and rows are the same; edit model.py, or try --flags"
            )
        if not compared_in(edit, base):
            fail(f"{edit.label} does not compare with {base.label}: {unlike_in_words(edit, base)}")


def with_flops(arm: Arm, flops: float) -> Arm:
    """The arm trained for so many FLOPs; its tokens follow."""
    flags = [*arm.flags]
    if "--tokens" in flags:
        at = flags.index("--tokens")
        del flags[at : at + 2]
    return variant(arm, arm.label, [*flags, "--flops", f"{flops:.6g}"])


def with_values(arm: Arm, sweep: str | None) -> list[Arm]:
    """The arm, with each value of a swept flag."""
    if not sweep:
        return [arm]
    flag, values = sweep.split()
    return [
        variant(arm, f"{arm.label} {flag} {value}", [*arm.flags, flag, value])
        for value in values.split(",")
    ]


def variant(arm: Arm, label: str, flags: list[str]) -> Arm:
    return Arm(label, flags, code=arm.code, origin=arm.origin)


def best(arms: list[Arm]) -> Arm:
    """Where a seed diverges, the mean is infinite."""
    return min(arms, key=lambda arm: math.inf if arm.diverged() else arm.losses().mean())


def check(edit: Arm, base: Arm, expected: list[str]) -> None:
    """Ends the program if the edit fails tools.check."""
    line = [sys.executable, "-m", "tools.check", *edit.flags]
    if edit.code != base.code:
        line += ["--against", base.code]
    for name in expected:
        line += ["--expect", name]
    if subprocess.run(line, cwd=edit.code).returncode:
        fail(f"{edit.label} fails a check, see above; --no-check trains it all the same")


# -------------------------------------------------------------------------------------------------
# Training


def train(arms: list[Arm], edits: list[Arm], args) -> bool:
    """Fills in the arms' runs, with the numbers of each pair that has ended; a word on them comes once, at
    the end. Stops where the first pairs show that no edit changes anything. -> Whether all were trained by
    this command, so that their speeds compare.
    """
    base = arms[0]
    quiet = set()  # edits that were said to be equal so far
    trainings = [Training(arm, seed) for seed, arm in itertools.product(args.seeds, arms)]
    for training in train_arms(trainings, args.jobs):
        if training is None:
            quiet |= say_equal(base, [x for x in edits if x.label not in quiet], args.seeds[0])
            continue
        for note in training.arm.runs[-1].notes:
            say(f"{training.name}: {note}")
        for edit in edits:
            if training.arm in (base, edit):
                say_pair(base, edit, training.seed)
        if all(change_nothing(edit, base) for edit in edits):
            break
    return all(training.began for training in trainings)


def say_equal(base: Arm, edits: list[Arm], seed: int) -> set[str]:
    """Notices the edits that have trained exactly as the base so far -> their labels."""
    equal = {edit.label for edit in edits if equal_so_far(base, edit, seed)}
    for label in equal:
        say(f"{label} is equal to {base.label} so far; an edit of the schedule may begin later")
    return equal


def equal_so_far(base: Arm, edit: Arm, seed: int) -> bool:
    """Whether the first steps' losses at a seed are the same, as far as they are trained."""
    losses = []
    for arm in (base, edit):
        log = Training(arm, seed).folder / "log.jsonl"
        records = read_log(log).train[:FIRST_STEPS] if log.exists() else []
        losses.append([record["loss"] for record in records])
    return len(losses[0]) == FIRST_STEPS and losses[0] == losses[1]


def say_pair(base: Arm, edit: Arm, seed: int) -> None:
    """Their losses at a seed, if both have ended there."""
    before = [run.loss for run in base.runs if run.seed == seed]
    after = [run.loss for run in edit.runs if run.seed == seed]
    for a, b in zip(before, after):
        losses = f"{base.label} {a:.4f}, {edit.label} {b:.4f}"
        say(f"seed {seed}: {losses}, difference {b - a:+.4f}")


# -------------------------------------------------------------------------------------------------
# The answer


def verdict_of(edit: Arm, base: Arm, diff: str, args) -> dict:
    """A line of history.jsonl: all that the answer was computed from."""
    verdict = compare(edit, base)
    pair = {"base": base, "edit": edit}
    keys = {role: arm.key for role, arm in pair.items()}
    seen = set()
    for other in read_verdicts(HISTORY):
        if other["keys"] == keys:
            seen.update(other["seeds"])
    record = {"date": time.strftime("%Y-%m-%d %H:%M"), "edit": edit.label, "base": base.label}
    record |= {"verdict": verdict.kind, "sentence": verdict.sentence, "unit": verdict.unit}
    record |= {"mean": verdict.mean, "half_width": verdict.half_width}
    record["seeds"] = [*map(int, verdict.gaps.index)]
    record["seen_before"] = sorted(seen)
    record["depths"] = {role: arm.depth for role, arm in pair.items()}
    record["losses"] = {role: losses_of(arm, verdict.unit) for role, arm in pair.items()}
    record |= costs_of(pair)
    record["keys"] = keys
    record["code"] = {role: arm.origin for role, arm in pair.items()}
    record["diff"] = hashlib.sha256(diff.encode()).hexdigest()
    record["command"] = args.command
    return record


def losses_of(arm: Arm, unit: str) -> dict:
    """{seed: {depth: loss}} of the runs that count."""
    return {run.seed: run.last[unit] for run in arm.runs if run.counts()}


def costs_of(pair: dict[str, Arm]) -> dict:
    """{column of the cost table: {role: median over seeds}}"""
    frames = {role: pd.DataFrame(map(cost_of, arm.runs)) for role, arm in pair.items()}
    medians = {role: frame.median().to_dict() for role, frame in frames.items()}
    return pd.DataFrame(medians).T.to_dict()


def read_verdicts(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def page_folder(arms: list[Arm], args) -> Path:
    """One for each set of arms and seeds, so that a page never replaces another's."""
    decides = json.dumps([[arm.key for arm in arms], args.seeds])
    name = args.name or arms[1].label
    short = re.sub(r"[^\w.]+", "-", name).strip("-")[:40]
    return RUNS / f"{short}-{hashlib.sha256(decides.encode()).hexdigest()[:6]}"


def looks(verdict: dict) -> list[str]:
    """That some of these seeds were looked at before, if they were."""
    seen = [seed for seed in verdict["seen_before"] if seed in verdict["seeds"]]
    if not seen:
        return []
    return [
        f"{verdict['edit']} was looked at before at {len(seen)} of these seeds: the interval holds for "
        "one look; to confirm a difference, take seeds not used before.",
        "",
    ]


def hints(base: Run, edit: Run, diff: str) -> list[str]:
    """Where the rates may be part of the edit."""
    more = base.config["params"] != edit.config["params"]
    trains_otherwise = re.search(r"^\+\+\+ edit/(muon|train)\.py", diff, re.M)
    return [RATES_HINT, ""] if more or trains_otherwise else []


def answer(args, copies: Path) -> None:
    """Trains what is asked for, and writes the page and the verdicts."""
    base, *edits = arms_of(args, copies)
    diff = difference_of(base.code, edits[0].code)
    if args.equal == "flops":
        edits = [with_flops(edit, base.config["flops"]) for edit in edits]
    refuse(base, edits)
    if not args.no_check:
        for edit in edits:
            check(edit, base, args.expect)
    bases = with_values(base, args.sweep)
    swept = [with_values(edit, args.sweep) for edit in edits]
    arms = sum(swept, bases)
    together = train(arms, [] if args.sweep else edits, args)
    sections = ["## All values", "", *loss_table(arms, [])] if args.sweep else []
    base = best(bases)
    edits = [best(values) for values in swept]
    sections += hints(base.runs[0], edits[0].runs[0], diff)
    verdicts = [verdict_of(edit, base, diff, args) for edit in edits]
    for verdict in verdicts:
        sections += looks(verdict)
        if not together:
            verdict["tokens/s"] = None
    if not together:
        sections += [APART, ""]
    if diff:
        sections += ["## The edit", "", "```diff", diff, "```", ""]
    folder = page_folder(arms, args)
    title = args.name or ", ".join(edit.label for edit in edits)
    write_page(folder / "report", title, [base, *edits], args.command, sections)
    lines = "".join(json.dumps(finite(verdict)) + "\n" for verdict in verdicts)
    write_atomic(folder / "verdict.json", lines)
    with open(HISTORY, "a") as history:
        history.write(lines)


# -------------------------------------------------------------------------------------------------
# The table of verdicts


def history_table(verdicts: list[dict]) -> list[str]:
    """A row a verdict, its differences computed again from the losses by seed; costs beside the base's."""
    header = ["edit", "verdict", "difference", "seeds", "at 1 loop", "parameters", "FLOPs"]
    header += ["tokens/s", "tokens a parameter", "base", "date"]
    rows = []
    for v in verdicts:
        row = [v["edit"], v["verdict"], plus_minus(gaps_of(v), "+.4f"), len(v["seeds"])]
        row.append(plus_minus(gaps_of(v, 1), "+.4f"))
        row.append(f"{v['parameters']['edit'] - v['parameters']['base']:+,.0f}")
        for cost in ("training FLOPs", "tokens/s"):
            row.append(change(v[cost]))
        row.append(fmt(v["tokens a parameter"]["edit"], ".3g"))
        rows.append([*row, v["code"]["base"], v["date"][:10]])
    return table(header, rows)


def change(cost: dict | None) -> str:
    """Of the edit's beside the base's, in percent."""
    return f"{100 * (cost['edit'] / cost['base'] - 1):+.1f} %" if cost else "–"


def gaps_of(verdict: dict, depth: int | None = None) -> list[float]:
    """Edit less base, by seed: at a depth that both were evaluated at, or each at its mu_rec."""
    at = {role: str(depth or mu_rec) for role, mu_rec in verdict["depths"].items()}
    losses = verdict["losses"]
    gaps = []
    for seed in map(str, verdict["seeds"]):
        edit = losses["edit"][seed].get(at["edit"])
        base = losses["base"][seed].get(at["base"])
        if edit is not None and base is not None:
            gaps.append(edit - base)
    return gaps


def main(argv=None):
    args = parse_args(sys.argv[1:] if argv is None else argv)
    if args.history:
        print("\n".join(history_table(read_verdicts(args.history))))
        return
    with tempfile.TemporaryDirectory() as copies:
        answer(args, Path(copies))


if __name__ == "__main__":
    main()
