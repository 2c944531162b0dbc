"""
Fits the scaling laws of looping to runs, draws them, and says what to train.

    python -m studies.experiments isoflop --data DATA # a grid of trainings; ends in these fits
    python -m studies.scaling_laws fit runs/iso-* --held-out runs/long        # of run directories
    python -m studies.scaling_laws fit mine.csv         # of a table of anyone's measurements
    python -m studies.scaling_laws advise --flops 1e19 --preset parcae-140m [--fit DIR/fit.json]

A table has a line for each depth at which a run was evaluated, and the columns run (a name), mu_rec,
depth (loops in use), tokens and flops (of the training), n_eff (effective parameters N, of the
model at mu_rec: blocks count as often as they are applied), loss (nats a token).
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from looped.console import DAMAGE, Parser, fail, outside, positive_float, run_cli
from looped.figures import fmt, frame_table, table
from looped.logs import read_json
from model import PRESETS, config_of
from studies import law_figures, laws, ledger
from studies.laws import LAWS

KINDS = {
    "run": str,
    "mu_rec": int,
    "depth": int,
    "tokens": float,
    "flops": float,
    "n_eff": float,
    "loss": float,
}
ROW = list(KINDS)
POSITIVE = ["mu_rec", "depth", "tokens", "flops", "n_eff"]

# -- the data


def rows_of(lines: list[dict]) -> pd.DataFrame:
    """A row for each depth at which the runs of these lines of the ledger were evaluated."""
    rows = []
    for line in lines:
        cfg = config_of(line["settings"])
        flops = line["tokens"] * line["flops_per_token"]
        n_eff = laws.effective_params(cfg)
        for depth, loss in line["loss"].items():
            rows.append([line["run"], cfg.mu_rec, depth, line["tokens"], flops, n_eff, loss])
    return pd.DataFrame(rows, columns=ROW).astype({"loss": float})


def prepared(rows: pd.DataFrame, left: list[str]) -> pd.DataFrame:
    """Adds the budget (FLOPs to two digits) and "best", the run's loss at mu_rec; leaves out what
    cannot be used.
    """
    for run in sorted(set(rows.run[~np.isfinite(rows.loss)])):
        left.append(f"{run}: a loss that is not finite")
    rows = rows[np.isfinite(rows.loss)]
    twice = rows.duplicated(ROW[1:])  # one run, two names
    for run in sorted(set(rows.run[twice])):
        left.append(f"{run}: the numbers of another run")
    rows = rows[~twice]
    rows = rows.assign(budget=rows.flops.map("{:.2g}".format).astype(float))
    at_mu = rows[rows.depth == rows.mu_rec].set_index("run")
    for run in set(rows.run) - set(at_mu.index):
        left.append(f"{run}: not evaluated at depth mu_rec")
    far = at_mu.loss > 1.5 * at_mu.groupby("budget").loss.transform("median")
    for run, loss in at_mu.loss[far].items():
        left.append(f"{run}: loss {loss:.3f}, over 1.5 x the median of its budget")
    rows = rows.assign(best=rows.run.map(at_mu.loss[~far])).dropna()
    return rows.sort_values(["mu_rec", "depth"], kind="stable", ignore_index=True)


# -- fit


def fit_all(rows: pd.DataFrame, left: list[str], held_out: pd.DataFrame) -> dict:
    """Everything that the runs can support; left_out names what they cannot, and why."""
    rng = np.random.default_rng(0)
    looped = rows[rows.mu_rec > 1]
    deep = looped[looped.groupby("run").depth.transform("size") > 3]
    n_eff = dict(zip(rows.mu_rec.astype(str), rows.n_eff))
    isoflop = laws.fit_isoflop(rows[rows.depth == rows.mu_rec], rng, left)
    result = {"n_eff": n_eff, "left_out": left, "isoflop": isoflop}
    if len(deep):
        result["test_time"] = laws.fit_curves(deep)
    for name, law in LAWS.items():
        data = deep
        unseen = held_out
        if "Z" not in law.free:  # a law of training
            data = looped[looped.depth == looped.mu_rec]
            unseen = held_out[held_out.depth == held_out.mu_rec]
        have = data[["run", "n_eff", "tokens", "budget"]].nunique()
        need = [len(law.free) + 1, 3, 3, 2]
        if (have < need).any():
            left.append(f"{name}: different runs, N, D, budgets: {list(have)}; it needs {need}")
            continue
        result[name] = laws.fit_law(data, rng, name)
        if len(unseen):
            result[name].held_out = laws.prediction_errors(result[name].logs, unseen)
    return result


def for_json(value):
    """For JSON: arrays and numpy's numbers as Python's, fits as dictionaries."""
    return asdict(value) if isinstance(value, laws.Fit) else value.tolist()


def write_fit(rows: pd.DataFrame, held_out: pd.DataFrame, out: Path) -> dict:
    """Fits, prints, and writes fit.md, fit.json and figures into the folder."""
    left = []
    rows = prepared(rows, left)
    held_out = prepared(held_out, [])
    result = fit_all(rows, left, held_out)
    page = [f"# Fits of {rows.run.nunique()} runs", "", "[95 % interval], by bootstrap.", ""]
    if result["isoflop"]["budgets"]:
        page += isoflop_table(result["isoflop"]) + equal_tokens_table(rows)
    inside = [found["inside"] for found in result["isoflop"]["budgets"]]
    for name, line in result["isoflop"]["power_laws"].items():
        of = f"{sum(inside)} of {len(inside)} budgets have their minimum inside the grid"
        page.append(f"- best {name} ~ C^{span(line[0])}; {of}")
    errors = {}
    fitted = [name for name in LAWS if name in result]
    for name in fitted:
        page.append(law_line(name, result[name]))
        errors[f"{name}, fitted runs"] = result[name].errors
        if result[name].held_out:
            errors[f"{name}, held-out runs"] = result[name].held_out
    page += [*(f"- left out: {text}" for text in left), ""]
    if "test_time" in result:
        page += number_table("test-time law, mean over runs", result["test_time"]["table"])
    page += number_table("law", errors)
    page += budget_table({name: result[name] for name in fitted})
    print(*page, sep="\n")
    out.mkdir(parents=True, exist_ok=True)
    (out / "fit.json").write_text(json.dumps(result, default=for_json), encoding="utf-8")
    page += [f"![]({name}.png)" for name in law_figures.draw_all(result, rows, held_out, out)]
    (out / "fit.md").write_text("\n".join(page), encoding="utf-8")
    return result


def equal_tokens_table(rows: pd.DataFrame) -> list[str]:
    """By how much looped runs end below one loop in training of as many tokens."""
    at_mu = rows[rows.depth == rows.mu_rec]
    once = at_mu[at_mu.mu_rec == 1].groupby("tokens", as_index=False).loss.mean()  # over seeds
    looped = at_mu[at_mu.mu_rec > 1]
    if len(once) < 2:
        return []
    beyond = {"left": np.nan, "right": np.nan}
    level = np.interp(np.log(looped.tokens), np.log(once.tokens), once.loss, **beyond)
    gains = looped.assign(gain=level - looped.loss).dropna()
    if gains.empty:
        return []
    cells = gains.gain.map("{:.4f}".format) + gains.tokens.map(" at {:.2g}".format)
    frame = gains.assign(cell=cells, budget=gains.budget.map("{:.2g} FLOPs".format))
    shown = frame.pivot_table("cell", "mu_rec", "budget", aggfunc="; ".join, sort=False)
    head = (
        "At equal tokens: nats that loops in training gain over one, at so many tokens; one's loss "
        "is interpolated in the logarithm of tokens between its runs."
    )
    return [head, "", *frame_table(shown)]


def number_table(name: str, rows: dict[str, dict]) -> list[str]:
    """A table of the numbers that all rows share; nothing without rows."""
    if not rows:
        return []
    frame = pd.DataFrame.from_dict(rows, orient="index").dropna(axis="columns")
    frame.columns = frame.columns.str.replace("_", " ")
    return frame_table(frame.map("{:.3g}".format).rename_axis(name))


def budget_table(fits: dict[str, laws.Fit]) -> list[str]:
    """How far off each law is on each budget when it is fitted to the others alone."""
    if not fits:
        return []
    rows = []
    for name, fitted in fits.items():
        row = {"law": name}
        for budget, off in fitted.without.items():
            row[f"{budget:.2g} FLOPs"] = f"{off['percent']:.2g} ({off['largest percent']:.2g})"
        rows.append(row)
    head = "Each budget predicted from the others: percent off, mean (largest)."
    return [head, "", *frame_table(pd.DataFrame(rows).set_index("law"))]


def span(values) -> str:
    """The fit, and the 95 % interval of its bootstraps."""
    low, fit, high = law_figures.low_fit_high(values)
    return f"{fit:.4g} [{low:.4g}, {high:.4g}]"


def isoflop_table(iso: dict) -> list[str]:
    rows = []
    for found in iso["budgets"]:
        flops = found["budget"]
        at = span(found["mu"])
        if not found["inside"]:
            at += ", an end of the grid"
        slope = f"{found['slope']:+.4f}"
        fixed = fmt(iso["fixed_depth"].get(flops))
        loss = fmt(found["loss"])
        rows.append([f"{flops:.2g}", loss, at, span(found["tokens"]), slope, fixed])
    slope = "slope, nats a doubling of mu_rec"
    return table(["FLOPs", "lowest loss", "mu_rec", "tokens", slope, "fixed depth 1"], rows)


def law_line(name: str, fitted: laws.Fit) -> str:
    values = np.exp(fitted.logs).T
    said = [f"{key} {span(values[laws.PARAMS.index(key)])}" for key in fitted.law]
    return f"- {name}: {', '.join(said + fitted.bounded)}"


# -- advise


@dataclass
class Known:
    """What is known of a model's best mu_rec."""

    source: str
    logs: np.ndarray  # of the law of training
    grid: range  # of mu_rec that it was fitted on
    optima: dict[float, float]  # the measured best mu_rec by FLOPs
    power_law: list[float] | None  # exponent and ln k of the best mu_rec in the FLOPs


