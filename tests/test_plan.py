"""tools.plan against peaks that torch's allocator saw in the rehearsal."""

import pytest

from model import PRESETS
from tools.plan import GIB, bytes_a_row, bytes_at_rest, plan

# GiB at the deepest depth, compiled (results/rehearsal.md): preset, rows, peak
PEAKS = [
    ("parcae-140m", 8, 8.63),
    ("parcae-140m", 64, 52.7),
    ("parcae-370m", 8, 20.9),
    ("parcae-1.3b", 8, 61.6),
    ("parcae-1.3b", 16, 105.3),
    ("transformer-370m", 8, 13.7),
    ("transformer-1.3b", 8, 40.8),
    ("rdm-100m", 8, 10.7),
    ("rdm-350m", 8, 21.7),
]


@pytest.mark.parametrize("preset, rows, peak", PEAKS)
def test_memory_is_that_of_the_rehearsal(preset, rows, peak):
    cfg = PRESETS[preset]
    found = bytes_at_rest(cfg, 1) + rows * bytes_a_row(cfg)
    assert found / GIB == pytest.approx(peak, rel=0.05)


def test_as_many_sequences_as_fit_are_taken_at_once():
    assert plan("parcae-1.3b", "A100-40", 1)["at once"] == 2
    assert plan("parcae-1.3b", "4090", 1)["at once"] == 0
