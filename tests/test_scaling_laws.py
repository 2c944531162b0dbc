"""The fits against data made from known laws, against torch's L-BFGS, and against the paper's own numbers."""

import csv
import dataclasses
import json
import math

import numpy as np
import pytest
import torch

import scaling_laws as laws
from model import PRESETS
from train import parse_args as train_args

PAPER_GRID = {  # budgets, and the held-out run: tokens, perplexity, stated error in %
    "parcae-140m": ((1e18, 2e18, 4e18, 8e18, 16e18, 64e18), 11.2e9, 19.06, 1.3),
    "parcae-370m": ((32e18, 64e18, 128e18), 29.6e9, 14.49, 0.8),
}
MUS = (2, 4, 6, 8, 10, 12)


def made(preset, noise=0.0, seed=0, Z=0.0, z=6.0, depths=(), mus=MUS, budgets=None):
    """Rows, as `load` returns them, of runs that obey the paper's law (times exp(noise x normal), one draw per run)."""
    rng, rows = np.random.default_rng(seed), []
    for C in budgets or PAPER_GRID[preset][0]:
        for mu in mus:
            cfg = laws.at_mu(preset, mu)
            N, D = laws.effective_params(cfg), C / cfg.flops_per_token()
            floor = laws.predict(laws.PAPER[preset], N, D) * math.exp(noise * rng.standard_normal())
            for T in sorted({mu, *depths}):
                loss = floor + Z * math.exp(-z * T / mu)
                rows.append({"run": f"{C:g}-{mu}", "mu": mu, "tokens": D, "n_eff": N, "flops": C, "depth": T,
                             "loss": loss, "budget": C})
    return rows


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["run", "mu_rec", "tokens", "flops", "depth", "loss"])
        out.writerows([[r[k] for k in ("run", "mu", "tokens", "flops", "depth", "loss")] for r in rows])
    return str(path)


def run_fit(tmp_path, *argv):
    """`fit` as from the command line -> the contents of its fit.json."""
    laws.fit(laws.parse_args(["fit", *map(str, argv), "--out", str(tmp_path / "out")]))
    return json.loads((tmp_path / "out" / "fit.json").read_text())


# -- the reading of N(mu) ---------------------------------------------------------------------------------------------


