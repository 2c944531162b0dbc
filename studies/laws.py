"""
The scaling laws of looping (Parcae; Prairie et al. 2026): their fits, tables and figures.

    python -m studies.experiments isoflop --data DATA    # a grid of trainings; ends in these fits

    L = E + A N^-a + B D^-b + Z exp(-z depth mu^-gamma)       nats per token
    N = N_once + mu^phi N_rec

fitted by the Huber loss, delta 1e-3, on log L. N_rec are the parameters that a loop runs: core
blocks, their value tables and the injection; mu is mu_rec. phi is 1 ("if you were to unroll all
loops into real parameters") but in the law of arXiv 2604.21106, which fits it.

Rows of data have a line for each (run, depth) and the columns of ROW: run is a name, tokens and
flops are the training's. `prepared` adds the budget, and best, the run's loss at mu_rec.
"""

import math
from operator import attrgetter
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy.optimize import least_squares
from scipy.special import huber

from model import Model, config_of
from studies.pages import below_opening
from tools.arms import Run
from tools.figures import Plot, figure, fmt, frame_table, save_page

ROW = ["run", "mu_rec", "tokens", "flops", "n_once", "n_rec", "depth", "loss"]
DELTA = 1e-3  # of the Huber loss on log loss
RESTARTS = 1000  # random starts of a law's fit; the paper: 500, and 1,000 for the unified law
KEPT = 20  # of them, descended to the end
RESAMPLES = 400  # of the bootstraps; the fit itself comes first in their arrays
MOST_STEPS = 2000  # of a descent
EXACT = {"xtol": 1e-14, "ftol": 1e-14, "gtol": 1e-15, "max_nfev": MOST_STEPS}  # where a fit ends
TOO_FEW = "No law is fitted: that takes ten runs, three N and three D, and two budgets."
HELD_OUT = (
    "Held out: the ledger's other runs of the same model, rows and recipe with mu_bwd half of "
    "mu_rec, at 20, 40 or 80 tokens a parameter, seeds 0 to 7."
)
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
    "phi": (0.01, 4, 0.1, 2),
}
TRAINING = {"Z": ZERO, "z": ZERO, "gamma": 1}  # no term of the depth
LAWS = {  # what each law fixes
    "train": TRAINING | {"phi": 1},
    "unified depth/mu": {"gamma": 1, "phi": 1},
    "unified depth/mu^gamma": {"phi": 1},
    "unified depth": {"gamma": ZERO, "phi": 1},
    "train, phi": TRAINING,
}
# Forms of the loss by test-time depth: each is E + Z exp(-z t) of some t(depth).
FORMS = {
    "L + Z exp(-zT)": np.positive,
    "L + Z (1+depth)^-z": np.log1p,
    "L + Z depth^-z": np.log,
    "Z depth^-z": np.log,
}
WITHOUT_FLOOR = "Z depth^-z"


# -- the data


def sizes(cfg) -> tuple[int, int]:
    """Parameters that run once, and those that run in every loop."""
    with torch.device("meta"):
        model = Model(cfg)
    loop = ["injection."]
    for i in model.core_layers:
        loop += [f"blocks.{i}.", f"ve.{i}."]
    once = 0
    looped = 0
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(loop)):
            looped += parameter.numel()
        else:
            once += parameter.numel()
    return once, looped


def rows_of(runs: list[Run]) -> pd.DataFrame:
    """A row for each depth at which these runs were evaluated."""
    rows = []
    for run in runs:
        cfg = config_of(run.flags)
        tokens = run.train[-1]["tokens"]
        flops = tokens * run.config["flops_per_token"]
        same = [run.name, cfg.mu_rec, tokens, flops, *sizes(cfg)]
        for depth, loss in run.last["loss"].items():
            rows.append([*same, depth, loss])
    return pd.DataFrame(rows, columns=ROW)


def prepared(rows) -> pd.DataFrame:
    """Adds budget, best and N (n_eff); runs that were not evaluated at mu_rec are left out."""
    best = at_mu_rec(rows).set_index("run").loss
    rows = rows.assign(budget=budgets_of(rows.flops))
    rows["best"] = rows.run.map(best)
    rows["n_eff"] = rows.n_once + rows.mu_rec * rows.n_rec
    rows = rows.dropna(subset="best")
    return rows.sort_values(["mu_rec", "depth"], kind="stable", ignore_index=True)


