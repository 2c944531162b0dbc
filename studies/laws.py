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
from dataclasses import dataclass, field, replace
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


@dataclass
class Law:
    free: list[str]  # the fitted parameters
    gamma: float = 1.0  # where it is not one of them


LAWS = {
    "train": Law(PARAMS[:5]),
    "unified depth/mu": Law(PARAMS[:7]),
    "unified depth/mu^gamma": Law(PARAMS),
    "unified depth": Law(PARAMS[:7], ZERO),
}

# Forms of the loss by test-time depth: each is E + Z exp(-z t) of some t(depth).
FORMS = {
    "L + Z exp(-zT)": np.positive,
    "L + Z (1+depth)^-z": np.log1p,
    "L + Z depth^-z": np.log,
    "Z depth^-z": np.log,
}
WITHOUT_FLOOR = "Z depth^-z"

# E, A, a, B, b (the paper's appendix "Fitting a Parametric Function for Looping"), and no term of the depth
PAPER = {
    "parcae-140m": np.log([[2.662, 522733.307, 0.771, 25420.102, 0.525, ZERO, ZERO, 1]]),
    "parcae-370m": np.log([[2.439, 832134.346, 0.775, 6386.865, 0.448, ZERO, ZERO, 1]]),
}
# FLOPs: the measured best mu_rec (its table "Core Scores Comparison of Looping Optimal Frontier")
PAPER_OPTIMA = {
    "parcae-140m": {1e18: 2, 2e18: 2, 4e18: 4, 8e18: 6, 16e18: 8, 64e18: 10},
    "parcae-370m": {32e18: 4, 64e18: 6, 128e18: 6},
}
PAPER_EXPONENT = 0.40  # of the best mu_rec in the FLOPs


def config_at(preset: str, mu: int):
    """The preset's configuration at another mean recurrence, with mu_bwd by the paper's rule."""
    return replace(PRESETS[preset], mu_rec=mu, mu_bwd=math.ceil(mu / 2))


def effective_params(cfg) -> int:
    """N(mu_rec): what a loop runs counts mu_rec times."""
    loop = ["injection."]
    for i in range(cfg.n_prelude, cfg.n_prelude + cfg.n_core):
        loop += [f"blocks.{i}.", f"ve.{i}."]
    with torch.device("meta"):
        model = Model(cfg)
    count = 0
    for name, parameter in model.named_parameters():
        times = cfg.mu_rec if name.startswith(tuple(loop)) else 1
        count += times * parameter.numel()
    return count


# -- the law


def law_loss(p, ln_N, ln_D, depth, ln_mu):
    """The law; p: logs of its eight parameters, which may be complex."""
    E, A, ln_a, B, ln_b, Z, ln_z, ln_gamma = p
    rate = np.exp(ln_z - np.exp(ln_gamma) * ln_mu)
    terms = (A - np.exp(ln_a) * ln_N, B - np.exp(ln_b) * ln_D, Z - rate * depth)
    return np.exp(E) + sum(map(np.exp, terms))


def predict(logs, N, D, depth=1.0, mu=1.0):
    """Losses (R, ...) of R laws, logs of their parameters (R, 8)."""
    return np.array([law_loss(p, np.log(N), np.log(D), depth, np.log(mu)) for p in logs])


def predict_rows(logs, rows: pd.DataFrame):
    """The first law's losses of the rows."""
    columns = rows[["n_eff", "tokens", "depth", "mu_rec"]].to_numpy(float).T
    return predict(logs[:1], *columns)[0]


def oracle_losses(logs, rows: pd.DataFrame):
    """The first law's losses with the measured loss at depth mu as their floor."""
    loops = predict_rows(logs, rows) - predict_rows(logs, rows.assign(depth=1e9))
    return loops + rows.best


# -- its fit