def of_paper(preset: str) -> Known:
    if preset not in laws.PAPER:
        advice = "fit one (studies.experiments isoflop) and give --fit DIR/fit.json"
        fail(f"the paper has no law for --preset {preset}; {advice}")
    optima = laws.PAPER_OPTIMA[preset]
    exponent = laws.PAPER_EXPONENT
    log_k = np.mean([math.log(mu / flops**exponent) for flops, mu in optima.items()])
    return Known("the paper", laws.PAPER[preset], range(2, 13), optima, [exponent, log_k])


def of_fit(path: Path, preset: str) -> Known:
    result = read_json(path)
    if "train" not in result:
        fail(f"{path} has no law of training, and says in left_out why; fit more runs")
    for mu, n_eff in result["n_eff"].items():
        if laws.effective_params(laws.config_at(preset, int(mu))) != n_eff:
            fail(f"{path} is of another model than --preset {preset}; name its preset")
    mus = [int(mu) for mu in result["n_eff"] if mu != "1"]
    iso = result["isoflop"]
    optima = {found["budget"]: found["mu"][0] for found in iso["budgets"] if found["inside"]}
    power_law = None
    if "mu" in iso["power_laws"]:
        power_law = [values[0] for values in iso["power_laws"]["mu"]]
    logs = np.array(result["train"]["logs"])
    return Known(str(path), logs, range(min(mus), max(mus) + 1), optima, power_law)