def budgets_of(flops: pd.Series) -> pd.Series:
    """The budget of each run, to three digits: the mean of FLOPs within 5 % of their neighbours."""
    known = flops.sort_values()
    group = (known.pct_change() > 0.05).cumsum()
    means = known.groupby(group).transform("mean")
    return means.map("{:.3g}".format).astype(float)


def at_mu_rec(rows) -> pd.DataFrame:
    return rows[rows.depth == rows.mu_rec]


# -- the law


def law_loss(logs, rows):
    """The law on rows or {column: values}; logs: of its parameters in BOX's order, maybe complex."""
    E, A, a, B, b, *_, phi = np.exp(logs)
    unrolled = rows["mu_rec"] ** phi * rows["n_rec"]
    N = rows["n_once"] + unrolled
    size = A * N**-a
    data = B * rows["tokens"] ** -b
    return E + size + data + loop_term(logs, rows)


def loop_term(logs, rows):
    """What too few loops at test time cost."""
    *_, Z, z, gamma, _ = np.exp(logs)
    exponent = -z * rows["depth"] * rows["mu_rec"] ** -gamma
    return Z * np.exp(exponent)


def loss_from_best(logs, rows):
    """The same with the measured loss at depth mu as its floor, the paper's oracle."""
    return rows.best + loop_term(logs, rows)


class Problem:
    """A law to fit to rows of data: its box, and descents from given starts."""

    def __init__(self, rows, name: str):
        fixed = LAWS[name]
        self.fixed = {key: math.log(fixed[key]) for key in fixed}
        self.free = [key for key in BOX if key not in fixed]
        self.rows = {column: rows[column].to_numpy(float) for column in ROW[1:]}
        sizes_and_data = rows[["n_eff", "tokens"]].to_numpy(float)
        self.center = np.log(sizes_and_data).mean(0)
        box = np.log([BOX[key] for key in self.free])
        box[0] += np.log(rows.loss.min())
        self.low, self.high, self.first, self.last = box.T

    def logs(self, q):
        """The logs of all parameters, from the free ones as they are fitted."""
        known = dict(zip(self.free, q)) | self.fixed
        ln_N, ln_D = self.center
        known["A"] += np.exp(known["a"]) * ln_N
        known["B"] += np.exp(known["b"]) * ln_D
        return np.array([known[key] for key in BOX])

    def descend(self, start, some=slice(None), **limits):
        """Huber fit to some of the rows from one start -> scipy's result."""
        rows = {column: values[some] for column, values in self.rows.items()}

        def residual(q):
            guess = law_loss(self.logs(q), rows)
            return np.log(guess / rows["loss"])

        inside = np.clip(start, self.low + 1e-10, self.high - 1e-10)
        limits |= {"bounds": (self.low, self.high), "loss": "huber", "f_scale": DELTA}
        return least_squares(residual, inside, jac="cs", **limits)

    def solve(self, rng):
        """The best of the KEPT best of RESTARTS random starts, descended to the end."""
        shape = (RESTARTS, len(self.free))
        starts = rng.uniform(self.first, self.last, shape)
        rough = [self.descend(start, method="dogbox", max_nfev=20) for start in starts]
        rough.sort(key=attrgetter("cost"))
        kept = rough[:KEPT]
        found = [self.descend(result.x, **EXACT) for result in kept]
        return min(found, key=attrgetter("cost"))

    def at_bound(self, solutions) -> list[str]:
        """The parameters that stand at a bound in one of the solutions."""
        above_low = solutions - self.low
        below_high = self.high - solutions
        room = np.minimum(above_low, below_high).min(0)
        return [key for key, distance in zip(self.free, room) if distance < 1e-6]


def fit_law(rows, rng, name: str) -> dict:
    """Fits a law of LAWS, with a bootstrap over whole runs.

    -> free: the parameters it fits; bounded: those of them whose value or interval the bounds
    decide; logs (1 + RESAMPLES, parameters), the fit and then the bootstraps.
    """
    problem = Problem(rows, name)
    best = problem.solve(rng).x
    found = [best]
    by_run = rows.groupby("run", sort=False).indices
    runs = list(by_run.values())
    for _ in range(RESAMPLES):
        drawn = rng.integers(len(runs), size=len(runs))
        sample = np.concatenate([runs[i] for i in drawn])
        refit = problem.descend(best, sample, max_nfev=MOST_STEPS)
        found.append(refit.x)
    ends = np.quantile(found[1:], [0.025, 0.975], axis=0)
    bounded = problem.at_bound([best, *ends])
    logs = np.array([problem.logs(q) for q in found])
    return {"free": problem.free, "bounded": bounded, "logs": logs}


