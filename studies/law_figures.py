"""Figures of the scaling laws: isoFLOP curves, their lowest points and power laws, L(mu, D),
test-time curves, held-out prediction.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from looped.figures import Plot, figure
from studies import laws

FLOPS = "training FLOPs"
DEPTH = "test-time depth, loops"
NONE = ([], [])  # a curve without points
NO_LAW = np.full((2, 1), np.nan)


def draw_all(result: dict, rows, held_out, out: Path) -> list[str]:
    """Draws what could be fitted -> lines of markdown that show it."""
    at_mu = rows.query("depth == mu_rec")
    iso = result["isoflop"]
    lines = []
    if iso["budgets"]:
        lines += draw_isoflop(iso, at_mu, out / "isoflop.png")
        lines += draw_optima(iso, out / "optima.png")
    if "train" in result:
        lines += draw_law(result["train"], at_mu[at_mu.mu_rec > 1], out / "train.png")
    if "test_time" in result:
        lines += draw_curves(result["test_time"]["curves"], out / "test_time.png")
    if "unified depth/mu" in result:
        lines += draw_unified(result["unified depth/mu"], held_out, out / "unified.png")
    return [line for line in lines if line]


def draw_isoflop(iso: dict, at_mu, path: Path) -> list[str]:
    """Each budget's losses by mu_rec, and their parabola."""
    plots = []
    for found in iso["budgets"]:
        grid = at_mu[at_mu.budget == found["budget"]]
        x = np.log2(grid.mu_rec)
        fitted = np.linspace(1, x.max())
        parabola = np.polyval(found["parabola"], fitted)
        curves = [(x, grid.loss), (fitted, parabola)]
        ylabel = f"{found['budget']:.3g} FLOPs: loss"
        plots.append(Plot("log2 of mu_rec (0: fixed depth)", ylabel, curves))
    return figure(path, "", ["measured", "parabola"], plots)


def draw_optima(iso: dict, path: Path) -> list[str]:
    """By FLOPs: best mu_rec and tokens with 95 % intervals and power laws; lowest loss, and that at
    fixed depth.
    """
    budgets = pd.DataFrame(iso["budgets"])
    flops = budgets.budget
    plots = []
    for name in ("mu", "tokens"):
        curves = [(flops, line) for line in laws.low_fit_high(np.stack(budgets[name], 1))]
        exponent, log_k = iso["power_laws"].get(name, NO_LAW)[:, 0]
        curves += [(flops, np.exp(log_k) * flops**exponent), NONE]
        plots.append(Plot(FLOPS, f"best {name}", curves, {"xscale": "log", "yscale": "log"}))
    fixed = pd.Series(iso["fixed_depth"])
    curves = [NONE, (flops, budgets.loss), NONE, NONE, (fixed.index, fixed)]
    plots.append(Plot(FLOPS, "loss", curves, {"xscale": "log"}))
    names = ["2.5 %", "lowest point of the parabola", "97.5 %", "power law", "fixed depth"]
    return figure(path, "", names, plots)


def draw_law(fitted: dict, train, path: Path) -> list[str]:
    """Contours of L(mu, D) by mu and FLOPs, with the runs and the efficient frontier."""
    mu = np.linspace(train.mu_rec.min(), train.mu_rec.max(), 200)
    n_eff = np.interp(mu, train.mu_rec, train.n_eff)  # between runs
    tokens_per_flop = np.interp(mu, train.mu_rec, train.tokens / train.flops)
    flops = np.geomspace(train.flops.min(), train.flops.max())
    tokens = np.outer(flops, tokens_per_flop)
    loss = laws.law_loss(fitted["logs"][0], n_eff, tokens)
    image = Figure(dpi=130, layout="constrained")
    axes = image.subplots()
    lines = axes.contour(mu, flops, loss, 14, colors="0.5")
    axes.clabel(lines)
    best = mu[loss.argmin(1)]
    axes.plot(best, flops, "k-", label="efficient frontier, within the grid")
    axes.plot(train.mu_rec, train.flops, "k.", label="runs")
    axes.set(yscale="log", xlabel="mu_rec", ylabel=f"{FLOPS}; contours: loss")
    axes.legend()
    image.savefig(path)
    return [f"![]({path.name})"]


def draw_curves(curves: list[dict], path: Path) -> list[str]:
    """Loss by test-time depth and its fits in the four forms: of each N the run of most FLOPs."""
    largest = pd.DataFrame(curves).sort_values("budget").drop_duplicates("n_eff", keep="last")
    plots = []
    for curve in largest.sort_values("n_eff").to_dict("records"):
        depth = curve["depth"]
        lines = [(depth, curve["loss"])]
        lines += [(depth, laws.form_value(form, depth, **curve[form])) for form in laws.FORMS]
        plots.append(Plot(DEPTH, f"mu_rec {curve['mu_rec']}: loss", lines))
    return figure(path, "", ["measured", *laws.FORMS], plots)


def draw_unified(fitted: dict, held_out, path: Path) -> list[str]:
    """A held-out run of each N and D: measured, as the unified law predicts it, and with its
    measured floor (oracle).
    """
    logs = fitted["logs"][0]
    plots = []
    for first in held_out.drop_duplicates(["n_eff", "tokens"]).itertuples():
        run = held_out[held_out.run == first.run]
        lines = (run.loss, laws.predict(logs, run), laws.predict_from_best(logs, run))
        curves = [(run.depth, line) for line in lines]
        plots.append(Plot(DEPTH, f"mu_rec {first.mu_rec}, {first.tokens:.3g} tokens: loss", curves))
    return figure(path, "", ["measured", "unified law", "oracle"], plots)
