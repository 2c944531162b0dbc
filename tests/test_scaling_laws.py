"""The fits against data made from known laws, against torch's L-BFGS, and against the paper's own numbers."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
import torch

from model import PRESETS
from studies import laws

# E, A, a, B, b (the paper's appendix "Fitting a Parametric Function for Looping")
PAPER = {
    "parcae-140m": [2.662, 522733.307, 0.771, 25420.102, 0.525],
    "parcae-370m": [2.439, 832134.346, 0.775, 6386.865, 0.448],
}
BUDGETS = {"parcae-140m": (1e18, 2e18, 4e18, 8e18, 16e18, 64e18), "parcae-370m": (32e18, 64e18, 128e18)}  # fmt: skip
MUS = (2, 4, 6, 8, 10, 12)


@pytest.fixture(autouse=True)
def few_restarts(monkeypatch):
    monkeypatch.setattr(laws, "RESTARTS", 6)
    monkeypatch.setattr(laws, "KEPT", 2)
    monkeypatch.setattr(laws, "RESAMPLES", 8)


def config_at(preset, mu):
    return dataclasses.replace(PRESETS[preset], mu_rec=mu, mu_bwd=0)


def paper_loss(preset, N, D):
    E, A, a, B, b = PAPER[preset]
    return E + A * N**-a + B * D**-b


def made(preset="parcae-140m", noise=0.0, seed=0, depths=(), mus=MUS, budgets=None, phi=1):
    """Runs that obey the paper's law times exp(noise x normal), a draw per run; depths add 6 exp(-6 T/mu)."""
    rng = np.random.default_rng(seed)
    rows = []
    for budget in budgets or BUDGETS[preset]:
        for mu in mus:
            cfg = config_at(preset, mu)
            once, rec = laws.sizes(cfg)
            tokens = budget / cfg.flops_per_token()
            floor = paper_loss(preset, once + mu**phi * rec, tokens)
            floor *= math.exp(noise * rng.standard_normal())
            for T in sorted({mu, *depths}):
                decay = 6 * math.exp(-6 * T / mu) if depths else 0
                run = [f"{budget:g}-{mu}", mu, tokens, budget, once, rec]
                rows.append([*run, T, floor + decay])
    return laws.prepared(pd.DataFrame(rows, columns=laws.ROW))


def fitted(rows, name="train", seed=0):
    return laws.fit_law(rows, np.random.default_rng(seed), name)


def values(fit):
    """Its fitted parameters."""
    known = dict(zip(laws.BOX, np.exp(fit["logs"][0])))
    return {key: known[key] for key in fit["free"]}


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
    held_out = {"parcae-140m": (11.2e9, 19.06, 1.3), "parcae-370m": (29.6e9, 14.49, 0.8)}
    for preset, (tokens, perplexity, stated) in held_out.items():
        for name, N in readings(preset, 8).items():
            error = 100 * (paper_loss(preset, N, tokens) / math.log(perplexity) - 1)
            off[name] += abs(abs(error) - stated)
        once, rec = laws.sizes(config_at(preset, 8))
        assert once + 8 * rec == readings(preset, 8)["unrolled"]
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
    rows = made(noise=0.002, seed=3)
    found = laws.Problem(rows, "train").solve(np.random.default_rng(0))
    starts = [(0.9, -2.0, -0.4, -2.0, -0.7), (0.5, -1.0, 0.0, -1.0, 0.0)]
    N, D, loss = np.log(rows[["n_eff", "tokens", "loss"]].to_numpy().T)
    tensors = [torch.tensor(v) for v in (N - N.mean(), D - D.mean(), loss)]
    lowest, q = min((lbfgs(*tensors, start) for start in starts), key=lambda b: b[0])
    assert found.cost == pytest.approx(lowest, rel=1e-5)
    # flat valley: 1e-5 in cost is 1e-3 in the exponents' logs
    np.testing.assert_allclose(found.x, q, atol=5e-3)