def readings(preset, mu):
    """N(mu) by hand, from the paper's tables: width d, L layers per part, vocabulary 32768, value gates 32 wide."""
    cfg = PRESETS[preset]
    d, L, V = cfg.d_model, cfg.n_core, 32768
    block, table, gate = 12 * d * d + 2 * d, V * d, 32 * cfg.n_head  # L is even: half of each part's layers have tables
    core, once = L * block + L // 2 * gate + d * d + 2 * d, 2 * L * block + L * gate + d * d + 2 * d
    return {
        "unrolled": table + once + L * table + mu * (core + L // 2 * table),  # everything
        "tables once": table + once + L * table + mu * core + L // 2 * table,
        "no token table": once + L * table + mu * core + L // 2 * table,
        "matrices": 12 * d * d * L * (2 + mu) + (1 + mu) * d * d,
        "matrices and head": 12 * d * d * L * (2 + mu) + (1 + mu) * d * d + table,
        "stored": table + once + L * table + core + L // 2 * table,
    }


def test_effective_parameters_equal_the_hand_count():
    for preset in PAPER_GRID:
        for mu in (2, 8):
            assert laws.effective_params(laws.at_mu(preset, mu)) == readings(preset, mu)["unrolled"]
    assert laws.effective_params(laws.at_mu("parcae-140m", 1)) == 144_323_136  # the paper's parameter counts
    assert laws.effective_params(laws.at_mu("parcae-370m", 1)) == 388_003_328


def test_unrolled_reading_is_nearest_to_the_papers_stated_errors():
    error = {}
    for preset, (_, D, perplexity, _) in PAPER_GRID.items():
        for name, N in readings(preset, 8).items():
            error.setdefault(name, []).append(100 * (laws.predict(laws.PAPER[preset], N, D) / math.log(perplexity) - 1))
    expected = {"unrolled": (-1.16, -1.07), "tables once": (0.87, 0.23), "no token table": (1.38, 0.38),
                "matrices": (3.84, 1.63), "matrices and head": (2.81, 1.36), "stored": (3.96, 2.96)}
    for name, pair in expected.items():
        assert error[name] == pytest.approx(pair, abs=0.006), name
    off = {name: abs(abs(e[0]) - 1.3) + abs(abs(e[1]) - 0.8) for name, e in error.items()}
    assert min(off, key=off.get) == "unrolled"
    # The table prints three decimals of E, a, b: that is worth 0.13 %, so no plain reading meets both stated errors.
    assert not any(abs(abs(e[0]) - 1.3) < 0.18 and abs(abs(e[1]) - 0.8) < 0.18 for e in error.values())


# -- the solver -------------------------------------------------------------------------------------------------------


def test_jacobian_equals_central_differences():
    rng = np.random.default_rng(0)
    p, X, h = rng.normal(size=(3, 8)), rng.normal(size=(7, 4)), 1e-6
    J = laws.log_law(p, X)[1]
    for j in range(8):
        e = h * np.eye(8)[j]
        numeric = (laws.log_law(p + e, X)[0] - laws.log_law(p - e, X)[0]) / (2 * h)
        np.testing.assert_allclose(J[..., j], numeric, atol=1e-8)


def huber_by_torch(q, N, D, y):
    r = torch.log(torch.exp(q[0]) + torch.exp(q[1] - torch.exp(q[2]) * N) + torch.exp(q[3] - torch.exp(q[4]) * D)) - y
    return torch.nn.functional.huber_loss(r, torch.zeros_like(r), delta=1e-3, reduction="sum")


def test_batched_fit_reaches_the_minimum_of_torch_lbfgs():
    """The paper's optimiser, one start at a time, on our objective: never lower, and equal at its best start."""
    rows = made("parcae-140m", 0.002, 3)
    N, D, loss = laws.columns(rows, "n_eff", "tokens", "loss")
    X = np.stack([np.log(N / N.mean()), np.log(D / D.mean()), 0 * N, 0 * N], 1)
    p, cost, _ = laws.solve(X, np.log(loss), laws.TRAIN, np.random.default_rng(0))
    x1, x2, y = (torch.tensor(v) for v in (X[:, 0], X[:, 1], np.log(loss)))
    best = []
    for start in ((0.9, -2.0, -0.4, -2.0, -0.7), (0.5, -1.0, 0.0, -1.0, 0.0), (1.0, -3.0, -1.0, -1.0, -0.3)):
        q = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        lbfgs = torch.optim.LBFGS([q], max_iter=3000, history_size=50, tolerance_grad=1e-14, tolerance_change=1e-18,
                                  line_search_fn="strong_wolfe")

        def closure(lbfgs=lbfgs, q=q):
            lbfgs.zero_grad()
            value = 1e6 * huber_by_torch(q, x1, x2, y)  # a scale at which the tolerances mean something
            value.backward()
            return value

        lbfgs.step(closure)
        best.append((huber_by_torch(q, x1, x2, y).item(), q.detach().numpy()))
    assert cost[0] <= min(b[0] for b in best) * (1 + 1e-9)
    lowest, q = min(best, key=lambda b: b[0])
    assert cost[0] == pytest.approx(lowest, rel=1e-5)
    np.testing.assert_allclose(p[0, :5], q, atol=5e-3)  # flat valley: 1e-5 in cost is 1e-3 in the exponents' logs
    assert np.mean(cost < cost[0] * 1.001) > 0.5  # most of the kept restarts agree: no lucky start


# -- recovery at the paper's grid -------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PAPER_GRID)
def test_paper_coefficients_are_recovered_exactly_without_noise(preset):
    f = laws.fit_law(made(preset), np.random.default_rng(0), [], laws.TRAIN)
    for name, value in laws.PAPER[preset].items():
        assert f["law"][name] == pytest.approx(value, rel=1e-5), name
    assert f["at_bound"] == [] and max(f["left_out_budget_percent"].values()) < 1e-3


@pytest.mark.parametrize("preset, tolerance, held", [("parcae-140m", (0.05, 0.5, 0.07), 0.2),
                                                     ("parcae-370m", (1, 1, 0.7), 0.3)])
def test_coefficients_under_noise_lie_within_stated_tolerance(preset, tolerance, held):
    """Noise of 0.2 % in the loss. Tolerances: the largest relative error in E, a, b of 60 seeds, tried by hand (140M:
    4.5, 45, 6.7 %; 370M, three budgets: 90, 96, 63 %, so single coefficients mean little there). What the law is for,
    a held-out loss, was off by 0.15 and 0.23 % at worst, and its 95 % interval held in 95 and 92 % of the seeds."""
    D, cfg = PAPER_GRID[preset][1], laws.at_mu(preset, 8)
    truth, covered = laws.predict(laws.PAPER[preset], laws.effective_params(cfg), D), 0
    for seed in range(3):
        f = laws.fit_law(made(preset, 0.002, seed), np.random.default_rng(seed), [], laws.TRAIN)
        for name, t in zip(("E", "a", "b"), tolerance):
            assert f["law"][name] == pytest.approx(laws.PAPER[preset][name], rel=t), (name, seed)
        assert laws.predict(f["law"], laws.effective_params(cfg), D) == pytest.approx(truth, rel=held / 100)
        low, high = laws.interval(laws.predict(f["draws"], laws.effective_params(cfg), D))
        covered += low <= truth <= high
    assert covered >= 2


def test_parabolas_and_power_laws_are_recovered():
    """Losses that are parabolas with minima at mu* = k C^0.4 and tokens D = C / (c mu), so that D* = C^0.6 / (c k)."""
    rows = []
    for C in (1e15, 4e15, 1.6e16):
        for mu in (1, 2, 4, 8, 16):
            loss = 3 - 0.1 * math.log10(C) + 0.05 * (math.log2(mu) - math.log2(2e-6 * C**0.4)) ** 2
            rows.append({"run": f"{C}{mu}", "mu": mu, "tokens": C / (1e6 * mu), "loss": loss, "budget": C})
    rows += [r | {"run": "end" + r["run"], "budget": 1e18, "loss": 5 - math.log2(r["mu"])} for r in rows[:5]]
    left = []
    iso = laws.fit_isoflop(rows, np.random.default_rng(0), left)
    assert iso["power_laws"]["mu"]["gamma"] == pytest.approx(0.4, abs=1e-9)
    assert iso["power_laws"]["tokens"]["gamma"] == pytest.approx(0.6, abs=1e-9)
    for b in iso["budgets"][:3]:
        assert b["mu"] == pytest.approx(2e-6 * b["budget"] ** 0.4)
        assert b["tokens"] == pytest.approx(b["budget"] / (1e6 * b["mu"]))
    assert iso["budgets"][3]["mu"] == pytest.approx(16)
    assert left == [("budget 1e+18", "lowest at an end of the grid: not in the power laws")]


def test_exponential_curve_is_recovered_and_beats_its_rivals():
    T = range(1, 25)
    rows = [{"run": f"m{mu}", "mu": mu, "tokens": 1e9, "n_eff": 1e8, "budget": 1e18, "depth": t,
             "loss": 3.0 + 0.8 * math.exp(-4.0 * t / mu)} for mu in (2, 6, 8, 12) for t in T]  # fmt: skip
    left = []
    found = laws.fit_curves(rows, np.random.default_rng(0), left)
    for c in found["curves"]:
        f = c[laws.EXPONENTIAL]
        assert (f["E"], f["Z"], f["z"]) == pytest.approx((3.0, 0.8, 4.0 / c["mu"]), rel=1e-5)
    for score in ("huber", "huber_beyond_mu"):
        values = [found["table"][name][score] for name in laws.FORMS]
        assert values[0] < 1e-12 and values == sorted(values)  # the order of the paper's table
    assert [name for name, _ in left] == ["m2"]  # two depths up to mu_rec cannot be extrapolated


def test_unified_law_recovers_its_coefficients_and_needs_mu():
    rows = made("parcae-140m", Z=6.0, z=6.0, depths=(1, 2, 4, 16), budgets=(1e18, 4e18, 16e18))
    held = made("parcae-140m", Z=6.0, z=6.0, depths=(1, 4, 16), mus=(8,), budgets=(12e18,))
    kinds = [name for name in laws.LAWS if name != "train"]
    found = {name: laws.fit_law(rows, np.random.default_rng(0), held, *laws.LAWS[name]) for name in kinds}
    f = found["unified T/mu"]
    for name, value in (laws.PAPER["parcae-140m"] | {"Z": 6.0, "z": 6.0}).items():
        assert f["law"][name] == pytest.approx(value, rel=1e-4), name
    assert found["unified T/mu^gamma"]["law"]["gamma"] == pytest.approx(1, abs=1e-4)
    assert f["held_out"]["percent"] < 1e-3 and found["unified T"]["held_out"]["percent"] > 1
    # the oracle puts the measured loss at T = mu, which holds Z e^-z already, in place of the floor
    expected = np.mean([100 * 6 * math.exp(-6) / r["loss"] for r in held])
    assert f["held_out"]["oracle_percent"] == pytest.approx(expected, rel=1e-3)


# -- degenerate inputs, the command line ------------------------------------------------------------------------------


def test_bad_rows_are_named_and_change_nothing(tmp_path, capsys):
    rows = made("parcae-140m", 0.002, budgets=(1e18, 4e18, 16e18))
    clean = run_fit(tmp_path, write_csv(tmp_path / "clean.csv", rows), "--preset", "parcae-140m")
    changes = {"again": {}, "boom": {"loss": 9.7}, "nan": {"loss": math.nan}, "text": {"loss": "n/a"},
               "zero": {"tokens": 0}, "bare": {"depth": 1}}
    bad = [rows[1]] + [r | {"run": name} | change for r, (name, change) in zip(rows, changes.items())]
    dirty = run_fit(tmp_path, write_csv(tmp_path / "dirty.csv", rows + bad), "--preset", "parcae-140m")
    named = {name for name, _ in dirty["left_out"]} - {name for name, _ in clean["left_out"]}
    assert named == {"again", rows[1]["run"], "boom", "nan", "text", "zero", "bare"}
    assert dirty["train"] == clean["train"] and dirty["isoflop"] == clean["isoflop"]
    assert "boom: diverged: loss 9.700" in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"fit.json", "isoflop.png", "train.png"}


