"""
Fits the scaling laws of looping to runs, draws them, and says what to train.

    python -m studies.experiments isoflop --data DATA # a grid of trainings; ends in these fits
    python -m studies.scaling_laws fit runs/iso-* --held-out runs/long        # of run directories
    python -m studies.scaling_laws fit mine.csv         # of a table of anyone's measurements
    python -m studies.scaling_laws advise --flops 1e19 --preset parcae-140m [--fit DIR/fit.json]

A table has a line for each depth at which a run was evaluated, and the columns run (a name), mu_rec,
depth (loops in use), tokens and flops (of the training), n_eff (effective parameters N: those of the
loop, which are core blocks, their value tables and the injection, count mu_rec times), loss (nats a
token).
"""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd

from looped.console import DAMAGE, Parser, fail, outside, positive_float, run_cli
from looped.figures import frame_table, records_table
from looped.logs import read_json
from model import PRESETS, config_of
from studies import laws, ledger
from studies.law_figures import draw_all

KINDS = {
    "run": str,
    "mu_rec": int,
    "tokens": float,
    "flops": float,
    "n_eff": int,
    "depth": int,
    "loss": float,
}
ROW = list(KINDS)

# -- the data


def rows_of(lines: list[dict]) -> pd.DataFrame:
    """A row for each depth at which the runs of these lines of the ledger were evaluated."""
    rows = []
    for line in lines:
        cfg = config_of(line["settings"])
        flops = line["tokens"] * line["flops_per_token"]
        run = [line["run"], cfg.mu_rec, line["tokens"], flops, laws.effective_params(cfg)]
        rows += [[*run, *evaluated] for evaluated in line["loss"].items()]
    return pd.DataFrame(rows, columns=ROW).astype(KINDS)


def rows_of_path(path: Path) -> pd.DataFrame:
    """The rows of a run directory, or of a CSV with anyone's measurements."""
    if path.suffix == ".csv":
        with outside(f"{path} is no table with the columns {','.join(ROW)}", "mend it", DAMAGE):
            return pd.read_csv(path)[ROW].astype(KINDS)
    line = ledger.record(path)
    if line is None:
        fail(f"{path} is no finished run; leave it out, or finish it with train.py --resume")
    return rows_of([line])


def prepared(rows, left: list[str]) -> pd.DataFrame:
    """Adds the budget (see budgets_of) and "best", the run's loss at mu_rec; leaves out what
    cannot be used.
    """

    def leave_out(unfit, why):
        left.extend(f"{run}: {why}" for run in sorted(set(rows.run[unfit])))
        return rows[~unfit]

    numbers = rows[ROW[1:]]
    usable = (numbers > 0) & (numbers < np.inf)
    rows = leave_out(~usable.all(axis=1), "a number that is not above 0, or not finite")
    rows = leave_out(rows.duplicated(["run", "depth"]), "two losses at one depth")
    rows = rows.assign(budget=budgets_of(rows.flops))
    at_mu = rows.query("depth == mu_rec")
    best = at_mu.set_index("run").loss.reindex(rows.run)
    rows = rows.assign(best=best.to_numpy())
    rows = leave_out(rows.best.isna(), "not evaluated at depth mu_rec")
    medians = at_mu.groupby("budget").loss.median()
    far = rows.best > 1.5 * rows.budget.map(medians)
    rows = leave_out(far, "a loss over 1.5 x the median of its budget")
    return rows.sort_values(["mu_rec", "depth"], kind="stable", ignore_index=True)


def budgets_of(flops: pd.Series) -> pd.Series:
    """The budget of each run, to three digits: the mean of FLOPs that are within 5 % of the least."""
    known = flops.sort_values()
    starts = []
    for value in known:
        near = starts and value <= 1.05 * starts[-1]
        starts.append(starts[-1] if near else value)
    means = known.groupby(starts).mean().map("{:.3g}".format).astype(float)
    return flops.map(dict(zip(known, means[starts])))


# -- fit


