"""
What runs have learned to copy, and with which layer.

    python -m studies.copying RUN… --out results/copying

A token is foretold if the two tokens before it occurred earlier in the row and were followed, the
last time, by the same token. Measured: the loss of these tokens and of all others; each layer's
share of attention on the preceding token, and on what followed an earlier occurrence of the
query's own token, which is where a layer that copies looks. At the small scales runs that differ
in the seed alone may differ in which layer copies, and then in their loss.
"""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from core_eval import open_run
from looped.cache import KVCache
from looped.console import Parser, fail, positive_int, run_cli
from looped.depth import even_plan
from looped.figures import frame_table, plus_minus, save_page, table
from model import PRESETS
from studies.spectra import DEVICE, validation_rows
from train import recipe_of

BATCH = 16  # rows at once; attention is looked at in the first of these batches
ATTENTION = (
    "Attention: its mean share on the preceding token and, where the query's token occurred before, "
    "on what followed it there; by layer from the first to the last, the loop's in its last loop, "
    "mean over heads. With --token-shift a token of the first layer reads half of the preceding "
    "one's values by attending to itself, which the first share does not count."
)
LOSSES = ["all", "foretold", "others"]
ARM = ["arm", "tokens a parameter", "rows of"]  # runs that are alike in these are averaged


def foretold(rows: np.ndarray) -> np.ndarray:
    """rows (N, T + 1) -> which of their targets are foretold, (N, T) bool."""
    found = np.zeros((len(rows), rows.shape[1] - 1), bool)
    for row, marks in zip(rows.tolist(), found, strict=True):
        follower = {}  # of a pair of tokens, the last time
        for i in range(1, len(marks)):
            pair = (row[i - 1], row[i])
            marks[i] = follower.get(pair) == row[i + 1]
            follower[pair] = row[i + 1]
    return found


@torch.no_grad()
def token_losses(model, rows, keys) -> np.ndarray:
    """rows (N, T + 1) -> nats of each target at depth mu_rec, (N, T)."""
    losses = []
    depth = model.cfg.mu_rec if model.cfg.n_core else 0
    for block, own in zip(rows.split(BATCH), keys.split(BATCH)):
        found = model.losses(block[:, :-1], block[:, 1:], [depth], own)
        losses.append(found[depth].cpu().numpy())
    return np.concatenate(losses)


class Observer(KVCache):
    """A cache that notes where attention goes while a model reads rows as one piece."""

    def __init__(self, model, ids):
        """ids (B, T)"""
        rows, tokens = ids.shape
        super().__init__(model.cfg, tokens)
        positions = torch.arange(tokens, device=ids.device).expand(rows, tokens)
        self.begin_piece(positions, *model.rotary(positions))
        before = F.pad(ids, (1, 0), value=-1)[:, :-1]  # each key's preceding token
        self.follows = (ids[:, :, None] == before[:, None, :]) & self.mask  # (B, T, T)
        self.shares = {}  # {layer: its attention's shares}, in the loop the last one's

    def attend(self, layer, q, k, v, shift=None):
        keys = k if shift is None else shift(k, v)[0]
        scores = q @ keys.mT * q.size(-1) ** -0.5
        weights = scores.masked_fill(~self.mask, -torch.inf).softmax(-1).mean(1)  # (B, T, T)
        preceding = weights.diagonal(-1, 1, 2).mean()
        recurring = self.follows.any(-1)
        followers = (weights * self.follows).sum(-1)[recurring].mean()
        self.shares[layer] = {"preceding": preceding.item(), "followers": followers.item()}
        return super().attend(layer, q, k, v, shift)


@torch.no_grad()
def attention_shares(model, ids, keys) -> dict[int, dict]:
    """ids (B, T) -> for each layer the mean shares of attention on the preceding token, and on
    what followed earlier occurrences of the query's token where there are any.
    """
    observer = Observer(model, ids)
    h, inputs = model.enter_loop(ids, keys, observer)
    if inputs is not None:
        for state in model.unroll(
            h, inputs, even_plan(len(ids), model.cfg.mu_rec, ids.device), observer
        ):
            h = state.h
    model.coda(h, ids, observer)
    return observer.shares


def arm_of(cfg, told: dict) -> str:
    """The preset, and the fields of the network and the recipe that differ from the preset's,
    lengths apart.
    """
    preset = told["preset"]
    own = told | asdict(cfg)
    words = [preset]
    for name, value in (asdict(PRESETS[preset]) | asdict(recipe_of(preset))).items():
        if own.get(name) != value and not name.endswith("tokens"):
            words.append(f"{name} {own.get(name)}")
    return ", ".join(words)


def measure(path: Path, args) -> dict:
    """Mean losses of a run on the first validation rows."""
    model, _, config = open_run(path, DEVICE)
    told = config["args"]
    if "preset" not in told:
        fail(f"{path} was not trained here; leave it out")
    rows, folder, keys = validation_rows(path, model, config, args)
    losses = token_losses(model, rows, keys)
    marks = foretold(rows.cpu().numpy())
    trained = config["steps"] * told["batch_size"] * model.cfg.seq_len
    shares = attention_shares(model, rows[:BATCH, :-1], keys[:BATCH])
    attention = {}
    for name in ("preceding", "followers"):
        attention[f"attention on {name}"] = " ".join(f"{shares[i][name]:.2f}" for i in shares)
    return {
        "run": path.name,
        "arm": arm_of(model.cfg, told),
        "tokens a parameter": f"{trained / config['params']:.3g}",
        "rows of": folder.parent.name,
        "seed": told["seed"],
        "foretold tokens": marks.mean(),
        "all": losses.mean(),
        "foretold": losses[marks].mean(),
        "others": losses[~marks].mean(),
        **attention,
    }


def difference_table(runs: pd.DataFrame) -> list[str]:
    """A table of losses minus those of the first arm with as many tokens, paired by seed."""
    first = {}
    rows = []
    for (arm, *length), found in runs.groupby(ARM, sort=False):
        losses = found.set_index("seed")[LOSSES]
        base, base_losses = first.setdefault(tuple(length), (arm, losses))
        gaps = (losses - base_losses).dropna()
        if base != arm and len(gaps):
            cells = [plus_minus(gaps[name], "+.4f") for name in LOSSES]
            rows.append([arm, base, length[0], len(gaps), *cells])
    header = ["loss of", "less that of", "tokens a parameter", "seeds", *LOSSES]
    return table(header, rows) if rows else []


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m studies.copying")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    add("--data", type=Path, help="folder of packed rows (default: the run's own)")
    add("--rows", type=positive_int, default=512, help="validation rows (default: %(default)s)")
    page = Path("results/copying")
    add("--out", type=Path, default=page, help="page, without suffix (default: %(default)s)")
    args = parser.parse_args(argv)
    runs = pd.DataFrame([measure(path, args) for path in args.runs])
    means = runs.groupby(ARM, sort=False)[LOSSES].agg(plus_minus)
    lines = ["# Loss of the tokens that their row foretells, and of others", ""]
    lines += ["Nats a token at depth mu_rec; mean over seeds ± half the 95 % t interval.", ""]
    lines += [ATTENTION, ""]
    lines += frame_table(means)
    lines += difference_table(runs)
    runs["foretold tokens"] = runs["foretold tokens"].map("{:.1%}".format)
    runs[LOSSES] = runs[LOSSES].map("{:.4f}".format)
    lines += frame_table(runs.set_index("run"))
    print(*lines, sep="\n")
    save_page(args.out, lines)


if __name__ == "__main__":
    run_cli(main)
