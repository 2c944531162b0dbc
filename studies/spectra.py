"""
Looks into the loop of trained runs: what the paper's appendix "Ablation of Prelude
Normalization" plots.

    python -m studies.spectra RUN # norms.md, norms.png and norms.json in the run
    python -m studies.spectra RUN OTHER_RUN --out results/prelude-norm # several runs in one figure
    python -m studies.spectra RUN --checkpoints # over training: needs train.py --keep-every N

Spectral norms of Ā (the carry of a loop), of the input matrix B̄ (gain ⊙ B) and of C. On rows
of the validation data: the expansion ‖Cx‖/‖x‖, the state norm ‖h_T‖ after T = 0 … 24 loops, the
recurrent residual ‖h_T - h_{T-1}‖, and the norms after each block of the prelude and of the
first loop. Norms are Euclidean over channels, then averaged over tokens.
"""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from dataloader import PackedData
from looped.checkpoint import read_checkpoint, step_of
from looped.console import Parser, fail, outside, positive_int, run_cli
from looped.figures import Panel, figure, fmt, table
from looped.files import write_atomic
from looped.randomness import SEED_EVAL, sequence_key
from model import discretise, load_run

SHOWN = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # depths of the tables and of the curves over training
SPECTRA = {"rho": "ρ(Ā)", "carry_norm": "‖Ā‖", "write_norm": "‖B̄‖", "readout_norm": "‖C‖"}
QUANTILES = {"least": 0.0, "a tenth": 0.1, "median": 0.5, "nine tenths": 0.9, "largest": 1.0}
EXPLANATION = (
    "norms over channels, mean over tokens. ρ(Ā) and the spectral norms are of the linear part of "
    "a loop alone, without its blocks."
)
NOT_LOADED = (FileNotFoundError, ValueError, RuntimeError)
OVER_TRAINING = {  # quantity: label of its figure over training
    "prelude": "norm after the prelude's stages",
    "first loop": "norm in the first loop",
    "state": "state norm ‖h_T‖",
    "expansion": "expansion ‖C h_T‖ / ‖h_T‖",
    "spectra": "spectral radius and norms",
    "decay": "decay, quantiles over channels",
    "gain/Δ": "gain / Δ, quantiles over channels",
}


def mean_norm(x) -> float:
    """x (B, T, D) -> mean over tokens of the norm over channels."""
    return x.double().norm(dim=-1).mean().item()


def norms_through(modules, run):
    """(run()'s result, norms of the first module's input and of each module's output) while run()
    calls them.
    """
    norms = []
    hooks = [modules[0].register_forward_pre_hook(lambda _, x: norms.append(mean_norm(x[0])))]
    for module in modules:
        hooks.append(module.register_forward_hook(lambda _, x, y: norms.append(mean_norm(y))))
    try:
        return run(), norms
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def stage_norms(model, ids, keys) -> dict:
    """Norms after the stages of the prelude and of loop 1.

    The prelude's: the embedding, each block, and the prelude norm (e). Loop 1's: h_0, after the
    injection, each core block and, in the raw loop, the subtraction of e. A mechanism acts on
    what comes out of that.
    """
    cfg = model.cfg
    last = cfg.n_prelude + cfg.n_core
    names = [f"block {i + 1}" for i in range(last)]
    prelude = list(model.blocks[: cfg.n_prelude])
    if cfg.prelude_norm:
        prelude.append(model.norm_e)
    (h, inputs), norms = norms_through(prelude, lambda: model.before(ids, keys))
    stages = ["embedding", *names[: cfg.n_prelude], "e"]
    found = {"prelude": dict(zip(stages, [*norms, norms[-1]]))}
    t = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
    core = model.blocks[cfg.n_prelude : last]
    x, norms = norms_through(core, lambda: model.core_step(h, inputs, t))
    stages = ["h_0", "injection", *names[cfg.n_prelude :]]
    found["first loop"] = dict(zip(stages, [mean_norm(h), *norms]))
    if cfg.injection == "none":
        found["first loop"]["less e"] = mean_norm(x)
    return found