@pytest.mark.parametrize("preset", PAPER)
def test_paper_coefficients_are_recovered(preset):
    truth = dict(zip("EAaBb", PAPER[preset]))
    f = fitted(made(preset))
    assert values(f) == pytest.approx(truth, rel=1e-5) and not f["bounded"]
    # what the law is for, a loss held out, with 0.2 % of noise
    once, rec = laws.sizes(config_at(preset, 8))
    tokens = {"parcae-140m": 11.2e9, "parcae-370m": 29.6e9}[preset]
    unseen = {"n_once": once, "n_rec": rec, "mu_rec": 8, "depth": 8, "tokens": tokens}
    f = fitted(made(preset, 0.002, seed=1), seed=1)
    loss = paper_loss(preset, once + 8 * rec, tokens)
    assert laws.law_loss(f["logs"][0], unseen) == pytest.approx(loss, rel=0.003)


def test_the_exponent_of_recurrence_is_recovered():
    rows = made(mus=(1, 2, 4, 8), phi=0.46, budgets=(1e18, 4e18, 16e18))
    assert fitted(rows, "train, phi")["logs"][0, -1] == pytest.approx(math.log(0.46), abs=1e-3)


def test_parabolas_and_power_laws_are_recovered():
    """Losses that are parabolas with minima at mu* = k C^0.4 and tokens D = C / (c mu), so that D* = C^0.6 / (c k)."""
    budgets = np.array([1e15, 4e15, 1.6e16, 1e18])
    C, mu = (v.ravel() for v in np.meshgrid(budgets, [2, 4, 8, 16, 32], indexing="ij"))
    depth = np.log2(mu / (4e-6 * C**0.4))  # the last budget's lowest is off the grid
    rows = pd.DataFrame({"budget": C, "mu_rec": mu, "tokens": C / (1e6 * mu)})
    rows["loss"] = 3 - 0.1 * np.log10(C) + 0.05 * depth**2
    fixed = pd.DataFrame({"budget": budgets, "mu_rec": 1, "tokens": budgets / 1e6, "loss": 9.0})
    iso = laws.fit_isoflop(pd.concat([rows, fixed]), np.random.default_rng(0))
    exponents = [line[0][0] for line in iso["power_laws"].values()]
    assert exponents == pytest.approx([0.4, 0.6], abs=1e-9)
    assert [b["inside"] for b in iso["budgets"]] == [True, True, True, False]
    best = [b["mu"][0] for b in iso["budgets"]]
    assert best == pytest.approx([*(4e-6 * budgets[:3] ** 0.4), 32])
    assert iso["budgets"][0]["slope"] == pytest.approx(
        np.polyfit(np.arange(1, 6), rows.loss[:5], 1)[0]
    )
    # beside the parabola, not in it
    assert iso["fixed_depth"].to_dict() == dict.fromkeys(budgets, 9.0)


def test_the_best_depths_interval_is_as_wide_as_fits_scatter():
    """The bootstrap's spread, on average over runs made anew, against that of their fits."""
    fits, variances = [], []
    mu = np.array([2, 3, 4, 6, 8, 12])
    for seed in range(100):
        rng = np.random.default_rng(seed)
        losses = 3 + 0.05 * (np.log2(mu) - 2.5) ** 2 + 1e-3 * rng.standard_normal(6)
        rows = pd.DataFrame({"budget": 1.0, "mu_rec": mu, "loss": losses, "tokens": 12.0 / mu})
        (found,) = laws.fit_isoflop(rows, rng)["budgets"]
        first, *drawn = np.log(found["mu"])
        fits.append(first)
        variances.append(np.var(drawn))
    assert 0.8 < np.sqrt(np.mean(variances)) / np.std(fits) < 1.2


def test_gain_at_equal_tokens_is_that_over_one_loop_between_its_runs():
    tokens = [1e6, 1e6, 4e6, 4e6, 2e6]
    losses = [5.0, 4.0, 2.0, 3.0, 3.0]
    mu = [1, 1, 1, 1, 8]
    rows = pd.DataFrame(
        {"mu_rec": mu, "depth": mu, "tokens": tokens, "loss": losses, "budget": 1.0}
    )
    assert "0.5000 at 2e+06" in laws.equal_tokens_table(rows)[-2]
    assert laws.equal_tokens_table(rows[4:]) == []


