"""Figures of the scaling laws: isoFLOP curves and their power laws, L(mu, D), test-time curves,
held-out prediction.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from looped.figures import COLORS, MARKERS
from studies import laws

BY_MU = "mean recurrence mu_rec (loops)"
BY_DEPTH = "test-time depth T (loops)"
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
    if "unified T/mu" in result and len(held_out):
        drawn["unified"] = draw_unified(result["unified T/mu"], held_out)
    for name, image in drawn.items():
        for axes in image.axes:
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=7)
        image.savefig(out / f"{name}.png")
    return list(drawn)


def row_of_panels(count: int):
    """-> a figure, and its axes side by side."""
    image = Figure(figsize=(4.8 * count, 4.2), dpi=140, layout="constrained")
    return image, image.subplots(1, count, squeeze=False)[0]


def style(i: int) -> dict:
    return {"color": COLORS[i % len(COLORS)], "linewidth": 1}


def dots(i: int) -> dict:
    return {"marker": MARKERS[i % len(MARKERS)], "linestyle": "", "markersize": 5}


def draw_isoflop(iso: dict, at_mu) -> Figure:
    """The parabolas; best mu and tokens against FLOPs; the lowest points beside the fixed-depth
    frontier.
    """
    image, (parabolas, best_mu, best_tokens, frontier) = row_of_panels(4)
    for i, budget in enumerate(iso["budgets"]):
        flops = budget["budget"]
        grid = at_mu[at_mu.budget == flops]
        x = np.geomspace(2, grid.mu_rec.max(), 99)
        y = np.polyval(budget["parabola"], np.log2(x))
        label = f"{flops:.2g} FLOPs"
        parabolas.plot(grid.mu_rec, grid.loss, label=label, **style(i), **dots(i))
        parabolas.plot(x, y, **style(i))
        mu = low_fit_high(budget["mu"])
        tokens = low_fit_high(budget["tokens"])
        point = {"markevery": [1], "fillstyle": "full" if budget["inside"] else "none"}
        parabolas.plot(mu, [budget["loss"]] * 3, "k*-", **point)
        best_mu.plot([flops] * 3, mu, "o-", **point, **style(i))
        best_tokens.plot([flops] * 3, tokens, "o-", **point, **style(i))
    parabolas.set_xscale("log", base=2)
    parabolas.set_xlabel(f"{BY_MU}; 1: fixed depth, not fitted; star: lowest, 95 %")
    parabolas.set_ylabel(LOSS)
    flops = np.array([budget["budget"] for budget in iso["budgets"]])
    losses = [budget["loss"] for budget in iso["budgets"]]
    draw_power_law(best_mu, flops, iso["power_laws"].get("mu"))
    draw_power_law(best_tokens, flops, iso["power_laws"].get("tokens"))
    best_mu.set_ylabel("best mu_rec (hollow: end of the grid)")
    best_tokens.set_ylabel("best D (training tokens)")
    frontier.plot(flops, losses, "ko-", label="best mu_rec")
    fixed = iso["fixed_depth"]
    if fixed:
        frontier.plot(fixed.keys(), fixed.values(), "ks--", label="fixed depth, mu_rec 1")
    frontier.set_ylabel(LOSS)
    for panel in (best_mu, best_tokens, frontier):
        panel.set(xscale="log", xlabel="training compute C (FLOPs)")
        panel.set_xticks(flops, [f"{value:.2g}" for value in flops])
        panel.set_xticks([], minor=True)
    return image


def draw_power_law(axes, flops, line) -> None:
    """line (2, 1 + bootstraps): exponents and ln k; None for too few budgets."""
    axes.set_yscale("log")
    if line is None:
        return
    exponents, log_k = line
    curves = log_k[:, None] + np.outer(exponents, np.log(flops))
    low, fit, high = low_fit_high(np.exp(curves))
    axes.plot(flops, fit, "k", label=f"C^{exponents[0]:.2f}, 95 % interval")
    axes.fill_between(flops, low, high, color="0.9")


def draw_law(fitted: laws.Fit, train) -> Figure:
    """Contours of L(mu, D) with the runs and the efficient frontier; measured against predicted
    losses.
    """
    image, (contours, measured) = row_of_panels(2)
    train = train.assign(per_token=train.flops / train.tokens)
    medians = train.groupby("mu_rec")[["n_eff", "per_token"]].median()
    mu = np.linspace(medians.index.min(), medians.index.max(), 200)
    n_eff = np.interp(mu, medians.index, medians.n_eff)  # between runs
    flops_per_token = np.interp(mu, medians.index, medians.per_token)
    tokens = np.geomspace(train.tokens.min(), train.tokens.max())
    loss = laws.predict(fitted.logs[:1], n_eff, tokens[:, None])[0]
    lines = contours.contour(mu, tokens, loss, 14, colors="0.5")
    contours.clabel(lines, fontsize=7)
    budgets = np.geomspace(train.flops.min(), train.flops.max())
    affordable = budgets[:, None] / flops_per_token
    best = laws.predict(fitted.logs[:1], n_eff, affordable)[0].argmin(1)
    inside = (best > 0) & (best < len(mu) - 1)
    label = "runs (the frontier is an end of the grid)"
    if inside.any():
        best = best[inside]
        frontier = budgets[inside] / flops_per_token[best]
        contours.plot(mu[best], frontier, "k", linewidth=2, label="efficient frontier")
        label = "runs"
    contours.plot(train.mu_rec, train.tokens, "k.", label=label)
    contours.set(yscale="log", xlabel=BY_MU, ylabel="training tokens D; contours: loss")
    low, guess, high = low_fit_high(laws.predict_rows(fitted.logs, train))
    measured.vlines(train.loss, low, high, color="k")
    measured.plot(train.loss, guess, "ko", fillstyle="none", label="fitted, 95 % interval")
    measured.plot(train.loss, fitted.left_out, "kx", label="fitted without the run's budget")
    measured.axline((guess[0], guess[0]), slope=1, color="0.5")
    measured.set(xlabel=f"measured {LOSS}", ylabel=f"predicted {LOSS}")
    return image


def draw_curves(curves: list[dict]) -> Figure:
    """Loss by test-time depth with the exponential fits; of several budgets the largest with most
    runs.
    """
    image, (axes,) = row_of_panels(1)
    budgets = sorted((curve["budget"] for curve in curves), reverse=True)
    most = max(budgets, key=budgets.count)
    if budgets.count(most) > 1:
        curves = [curve for curve in curves if curve["budget"] == most]
    for i, curve in enumerate(curves):
        depths = curve["T"]
        T = np.linspace(depths[0], depths[-1], 200)
        label = f"mu_rec {curve['mu_rec']:g}"
        axes.plot(depths, curve["loss"], label=label, **style(i), **dots(i))
        axes.plot(T, laws.form_value(DECAY, curve[DECAY], T), **style(i))
        axes.axvline(curve["mu_rec"], linestyle=":", **style(i))
    axes.set(xlabel=f"{BY_DEPTH}; dotted: T = mu_rec", ylabel=LOSS)
    return image


def draw_unified(fitted: laws.Fit, held_out) -> Figure:
    """Held-out runs by depth: measured, as the unified law predicts them, and with their measured
    floor (oracle).
    """
    image, (axes,) = row_of_panels(1)
    law = laws.predict_rows(fitted.logs[:1], held_out)[0]
    oracle = laws.oracle_losses(fitted.logs, held_out)
    table = held_out.assign(law=law, oracle=oracle)
    for i, (run, points) in enumerate(table.groupby("run")):
        axes.plot(points.depth, points.loss, label=Path(run).name, **style(i), **dots(i))
        axes.plot(points.depth, points.law, **style(i))
        axes.plot(points.depth, points.oracle, linestyle=":", **style(i))
    axes.set(xlabel=f"{BY_DEPTH}; solid: unified law, dotted: oracle", ylabel=LOSS)
    return image
