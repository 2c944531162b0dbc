"""
The scaling laws of looping (Parcae; Prairie et al. 2026): their fits, tables and figures.

    python -m studies.experiments isoflop --data DATA --train # a grid of trainings; ends in these fits

    L = E + A N^-a + B D^-b + Z exp(-z depth mu^-gamma)       nats per token
    N = N_once + mu^phi N_rec

fitted by the Huber loss on log L. N_rec are the parameters that a loop runs: core blocks, their
value tables and the injection; mu is mu_rec. phi is 1 ("if you were to unroll all loops into real
parameters") but in the law of arXiv 2604.21106, which fits it.

Rows of data have a line for each (run, depth) and the columns of ROW: run is a name, tokens and
flops are the training's. `prepared` adds the budget and n_eff, N at phi 1.
"""

from operator import attrgetter
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy.optimize import least_squares
from scipy.stats import gmean

from model import Model, config_of
from tools.arms import Run
from tools.figures import Plot, figure, fmt, frame_table
from tools.pages import save_page

ROW = ["run", "mu_rec", "tokens", "flops", "n_once", "n_rec", "depth", "loss"]
DELTA = 1e-3  # of the Huber loss
RESTARTS = 100  # random starts of a law's fit
KEPT = 5  # of them, descended to the end
RESAMPLES = 200  # of the bootstraps; the fit itself comes first in their arrays
EXACT = {"xtol": 1e-14, "ftol": 1e-14, "gtol": 1e-15, "max_nfev": 2000}  # where a fit ends

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
    "phi": (0.01, 4, 0.1, 2),
}
TRAINING = {"Z": 0, "z": 0, "gamma": 0}  # no term of the depth
LAWS = {  # what each law fixes
    "train": TRAINING | {"phi": 1},
    "unified depth/mu": {"gamma": 1, "phi": 1},
    "unified depth/mu^gamma": {"phi": 1},
    "unified depth": {"gamma": 0, "phi": 1},
    "train, phi": TRAINING,
}
# The loss of one run by test-time depth: E + Z exp(-z t), by form t(depth) and what it fixes.
ONE_RUN = {"A": 0, "a": 0, "B": 0, "b": 0, "gamma": 0, "phi": 1}
FORMS = {
    "L + Z exp(-zT)": (np.positive, ONE_RUN),
    "L + Z (1+depth)^-z": (np.log1p, ONE_RUN),
    "L + Z depth^-z": (np.log, ONE_RUN),
    "Z depth^-z": (np.log, ONE_RUN | {"E": 0}),
}
HELD_OUT = (
    "[95 % interval], by bootstrap. Held out: the looped runs of the comparisons `baseline` and "
    "`testtime`, on the same rows."
)


# -- the data


def sizes(cfg) -> tuple[int, int]:
    """Parameters that run once, and those that run in every loop."""
    with torch.device("meta"):
        model = Model(cfg)
    loop = ["injection."]
    for i in model.core_layers:
        loop += [f"blocks.{i}.", f"ve.{i}."]
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    looped = sum(n for name, n in counts.items() if name.startswith(tuple(loop)))
    return sum(counts.values()) - looped, looped


def rows_of(runs: list[Run]) -> pd.DataFrame:
    """A row for each depth at which these runs were evaluated."""
    rows = []
    for run in runs:
        cfg = config_of(run.config["model"])
        tokens = run.train[-1]["tokens"]
        same = [run.name, cfg.mu_rec, tokens, run.flops, *sizes(cfg)]
        for depth, loss in run.last["loss"].items():
            rows.append([*same, depth, loss])
    return pd.DataFrame(rows, columns=ROW)


def prepared(rows) -> pd.DataFrame:
    budget = rows.flops.map("{:.1e}".format).astype(float)  # steps are whole, so FLOPs scatter
    n_eff = rows.n_once + rows.mu_rec * rows.n_rec
    rows = rows.assign(budget=budget, n_eff=n_eff)
    return rows.sort_values(["mu_rec", "flops", "run", "depth"], ignore_index=True)


def at_mu_rec(rows) -> pd.DataFrame:
    return rows[rows.depth == rows.mu_rec]


# -- the laws


def law_loss(p, rows):
    """The law with parameters {name: value}, on columns {name: values}."""
    unrolled = rows["mu_rec"] ** p["phi"] * rows["n_rec"]
    N = rows["n_once"] + unrolled
    size = p["A"] * N ** -p["a"]
    data = p["B"] * rows["tokens"] ** -p["b"]
    loops = rows["depth"] / rows["mu_rec"] ** p["gamma"]
    test_time = p["Z"] * np.exp(-p["z"] * loops)
    return p["E"] + size + data + test_time


