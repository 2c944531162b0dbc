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
FILES = {}  # {module: file}
for part in MAY_IMPORT:
    for path in [ROOT / f"{part}.py", *(ROOT / part).glob("*.py")]:
        if path.exists():
            FILES[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path


def imports(path: Path) -> set[str]:
    """Names of all modules that a file imports, wherever in it: `from a import b` gives a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("module", FILES)
def test_no_import_points_up(module):
    part = module.split(".")[0]
    wanted = {name.split(".")[0] for name in imports(FILES[module])}
    assert wanted & {*MAY_IMPORT, "tests"} <= MAY_IMPORT[part]


def test_no_import_circle():
    waiting = {module: imports(path) & FILES.keys() for module, path in FILES.items()}
    while waiting:
        free = [module for module, wanted in waiting.items() if not wanted & waiting.keys()]
        assert free, f"circle among {sorted(waiting)}"
        for module in free:
            del waiting[module]