class Problem:
    """A law to fit to rows of data: its box, and descents from given starts."""

    def __init__(self, rows: pd.DataFrame, law: Law):
        size = np.log(rows[["n_eff", "tokens"]].to_numpy())
        self.center = size.mean(0)
        self.X = np.array([*(size - self.center).T, rows.depth, np.log(rows.mu_rec)])
        self.y = np.log(rows.loss.to_numpy())
        self.index = [PARAMS.index(name) for name in law.free]
        self.fixed = np.log([ZERO] * 7 + [law.gamma])
        box = np.log([BOX[name] for name in law.free])
        box[0] += self.y.min()
        self.low, self.high, self.first, self.last = box.T

    def whole(self, q):
        """The free parameters q (…, free) put among the fixed ones: (…, 8)."""
        p = np.empty((*q.shape[:-1], len(PARAMS)), q.dtype)
        p[:] = self.fixed
        p[..., self.index] = q
        return p

    def logs(self, found):
        """(R, 8) logs of all parameters of R solutions, of a law in N and D as they are."""
        p = self.whole(np.array(found))
        p[:, [1, 3]] += np.exp(p[:, [2, 4]]) * self.center
        return p

    def descend(self, start, rows=slice(None), **limits):
        """Huber fit to the given rows from one start -> scipy's result."""
        X = self.X[:, rows]
        y = self.y[rows]

        def residual(q):
            return np.log(law_loss(self.whole(q), *X)) - y

        def derivative(q):  # by complex steps, which are exact
            steps = self.whole(q + 1e-20j * np.eye(len(q)))
            loss = law_loss(steps.T[..., None], *X)
            return (loss.imag / loss.real).T / 1e-20

        inside = np.clip(start, self.low + 1e-10, self.high - 1e-10)
        robust = {"loss": "huber", "f_scale": DELTA, "bounds": (self.low, self.high)}
        return least_squares(residual, inside, derivative, **robust, **limits)

    def solve(self, rng) -> list:
        """The KEPT best of RESTARTS random starts, descended to the end, best first."""
        starts = rng.uniform(self.first, self.last, (RESTARTS, len(self.index)))
        rough = [self.descend(start, method="dogbox", max_nfev=20) for start in starts]
        rough.sort(key=attrgetter("cost"))
        found = [self.descend(result.x, **EXACT) for result in rough[:KEPT]]
        return sorted(found, key=attrgetter("cost"))

    def at_bound(self, q) -> list[str]:
        """The parameters that stand at a bound."""
        near = np.flatnonzero(np.minimum(q - self.low, self.high - q) < 1e-6)
        return [PARAMS[self.index[i]] for i in near]


@dataclass
class Fit:
    law: dict[str, float]
    bounded: list[str]  # what of the law and its intervals the bounds decide, in words
    # (1 + RESAMPLES, 8) logs of all parameters: the fit, then the bootstrap over whole runs
    logs: np.ndarray
    errors: dict[str, float]  # percent, or sums of the Huber loss
    # the same errors, of each budget in FLOPs as predicted from the others
    without: dict[float, dict]
    held_out: dict = field(default_factory=dict)  # the same of runs that were not fitted


def fit_law(rows: pd.DataFrame, rng, name: str) -> Fit:
    """Fits a law of LAWS; bootstrap over whole runs; each budget predicted from the others."""
    law = LAWS[name]
    problem = Problem(rows, law)
    best = problem.solve(rng)[0].x
    places = [np.flatnonzero(rows.run == run) for run in rows.run.unique()]
    found = [best]
    for _ in range(RESAMPLES):
        drawn = rng.integers(len(places), size=len(places))
        sample = np.concatenate([places[i] for i in drawn])
        found.append(problem.descend(best, sample, max_nfev=EXACT["max_nfev"]).x)
    bounded = [f"{name} at a bound" for name in problem.at_bound(best)]
    for end in np.quantile(found[1:], [0.025, 0.975], axis=0):
        bounded += [f"interval of {name} ends at a bound" for name in problem.at_bound(end)]
    logs = problem.logs(found)
    errors = prediction_errors(logs, rows)
    without = {}
    for budget, unseen in rows.groupby("budget"):
        others = problem.descend(best, (rows.budget != budget).to_numpy()).x
        without[budget] = prediction_errors(problem.logs([others]), unseen)
    values = np.exp(logs[0, problem.index])
    return Fit(dict(zip(law.free, values)), bounded, logs, errors, without)


def percent_off(guess, loss):
    return 100 * np.abs(guess / loss - 1)


def huber_on_log(guess, loss):
    """The Huber losses of the log losses."""
    return huber(DELTA, np.log(guess / loss))


def prediction_errors(logs, rows: pd.DataFrame) -> dict[str, float]:
    """Mean and largest percent, and the sum of the Huber loss; "oracle": the floor is the measured
    loss at depth mu.
    """
    guess = predict_rows(logs, rows)
    percent = percent_off(guess, rows.loss)
    oracle = percent_off(oracle_losses(logs, rows), rows.loss)
    return {
        "percent": percent.mean(),
        "largest percent": percent.max(),
        "oracle percent": oracle.mean(),
        "largest oracle percent": oracle.max(),
        "huber": huber_on_log(guess, rows.loss).sum(),
    }


# -- isoFLOP curves