class Law:
    """A law to fit to rows of data. q: logs of its free parameters, in the units of BOX."""

    def __init__(self, rows, fixed: dict):
        self.fixed = fixed
        self.free = [key for key in BOX if key not in fixed]
        self.rows = rows.to_records()
        self.lowest = rows.loss.min()
        self.N = gmean(rows.n_eff)
        self.D = gmean(rows.tokens)
        box = np.log([BOX[key] for key in self.free])
        self.low, self.high, self.first, self.last = box.T

    def parameters(self, q) -> dict:
        p = self.fixed | dict(zip(self.free, np.exp(q)))
        p["E"] *= self.lowest
        p["A"] *= self.N ** p["a"]
        p["B"] *= self.D ** p["b"]
        return p

    def descend(self, start, rows, **limits):
        """The fit to these rows from one start -> scipy's result."""

        def residual(q):
            return np.log(law_loss(self.parameters(q), rows) / rows["loss"])

        limits |= {"bounds": (self.low, self.high), "loss": "huber", "f_scale": DELTA}
        return least_squares(residual, start, jac="cs", **limits)

    def solve(self, rng):
        """The best of the KEPT best of RESTARTS random starts, descended to the end."""
        starts = rng.uniform(self.first, self.last, (RESTARTS, len(self.free)))
        rough = [self.descend(q, self.rows, method="dogbox", max_nfev=20) for q in starts]
        rough.sort(key=attrgetter("cost"))
        found = [self.descend(result.x, self.rows, **EXACT) for result in rough[:KEPT]]
        return min(found, key=attrgetter("cost"))


def fit_law(rows, rng, fixed: dict) -> tuple[pd.DataFrame, list[str]]:
    """-> the parameters, in the first line of the fit and then of a bootstrap over whole runs; and
    the names of those whose value or interval ends at a bound.
    """
    law = Law(rows, fixed)
    best = law.solve(rng).x
    found = [best]
    runs = list(rows.groupby("run").indices.values())
    for _ in range(RESAMPLES):
        drawn = rng.integers(len(runs), size=len(runs))
        sample = np.concatenate([runs[i] for i in drawn])
        found.append(law.descend(best, law.rows[sample], method="dogbox").x)
    ends = np.quantile(found[1:], [0.025, 0.975], axis=0)
    values = np.array([best, *ends])
    at_bound = np.isclose(values, law.low) | np.isclose(values, law.high)
    bounded = np.array(law.free)[at_bound.any(0)].tolist()
    return pd.DataFrame([law.parameters(q) for q in found]), bounded


def percent_off(guess, loss):
    return 100 * guess.div(loss, axis=0).sub(1).abs()


def fit_laws(rows, held_out, rng) -> tuple[dict, pd.DataFrame]:
    """-> the parameters by law, and a table with a column for each law."""
    looped = rows[rows.mu_rec > 1]
    fits = {}
    columns = {}
    for name, fixed in LAWS.items():
        data = looped if "phi" in fixed else rows
        unseen = held_out
        if name.startswith("train"):
            data = at_mu_rec(data)
            unseen = at_mu_rec(held_out)
        draws, bounded = fit_law(data, rng, fixed)
        fits[name] = draws.iloc[0]
        column = dict.fromkeys(BOX, "–")
        column |= draws.drop(columns=fixed).apply(span)
        column["decided by their bounds"] = " ".join(bounded)
        for label, runs in {"fitted": data, "held-out": unseen}.items():
            off = percent_off(law_loss(fits[name], runs), runs.loss)
            column[f"% off, {label} runs"] = f"{off.mean():.3g} (largest {off.max():.3g})"
        columns[name] = column
    return fits, pd.DataFrame(columns).rename_axis("law")


def loss_at_mu_rec(rows) -> pd.Series:
    """Of each row's run."""
    return rows.run.map(at_mu_rec(rows).set_index("run").loss)


def held_out_guesses(p, rows) -> dict:
    """By the unified law, and with the measured loss at mu_rec in place of the training law's (the
    paper's oracle).
    """
    guess = law_loss(p, rows)
    floor = law_loss(p.to_dict() | {"Z": 0}, rows)
    return {"unified law": guess, "oracle": loss_at_mu_rec(rows) + guess - floor}


# -- isoFLOP curves


