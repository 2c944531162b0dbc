"""The comparisons as data and as a program, the ledger, and the depth laws' formulas."""

import argparse
import math
import subprocess

import numpy as np
import pandas as pd
import pytest
from helpers import ENV, ROOT, command

from looped.depth import sample_depths
from looped.run import read_log
from model import ModelConfig, parameter_count
from studies import depth_laws, experiments, ledger
from studies.comparisons import EXPERIMENTS, SOURCES, arms_of
from tools.arms import Arm, Run, loss_table

SIZES = [
    "--vocab-size=300", "--seq-len=32", "--d-model=32", "--d-mlp=64", "--batch-size=12", "--dtype=float32",
    "--eval-tokens=1000", "--tokens=1920", "--eval-every=5", "--adam-lr=3.2e-2", "--muon-lr=1.4e-2",
]  # fmt: skip


def arguments(name, scale="nano"):
    given = {"name": name, "scale": scale, "extra": [], "seeds": [0]}
    return argparse.Namespace(**given, data=None, code="", rows="")


def trainings_of(name, scale="nano"):
    return experiments.trainings_of(arguments(name, scale), arms_of(name, scale))


def settings_of(line):
    given, cfg, _ = experiments.settled(line.split())
    return vars(given) | vars(cfg)


# -- the comparisons as data


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_arms_are_valid_commands(name):
    for scale in {"nano", EXPERIMENTS[name].scales[-1]}:
        arms = arms_of(name, scale)
        assert len({arm.name for arm in arms}) == len(arms)
        for arm in (arms[0], arms[-1]):
            assert experiments.training_of(arm, 0, arguments(name, scale)).flops > 0


@pytest.mark.parametrize("name, allowed", [
    ("granularity", {"granularity"}),
    ("sampling", {"sampling"}),
    ("components", {"injection", "input_matrix", "granularity", "prelude_norm"}),
])  # fmt: skip
def test_arms_differ_from_their_base_in_what_they_compare_alone(name, allowed):
    first = {}
    for arm in arms_of(name, "nano"):
        flags = " ".join(experiments.arm_flags(arm, arguments(name)))
        settings = dict(ledger.identity(settings_of(flags)))
        base = first.setdefault(arm.group, settings)
        assert {key for key in settings if settings[key] != base[key]} <= allowed, arm.name


def test_every_number_of_the_sources_has_its_arm():
    known = pd.read_csv(SOURCES, dtype=str).query("experiment != 'zero_shot'")
    for (name, scale), numbers in known.groupby(["experiment", "scale"]):
        shown = {(arm.label, of) for arm in arms_of(name, scale) for of in arm.source}
        wanted = {(number.arm, number.of) for number in numbers.itertuples()}
        assert wanted <= {(label, str(of)) for label, of in shown}, name


def test_lengths_are_the_same_tokens_or_the_looped_models_flops():
    args = arguments("baseline")
    arms = arms_of("baseline", "nano")[:4]
    runs = [experiments.settled(experiments.arm_flags(arm, args)) for arm in arms]
    flat, looped, equal, once = runs
    assert flat[2] == looped[2] == once[2]
    assert looped[0].tokens == pytest.approx(20 * parameter_count(looped[1]), rel=0.01)
    flops = looped[0].tokens * looped[1].flops_per_token()
    assert equal[0].flops == pytest.approx(flops, rel=1e-5) and flat[1] == equal[1]


def test_groups_are_named_by_the_length_that_is_trained():
    args = arguments("baseline")
    args.only = "20 tokens"
    args.extra = ["--tokens", "689408"]  # twice 344,704
    assert {arm.group for arm in experiments.chosen(args)} == {"2 tokens/parameter"}


# -- the ledger


def test_equal_runs_have_one_identity():
    flags = "--preset nano --tokens 1e6 --no-token-shift"
    usual = settings_of(flags)
    same = ledger.identity(usual)
    lacking = {name: value for name, value in usual.items() if name != "token_shift"}
    assert ledger.identity(lacking) == same
    for other in ("--token-shift", "--eval-tokens 5e4", "--gain zoh"):
        assert ledger.identity(settings_of(f"{flags} {other}")) != same
    flat = settings_of("--preset transformer-nano --tokens 1e6")
    assert ledger.identity(flat | {"prelude_norm": True}) == ledger.identity(flat)


def test_the_tracked_ledger_has_the_runs_of_its_pages():
    known = ledger.read_ledger()
    for name, left in (("isoflop", 0), ("testtime", 0), ("rdm", 2)):
        assert len(experiments.look_up(trainings_of(name), known, "ca5d")) == left, name


def test_a_line_holds_the_run_with_its_curve_in_twenty_means(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "LEDGER", tmp_path)
    records = [{"step": i, "tokens": 10 * i, "loss": 9 - i / 10, "ms": 2} for i in range(1, 41)]
    points = ledger.thinned(records)
    assert [point["tokens"] for point in points[:2]] == [20, 40] and len(points) == 20
    assert points[0]["loss"] == pytest.approx(8.85) and sum(p["ms"] for p in points) == 80
    kept = made_run(4.0)
    kept.train = points
    ledger.append(kept)
    (read,) = ledger.read_ledger()
    assert read.train[3]["loss"] == points[3]["loss"] and math.isnan(read.train[3]["residual"])
    assert (read.config, read.evals, read.loss) == (kept.config, kept.evals, 4.0)


