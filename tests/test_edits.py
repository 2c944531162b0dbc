"""studies/edits: each patch applies to this tree; what it makes trains, validates and samples."""

import importlib
import json
import sys

import numpy as np
import pytest
from helpers import ROOT

import train
from tools import ablate, sample

PATCHES = sorted((ROOT / "studies/edits").glob("*.patch"))
NETWORK = "--seq-len 32 --vocab-size 300 --d-model 16 --d-mlp 16"
STEPS = "--batch-size 8 --tokens 768 --eval-tokens 512"  # three
CODE = {path.stem for path in ROOT.glob("*.py")} | {"looped", "tools"}


def trained(train, sample, rows, run):
    """Trains and samples with these modules -> the last validation's losses."""
    train.main(f"{NETWORK} {STEPS} --data {rows} --out {run}".split())
    sample.main(f"{run} --prompt the --depth 3 --max-tokens 4".split())
    return json.loads((run / "log.jsonl").read_text().splitlines()[-1])["loss"]


@pytest.fixture(scope="module")
def base(packed, tmp_path_factory):
    """The losses of this tree as it is."""
    return trained(train, sample, packed, tmp_path_factory.mktemp("base") / "run")


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_an_edit_trains_and_samples(patch, base, packed, tmp_path, monkeypatch):
    ablate.git("apply", patch, cwd=ablate.copy_tree(tmp_path))
    for name in list(sys.modules):
        if name.split(".")[0] in CODE:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    edited = [importlib.import_module(name) for name in ("train", "tools.sample")]
    losses = trained(*edited, packed, tmp_path / "run")
    assert losses.keys() == base.keys() and losses != base
    assert np.isfinite(list(losses.values())).all()
