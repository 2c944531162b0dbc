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

from dataloader import PackedData
from looped.common import Parser
from looped.ops import hash_keys
from looped.randomness import FOR_EVAL
from looped.run import checkpoints, read_checkpoint, step_of
from model import DiagonalInjection, discretise, load_run
from tools.figures import Plot, figure, fmt, frame_table
from tools.pages import save_page

# not an Apple GPU, which lacks float64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 32  # of validation
LOOPS = 24  # the largest depth
NO_CURVE = [5, 7, *range(9, 24)]  # depths left out over training
SPECTRA = {"rho": "ρ(Ā)", "carry_norm": "‖Ā‖", "write_norm": "‖B̄‖", "readout_norm": "‖C‖"}
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)  # over channels
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
def loop_norms(model, ids, keys, loops: int = LOOPS) -> dict:
    """{"state": {depth: ‖h‖}, "residual": {depth: ‖h - previous h‖}, "expansion": {depth: ‖C h‖/‖h‖}}."""
    state = {}
    residual = {}
    expansion = {}
    previous = None
    for depth, h, _ in model.states(ids, range(loops + 1), keys):
        x = h.double()
        state[depth] = mean_norm(x)
        if depth:
            residual[depth] = mean_norm(x - previous)
        if depth and model.C is not None:
            ratio = model.C(h).double().norm(dim=-1) / x.norm(dim=-1)
            expansion[depth] = ratio.mean().item()
        previous = x
    return {"state": state, "residual": residual, "expansion": expansion}


@torch.no_grad()
def channels(model) -> dict:
    """Quantiles over channels of the decay and of gain/Δ, for Parcae's linear path."""
    if not isinstance(model.injection, DiagonalInjection):
        return {}
    rates = (model.injection.A_log, model.injection.dt_bias)
    decay, gain = discretise(*rates, model.cfg.gain)
    _, dt = discretise(*rates, "euler")
    shares = torch.tensor(QUANTILES, device=decay.device)
    found = {}
    for name, values in (("decay", decay), ("gain/Δ", gain / dt)):
        found[name] = dict(zip(QUANTILES, values.quantile(shares).tolist()))
    return found


def measure_run(path: Path, over_training: bool) -> Iterator[dict]:
    """Yields what is measured of a run's newest checkpoint or of each, by step."""
    model, config = load_run(path, DEVICE, torch.float32 if DEVICE.type == "cpu" else None)
    data = PackedData(Path(config["data"]["path"]))
    numbers = np.arange(min(ROWS, data.rows("val")))
    rows = data.get("val", numbers)[:, :-1]
    ids = torch.from_numpy(rows).to(DEVICE)
    keys = hash_keys(FOR_EVAL, each=numbers, device=DEVICE)
    files = checkpoints(path) if over_training else [path / config["checkpoint"]]
    for file in files:
        model.load_state_dict(read_checkpoint(file)["model"])
        step = step_of(file)
        run = {"name": f"{path.name}, step {step}", "step": step, "spectra": model.spectra()}
        run |= stage_norms(model, ids, keys)
        run |= loop_norms(model, ids, keys)
        yield run | channels(model)


def picture(key: str, frame: pd.DataFrame, steps: list[int], out: Path) -> list[str]:
    """The figure of a quantity: against depth, stage or quantile, a curve for each run; or, where
    there are steps, over training, a curve for each depth, stage or quantile.
    """
    label = QUANTITIES[key]
    name = key.removesuffix("/Δ").replace(" ", "-")
    path = out / f"norms-{name}.png"
    plot = Plot("", label, [], {"yscale": "log"})
    if steps:
        path = out / f"training-{name}.png"
        plot = Plot("step", label, [])
        frame = frame.drop(NO_CURVE, errors="ignore").T.set_axis(steps)
    for column in frame:  # the runs may have different numbers of blocks
        known = frame[column].dropna()
        plot.curves.append((known.index, known))
    return figure(path, label, list(map(str, frame)), [plot])


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m studies.spectra")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    add("--checkpoints", action="store_true", help="of one run: all its checkpoints, over training")
    add("--out", type=Path, help="folder to write to (default: the first run)")
    args = parser.parse_args(argv)
    out = args.out or args.runs[0]
    runs = []
    for path in args.runs:
        runs += measure_run(path, args.checkpoints)
    names = [run["name"] for run in runs]
    steps = [run["step"] for run in runs] if args.checkpoints else []
    lines = [f"{ROWS} rows of validation; {EXPLANATION}", ""]
    for key, label in QUANTITIES.items():
        values = [run.get(key, {}) for run in runs]
        frame = pd.DataFrame(values, names, dtype=float).T
        frame = frame.rename(SPECTRA).dropna(how="all").rename_axis(key)
        if len(frame):
            lines += [f"## {label}", "", *picture(key, frame, steps, out)]
            lines += frame_table(frame.map(fmt, spec=".4g"))
    save_page(out / "norms", "Norms in the loop", [], [], lines)


if __name__ == "__main__":
    main()