def made_run(loss, seed=0, diverged_at=None, ratio=20, data="d", **network):
    model = {"mu_rec": 8, "mu_bwd": 4, "gain": "zoh"} | network
    config = {"args": {"seed": seed}, "model": model, "data": {"sha256": data}, "params": 10}
    config |= {"dtype": "float32", "steps": 9}
    train = [{"tokens": 10 * ratio}]
    evals = [{"tokens": 10 * ratio, "loss": {8: loss}, "final": True}]
    return Run(f"run {seed}", config, train, evals, diverged_at=diverged_at)


def test_held_out_runs_are_a_rule():
    fitted = [made_run(4, ratio=11)]
    wanted = [made_run(4, ratio=80.5, seed=7), made_run(4, qk_norm=True)]  # as usual
    others = [made_run(4, data="other"), made_run(4, gain="euler"), made_run(4, diverged_at=5)]
    others += [made_run(4, ratio=30), made_run(4, mu_bwd=8), made_run(4, seed=8)]
    assert experiments.held_out(fitted, [*fitted, *wanted, *others]) == wanted


# -- the page


def test_differences_are_paired_by_seed_within_their_group():
    x = [4.0, 4.1, 4.2, 4.3, 4.4]
    y = [3.99, 4.07, 4.19, 4.26, 4.40]
    euler = Arm("euler", "g", [made_run(loss, seed) for seed, loss in enumerate(x)])
    zoh = Arm("zoh", "g", [made_run(loss, seed) for seed, loss in enumerate(y)])
    euler.runs.append(made_run(4.0, 9))
    zoh.runs.append(made_run(9.0, 9, diverged_at=3))  # its seed is left out
    values = np.subtract(y, x)
    half = 2.7764451 * values.std(ddof=1) / math.sqrt(5)
    *_, diverged, difference, _ = loss_table([Arm("none", "other"), euler, zoh], [])
    assert diverged.startswith("| g, zoh | 5 | diverges at step 3; 4.1820 ± ")
    signed = f"{values.mean():+.4f} ± {half:.4f}"
    assert difference == f"| g, zoh: difference from euler | 5 | {signed} |"


def test_a_model_of_one_depth_has_one_loss_at_every_depth():
    once = made_run(9.0, mu_rec=1, sampling="fixed")
    once.evals[0]["loss"] = {1: 3.0, 2: 9.0}  # at two loops it is not used
    assert Arm("once", runs=[once]).losses([1, 2]).loc[0].tolist() == [3.0, 3.0, 3.0]


# -- the program


def test_a_study_stands_for_the_code_it_is_run_with(packed, tmp_path):
    """Committed code has the ledger's runs. Edited code is trained, once, for a page of its own."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)

    def study(*flags):
        line = command("-m studies.experiments", "components", "--jobs", "2", *flags)
        done = subprocess.run(line, cwd=clone, env=ENV, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    known = ["--data", "62895bb6fe", "--dry-run"]
    assert study(*known).startswith("# 0 of 20 trainings")
    model = clone / "model.py"
    model.write_text(model.read_text().replace("    return dt\n", "    return 0.5 * dt\n"))
    said = study(*known)
    assert "differs from the last commit's" in said and "# 20 of 20 trainings" in said

    made = ["--data", str(packed), "--seeds", "0", "--only", "+ prelude norm", "--", *SIZES]
    assert "# 1 of 1 trainings" in study(*made)
    assert "# 0 of 1 trainings" in study(*made)
    (folder,) = (clone / "runs/ablate/trainings").iterdir()
    run = ledger.record(folder)
    assert run.last["loss"] == read_log(folder).evals[-1]["loss"]
    text = (clone / "runs/studies/components-nano.md").read_text()
    assert f"prelude norm, + prelude norm | 1 | {run.loss:.4f} |" in text
    status = subprocess.run(["git", "status", "--short"], cwd=clone, capture_output=True, text=True)
    assert status.stdout == " M model.py\n"


def test_rows_and_dtypes_are_not_mixed():
    training, other = trainings_of("rdm")[:2]
    other.settings = training.settings | {"dtype": "bfloat16"}
    config = {"args": training.settings, "model": {}, "steps": training.steps, "dtype": "float32"}
    runs = []
    for data in ("aaaa", "bbbb"):
        at = config | {"data": {"sha256": data}}
        runs.append(Run(data, at, [], [], diverged_at=1))
    assert experiments.look_up([training, other], runs, "bb") == [other]
    assert training.run is runs[1]


# -- the depth laws


def test_sampled_depths_follow_the_formulas():
    for law, formula in depth_laws.formulas(np.arange(40), 8, 4).items():
        cfg = ModelConfig(mu_rec=8, mu_bwd=4, sampling=law)
        n, k = sample_depths(cfg, 0, 0, 100_000)
        share = np.bincount(n + k, minlength=40)[:40] / 100_000
        assert formula.sum() == pytest.approx(1, abs=1e-3)
        assert np.abs(share - formula).max() < 5 * math.sqrt(0.25 / 100_000)
