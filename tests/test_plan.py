"""tools.plan against peaks that torch's allocator saw in the rehearsal, and by hand."""

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
# GiB at rest on each of several ranks: preset, ranks, size
AT_REST = [("parcae-140m", 8, 1.34), ("parcae-1.3b", 8, 11.57), ("rdm-350m", 8, 3.44)]


@pytest.mark.parametrize("preset, rows, peak", PEAKS)
def test_memory_is_that_of_the_rehearsal(preset, rows, peak):
    cfg = PRESETS[preset]
    found = bytes_at_rest(cfg, 1) + rows * bytes_a_row(cfg)
    assert found / GIB == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("preset, ranks, size", AT_REST)
def test_ranks_share_the_moments(preset, ranks, size):
    assert bytes_at_rest(PRESETS[preset], ranks) / GIB == pytest.approx(size, rel=0.15)


def test_time_is_flops_over_a_share_of_the_peak():
    cfg = PRESETS["parcae-140m"]
    seconds = 11.2e9 * cfg.flops_per_token() / (0.4 * 8 * 989e12)
    assert plan("parcae-140m", "H100", 8)["hours"] == pytest.approx(seconds / 3600)


def test_as_many_sequences_as_fit_are_taken_at_once():
    assert plan("parcae-1.3b", "A100-40", 1)["at once"] == 2
    assert plan("parcae-1.3b", "4090", 1)["at once"] == 0
