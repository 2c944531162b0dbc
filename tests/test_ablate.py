"""tools.ablate and tools.runner: trainings of copies of the code, and the sentence that they end in."""

import json
import shutil
import subprocess

import numpy as np
import pytest
from helpers import ROOT, refused

from looped.machine import code_hash
from looped.run import newest_checkpoint
from tools import ablate, runner
from tools.arms import Arm, Run, answer, read_run

FLAGS = "--seq-len 32 --vocab-size 300 --d-model 16 --d-mlp 16 --eval-tokens 2e3 --tokens 1e4"


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
    for line in ("init -b main", "add .", "-c user.name=x -c user.email=x commit -m first"):
        subprocess.run(["git", *line.split()], cwd=root, check=True, capture_output=True)
    return root


@pytest.fixture
def run(checkout, packed, monkeypatch, capsys):
    """Runs the program in the checkout, with Euler's gain edited -> what it prints."""
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(ablate, "ROOT", checkout)
    model = (ROOT / "model.py").read_text()
    assert model.count("    return dt\n") == 1

    def call(gain, *options):
        (checkout / "model.py").write_text(model.replace("    return dt\n", f"    {gain}\n"))
        capsys.readouterr()
        flags = [*FLAGS.split(), "--data", str(packed)]
        ablate.main(["--no-check", "--seeds", "2", "--jobs", "2", *options, "--", *flags])
        return capsys.readouterr().out

    return call


def last_losses(root, code) -> list:
    """Losses at 8 loops of all trainings of this code, by seed."""
    found = {}
    for folder in (root / "runs/ablate/trainings").iterdir():
        config = json.loads((folder / "config.json").read_text())
        last = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
        if config["code"] == code:
            found[config["args"]["seed"]] = last["loss"]["8"]
    return [found[0], found[1]]


def test_a_comment_is_no_edit(run, capsys):
    refused(capsys, lambda: run("return dt  # the same"), "nothing that decides numbers differs")


def test_an_edit_is_answered_and_the_base_is_trained_once(run, checkout, capsys):
    said = run("return 0.5 * dt")
    page = (checkout / "runs/ablate/euler_gain/report.md").read_text()
    base = last_losses(checkout, code_hash(ROOT))
    gaps = np.subtract(last_losses(checkout, code_hash(checkout)), base)
    half = 12.7062 * np.std(gaps, ddof=1) / 2**0.5
    assert f"| main | 2 | {np.mean(base):.4f} ±" in page
    assert f"{np.mean(gaps):+.4f} ± {half:.4f}" in page
    assert f"difference {gaps[1]:+.4f}" in said
    assert "so far: euler_gain" in said
    assert "+    return 0.5 * dt" in page
    assert read_run(checkout / "runs/ablate/euler_gain/main-s0", "").loss == base[0]
    assert "0 of 4 trainings are left" in run("return 0.5 * dt  # a comment")
    with pytest.raises(SystemExit):
        run("raise RuntimeError('crash')", "--jobs", "1")
    said = capsys.readouterr().out
    assert "2 of 4 trainings are left" in said
    assert said.count("RuntimeError: crash") == 1


def test_a_patch_is_applied_to_a_copy(checkout, monkeypatch, tmp_path):
    monkeypatch.setattr(ablate, "ROOT", checkout)
    patch = tmp_path / "half.patch"
    base = ablate.copy_commit("HEAD", tmp_path / "base")
    edit = ablate.copy_commit("HEAD", tmp_path / "edit")
    (edit / "lion.py").write_text("RATE = 1\n")  # a script that is added counts
    assert code_hash(edit) != code_hash(base)
    patch.write_text(ablate.difference_of(base, edit))
    assert code_hash(ablate.copy_patched("HEAD", patch, tmp_path / "patched")) == code_hash(edit)


def test_an_interruption_saves(packed, tmp_path, monkeypatch):
    flags = [*FLAGS.split(), "--tokens", "7e5", "--data", str(packed)]
    job = runner.Job("long", flags, tmp_path / "run")
    progress = runner.progress

    def interrupt(running, waiting):
        said = progress(running, waiting)
        if "min left" in said:
            raise KeyboardInterrupt
        return said

    monkeypatch.setattr(runner, "STATUS_SECONDS", 0)
    monkeypatch.setattr(runner, "progress", interrupt)
    with pytest.raises(SystemExit):
        runner.run_all([job], 1, 1, None)
    assert newest_checkpoint(job.folder) and not runner.is_over(job.folder)


def arm(name, losses):
    """Ended with these losses at depth 8, or diverged."""
    runs = []
    for seed, loss in enumerate(losses):
        config = {"args": {"seed": seed}, "model": {"mu_rec": 8}}
        last = {"loss": {8: loss}, "final": True}
        runs.append(Run("", config, [], [last], diverged_at=None if loss < 7 else 5))
    return Arm(name, runs=runs)


def answer_to(losses):
    return answer(arm("half", losses), arm("main", [4.0, 4.1, 4.2, 4.3]))


def test_the_sentence_is_the_paired_t_test():
    # differences -0.02, -0.03, -0.02, -0.03: 3.182 · 0.005774 / 2
    assert answer_to([3.98, 4.07, 4.18, 4.27]) == (
        "half is better than main by 0.0250 ± 0.0092 nats/token at 8 loops, 4 seeds, 95 %."
    )
    # differences -0.02, 0.02, 0.01, -0.01: 3.1824 · 0.018257 / 2; 0.01 takes t · 0.018257 / √n
    assert answer_to([3.98, 4.12, 4.21, 4.29]) == (
        "half: no difference shown: +0.0000 ± 0.0291 nats/token at 8 loops, 4 seeds, 95 %; "
        "to see 0.01 about 16 seeds are needed."
    )
    assert answer_to([3.9, 7.5, float("nan"), 4.2]) == "half diverges on 2 of 4 seeds."
