"""tools.check: passes the shipped model, and each check finds the fault that it is for."""

import pytest
import torch

from model import Model
from tools import check

NANO = ["--preset", "nano"]


def test_the_shipped_model_passes(capsys):
    check.main(NANO)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"ok      {each.label}" for each in check.CHECKS]


def changed(name, change):
    """Model's method, with change(model, arguments, result) in place of its result."""
    method = getattr(Model, name)
    return name, lambda self, *args: change(self, args, method(self, *args))


FAULTS = {
    "rows of mixed depths": changed("core_step", lambda self, args, h: h + h.mean(0)),
    "depths by token": changed("core_step", lambda self, args, h: h + args[2].view(-1, 1, 1)),
    "validation": changed("coda_loss", lambda self, args, loss: 1.01 * loss),
    "sampling": changed("prelude", lambda self, args, e: e + e.mean(1, keepdim=True)),
    "traced": changed("core_step", lambda self, args, h: h * (1 + torch.compiler.is_compiling())),
    "bfloat16": changed(
        "coda_loss", lambda self, args, loss: loss + 0.1 * (args[0].dtype == torch.bfloat16) * loss
    ),
    "every parameter": changed("prelude", lambda self, args, e: e.detach()),
}


@pytest.mark.parametrize("label", FAULTS)
def test_a_fault_fails_its_check(label, monkeypatch, capsys):
    monkeypatch.setattr(Model, *FAULTS[label])
    case = check.make_case(NANO)
    (wanted,) = (each for each in check.CHECKS if each.label.startswith(label))
    with pytest.raises(SystemExit):
        check.run_check(wanted, case)
    assert f"FAILED  {wanted.label}" in capsys.readouterr().out
