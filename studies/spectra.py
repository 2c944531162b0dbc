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

from pathlib import Path

import numpy as np
import pandas as pd
import torch

from core_eval import open_run
from dataloader import PackedData
from looped.checkpoint import checkpoints, read_checkpoint, step_of
from looped.console import Parser, fail, outside, positive_int, run_cli
from looped.figures import Plot, figure, fmt, frame_table
from looped.files import write_atomic
from looped.randomness import SEED_EVAL, sequence_keys
from model import discretise

# not an Apple GPU, which lacks float64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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


def norms_through(stages: list[str], modules, run):
    """(run()'s result, {stage: norm} of the first module's input and of each module's output) while
    run() calls them.
    """
    norms = []

    def note(module, inputs, output):
        if not norms:
            norms.append(mean_norm(inputs[0]))
        norms.append(mean_norm(output))

    hooks = [module.register_forward_hook(note) for module in modules]
    result = run()
    for hook in hooks:
        hook.remove()
    return result, dict(zip(stages, norms))


@torch.no_grad()
def stage_norms(model, ids, keys) -> dict:
    """Norms after the stages of the prelude and of loop 1.

    The prelude's: the embedding, each block, and the prelude norm (e) if there is one. Loop 1's:
    h_0, after the injection, each core block and, in the raw loop, the subtraction of e. A
    mechanism acts on what comes out of that.
    """
    first = model.cfg.n_prelude
    last = first + model.cfg.n_core
    names = [f"block {i + 1}" for i in range(last)]
    prelude = list(model.blocks[:first])
    if model.cfg.prelude_norm:
        prelude.append(model.norm_e)
    stages = ["embedding", *names[:first], "e"]
    (h, inputs), before = norms_through(stages, prelude, lambda: model.enter_loop(ids, keys))
    t = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
    core = model.blocks[first:last]
    stages = ["injection", *names[first:]]
    x, loop = norms_through(stages, core, lambda: model.core_step(h, inputs, t))
    loop = {"h_0": mean_norm(h)} | loop
    if model.cfg.injection == "none":
        loop["less e"] = mean_norm(x)
    return {"prelude": before, "first loop": loop}


@torch.no_grad()
def loop_norms(model, ids, keys, loops: int) -> dict:
    """{"state": {depth: ‖h‖}, "residual": {depth: ‖h - previous h‖}, "expansion": {depth: ‖C h‖/‖h‖}}, of
    h_0 and after each loop.
    """
    found = {"state": {}, "residual": {}, "expansion": {}}
    previous = None
    for depth, h in model.states(ids, list(range(loops + 1)), keys):
        found["state"][depth] = mean_norm(h)
        if depth:
            found["residual"][depth] = mean_norm(h.double() - previous)
            if model.C is not None:
                ratio = model.C(h).double().norm(dim=-1) / h.double().norm(dim=-1)
                found["expansion"][depth] = ratio.mean().item()
        previous = h.double()
    return found


@torch.no_grad()
def channels(model) -> dict:
    """Quantiles over channels of the decay and of gain/Δ, for a diagonal injection."""
    if model.cfg.injection != "diagonal":
        return {}
    rates = (model.injection.A_log, model.injection.dt_bias)
    decay, gain = discretise(*rates, model.cfg.gain)
    _, dt = discretise(*rates, "euler")
    q = torch.tensor(list(QUANTILES.values()), device=dt.device)
    found = {"decay": decay.quantile(q), "gain/Δ": (gain / dt).quantile(q)}
    return {name: dict(zip(QUANTILES, values.tolist())) for name, values in found.items()}


def measure(model, ids, keys, loops: int) -> dict:
    """All numbers of a model on rows of tokens (rows, T)."""
    found = stage_norms(model, ids, keys) | loop_norms(model, ids, keys, loops)
    return found | {"spectra": model.spectra()} | channels(model)


def validation_rows(path: Path, model, config: dict, args) -> tuple:
    """The first validation rows (rows, T + 1) for a run, of --data or its own; their folder; and
    their keys.
    """
    packed = PackedData(args.data or config["data"]["path"])
    if packed.manifest["tokenizer_sha256"] != config["tokenizer"]["sha256"]:
        fail(f"{packed.folder} does not fit {path}: it needs rows of its own tokenizer")
    numbers = np.arange(min(args.rows, packed.rows("val")))
    device = model.cos.device
    rows = torch.from_numpy(packed.get("val", numbers))[:, : model.cfg.seq_len + 1].to(device)
    return rows, packed.folder, sequence_keys(SEED_EVAL, each=numbers, device=device)