def fit_all(rows, left: list[str], held_out) -> dict:
    """Everything that the runs can support; left_out names what they cannot, and why."""
    rng = np.random.default_rng(0)
    n_eff = dict(zip(rows.mu_rec.astype(str), rows.n_eff))
    isoflop = laws.fit_isoflop(rows.query("depth == mu_rec"), rng, left)
    result = {"n_eff": n_eff, "left_out": left, "isoflop": isoflop}
    looped = rows[rows.mu_rec > 1]
    depths = looped.groupby("run").depth.transform("size")
    deep = looped[depths > 3]
    if len(deep):
        result["test_time"] = laws.fit_curves(deep)
    data_of = dict.fromkeys(laws.LAWS, (deep, held_out))
    data_of["train"] = (looped.query("depth == mu_rec"), held_out.query("depth == mu_rec"))
    for name, (data, unseen) in data_of.items():
        have = data[["run", "n_eff", "tokens", "budget"]].nunique()
        need = [len(laws.PARAMS) - len(laws.LAWS[name]) + 1, 3, 3, 2]
        if (have < need).any():
            left.append(f"{name}: different runs, N, D, budgets: {list(have)}; it needs {need}")
            continue
        result[name] = laws.fit_law(data, rng, name)
        if len(unseen):
            result[name]["held_out"] = laws.prediction_errors(result[name]["logs"][0], unseen)
    return result


def write_fit(rows, held_out, out: Path) -> None:
    """Fits, prints, and writes fit.md, fit.json and figures into the folder."""
    left = []
    rows = prepared(rows, left)
    unused = []
    held_out = prepared(held_out, unused)
    left += [f"held out, {text}" for text in unused]
    result = fit_all(rows, left, held_out)
    fits = {name: result[name] for name in laws.LAWS if name in result}
    page = [f"# Fits of {rows.run.nunique()} runs", "", "[95 % interval], by bootstrap.", ""]
    page += isoflop_tables(result["isoflop"], rows)
    page += [law_line(name, fitted) for name, fitted in fits.items()]
    page += [*(f"- left out: {text}" for text in left), ""]
    if "test_time" in result:
        page += number_table("test-time law, mean over runs", result["test_time"]["table"])
    if fits:
        page += error_tables(fits)
    print(*page, sep="\n")
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, default=np.ndarray.tolist)
    (out / "fit.json").write_text(text, encoding="utf-8")
    page += draw_all(result, rows, held_out, out)
    (out / "fit.md").write_text("\n".join(page), encoding="utf-8")


def span(values) -> str:
    """The fit, and the 95 % interval of its bootstraps."""
    low, fit, high = laws.low_fit_high(values)
    return f"{fit:.4g} [{low:.4g}, {high:.4g}]"


def isoflop_tables(iso: dict, rows) -> list[str]:
    """The lowest points of the budgets, their power laws, and the gains at equal tokens."""
    if not iso["budgets"]:
        return []
    slope = "slope, nats a doubling of mu_rec"
    shown = []
    for found in iso["budgets"]:
        end = "" if found["inside"] else ", an end of the grid"
        line = {"FLOPs": found["budget"], "lowest loss": found["loss"]}
        line |= {"mu_rec": span(found["mu"]) + end, "tokens": span(found["tokens"])}
        line |= {slope: found["slope"], "fixed depth 1": iso["fixed_depth"].get(found["budget"])}
        shown.append(line)
    formats = dict(zip(shown[0], (".3g", ".4f", "", "", "+.4f", ".4f")))
    page = records_table(shown, formats) + equal_tokens_table(rows)
    inside = [found["inside"] for found in iso["budgets"]]
    for name, (exponents, _) in iso["power_laws"].items():
        of = f"{sum(inside)} of {len(inside)} budgets have their minimum inside the grid"
        page.append(f"- best {name} ~ C^{span(exponents)}; {of}")
    return page


def equal_tokens_table(rows) -> list[str]:
    """By how much looped runs end below one loop in training of as many tokens."""
    at_mu = rows.query("depth == mu_rec")
    once = at_mu[at_mu.mu_rec == 1].groupby("tokens").loss.mean()  # over seeds
    between = at_mu.tokens.between(once.index.min(), once.index.max())
    gains = at_mu[between & (at_mu.mu_rec > 1)]
    if gains.empty:
        return []
    level = np.interp(np.log(gains.tokens), np.log(once.index), once)
    gain = level - gains.loss
    cells = gain.map("{:.4f}".format) + gains.tokens.map(" at {:.2g}".format)
    budget = gains.budget.map("{:.3g} FLOPs".format)
    frame = gains.assign(cell=cells, budget=budget)
    shown = frame.pivot_table("cell", "mu_rec", "budget", aggfunc="; ".join, sort=False)
    head = (
        "At equal tokens: nats that loops in training gain over one, at so many tokens; one's loss "
        "is interpolated in the logarithm of tokens between its runs."
    )
    return [head, "", *frame_table(shown)]


def law_line(name: str, fitted: dict) -> str:
    values = pd.DataFrame(np.exp(fitted["logs"]), columns=laws.PARAMS)
    said = [f"{key} {span(values[key])}" for key in fitted["law"]]
    return f"- {name}: {', '.join(said + fitted['bounded'])}"


