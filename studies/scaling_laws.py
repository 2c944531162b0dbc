"""
Fits the scaling laws of looping to runs, draws them, and says what to train.

    python -m studies.experiments isoflop --data DATA # a grid of trainings; ends in these fits
    python -m studies.scaling_laws fit runs/iso-* --held-out runs/long        # of run directories
    python -m studies.scaling_laws advise --flops 1e19 --preset parcae-140m [--fit DIR/fit.json]
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from looped.console import Parser, fail, positive_float, run_cli
from looped.figures import table
from looped.logs import read_json
from model import PRESETS, config_of
from studies import law_figures, laws, ledger
from studies.laws import LAWS

COLUMNS = ["run", "mu_rec", "depth", "tokens", "flops", "n_eff", "loss"]

# -- the data


def rows_of(lines: list[dict]) -> pd.DataFrame:
    """A row for each depth at which the runs of these lines of the ledger were evaluated."""
    rows = []
    for line in lines:
        cfg = config_of(line["settings"])
        flops = line["tokens"] * line["flops_per_token"]
        run = [line["run"], cfg.mu_rec]
        size = [line["tokens"], flops, laws.effective_params(cfg)]
        for depth, loss in line["loss"].items():
            rows.append([*run, depth, *size, loss])
    return pd.DataFrame(rows, columns=COLUMNS).astype({"loss": float})


def usable(rows: pd.DataFrame, left: list[str]) -> pd.DataFrame:
    """Adds the budget (FLOPs to two digits) and "best", the run's loss at mu_rec; leaves out what
    cannot be used.
    """
    rows = rows[np.isfinite(rows.loss)]
    rows = rows.drop_duplicates(COLUMNS[1:])  # the same run under two names
    rows = rows.assign(budget=[float(f"{flops:.2g}") for flops in rows.flops])
    main = rows[rows.depth == rows.mu_rec].set_index("run")
    for run in set(rows.run) - set(main.index):
        left.append(f"{run}: not evaluated at depth mu_rec")
    limit = 1.5 * main.groupby("budget").loss.transform("median")
    for run, loss in main.loss[main.loss > limit].items():
        left.append(f"{run}: loss {loss:.3f}, over 1.5 x the median of its budget")
    best = main.loss[main.loss <= limit]
    rows = rows[rows.run.isin(best.index)].sort_values(["mu_rec", "depth"], kind="stable")
    return rows.assign(best=rows.run.map(best)).reset_index(drop=True)


# -- fit


def fit_all(rows: pd.DataFrame, left: list[str], held_out: pd.DataFrame) -> dict:
    """Everything that the runs can support; left_out names what they cannot, and why."""
    rng = np.random.default_rng(0)
    at_mu = rows[rows.depth == rows.mu_rec]
    looped = rows[rows.mu_rec > 1]
    train = looped[looped.depth == looped.mu_rec]
    deep = looped[looped.groupby("run").depth.transform("size") > 3]
    n_eff = dict(zip(rows.mu_rec.astype(str), rows.n_eff))
    isoflop = laws.fit_isoflop(at_mu, rng, left)
    result = {"n_eff": n_eff, "left_out": left, "isoflop": isoflop}
    if len(deep):
        result["test_time"] = laws.fit_curves(deep)
    for name, law in LAWS.items():
        data = train
        unseen = held_out[held_out.depth == held_out.mu_rec]
        if "Z" in law.free:
            data = deep
            unseen = held_out
        have = data[["run", "n_eff", "tokens", "budget"]].nunique()
        need = [len(law.free) + 1, 3, 3, 2]
        if (have < need).any():
            left.append(f"{name}: different runs, N, D, budgets: {list(have)}; it needs {need}")
            continue
        result[name] = laws.fit_law(data, rng, name)
        if len(unseen):
            result[name].held_out = laws.prediction_errors(result[name].logs, unseen)
    return result


def plain(value):
    """For JSON: arrays and numpy's numbers as Python's, fits as dictionaries."""
    return asdict(value) if isinstance(value, laws.Fit) else value.tolist()


def write_fit(rows: pd.DataFrame, held_out: pd.DataFrame, out: Path) -> dict:
    """Fits, prints, and writes fit.md, fit.json and figures into the folder."""
    left = []
    rows = usable(rows, left)
    held_out = usable(held_out, [])
    result = fit_all(rows, left, held_out)
    page = [f"# Fits of {rows.run.nunique()} runs", "", "[95 % interval], by bootstrap.", ""]
    page += isoflop_lines(result["isoflop"])
    errors = {}
    for name in LAWS:
        if name in result:
            page.append(law_line(name, result[name]))
            errors[f"{name}, fitted runs"] = result[name].errors
            errors[f"{name}, held-out runs"] = result[name].held_out
    page += [f"- left out: {text}" for text in left]
    page.append("")
    if "test_time" in result:
        page += number_table("test-time law, mean over runs", result["test_time"]["table"])
    page += number_table("law", {name: scores for name, scores in errors.items() if scores})
    print(*page, sep="\n")
    out.mkdir(parents=True, exist_ok=True)
    (out / "fit.json").write_text(json.dumps(result, default=plain), encoding="utf-8")
    page += [f"![]({name}.png)" for name in law_figures.draw_all(result, rows, held_out, out)]
    (out / "fit.md").write_text("\n".join(page), encoding="utf-8")
    return result


def fit_lines(lines: list[dict], held_out: list[dict], out: Path) -> dict:
    """The fits of the ledger's lines."""
    return write_fit(rows_of(lines), rows_of(held_out), out)


