"""
The scaling laws of looping (Parcae; Prairie et al. 2026), and their fits.

    L = E + A N(mu)^-a + B D^-b + Z exp(-z depth mu^-gamma)       nats per token

fitted by the Huber loss, delta 1e-3, on log L. Rows of data are a frame with a line for each
(run, depth) and the columns run, mu_rec, depth, tokens (D), flops and budget (the run's
FLOPs), n_eff (N), loss, and best (the run's loss at depth mu_rec). N(mu), "if you were to
unroll all loops into real parameters", counts every parameter, those in the loop (core blocks,
their value tables, A, dt, B) mu times: of the readings that the tests try, the one whose errors
come nearest to the paper's. mu_rec 1 is the fixed-depth baseline, in no fit.
"""

import math
from dataclasses import replace
from operator import attrgetter

import numpy as np
import pandas as pd
import torch
from scipy.optimize import least_squares
from scipy.special import huber

from model import PRESETS, Model

DELTA = 1e-3  # of the Huber loss on log loss
RESTARTS = 1000  # random starts of a law's fit; the paper: 500, and 1,000 for the unified law
KEPT = 20  # of them, descended to the end
RESAMPLES = 400  # of the bootstraps; the fit itself comes first in their arrays
EXACT = {"xtol": 1e-14, "ftol": 1e-14, "gtol": 1e-15, "max_nfev": 2000}  # where a fit ends
ZERO = 1e-22  # the fits work on logs: a term that is left out has this size

# Bounds, and range of the starts. E is relative to the lowest loss; A and B are the size of their
# term at the mean ln N and ln D.
BOX = {
    "E": (1e-3, 1.05, 0.3, 1),
    "A": (1e-5, 30, 0.01, 2),
    "a": (0.01, 4, 0.05, 1.5),
    "B": (1e-5, 30, 0.01, 2),
    "b": (0.01, 4, 0.05, 1.5),
    "Z": (1e-6, 1e3, 0.01, 10),
    "z": (1e-3, 50, 0.05, 5),
    "gamma": (0.05, 3, 0.5, 1.5),
}
PARAMS = list(BOX)
# The laws, by their last parameters, which are fixed; those before are fitted.
LAWS = {
    "train": [ZERO, ZERO, 1],  # no term of the depth
    "unified depth/mu": [1],
    "unified depth/mu^gamma": [],
    "unified depth": [ZERO],
}

# Forms of the loss by test-time depth: each is E + Z exp(-z t) of some t(depth).
FORMS = {
    "L + Z exp(-zT)": np.positive,
    "L + Z (1+depth)^-z": np.log1p,
    "L + Z depth^-z": np.log,
    "Z depth^-z": np.log,
}
WITHOUT_FLOOR = "Z depth^-z"

# E, A, a, B, b (the paper's appendix "Fitting a Parametric Function for Looping")
PAPER = {
    "parcae-140m": np.log([2.662, 522733.307, 0.771, 25420.102, 0.525, *LAWS["train"]]),
    "parcae-370m": np.log([2.439, 832134.346, 0.775, 6386.865, 0.448, *LAWS["train"]]),
}
# FLOPs: the measured best mu_rec (its table "Core Scores Comparison of Looping Optimal Frontier")
PAPER_OPTIMA = {
    "parcae-140m": {1e18: 2, 2e18: 2, 4e18: 4, 8e18: 6, 16e18: 8, 64e18: 10},
    "parcae-370m": {32e18: 4, 64e18: 6, 128e18: 6},
}
PAPER_EXPONENT = 0.40  # of the best mu_rec in the FLOPs


def config_at(preset: str, mu: int):
    """The preset's configuration at another mean recurrence, half of it with gradient."""
    return replace(PRESETS[preset], mu_rec=mu, mu_bwd=0)


def effective_params(cfg) -> int:
    """N(mu_rec): what a loop runs counts mu_rec times."""
    with torch.device("meta"):
        model = Model(cfg)
    loop = ["injection."]
    for i in model.core_layers:
        loop += [f"blocks.{i}.", f"ve.{i}."]
    count = 0
    for name, parameter in model.named_parameters():
        times = cfg.mu_rec if name.startswith(tuple(loop)) else 1
        count += times * parameter.numel()
    return count


# -- the law


def law_loss(logs, N, D, depth=1, mu=1):
    """The law; logs: of its eight parameters, which may be complex, or arrays of several laws'."""
    E, A, a, B, b, Z, z, gamma = np.exp(logs)
    size = A * N**-a
    data = B * D**-b
    loops = Z * np.exp(-z * depth * mu**-gamma)
    return E + size + data + loops


def predict(logs, rows):
    """A law's losses of the rows."""
    return law_loss(logs, rows.n_eff, rows.tokens, rows.depth, rows.mu_rec)


def predict_from_best(logs, rows):
    """The same with the measured loss at depth mu as their floor, the paper's oracle."""
    only_loops = [-np.inf, -np.inf, 0, -np.inf, 0, *logs[5:]]
    return rows.best + predict(only_loops, rows)


