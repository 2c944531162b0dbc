"""Checks an edit of the model, in under a minute.

    python -m tools.check                          # small networks of several presets
    python -m tools.check --gain half --mu-rec 4   # that network alone; any flags of train.py

The same numbers are computed in two ways, one line a check. The first check that fails says what
the edit has overlooked. Networks are tiny and computed in float64, with weights at random.
"""

import sys
from dataclasses import replace

import numpy as np
import torch

import train
from looped.depth import sample_depths
from looped.ops import hash_keys
from model import Model
from tools.sample import Depth, KVCache, read

NETWORKS = (
    "--preset nano",
    "--preset transformer-nano",
    "--preset parcae-140m",
    "--preset rdm-nano",
    "--mechanism attnres",
    "--mechanism hyper",
)  # flags of train.py
MOST = {
    "vocab_size": 64, "seq_len": 12, "d_model": 32, "n_head": 2, "d_mlp": 48,
    "n_prelude": 2, "n_core": 2, "n_coda": 1, "mu_rec": 3, "mu_bwd": 2,
}  # fmt: skip
SEQUENCES = 6


def make_network(flags: list[str]) -> tuple[Model, tuple]:
    """A tiny network, and arguments of its loss: ids (B, T), targets (B, T), seeds, n and k (B,)."""
    cfg = train.model_config(train.parse_args(flags))
    small = {}
    for name, most in MOST.items():
        small[name] = min(most, getattr(cfg, name))
    cfg = replace(cfg, **small)
    model = Model(cfg)
    model.init_weights(0)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():  # a weight of zero would hide errors
        noise = torch.randn(p.shape, generator=generator)
        p.data.add_(0.05 * noise)
    model.dtype = torch.float64
    tokens = torch.randint(cfg.vocab_size, (SEQUENCES, cfg.seq_len + 1), generator=generator)
    seeds = hash_keys(0, each=range(SEQUENCES))
    if cfg.granularity == "token":
        cfg = replace(cfg, granularity="sequence")
    n, k = sample_depths(cfg, 0, 0, SEQUENCES)
    return model.double(), (tokens[:, :-1], tokens[:, 1:], seeds, n, k)


def backward(model: Model, batch) -> dict:
    """Loss and gradients."""
    model.zero_grad()
    loss, _ = model.loss(*batch)
    loss.backward()
    found = {"loss": loss.detach()}
    for name, p in model.named_parameters():
        found[f"gradient of {name}"] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
    return found


def read_in_pieces(model: Model, ids, seeds, depth: int):
    """The final hidden state (B, T, D), through the cache of sampling."""
    cache = KVCache(model, ids.size(1), depth)
    first = ids[:, :5]
    one_by_one = ids[:, 5:].split(1, dim=1)
    hidden = []
    for piece in (first, *one_by_one):
        h, _ = read(model, piece, seeds, cache, Depth(depth))
        hidden.append(h)
    return torch.cat(hidden, 1)


def compare(label: str, found: dict, wanted: dict, overlooked: str, tolerance=1e-4) -> None:
    """Ends the program where two dicts of tensors differ. tolerance: of a difference's norm, relative."""
    for name, value in wanted.items():
        value = value.double()
        difference = found[name].double() - value
        gap = difference.norm() / (value.norm() + 1e-4)
        if not gap <= tolerance:  # NaN is not
            print(f"FAILED  {label}: {name} differs by {gap:.1g} of its size")
            print(f"        {overlooked}")
            sys.exit(1)
    print(f"ok      {label}", flush=True)


def check_network(flags: list[str]) -> None:
    print(f"{' '.join(flags)}:")
    model, batch = make_network(flags)
    cfg = model.cfg
    ids, targets, seeds, n, k = batch
    at_once = backward(model, batch)
    loss = {"loss": at_once["loss"]}

    summed = dict.fromkeys(at_once, 0)
    for i in range(SEQUENCES):
        one = [x[i : i + 1] for x in batch]
        for name, value in backward(model, one).items():
            summed[name] += value
    compare("sequences of mixed depths, as each by itself", summed, at_once,
        "A loop runs only the sequences that still need it: what it reads beside h must be cut to "
        "them (LoopInputs). No sequence may depend on another, nor on an earlier call.")  # fmt: skip

    if cfg.n_core and cfg.mechanism == "none":
        by_token = [np.repeat(x[:, None], ids.size(1), axis=1) for x in (n, k)]
        found = backward(model, (ids, targets, seeds, *by_token))
        compare("depths by token, as by sequence", found, at_once,
            "A loop's index is (B,) or, where each token has its own depth, (B, T).")  # fmt: skip

    depths = (n + k).tolist()
    losses = model.losses(ids, targets, sorted(set(depths)), seeds)
    found = 0
    for i, depth in enumerate(depths):
        found += losses[depth][i].sum()
    compare("validation, as the training loss at those depths", {"loss": found}, loss,
        "Model.loss and Model.losses must compute the same, so edit what both call. (If the edit "
        "changes what is trained for, this is as it should be.)")  # fmt: skip

    depth = max(1, cfg.mu_rec)
    found = {"final state": read_in_pieces(model, ids, seeds, depth)}
    whole = {"final state": model.hidden(ids, depth, seeds)}
    compare("sampling with a cache, as the whole text at once", found, whole,
        "A token sees earlier ones only, through the cache where there is one, and its position "
        "comes from it.")  # fmt: skip

    rounded, _ = make_network(flags)
    rounded.float().dtype = torch.bfloat16
    found, _ = rounded.loss(*batch)
    compare("bfloat16, nearly as float64", {"loss": found}, loss,
        "Weights are cast to the activations' dtype at use; what must be exact stays in float32.",
        tolerance=0.01)  # fmt: skip

    torch._dynamo.reset()
    model.compile_pieces(backend="eager")
    compare("traced by torch.compile, as run by Python", backward(model, batch), at_once,
        "What is compiled must read arguments and parameters only: other numbers are frozen when "
        "it is traced.")  # fmt: skip


def main(argv=None):
    flags = sys.argv[1:] if argv is None else argv
    train.parse_args(flags, "python -m tools.check", __doc__)
    if flags:
        check_network(flags)
        return
    for network in NETWORKS:
        check_network(network.split())


if __name__ == "__main__":
    main()