def fit_isoflop(trained, rng) -> pd.DataFrame:
    """A row for each budget: its parabola of loss in log2 mu, and the lowest point in the measured
    range.

    trained: a row a run, at depth mu_rec; the losses of all budgets share one noise variance.
    """
    looped = trained[trained.mu_rec > 1]
    grids = [grid for _, grid in looped.groupby("budget") if len(grid) > 3]
    squares = 0
    freedom = 0
    for grid in grids:
        x = np.log2(grid.mu_rec)
        parabola = np.polyfit(x, grid.loss, 2)
        squares += ((grid.loss - np.polyval(parabola, x)) ** 2).sum()
        freedom += len(x) - 3  # less the parabola's parameters
    found = {}
    for grid in grids:
        found[grid.budget.iloc[0]] = lowest_point(grid, squares / freedom, rng)
    budgets = pd.DataFrame.from_dict(found, orient="index")
    once = trained[trained.mu_rec == 1]
    budgets["one loop"] = once.groupby("budget").loss.mean()
    return budgets


def lowest_point(grid, variance: float, rng) -> dict:
    """A budget's best mu and tokens, the fit first and then RESAMPLES draws; inside: whether the
    best is within the grid, not at an end of it.
    """
    measured = np.log2(grid.mu_rec)
    parabola, covariance = np.polyfit(measured, grid.loss, 2, cov="unscaled")
    drawn = rng.multivariate_normal(parabola, variance * covariance, RESAMPLES)
    x = np.linspace(measured.min(), measured.max(), 1001)
    curves = np.vstack([parabola, drawn]) @ np.vander(x, 3).T
    best = x[curves.argmin(1)]
    log_tokens = np.interp(best, measured, np.log(grid.tokens))
    found = {"parabola": parabola, "loss": curves[0].min()}
    found["inside"] = x[0] < best[0] < x[-1]
    found["mu"] = 2**best
    found["tokens"] = np.exp(log_tokens)
    return found


def power_laws(budgets) -> dict:
    """(exponents, ln k) of best mu and tokens by FLOPs, from the budgets whose best is inside."""
    inner = budgets[budgets.inside]
    if len(inner) < 2:
        return {}
    log_flops = np.log(inner.index)
    found = {}
    for name in ("mu", "tokens"):
        log_best = np.log(np.stack(inner[name]))
        found[name] = np.polyfit(log_flops, log_best, 1)
    return found


# -- test-time curves


def fit_form(name: str, seen, points):
    """A form fitted to the seen points of a run -> its losses at points."""
    t, fixed = FORMS[name]
    law = Law(seen.assign(depth=t(seen.depth)), fixed)
    start = (law.first + law.last) / 2
    fit = law.descend(start, law.rows, **EXACT)
    return law_loss(law.parameters(fit.x), points.assign(depth=t(points.depth)))


