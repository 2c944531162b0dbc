"""The tree: which file may import which."""

import pytest
from helpers import ROOT

from looped.machine import imports

SHARED = {"model", "dataloader", "tokenizer_train"}
TOP = SHARED | {"core_eval", "launch", "train", "muon"}
MAY_IMPORT = {
    "muon": set(),
    "model": {"looped"},
    "dataloader": {"looped"},
    "tokenizer_train": {"looped"},
    "core_eval": {"looped", *SHARED},
    "launch": {"looped", *SHARED},
    "train": {"looped", *SHARED, "launch", "muon"},
    "looped": {"looped"},
    "tools": {"looped", "tools", *TOP},
    "studies": {"looped", "studies", "tools", *TOP},
}


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_no_import_points_up(part):
    for path in [*ROOT.glob(f"{part}.py"), *(ROOT / part).glob("*.py")]:
        assert imports(path) & {*MAY_IMPORT, "tests"} <= MAY_IMPORT[part], path