def number_table(name: str, rows: dict[str, dict]) -> list[str]:
    """A table of the numbers that all rows share; nothing without rows."""
    if not rows:
        return []
    frame = pd.DataFrame.from_dict(rows, orient="index").dropna(axis="columns")
    header = [name, *frame.columns.str.replace("_", " ")]
    return table(header, frame.map("{:.3g}".format).reset_index().to_numpy())


def span(values) -> str:
    """The fit, and the 95 % interval of its bootstraps."""
    low, fit, high = law_figures.low_fit_high(values)
    return f"{fit:.4g} [{low:.4g}, {high:.4g}]"


def isoflop_lines(iso: dict) -> list[str]:
    lines = []
    for budget in iso["budgets"]:
        flops = budget["budget"]
        text = f"- {flops:.2g} FLOPs: loss {budget['loss']:.4f} at mu_rec {span(budget['mu'])}, "
        text += f"tokens {span(budget['tokens'])}"
        if not budget["inside"]:
            text += "; an end of the grid, not in the power laws"
        text += f"; slope {budget['slope']:+.4f} nats a doubling of mu_rec"
        if flops in iso["fixed_depth"]:
            text += f"; fixed depth 1: {iso['fixed_depth'][flops]:.4f}"
        lines.append(text)
    for name, line in iso["power_laws"].items():
        lines.append(f"- best {name} ~ C^{span(line[0])}")
    return lines


def law_line(name: str, fitted: laws.Fit) -> str:
    values = np.exp(fitted.logs)
    said = []
    for key in fitted.law:
        resampled = values[:, laws.PARAMS.index(key)]
        said.append(f"{key} {span(resampled)}")
    return f"- {name}: {', '.join(said + fitted.at_bound)}"


# -- advise


@dataclass
class Known:
    """What is known of a model's best mu_rec."""

    source: str
    logs: np.ndarray  # of the law of training
    grid: range  # of mu_rec that it was fitted on
    optima: dict[float, float]  # the measured best mu_rec by FLOPs
    exponent: float | None  # of their power law


def of_paper(preset: str) -> Known:
    if preset not in laws.PAPER:
        advice = "fit one (studies.experiments isoflop) and give --fit DIR/fit.json"
        fail(f"the paper has no law for --preset {preset}; {advice}")
    optima = laws.PAPER_OPTIMA[preset]
    return Known("the paper", laws.PAPER[preset], range(2, 13), optima, laws.PAPER_EXPONENT)


