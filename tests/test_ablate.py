"""tools.ablate: what is compared, what is trained, and what is said of it."""

import json
import os
import shutil
import subprocess

import numpy as np
import pytest
from helpers import ROOT, refused

from looped.machine import code_hash
from looped.run import newest_checkpoint
from tools import ablate, runner
from tools.arms import Arm, Run, compare, identity

FLAGS = "--seq-len 32 --vocab-size 300 --d-model 16 --d-mlp 16 --eval-tokens 2e3 --tokens 1e4 --dtype float32"
BRANCH = "euler_gain"  # called like the function that is edited


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A git checkout with a copy of this working tree."""
    root = tmp_path_factory.mktemp("ablate")
    for pattern in ("*.py", "looped/*.py", "tools/*.py"):
        for file in ROOT.glob(pattern):
            copy = root / file.relative_to(ROOT)
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(file, copy)
    (root / ".gitignore").write_text("runs/\n")
    for line in (f"init -b {BRANCH}", "add .", "-c user.name=x -c user.email=x commit -m first"):
        subprocess.run(["git", *line.split()], cwd=root, check=True, capture_output=True)
    return root


@pytest.fixture
def run(checkout, packed, monkeypatch, capsys):
    """Runs the program in the checkout, with Euler's gain edited -> what it prints."""
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(ablate, "ROOT", checkout)
    code_hash.cache_clear()
    model = (ROOT / "model.py").read_text()
    assert model.count("    return dt\n") == 1

    def call(gain, *options, flags=""):
        (checkout / "model.py").write_text(model.replace("    return dt\n", f"    {gain}\n"))
        capsys.readouterr()
        every = [*FLAGS.split(), "--data", str(packed), *flags.split()]
        ablate.main(["--no-check", "--seeds", "2", "--jobs", "2", *options, "--", *every])
        return capsys.readouterr().out

    return call


def last_losses(code) -> list:
    """Losses at 8 loops of all trainings of this code, by seed."""
    found = {}
    for folder in runner.TRAININGS.iterdir():
        config = json.loads((folder / "config.json").read_text())
        last = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
        if config["code"] == code:
            found[config["args"]["seed"]] = last["loss"]["8"]
    return [found[0], found[1]]


def verdicts() -> list[dict]:
    return ablate.read_verdicts(ablate.HISTORY)


def test_an_edit_is_answered_and_the_base_is_trained_once(run, checkout):
    said = run("return 0.5 * dt")
    code_hash.cache_clear()
    (page,) = ablate.RUNS.glob("euler_gain-*/report.md")
    text = page.read_text()
    base = last_losses(code_hash(ROOT))
    gaps = np.subtract(last_losses(code_hash(checkout)), base)
    half = 12.7062 * np.std(gaps, ddof=1) / 2**0.5
    assert f"| {BRANCH} | 2 | {np.mean(base):.4f} ±" in text
    assert f"{np.mean(gaps):+.4f} ± {half:.4f}" in text and "+    return 0.5 * dt" in text
    # looking early claims nothing
    before, _, after = said.partition(f"difference {gaps[1]:+.4f}")
    assert "better" not in before and "worse" not in before and "written: " in after
    (verdict,) = verdicts()
    assert json.loads((page.parent / "verdict.json").read_text()) == verdict
    assert verdict["losses"]["base"]["1"]["8"] == base[1] and verdict["seen_before"] == []
    assert ablate.gaps_of(verdict) == pytest.approx(gaps)
    assert verdict["half_width"] == pytest.approx(half, rel=1e-4)
    assert f"{np.mean(gaps):+.4f} ± {half:.4f}" in "".join(ablate.history_table([verdict]))
    # the base is not trained again, whatever things are called; the first page stays
    said = run("return 0.4 * dt", "--name", BRANCH, "--seeds", "1")
    assert "1 of 2 trainings are left" in said and page.read_text() == text
    assert "0 of 4 trainings are left" in run("return 0.5 * dt  # a comment")
    assert verdicts()[-1]["seen_before"] == [0, 1]
    with pytest.raises(SystemExit) as stopped:
        run("raise RuntimeError('crash')", "--jobs", "1")
    assert stopped.value.code == 2 and len(verdicts()) == 3


