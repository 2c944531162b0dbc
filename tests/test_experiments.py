"""The comparisons as data and as a program, the ledger, and the depth laws' formulas."""

import argparse
import itertools
import math
import os
import subprocess
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from helpers import ENV, ROOT, command, refused

import train
from looped import figures
from looped.checkpoint import checkpoints
from looped.depth import sample_depths
from looped.files import lock
from looped.logs import CoreRules, read_log
from model import ModelConfig, load_run
from studies import depth_laws, experiments, ledger, pages
from studies.comparisons import EXPERIMENTS, Arm, tables_of

SIZES = [
    "--vocab-size=300", "--seq-len=32", "--d-model=32", "--d-mlp=64", "--batch-size=12", "--dtype=float32",
    "--eval-tokens=1000", "--tokens=4608", "--eval-every=5", "--save-every=4",
    "--adam-lr=3.2e-2", "--muon-lr=1.4e-2",
]  # fmt: skip


def arguments(name, scale="nano"):
    given = {"name": name, "scale": scale, "seeds": [0]}
    return argparse.Namespace(**given, data=None, extra=[], only=[""], ranks=1)


def arms_of(args):
    return list(itertools.chain.from_iterable(tables_of(args.name, args.scale)))


# -- the comparisons as data


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_arm_is_a_valid_command_at_every_scale(name):
    for scale in EXPERIMENTS[name].scales:
        args = arguments(name, scale)
        for job in experiments.jobs_of(args, arms_of(args)):  # train.py's own checks
            assert job.settings["steps"] > 0
            assert len({id(arm) for arm in job.arms}) == len(job.arms)
        for arms in tables_of(name, scale):
            cells = {(arm.row, arm.col) for arm in arms}
            assert len(cells) == len(arms)


@pytest.mark.parametrize("name, allowed", [
    ("gains", {"gain"}),
    ("granularity", {"granularity"}),
    ("sampling", {"sampling"}),
    ("mechanisms", {"mechanism", "injection"}),
    ("components", {"injection", "input_matrix", "granularity", "prelude_norm"}),
    ("stability", {"injection", "block"}),
])  # fmt: skip
def test_arms_differ_from_their_base_in_what_they_compare_alone(name, allowed):
    args = arguments(name)
    first = {}
    for arms in tables_of(name, args.scale):
        for arm in arms:
            settings, _ = ledger.wanted_settings(experiments.arm_flags(arm, args))
            place = (id(arms), arm.row if EXPERIMENTS[name].base == "col" else arm.col)
            base = first.setdefault(place, settings)
            assert {key for key in settings if settings[key] != base[key]} <= allowed, arm.name()


