"""What can be checked of the GPU path without a GPU: nothing waits for the card, kernels compile, memory is foreseen."""

import contextlib
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, refused
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as model_module
import tools.bench
import tools.plan
from looped import memory
from looped.machine import Place
from looped.memory import GIB, Step, check_memory, predict_memory, static_bytes, steps_to_try
from model import PRESETS, Model, parameter_count
from muon import Optimizer, Rates
from tools.plan import CARDS, plan
from train import OPTIMIZERS, Batch, recipe_of, training_step

LARGE = [name for name in PRESETS if not name.endswith("nano")]


# -- a step on "meta" tensors: shapes as on a card, nothing is computed ------------------------------------------------
# A read of a value (.item(), .tolist(), a boolean index) and a mix of devices raise there: on a card they would wait
# for it, or fail.


class Watch(TorchDispatchMode):
    """Counts operations that make a float64 tensor on the device, and those that copy to or from it."""

    def __init__(self):
        super().__init__()
        self.doubles = Counter()
        self.copies = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_meta]
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        name = func._overloadpacket.__name__
        if any(x.dtype == torch.float64 for x in made):
            self.doubles[name] += 1
        if made and any(not x.is_meta and x.dim() for x in read):
            self.copies[name] += 1
        return out


def flash_attention(q, k, v, shift=None):
    if shift is not None:
        k, v = shift(k, v)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


@contextlib.contextmanager
def as_on_a_card():
    with mock.patch.object(model_module, "attend", flash_attention), Watch() as watch:
        yield watch


def on_meta(name: str, cfg):
    """Model and optimiser of a preset's recipe on "meta"."""
    with torch.device("meta"):
        model = Model(cfg)
    model.to("meta")
    model.dtype = torch.bfloat16
    args = SimpleNamespace(muon_lr=1e-3, adam_lr=1e-3, weight_decay=0.1)
    groups = OPTIMIZERS[recipe_of(name).optimizer](model, args, False)
    return model, Optimizer(groups)


def configurations():
    for name in LARGE:
        yield pytest.param(name, PRESETS[name], id=name)
    looped = PRESETS["parcae-140m"]
    for change in (
        {"mechanism": "hyper"},
        {"mechanism": "attnres"},
        {"granularity": "token"},
        {"gain": "zoh"},
        {"token_shift": True},
    ):
        (setting,) = change.items()
        yield pytest.param("parcae-140m", replace(looped, **change), id=" ".join(map(str, setting)))


def some_depths(cfg, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(n, k): one loop and then two for the first row, none and one for the others."""
    n = np.zeros(rows, np.int64)
    n[0] = 1 if cfg.n_core else 0
    k = n + 1 if cfg.n_core else n
    if cfg.granularity == "token":
        n = np.repeat(n[:, None], cfg.seq_len, axis=1)
        k = np.repeat(k[:, None], cfg.seq_len, axis=1)
    return n, k


@pytest.mark.parametrize("name, cfg", list(configurations()))
def test_a_step_and_a_validation_read_nothing_from_the_card(name, cfg):
    model, optimizer = on_meta(name, cfg)
    rows = 2
    tokens = torch.zeros(rows, cfg.seq_len + 1, dtype=torch.int64, device="meta")
    keys = torch.zeros(rows, dtype=torch.int64, device="meta")
    n, k = some_depths(cfg, rows)
    batch = Batch(tokens, keys, n, k, step_tokens=rows * cfg.seq_len)
    with as_on_a_card() as watch:
        training_step(model, optimizer, batch, rows, Rates())
        model.losses(tokens[:, :-1], tokens[:, 1:], [cfg.mu_rec], keys)
    assert not watch.doubles
    copies = 2 if cfg.n_core else 1  # the optimiser's rates; the loops' indices
    copies += cfg.granularity == "token"  # the tokens' depths
    assert sum(watch.copies.values()) == copies, watch.copies


def test_a_boolean_index_is_seen():
    x = torch.zeros(3, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)), as_on_a_card():
        F.relu(x)[x > 0]


# -- the kernels that torch.compile would write for a card -------------------------------------------------------------


@pytest.fixture(scope="module")
def sources():
    pytest.importorskip("triton")
    from rehearsal import triton_sources

    return triton_sources


def product_of_32_bit_integers(keys):
    """The hash's first line as it was when no looped preset could start on a card."""
    index = torch.arange(2048 * 768, device=keys.device)
    return keys[:, None] + index * -7046029254386353131


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=["A100", "H100", "B200"])
def test_the_hash_compiles_for_cards(sources, capability):
    with sources.pretend_card(capability):
        kernels = sources.hash_kernels()
        assert len(kernels) == 2  # each state is one fused kernel
        assert all(sources.compile_kernel(kernel) > 0 for kernel in kernels)


