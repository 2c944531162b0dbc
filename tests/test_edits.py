"""studies/edits: each patch applies to this tree; what it makes trains, validates and samples."""

import json
import subprocess
import sys

import numpy as np
import pytest
from helpers import ENV, ROOT

from tools import ablate

PATCHES = sorted((ROOT / "studies/edits").glob("*.patch"))
PROGRAM = """
import sys, train
from tools import sample
network = "--seq-len 32 --vocab-size 300 --d-model 16 --d-mlp 16"
steps = "--batch-size 8 --tokens 768 --eval-tokens 512"  # three
train.main(f"{network} {steps} --out run --data {sys.argv[1]}".split())
sample.main("run --prompt the --depth 3 --max-tokens 4".split())
"""


def trained(copy, rows):
    """Trains a copy of the code, and samples -> the log's records."""
    line = [sys.executable, "-c", PROGRAM, rows]
    done = subprocess.run(line, cwd=copy, env=ENV, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (copy / "run/log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def base(packed, tmp_path_factory):
    """The log of this tree as it is."""
    return trained(ablate.copy_tree(tmp_path_factory.mktemp("base")), packed)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_an_edit_trains_and_samples(patch, base, packed, tmp_path):
    ablate.git("apply", patch, cwd=ablate.copy_tree(tmp_path))
    log = trained(tmp_path, packed)
    last, base_last = log[-1], base[-1]
    assert last["loss"].keys() == base_last["loss"].keys()
    assert np.isfinite(list(last["loss"].values())).all()
    assert last["loss"] != base_last["loss"]