def test_exponential_curve_is_recovered_and_beats_its_rivals():
    rows = []
    for mu, T in ((mu, T) for mu in (2, 6, 8, 12) for T in range(1, 25)):
        rows.append(
            {"run": f"m{mu}", "mu_rec": mu, "depth": T, "loss": 3 + 0.8 * math.exp(-4 * T / mu)}
        )
    curves, table = laws.fit_curves(pd.DataFrame(rows).assign(best=3 + 0.8 * math.exp(-4)))
    for mu in (2, 6, 8, 12):
        f = curves[f"m{mu}"]["L + Z exp(-zT)"]
        assert (f["E"], f["Z"], f["z"]) == pytest.approx((3.0, 0.8, 4.0 / mu), rel=1e-5)
    for score in ("huber", "huber beyond mu"):
        values = table[score].tolist()
        assert values[0] < 1e-12 and values == sorted(values)  # the order of the paper's table


def test_unified_law_recovers_its_coefficients_needs_mu_and_predicts_runs_it_has_not_seen():
    rows = made(depths=(1, 2, 4, 16), budgets=(1e18, 4e18, 16e18))
    f = fitted(rows, "unified depth/mu")
    assert list(values(f).values()) == pytest.approx([*PAPER["parcae-140m"], 6, 6], rel=1e-4)
    errors = laws.prediction_errors(f["logs"][0], rows)
    without_mu = fitted(rows, "unified depth")["logs"][0]
    assert errors["percent"] < 1e-3 and laws.prediction_errors(without_mu, rows)["percent"] > 1
    expected = 600 * math.exp(-6) / rows.loss  # measured at T = mu, the floor holds Z e^-z too
    assert errors["oracle percent"] == pytest.approx(expected.mean(), rel=1e-3)
    unseen = made(depths=(1, 2, 20), mus=(8,), budgets=(64e18,))
    wrong = unseen.assign(loss=unseen.loss * [1.03, 1, 1, 1.01])
    errors = laws.prediction_errors(f["logs"][0], wrong)
    assert errors["percent"] == pytest.approx(100 * (0.03 / 1.03 + 0.01 / 1.01) / 4, rel=1e-3)
    assert errors["largest percent"] == pytest.approx(100 * 0.03 / 1.03, rel=1e-3)


def test_the_page_has_all_figures_and_the_held_out_table(tmp_path, monkeypatch):
    monkeypatch.setattr(laws, "RESTARTS", 4)
    monkeypatch.setattr(laws, "RESAMPLES", 4)
    rows = made(noise=0.001, depths=(1, 2, 3), mus=(1, 2, 4, 6, 8, 12), budgets=(1e18, 4e18, 16e18))
    unseen = made(depths=(1, 2, 4, 20), mus=(8,), budgets=(64e18,))
    laws.write_fit(rows[laws.ROW], unseen[laws.ROW], tmp_path)
    drawn = sorted(path.stem for path in tmp_path.glob("*.png"))
    assert drawn == ["isoflop", "optima", "test_time", "train", "unified"]
    text = (tmp_path / "fit.md").read_text()
    assert "| unified depth, held-out runs |" in text and "| fixed depth 1 |" in text


def test_what_the_runs_cannot_tell_is_said():
    few = made(noise=0.002, budgets=(1e18,))
    fits, _ = laws.fit_laws(few, few[:0], np.random.default_rng(0))
    assert not fits
    rows = made()[:18]
    f = fitted(rows.assign(loss=2.5 + 25420 * rows.tokens**-0.525))  # no N in it
    assert {"A", "a"} & set(f["bounded"])
    assert values(f)["b"] == pytest.approx(0.525, rel=1e-2)


def test_runs_within_5_percent_share_a_budget():
    flops = pd.Series([1.25e17, 5e17, 1.2495e17, 2.5e17, 1.2505e17, 2.49e17])
    found = laws.budgets_of(flops).sort_index()
    assert found.tolist() == [1.25e17, 5e17, 1.25e17, 2.5e17, 1.25e17, 2.5e17]


def test_an_interval_is_of_95_percent():
    assert laws.span(np.array([7.0, *range(1001)])) == "7 [25, 975]"


def test_lines_of_the_ledger_give_the_rows_of_their_runs():
    cfg = config_at("nano", 4)
    line = {"settings": dataclasses.asdict(cfg), "run": "a", "tokens": 4096, "flops_per_token": 1e3}
    rows = laws.rows_of([line | {"loss": {1: 5.0, 4: 4.0}}])
    assert rows.iloc[1].tolist() == ["a", 4, 4096, 4096e3, *laws.sizes(cfg), 4, 4.0]
    assert laws.prepared(rows).best.tolist() == [4.0, 4.0]
