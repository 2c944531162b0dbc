"""tools.check: passes the shipped model, and each check finds the fault that it is for."""

import pytest
import torch

from model import Model
from tools import check

NANO = ["--preset", "nano"]
FAULTS = {  # {what fails: a method of Model, and a change(arguments, result) of what it returns}
    "sequences of mixed depths": ("core_step", lambda args, h: h + h.mean(0)),
    "depths by token": ("core_step", lambda args, h: h * args[2].dim()),
    "validation": ("coda_loss", lambda args, loss: 1.01 * loss),
    "sampling": ("prelude", lambda args, e: e + e.mean(1, keepdim=True)),
    "bfloat16": ("coda_loss", lambda args, loss: loss * (2 - (args[0].dtype == torch.float64))),
    "traced": ("core_step", lambda args, h: h * (1 + torch.compiler.is_compiling())),
}


def test_the_shipped_model_passes(capsys):
    check.main(NANO)
    assert capsys.readouterr().out.count("\nok ") == len(FAULTS)


@pytest.mark.parametrize("label", FAULTS)
def test_a_fault_fails_its_check(label, monkeypatch, capsys):
    name, change = FAULTS[label]
    method = getattr(Model, name)

    def changed(self, *args, **named):
        args = (*args, *named.values())
        return change(args, method(self, *args))

    monkeypatch.setattr(Model, name, changed)
    with pytest.raises(SystemExit):
        check.main(NANO)
    assert f"FAILED  {label}" in capsys.readouterr().out
