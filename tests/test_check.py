"""tools.check: passes the shipped model, and each check finds the fault that it is for."""

import shutil

import pytest
import torch
from helpers import ROOT

from model import Model
from tools import check

NANO = ["--preset", "nano"]
FLAGS = "--preset nano --state-init like-init"
FAULTS = {  # {check: a method of Model, and a change(arguments, result) of what it returns}
    "repeat": ("core_step", lambda args, h: h * (1 + 0.01 * torch.rand(()))),
    "sequences": ("core_step", lambda args, h: h + h.mean(0)),
    "future": ("prelude", lambda args, e: e + e.mean(1, keepdim=True)),
    "gradient": ("core_step", lambda args, h: (h + h.detach()) / 2),
    "validation": ("coda_loss", lambda args, loss: 1.01 * loss),
    "sampling": ("coda", lambda args, x: x * (1 + (x.size(1) > 1))),
    "exits": ("core_step", lambda args, h: h * (1 + (args[-1] is not None))),
    "bfloat16": ("coda_loss", lambda args, loss: loss * (2 - (args[0].dtype == torch.float64))),
    "tracing": ("core_step", lambda args, h: h * (1 + torch.compiler.is_compiling())),
}


def plant(monkeypatch, name, change):
    """Changes what a method of Model returns."""
    method = getattr(Model, name)

    def changed(self, *args, **named):
        args = (*args, *named.values())
        return change(args, method(self, *args))

    monkeypatch.setattr(Model, name, changed)


def test_the_shipped_model_passes(capsys):
    assert not check.check_network(FLAGS, 0, set())
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert all(one.__name__ in line for one in check.CHECKS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_its_check(name, monkeypatch):
    plant(monkeypatch, *FAULTS[name])
    monkeypatch.setattr(check, "CHECKS", [getattr(check, name)])
    assert check.check_network(FLAGS, 0, set()).keys() == {name}


def test_a_crash_is_a_failure_with_its_line_and_can_be_expected(monkeypatch, capsys):
    plant(monkeypatch, "coda_loss", lambda args, loss: loss.no_such_thing)
    monkeypatch.setattr(check, "CHECKS", [check.future, check.validation])
    for expect, code in (([], 1), (["--expect", "validation"], 0)):
        with pytest.raises(SystemExit) as stop:
            check.main([*NANO, "--against", str(ROOT), *expect])
        assert stop.value.code == code
    failed, *_ = [x for x in capsys.readouterr().out.split("\n\n") if "FAILED" in x]
    assert "AttributeError: 'Tensor' object has no attribute 'no_such_thing'" in failed
    assert "at tests/test_check.py:" in failed and "ok      future" in failed


def test_a_base_is_compared_by_its_own_code(tmp_path, capsys):
    for path in (*ROOT.glob("*.py"), *ROOT.glob("looped/*.py"), *ROOT.glob("tools/*.py")):
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    (network, _) = check.networks_of(NANO)
    (same,) = check.numbers_of([network]).values()
    model = tmp_path / "model.py"
    model.write_text(model.read_text().replace("    return dt\n", "    return dt / 2\n"))
    check.compare(tmp_path, [network], NANO)
    said = capsys.readouterr().out
    assert f"{same['loss']:.6g} of the edit" in said and f"{len(same)} numbers differ" in said