def test_the_check_finds_a_constant_that_does_not_fit_its_index(sources):
    keys = torch.empty(8, dtype=torch.int64, device="meta")
    with sources.pretend_card((9, 0)):
        (kernel,) = sources.lower(sources.trace(product_of_32_bit_integers, keys))
        with pytest.raises(Exception, match="out of range for type int32"):
            sources.compile_kernel(kernel)


# -- memory ------------------------------------------------------------------------------------------------------------

# GiB at the peak of forward and backward, compiled, deepest depth, that torch's allocator saw on the card that is not
# there (results/rehearsal.md): preset, settings of a Step, peak.
PEAKS = [
    ("parcae-140m", Step(8), 8.63),
    ("parcae-140m", Step(32), 27.8),
    ("parcae-140m", Step(64), 52.7),
    ("parcae-140m", Step(8, loss_chunk=8192), 9.14),
    ("parcae-140m", Step(32, loss_chunk=8192), 25.5),
    ("parcae-140m", Step(8, checkpoint_loops=True), 5.23),
    ("parcae-140m", Step(8, keep_less=True), 6.20),
    ("parcae-370m", Step(8), 20.9),
    ("parcae-1.3b", Step(16), 105.3),
    ("parcae-1.3b", Step(8), 61.6),
    ("parcae-1.3b", Step(2, keep_less=True), 24.6),
    ("transformer-370m", Step(8), 13.7),
    ("transformer-1.3b", Step(8), 40.8),
    ("rdm-100m", Step(8, optimizer="adamw"), 10.7),
    ("rdm-350m", Step(8, optimizer="adamw"), 21.7),
]


# GiB at rest on one of several ranks: preset, optimiser, ranks
STATIC = [
    ("parcae-140m", "muon", 8, 1.34),
    ("parcae-1.3b", "muon", 8, 11.56),
    ("rdm-350m", "adamw", 16, 3.15),
]


@pytest.mark.parametrize("name, optimizer, world, size", STATIC)
def test_predicted_memory_at_rest_is_that_of_a_rank(name, optimizer, world, size):
    predicted = static_bytes(PRESETS[name], optimizer, world)
    assert predicted / GIB == pytest.approx(size, rel=0.1)


@pytest.mark.parametrize("name, step, peak", PEAKS)
def test_predicted_memory_is_within_a_tenth_of_the_rehearsals_peaks(name, step, peak):
    predicted = predict_memory(PRESETS[name], step) / GIB
    assert predicted == pytest.approx(peak, rel=0.1)


def test_less_is_kept_before_few_rows_become_fewer():
    cfg = PRESETS["parcae-1.3b"]
    steps = steps_to_try(cfg, Step(1, world=2), batch=32, chunks=(0,))
    tried = [(step.rows, step.keep_less) for step in steps[:5]]
    assert tried == [(16, False), (8, False), (8, True), (4, False), (4, True)]
    assert [step.keep_less for step in steps_to_try(cfg, Step(1), 16, 16, (0,))] == [False, True]
    assert not any(step.keep_less for step in steps_to_try(cfg, Step(1), 16, less=False))
    peaks = [predict_memory(cfg, step) for step in steps]
    assert peaks[0] > peaks[1] > peaks[2] > peaks[4]
    assert peaks[1] > peaks[3] > peaks[4]


