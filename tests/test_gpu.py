"""What can be checked of the GPU path without a GPU: nothing waits for the card."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as model_module
from model import PRESETS, Model
from muon import AdamW, Muon, Optimizer, Rates

# A step on "meta" tensors has the shapes of one on a card, and nothing is computed. A read of a value (.item(),
# .tolist(), a boolean index) and a mix of devices raise there: on a card they would wait for it, or fail.


class Watch(TorchDispatchMode):
    """The operations that make a float64 tensor on the device, and those that copy to or from it."""

    def __init__(self):
        super().__init__()
        self.doubles = []
        self.copies = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_meta]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        name = func._overloadpacket.__name__
        if any(x.dtype == torch.float64 for x in results):
            self.doubles.append(name)
        if results and any(not x.is_meta and x.dim() for x in inputs):
            self.copies.append(name)
        return out


def flash_attention(q, k, v, mask=None):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


LOOPED = PRESETS["parcae-140m"]
CASES = [PRESETS[name] for name in ("transformer-140m", "rdm-100m")]
CASES += [replace(LOOPED, mechanism=name) for name in ("hyper", "attnres")]
CASES += [replace(LOOPED, gain="zoh", token_shift=True)]


@pytest.mark.parametrize("cfg", CASES, ids=lambda c: f"{c.d_model}-{c.mechanism}-{c.gain}")
def test_a_step_and_a_validation_read_nothing_from_the_card(cfg):
    with torch.device("meta"):
        model = Model(cfg, torch.bfloat16).to("meta")
    named = list(model.named_parameters())
    groups = [
        (AdamW(1e-3, update_clip=True), [(name, p) for name, p in named if not p.muon]),
        (Muon(1e-3), [(name, p) for name, p in named if p.muon]),
    ]
    optimizer = Optimizer(groups)
    tokens = torch.zeros(2, cfg.seq_len + 1, dtype=torch.int64, device="meta")
    ids, targets, keys = tokens[:, :-1], tokens[:, 1:], tokens[:, 0]
    n = np.array([1, 0]) * (cfg.n_core > 0)
    k = n + (cfg.n_core > 0)
    with mock.patch.object(model_module, "attend", flash_attention), Watch() as watch:
        loss, stats = model.loss(ids, targets, keys, n, k)
        loss.backward()
        optimizer.step(Rates(), {"loss": loss.detach(), **stats})
        model.losses(ids, targets, [cfg.mu_rec], keys)
    assert not watch.doubles
    loop_indices = int(cfg.n_core > 0)  # all loops' by one copy
    assert len(watch.copies) == loop_indices, watch.copies
