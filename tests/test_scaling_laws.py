"""The fits against data made from known laws, against torch's L-BFGS, and against the paper's own numbers."""

import dataclasses
import json
import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import refused, run_program

from looped.logs import read_log
from model import PRESETS
from studies import laws, scaling_laws


@dataclass
class PaperGrid:
    budgets: tuple
    tokens: float  # of the held-out run, and its perplexity
    perplexity: float
    stated: float  # the paper's error on it, and ours, in %
    ours: float
    parameters: int


PAPER = {
    "parcae-140m": PaperGrid((1e18, 2e18, 4e18, 8e18, 16e18, 64e18), 11.2e9, 19.06, 1.3, -1.16, 144_323_136),
    "parcae-370m": PaperGrid((32e18, 64e18, 128e18), 29.6e9, 14.49, 0.8, -1.07, 388_003_328),
}  # fmt: skip
MUS = (2, 4, 6, 8, 10, 12)


@pytest.fixture(autouse=True)
def few_restarts(monkeypatch):
    monkeypatch.setattr(laws, "RESTARTS", 12)
    monkeypatch.setattr(laws, "KEPT", 4)
    monkeypatch.setattr(laws, "RESAMPLES", 20)


def made(preset="parcae-140m", noise=0.0, seed=0, depths=(), mus=MUS, budgets=None):
    """Runs that obey the paper's law times exp(noise x normal), a draw per run; depths add 6 exp(-6 T/mu)."""
    rng = np.random.default_rng(seed)
    rows = []
    for budget in budgets or PAPER[preset].budgets:
        for mu in mus:
            cfg = laws.config_at(preset, mu)
            run = {"run": f"{budget:g}-{mu}", "mu_rec": mu, "flops": budget}
            run |= {"n_eff": laws.effective_params(cfg), "tokens": budget / cfg.flops_per_token()}
            floor = laws.law_loss(laws.PAPER[preset], run["n_eff"], run["tokens"])
            floor *= math.exp(noise * rng.standard_normal())
            for T in sorted({mu, *depths}):
                decay = 6 * math.exp(-6 * T / mu) if depths else 0
                rows.append(run | {"depth": T, "loss": floor + decay})
    return pd.DataFrame(rows)


def good(rows):
    return scaling_laws.prepared(rows, [])


def fitted(rows, name="train", seed=0):
    return laws.fit_law(good(rows), np.random.default_rng(seed), name)


def run_fit(tmp_path, rows, unseen=None):
    """-> the contents of fit.json."""
    unseen = rows.iloc[:0] if unseen is None else unseen
    scaling_laws.write_fit(rows, unseen, tmp_path / "out")
    return json.loads((tmp_path / "out" / "fit.json").read_text())