def percent_off(guess, loss):
    return 100 * np.abs(guess / loss - 1)


def huber_on_log(guess, loss):
    return huber(DELTA, np.log(guess / loss))


def prediction_errors(logs, rows) -> dict[str, float]:
    """A law's mean and largest error in percent, and the sum of its Huber loss."""
    guess = law_loss(logs, rows)
    percent = percent_off(guess, rows.loss)
    oracle = percent_off(loss_from_best(logs, rows), rows.loss)
    errors = {"percent": percent.mean(), "largest percent": percent.max()}
    errors["oracle percent"] = oracle.mean()
    errors["largest oracle percent"] = oracle.max()
    errors["huber"] = huber_on_log(guess, rows.loss).sum()
    return errors


def can_be_fitted(rows) -> bool:
    """Whether the runs differ enough for a law: in N, in D, and in their number."""
    have = rows[["run", "n_eff", "tokens", "budget"]].nunique()
    needed = [10, 3, 3, 2]  # as TOO_FEW says
    return (have >= needed).all()


def fit_laws(rows, held_out, rng) -> tuple[dict, dict]:
    """-> the fits by law, and their errors by law and runs."""
    looped = rows[rows.mu_rec > 1]
    fits = {}
    errors = {}
    for name, fixed in LAWS.items():
        data = with_curves(rows)
        unseen = held_out
        if name.startswith("train"):
            data = at_mu_rec(looped if "phi" in fixed else rows)
            unseen = at_mu_rec(held_out)
        if not can_be_fitted(data):
            continue
        fits[name] = fit_law(data, rng, name)
        logs = fits[name]["logs"][0]
        errors[f"{name}, fitted runs"] = prediction_errors(logs, data)
        if len(unseen):
            errors[f"{name}, held-out runs"] = prediction_errors(logs, unseen)
    return fits, errors


def with_curves(rows) -> pd.DataFrame:
    """Those of looped runs that were evaluated at more than three depths."""
    looped = rows[rows.mu_rec > 1]
    depths = looped.groupby("run").depth.transform("size")
    return looped[depths > 3]


# -- isoFLOP curves


def fit_isoflop(rows, rng) -> dict:
    """Per budget the parabola of loss in log2 mu and its lowest point in the measured range; their
    power laws.

    rows: one a run, at depth mu_rec; intervals by a bootstrap of the parabolas' pooled residuals.
    """
    looped = rows[rows.mu_rec > 1].sort_values("mu_rec")
    grids = []
    noise = []
    for _, grid in looped.groupby("budget"):
        if grid.mu_rec.nunique() < 4:
            continue
        x = np.log2(grid.mu_rec)
        parabola = np.polyfit(x, grid.loss, 2)
        smooth = np.polyval(parabola, x)
        grids.append(grid.assign(x=x, smooth=smooth))
        freedom = len(x) - 3  # less the parabola's parameters
        residuals = grid.loss - smooth
        noise.extend(residuals * math.sqrt(len(x) / freedom))
    budgets = [lowest_point(grid, noise, rng) for grid in grids]
    inner = [found for found in budgets if found["inside"]]
    power_laws = {}
    if len(inner) > 1:
        log_flops = np.log([found["budget"] for found in inner])
        for name in ("mu", "tokens"):
            log_best = np.log([found[name] for found in inner])
            power_laws[name] = np.polyfit(log_flops, log_best, 1)  # exponent, ln k
    once = rows[rows.mu_rec == 1]
    fixed = once.groupby("budget").loss.mean()
    return {"budgets": budgets, "power_laws": power_laws, "fixed_depth": fixed}