def test_no_effect_is_said_after_the_first_pair(run, monkeypatch):
    monkeypatch.setattr(runner, "STATUS_SECONDS", 0)
    said = run("return dt + 0.0", flags="--tokens 2e4")
    assert "is equal to euler_gain so far; an edit of the schedule may begin later" in said
    assert "changes nothing with these flags" in said
    assert verdicts()[-1]["verdict"] == "no effect" and verdicts()[-1]["seeds"] == [0]


def test_what_is_no_edit_is_refused(run, checkout, packed, capsys):
    refused(capsys, lambda: run("return dt  # the same"), "nothing that decides numbers differs")
    twice = ["--flags", "--gain zoh", "--flags", "--gain zoh"]
    refused(capsys, lambda: run("return dt", *twice), "nothing that decides numbers differs")
    packer = checkout / "dataloader.py"
    packer.write_text(packer.read_text() + "\nFACTOR = 2\n")
    refused(capsys, lambda: run("return 2 * dt"), "the edit changes how rows are packed")
    subprocess.run(["git", "checkout", "dataloader.py"], cwd=checkout, check=True)
    fewer = ["--flags", "--eval-tokens 1e3"]
    refused(capsys, lambda: run("return dt", *fewer), "another number of validation tokens")


def test_arms_that_differ_in_flops_train_as_many(run):
    run("return dt", "--flags", "--mu-rec 2", "--equal", "flops", "--seeds", "1")
    cost = verdicts()[-1]
    one_step = cost["training FLOPs"]["edit"] * 512 / cost["tokens trained"]["edit"]
    assert abs(cost["training FLOPs"]["edit"] - cost["training FLOPs"]["base"]) < 1.5 * one_step
    assert cost["tokens trained"]["edit"] > 1.5 * cost["tokens trained"]["base"]
    assert (
        cost["depths"] == {"base": 8, "edit": 2} and "(euler_gain at 8 loops)" in cost["sentence"]
    )


def test_patches_are_applied_in_order_and_with_flags(checkout, monkeypatch, tmp_path):
    monkeypatch.setattr(ablate, "ROOT", checkout)
    base = ablate.copy_commit("HEAD", tmp_path / "base")
    edit = ablate.copy_commit("HEAD", tmp_path / "edit")
    patches = []
    for i, name in enumerate("ab"):
        (edit / "lion.py").write_text(f"RATE = {i}\n")
        patches.append(tmp_path / f"{name}.patch")
        patches[-1].write_text(ablate.difference_of(base, edit))
        shutil.rmtree(base)
        shutil.copytree(edit, base)
    args = ablate.parse_args(["--patch", str(patches[0]), "--patch", str(patches[1])])
    shutil.rmtree(base)
    shutil.rmtree(edit)
    _, patched = ablate.arms_of(args, tmp_path)
    assert (patched.code / "lion.py").read_text() == "RATE = 1\n" and patched.label == "a and b"
    args.flags = ["--gain zoh"]
    shutil.rmtree(tmp_path / "base")
    bare, with_flags = ablate.arms_of(args, tmp_path)
    assert bare.code == with_flags.code and (bare.code / "lion.py").exists()
    assert "with a.patch with b.patch" in with_flags.origin


def test_an_arm_is_what_decides_its_numbers(checkout, packed, monkeypatch, tmp_path):
    monkeypatch.setattr(ablate, "ROOT", checkout)
    flags = [*FLAGS.split(), "--data", str(packed)]
    code = ablate.copy_commit("HEAD", tmp_path / "code")
    arm = Arm("a", flags)
    for same in (
        Arm("b", flags),
        Arm("a", [*flags, "--preset", "nano"]),
        Arm("a", [*flags, "--out", "x"]),
    ):
        assert same.key == arm.key
    (code / "looped/parts").mkdir()
    (code / "looped/parts/factor.py").write_text("FACTOR = 0.5\n")
    with open(code / "model.py", "a") as file:
        file.write("\nfrom looped.parts.factor import FACTOR\n")
    keys = {arm.key, Arm("a", flags, code=code).key}
    (code / "looped/parts/factor.py").write_text("FACTOR = 5.0\n")
    code_hash.cache_clear()
    keys.add(Arm("a", flags, code=code).key)
    for other in ("--dtype bfloat16", "--rows 100", "--eval-tokens 1e3", "--tokens 2e4"):
        keys.add(Arm("a", [*flags, *other.split()]).key)
    assert len(keys) == 7