def number_table(name: str, rows: dict[str, dict]) -> list[str]:
    frame = pd.DataFrame.from_dict(rows, orient="index").rename_axis(name)
    return frame_table(frame.map("{:.3g}".format))


def error_tables(fits: dict[str, dict]) -> list[str]:
    """How far off each law is: on all runs, and on each budget when fitted to the others alone."""
    errors = {}
    budgets = {}
    for name, fitted in fits.items():
        errors[f"{name}, fitted runs"] = fitted["errors"]
        if "held_out" in fitted:
            errors[f"{name}, held-out runs"] = fitted["held_out"]
        off = pd.DataFrame(fitted["without"]).T
        mean = off["percent"].map("{:.2g}".format)
        largest = off["largest percent"].map(" ({:.2g})".format)
        budgets[name] = mean + largest
    head = "Each budget predicted from the others: percent off, mean (largest)."
    frame = pd.DataFrame(budgets).T.rename_axis("law")
    frame = frame.rename(columns="{:.3g} FLOPs".format)
    return [*number_table("law", errors), head, "", *frame_table(frame)]


# -- advise


def paper_fit(preset: str) -> dict:
    """The paper's numbers, as fit.json has one's own."""
    if preset not in laws.PAPER:
        advice = "fit one (studies.experiments isoflop) and give --fit DIR/fit.json"
        fail(f"the paper has no law for --preset {preset}; {advice}")
    n_eff = {mu: laws.effective_params(laws.config_at(preset, mu)) for mu in range(2, 13)}
    optima = laws.PAPER_OPTIMA[preset]
    budgets = [{"budget": flops, "mu": [mu], "inside": True} for flops, mu in optima.items()]
    flops, best = np.array([*optima.items()]).T
    k = best / flops**laws.PAPER_EXPONENT
    power_law = [[laws.PAPER_EXPONENT], [np.log(k).mean()]]
    isoflop = {"budgets": budgets, "power_laws": {"mu": power_law}}
    return {"n_eff": n_eff, "isoflop": isoflop, "train": {"logs": [laws.PAPER[preset]]}}


def advise(args) -> None:
    """Prints the measured optima, what their power law gives for a budget, and the command."""
    source = args.fit or "the paper"
    known = read_json(args.fit) if args.fit else paper_fit(args.preset)
    with outside(f"{source} is no fit.json", "name one that `fit` wrote"):
        n_effs = known["n_eff"]
        budgets = known["isoflop"]["budgets"]
    if "train" not in known:
        fail(f"{source} has no law of training, and says in left_out why; fit more runs")
    for mu, n_eff in n_effs.items():
        if laws.effective_params(laws.config_at(args.preset, int(mu))) != n_eff:
            fail(f"{source} is of another model than --preset {args.preset}; name its preset")
    inside = [found["budget"] for found in budgets if found["inside"]]
    for found in budgets:
        end = "" if found["inside"] else ", an end of the grid"
        best = f"mu_rec {found['mu'][0]:.3g} at {found['budget']:.3g} FLOPs"
        print(f"measured, {source}: {best}{end}")
    if len(inside) < 2:
        advice = "train other budgets or mu_rec, and fit again"
        fail(f"{source} has no power law, for want of two minima inside the grid; {advice}")
    exponent, log_k = np.array(known["isoflop"]["power_laws"]["mu"])[:, 0]
    power = math.exp(log_k) * args.flops**exponent
    beyond = "" if min(inside) <= args.flops <= max(inside) else "; beyond the measured budgets"
    print(f"power law C^{exponent:.2f}: mu_rec {power:.3g} at {args.flops:g} FLOPs{beyond}")
    grid = [int(mu) for mu in n_effs if int(mu) > 1]
    mu = round(np.clip(power, min(grid), max(grid)))
    cfg = laws.config_at(args.preset, mu)
    N = laws.effective_params(cfg)
    D = args.flops / cfg.flops_per_token()
    loss = laws.law_loss(known["train"]["logs"][0], N, D)
    print(f"law L(mu, D): loss {loss:.4f} nats/token with mu_rec {mu} and {D:.4g} tokens")
    print(f"python train.py --preset {args.preset} --mu-rec {mu} --flops {args.flops:g}")


# -- main


def fit(args) -> None:
    runs = pd.concat(map(rows_of_path, args.runs), ignore_index=True)
    held_out = pd.concat([rows_of([]), *map(rows_of_path, args.held_out)], ignore_index=True)
    write_fit(runs, held_out, args.out)


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
