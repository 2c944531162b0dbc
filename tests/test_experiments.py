"""The comparisons as data and as a program, the ledger, and the depth laws' formulas."""

import argparse
import itertools
import math
import subprocess
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from helpers import ENV, ROOT, command

from looped.depth import sample_depths
from looped.run import read_log
from model import ModelConfig, parameter_count
from studies import depth_laws, experiments, ledger, pages
from studies.comparisons import EXPERIMENTS, SOURCES, Arm, tables_of

SIZES = [
    "--vocab-size=300", "--seq-len=32", "--d-model=32", "--d-mlp=64", "--batch-size=12", "--dtype=float32",
    "--eval-tokens=1000", "--tokens=1920", "--eval-every=5", "--adam-lr=3.2e-2", "--muon-lr=1.4e-2",
]  # fmt: skip


def arguments(name, scale="nano"):
    given = {"name": name, "scale": scale, "extra": [], "seeds": [0]}
    return argparse.Namespace(**given, data=None, code="", rows="")


def trainings_of(name, scale="nano"):
    arms = itertools.chain(*tables_of(name, scale))
    return experiments.trainings_of(arguments(name, scale), list(arms))


def settings_of(line):
    given, cfg, steps = experiments.settled(line.split())
    return ledger.settings_of(vars(given), vars(cfg), steps)


# -- the comparisons as data


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_arms_are_valid_commands(name):
    for scale in {"nano", EXPERIMENTS[name].scales[-1]}:
        for arms in tables_of(name, scale):
            assert len({arm.name() for arm in arms}) == len(arms)
            for arm in (arms[0], arms[-1]):
                assert experiments.training_of(arm, 0, arguments(name, scale)).flops > 0


@pytest.mark.parametrize("name, allowed", [
    ("granularity", {"granularity"}),
    ("sampling", {"sampling"}),
    ("components", {"injection", "input_matrix", "granularity", "prelude_norm"}),
])  # fmt: skip
def test_arms_differ_from_their_base_in_what_they_compare_alone(name, allowed):
    first = {}
    for table, arms in enumerate(tables_of(name, "nano")):
        for arm in arms:
            settings = settings_of(" ".join(experiments.arm_flags(arm, arguments(name))))
            base = first.setdefault((table, arm.col), settings)
            assert {key for key in settings if settings[key] != base[key]} <= allowed, arm.name()


def test_every_number_of_the_sources_has_its_arm():
    known = pd.read_csv(SOURCES, dtype=str).query("experiment != 'zero_shot'")
    for (name, scale), numbers in known.groupby(["experiment", "scale"]):
        shown = [arm.source for arm in itertools.chain(*tables_of(name, scale))]
        drawn_from_the_text = 15 if name == "stability" else 0
        assert sum(map(len, shown)) - drawn_from_the_text == len(numbers), name


def test_lengths_are_the_same_tokens_or_the_looped_models_flops():
    args = arguments("baseline")
    (arms,) = tables_of("baseline", "nano")
    runs = [experiments.settled(experiments.arm_flags(arm, args)) for arm in arms[:4]]
    flat, looped, equal, once = runs
    assert flat[2] == looped[2] == once[2]
    assert looped[0].tokens == pytest.approx(20 * parameter_count(looped[1]), rel=0.01)
    flops = looped[0].tokens * looped[1].flops_per_token()
    assert equal[0].flops == pytest.approx(flops, rel=1e-5) and flat[1] == equal[1]


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
    lines = ledger.read_ledger()
    for name, left in (("isoflop", 0), ("testtime", 0), ("rdm", 2)):
        assert len(experiments.look_up(trainings_of(name), lines, "ca5d")) == left, name


def steps(losses):
    return ledger.steps_of([{"step": i, "loss": x} for i, x in enumerate(losses, 1)])