def fit_curves(rows) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Each run's loss against depth in the four forms -> losses by row and form: of a fit to all
    depths; its floor; and beyond mu, of a fit to depths up to mu.
    """
    fitted = pd.DataFrame(index=rows.index, columns=list(FORMS), dtype=float)
    floor = fitted.copy()
    predicted = fitted.copy()
    for _, points in rows.groupby("run"):
        near = points[points.depth <= points.mu_rec]
        beyond = points.drop(near.index)
        for name in FORMS:
            fitted.loc[points.index, name] = fit_form(name, points, points)
            floor.loc[points.index, name] = fit_form(name, points, points.assign(depth=np.inf))
            if len(near) > 2:
                predicted.loc[beyond.index, name] = fit_form(name, near, beyond)
    return fitted, floor, predicted


# -- the page


def write_fit(rows, held_out, out: Path) -> None:
    """Fits what the runs can support, and writes fit.md and figures into the folder."""
    rows = prepared(rows)
    held_out = prepared(held_out)
    looped = rows[rows.mu_rec > 1]
    trained = at_mu_rec(rows)
    rng = np.random.default_rng(0)
    page = []
    figures = []
    budgets = fit_isoflop(trained, rng)
    if len(budgets) > 1:
        exponents = power_laws(budgets)
        fits, table = fit_laws(rows, held_out, rng)
        page += [HELD_OUT, "", *isoflop_table(budgets)]
        for name, (exponent, _) in exponents.items():
            page += [f"Best {name} ~ C^{span(exponent)}", ""]
        page += frame_table(table)
        unseen = held_out_guesses(fits["unified depth/mu"], held_out)
        figures.append(draw_isoflop(budgets, trained, out / "isoflop.png"))
        figures.append(draw_optima(budgets, exponents, out / "optima.png"))
        figures.append(draw_law(fits["train"], at_mu_rec(looped), out / "train.png"))
        figures.append(draw_by_depth(held_out, unseen, out / "unified.png"))
    fitted, floor, predicted = fit_curves(looped)
    page += forms_table(looped, fitted, floor, predicted)
    figures.append(draw_by_depth(looped, fitted, out / "test_time.png"))
    for lines in figures[1:]:
        page += lines
    save_page(out / "fit", f"Fits of {rows.run.nunique()} runs", [], figures[0], page)


def span(values) -> str:
    """The fit, which comes first, and the 95 % interval of its bootstraps."""
    fitted, *drawn = values
    low, high = np.percentile(drawn, [2.5, 97.5])
    return f"{fitted:.4g} [{low:.4g}, {high:.4g}]"


def isoflop_table(budgets) -> list[str]:
    shown = budgets[["loss", "one loop"]].map(fmt)
    shown["best mu_rec"] = budgets.mu.map(span)
    shown["its tokens"] = budgets.tokens.map(span)
    shown["within the grid"] = budgets.inside
    return frame_table(shown.rename("{:.3g}".format).rename_axis("FLOPs"))


def forms_table(rows, fitted, floor, predicted) -> list[str]:
    near = rows.depth <= rows.mu_rec
    off = percent_off(fitted, rows.loss)
    errors = {"% off up to mu_rec": off[near].mean()}
    off = percent_off(predicted, rows.loss)
    errors["% off beyond, fitted up to mu_rec"] = off.mean()
    off = percent_off(floor, loss_at_mu_rec(rows))
    errors["floor, % off the loss at mu_rec"] = off.mean()
    errors["largest"] = off.max()
    table = pd.DataFrame(errors).map("{:.3g}".format)
    return frame_table(table.rename_axis("test-time law, mean over points"))


# -- figures

FLOPS = "training FLOPs"


def draw_isoflop(budgets, trained, path: Path) -> list[str]:
    plots = []
    for budget, parabola in budgets.parabola.items():
        grid = trained[trained.budget == budget]
        x = np.log2(grid.mu_rec)
        between = np.linspace(1, x.max())
        curves = [(x, grid.loss), (between, np.polyval(parabola, between))]
        plots.append(Plot("log2 of mu_rec", f"{budget:.3g} FLOPs: loss", curves))
    caption = "Loss by mu_rec at equal FLOPs; 0 is one loop."
    return figure(path, caption, ["measured", "parabola"], plots)


def draw_optima(budgets, exponents: dict, path: Path) -> list[str]:
    flops = budgets.index
    log_log = {"xscale": "log", "yscale": "log"}
    plots = []
    for name in ("mu", "tokens"):
        line = ([], [])
        if name in exponents:
            exponent, log_k = exponents[name][:, 0]
            line = (flops, np.exp(log_k) * flops**exponent)
        curves = [(flops, budgets[name].str[0]), line]
        plots.append(Plot(FLOPS, f"best {name}", curves, log_log))
    names = ["lowest point of the parabola", "power law"]
    return figure(path, "Best mu_rec and its tokens by FLOPs.", names, plots)


def draw_law(p, trained, path: Path) -> list[str]:
    """Contours of the law by mu and FLOPs, with the runs and the best mu."""
    grid = trained.drop_duplicates("mu_rec")
    mu = grid.mu_rec.to_numpy()
    flops = np.geomspace(trained.flops.min(), trained.flops.max())
    columns = {name: grid[name].to_numpy() for name in ROW[1:]}
    columns["tokens"] = np.outer(flops, grid.tokens / grid.flops)
    loss = law_loss(p, columns)
    image = Figure(dpi=130, layout="constrained")
    axes = image.subplots()
    axes.clabel(axes.contour(mu, flops, loss, 14, colors="0.5"))
    axes.plot(mu[loss.argmin(1)], flops, "k-")
    axes.plot(trained.mu_rec, trained.flops, "k.")
    axes.set(yscale="log", xlabel="mu_rec", ylabel=FLOPS)
    image.savefig(path)
    caption = "Loss by the training law; points: runs; line: the best of their mu_rec."
    return [f"![{path.stem}]({path.name})  ", f"*{caption}*", ""]


def draw_by_depth(rows, guesses, path: Path) -> list[str]:
    """Loss by test-time depth, measured and as in the columns of guesses: the longest run per N."""
    plots = []
    for _, of_size in rows.groupby("n_eff"):
        last = of_size.iloc[-1]
        points = of_size[of_size.run == last.run]
        curves = [(points.depth, points.loss)]
        for name in guesses:
            curves.append((points.depth, guesses[name][points.index]))
        ylabel = f"mu_rec {last.mu_rec}, {last.tokens:.3g} tokens: loss"
        plots.append(Plot("test-time depth, loops", ylabel, curves))
    return figure(path, "Loss by test-time depth.", ["measured", *guesses], plots)