def of_fit(path: Path, preset: str) -> Known:
    result = read_json(path)
    if "train" not in result:
        fail(f"{path} has no law of training, and says in left_out why; fit more runs")
    for mu, n_eff in result["n_eff"].items():
        cfg = laws.at_mu(preset, int(mu))
        if not math.isclose(laws.effective_params(cfg), n_eff, rel_tol=0.01):
            fail(f"{path} is of another model than --preset {preset}; name its preset")
    mus = [int(mu) for mu in result["n_eff"] if mu != "1"]
    grid = range(min(mus), max(mus) + 1)
    iso = result["isoflop"]
    inner = [found for found in iso["budgets"] if found["inside"]]
    optima = {found["budget"]: found["mu"][0] for found in inner}
    exponent = None
    if "mu" in iso["power_laws"]:
        exponent = iso["power_laws"]["mu"][0][0]
    logs = np.array(result["train"]["logs"])
    return Known(str(path), logs, grid, optima, exponent)


def power_law_mu(known: Known, flops: float) -> float:
    """The best mu_rec by the power law through the measured optima."""
    budgets = np.array(list(known.optima))
    mus = np.array(list(known.optima.values()))
    log_k = np.log(mus / budgets**known.exponent).mean()
    return math.exp(log_k) * flops**known.exponent


def advise(args) -> None:
    """Prints the measured optima, their power law's mu_rec for a budget, and that of lowest
    predicted loss.
    """
    known = of_fit(args.fit, args.preset) if args.fit else of_paper(args.preset)
    first, last = known.grid[0], known.grid[-1]
    models = [laws.at_mu(args.preset, mu) for mu in known.grid]
    N = [laws.effective_params(cfg) for cfg in models]
    D = [args.flops / cfg.flops_per_token() for cfg in models]
    loss = laws.predict(known.logs, N, D)
    best = loss[0].argmin()
    mu = known.grid[best]
    edge = ""
    if mu in (first, last):
        edge = f"; an end of the grid {first} … {last}, no minimum"
    law = f"law L(mu, D), {known.source}: mu_rec {mu}{edge}, {D[best]:.4g} tokens, "
    law += f"loss {loss[0, best]:.4f} nats/token"
    if known.optima:
        said = ", ".join(f"{mu:.3g} at {flops:.3g}" for flops, mu in known.optima.items())
        print(f"measured optima, {known.source}: mu_rec {said} FLOPs")
    if known.exponent:
        power = power_law_mu(known, args.flops)
        mu = round(np.clip(power, first, last))
        within = min(known.optima) <= args.flops <= max(known.optima)
        note = "" if within else "; beyond the measured budgets"
        law_of_mu = f"power law C^{known.exponent:.2f} through them"
        print(f"{law_of_mu}: mu_rec {power:.3g} at {args.flops:g} FLOPs{note}")
    print(law)
    if len(loss) > 1:
        low, _, high = law_figures.low_fit_high(loss[:, best])
        least, _, most = law_figures.low_fit_high(first + loss.argmin(1))
        losses = f"loss {low:.4f} to {high:.4f}"
        print(f"95 % of bootstraps over runs: {losses}, mu_rec {least:g} to {most:g}")
    print(f"python train.py --preset {args.preset} --mu-rec {mu} --flops {args.flops:g}")


# -- main


def fit(args) -> None:
    result = fit_lines(lines_of(args.runs), lines_of(args.held_out), args.out)
    if not result["isoflop"]["budgets"] and result.keys() <= {"n_eff", "left_out", "isoflop"}:
        advice = "`python -m studies.experiments isoflop --dry-run` prints a grid of runs that can"
        fail(f"no law can be fitted to {args.runs[0]} and the others: see above; {advice}")


def lines_of(paths: list[Path]) -> list[dict]:
    lines = []
    for path in paths:
        line = ledger.record(path)
        if line is None:
            fail(f"{path} is no finished run; leave it out, or finish it with train.py --resume")
        lines.append(line)
    return lines


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m studies.scaling_laws")
    commands = parser.add_subparsers(dest="command", required=True)
    fitting = commands.add_parser("fit", help="fit the laws; writes fit.md, fit.json and figures")
    add = fitting.add_argument
    add("runs", nargs="+", type=Path, help="run directories")
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