def test_what_the_runs_cannot_support_is_refused_with_its_reason(tmp_path, capsys):
    one = write_csv(tmp_path / "one.csv", made("parcae-140m", 0.002, budgets=(1e18,)))
    one = run_fit(tmp_path, one, "--preset", "parcae-140m")
    assert "train" not in one and one["isoflop"]["power_laws"] == {}
    assert ["train", "not fitted: it needs 2 values of budget (given: 1)"] in one["left_out"]
    few = write_csv(tmp_path / "few.csv", made("parcae-140m", budgets=(1e18, 2e18), mus=(2, 4)))
    other = tmp_path / "other.csv"  # a table that brings its own N, of another model
    other.write_text("mu_rec,tokens,flops,loss,n_eff\n2,1e9,1e18,3.0,1e9\n")
    preset = ("--preset", "parcae-140m")
    for argv, message in (((few, *preset), "no law can be fitted"), ((few,), "n_eff"),
                          ((few, other, *preset), "two models"), ((tmp_path / "none",), "no run or table")):
        with pytest.raises(SystemExit) as stop:
            run_fit(tmp_path, *argv)
        assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_parameter_at_its_bound_is_reported():
    """Losses that do not depend on N: the term in N goes to its floor and says so."""
    rows = [r | {"loss": 2.5 + 25420 * r["tokens"] ** -0.525} for r in made("parcae-140m")]
    f = laws.fit_law(rows, np.random.default_rng(0), [], laws.TRAIN)
    assert "A at its lower bound" in f["at_bound"] or "a at its lower bound" in f["at_bound"]
    assert f["law"]["b"] == pytest.approx(0.525, rel=1e-2)


