"""The tree: which file may import which, and that every flag is explained."""

import argparse
import ast
import importlib
import sys
from pathlib import Path

import pytest
from helpers import ROOT

TOP = {"train", "model", "muon", "dataloader", "tokenizer_train", "core_eval"}
SHARED = {"model", "dataloader", "tokenizer_train"}
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
FILES = sorted(p.relative_to(ROOT) for p in ROOT.glob("*.py")) + sorted(
    p.relative_to(ROOT) for folder in ("looped", "tools", "studies") for p in (ROOT / folder).glob("**/*.py")
)  # fmt: skip


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Names of all modules that a file imports, wherever in it: `from a import b` gives a and a.b."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_six_files_at_the_top_and_at_most_three_folders_of_code():
    assert {p.stem for p in FILES if len(p.parts) == 1} == TOP
    folders = {p.name for p in ROOT.iterdir() if not p.name.startswith(".") and any(p.glob("**/*.py"))}  # fmt: skip
    assert folders - {"tests"} == {"looped", "tools", "studies"}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_import_points_up(path):
    own = {module_name(p).split(".")[0] for p in FILES}
    part = module_name(path).split(".")[0]
    wanted = {name.split(".")[0] for name in imports(path)} & own
    assert wanted <= MAY_IMPORT[part], f"{path} imports {sorted(wanted - MAY_IMPORT[part])}"
    assert not {name for name in imports(path) if name.split(".")[0] == "tests"}


def test_no_import_circle():
    modules = {module_name(p): p for p in FILES}
    waiting = {name: (imports(p) & modules.keys()) - {name} for name, p in modules.items()}
    while waiting:
        free = [name for name, wanted in waiting.items() if not wanted & waiting.keys()]
        assert free, f"circle among {sorted(waiting)}"
        for name in free:
            del waiting[name]


def programs() -> list[str]:
    """Files with `if __name__ == "__main__":`, as modules; without the one that hands its flags to the lm_eval package."""
    found = []
    for path in FILES:
        for node in ast.parse((ROOT / path).read_text()).body:
            if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                found.append(module_name(path))
    return [name for name in found if name != "tools.lm_eval"]


def flags_of(parser) -> dict[str, str | None]:
    """{flag: its help} of a parser and its subcommands."""
    found = {}
    for action in parser._actions:
        if action.option_strings:
            found[action.option_strings[-1]] = action.help
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                found |= flags_of(sub)
    return found


@pytest.mark.parametrize("program", programs())
def test_every_flag_has_help(program, monkeypatch):
    caught = []

    def parse_args(parser, *_):
        caught.append(parser)
        sys.exit()

    module = importlib.import_module(program)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", [program])
    with pytest.raises(SystemExit):
        module.main()
    unexplained = [name for name, about in flags_of(caught[0]).items() if not about]
    assert not unexplained, f"{program}: {' '.join(unexplained)}"
    if "." in program:
        assert caught[0].prog == f"python -m {program}"