def measure_run(path: Path, args) -> list[dict]:
    """What is measured of a run's newest checkpoint or, with --checkpoints, of each by step."""
    model, _, config = open_run(path, DEVICE)
    if model.cfg.n_core == 0:
        fail(f"{path} has no loop to look into; leave it out")
    rows, _, keys = validation_rows(path, model, config, args)
    ids = rows[:, :-1]
    files = checkpoints(path) if args.checkpoints else [path / config["checkpoint"]]
    batch = config["args"].get("batch_size", 0)  # imported weights have none
    tokens = batch * model.cfg.seq_len  # a step
    found = []
    for file in files:
        if args.checkpoints:
            with outside(f"{file} is damaged", "delete it, or leave --checkpoints out"):
                model.load_state_dict(read_checkpoint(file)["model"])
        step = step_of(file)
        name = f"step {step}"
        about = {
            "name": name if args.checkpoints else f"{path.name}, {name}",
            "step": step,
            "tokens": ids.numel(),
            "command": config.get("command", "imported weights"),
            "tokens_per_param": step * tokens / config["params"],
        }
        found.append(about | measure(model, ids, keys, args.loops))
    return found


# -- the page


def frame_of(runs: list[dict], key: str) -> pd.DataFrame:
    """A row for each depth, stage or quantile that any run has, a column for each run."""
    values = [run.get(key, {}) for run in runs]
    frame = pd.DataFrame(values, index=[run["name"] for run in runs], dtype=float).T
    return frame.rename(index=SPECTRA).dropna(how="all").rename_axis(index=key)


def figures(runs: list[dict], out: Path, checkpoints: bool) -> list[str]:
    """A figure for each quantity: against depth, stage or quantile, a curve for each run; or over
    training, a curve for each depth, stage or quantile.
    """
    lines = []
    for key, label in QUANTITIES.items():
        frame = frame_of(runs, key)
        file, scale, caption = "norms", "log", label
        xlabel = "depth, loops" if label.endswith("by depth") else ""
        if checkpoints:
            if label.endswith("by depth"):
                frame = frame[frame.index.isin(OVER_TRAINING)]
            frame = frame.T.set_axis([run["step"] for run in runs])
            file, scale, xlabel, caption = "training", "linear", "step", f"Over training: {label}"
        curves = []
        for _, values in frame.items():  # the runs may have different numbers of blocks
            known = values.dropna()
            curves.append((known.index.to_numpy(), known.to_numpy()))
        plot = Plot(xlabel, label, curves, {"yscale": scale})
        picture = out / f"{file}-{key.removesuffix('/Δ').replace(' ', '-')}.png"
        lines += figure(picture, f"{caption}.", list(map(str, frame)), [plot])
    return lines


def page(runs: list[dict], pictures: list[str]) -> list[str]:
    lines = ["# Norms in the loop", ""]
    newest = {run["command"]: run for run in runs}
    for command, run in newest.items():
        ratio = f"{run['tokens_per_param']:.2g} tokens a parameter"
        lines += [f"`{command}`: {ratio} at step {run['step']}.", ""]
    lines += [f"{runs[0]['tokens']:,} validation tokens; {EXPLANATION}", "", *pictures]
    for key, label in QUANTITIES.items():
        frame = frame_of(runs, key).map(fmt, spec=".4g")
        if len(frame):
            lines += [f"## {label}", "", *frame_table(frame)]
    return lines


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m studies.spectra")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    add("--checkpoints", action="store_true", help="of one run: all its checkpoints, over training")
    add("--out", type=Path, help="folder to write to (default: the first run)")
    add("--data", type=Path, help="folder of packed rows (default: the run's own)")
    add("--rows", type=positive_int, default=32, help="validation rows (default: %(default)s)")
    add("--loops", type=positive_int, default=24, help="largest depth (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.checkpoints and len(args.runs) > 1:
        fail(f"--checkpoints is for one run, not {len(args.runs)}")
    out = args.out or args.runs[0]
    runs = []
    for path in args.runs:
        runs += measure_run(path, args)
    out.mkdir(parents=True, exist_ok=True)
    lines = page(runs, figures(runs, out, args.checkpoints))
    write_atomic(out / "norms.md", "\n".join(lines).encode())
    print(*lines, sep="\n")
    print(f"written: {out}/norms.md and figures")


if __name__ == "__main__":
    run_cli(main)