def test_run_directories_are_read_at_their_last_final_evaluation(tmp_path):
    cfg = laws.at_mu("tiny", 4)
    config = {"args": {"flops": 1e12}, "model": dataclasses.asdict(cfg), "flops_per_token": cfg.flops_per_token()}
    for name, final in (("done", True), ("stopped", False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        lines = [{"kind": "train", "step": 1, "tokens": 4096, "loss": 8.0}]
        for step, loss in ((9, 5.0), (9, 4.0), (3, 7.0)):  # a resumed run repeats its last step
            lines.append({"kind": "eval", "step": step, "tokens": step * 4096, "loss": {"1": loss + 1, "4": loss},
                          "bpb": {}, "final": final and step == 9})
        (tmp_path / name / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"kind": "ev')
    rows, left = laws.load([tmp_path / "done", tmp_path / "stopped"])
    found = [tuple(r[k] for k in ("depth", "loss", "tokens", "budget", "mu")) for r in rows]
    assert found == [(1, 5.0, 36864, 1e12, 4), (4, 4.0, 36864, 1e12, 4)]
    assert [(name, "no final evaluation" in why) for name, why in left] == [(str(tmp_path / "stopped"), True)]


def test_advice_is_the_lowest_loss_of_the_law(tmp_path, capsys):
    argv = ["advise", "--flops", "2e18", "--preset", "parcae-140m"]
    laws.advise(laws.parse_args(argv))
    scores = {}
    for mu in range(1, 25):
        cfg = dataclasses.replace(PRESETS["parcae-140m"], mu_rec=mu, mu_bwd=-(-mu // 2))
        D, E, A, a, B, b = 2e18 / cfg.flops_per_token(), *laws.PAPER["parcae-140m"].values()
        scores[mu] = E + A / readings("parcae-140m", mu)["unrolled"] ** a + B / D**b
    best = min(scores, key=scores.get)
    assert f"mu_rec {best}, " in (said := capsys.readouterr().out) and f"loss {scores[best]:.4f}" in said
    run_fit(tmp_path, write_csv(tmp_path / "clean.csv", made("parcae-140m", 0.0005)), "--preset", "parcae-140m")
    capsys.readouterr()
    fitted = ["--fit", str(tmp_path / "out" / "fit.json")]
    laws.advise(laws.parse_args(argv + fitted))
    said = capsys.readouterr().out
    low, high = map(float, said.split("own noise): loss ")[1].split(",")[0].split(" to "))
    assert low <= scores[best] <= high and high - low < 0.01 and "extrapolation" not in said
    for wrong in (["--fit", str(tmp_path / "none")], ["--preset", "tiny"], ["--preset", "parcae-370m", *fitted]):
        with pytest.raises(SystemExit) as stop:
            laws.advise(laws.parse_args([*argv, *wrong]))
        assert stop.value.code == 2


def test_planned_commands_parse_and_spend_their_budgets(capsys):
    laws.plan(laws.parse_args(["plan", "--scale", "tiny"]))
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 24 and float(last.split(" hours")[0].split()[-1]) < 2
    for line in lines:
        command, comment = line.split("  # ")
        args = train_args(command.split()[2:])
        cfg = dataclasses.replace(PRESETS[args.preset], mu_rec=args.mu_rec, mu_bwd=-(-args.mu_rec // 2))
        assert float(comment.split()[0]) * cfg.flops_per_token() == pytest.approx(args.flops, rel=5e-3)  # three digits
        assert str(args.mu_rec) in args.eval_depths.split(",")