def test_a_card_too_small_for_the_weights_alone_is_refused(monkeypatch, capsys):
    cfg = PRESETS["parcae-1.3b"]
    monkeypatch.setattr(memory, "free_memory", lambda place: 15.5 * GIB)
    here = Place(0, 1, torch.device("cuda"))
    refused(capsys, lambda: check_memory(cfg, "muon", here), "15.5 GiB are free", "try more GPUs")
    check_memory(cfg, "muon", here._replace(world=8))  # which share the optimiser's state
    check_memory(PRESETS["parcae-770m"], "muon", here)
    check_memory(cfg, "muon", Place(0, 1, torch.device("cpu")))


def test_a_fit_begins_with_what_is_predicted_and_goes_on_until_it_fits(monkeypatch):
    cuda = mock.Mock()
    cuda.mem_get_info.return_value = (20 * GIB, 24 * GIB)
    cuda.memory_reserved.return_value = 0
    cuda.get_device_properties.return_value.total_memory = 25 * GIB
    cuda.max_memory_allocated.return_value = 3 * GIB
    tried = []

    def try_step(model, optimizer, step, place):
        tried.append((step.rows, step.loss_chunk, step.keep_less))
        return step.rows < 8

    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(memory, "try_step", try_step)
    model = mock.Mock(cfg=PRESETS["parcae-140m"], is_compiled=True, checkpoint_loops=False)
    args = SimpleNamespace(
        batch_size=256, device_batch_size=None, loss_chunk=None, optimizer="muon"
    )
    fit = memory.fit_memory(model, None, args, Place(0, 1, torch.device("cuda")))
    assert tried == [(16, 0, False), (16, 8192, False), (8, 0, False), (8, 0, True), (4, 0, False)]
    assert (args.device_batch_size, model.loss_chunk, fit.peak) == (4, 0, 3)
    fractions = [call.args[0] for call in cuda.set_per_process_memory_fraction.call_args_list]
    assert fractions == [0.92 * 20 / 25, 1.0]


def test_a_plan_for_cards_that_do_not_divide_the_batch_says_so(capsys):
    line = ["parcae-140m", "--gpus", "6"]
    refused(capsys, lambda: tools.plan.main(line), "batch of 256; try --gpus 2")


def test_a_plan_knows_what_fits_and_that_more_cards_are_faster():
    H100 = CARDS["H100"]
    one = plan("parcae-140m", H100, gpus=1)
    eight = plan("parcae-140m", H100, gpus=8)
    assert one.step.rows == 32 and one.fits
    assert 7 < one.hours / eight.hours <= 8
    assert not plan("parcae-1.3b", CARDS["4090"], gpus=1).fits


def test_the_readmes_table_is_the_plans():
    cards = [CARDS[name] for name in ("4090", "A100-80", "H100")]
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"\| `(\S+m|\S+b)` \| (\S+) \| (\S+) \| (.+) \|\n", text)
    assert len(rows) == 8
    for preset, parameters, mflops, cells in rows:
        cfg = PRESETS[preset]
        assert parameters == f"{parameter_count(cfg):,}"
        assert mflops == f"{cfg.flops_per_token() / 1e6:,.0f}"
        plans = [plan(preset, card, 8) for card in cards]
        found = [f"{p.step.rows}{'*' * p.step.keep_less} / {p.hours:.1f}" for p in plans]
        assert cells == " | ".join(found)


def test_logits_of_many_tokens_may_be_taken_in_chunks():
    cfg = PRESETS["parcae-1.3b"]
    tried = steps_to_try(cfg, Step(1), 64)
    pairs = [(step.rows, step.loss_chunk) for step in tried if not step.keep_less]
    assert pairs[:4] == [(32, 0), (32, 8192), (16, 0), (16, 8192)]
    assert pairs[4:] == [(8, 0), (4, 0), (2, 0), (1, 0)]
    peaks = [predict_memory(cfg, step) for step in tried]
    assert peaks == sorted(peaks, reverse=True)


def test_bench_times_a_training_step(capsys):
    line = "--vocab-size 300 --seq-len 32 --d-model 32 --compile off"
    tools.bench.main(line.split())
    assert re.search(r"16 at once.*\n.*\n[\d.]+ ms, [\d,]+ tok/s", capsys.readouterr().out)