def test_divergence_rule():
    divergence = ledger.divergence
    falling = [8 - 4 * i / 200 for i in range(200)]
    assert divergence(steps(falling), False) is None
    spike = [*falling[:150], 12.0, *falling[151:]]  # one that it recovers from
    assert divergence(steps(spike), False) is None
    up = falling[:100] + [9.0] * 100
    assert 101 <= divergence(steps(up), False) <= 101 + 200 // 20
    for end, diverged in ((4.4, False), (4.8, True)):  # half a nat above the lowest
        found = divergence(steps([*falling, *[end] * 200]), False)
        assert (found is not None) == diverged
    assert divergence(steps(falling[:60] + [math.nan] * 3), True) == 61
    growing = steps(falling)
    growing.state_norm = 1.2**growing.step  # 1.2^50 is 9,100, 1.2^51 10,920
    assert divergence(growing[:50], False) is None and divergence(growing, False) == 52


def test_the_curve_is_of_twenty_means():
    records = [{"step": i, "tokens": 10 * i, "loss": 9 - i / 10} for i in range(1, 41)]
    found = ledger.training_curve(ledger.steps_of(records))
    assert found["tokens"][:2] == [20, 40] and len(found["tokens"]) == 20
    assert found["loss"][0] == pytest.approx(8.85) and "residual" not in found


def test_scores_say_how_many_tasks_they_are_of():
    average = {"name": "x", "mean": 0.1, "std": 0.0, "tasks_done": 44, "tasks_total": 46}
    record = {"panel": "core-extended", "protocol": "parcae", "baselines": "v1", "max_per_task": 9}
    run = SimpleNamespace(core={"file": record | {"depths": {"8": {"aggregate": average}}}})
    text = pages.score_table([Arm("looped", runs=[{"core": ledger.scores(run)}]), Arm("not run")])
    assert "| looped | core-extended | parcae | v1 | 9 | 8 | x |" in text[4]
    assert text[4].endswith("| 44 of the 46 | 0.1000 |")


def test_held_out_runs_are_a_rule():
    def line(data="d", ratio=20.0, seed=0, diverged_at=None, **settings):
        settings = {"mu_rec": 8, "mu_bwd": 4, "seed": seed, "gain": "zoh"} | settings
        told = {"data": data, "tokens_per_param": ratio, "seed": seed, "diverged_at": diverged_at}
        return told | {"settings": settings}

    fitted = [line(ratio=11)]
    wanted = [line(ratio=80.5, seed=7), line(mu_rec=4, mu_bwd=2), line(qk_norm=True)]  # as usual
    others = [line("other"), line(gain="euler"), line(diverged_at=5), line(ratio=30)]
    others += [line(mu_bwd=8), line(mu_rec=2, mu_bwd=2), line(seed=8)]
    assert experiments.held_out(fitted, [*fitted, *wanted, *others]) == wanted


# -- the page


def made_line(loss, **more):
    usual = {"loss": loss, "seed": 0, "mu_rec": 8, "diverged_at": None, "unigram": None}
    return usual | more


def test_differences_are_paired_by_seed():
    x = [4.0, 4.1, 4.2, 4.3, 4.4]
    y = [3.99, 4.07, 4.19, 4.26, 4.40]
    a = Arm("r", "euler")
    b = Arm("r", "zoh")
    for arm, losses in ((a, x), (b, y)):
        arm.runs = [made_line({1: 7, 8: loss}, seed=seed) for seed, loss in enumerate(losses)]
    a.runs.append(made_line({8: 4.0}, seed=9))
    b.runs.append(made_line({8: 9.0}, seed=9, diverged_at=3))  # its seed is left out
    values = np.subtract(y, x)
    half = 2.7764451 * values.std(ddof=1) / math.sqrt(5)
    experiment = EXPERIMENTS["gains"]
    found = pages.differences([Arm("r", "none"), a, b], experiment)
    signed = f"{values.mean():+.4f} ± {half:.4f}"
    row = f"| r, zoh | r, euler | 5 | {signed} | +0.0000 ± 0.0000 | {signed} |"
    assert pages.difference_table(found)[4] == row
    plot = pages.plot_of("difference by depth", [a, b], "", experiment)
    assert plot.curves[1][1][1] == pytest.approx(values.mean())
    assert plot.half_widths[1][1] == pytest.approx(half)
    arms = [Arm(name, runs=runs) for name, runs in zip("1234", (a.runs, [], b.runs, a.runs))]
    pairs = pages.differences(arms, EXPERIMENTS["components"])  # each with the step before
    assert [(d.base.row, d.arm.row) for d in pairs] == [("1", "3"), ("3", "4")]


