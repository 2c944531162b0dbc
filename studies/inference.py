"""What a trained loop bears at inference: a core in int8, and tokens that leave the loop early.

    python -m studies.inference runs/nano-stdlib-s0/euler       # inference.md and .png in the run
    python -m studies.inference RUN --out results/inference-nano-stdlib

Each row of the core's matrices is rounded to 255 levels. A token leaves by the rule of `tools.sample
--depth auto`, when KL(answer_t || answer_{t-1}) falls under a threshold. On rows of the validation data,
in float32; nothing is trained.
"""

import copy
import shlex
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from dataloader import PackedData
from looped.common import Parser
from looped.machine import environment
from looped.ops import hash_keys
from looped.randomness import FOR_EVAL
from model import load_run
from tools.figures import Plot, figure, fmt, frame_table
from tools.pages import save_page
from tools.sample import EXIT_THRESHOLD, Depth, KVCache, logits_of, read

ROWS = 96  # of validation
DEPTHS = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32]
THRESHOLDS = [1e-1, 3e-2, 1e-2, 2e-3, EXIT_THRESHOLD, 1e-4]  # nats


def rounded(weight):
    """weight (out, in) -> the nearest of 255 levels of each row."""
    step = weight.abs().amax(1, keepdim=True) / 127
    return (weight / step).round() * step


@torch.no_grad()
def with_int8_core(model):
    model = copy.deepcopy(model)
    for layer in model.core_layers:
        for weight in model.blocks[layer].parameters():
            if weight.dim() == 2:
                weight.copy_(rounded(weight))
    return model


@torch.no_grad()
def int8_table(model, ids, targets, keys) -> pd.DataFrame:
    """By depth: the loss, what int8 adds to it, and how far int8 moves the state, relative to its norm."""
    other = with_int8_core(model)
    rows = {}
    for (depth, h, inputs), (_, moved, moved_inputs) in zip(
        model.states(ids, DEPTHS, keys), other.states(ids, DEPTHS, keys)
    ):
        loss = model.token_losses(h, ids, targets, inputs).mean()
        loss_int8 = other.token_losses(moved, ids, targets, moved_inputs).mean()
        error = (moved - h).norm(dim=-1) / h.norm(dim=-1)
        rows[depth] = {"loss": loss, "int8 adds": loss_int8 - loss, "state moves by": error.mean()}
    return pd.DataFrame(rows, dtype=float).T


@torch.no_grad()
def exit_table(model, ids, targets, keys) -> pd.DataFrame:
    """By threshold: the mean loops of a token and the loss."""
    rows = {}
    most = 2 * model.cfg.mu_rec
    for threshold in THRESHOLDS:
        cache = KVCache(model, ids.size(1), most)
        hidden, taken = read(model, ids, keys, cache, Depth(most, threshold))
        logits = logits_of(model, hidden).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten())
        rows[threshold] = {"mean loops": taken.double().mean(), "loss": loss}
    return pd.DataFrame(rows, dtype=float).T


def loops_at(loss: float, fixed: pd.Series) -> float:
    """The fixed depth with that loss, between two depths by interpolation; NaN below the least loss."""
    falling = fixed[: fixed.idxmin()]
    return np.interp(-loss, -falling, falling.index, right=np.nan)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__, prog="python -m studies.inference")
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run directory of a looped model")
    add("--out", type=Path, help="page to write, without .md (default: inference in the run)")
    args = parser.parse_args(argv)
    out = args.out or args.run / "inference"
    model, config = load_run(args.run, dtype=torch.float32)
    data = PackedData(Path(config["data"]["path"]))
    numbers = np.arange(min(ROWS, data.rows("val")))
    rows = torch.from_numpy(data.get("val", numbers))
    ids, targets = rows[:, :-1], rows[:, 1:]
    keys = hash_keys(FOR_EVAL, each=numbers)

    int8 = int8_table(model, ids, targets, keys)
    exits = exit_table(model, ids, targets, keys)
    exits["fixed depth of that loss"] = [loops_at(loss, int8["loss"]) for loss in exits["loss"]]

    trained = model.cfg.mu_rec
    added = int8["int8 adds"][trained]
    moves = int8["state moves by"]
    first = moves.iloc[0]
    last = moves.iloc[-1]
    loops, _, fixed = exits.loc[EXIT_THRESHOLD]
    said = [
        f"A core in int8 adds {added:+.4f} nats a token at {trained} loops; the state moves by {first:.2%} in "
        f"the first loop and by {last:.2%} after {DEPTHS[-1]}.",
        f"Tokens that leave the loop at {EXIT_THRESHOLD:g} nats take {loops:.1f} loops for the loss of "
        f"{fixed:.1f} fixed ones.",
    ]
    curves = [(int8.index, int8["loss"]), (exits["mean loops"], exits["loss"])]
    loss = Plot("mean loops a token", "val loss, nats/token", curves, {"xscale": "log"})
    moved = Plot(
        "depth, loops",
        "int8 moves the state by, relative",
        [(int8.index, moves), ([], [])],
        {"xscale": "log", "yscale": "log"},
    )
    caption = "Left loss by loops, right how far a core in int8 moves the state; one run."
    names = ["fixed depth", "early exit, by threshold"]
    picture = figure(Path(f"{out}.png"), caption, names, [loss, moved])
    where = environment()
    torch_version = where["versions"]["torch"]
    command = shlex.join(["python", "-m", "studies.inference", *argv])
    date = time.strftime("%Y-%m-%d")
    commit = config["git"]["commit"] or "unknown"
    body = ["## A core in int8", ""]
    body += frame_table(int8.map(fmt, spec=".4f").rename_axis("depth"))
    body += ["## Early exit", ""]
    body += frame_table(exits.map(fmt, spec=".4f").rename_axis("threshold, nats"))
    body.append(f"- command: `{command}`")
    body.append(f"- date: {date}")
    body.append(f"- machine: {where['machine']}; torch {torch_version}, float32")
    body.append(f"- run: {config['command']}, commit {commit:.10}")
    body.append(f"- validated on {ids.numel():,} tokens")
    save_page(out, "A trained loop at inference", said, picture, body)


if __name__ == "__main__":
    main()
