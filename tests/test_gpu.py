"""What can be checked of the GPU path without a GPU: nothing waits for the card."""

from collections import Counter
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


def flash_attention(q, k, v, mask=None):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


LOOPED = PRESETS["parcae-140m"]
CASES = [PRESETS[name] for name in ("parcae-1.3b", "transformer-140m", "rdm-350m")]
CASES += [replace(LOOPED, mechanism=name) for name in ("hyper", "attnres")]
CASES += [replace(LOOPED, granularity="token", gain="zoh", token_shift=True)]


@pytest.mark.parametrize("cfg", CASES, ids=lambda c: f"{c.d_model}-{c.mechanism}-{c.granularity}")
def test_a_step_and_a_validation_read_nothing_from_the_card(cfg):
    with torch.device("meta"):
        model = Model(cfg, torch.bfloat16).to("meta")
    named = list(model.named_parameters())
    groups = [
        (AdamW(1e-3), [(name, p) for name, p in named if not p.muon]),
        (Muon(1e-3), [(name, p) for name, p in named if p.muon]),
    ]
    optimizer = Optimizer(groups)
    tokens = torch.zeros(2, cfg.seq_len + 1, dtype=torch.int64, device="meta")
    ids, targets, keys = tokens[:, :-1], tokens[:, 1:], tokens[:, 0]
    n = np.array([1, 0]) * (cfg.n_core > 0)
    k = n + (cfg.n_core > 0)
    if cfg.granularity == "token":
        n, k = [np.repeat(x[:, None], cfg.seq_len, axis=1) for x in (n, k)]
    with mock.patch.object(model_module, "attend", flash_attention), Watch() as watch:
        loss, stats = model.loss(ids, targets, keys, n, k)
        loss.backward()
        optimizer.step(Rates(), {"loss": loss.detach(), **stats})
        model.losses(ids, targets, [cfg.mu_rec], keys)
    assert not watch.doubles
    copies = {"the rows' order, or the tokens' depths"}
    copies |= {"the loops' indices"} if cfg.n_core else set()
    assert sum(watch.copies.values()) == len(copies), watch.copies
