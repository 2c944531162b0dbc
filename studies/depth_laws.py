"""
Histograms of the sampled depth against the laws' formulas (paper, appendix "Sampling of
Truncated Recurrence").

    python -m studies.depth_laws --mu-rec 8 --mu-bwd 4 # results/depth-laws.md
"""

from pathlib import Path

import numpy as np
from scipy.stats import poisson

from looped.common import Parser, positive_int
from looped.depth import sample_depths
from model import ModelConfig
from tools.figures import Plot, figure, fmt, table
from tools.pages import save_page

SEQUENCES = 200_000
OUT = Path("results/depth-laws")


def formulas(depths, mu_rec: int, mu_bwd: int) -> dict:
    """{law: P(depth) of depths 0, 1, …}, independent of looped/depth.py's sampling."""
    full = poisson.pmf(depths, mu_rec)
    full[1] += full[0]  # a depth of 0 counts as 1
    full[0] = 0
    n = depths - mu_bwd
    without = mu_rec - mu_bwd
    # n ~ Poisson(e^τ) + 1, τ normal of sigma 1/2, the mean of e^τ mu_rec - mu_bwd
    x, weight = np.polynomial.hermite_e.hermegauss(60)
    rates = np.exp(0.5 * x - 0.125) * without
    mixed = poisson.pmf(n[:, None] - 1, rates) @ weight
    laws = {"poisson-truncated-full": full}
    laws["poisson-fill"] = poisson.pmf(n, without)
    laws["poisson-lognormal-fill"] = mixed / weight.sum()
    return laws


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m studies.depth_laws")
    parser.add_argument("--mu-rec", type=positive_int, default=8, help="mean loops")
    parser.add_argument("--mu-bwd", type=positive_int, default=4, help="loops with gradient")
    loops = vars(parser.parse_args(argv))
    depths = np.arange(3 * loops["mu_rec"] + 1)
    plots = []
    rows = []
    for law, formula in formulas(depths, **loops).items():
        cfg = ModelConfig(sampling=law, **loops)
        n, k = sample_depths(cfg, 0, 0, SEQUENCES)
        counts = np.bincount(n + k, minlength=len(depths))
        drawn = counts[: len(depths)] / SEQUENCES
        curves = [(depths, drawn), (depths, formula)]
        plots.append(Plot("depth, loops", law, curves))
        gap = abs(drawn - formula).max()
        numbers = [drawn @ depths, formula @ depths, gap]
        rows.append([law, *map(fmt, numbers)])
    caption = "Share of sequences by depth, mu_rec {mu_rec}, mu_bwd {mu_bwd}.".format(**loops)
    picture = figure(OUT.with_suffix(".png"), caption, ["drawn", "formula"], plots)
    lines = table(["law", "mean drawn", "mean of the formula", "largest difference"], rows)
    save_page(OUT, f"Depth laws, {SEQUENCES:,} sequences", [], picture, lines)


if __name__ == "__main__":
    main()