def low_fit_high(values):
    """The fit, which is values[0], between the 95 % interval of its bootstraps, values[1:]."""
    low, high = np.percentile(values[1:], [2.5, 97.5], axis=0)
    return low, values[0], high


# -- its fit


class Problem:
    """A law to fit to rows of data: its box, and descents from given starts."""

    def __init__(self, rows, name: str):
        self.fixed = np.log(LAWS[name])
        self.free = np.array(PARAMS[: len(PARAMS) - len(self.fixed)])
        self.rows = rows[["n_eff", "tokens", "depth", "mu_rec", "loss"]].to_numpy(float).T
        self.center = np.log(self.rows[:2]).mean(1)
        box = np.log([BOX[name] for name in self.free])
        box[0] += np.log(rows.loss.min())
        self.low, self.high, self.first, self.last = box.T

    def logs(self, q):
        """The logs of all parameters, from the free ones as they are fitted."""
        E, A, a, B, b, *others = [*q, *self.fixed]
        ln_N, ln_D = self.center
        A = A + np.exp(a) * ln_N
        B = B + np.exp(b) * ln_D
        return np.array([E, A, a, B, b, *others])

    def descend(self, start, rows=slice(None), **limits):
        """Huber fit to the given rows from one start -> scipy's result."""
        *sizes, loss = self.rows[:, rows]

        def residual(q):
            return np.log(law_loss(self.logs(q), *sizes) / loss)

        inside = np.clip(start, self.low + 1e-10, self.high - 1e-10)
        limits["bounds"] = (self.low, self.high)
        limits |= {"loss": "huber", "f_scale": DELTA}
        return least_squares(residual, inside, jac="cs", **limits)

    def solve(self, rng) -> list:
        """The KEPT best of RESTARTS random starts, descended to the end, best first."""
        starts = rng.uniform(self.first, self.last, (RESTARTS, len(self.free)))
        rough = [self.descend(start, method="dogbox", max_nfev=20) for start in starts]
        kept = sorted(rough, key=attrgetter("cost"))[:KEPT]
        found = [self.descend(result.x, **EXACT) for result in kept]
        return sorted(found, key=attrgetter("cost"))

    def at_bound(self, *solutions):
        """The parameters that stand at a bound in one of the solutions."""
        room = np.minimum(solutions - self.low, self.high - solutions)
        return self.free[room.min(0) < 1e-6]


def fit_law(rows, rng, name: str) -> dict:
    """Fits a law of LAWS; bootstrap over whole runs; each budget predicted from the others.

    -> law: its fitted parameters; bounded: what of them and their intervals the bounds decide, in
    words; logs (1 + RESAMPLES, 8) of all parameters, the fit and then the bootstraps; errors, and
    those of each budget as predicted without it.
    """
    problem = Problem(rows, name)
    best = problem.solve(rng)[0].x
    runs = list(rows.groupby("run", sort=False).indices.values())
    found = [best]
    for _ in range(RESAMPLES):
        drawn = rng.integers(len(runs), size=len(runs))
        sample = np.concatenate([runs[i] for i in drawn])
        found.append(problem.descend(best, sample, max_nfev=EXACT["max_nfev"]).x)
    bounded = [f"{name} at a bound" for name in problem.at_bound(best)]
    ends = np.quantile(found[1:], [0.025, 0.975], axis=0)
    bounded += [f"interval of {name} ends at a bound" for name in problem.at_bound(*ends)]
    logs = np.array([problem.logs(q) for q in found])
    without = {}
    for budget, unseen in rows.groupby("budget"):
        others = problem.descend(best, rows.budget != budget).x
        without[budget] = prediction_errors(problem.logs(others), unseen)
    return {
        "law": dict(zip(problem.free, np.exp(logs[0]))),
        "bounded": bounded,
        "logs": logs,
        "errors": prediction_errors(logs[0], rows),
        "without": without,
    }


def percent_off(guess, loss):
    return 100 * np.abs(guess / loss - 1)


def huber_on_log(guess, loss):
    """The Huber losses of the log losses."""
    return huber(DELTA, np.log(guess / loss))


def prediction_errors(logs, rows) -> dict[str, float]:
    """A law's mean and largest error in percent, and the sum of its Huber loss."""
    guess = predict(logs, rows)
    percent = percent_off(guess, rows.loss)
    oracle = percent_off(predict_from_best(logs, rows), rows.loss)
    return {
        "percent": percent.mean(),
        "largest percent": percent.max(),
        "oracle percent": oracle.mean(),
        "largest oracle percent": oracle.max(),
        "huber": huber_on_log(guess, rows.loss).sum(),
    }


# -- isoFLOP curves