def advise(args) -> None:
    """Prints the measured optima, the mu_rec that their power law gives for a budget, and the
    mu_rec of lowest predicted loss.
    """
    known = of_fit(args.fit, args.preset) if args.fit else of_paper(args.preset)
    first, last = known.grid[0], known.grid[-1]
    models = [laws.config_at(args.preset, mu) for mu in known.grid]
    N = [laws.effective_params(cfg) for cfg in models]
    D = [args.flops / cfg.flops_per_token() for cfg in models]
    loss = laws.predict(known.logs, N, D)  # (1 + bootstraps, grid)
    best = loss[0].argmin()
    mu = known.grid[best]
    law = f"law L(mu, D), {known.source}: mu_rec {mu}"
    if mu in (first, last):
        law += f"; an end of the grid {first} … {last}, no minimum"
    law += f", {D[best]:.4g} tokens, loss {loss[0, best]:.4f} nats/token"
    if known.optima:
        optima = ", ".join(f"{mu:.3g} at {flops:.3g}" for flops, mu in known.optima.items())
        print(f"measured optima, {known.source}: mu_rec {optima} FLOPs")
    if known.power_law:
        exponent, log_k = known.power_law
        power = math.exp(log_k) * args.flops**exponent
        mu = round(np.clip(power, first, last))
        said = f"power law C^{exponent:.2f} through them: mu_rec {power:.3g}"
        within = min(known.optima) <= args.flops <= max(known.optima)
        print(f"{said} at {args.flops:g} FLOPs{'' if within else '; beyond the measured budgets'}")
    print(law)
    if len(loss) > 1:
        low, _, high = law_figures.low_fit_high(loss[:, best])
        print(f"95 % of bootstraps over runs: loss {low:.4f} to {high:.4f}")
    print(f"python train.py --preset {args.preset} --mu-rec {mu} --flops {args.flops:g}")