@torch.no_grad()
def loop_norms(model, ids, keys, loops: int) -> dict:
    """{"state": {T: ‖h_T‖}, "residual": {T: ‖h_T - h_(T-1)‖}, "expansion": {T: ‖C h_T‖/‖h_T‖}}, T
    up to loops.
    """
    found = {"state": {}, "residual": {}, "expansion": {}}
    previous = None
    for depth, h in model.states(ids, list(range(loops + 1)), keys):
        found["state"][depth] = mean_norm(h)
        if previous is not None:
            found["residual"][depth] = mean_norm(h.double() - previous.double())
        if model.C is not None and depth:
            read = model.C(h).double().norm(dim=-1)
            ratio = read / h.double().norm(dim=-1)
            found["expansion"][depth] = ratio.mean().item()
        previous = h
    return found


@torch.no_grad()
def channels(model) -> dict:
    """Quantiles over channels of the decay and of gain/Δ, for a diagonal injection."""
    if model.cfg.injection != "diagonal":
        return {}
    rates = (model.injection.A_log, model.injection.dt_bias)
    decay, gain = discretise(*rates, model.cfg.gain)
    _, dt = discretise(*rates, "euler")
    found = {}
    for name, values in (("decay", decay), ("gain/Δ", gain / dt)):
        found[name] = {key: values.quantile(q).item() for key, q in QUANTILES.items()}
    return found


def measure(model, ids, loops: int) -> dict:
    """All numbers of a model on rows of tokens (rows, T)."""
    keys = [sequence_key(SEED_EVAL, row) for row in range(len(ids))]
    keys = torch.tensor(keys, device=ids.device)
    found = stage_norms(model, ids, keys) | loop_norms(model, ids, keys, loops)
    return found | {"spectra": model.spectra()} | channels(model)


def tokens_of(path: Path, config: dict, args):
    """Validation rows (rows, T) for a run, from --data or from its own rows."""
    folder = args.data or config["data"]["path"]
    packed = PackedData(folder)
    own = packed.manifest["tokenizer_sha256"] == config["tokenizer"]["sha256"]
    most = config["model"]["seq_len"]
    if not own or packed.seq_len > most:
        needed = f"rows of its own tokenizer, of {most} tokens at most"
        fail(f"{folder} does not fit {path}: it needs {needed}")
    count = min(args.rows, packed.rows("val"))
    block = torch.from_numpy(packed.get("val", np.arange(count)))
    return block[:, :-1].to(args.device)


def measure_run(path: Path, args) -> list[dict]:
    """What is measured of a run's newest checkpoint or, with --checkpoints, of each by step."""
    with outside(f"{path} cannot be loaded", "give a run of train.py", NOT_LOADED):
        model, cfg, config = load_run(path, args.device)
    if cfg.n_core == 0:
        fail(f"{path} has no loop to look into; leave it out")
    ids = tokens_of(path, config, args)
    about = {name: getattr(cfg, name) for name in ("mu_rec", "injection", "gain", "mechanism")}
    about |= {"name": path.name, "tokens": ids.numel()}
    if not args.checkpoints:
        return [about | measure(model, ids, args.loops)]
    found = []
    for file in sorted(path.glob("step_*.pt")):
        model.load_state_dict(read_checkpoint(file)["model"])
        about |= {"name": file.stem, "step": step_of(file)}
        found.append(about | measure(model, ids, args.loops))
    return found


# -- the page


def frame_of(runs: list[dict], key: str) -> pd.DataFrame:
    """A row for each depth or stage that any run has, a column for each run."""
    values = [run.get(key, {}) for run in runs]
    return pd.DataFrame(values, index=[run["name"] for run in runs], dtype=float).T


def by_depth(runs: list[dict], key: str, ylabel: str, **settings) -> Panel:
    frame = frame_of(runs, key)
    depths = frame.index.to_numpy()
    curves = [(depths, values.to_numpy()) for _, values in frame.items()]
    return Panel("loops T", ylabel, curves, settings)


def by_stage(runs: list[dict], key: str) -> Panel:
    """A panel of norms by stage; the runs may have different numbers of blocks."""
    frame = frame_of(runs, key)
    curves = []
    for _, values in frame.items():
        known = np.flatnonzero(values.notna())
        curves.append((known, values.to_numpy()[known]))
    settings = {"xticks": range(len(frame)), "xticklabels": frame.index, "yscale": "log"}
    return Panel(f"{key}, after", "norm, mean over tokens", curves, settings)


