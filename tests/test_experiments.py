"""The comparisons as data and as a program, the ledger, and the depth laws' formulas."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from helpers import ROOT, refused

import train
from launch import training_flops
from looped.depth import sample_depths
from looped.run import decisive
from model import ModelConfig
from studies import depth_laws, experiments, ledger, looping
from studies.comparisons import EXPERIMENTS, SOURCES, arms_of
from tools.arms import Arm, Run
from tools.pages import loss_table

SIZES = (
    "--vocab-size 300 --seq-len 32 --d-model 16 --d-mlp 16 --batch-size 12 --dtype float32 "
    "--eval-tokens 1000 --tokens 1920"
)


# -- the comparisons as data


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_arms_are_valid_commands(name):
    for scale in {"nano", EXPERIMENTS[name].scales[-1]}:
        arms = arms_of(name, scale)
        assert len({arm.name for arm in arms}) == len(arms)
        for arm in (arms[0], arms[-1]):
            args = train.parse_args(arm.flags)
            assert train.model_config(args) and bool(args.tokens) != bool(args.flops)


@pytest.mark.parametrize("name, allowed", [
    ("granularity", {"granularity"}),
    ("sampling", {"sampling"}),
    ("components", {"injection", "input_matrix", "granularity", "prelude_norm"}),
])  # fmt: skip
def test_arms_differ_from_their_base_in_what_they_compare_alone(name, allowed):
    first = {}
    for arm in arms_of(name, "nano"):
        args = train.parse_args(arm.flags)
        settings = vars(args) | vars(train.model_config(args))
        base = first.setdefault(arm.group, settings)
        assert {key for key in settings if settings[key] != base[key]} <= allowed, arm.name


def test_every_number_of_the_sources_has_its_arm():
    known = pd.read_csv(SOURCES, dtype=str).query("experiment != 'zero_shot'")
    for (name, scale), numbers in known.groupby(["experiment", "scale"]):
        shown = {(arm.label, of) for arm in arms_of(name, scale) for of in arm.source}
        wanted = {(number.arm, number.of) for number in numbers.itertuples()}
        assert wanted <= {(label, str(of)) for label, of in shown}, name


def test_equal_flops_are_the_looped_models():
    args = experiments.parse_args(["baseline", "--only", "20 tokens"])
    arms = experiments.chosen(args)
    experiments.complete(arms, args)
    flat, looped, equal, _ = [train.parse_args(arm.flags) for arm in arms]
    assert flat.tokens == looped.tokens and equal.tokens is None
    steps = round(looped.tokens / (16 * 256))
    flops = training_flops(train.model_config(looped), 0, 16, steps)
    assert equal.flops == pytest.approx(flops, rel=1e-5)


# -- the ledger


def test_pages_are_computed_from_the_ledgers_lines():
    """A page's difference, from the JSON lines by hand."""
    losses = {"euler": {}, "zoh": {}}
    for text in (ROOT / "results/ledger/62895bb6fe.jsonl").read_text().splitlines():
        line = json.loads(text)
        for place in line["pages"]:
            if place["page"] == "gains-nano-stdlib":
                losses[place["label"]][line["seed"]] = line["evals"][-1]["loss"]["8"]
    gaps = [losses["zoh"][seed] - loss for seed, loss in losses["euler"].items()]
    half = 2.364624 * np.std(gaps, ddof=1) / math.sqrt(8)
    assert len(gaps) == 8
    page = (ROOT / "results/gains-nano-stdlib.md").read_text()
    assert f"{np.mean(gaps):+.4f} ± {half:.4f}" in page


def test_when_looping_pays_is_answered_by_other_seeds_than_tune(tmp_path, monkeypatch):
    """The answer at equal parameters on little text, from the JSON lines by hand."""
    monkeypatch.setattr(ledger, "LEDGER", ROOT / "results/ledger")
    monkeypatch.chdir(tmp_path)
    ledger.lines.cache_clear()
    runs = {}
    for line in ledger.lines():
        for place in line["pages"]:
            if place["page"] == looping.PAGE and place["group"].startswith("little text"):
                losses = line["evals"][-1]["loss"]
                loss = losses[str(line["config"]["model"]["mu_rec"])]
                runs.setdefault((place["label"], place["group"]), {})[line["seed"]] = loss
    best = {}
    flat, loops = "flat, recipe of 2609.19107", "4 loops, sampled"
    for label in (flat, loops):
        groups = [losses for (name, _), losses in runs.items() if name == label]
        best[label] = min(groups, key=lambda losses: losses.get(looping.TUNING, 99))
    seeds = best[flat].keys() & best[loops].keys() - {looping.TUNING}
    gap = np.mean([best[loops][seed] - best[flat][seed] for seed in seeds])
    looping.main([])
    ledger.lines.cache_clear()
    page = (tmp_path / "results/when-looping-pays.md").read_text()
    assert f"{loops} beside {flat}: {gap:+.4f} ±" in page