# -- main


def fit(args) -> None:
    result = write_fit(read_rows(args.runs), read_rows(args.held_out), args.out)
    if not result["isoflop"]["budgets"] and result.keys() == {"n_eff", "left_out", "isoflop"}:
        advice = "`python -m studies.experiments isoflop --dry-run` prints a grid of runs that can"
        fail(f"no law can be fitted to {args.runs[0]} and the others: see above; {advice}")


def read_rows(paths: list[Path]) -> pd.DataFrame:
    """The rows of run directories, and of tables in CSV."""
    if not paths:
        return rows_of([])
    frames = []
    for path in paths:
        frames.append(rows_of_table(path) if path.suffix == ".csv" else rows_of_run(path))
    return pd.concat(frames, ignore_index=True)


def rows_of_run(path: Path) -> pd.DataFrame:
    line = ledger.record(path)
    if line is None:
        fail(f"{path} is no finished run; leave it out, or finish it with train.py --resume")
    return rows_of([line])


def rows_of_table(path: Path) -> pd.DataFrame:
    """Anyone's measurements: a CSV with the columns ROW."""
    with outside(f"{path} is no table with the columns {','.join(ROW)}", "mend it", DAMAGE):
        rows = pd.read_csv(path)[ROW].astype(KINDS)
        if not (rows[POSITIVE] > 0).all(axis=None):
            raise ValueError(f"{', '.join(POSITIVE)} must be above 0")
    return rows


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m studies.scaling_laws")
    commands = parser.add_subparsers(dest="command", required=True)
    fitting = commands.add_parser("fit", help="fit the laws; writes fit.md, fit.json and figures")
    add = fitting.add_argument
    add("runs", nargs="+", type=Path, help="run directories, or tables (.csv)")
    add("--held-out", nargs="*", type=Path, default=[], help="runs of the model to predict only")
    folder = Path("results/scaling")
    add("--out", type=Path, default=folder, help="folder to write to (default: %(default)s)")
    advising = commands.add_parser("advise", help="mu_rec for a budget")
    add = advising.add_argument
    add("--flops", type=positive_float, required=True, help="training FLOPs")
    add("--preset", choices=PRESETS, required=True, help="model")
    add("--fit", type=Path, help="fit.json of your own runs (default: the paper's numbers)")
    fitting.set_defaults(run=fit)
    advising.set_defaults(run=advise)
    args = parser.parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    run_cli(main)