def newest_figure(runs: list[dict], out: Path) -> list[str]:
    panels = [
        by_depth(runs, "state", "state norm ‖h_T‖", yscale="log"),
        by_depth(runs, "residual", "residual ‖h_T − h_(T−1)‖", yscale="log"),
        by_stage(runs, "prelude"),
        by_stage(runs, "first loop"),
        by_depth(runs, "expansion", "expansion ‖C h_T‖ / ‖h_T‖"),
    ]
    caption = "State, residual and expansion by loops; norms by stage."
    return figure(out / "norms.png", caption, [run["name"] for run in runs], panels)


def training_figures(found: list[dict], out: Path) -> list[str]:
    """A figure for each quantity, a curve for each of its keys: stage, depth, quantile of the
    channels.
    """
    steps = np.array([entry["step"] for entry in found])
    lines = []
    for key, ylabel in OVER_TRAINING.items():
        names = []
        curves = []
        for name, values in frame_of(found, key).iterrows():
            if isinstance(name, int) and name not in SHOWN:
                continue
            names.append(SPECTRA.get(name, f"T = {name}" if name in SHOWN else name))
            curves.append((steps, values.to_numpy()))
        file = key.removesuffix("/Δ").replace(" ", "-")
        picture = out / f"training-{file}.png"
        panel = Panel("step", ylabel, curves)
        lines += figure(picture, f"Over training: {ylabel}.", names, [panel])
    return lines


def page(runs: list[dict], pictures: list[str]) -> list[str]:
    names = [run["name"] for run in runs]
    lines = [f"# Norms in the loop: {', '.join(names)}", ""]
    lines += [f"{runs[0]['tokens']:,} validation tokens; {EXPLANATION}", "", *pictures]
    about = ["injection", "gain", "mechanism"]
    rows = []
    for run in runs:
        weights = [fmt(run["spectra"][name]) for name in SPECTRA]
        depth = min(run["mu_rec"], max(run["state"]))
        expansion = run["expansion"].get(depth)
        kind = [run[name] for name in about]
        rows.append([run["name"], *kind, *weights, fmt(expansion)])
    lines += table(["run", *about, *SPECTRA.values(), "‖Cx‖/‖x‖ at mu_rec"], rows)
    for title in ("state", "residual", "prelude", "first loop"):
        frame = frame_of(runs, title)
        if title in ("state", "residual"):
            frame = frame[frame.index.isin([0, *SHOWN])]
        body = frame.map(fmt, spec=".4g").reset_index().to_numpy()
        lines += [f"## {title.capitalize()}", "", *table([title, *names], body)]
    return lines


def main(argv=None):
    parser = Parser(description=__doc__, prog="python -m studies.spectra")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    add("--checkpoints", action="store_true", help="of one run: all its checkpoints, over training")
    add("--out", type=Path, help="folder to write to (default: the first run)")
    add("--data", type=Path, help="folder of packed rows (default: the run's own)")
    add("--rows", type=positive_int, default=32, help="validation rows (default: %(default)s)")
    add("--loops", type=positive_int, default=24, help="largest T (default: %(default)s)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=device, choices=("cpu", "cuda"), help="default: a GPU, if there is one")
    args = parser.parse_args(argv)
    if args.checkpoints and len(args.runs) > 1:
        fail(f"--checkpoints is for one run, not {len(args.runs)}")
    out = args.out or args.runs[0]
    runs = []
    for path in args.runs:
        runs += measure_run(path, args)
    if args.checkpoints and len(runs) < 2:
        advice = "train with --keep-every N to keep one every N steps"
        fail(f"{args.runs[0]} has one checkpoint; {advice}")
    out.mkdir(parents=True, exist_ok=True)
    pictures = training_figures(runs, out) if args.checkpoints else newest_figure(runs, out)
    lines = page(runs, pictures)
    write_atomic(out / "norms.md", "\n".join(lines).encode())
    write_atomic(out / "norms.json", json.dumps(runs, indent=1).encode())
    print(*lines, sep="\n")
    print(f"written: {out}/norms.md, norms.json and figures")


if __name__ == "__main__":
    run_cli(main)
