"""The norms of studies/spectra.py against slow computations, and its pages; int8 of studies/inference.py."""

import math
import shutil

import numpy as np
import pytest
import torch

import train
from model import Model, ModelConfig, load_run
from studies import inference, spectra

SMALL = ModelConfig(
    vocab_size=61,
    seq_len=12,
    d_model=16,
    n_head=2,
    d_mlp=32,
    n_prelude=2,
    n_core=2,
    n_coda=1,
    mu_rec=3,
)
SIZES = (
    "--vocab-size=300 --seq-len=32 --d-model=32 --d-mlp=64 --batch-size=12 --dtype=float32 "
    "--eval-tokens=1000 --tokens=4608 --save-every=3 --keep-every=3 --input-matrix --readout"
)


def random_model(**flags):
    model = Model(ModelConfig(**vars(SMALL) | {"mu_bwd": 0} | flags))
    model.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)
    return model.eval()


def norm(x):
    """Mean over tokens of the Euclidean norm over channels, in plain Python."""
    return np.mean([math.sqrt(sum(v * v for v in token)) for token in x.flatten(0, 1).tolist()])


@pytest.mark.parametrize("mechanism", ["none", "hyper"])
@pytest.mark.parametrize("injection", ["diagonal", "none"])
@torch.no_grad()
def test_norms_equal_a_naive_loop(mechanism, injection):
    model = random_model(mechanism=mechanism, injection=injection)
    ids = torch.arange(24).view(2, 12) % 61
    keys = torch.tensor([5, 6])
    got = spectra.loop_norms(model, ids, keys, 3)
    previous = None
    for T, h, _ in model.states(ids, [0, 1, 2, 3], keys):
        assert got["state"][T] == pytest.approx(norm(h), rel=1e-5)
        if T:
            assert got["residual"][T] == pytest.approx(norm(h - previous), rel=1e-4)
            ratio = np.linalg.norm(h @ model.C.weight.T, axis=-1) / np.linalg.norm(h, axis=-1)
            assert got["expansion"][T] == pytest.approx(ratio.mean(), rel=1e-5)
        previous = h

    prelude, first = spectra.stage_norms(model, ids, keys).values()
    h0, inputs = model.enter_loop(ids, keys)
    context = model.context(h0, torch.zeros(2, dtype=torch.int64))
    x = model.injection.inject(h0, inputs)
    want = {"h_0": norm(h0), "injection": norm(x)}
    for i in (2, 3):
        x = model.blocks[i](x, inputs.ve[i - 2], context)
        want[f"block {i + 1}"] = norm(x)
    if injection == "none":
        want["less e"] = norm(x - inputs.write)
    assert first == pytest.approx(want, rel=1e-5) and list(first) == list(want)
    x = model.wte(ids)
    want = {"embedding": norm(x)}
    for i in (0, 1):
        x = model.blocks[i](
            x, model.ve[str(i)](ids) if str(i) in model.ve else None, model.context(x)
        )
        want[f"block {i + 1}"] = norm(x)
    want["e"] = norm(model.norm_e(x))
    assert prelude == pytest.approx(want, rel=1e-5) and list(prelude) == list(want)


@pytest.mark.parametrize("gain", ["euler", "zoh"])
def test_quantiles_over_channels_by_hand(gain):
    model = random_model(gain=gain)
    a = model.injection.A_log.detach().double().exp()
    dt = torch.log1p(model.injection.dt_bias.detach().double().exp())
    ratio = (1 - (-dt * a).exp()) / (a * dt) if gain == "zoh" else torch.ones(16)
    got = spectra.channels(model)
    for name, values in (("decay", (-dt * a).exp()), ("gain/Δ", ratio)):
        want = np.quantile(values.numpy(), [0, 0.1, 0.5, 0.9, 1])
        assert list(got[name].values()) == pytest.approx(list(want), rel=1e-5)


def cells(text, title):
    """The rows of the table under a title, header first."""
    lines = text.split(f"## {title}\n")[1].split("\n## ")[0].splitlines()
    header, _, *rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [header, *rows]


def test_pages_of_runs_and_of_checkpoints_over_training(packed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.main(["--data", str(packed), "--out", "a", *SIZES.split()])
    shutil.copytree("a", "b")
    monkeypatch.setattr(spectra, "ROWS", 3)
    spectra.main(["a", "b", "--out", "both"])
    text = (tmp_path / "both/norms.md").read_text()
    assert f"| ρ(Ā) | {load_run('a')[0].spectra()['rho']:.4g} |" in text
    at_end = cells(text, "state norm ‖h‖ by depth")
    assert len(at_end) == 26 and (tmp_path / "both/norms-state.png").is_file()
    spectra.main(["a", "--checkpoints"])
    text = (tmp_path / "a/norms.md").read_text()
    over = cells(text, "state norm ‖h‖ by depth")
    assert over[0][1:] == ["a, step 3", "a, step 6", "a, step 9", "a, step 12"]
    assert [row[-1] for row in over[1:]] == [row[1] for row in at_end[1:]]
    assert (tmp_path / "a/training-spectra.png").is_file()


def test_int8_is_the_nearest_of_255_levels():
    weight = torch.randn(6, 20)
    levels = weight.abs().amax(1, keepdim=True) * torch.arange(-127, 128) / 127  # (out, level)
    nearest = (weight.unsqueeze(-1) - levels.unsqueeze(1)).abs().argmin(-1)  # (out, in)
    assert torch.allclose(inference.rounded(weight), levels.gather(1, nearest))