def test_lengths_are_tokens_a_parameter_or_the_sources():
    args = arguments("baseline")
    flat, looped, equal, once = (
        train.parse_args(experiments.arm_flags(arm, args)) for arm in arms_of(args)[:4]
    )
    cfg = train.model_config(looped)
    params = train.parameter_count(cfg)
    assert flat.tokens == looped.tokens == once.tokens == pytest.approx(20 * params, rel=0.03)
    assert equal.flops == pytest.approx(looped.tokens * cfg.flops_per_token(), rel=1e-5)
    assert train.model_config(flat) == train.model_config(equal)
    flops = [train.model_config(args).flops_per_token() for args in (once, flat)]
    assert flops[0] == pytest.approx(flops[1], rel=0.05)
    args = arguments("gains", "140m")
    tokens = [train.parse_args(experiments.arm_flags(arm, args)).tokens for arm in arms_of(args)]
    assert tokens[::2] == [0.2e9, 0.5e9, 0.2e9, 0.5e9, 11.2e9]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_command_of_every_scale_gets_as_far_as_its_trainings(
    name, packed, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for scale in EXPERIMENTS[name].scales:
        line = [name, "--scale", scale, "--seeds", "0", "--data", str(packed), "--dry-run"]
        experiments.main(line)
        commands = capsys.readouterr().out.splitlines()
        assert f"# {len(commands) - 1} of {len(commands) - 1} trainings are left" in commands[-1]


def test_fixed_depth_one_is_the_isoflop_grids_baseline():
    args = arguments("isoflop")
    jobs = experiments.jobs_of(args, arms_of(args))
    laws = {(job.settings["mu_rec"], job.settings["sampling"]) for job in jobs}
    assert (1, "fixed") in laws and all(law != "fixed" for mu, law in laws if mu > 1)
    assert jobs[0].depths == set(range(1, 25))
    budgets = {arm.flops for arm in arms_of(args)}
    assert max(budgets) / min(budgets) >= 16


# -- divergence and statistics


def steps(losses):
    return ledger.steps_of([{"step": i, "loss": x} for i, x in enumerate(losses, 1)])


def test_what_a_line_lacks_had_the_default():
    flags = ["--preset", "nano", "--tokens", "1e6"]
    wanted, _ = ledger.wanted_settings([*flags, "--no-token-shift"])
    known = {name: value for name, value in wanted.items() if name != "token_shift"}
    shifted, _ = ledger.wanted_settings(flags)
    same = ledger.identity(known)
    assert same == ledger.identity(wanted) and same != ledger.identity(shifted)
    assert same != ledger.identity(wanted | {"of other code": 1})


def test_a_transformer_heeds_no_flag_of_the_loop():
    for preset, same in (("transformer-nano", True), ("nano", False)):
        wanted, _ = ledger.wanted_settings(["--preset", preset, "--tokens", "1e6"])
        other = wanted | {"prelude_norm": not wanted["prelude_norm"]}
        assert (ledger.identity(other) == ledger.identity(wanted)) == same
        other = wanted | {"token_shift": False}
        assert ledger.identity(other) != ledger.identity(wanted)


def test_divergence_rule():
    divergence = ledger.divergence
    falling = [8 - 4 * i / 200 for i in range(200)]
    assert divergence(steps(falling), False) is None
    spike = [*falling[:150], 12.0, *falling[151:]]  # one that it recovers from
    assert divergence(steps(spike), False) is None
    up = falling[:100] + [9.0] * 100
    assert 101 <= divergence(steps(up), False) <= 101 + 200 // 20
    assert divergence(steps([7.0] * 50 + [8.0] * 50), False) > 50
    assert divergence(steps(falling[:60] + [math.nan] * 3), True) == 61
    assert divergence(steps([math.nan] * 3), True) == 1  # from the first step on
    growing = steps(falling)
    growing.state_norm = 1.2**growing.step  # 1.2^50 is 9,100, 1.2^51 10,920
    assert divergence(growing[:50], False) is None
    assert divergence(growing, False) == 52
    growing.loc[0, "state_norm"] = 0.0  # as of a raw loop from a zero state: then 10,000 counts
    assert divergence(growing, False) == 51


def test_paired_differences_and_the_sentence_by_hand():
    a = Arm("r", "euler", source={"mu_rec": "4.1022"})
    b = Arm("r", "zoh", source={"mu_rec": "4.0859"})
    x, y = [4.0, 4.1, 4.2, 4.3, 4.4], [3.99, 4.07, 4.19, 4.26, 4.40]

    def run(seed, loss, bad=None):
        return made_line({2: loss, 8: loss + 1}, seed=seed, diverged_at=bad)

    for seed in range(5):
        a.runs.append(run(seed, x[seed]))
        b.runs.append(run(seed, y[seed]))
    a.runs.append(run(9, 4.0))
    b.runs.append(run(9, 9.0, bad=3))  # diverged: its seed is left out
    values = np.subtract(y, x)
    (found,) = pages.differences([a, b, Arm("x")], EXPERIMENTS["gains"])
    half = 2.7764451 * values.std(ddof=1) / math.sqrt(5)
    assert (found.arm, found.base) == (b, a) and np.allclose(found.values["mu_rec"], values)
    said = pages.sentence(found, "loss")
    # an arm without a run is no base
    (found,) = pages.differences([Arm("r", "none"), a, b], EXPERIMENTS["gains"])
    assert (found.arm, found.base) == (b, a)
    steps = [
        Arm("one", runs=a.runs),
        Arm("two"),
        Arm("three", runs=b.runs),
        Arm("four", runs=a.runs),
    ]
    pairs = [(d.base.row, d.arm.row) for d in pages.differences(steps, EXPERIMENTS["components"])]
    assert pairs == [("one", "three"), ("three", "four")]
    assert (
        f"r, zoh is lower than r, euler by {-values.mean():.4f} ± {half:.4f} nats/token, n = 5"
        in said
    )
    assert "source 4.0859 against 4.1022" in said
    spread = values.std(ddof=1)
    assert f"standard deviation {spread:.4f})" in said
    ours = pages.cell(Arm(runs=[a.runs[0], a.runs[2]]), "mu_rec", "loss")
    assert ours == "5.1000 ± 1.2706 (0.1414; n = 2)"  # 4.0 and 4.2 at depth 2 are 5.0 and 5.2 at 8
    assert figures.plus_minus(list(values)) == f"{values.mean():.4f} ± {half:.4f}"
    assert figures.plus_minus([1.5]) == "1.5000" and figures.plus_minus([]) == "–"


def test_a_model_of_one_depth_has_one_loss_at_every_depth():
    def arm(row, mu_rec, loss, law="poisson-full"):
        return Arm(row, runs=[made_line(loss, mu_rec=mu_rec, settings={"sampling": law})])

    once = arm("once", 1, {1: 3.0, 2: 9.0}, "fixed")  # at two loops it is not used
    assert not pages.has_one_depth(arm("looped at times", 1, {}).runs[0])
    flat_twin = arm("flat", 0, {0: 3.5})
    looped = arm("looped", 2, {1: 4.0, 2: 3.25})
    arms = [once, flat_twin, looped]
    experiment = EXPERIMENTS["frame"]
    values = [d.values.loc[0].to_dict() for d in pages.differences(arms, experiment)]
    assert values[0] == {"mu_rec": 0.5, 1: 0.5, 2: 0.5}
    assert values[1] == {"mu_rec": 0.25, 1: 1.0, 2: 0.25}
    curves = pages.plot_of("loss by depth", [*arms, Arm("not run")], "", experiment).curves
    assert [list(y) for _, y in curves] == [[3.0, 3.0], [3.5, 3.5], [4.0, 3.25], []]


def test_differences_are_drawn_with_their_intervals():
    losses = {
        "euler": [{1: 3.0, 8: 2.0}, {1: 3.1, 8: 2.2}],
        "zoh": [{1: 3.2, 8: 2.1}, {1: 3.1, 8: 2.2}],
    }
    arms = []
    for gain, runs in losses.items():
        lines = [made_line(loss, seed=seed) for seed, loss in enumerate(runs)]
        arms.append(Arm("row", gain, runs=lines))
    plot = pages.plot_of("difference by depth", arms, "", EXPERIMENTS["gains"])
    assert plot.curves[1][1] == pytest.approx([0.1, 0.05]) and len(plot.curves[0][1]) == 0
    t = 12.7062  # of one degree of freedom, times the standard error of 0.2, 0 and of 0.1, 0
    assert plot.half_widths[1] == pytest.approx([t * 0.1, t * 0.05], rel=1e-4)


def test_scores_stand_beside_their_rules_and_the_sources():
    rules = {"panel": "core", "name": None, "protocol": "parcae", "baselines": "v1"}
    rules["max_per_task"] = None

    def run(depths, mu_rec, **other):
        scores = [rules | other | {"depth": depth, "mean": mean} for depth, mean in depths.items()]
        return {"core": scores, "mu_rec": mu_rec}

    looped = Arm("looped", source={"mu_rec": "9.1", 4: "9.2", "CORE": "14.0"})
    looped.runs = [run({8: 0.1, 1: 0.05}, 8), run({8: 0.3}, 8), run({8: 0.4}, 8, max_per_task=9)]
    text = pages.score_table([looped, Arm("flat", runs=[run({0: 0.2}, 0)]), Arm("not run")])
    half = 12.7062 * 0.1  # t of one degree of freedom, times the standard error
    assert text[4].startswith("| looped | core | – | 8 | parcae | v1 | – |")
    assert text[4].endswith(f" 0.2000 ± {half:.4f} |")
    ends = [line.split("|")[-2].strip() for line in text[5:8]]
    assert ends == ["0.0500", "0.4000", "0.2000"]
    assert "- Source, looped: CORE 14.0." in text


# -- the program


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_are_made_once_diverge_and_tell_the_page_what_their_logs_say(packed, here, capsys):
    command = ["components", "--seeds", "0", "--data", str(packed), "--out", "results/x.1"]
    wanted = [*command, "--only", "RDM;prelude norm", "--", *SIZES]
    experiments.main(wanted)
    lines = {line["settings"]["injection"]: line for line in ledger.read_ledger().values()}
    text = (here / "results/x.1.md").read_text()
    rows = {"diagonal": "+ prelude norm", "concat": "RDM: concat, per batch"}
    for injection, row in rows.items():
        path = here / lines[injection]["run"]
        final = read_log(path / "log.jsonl").evals[-1]
        assert lines[injection]["loss"] == final["loss"]
        shown = next(line for line in text.splitlines() if line.startswith(f"| {row} "))
        assert all(f"{final['loss'][depth]:.4f}" in shown for depth in (1, 4, 8)), shown
        assert len(lines[injection]["curve"]["loss"]) == 12
    assert "| + constrained Ā | – | 8.99 |" in text and "Training tokens a parameter: 0." in text
    assert (here / "results/x.1.png").stat().st_size > 5000
    rho = load_run(here / lines["diagonal"]["run"])[0].spectra()["rho"]
    assert lines["diagonal"]["spectra"]["rho"] == pytest.approx(rho, rel=1e-5)

    # nothing runs again: neither here, nor where only the ledger is at hand
    logs = sorted(here.glob("runs/studies/*/log.jsonl"))
    before = [log.stat().st_mtime_ns for log in logs]
    experiments.main(wanted)
    assert before == [log.stat().st_mtime_ns for log in logs]
    (here / "runs").rename(here / "elsewhere")
    capsys.readouterr()
    experiments.main(wanted)
    assert "# 0 of 2 trainings are left to do" in capsys.readouterr().out
    experiments.main([*command, "--page", "--", *SIZES])
    assert not (here / "runs").exists()

    # the rows are not at hand: their hash is told by the runs, unless these have several
    elsewhere = ["components", "--seeds", "0", "--page", "--only", "RDM", "--out", "results/y"]
    experiments.main([*elsewhere, "--", *SIZES])
    assert "Training tokens a parameter: 0." in (here / "results/y.md").read_text()
    line = lines["concat"]
    ledger.append(line | {"data": "0123456789abcdef"})
    refused(
        capsys,
        lambda: experiments.main([*elsewhere, "--", *SIZES]),
        "has such runs on rows",
        "0123456789",
        "give one of these as --data",
    )
    experiments.main([*elsewhere, "--data", line["data"][:10], "--", *SIZES])

    # another seed is another run
    experiments.main(
        [*command, "--seeds", "1", "--only", "RDM;prelude norm", "--dry-run", "--", *SIZES]
    )
    assert "# 2 of 2 trainings are left to do" in capsys.readouterr().out

    wild = ["--muon-lr", "1e30", "--adam-lr", "1e30"]
    gains = [
        "gains",
        *command[1:],
        "--only",
        "Paper-style, decay 0.447, 20 tokens/parameter, euler",
        "--jobs",
        str(os.cpu_count()),
    ]
    experiments.main([*gains, "--", *SIZES, *wild])
    text = (here / "results/x.1.md").read_text()
    assert "diverges at step" in text and "decay 0.9" not in text  # which has no run and no source
    (output,) = here.glob("runs/studies/*.txt")
    assert "of 1 threads" in output.read_text()  # a lone training has no more than one of many


def test_a_failed_training_does_not_stop_the_others(packed, here, capsys):
    command = [
        "components",
        "--seeds",
        "0",
        "--data",
        str(packed),
        "--jobs",
        "2",
        "--only",
        "constrained;prelude norm",
    ]
    args = experiments.parse_args([*command, "--", *SIZES])
    jobs = experiments.jobs_of(args, arms_of(args))
    jobs[0].path.mkdir(parents=True)
    (jobs[0].path / "config.json").write_text("{")  # damaged
    refused(
        capsys,
        lambda: experiments.main([*command, "--", *SIZES]),
        "1 of the trainings failed",
        "is damaged",
    )
    assert [line["run"] for line in ledger.read_ledger().values()] == [str(jobs[1].path)]


def test_a_signal_ends_the_trainings_too(packed, here):
    line = ["gains", "--data", packed, "--only", "20 tokens", "--seeds", "0", "--jobs", "2", "--"]
    program = command("-m studies.experiments", *line, *SIZES, "--tokens=5e5")
    with subprocess.Popen(program, env=ENV | {"PYTHONPATH": str(ROOT)}) as parent:
        logs = []
        while len(logs) < 2:  # both train
            time.sleep(0.1)
            logs = [log for log in here.glob("runs/*/*/log.jsonl") if "train" in log.read_text()]
            assert parent.poll() is None
        parent.terminate()
        parent.wait()
    for log in logs:
        with lock(log.parent):  # its training is over
            assert checkpoints(log.parent)
    assert parent.returncode
    assert len(list(here.glob("runs/*/*/log.jsonl"))) == 2  # no other was begun


def test_a_dtype_that_is_asked_for_is_the_runs():
    args = arguments("rdm")
    usual = experiments.jobs_of(args, arms_of(args))[0]
    args.extra = ["--dtype", "float32"]
    asked = experiments.jobs_of(args, arms_of(args))[0]
    assert asked.path != usual.path and asked.settings == usual.settings
    run = {"data": "d", "diverged_at": 1, "loss": {}}
    for dtype in ("float32", "bfloat16"):
        assert usual.accepts(run | {"dtype": dtype})
        assert asked.accepts(run | {"dtype": dtype}) == (dtype == "float32")


def test_a_later_run_in_another_dtype_takes_no_page_over(here):
    args = arguments("rdm")
    usual = experiments.jobs_of(args, arms_of(args))[0]
    line = {"settings": usual.settings, "data": "d", "diverged_at": 1, "loss": {}, "evals": []}
    for dtype, loss in (("bfloat16", 3.0), ("float32", 2.0), ("bfloat16", 2.5)):
        ledger.append(line | {"dtype": dtype, "last_loss": loss})
    assert not experiments.look_up([usual])
    assert usual.line["dtype"] == "bfloat16" and usual.line["last_loss"] == 2.5


@pytest.mark.parametrize("line, words", [
    ("stability --scale 140m", "--scale 140m is not a size of stability; choose from nano, 100m, 350m"),
    ("gains --scale 140m", "needs --data"),
    ("gains --seeds 0;1", "argument --seeds: 0;1 must be whole numbers"),
    ("components --only nothing --dry-run", "--only nothing fits no arm"),
    ("gains --dry-run -- --mu-bwd 9", "--mu-bwd 9 exceeds"),
    ("gains --data none", "--data none holds no packed rows"),
    ("gains --dry-run -- --seed 5", "--seed after --"),
    ("gains --dry-run -- --warmup 0 --out=x", "--out after --"),
    ("gains --dry-run -- --stop-at 3", "--stop-at after --"),
    ("gains --dry-run --only ;", "fits no arm"),
])  # fmt: skip
def test_bad_input_is_refused_in_one_line(line, words, capsys, here):
    refused(capsys, lambda: experiments.main(line.split()), words)
    assert not list(here.iterdir())


def test_a_damaged_ledger_is_named(here, capsys):
    ledger.append({"data": "0123456789abcdef"})
    refused(
        capsys,
        lambda: experiments.main(["gains", "--page"]),
        "line 1 of results/ledger/0123456789.jsonl is damaged",
    )


# -- the depth laws


def test_more_loops_with_gradient_than_loops_are_refused(capsys):
    line = ["--mu-rec", "4", "--mu-bwd", "9"]
    refused(capsys, lambda: depth_laws.main(line), "--mu-bwd 9 exceeds --mu-rec 4; try --mu-bwd 4")


@pytest.mark.parametrize("mu_bwd", [4, 8])
def test_sampled_depths_follow_the_formulas(mu_bwd):
    for law, formula in depth_laws.formulas(np.arange(40), 8, mu_bwd).items():
        cfg = ModelConfig(mu_rec=8, mu_bwd=mu_bwd, sampling=law)
        n, k = sample_depths(cfg, 0, 0, 100_000)
        share = np.bincount(n + k, minlength=40)[:40] / 100_000
        assert formula.sum() == pytest.approx(1, abs=1e-3)
        assert np.abs(share - formula).max() < 5 * math.sqrt(0.25 / 100_000)


def test_the_page_has_a_row_for_each_law(here):
    depth_laws.main(["--mu-rec", "4", "--mu-bwd", "2"])
    text = (here / "results/depth-laws.md").read_text()
    assert text.count("| poisson-") == 3 and (here / "results/depth-laws.png").is_file()


def test_half_a_nat_above_the_lowest_or_above_the_start_is_a_divergence():
    fall = [8 - 4 * i / 100 for i in range(100)]
    assert ledger.divergence(steps([*fall, *[4.4] * 100]), False) is None
    assert ledger.divergence(steps([*fall, *[4.8] * 100]), False) is not None
    assert ledger.divergence(steps([*[7.8] * 50, *[8.0] * 50]), False) > 50


def test_curve_and_numbers_of_a_log():
    records = []
    for i in range(1, 41):
        numbers = {"loss": 9 - i / 10, "ms": 600.0, "tok_s": 1.0, "skipped": 0}
        records.append({"step": i, "tokens": 10 * i, "state_norm": 1.0, "residual": 1.0} | numbers)
    found = ledger.of_steps(ledger.steps_of(records))
    assert found["curve"]["tokens"][:2] == [20, 40]  # 20 points, the last tokens of each
    assert found["curve"]["loss"][0] == pytest.approx(8.85)
    assert found["minutes"] == pytest.approx(0.4) and found["lowest_loss"] == pytest.approx(5.0)


def test_averages_of_a_part_of_the_tasks_stay_out_of_the_ledger():
    def average(done):
        return {
            "aggregate": {
                "name": "x",
                "mean": 0.1,
                "std": 0.0,
                "tasks_done": done,
                "tasks_total": 22,
            }
        }

    run = SimpleNamespace(
        core={CoreRules("core", "parcae", "v1", None): {8: average(22), 4: average(21)}}
    )
    assert [score["depth"] for score in ledger.scores(run)] == [8]


def test_of_equal_lines_the_last_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for loss in (3.0, 2.0):
        run = {"settings": {"a": 1}, "data": "d", "dtype": "float32", "evals": []}
        ledger.append(run | {"loss": {"8": loss}})
    (line,) = ledger.read_ledger().values()
    assert line["loss"] == {8: 2.0}


def test_another_validation_set_is_another_run():
    flags = ["--preset", "nano", "--tokens", "1e6"]
    usual, _ = ledger.wanted_settings(flags)
    other, _ = ledger.wanted_settings([*flags, "--eval-tokens", "5e4"])
    assert ledger.identity(usual) != ledger.identity(other)


def made_line(loss, **more):
    usual = {"loss": loss, "seed": 0, "mu_rec": 8, "diverged_at": None, "unigram": None}
    return usual | more


def test_differences_are_of_the_same_seeds():
    euler = [made_line({8: loss}, seed=seed) for seed, loss in enumerate((4.0, 5.0, 6.0))]
    zoh = [made_line({8: 4.8}, seed=1), made_line({8: 5.9}, seed=2)]
    arms = [Arm("r", "euler", runs=euler), Arm("r", "zoh", runs=zoh)]
    (found,) = pages.differences(arms, EXPERIMENTS["gains"])
    assert sorted(found.values["mu_rec"]) == pytest.approx([-0.2, -0.1])
    assert "-0.1500 ±" in "\n".join(pages.difference_table([found], EXPERIMENTS["gains"]))


def test_cells_by_hand():
    def cell(loss, unit="loss", **more):
        return pages.cell(Arm(runs=[made_line({8: loss}, **more)]), "mu_rec", unit)

    assert cell(2.0, "perplexity") == f"{math.exp(2):.2f}"
    assert "stuck" in cell(6.9, unigram=7.0)
    assert "stuck" not in cell(6.5, unigram=7.0)
    base = Arm("a", source={"mu_rec": str(math.e)})
    arm = Arm("b", source={"mu_rec": str(math.e**2)})
    values = pd.DataFrame({"mu_rec": [0.1, 0.2]})
    said = pages.sentence(pages.Difference(arm, base, values), "perplexity")
    assert "source 2.0000 against 1.0000" in said


def test_held_out_runs_are_others_of_the_same_model_and_rows(monkeypatch):
    def line(data="d", diverged_at=None, **settings):
        usual = {"steps": 1, "seed": 0, "mu_rec": 8, "mu_bwd": 4, "gain": "zoh"}
        return {"settings": usual | settings, "data": data, "diverged_at": diverged_at}

    fitted = [line()]
    wanted = [line(steps=2, seed=1, mu_rec=4, mu_bwd=2), line(steps=4, qk_norm=True)]  # as usual
    others = [line("other"), line(gain="euler"), line(steps=3, diverged_at=5)]
    lines = dict(enumerate([*fitted, *wanted, *others]))
    monkeypatch.setattr(pages, "read_ledger", lambda: lines)
    assert pages.held_out(fitted) == wanted