def fit_isoflop(rows, rng, left: list[str]) -> dict:
    """Per budget the parabola of loss in log2 mu and its lowest point in the measured range; their
    power laws.

    rows: one a run, at depth mu_rec; intervals by a bootstrap of the parabolas' pooled
    residuals.
    """
    grids = []
    for budget, grid in rows[rows.mu_rec > 1].sort_values("mu_rec").groupby("budget"):
        if grid.mu_rec.nunique() < 4:
            left.append(f"budget {budget:.3g}: fewer than 4 values of mu_rec, no parabola")
            continue
        x = np.log2(grid.mu_rec)
        smooth = np.polyval(np.polyfit(x, grid.loss, 2), x)
        noise = grid.loss - smooth
        noise *= math.sqrt(len(x) / (len(x) - 3))  # three parameters took their share
        grids.append(grid.assign(x=x, smooth=smooth, noise=noise))
    budgets = [lowest_point(grid, pd.concat(grids).noise, rng) for grid in grids]
    inner = [found for found in budgets if found["inside"]]
    power_laws = {}
    if len(inner) > 1:
        log_flops = np.log([found["budget"] for found in inner])
        for name in ("mu", "tokens"):
            log_best = np.log([found[name] for found in inner])
            power_laws[name] = np.polyfit(log_flops, log_best, 1)  # exponent, ln k
    fixed = rows[rows.mu_rec == 1].groupby("budget").loss.mean()
    return {"budgets": budgets, "power_laws": power_laws, "fixed_depth": fixed.to_dict()}


def lowest_point(grid, noise, rng) -> dict:
    """A budget's best mu and tokens, the fit first and then RESAMPLES bootstraps; inside: whether
    the best is within the grid, not at an end of it.

    grid: its runs by x = log2 mu, with the parabola's losses "smooth"; noise: of all budgets' runs.
    """
    x, smooth = grid[["x", "smooth"]].to_numpy().T
    low, high = x[0], x[-1]
    drawn = smooth + rng.choice(noise, (RESAMPLES, len(x)))
    parabolas = np.polyfit(x, np.vstack([smooth, drawn]).T, 2)  # (3, 1 + RESAMPLES)
    bend, slope, _ = parabolas
    vertex = np.clip(-slope / (2 * bend), low, high)
    lower_end = np.where(bend * (low + high) + slope < 0, high, low)
    best = np.where(bend > 0, vertex, lower_end)
    log_tokens = np.interp(best, x, np.log(grid.tokens))
    fit = parabolas[:, 0]
    return {
        "budget": grid.budget.iloc[0],
        "mu": 2**best,
        "tokens": np.exp(log_tokens),
        "parabola": fit,
        "loss": np.polyval(fit, best[0]),
        "inside": bool(low < best[0] < high),
        "slope": np.polyfit(x, smooth, 1)[0],  # nats for each doubling of mu_rec
    }


# -- test-time curves


def form_value(name: str, depth, E, Z, z):
    return E + Z * np.exp(-z * FORMS[name](depth))


def fit_form(name: str, points) -> dict:
    """E, Z and z of a test-time form, by least squares on log loss."""
    depth, loss = points[["depth", "loss"]].to_numpy(float).T
    highest = 1e-9 if name == WITHOUT_FLOOR else np.inf

    def residual(q):
        return np.log(np.maximum(form_value(name, depth, *q), 1e-9) / loss)

    start = (min(loss.min(), highest / 2), loss[0] - loss.min(), 0.5)
    bounds = ([0, -np.inf, 1e-4], [highest, np.inf, 50])
    best = least_squares(residual, start, bounds=bounds, x_scale="jac", **EXACT).x
    return dict(zip(("E", "Z", "z"), best))


def form_misfit(name: str, fitted: dict, points) -> float:
    """The mean Huber loss of a fitted form on a run's points."""
    return huber_on_log(form_value(name, points.depth, **fitted), points.loss).mean()


def fit_curves(rows) -> dict:
    """Each run's loss against depth in the paper's four forms: the Huber loss in sample and, for
    fits to depths <= mu, beyond mu.
    """
    curves = []
    scores = []
    for run, points in rows.groupby("run", sort=False):
        first = points.iloc[0]
        near = points[points.depth <= first.mu_rec]
        beyond = points.drop(near.index)
        curve = {"run": run}
        curve |= first[["mu_rec", "n_eff", "budget"]].to_dict()
        curve |= points[["depth", "loss"]].to_dict("list")
        for name in FORMS:
            curve[name] = fit_form(name, points)
            score = {"form": name}
            score["huber"] = form_misfit(name, curve[name], points)
            score["floor off percent"] = percent_off(curve[name]["E"], first.best)
            if len(near) > 2 and len(beyond):
                early = fit_form(name, near)
                score["huber beyond mu"] = form_misfit(name, early, beyond)
            scores.append(score)
        curves.append(curve)
    by_form = pd.DataFrame(scores).groupby("form", sort=False)
    table = by_form.mean()
    table["largest floor off percent"] = by_form["floor off percent"].max()
    return {"curves": curves, "table": table.to_dict("index")}