def fit_isoflop(rows: pd.DataFrame, rng, left: list[str]) -> dict:
    """Per budget the parabola of loss in log2 mu and its lowest point in the measured range; their
    power laws.

    rows: one a run, at depth mu_rec; intervals by a bootstrap of the parabolas' pooled
    residuals.
    """
    grids = {}
    residuals = []
    for budget, runs in rows[rows.mu_rec > 1].groupby("budget"):
        if runs.mu_rec.nunique() < 4:
            left.append(f"budget {budget:.2g}: fewer than 4 values of mu_rec, no parabola")
            continue
        x = np.log2(runs.mu_rec)
        smooth = np.polyval(np.polyfit(x, runs.loss, 2), x)
        grids[budget] = runs.assign(x=x, smooth=smooth).sort_values("x")
        share = math.sqrt(len(x) / (len(x) - 3))  # three parameters took theirs
        residuals += list((runs.loss - smooth) * share)
    budgets = []
    for budget, grid in grids.items():
        budgets.append({"budget": budget} | lowest_point(grid, residuals, rng))
    inner = [found for found in budgets if found["inside"]]
    laws = {}
    if len(inner) > 1:
        log_flops = np.log([found["budget"] for found in inner])
        for name in ("mu", "tokens"):
            log_best = np.log([found[name] for found in inner])
            laws[name] = np.polyfit(log_flops, log_best, 1)  # exponent, ln k
    fixed = rows[rows.mu_rec == 1].groupby("budget").loss.mean()
    return {"budgets": budgets, "power_laws": laws, "fixed_depth": fixed.to_dict()}


def lowest_point(grid: pd.DataFrame, residuals: list[float], rng) -> dict:
    """A budget's best mu and tokens, the fit first and then RESAMPLES bootstraps; inside: whether
    the best is within the grid, not at an end of it.

    grid: its runs by x = log2 mu, with the parabola's losses "smooth".
    """
    x = grid.x.to_numpy()
    low, high = x[0], x[-1]
    noise = rng.choice(residuals, (RESAMPLES, len(x)))
    losses = grid.smooth.to_numpy() + np.vstack([0 * x, noise])
    parabolas = np.polyfit(x, losses.T, 2)  # (3, 1 + RESAMPLES)
    vertex = np.clip(-parabolas[1] / (2 * parabolas[0]), low, high)
    candidates = np.stack(np.broadcast_arrays(low, high, vertex))
    lowest = np.polyval(parabolas, candidates).argmin(0)
    best = np.choose(lowest, candidates)
    return {
        "mu": 2**best,
        "tokens": np.exp(np.interp(best, x, np.log(grid.tokens))),
        "parabola": parabolas[:, 0],
        "loss": np.polyval(parabolas[:, 0], best[0]),
        "inside": bool(low < best[0] < high),
        "slope": np.polyfit(x, grid.smooth, 1)[0],  # nats for each doubling of mu_rec
    }


# -- test-time curves


def exponential(t, E, Z, z):
    return E + Z * np.exp(-z * t)


def form_value(name: str, fitted: dict, depth):
    return exponential(FORMS[name](depth), **fitted)


def fit_form(name: str, depth, loss) -> dict:
    """E, Z and z of a test-time form, by least squares on log loss."""
    t = FORMS[name](depth)
    if name == WITHOUT_FLOOR:
        slope, log_Z = np.polyfit(t, np.log(loss), 1)
        return {"E": 0.0, "Z": math.exp(log_Z), "z": -slope}
    low = loss.min()
    bounds = ([0, -np.inf, 1e-4], [np.inf, np.inf, 50])

    def residual(q):
        return np.log(np.maximum(exponential(t, *q), 1e-9) / loss)

    start = (low, loss[0] - low, 0.5)
    best = least_squares(residual, start, bounds=bounds, x_scale="jac", **EXACT).x
    return dict(zip(("E", "Z", "z"), best))


def fit_curves(rows: pd.DataFrame) -> dict:
    """Each run's loss against depth in the paper's four forms: the Huber loss in sample and, for
    fits to depths <= mu, beyond mu.
    """
    curves = []
    scores = []
    for _, points in rows.groupby("run", sort=False):
        depth = points.depth.to_numpy(float)
        loss = points.loss.to_numpy(float)
        first = points.iloc[0]
        near = first.mu_rec >= depth
        c = first[["run", "mu_rec", "n_eff", "budget"]].to_dict() | {"depth": depth, "loss": loss}
        for name in FORMS:
            c[name] = fit_form(name, depth, loss)
            score = {"form": name}
            score["huber"] = huber_on_log(form_value(name, c[name], depth), loss).mean()
            score["floor_off_percent"] = percent_off(c[name]["E"], first.best)
            if 3 <= near.sum() < len(depth):
                early = fit_form(name, depth[near], loss[near])
                ahead = form_value(name, early, depth[~near])
                score["huber_beyond_mu"] = huber_on_log(ahead, loss[~near]).mean()
            scores.append(score)
        curves.append(c)
    by_form = pd.DataFrame(scores).groupby("form", sort=False)
    means = by_form.mean()
    means["largest_floor_off_percent"] = by_form.floor_off_percent.max()
    return {"curves": curves, "table": means.to_dict("index")}