def lowest_point(grid, noise, rng) -> dict:
    """A budget's best mu and tokens, the fit first and then RESAMPLES bootstraps; inside: whether
    the best is within the grid, not at an end of it.

    grid: its runs by x = log2 mu, with the parabola's losses "smooth"; noise: of all budgets' runs.
    """
    x = grid.x.to_numpy()
    smooth = grid.smooth.to_numpy()
    low, *_, high = x
    drawn = smooth + rng.choice(noise, (RESAMPLES, len(x)))
    losses = np.vstack([smooth, drawn])
    parabolas = np.polyfit(x, losses.T, 2)  # (3, 1 + RESAMPLES)
    bend, slope, _ = parabolas
    vertex = -slope / (2 * bend)
    within = np.clip(vertex, low, high)
    falls = bend * (low + high) + slope < 0  # from one end to the other
    lower_end = np.where(falls, high, low)
    best = np.where(bend > 0, within, lower_end)
    log_tokens = np.interp(best, x, np.log(grid.tokens))
    found = {"budget": grid.budget.iloc[0], "mu": 2**best}
    found["tokens"] = np.exp(log_tokens)
    found["parabola"] = parabolas[:, 0]
    found["loss"] = np.polyval(found["parabola"], best[0])
    found["inside"] = low < best[0] < high
    found["slope"] = np.polyfit(x, smooth, 1)[0]  # nats for each doubling of mu_rec
    return found


# -- test-time curves


def form_value(name: str, depth, E, Z, z):
    t = FORMS[name](depth)
    return E + Z * np.exp(-z * t)


def fit_form(name: str, points) -> dict:
    """E, Z and z of a test-time form, by least squares on log loss."""
    depth = points.depth.to_numpy(float)
    loss = points.loss.to_numpy(float)
    highest = 1e-9 if name == WITHOUT_FLOOR else np.inf

    def residual(q):
        guess = form_value(name, depth, *q)
        return np.log(np.maximum(guess, 1e-9) / loss)

    lowest = loss.min()
    floor = min(lowest, highest / 2)
    start = (floor, loss[0] - lowest, 0.5)
    low = [0, -np.inf, 1e-4]
    high = [highest, np.inf, 50]
    best = least_squares(residual, start, bounds=(low, high), x_scale="jac", **EXACT)
    return dict(zip(("E", "Z", "z"), best.x))


def form_misfit(name: str, fitted: dict, points) -> float:
    """The mean Huber loss of a fitted form on a run's points."""
    guess = form_value(name, points.depth, **fitted)
    return huber_on_log(guess, points.loss).mean()


def fit_curves(rows) -> tuple[dict, pd.DataFrame]:
    """Each run's loss against depth in the paper's four forms -> {run: {form: its fit}}, and a table
    by form: the Huber loss in sample and, for fits to depths <= mu, beyond mu.
    """
    curves = {}
    scores = []
    for run, points in rows.groupby("run", sort=False):
        near = points[points.depth <= points.mu_rec]
        beyond = points.drop(near.index)
        best = points.best.iloc[0]
        curves[run] = {}
        for name in FORMS:
            fitted = fit_form(name, points)
            curves[run][name] = fitted
            score = {"test-time law, mean over runs": name}
            score["huber"] = form_misfit(name, fitted, points)
            score["floor off percent"] = percent_off(fitted["E"], best)
            if len(near) > 2 and len(beyond):
                shallow = fit_form(name, near)
                score["huber beyond mu"] = form_misfit(name, shallow, beyond)
            scores.append(score)
    by_form = pd.DataFrame(scores).groupby("test-time law, mean over runs", sort=False)
    table = by_form.mean()
    table["largest floor off percent"] = by_form["floor off percent"].max()
    return curves, table


# -- the page