def test_cores_and_cards_of_this_process_alone_are_used(monkeypatch):
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert runner.cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    monkeypatch.setenv("OMP_NUM_THREADS", str(len(allowed)))
    assert runner.default_side_by_side() == 1


def test_an_interruption_saves(packed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [*FLAGS.split(), "--tokens", "7e5", "--data", str(packed)]
    monkeypatch.setattr(runner, "STATUS_SECONDS", 0)
    arm = Arm("long", flags)
    training = runner.Training(arm, 0)
    for _ in runner.train_arms([training], 1):
        if newest_step(training.folder) > 2:
            break
    assert newest_checkpoint(training.folder) and not training.is_over()
    assert runner.claim(training) and identity(arm.config) == identity(config_in(training.folder))


def newest_step(folder) -> int:
    log = folder / "log.jsonl"
    return log.read_text().count('"train"') if log.exists() else 0


def config_in(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


# -- the sentence


def arm(name, losses, unit=1.0, **yardstick):
    """Ended with these losses at depth 8, or diverged."""
    runs = []
    for seed, loss in enumerate(losses):
        config = {"args": {"seed": seed}, "model": {"mu_rec": 8}}
        measured = {
            "text": "t",
            "rows": "r",
            "tokenizer": "k",
            "seq_len": 8,
            "tokens": 9,
        } | yardstick
        last = {"loss": {8: loss}, "bpb": {8: unit * loss}, "final": True, "yardstick": measured}
        record = {"loss": loss, "step": 1}
        runs.append(Run("", config, [record], [last], diverged_at=None if loss < 7 else 5))
    return Arm(name, runs=runs)


MAIN = [4.0, 4.1, 4.2, 4.3]


def test_the_sentence_is_the_paired_t_test():
    # differences -0.02, -0.03, -0.02, -0.03: 3.182 · 0.005774 / 2
    better = compare(arm("half", [3.98, 4.07, 4.18, 4.27]), arm("main", MAIN))
    assert better.sentence == (
        "half is better than main: -0.0250 ± 0.0092 nats/token at 8 loops (4 seeds, 95 %)."
    )
    # differences -0.02, 0.02, 0.01, -0.01: 3.1824 · 0.018257 / 2; 0.01 takes t · 0.018257 / √n
    same = compare(arm("half", [3.98, 4.12, 4.21, 4.29]), arm("main", MAIN))
    assert same.kind == "not shown" and same.sentence.endswith(
        "+0.0000 ± 0.0291 nats/token at 8 loops (4 seeds, 95 %); at this scatter 16 seeds see 0.01."
    )
    lost = compare(arm("half", [3.9, 7.5, float("nan"), 4.2]), arm("main", MAIN))
    assert (lost.kind, lost.sentence) == ("diverged", "half diverges on 2 of 4 seeds.")


def test_losses_of_two_yardsticks_do_not_meet():
    other = compare(arm("half", MAIN, rows="q"), arm("main", MAIN))
    assert other.kind == "not comparable" and "another validation rows" in other.sentence
    # worse in nats a token, better in bits a byte
    words = compare(
        arm("half", [5.0, 5.2], 0.5, tokenizer="m", rows="q", tokens=7), arm("main", MAIN[:2])
    )
    assert words.unit == "bpb" and words.mean == pytest.approx((2.5 + 2.6 - 8.1) / 2)
    assert "bits/byte" in words.sentence and "since tokenizers differ" in words.sentence