def test_cells_by_hand():
    def cell(*lines):
        return pages.cell(Arm(runs=list(lines)))

    spread = cell(made_line({8: 5.0}), made_line({8: 5.2}, seed=1))
    assert spread == "5.1000 ± 1.2706 (0.1414; n = 2)"
    lost = [made_line({}, seed=seed, diverged_at=3 + seed) for seed in (0, 1)]
    assert cell(*lost) == "diverges at step 3, 4" and cell(lost[0]) == "diverges at step 3"


def test_a_model_of_one_depth_has_one_loss_at_every_depth():
    def arm(row, mu_rec, loss, law="poisson-full"):
        return Arm(row, runs=[made_line(loss, mu_rec=mu_rec, settings={"sampling": law})])

    once = arm("once", 1, {1: 3.0, 2: 9.0}, "fixed")  # at two loops it is not used
    arms = [once, arm("flat", 0, {0: 3.5}), arm("looped", 2, {1: 4.0, 2: 3.25})]
    experiment = EXPERIMENTS["frame"]
    values = [d.values.loc[0].to_dict() for d in pages.differences(arms, experiment)]
    assert values == [{"mu_rec": 0.5, 1: 0.5, 2: 0.5}, {"mu_rec": 0.25, 1: 1.0, 2: 0.25}]
    curves = pages.plot_of("loss by depth", [*arms, Arm("not run")], "", experiment).curves
    assert [list(y) for _, y in curves] == [[3.0, 3.0], [3.5, 3.5], [4.0, 3.25], []]


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

    made = ["--data", str(packed), "--seeds", "0", "--only", "prelude norm", "--", *SIZES]
    assert "# 1 of 1 trainings" in study(*made)
    assert "# 0 of 1 trainings" in study(*made)
    (folder,) = (clone / "runs/ablate/trainings").iterdir()
    line = ledger.record(folder)
    assert line["loss"] == read_log(folder).evals[-1]["loss"]
    text = (clone / "runs/studies/components-nano.md").read_text()
    assert f"| + prelude norm | {line['loss'][8]:.4f} |" in text
    status = subprocess.run(["git", "status", "--short"], cwd=clone, capture_output=True, text=True)
    assert status.stdout == " M model.py\n"


def test_rows_and_dtypes_are_not_mixed():
    training, other = trainings_of("rdm")[:2]
    other.settings = training.settings
    other.dtype = "bfloat16"
    line = {"settings": training.settings, "dtype": "float32", "diverged_at": 1, "loss": {}}
    lines = [line | {"data": "aaaa"}, line | {"data": "bbbb"}]
    assert experiments.look_up([training, other], lines, "bb") == [other]
    assert training.line["data"] == "bbbb"


# -- the depth laws


def test_sampled_depths_follow_the_formulas():
    for law, formula in depth_laws.formulas(np.arange(40), 8, 4).items():
        cfg = ModelConfig(mu_rec=8, mu_bwd=4, sampling=law)
        n, k = sample_depths(cfg, 0, 0, 100_000)
        share = np.bincount(n + k, minlength=40)[:40] / 100_000
        assert formula.sum() == pytest.approx(1, abs=1e-3)
        assert np.abs(share - formula).max() < 5 * math.sqrt(0.25 / 100_000)
