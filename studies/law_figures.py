"""Figures of the scaling laws: isoFLOP curves and their power laws, L(mu, D), test-time curves,
held-out prediction.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from looped.figures import COLORS, MARKERS
from studies import laws

BY_MU = "mean recurrence mu_rec (loops)"
BY_DEPTH = "test-time depth (loops)"
BY_FLOPS = "training compute C (FLOPs)"
LOSS = "validation loss (nats/token)"
DECAY = "L + Z exp(-zT)"


def low_fit_high(values):
    """(3, …): the fit, which is values[0], between the 95 % interval of its bootstraps,
    values[1:].
    """
    fit, *resampled = values
    low, high = np.percentile(resampled, [2.5, 97.5], axis=0)
    return np.array([low, fit, high])


def draw_all(result: dict, rows, held_out, out: Path) -> list[str]:
    """Draws what could be fitted -> the names of the PNGs."""
    at_mu = rows[rows.depth == rows.mu_rec]
    drawn = {}
    if result["isoflop"]["budgets"]:
        drawn["isoflop"] = draw_isoflop(result["isoflop"], at_mu)
    if "train" in result:
        drawn["train"] = draw_law(result["train"], at_mu[at_mu.mu_rec > 1])
    if "test_time" in result:
        drawn["test_time"] = draw_curves(result["test_time"]["curves"])
    if "unified depth/mu" in result and len(held_out):
        drawn["unified"] = draw_unified(result["unified depth/mu"], held_out)
    for name, image in drawn.items():
        for axes in image.axes:
            axes.legend(fontsize=7)
        image.savefig(out / f"{name}.png")
    return list(drawn)


def row_of_panels(count: int):
    """-> a figure, and its axes side by side."""
    image = Figure(figsize=(4.8 * count, 4.2), dpi=140, layout="constrained")
    row = image.subplots(1, count, squeeze=False)[0]
    for axes in row:
        # lists of 7 and 6: 42 pairs that differ
        axes.set_prop_cycle(color=COLORS * 6, marker=MARKERS[:6] * 7)
    return image, row


def points_and_curve(axes, label: str, points, curve) -> str:
    """Measured points (x, y) and a law's curve (x, y) in the next colour, which is returned."""
    (shown,) = axes.plot(*points, linestyle="", markersize=5, label=label)
    axes.plot(*curve, "-", color=shown.get_color(), linewidth=1)
    return shown.get_color()


def draw_isoflop(iso: dict, at_mu) -> Figure:
    """The parabolas; best mu and tokens against FLOPs; the lowest points beside the fixed-depth
    frontier.
    """
    image, (parabolas, best_mu, best_tokens, frontier) = row_of_panels(4)
    budgets = pd.DataFrame(iso["budgets"])
    for found in budgets.itertuples():
        grid = at_mu[at_mu.budget == found.budget]
        x = np.geomspace(2, grid.mu_rec.max(), 99)
        curve = (x, np.polyval(found.parabola, np.log2(x)))
        label = f"{found.budget:.2g} FLOPs"
        points_and_curve(parabolas, label, (grid.mu_rec, grid.loss), curve)
        parabolas.plot(found.mu[0], found.loss, "k*")
    label = f"{BY_MU}; 1: fixed depth, not fitted; star: lowest"
    parabolas.set_xscale("log", base=2)
    parabolas.set(xlabel=label, ylabel=LOSS)
    draw_optima(best_mu, budgets, "mu", iso)
    draw_optima(best_tokens, budgets, "tokens", iso)
    best_mu.set_yscale("log", base=2)
    best_mu.set_ylabel("best mu_rec")
    best_tokens.set_ylabel("best D (training tokens)")
    frontier.plot(budgets.budget, budgets.loss, "ko-", label="best mu_rec")
    fixed = iso["fixed_depth"]
    frontier.plot(fixed.keys(), fixed.values(), "ks--", label="fixed depth, mu_rec 1")
    frontier.set_ylabel(LOSS)
    scale_by_flops(frontier, budgets)
    return image


def scale_by_flops(axes, budgets: pd.DataFrame) -> None:
    """A logarithmic axis of FLOPs whose ticks are the budgets."""
    axes.set(xscale="log", xlabel=BY_FLOPS)
    axes.set_xticks(budgets.budget, [f"{flops:.2g}" for flops in budgets.budget])
    axes.set_xticks([], minor=True)