def write_fit(rows, held_out, out: Path) -> None:
    """Fits what the runs can support, and writes fit.md and figures into the folder."""
    rows = prepared(rows)
    held_out = prepared(held_out)
    rng = np.random.default_rng(0)
    out.mkdir(parents=True, exist_ok=True)
    page = [f"[95 % interval], by bootstrap. {HELD_OUT}", ""]
    figures = []
    trained = at_mu_rec(rows)
    iso = fit_isoflop(trained, rng)
    if iso["budgets"]:
        page += isoflop_table(iso)
        page += equal_tokens_table(trained)
        page += power_laws(iso)
        figures += draw_isoflop(iso, trained, out / "isoflop.png")
        figures += draw_optima(iso, out / "optima.png")
    fits, errors = fit_laws(rows, held_out, rng)
    for name, fitted in fits.items():
        page.append(law_line(name, fitted))
    page += [""] if fits else [TOO_FEW, ""]
    if "train" in fits:
        looped = trained[trained.mu_rec > 1]
        figures += draw_law(fits["train"], looped, out / "train.png")
    deep = with_curves(rows)
    if len(deep):
        curves, forms = fit_curves(deep)
        page += frame_table(forms.map("{:.3g}".format))
        figures += draw_curves(curves, deep, out / "test_time.png")
    if errors:
        table = pd.DataFrame(errors).T.rename_axis("law")
        page += frame_table(table.map("{:.3g}".format))
    if "unified depth/mu" in fits:
        figures += draw_unified(fits["unified depth/mu"], held_out, out / "unified.png")
    pictures = [line for line in figures if line]
    title = f"# Fits of {rows.run.nunique()} runs"
    opening = [title, "", *pictures[:1], ""]
    page += pictures[1:]
    file = out / "fit"
    lines = below_opening(file, opening, page)
    save_page(file, lines)


def span(values) -> str:
    """The fit, which comes first, and the 95 % interval of its bootstraps."""
    fitted, *drawn = values
    low, high = np.percentile(drawn, [2.5, 97.5])
    return f"{fitted:.4g} [{low:.4g}, {high:.4g}]"


def isoflop_table(iso: dict) -> list[str]:
    """The lowest points of the budgets."""
    shown = []
    for found in iso["budgets"]:
        budget = found["budget"]
        end = "" if found["inside"] else ", an end of the grid"
        row = {"FLOPs": f"{budget:.3g}", "lowest loss": fmt(found["loss"])}
        row["mu_rec"] = span(found["mu"]) + end
        row["tokens"] = span(found["tokens"])
        row["slope, nats a doubling of mu_rec"] = fmt(found["slope"], "+.4f")
        row["fixed depth 1"] = fmt(iso["fixed_depth"].get(budget))
        shown.append(row)
    return frame_table(pd.DataFrame(shown).set_index("FLOPs"))


def power_laws(iso: dict) -> list[str]:
    lines = []
    for name, (exponents, _) in iso["power_laws"].items():
        lines.append(f"- best {name} ~ C^{span(exponents)}")
    return lines


def equal_tokens_table(at_mu) -> list[str]:
    """By how much looped runs end below one loop in training of as many tokens."""
    one_loop = at_mu[at_mu.mu_rec == 1]
    known = one_loop.groupby("tokens").loss.mean()  # over seeds
    tokens = known.index
    between = at_mu.tokens.between(tokens.min(), tokens.max())
    looped = at_mu[between & (at_mu.mu_rec > 1)]
    if looped.empty:
        return []
    log_tokens = np.log(looped.tokens)
    expected = np.interp(log_tokens, np.log(tokens), known)
    gain = (expected - looped.loss).map("{:.4f}".format)
    at = looped.tokens.map(" at {:.2g}".format)
    budget = looped.budget.map("{:.3g} FLOPs".format)
    gains = looped.assign(cell=gain + at, budget=budget)
    shown = gains.pivot_table("cell", "mu_rec", "budget", aggfunc="; ".join, sort=False)
    head = (
        "At equal tokens: nats by which more loops in training are better than one, at so many tokens. "
        "The loss of one loop is interpolated in the logarithm of tokens."
    )
    return [head, "", *frame_table(shown)]


def law_line(name: str, fitted: dict) -> str:
    values = np.exp(fitted["logs"])
    said = []
    for key, drawn in zip(BOX, values.T):
        if key in fitted["free"]:
            said.append(f"{key} {span(drawn)}")
    if fitted["bounded"]:
        names = " ".join(fitted["bounded"])
        said.append(f"decided by their bounds: {names}")
    return f"- {name}: {', '.join(said)}"


# -- figures

FLOPS = "training FLOPs"
DEPTH = "test-time depth, loops"
NONE = ([], [])  # a curve without points


