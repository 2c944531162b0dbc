"""
Histograms of the sampled depth against the laws' formulas (paper, appendix "Sampling of
Truncated Recurrence").

    python -m studies.depth_laws --mu-rec 8 --mu-bwd 4 --out results/depth-laws
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy import stats

from looped.console import Parser, fail, positive_int, run_cli
from looped.depth import sample_depths
from looped.figures import Plot, figure, fmt, save_page, table
from model import ModelConfig

SEQUENCES = 200_000
LAWS = ("poisson-truncated-full", "poisson-fill", "poisson-lognormal-fill")


def probabilities(law: str, mu_rec: int, mu_bwd: int, depths):
    """P(depth) by the formulas, independent of looped/depth.py's sampling."""
    if law == "poisson-truncated-full":
        p = stats.poisson.pmf(depths, mu_rec)
        p[depths == 1] += p[depths == 0]
        p[depths == 0] = 0
        return p
    if law == "poisson-fill":
        return stats.poisson.pmf(depths - mu_bwd, mu_rec - mu_bwd)
    # n ~ Poisson(e^τ) + 1, τ normal of sigma 1/2 and mean ln(mu_rec - mu_bwd) - sigma²/2
    x, weight = np.polynomial.hermite_e.hermegauss(60)
    rates = np.exp(0.5 * x - 0.125) * (mu_rec - mu_bwd)
    n = depths[:, None] - mu_bwd
    return stats.poisson.pmf(n - 1, rates) @ (weight / weight.sum())


def sampled(law: str, mu_rec: int, mu_bwd: int, depths, sequences: int):
    """Shares of the depths among that many sequences."""
    cfg = replace(ModelConfig(), mu_rec=mu_rec, mu_bwd=mu_bwd, sampling=law)
    n, k = sample_depths(cfg, 0, 0, sequences)
    return np.bincount(n + k, minlength=len(depths))[: len(depths)] / sequences


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m studies.depth_laws")
    add = parser.add_argument
    add("--mu-rec", type=positive_int, default=8, help="mean loops (default: %(default)s)")
    add("--mu-bwd", type=positive_int, default=4, help="loops with gradient (default: %(default)s)")
    page = Path("results/depth-laws")
    add("--out", type=Path, default=page, help="page, without suffix (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.mu_bwd > args.mu_rec:
        fail(f"--mu-bwd {args.mu_bwd} exceeds --mu-rec {args.mu_rec}; try --mu-bwd {args.mu_rec}")
    depths = np.arange(3 * args.mu_rec + 1)
    plots = []
    rows = []
    for law in LAWS:
        share = sampled(law, args.mu_rec, args.mu_bwd, depths, SEQUENCES)
        formula = probabilities(law, args.mu_rec, args.mu_bwd, depths)
        plots.append(Plot("depth, loops", law, [(depths, share), (depths, formula)]))
        numbers = [share @ depths, formula @ depths, np.abs(share - formula).max()]
        rows.append([law, *map(fmt, numbers)])
    caption = f"Share of sequences by depth, mu_rec {args.mu_rec}, mu_bwd {args.mu_bwd}."
    lines = [f"# Depth laws, {SEQUENCES:,} sequences", ""]
    lines += figure(Path(f"{args.out}.png"), caption, ["drawn", "formula"], plots)
    lines += table(["law", "mean drawn", "mean of the formula", "largest difference"], rows)
    save_page(args.out, lines)


if __name__ == "__main__":
    run_cli(main)