def draw_optima(axes, budgets: pd.DataFrame, name: str, iso: dict) -> None:
    """The best values of the budgets and their power law, with 95 % intervals; hollow: at an end of
    the grid, not in the power law.
    """
    flops = budgets.budget
    low, best, high = low_fit_high(np.stack(budgets[name], axis=1))
    ends = ~budgets.inside
    axes.vlines(flops, low, high, color="k")
    axes.plot(flops, best, "ko", label="lowest point, 95 % interval")
    axes.plot(flops[ends], best[ends], "wo", markersize=4)
    if name in iso["power_laws"]:
        exponents, log_k = iso["power_laws"][name]
        low, fit, high = low_fit_high(np.exp(log_k[:, None] + np.outer(exponents, np.log(flops))))
        axes.plot(flops, fit, "k-", label=f"C^{exponents[0]:.2f}")
        axes.fill_between(flops, low, high, color="0.9")
    axes.set_yscale("log")
    scale_by_flops(axes, budgets)


def draw_law(fitted: laws.Fit, train) -> Figure:
    """Contours of L(mu, D) with the runs and the efficient frontier."""
    image, (axes,) = row_of_panels(1)
    mu = np.linspace(train.mu_rec.min(), train.mu_rec.max(), 200)
    n_eff = np.interp(mu, train.mu_rec, train.n_eff)  # between runs
    flops_per_token = np.interp(mu, train.mu_rec, train.flops / train.tokens)
    tokens = np.geomspace(train.tokens.min(), train.tokens.max())
    loss = laws.predict(fitted.logs[:1], n_eff, tokens[:, None])[0]
    axes.clabel(axes.contour(mu, tokens, loss, 14, colors="0.5"), fontsize=7)
    budgets = np.geomspace(train.flops.min(), train.flops.max())
    affordable = budgets[:, None] / flops_per_token
    best = laws.predict(fitted.logs[:1], n_eff, affordable)[0].argmin(1)
    label = "efficient frontier, within the grid"
    axes.plot(mu[best], budgets / flops_per_token[best], "k-", linewidth=2, label=label)
    axes.plot(train.mu_rec, train.tokens, "k.", label="runs")
    axes.set(yscale="log", xlabel=BY_MU, ylabel="training tokens D; contours: loss")
    return image


def draw_curves(curves: list[dict]) -> Figure:
    """Loss by test-time depth with the exponential fits: of each model and mu_rec the run of most
    FLOPs.
    """
    image, (axes,) = row_of_panels(1)
    largest = pd.DataFrame(curves).sort_values("budget").drop_duplicates(["n_eff"], keep="last")
    for curve in largest.sort_values("n_eff").to_dict("records"):
        depth = np.linspace(curve["depth"][0], curve["depth"][-1], 200)
        fit = (depth, laws.form_value(DECAY, curve[DECAY], depth))
        label = f"mu_rec {curve['mu_rec']:g}, N {curve['n_eff']:.3g}"
        color = points_and_curve(axes, label, (curve["depth"], curve["loss"]), fit)
        axes.axvline(curve["mu_rec"], color=color, linestyle=":")
    axes.set(xlabel=f"{BY_DEPTH}; dotted: mu_rec", ylabel=LOSS)
    return image


def draw_unified(fitted: laws.Fit, held_out) -> Figure:
    """Held-out runs by depth: measured, as the unified law predicts them, and with their measured
    floor (oracle).
    """
    image, (axes,) = row_of_panels(1)
    law = laws.predict_rows(fitted.logs, held_out)
    oracle = laws.oracle_losses(fitted.logs, held_out)
    for run, points in held_out.assign(law=law, oracle=oracle).groupby("run"):
        depth = points.depth
        first = points.iloc[0]
        label = f"mu_rec {first.mu_rec:g}, {first.tokens:.3g} tokens: {Path(run).name}"
        color = points_and_curve(axes, label, (depth, points.loss), (depth, points.law))
        axes.plot(depth, points.oracle, ":", color=color)
    axes.set(xlabel=f"{BY_DEPTH}; solid: unified law, dotted: oracle", ylabel=LOSS)
    return image