def made_run(loss, seed=0, diverged_at=None, data="d" * 16, **network):
    model = {"mu_rec": 8, "mu_bwd": 4, "gain": "zoh"} | network
    config = dict.fromkeys(ledger.CONFIG) | {"args": {"seed": seed}, "model": model}
    config |= {"data": {"sha256": data, "rows": 9}, "params": 10, "steps": 9}
    records = [{"tokens": 10 * i, "loss": 9 - i / 10, "ms": 2} for i in range(1, 41)]
    evals = [{"tokens": 400, "loss": {8: loss}, "final": True, "eval_tokens": 7}]
    return Run(f"run {seed}", config, records, evals, diverged_at=diverged_at)


def test_a_line_holds_the_run_with_its_curve_in_twenty_means(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "LEDGER", tmp_path)
    kept = made_run(4.0)
    arm = Arm("euler", group="g")
    ledger.append("page", arm, made_run(5.0))  # of two lines for one seed the later counts
    ledger.append("page", arm, kept)
    ledger.append("page", Arm("zoh", group="g"), made_run(6.0, data="other rows"))
    ledger.append("other page", arm, made_run(7.0, seed=1))
    ledger.lines.cache_clear()
    arms = [Arm("euler", group="g"), Arm("zoh", group="g")]
    (said, _) = ledger.fill("page", arms)
    ledger.lines.cache_clear()
    (read,) = arms[0].runs
    assert (read.config, read.evals, read.loss) == (kept.config, kept.evals, 4.0)
    assert [point["tokens"] for point in read.train[:2]] == [20, 40] and len(read.train) == 20
    assert read.train[0]["loss"] == pytest.approx(8.85) and math.isnan(read.train[3]["residual"])
    # losses measured on other rows do not meet
    assert arms[1].runs == [] and said.startswith("1 runs of the ledger are left out")


# -- the page


def test_differences_are_paired_by_seed_within_their_group():
    x = [4.0, 4.1, 4.2, 4.3, 4.4]
    y = [3.99, 4.07, 4.19, 4.26, 4.40]
    euler = Arm("euler", group="g", runs=[made_run(loss, seed) for seed, loss in enumerate(x)])
    zoh = Arm("zoh", group="g", runs=[made_run(loss, seed) for seed, loss in enumerate(y)])
    euler.runs.append(made_run(4.0, 9))
    zoh.runs.append(made_run(9.0, 9, diverged_at=3))  # its seed is left out
    values = np.subtract(y, x)
    half = 2.7764451 * values.std(ddof=1) / math.sqrt(5)
    *_, diverged, difference, _ = loss_table([Arm("none", group="other"), euler, zoh], [])
    assert diverged.startswith("| g, zoh | 5 | diverges at step 3; 4.1820 ± ")
    signed = f"{values.mean():+.4f} ± {half:.4f}"
    assert difference == f"| g, zoh: difference from euler | 5 | {signed} |"


def test_a_model_of_one_depth_has_one_loss_at_every_depth():
    once = made_run(9.0, mu_rec=1, sampling="fixed")
    once.evals[0]["loss"] = {1: 3.0, 2: 9.0}  # at two loops it is not used
    assert Arm("once", runs=[once]).losses_at([1, 2]).loc[0].tolist() == [3.0, 3.0]


def test_a_study_trains_what_has_no_line(packed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ledger.lines.cache_clear()
    line = ["components", "--only"] + ["+ prelude norm", "--seeds", "0", "--data", str(packed)]
    extra = ["--", *SIZES.split()]
    refused(capsys, lambda: experiments.main([*line, *extra]), "name another with --page")
    page = ["--page", "mine", "--train"]
    experiments.main([*line, *page, *extra])
    assert "1 of 1 trainings are left" in capsys.readouterr().out
    ledger.lines.cache_clear()
    experiments.main([*line, *page, *extra])
    assert "0 of 0 trainings are left" in capsys.readouterr().out
    (file,) = (tmp_path / "results/ledger").iterdir()
    kept = json.loads(file.read_text())
    loss = kept["evals"][-1]["loss"]["8"]
    assert (
        f"prelude norm, + prelude norm | 1 | {loss:.4f} |"
        in (tmp_path / "results/mine.md").read_text()
    )
    (folder,) = (tmp_path / "runs/ablate/trainings").iterdir()
    config = json.loads((folder / "config.json").read_text())
    assert decisive(config)["prelude_norm"] is True
    ledger.lines.cache_clear()


# -- the depth laws


def test_sampled_depths_follow_the_formulas():
    for law, formula in depth_laws.formulas(np.arange(40), 8, 4).items():
        cfg = ModelConfig(mu_rec=8, mu_bwd=4, sampling=law)
        n, k = sample_depths(cfg, 0, 0, 100_000)
        share = np.bincount(n + k, minlength=40)[:40] / 100_000
        assert formula.sum() == pytest.approx(1, abs=1e-3)
        assert np.abs(share - formula).max() < 5 * math.sqrt(0.25 / 100_000)