def readings(preset, mu):
    """N(mu) by hand, from the paper's tables: width d, L layers per part, vocabulary 32768, value gates 32 wide."""
    d, L, V = PRESETS[preset].d_model, PRESETS[preset].n_core, 32768
    block = 12 * d * d + 2 * d
    table = V * d
    gate = 32 * PRESETS[preset].n_head  # every second layer
    core = L * block + L // 2 * gate + d * d + 2 * d
    once = 2 * L * block + L * gate + d * d + 2 * d
    outside = table + once + L * table
    return {
        "unrolled": outside + mu * (core + L // 2 * table),  # everything
        "tables once": outside + mu * core + L // 2 * table,
        "stored": outside + core + L // 2 * table,
    }


def test_unrolled_reading_of_n_is_nearest_to_the_papers_stated_errors():
    """By 1.3 and 0.8 %. The paper prints three decimals of E, a, b, worth 0.13 %: no plain reading meets both."""
    off = {"unrolled": 0, "tables once": 0, "stored": 0}
    for preset, paper in PAPER.items():
        for name, N in readings(preset, 8).items():
            loss = laws.law_loss(laws.PAPER[preset], N, paper.tokens)
            error = 100 * (loss / math.log(paper.perplexity) - 1)
            off[name] += abs(abs(error) - paper.stated)
            if name == "unrolled":
                assert error == pytest.approx(paper.ours, abs=0.006)
        assert laws.effective_params(laws.config_at(preset, 1)) == paper.parameters
        assert laws.effective_params(laws.config_at(preset, 8)) == readings(preset, 8)["unrolled"]
    assert min(off, key=off.get) == "unrolled"


def lbfgs(x1, x2, y, start):
    """The paper's optimiser on our objective from one start -> (cost, logs of E, A, a, B, b)."""
    q = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    options = {"tolerance_grad": 1e-14, "tolerance_change": 1e-18, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS([q], max_iter=3000, history_size=50, **options)

    def closure():
        optimizer.zero_grad()
        terms = [q[0], q[1] - q[2].exp() * x1, q[3] - q[4].exp() * x2]
        f = torch.log(sum(term.exp() for term in terms))
        huber = 1e6 * torch.nn.functional.huber_loss(f, y, delta=1e-3, reduction="sum")
        huber.backward()
        return huber  # at a scale at which the tolerances mean something

    optimizer.step(closure)
    return closure().item() / 1e6, q.detach().numpy()


def test_fit_reaches_the_minimum_of_torch_lbfgs():
    problem = laws.Problem(good(made(noise=0.002, seed=3)), "train")
    found = problem.solve(np.random.default_rng(0))
    starts = [
        (0.9, -2.0, -0.4, -2.0, -0.7),
        (0.5, -1.0, 0.0, -1.0, 0.0),
        (1.0, -3.0, -1.0, -1.0, -0.3),
    ]
    N, D, _, _, loss = np.log(problem.rows)
    ln_N, ln_D = problem.center
    tensors = [torch.tensor(v) for v in (N - ln_N, D - ln_D, loss)]
    lowest, q = min((lbfgs(*tensors, start) for start in starts), key=lambda b: b[0])
    assert found[0].cost == pytest.approx(lowest, rel=1e-5)
    # flat valley: 1e-5 in cost is 1e-3 in the exponents' logs
    np.testing.assert_allclose(found[0].x, q, atol=5e-3)
    costs = np.array([f.cost for f in found])
    assert np.mean(costs < costs[0] * 1.001) > 0.5  # most of the kept restarts agree
    # what this repository's earlier Levenberg-Marquardt found on these rows
    assert found[0].cost == pytest.approx(3.63937446e-05, rel=1e-6)
    E, _, a, _, b = np.exp(found[0].x)
    assert (E, a, b) == pytest.approx((2.6724206, 0.78803916, 0.52771368), rel=1e-5)


@pytest.mark.parametrize(
    "size, tolerance", [("140m", (0.05, 0.5, 0.07, 0.002)), ("370m", (1, 1, 0.7, 0.003))]
)
def test_paper_coefficients_are_recovered(size, tolerance):
    """Without noise to 1e-5. With 0.2 % in the loss to the largest error of 60 seeds, tried by hand (E, a, b at 140M:
    4.5, 45, 6.7 %; 370M, three budgets: 90, 96, 63 %, so single coefficients mean little there). What the law is for,
    a held-out loss, was off by 0.15 and 0.23 % at worst, and its 95 % interval held in 95 and 92 % of the seeds."""
    preset = f"parcae-{size}"
    truth = dict(zip(laws.PARAMS, np.exp(laws.PAPER[preset][:5])))
    f = fitted(made(preset))
    assert f["law"] == pytest.approx(truth, rel=1e-5) and f["bounded"] == []
    assert max(f["errors"].values()) < 1e-3  # in %
    N = laws.effective_params(laws.config_at(preset, 8))
    loss = laws.law_loss(laws.PAPER[preset], N, PAPER[preset].tokens)
    f = fitted(made(preset, 0.002, seed=1), seed=1)
    for name, limit in zip("Eab", tolerance):
        assert f["law"][name] == pytest.approx(truth[name], rel=limit), f["law"]
    low, guess, high = laws.low_fit_high(laws.law_loss(f["logs"].T, N, PAPER[preset].tokens))
    assert low <= loss <= high and guess == pytest.approx(loss, rel=tolerance[3])


def test_parabolas_and_power_laws_are_recovered():
    """Losses that are parabolas with minima at mu* = k C^0.4 and tokens D = C / (c mu), so that D* = C^0.6 / (c k)."""
    budgets = np.array([1e15, 4e15, 1.6e16, 1e18])
    C, mu = (v.ravel() for v in np.meshgrid(budgets, [2, 4, 8, 16, 32], indexing="ij"))
    depth = np.log2(mu / (4e-6 * C**0.4))  # the last budget's lowest is off the grid
    rows = pd.DataFrame({"budget": C, "mu_rec": mu, "tokens": C / (1e6 * mu)})
    rows["loss"] = 3 - 0.1 * np.log10(C) + 0.05 * depth**2
    fixed = pd.DataFrame({"budget": budgets, "mu_rec": 1, "tokens": budgets / 1e6, "loss": 9.0})
    iso = laws.fit_isoflop(pd.concat([rows, fixed]), np.random.default_rng(0), [])
    exponents = [line[0][0] for line in iso["power_laws"].values()]
    assert exponents == pytest.approx([0.4, 0.6], abs=1e-9)
    assert [b["inside"] for b in iso["budgets"]] == [True, True, True, False]
    best = [b["mu"][0] for b in iso["budgets"]]
    assert best == pytest.approx([*(4e-6 * budgets[:3] ** 0.4), 32])
    for b in iso["budgets"]:
        assert b["tokens"][0] * b["mu"][0] == pytest.approx(b["budget"] / 1e6)
    assert iso["fixed_depth"] == dict.fromkeys(budgets, 9.0)  # beside the parabola, not in it


def test_gain_at_equal_tokens_is_that_over_one_loop_between_its_runs():
    """One loop ends at 9 - ln D, so eight at 8.7 - ln D gain 0.3, wherever one loop's runs surround D."""
    rows = made(mus=(1, 8), budgets=(1e18, 4e18, 16e18))
    rows["loss"] = np.where(rows.mu_rec == 8, 8.7, 9) - np.log(rows.tokens / 1e9)
    *_, row, end = scaling_laws.equal_tokens_table(good(rows))
    looped = rows[rows.mu_rec == 8].tokens
    between = looped[looped > rows[rows.mu_rec == 1].tokens.min()]
    assert 0 < len(between) < 3 and end == ""
    assert row == f"| 8 | {' | '.join(f'0.3000 at {D:.2g}' for D in between)} |"
    assert scaling_laws.equal_tokens_table(good(rows[rows.mu_rec == 8])) == []


def test_exponential_curve_is_recovered_and_beats_its_rivals():
    rows = []
    for mu in (2, 6, 8, 12):
        for T in range(1, 25):
            rows.append(
                {
                    "run": f"m{mu}",
                    "mu_rec": mu,
                    "depth": T,
                    "budget": 1,
                    "n_eff": mu,
                    "loss": 3 + 0.8 * math.exp(-4 * T / mu),
                }
            )
    rows = pd.DataFrame(rows).assign(best=3 + 0.8 * math.exp(-4))
    found = laws.fit_curves(rows)
    for c in found["curves"]:
        f = c["L + Z exp(-zT)"]
        assert (f["E"], f["Z"], f["z"]) == pytest.approx((3.0, 0.8, 4.0 / c["mu_rec"]), rel=1e-5)
    for score in ("huber", "huber beyond mu"):
        values = [found["table"][name][score] for name in laws.FORMS]
        assert values[0] < 1e-12 and values == sorted(values)  # the order of the paper's table


def test_unified_law_recovers_its_coefficients_needs_mu_and_predicts_runs_it_has_not_seen():
    rows = made(depths=(1, 2, 4, 16), budgets=(1e18, 4e18, 16e18))
    f = fitted(rows, "unified depth/mu")
    truth = [*np.exp(laws.PAPER["parcae-140m"][:5]), 6, 6]
    assert list(f["law"].values()) == pytest.approx(truth, rel=1e-4)
    assert fitted(rows, "unified depth/mu^gamma")["law"]["gamma"] == pytest.approx(1, abs=1e-4)
    assert f["errors"]["percent"] < 1e-3 and fitted(rows, "unified depth")["errors"]["percent"] > 1
    expected = 600 * math.exp(-6) / rows.loss  # measured at T = mu, the floor holds Z e^-z too
    assert f["errors"]["oracle percent"] == pytest.approx(expected.mean(), rel=1e-3)
    assert f["errors"]["largest oracle percent"] == pytest.approx(expected.max(), rel=1e-3)
    higher = rows.assign(loss=rows.loss * np.where(rows.flops > 8e18, 1.02, 1))
    off = fitted(higher, "unified depth/mu")["without"]
    assert list(off) == [1e18, 4e18, 16e18] and off[1e18]["percent"] > 0.1
    # the law of the other two budgets is the true one
    assert off[16e18]["percent"] == pytest.approx(2 / 1.02, rel=1e-3)
    assert off[16e18]["largest percent"] == pytest.approx(2 / 1.02, rel=1e-3)
    unseen = good(made(depths=(1, 2, 20), mus=(8,), budgets=(64e18,)))
    errors = laws.prediction_errors(f["logs"][0], unseen)
    assert errors["largest percent"] < 1e-3
    errors = laws.prediction_errors(
        f["logs"][0], unseen.assign(loss=unseen.loss * [1.03, 1, 1, 1.01])
    )
    assert errors["percent"] == pytest.approx(100 * (0.03 / 1.03 + 0.01 / 1.01) / 4, rel=1e-3)
    assert errors["largest percent"] == pytest.approx(100 * 0.03 / 1.03, rel=1e-3)


def test_all_figures_and_the_held_out_table_are_made(tmp_path):
    rows = made(noise=0.001, depths=(1, 2, 3, 4, 16), mus=(1, *MUS), budgets=(1e18, 4e18, 16e18))
    found = run_fit(tmp_path, rows, made(depths=(1, 2, 4, 20), mus=(8,), budgets=(64e18,)))
    assert found["unified depth/mu"]["held_out"]["largest percent"] < 1
    drawn = sorted(path.stem for path in (tmp_path / "out").glob("*.png"))
    assert drawn == ["isoflop", "optima", "test_time", "train", "unified"]
    text = (tmp_path / "out" / "fit.md").read_text()
    assert "| law | 1e+18 FLOPs | 4e+18 FLOPs | 1.6e+19 FLOPs |" in text
    assert "| unified depth, held-out runs |" in text and "| fixed depth 1 |" in text


def test_bad_runs_are_named_and_change_nothing(tmp_path, capsys):
    rows = made(noise=0.002, budgets=(1e18, 4e18, 16e18))
    clean = run_fit(tmp_path, rows)
    changes = {
        rows.run[0]: {"loss": 4.0},
        "boom": {"loss": 9.7},
        "no loss": {"loss": math.nan},
        "no tokens": {"tokens": -1},
        "bare": {"depth": 1},
    }
    bad = []
    for place, (name, change) in enumerate(changes.items()):
        bad.append(rows.iloc[place].to_dict() | {"run": name} | change)
    dirty = run_fit(tmp_path, pd.concat([rows, pd.DataFrame(bad)]))
    named = set(dirty["left_out"]) - set(clean["left_out"])
    assert {text.split(":")[0] for text in named} == {*changes}
    assert dirty["train"] == clean["train"] and dirty["isoflop"] == clean["isoflop"]
    assert "boom: a loss over 1.5 x the median" in capsys.readouterr().out


def test_runs_within_5_percent_share_a_budget():
    flops = pd.Series([1.25e17, 5e17, 1.2495e17, 2.5e17, 1.2505e17, 2.49e17])
    found = scaling_laws.budgets_of(flops)
    assert found.tolist() == [1.25e17, 5e17, 1.25e17, 2.5e17, 1.25e17, 2.5e17]
    spread = pd.Series(np.geomspace(1e17, 1e18, 240))
    groups = spread.groupby(scaling_laws.budgets_of(spread))
    assert (groups.max() / groups.min()).max() <= 1.05


def test_what_the_runs_cannot_support_is_refused_or_reported(tmp_path, capsys):
    one = run_fit(tmp_path, made(noise=0.002, budgets=(1e18,)))
    assert "train" not in one and not one["isoflop"]["power_laws"]
    assert "train: different runs, N, D, budgets" in capsys.readouterr().out
    page = (tmp_path / "out" / "fit.md").read_text()
    assert "isoflop.png" in page and "train.png" not in page
    rows = made()[:18]
    f = fitted(rows.assign(loss=2.5 + 25420 * rows.tokens**-0.525))  # no N in it
    assert {"A at a bound", "a at a bound"} & set(f["bounded"])
    assert {"interval of A ends at a bound", "interval of a ends at a bound"} & set(f["bounded"])
    assert f["law"]["b"] == pytest.approx(0.525, rel=1e-2)


def test_run_directories_are_read_at_their_last_evaluation(packed, tmp_path, capsys):
    sizes = "--vocab-size 300 --seq-len 32 --d-model 32 --d-mlp 64 --batch-size 12 --dtype float32"
    length = "--eval-tokens 1000 --tokens 4608 --mu-rec 4 --eval-depths 1,4"
    run = tmp_path / "run"
    line = [*sizes.split(), *length.split(), "--data", packed, "--out", run]
    run_program("train.py", *line)
    rows = good(scaling_laws.rows_of_path(run))
    last = read_log(run / "log.jsonl").evals[-1]
    assert dict(zip(rows.depth, rows.loss)) == last["loss"] and set(rows.depth) == {1, 4}
    assert set(rows.best) == {last["loss"][4]} and set(rows.tokens) == {4608}
    scaling_laws.main(["fit", str(run), "--out", str(tmp_path / "fit")])
    assert "left out: train: different runs, N, D, budgets: [1, 1, 1, 1]" in capsys.readouterr().out
    (run / "log.jsonl").write_text("")
    refused(capsys, lambda: scaling_laws.main(["fit", str(run)]), "is no finished run")


def test_a_table_of_anyones_numbers_is_read(tmp_path, capsys):
    rows = made()[:4][scaling_laws.ROW]
    file = tmp_path / "mine.csv"
    rows.assign(note="theirs").to_csv(file, index=False)
    read = scaling_laws.rows_of_path(file)
    assert list(read) == scaling_laws.ROW and np.allclose(
        read[read.columns[1:]], rows[read.columns[1:]]
    )
    for bad in (rows.drop(columns="loss"), rows.assign(mu_rec="x")):
        bad.to_csv(file, index=False)
        refused(
            capsys, lambda: scaling_laws.rows_of_path(file), "mine.csv is no table with the columns"
        )


def test_advice_is_measured_optima_and_what_their_power_law_gives(tmp_path, capsys):
    argv = ["advise", "--flops", "2e18", "--preset", "parcae-140m"]
    scaling_laws.main(argv)
    *measured, power_law, law, command = capsys.readouterr().out.splitlines()
    optima = {1e18: 2, 2e18: 2, 4e18: 4, 8e18: 6, 16e18: 8, 64e18: 10}
    for (flops, mu), line in zip(optima.items(), measured, strict=True):
        assert line == f"measured, the paper: mu_rec {mu} at {flops:.3g} FLOPs"
    scale = np.mean([math.log(mu / C**0.40) for C, mu in optima.items()])
    power = math.exp(scale) * 2e18**0.40
    mu = round(power)
    assert power_law == f"power law C^0.40: mu_rec {power:.3g} at 2e+18 FLOPs"
    D = 2e18 / laws.config_at("parcae-140m", mu).flops_per_token()
    N = readings("parcae-140m", mu)["unrolled"]
    score = 2.662 + 522733.307 * N**-0.771 + 25420.102 * D**-0.525
    assert f"loss {score:.4f}" in law and f"{D:.4g} tokens" in law
    assert command == f"python train.py --preset parcae-140m --mu-rec {mu} --flops 2e+18"
    scaling_laws.main([*argv[:2], "1e16", *argv[3:]])
    said = capsys.readouterr().out
    assert "beyond the measured budgets" in said and "--mu-rec 2 " in said

    run_fit(tmp_path, made(noise=0.0005, budgets=(1e18, 4e18, 16e18)))
    file = ["--fit", str(tmp_path / "out" / "fit.json")]
    refused(capsys, lambda: scaling_laws.main([*argv, "--preset", "nano"]), "the paper has no law")
    other = [*argv, "--preset", "parcae-370m", *file]
    refused(capsys, lambda: scaling_laws.main(other), "is of another model")


def test_lines_of_the_ledger_give_the_rows_of_their_runs():
    cfg = laws.config_at("nano", 4)
    line = {
        "settings": dataclasses.asdict(cfg) | {"seed": 3},
        "run": "a",
        "tokens": 4096,
        "flops_per_token": 1e3,
    }
    rows = scaling_laws.rows_of([line | {"loss": {1: 5.0, 4: 4.0}}])
    want = SimpleNamespace(
        run="a", mu_rec=4, tokens=4096, flops=4096e3, n_eff=laws.effective_params(cfg)
    )
    for name, value in vars(want).items():
        assert list(rows[name]) == [value, value]
    assert dict(zip(rows.depth, rows.loss)) == {1: 5.0, 4: 4.0}


def test_equal_tokens_are_beside_the_mean_of_one_loops_seeds():
    tokens = [1e6, 1e6, 4e6, 4e6, 2e6]
    losses = [5.0, 4.0, 2.0, 3.0, 3.0]
    mu = [1, 1, 1, 1, 8]
    rows = pd.DataFrame(
        {"mu_rec": mu, "depth": mu, "tokens": tokens, "loss": losses, "budget": 1.0}
    )
    assert "0.5000 at 2e+06" in scaling_laws.equal_tokens_table(rows)[-2]


def test_papers_optima_and_half_of_mu_rec_with_gradient():
    assert [laws.config_at("parcae-140m", mu).mu_bwd for mu in (2, 7, 8)] == [1, 4, 4]
    assert laws.PAPER_OPTIMA["parcae-370m"] == {32e18: 4, 64e18: 6, 128e18: 6}


def test_an_interval_is_of_95_percent():
    low, fit, high = laws.low_fit_high(np.array([7.0, *range(1001)]))
    assert (low, fit, high) == (25, 7, 975)


def test_the_slope_is_of_a_doubling():
    losses = {"loss": [4.0, 3.9, 3.8, 3.7], "tokens": [4.0, 3.0, 2.0, 1.0]}
    rows = pd.DataFrame({"budget": 1.0, "mu_rec": [2, 4, 8, 16], **losses})
    (found,) = laws.fit_isoflop(rows, np.random.default_rng(0), [])["budgets"]
    assert found["slope"] == pytest.approx(-0.1)


def test_the_best_depths_interval_is_as_wide_as_fits_scatter():
    """The bootstrap's spread, on average over runs made anew, against that of their fits."""
    fits, variances = [], []
    mu = np.array([2, 3, 4, 6, 8, 12])
    for seed in range(200):
        rng = np.random.default_rng(seed)
        losses = 3 + 0.05 * (np.log2(mu) - 2.5) ** 2 + 1e-3 * rng.standard_normal(6)
        rows = pd.DataFrame({"budget": 1.0, "mu_rec": mu, "loss": losses, "tokens": 12.0 / mu})
        (found,) = laws.fit_isoflop(rows, rng, [])["budgets"]
        first, *drawn = np.log(found["mu"])
        fits.append(first)
        variances.append(np.var(drawn))
    assert 0.85 < np.sqrt(np.mean(variances)) / np.std(fits) < 1.15


def test_resamples_are_of_whole_runs(monkeypatch):
    rows = good(made(depths=(1, 2, 4, 16), budgets=(1e18, 4e18, 16e18)))
    resamples = []
    real = laws.Problem.descend

    def descend(self, start, some=slice(None), **limits):
        if isinstance(some, np.ndarray) and some.dtype != bool:
            resamples.append(rows.run.iloc[some].value_counts())
        return real(self, start, some, **limits)

    monkeypatch.setattr(laws.Problem, "descend", descend)
    laws.fit_law(rows, np.random.default_rng(0), "train")
    whole = rows.run.value_counts()
    assert len(resamples) == laws.RESAMPLES
    assert all((counts % whole[counts.index] == 0).all() for counts in resamples)


def test_forms_are_fitted_up_to_depth_mu_and_predict_what_is_beyond():
    depth = np.array([1.0, 2, 3, 8, 9])
    loss = np.where(depth <= 3, 4 * depth**-0.5, 1)
    run = {"run": "r", "mu_rec": 3, "n_eff": 1, "budget": 1}
    rows = pd.DataFrame({**run, "depth": depth, "loss": loss, "best": 1.0})
    found = laws.fit_curves(rows)["table"]["Z depth^-z"]["huber beyond mu"]
    assert found == pytest.approx(laws.huber_on_log(4 * depth[3:] ** -0.5, 1.0).mean())


def test_a_loss_of_over_one_and_a_half_medians_is_left_out():
    rows = made(budgets=(1e18,))
    rows.loc[0, "loss"] = 1.6 * rows.loss.median()
    left = []
    scaling_laws.prepared(rows, left)
    assert len(left) == 1


def test_one_loop_in_training_is_in_no_fit():
    rows = made(noise=0.002, mus=(1, *MUS), budgets=(1e18, 4e18, 16e18))
    unseen = good(rows[:0])
    first = scaling_laws.fit_all(good(rows), [], unseen)
    rows.loc[rows.mu_rec == 1, "loss"] *= 1.2
    second = scaling_laws.fit_all(good(rows), [], unseen)
    assert first["train"]["law"] == second["train"]["law"]


def test_the_law_of_training_is_held_out_at_mu_rec_alone(tmp_path):
    unseen = made(depths=(1, 2, 4), mus=(8,), budgets=(64e18,))
    N, D = unseen.n_eff[0], unseen.tokens[0]
    unseen.loc[unseen.depth == 8, "loss"] = laws.law_loss(laws.PAPER["parcae-140m"], N, D)
    found = run_fit(tmp_path, made(budgets=(1e18, 4e18, 16e18)), unseen)
    assert found["train"]["held_out"]["largest percent"] < 0.01


def test_advice_of_a_fit_is_of_its_optima_inside_and_within_its_grid(tmp_path, capsys):
    n_eff = {}
    for mu in MUS:
        n_eff[str(mu)] = laws.effective_params(laws.config_at("parcae-140m", mu))
    budgets = []
    for flops, mu, inside in ((1e18, 2.0, False), (4e18, 4.0, True), (16e18, 8.0, True)):
        budgets.append({"budget": flops, "mu": [mu], "inside": inside})
    power_laws = {"mu": [[0.5], [math.log(4 / 2e9)]], "tokens": [[9], [9]]}
    isoflop = {"budgets": budgets, "power_laws": power_laws}
    logs = [laws.PAPER["parcae-140m"].tolist()]
    file = tmp_path / "fit.json"
    file.write_text(json.dumps({"n_eff": n_eff, "isoflop": isoflop, "train": {"logs": logs}}))
    line = ["advise", "--preset", "parcae-140m", "--fit", str(file), "--flops"]
    for flops, mu in (("4e18", 4), ("1e22", 12)):
        scaling_laws.main([*line, flops])
        said = capsys.readouterr().out
        assert f"--mu-rec {mu} " in said.splitlines()[-1]
        assert "mu_rec 2 at 1e+18 FLOPs, an end of the grid\n" in said
        assert "mu_rec 4 at 4e+18 FLOPs\n" in said and "mu_rec 8 at 1.6e+19 FLOPs\n" in said
    budgets[1]["inside"] = False
    file.write_text(json.dumps({"n_eff": n_eff, "isoflop": isoflop, "train": {"logs": logs}}))
    refused(capsys, lambda: scaling_laws.main([*line, "4e18"]), "has no power law")
