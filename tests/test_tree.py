"""The tree: which file may import which."""

import ast
from pathlib import Path

import pytest
from helpers import ROOT

SHARED = {"model", "dataloader", "tokenizer_train"}
TOP = SHARED | {"core_eval", "train", "muon"}
MAY_IMPORT = {
    "muon": set(),
    "model": {"looped"},
    "dataloader": {"looped"},
    "tokenizer_train": {"looped"},
    "core_eval": {"looped", *SHARED},
    "train": {"looped", *SHARED, "core_eval", "muon"},
    "looped": {"looped"},
    "tools": {"looped", "tools", *TOP},
    "studies": {"looped", "studies", "tools", *TOP},
}


def imports(path: Path) -> set[str]:
    """The first names of all modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        found |= {name.split(".")[0] for name in names}
    return found


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_no_import_points_up(part):
    for path in [*ROOT.glob(f"{part}.py"), *(ROOT / part).glob("*.py")]:
        assert imports(path) & {*MAY_IMPORT, "tests"} <= MAY_IMPORT[part], path