def draw_isoflop(iso: dict, at_mu, path: Path) -> list[str]:
    """Each budget's losses by mu_rec, and their parabola."""
    plots = []
    for found in iso["budgets"]:
        budget = found["budget"]
        grid = at_mu[at_mu.budget == budget]
        x = np.log2(grid.mu_rec)
        between = np.linspace(1, x.max())
        parabola = np.polyval(found["parabola"], between)
        curves = [(x, grid.loss), (between, parabola)]
        ylabel = f"{budget:.3g} FLOPs: loss"
        plots.append(Plot("log2 of mu_rec (0: fixed depth)", ylabel, curves))
    return figure(path, "", ["measured", "parabola"], plots)


def draw_optima(iso: dict, path: Path) -> list[str]:
    """By FLOPs: best mu_rec and tokens with their power laws; the lowest loss beside fixed depth's."""
    budgets = pd.DataFrame(iso["budgets"])
    flops = budgets.budget
    log_log = {"xscale": "log", "yscale": "log"}
    plots = []
    for name in ("mu", "tokens"):
        best = budgets[name].str[0]
        curves = [(flops, best), NONE, NONE]
        if name in iso["power_laws"]:
            exponent, log_k = iso["power_laws"][name][:, 0]
            curves[1] = (flops, np.exp(log_k) * flops**exponent)
        plots.append(Plot(FLOPS, f"best {name}", curves, log_log))
    fixed = iso["fixed_depth"]
    curves = [(flops, budgets.loss), NONE, (fixed.index, fixed)]
    plots.append(Plot(FLOPS, "loss", curves, {"xscale": "log"}))
    return figure(path, "", ["lowest point of the parabola", "power law", "fixed depth"], plots)


def draw_law(fitted: dict, train, path: Path) -> list[str]:
    """Contours of L(mu, D) by mu and FLOPs, with the runs and the efficient frontier."""
    measured = train.mu_rec
    mu = np.linspace(measured.min(), measured.max(), 200)
    flops = np.geomspace(train.flops.min(), train.flops.max())
    tokens_per_flop = np.interp(mu, measured, train.tokens / train.flops)  # between runs
    tokens = np.outer(flops, tokens_per_flop)
    grid = {"mu_rec": mu, "tokens": tokens, "depth": 1}
    grid |= train[["n_once", "n_rec"]].iloc[0]
    loss = law_loss(fitted["logs"][0], grid)
    image = Figure(dpi=130, layout="constrained")
    axes = image.subplots()
    contours = axes.contour(mu, flops, loss, 14, colors="0.5")
    axes.clabel(contours)
    best = mu[loss.argmin(1)]
    axes.plot(best, flops, "k-", label="efficient frontier, within the grid")
    axes.plot(measured, train.flops, "k.", label="runs")
    axes.set(yscale="log", xlabel="mu_rec", ylabel=f"{FLOPS}; contours: loss")
    axes.legend()
    image.savefig(path)
    return [f"![]({path.name})"]


def draw_curves(fits: dict, rows, path: Path) -> list[str]:
    """Loss by test-time depth and its fits in the four forms: of each N the run of most FLOPs."""
    by_budget = rows.sort_values("budget", kind="stable")
    largest = by_budget.drop_duplicates("n_eff", keep="last")
    plots = []
    for row in largest.sort_values("n_eff").itertuples():
        points = rows[rows.run == row.run]
        depth = points.depth
        curves = [(depth, points.loss)]
        for name, fitted in fits[row.run].items():
            guess = form_value(name, depth, **fitted)
            curves.append((depth, guess))
        plots.append(Plot(DEPTH, f"mu_rec {row.mu_rec}: loss", curves))
    return figure(path, "", ["measured", *FORMS], plots)


def draw_unified(fitted: dict, held_out, path: Path) -> list[str]:
    """A held-out run of each N and D: measured, as the unified law predicts it, and with its
    measured floor (oracle).
    """
    logs = fitted["logs"][0]
    plots = []
    for first in held_out.drop_duplicates(["n_eff", "tokens"]).itertuples():
        run = held_out[held_out.run == first.run]
        guess = law_loss(logs, run)
        oracle = loss_from_best(logs, run)
        curves = [(run.depth, line) for line in (run.loss, guess, oracle)]
        ylabel = f"mu_rec {first.mu_rec}, {first.tokens:.3g} tokens: loss"
        plots.append(Plot(DEPTH, ylabel, curves))
    return figure(path, "", ["measured", "unified law", "oracle"], plots)
