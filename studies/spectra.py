"""
Looks into the loop of trained runs: what the paper's appendix "Ablation of Prelude
Normalization" plots.

    python -m studies.spectra RUN # norms.md and norms-*.png in the run
    python -m studies.spectra RUN OTHER_RUN --out results/prelude-norm # several runs in a figure
    python -m studies.spectra RUN --checkpoints # over training: needs train.py --keep-every N

Spectral norms of Ā (the carry of a loop), of the input matrix B̄ (gain ⊙ B) and of C. On rows
of the validation data: the expansion ‖Cx‖/‖x‖, the state norm ‖h_depth‖ after 0 … 24 loops, the
recurrent residual ‖h_depth - h_{depth-1}‖, and the norms after each block of the prelude and of the
first loop. Norms are Euclidean over channels, then averaged over tokens. On a CPU all is
computed in float32, as for CORE.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch.nn.modules.module import register_module_forward_hook

from core_eval import open_run
from dataloader import PackedData
from looped.checkpoint import checkpoints, read_checkpoint, step_of
from looped.console import Parser, fail, outside, positive_int, run_cli
from looped.figures import Plot, figure, fmt, frame_table
from looped.files import write_atomic
from looped.ops import hash_keys
from looped.randomness import FOR_EVAL
from model import DiagonalInjection, discretise

# not an Apple GPU, which lacks float64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOOPS = 24  # the largest depth
OVER_TRAINING = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24)  # depths that have a curve with --checkpoints
SPECTRA = {"rho": "ρ(Ā)", "carry_norm": "‖Ā‖", "write_norm": "‖B̄‖", "readout_norm": "‖C‖"}
QUANTILES = {"least": 0.0, "a tenth": 0.1, "median": 0.5, "nine tenths": 0.9, "largest": 1.0}
EXPLANATION = (
    "norms over channels, mean over tokens. ρ(Ā) and the spectral norms are of the linear part of "
    "a loop alone, without its blocks."
)
QUANTITIES = {  # what is measured: its label
    "state": "state norm ‖h‖ by depth",
    "residual": "residual ‖h − previous h‖ by depth",
    "prelude": "norm after the prelude's stages",
    "first loop": "norm in the first loop",
    "expansion": "expansion ‖C h‖ / ‖h‖ by depth",
    "spectra": "spectral radius and norms",
    "decay": "decay, quantiles over channels",
    "gain/Δ": "gain / Δ, quantiles over channels",
}


def mean_norm(x) -> float:
    """x (B, T, D) -> mean over tokens of the norm over channels."""
    return x.double().norm(dim=-1).mean().item()


@torch.no_grad()
def stage_norms(model, ids, keys) -> dict:
    """Norms after the stages of the prelude and of loop 1.

    The prelude's: the embedding, each block, and the prelude norm (e) if there is one. Loop 1's:
    h_0, after the injection, each core block and, in the raw loop, the subtraction of e. A
    mechanism acts on what comes out of that.
    """
    stages = {model.wte: "embedding", model.norm_e: "e"}
    for number, block in enumerate(model.blocks, 1):
        stages[block] = f"block {number}"
    norms = {}  # in the order in which the stages run

    def note(module, inputs, output):
        if module in stages:
            norms[stages[module]] = mean_norm(output)

    with register_module_forward_hook(note):
        h, inputs = model.enter_loop(ids, keys)
        prelude = dict(norms)
        norms.clear()
        x = model.core_step(h, inputs, ids.new_zeros(len(ids)))
    loop = {"h_0": mean_norm(h), "injection": mean_norm(model.injection.inject(h, inputs))}
    loop |= norms
    if model.cfg.injection == "none":
        loop["less e"] = mean_norm(x)
    return {"prelude": prelude, "first loop": loop}


@torch.no_grad()
def loop_norms(model, ids, keys, loops: int) -> dict:
    """{"state": {depth: ‖h‖}, "residual": {depth: ‖h - previous h‖}, "expansion": {depth: ‖C h‖/‖h‖}}."""
    found = {"state": {}, "residual": {}, "expansion": {}}
    previous = None
    for depth, h in model.states(ids, range(loops + 1), keys):
        x = h.double()
        found["state"][depth] = mean_norm(x)
        if depth:
            found["residual"][depth] = mean_norm(x - previous)
            if model.C is not None:
                ratio = model.C(h).double().norm(dim=-1) / x.norm(dim=-1)
                found["expansion"][depth] = ratio.mean().item()
        previous = x
    return found


@torch.no_grad()
def channels(model) -> dict:
    """Quantiles over channels of the decay and of gain/Δ, for Parcae's linear path."""
    if not isinstance(model.injection, DiagonalInjection):
        return {}
    rates = (model.injection.A_log, model.injection.dt_bias)
    decay, gain = discretise(*rates, model.cfg.gain)
    _, dt = discretise(*rates, "euler")
    values = torch.stack([decay, gain / dt]).cpu()
    found = values.quantile(torch.tensor(list(QUANTILES.values())), dim=1)
    return pd.DataFrame(found, list(QUANTILES), ["decay", "gain/Δ"]).to_dict()


def measure_run(path: Path, args) -> Iterator[dict]:
    """Yields what is measured of a run's newest checkpoint or, with --checkpoints, of each by step."""
    model, _, config = open_run(path, DEVICE)
    if model.cfg.n_core == 0:
        fail(f"{path} has no loop to look into; leave it out")
    data = PackedData(config["data"]["path"])
    if data.manifest["tokenizer_sha256"] != config["tokenizer"]["sha256"]:
        fail(f"{data.folder} does not fit {path}: it needs rows of its own tokenizer")
    numbers = np.arange(min(args.rows, data.rows("val")))
    rows = torch.from_numpy(data.get("val", numbers))
    ids = rows[:, :-1][:, : model.cfg.seq_len].to(DEVICE)
    keys = hash_keys(FOR_EVAL, each=numbers, device=DEVICE)
    command = config.get("command", "imported weights")
    batch = config["args"].get("batch_size", 0)  # imported weights have none
    for file in checkpoints(path) if args.checkpoints else [path / config["checkpoint"]]:
        with outside(f"{file} is damaged", "delete it, or leave --checkpoints out"):
            model.load_state_dict(read_checkpoint(file)["model"])
        step = step_of(file)
        ratio = step * batch * model.cfg.seq_len / config["params"]
        about = {
            "name": f"step {step}" if args.checkpoints else f"{path.name}, step {step}",
            "step": step,
            "tokens": ids.numel(),
            "about": f"`{command}`: {ratio:.2g} tokens a parameter at step {step}.",
            "spectra": model.spectra(),
        }
        norms = stage_norms(model, ids, keys) | loop_norms(model, ids, keys, LOOPS)
        yield about | norms | channels(model)


def picture(key: str, frame: pd.DataFrame, steps: list[int], out: Path) -> list[str]:
    """The figure of a quantity: against depth, stage or quantile, a curve for each run; or, where
    there are steps, over training, a curve for each depth, stage or quantile.
    """
    label = QUANTITIES[key]
    by_depth = label.endswith("by depth")
    name = key.removesuffix("/Δ").replace(" ", "-")
    if steps:
        plot = Plot("step", label, [])
        path = out / f"training-{name}.png"
        caption = f"Over training: {label}."
        if by_depth:
            frame = frame[frame.index.isin(OVER_TRAINING)]
        frame = frame.T.set_axis(steps)
    else:
        plot = Plot("depth, loops" if by_depth else "", label, [], {"yscale": "log"})
        path = out / f"norms-{name}.png"
        caption = f"{label}."
    for _, values in frame.items():  # the runs may have different numbers of blocks
        known = values.dropna()
        plot.curves.append((known.index.to_numpy(), known.to_numpy()))
    return figure(path, caption, list(map(str, frame)), [plot])


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m studies.spectra")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    add("--checkpoints", action="store_true", help="of one run: all its checkpoints, over training")
    add("--out", type=Path, help="folder to write to (default: the first run)")
    add("--rows", type=positive_int, default=32, help="validation rows (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.checkpoints and len(args.runs) > 1:
        fail(f"--checkpoints is for one run, not {len(args.runs)}")
    out = args.out or args.runs[0]
    runs = []
    for path in args.runs:
        runs += measure_run(path, args)
    steps = [run["step"] for run in runs] if args.checkpoints else []
    lines = ["# Norms in the loop", ""]
    for run in runs[-1:] if args.checkpoints else runs:
        lines += [run["about"], ""]
    lines += [f"{runs[0]['tokens']:,} validation tokens; {EXPLANATION}", ""]
    tables = []
    for key, label in QUANTITIES.items():
        values = [run.get(key, {}) for run in runs]
        frame = pd.DataFrame(values, [run["name"] for run in runs], dtype=float).T
        frame = frame.rename(index=SPECTRA).dropna(how="all").rename_axis(index=key)
        if len(frame):
            lines += picture(key, frame, steps, out)
            tables += [f"## {label}", "", *frame_table(frame.map(fmt, spec=".4g"))]
    lines += tables
    write_atomic(out / "norms.md", "\n".join(lines).encode())
    print(*lines, sep="\n")
    print(f"written: {out}/norms.md and figures")


if __name__ == "__main__":
    run_cli(main)
