"""The report's numbers against a second computation; broken and unmatched runs."""

import json
import math
import re
import statistics

import numpy as np
import pytest

from looped.run import read_log
from tools import arms, pages, report
from tools.arms import compare, read_run
from tools.figures import half_width, plus_minus

STEPS, STEP_TOKENS = 20, 4096
SHIFTS = {1: 0.9, 8: 0.0, 16: 0.005}  # of the loss by depth
CONFIG = {
    "args": {"preset": "nano", "seed": 0, "muon_lr": 0.008, "flops": None, "device_batch_size": 8},
    "model": {"mu_rec": 8, "n_core": 1, "gain": "euler"},
    "params": 1_180_000,
    "flops_per_token": 2.5e7,
    "steps": STEPS,
    "ranks": 1,
    "code": "c0",
    "git": {"commit": "0123456789abcdef", "branch": "main", "diff": ""},
    "init_from": None,
    "machine": "a machine",
    "versions": {"torch": "2.13.0"},
    "data": {"sha256": "d0"},
    "dtype": "float32",
}


def records(seed, shift, depths):
    """A log with a validation every 10 steps, the last but one lower than the last."""
    for step in range(1, STEPS + 1):
        at = {"step": step, "tokens": step * STEP_TOKENS}
        cost = {"tok_s": 9000 + step**2, "ms": 450.0 + step, "mem_gb": 1.5 - step / 1000}
        yield {"kind": "train", **at, "loss": 8 - step / 10 + shift, "grad_norm": 3 / step, **cost}
        if step % 10 == 0:
            late = -0.06 if step < STEPS else 0
            loss = {str(d): 4.5 + 0.01 * seed + shift + by_depth + late for d, by_depth in depths}
            bpb = {d: x / 2 for d, x in loss.items()}
            final = {"final": True} if step == STEPS else {}
            yield {"kind": "eval", **at, "eval_tokens": 131072, "loss": loss, "bpb": bpb, **final}


def make_run(path, gain="euler", seed=0, shift=0.0, shifts=SHIFTS, **change):
    """A run as train.py leaves it; change: of config.json."""
    config = json.loads(json.dumps(CONFIG))
    config["args"]["seed"] = seed
    config["model"]["gain"] = gain
    config["data"]["path"] = str(path.parent / "data")
    for key, value in change.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    write_log(path, records(seed, shift, shifts.items()))
    return path


def write_log(run, log):
    (run / "log.jsonl").write_text("\n".join(map(json.dumps, log)) + "\n")


def log_of(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def make_core(run, **change):
    score = {"mean": 0.1234, "std": 0.0010, "name": "mean of 4 of 22 tasks"}
    categories = {"Cloze": 0.1, "QA": 0.2, "3 of the 5 tasks of X": 0.3}
    each = {"aggregate": score, "categories_fine": categories, "categories_ext": categories}
    rules = {"panel": "core", "max_per_task": 100}
    rules |= {"seeds": [1234], "checkpoint": f"step_{STEPS:07d}.pt 0123abcd"} | change
    depths = dict.fromkeys((1, 8), each)
    (run / "core_eval_core_01234567.json").write_text(json.dumps(rules | {"depths": depths}))


@pytest.fixture
def run_report(monkeypatch, capsys):
    """Runs the program, without drawing unless asked to -> what it prints."""

    def call(*args, draw=False):
        if not draw:
            monkeypatch.setattr(pages, "figure", lambda path, *_, **__: [path.name])
        report.main([*map(str, args)])
        return capsys.readouterr().out

    return call


def arms_in(*paths):
    return report.arms_of([read_run(path, path.name) for path in paths])


def tables(text):
    """Every markdown table as a list of rows of cells, header first."""
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.M):
        rows = [re.split(r" *\| *", line)[1:-1] for line in block.strip().split("\n")]
        found.append([rows[0], *rows[2:]])
    return found


def test_tables_equal_a_second_computation(tmp_path, run_report):
    screen = run_report(
        make_run(tmp_path / "e"), make_run(tmp_path / "z", "zoh", shift=-0.0151), tmp_path / "data"
    )
    text = (tmp_path / "report.md").read_text()
    losses, cost, differs = tables(text)
    minutes = sum(450 + s for s in range(1, STEPS + 1)) / 6e4
    tokens = STEPS * STEP_TOKENS
    assert losses[1] == ["e", "1", "4.5000", "5.4000", "4.5000", "4.5050"]
    assert losses[2] == ["z", "1", "4.4849", "5.3849", "4.4849", "4.4899"]
    assert losses[3] == ["z: difference from e", "1", *["-0.0151"] * 4]
    assert differs[1:] == [["gain", "euler", "zoh"]] and "Warning" not in text
    flops = f"{tokens * 2.5e7:.4g}"
    speed = f"{tokens / minutes / 60:,.0f}"
    ratio = f"{tokens / 1.18e6:.3g}"
    assert cost[1] == [
        "e",
        "1,180,000",
        f"{tokens:,}",
        ratio,
        flops,
        speed,
        f"{minutes:.1f}",
        "1.50",
    ]
    # one sign in sentence and table, and the word at one seed; where it all comes from
    said = "z is better than e at this seed: -0.0151 nats/token at 8 loops; seeds scatter by"
    assert said in text and said in screen and screen.count("-0.0151") == 5
    assert "too short to rank models" in text and "![" not in screen
    assert "main 0123456789" in text and "a machine" in text and "python -m tools.report" in text


def test_figures_stand_beside_the_report_and_are_linked_by_name(tmp_path, run_report):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", "zoh")]
    for run in runs:
        make_core(run)
    out = tmp_path / "out dir"
    run_report(*runs, "--out", out, draw=True)
    text = (out / "report.md").read_text()
    links = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert len(set(links)) == 2
    for link in links:
        assert (out / link).read_bytes().startswith(b"\x89PNG")
    scores, categories = tables(text)[3:]
    mean = ["mean of 4 of 22 tasks", "0.1234", "0.0010"]
    assert [row[:5] for row in scores[1:]] == [
        [run, depth, *mean] for run in "ab" for depth in "18"
    ]
    assert categories[1] == ["Cloze", "0.1", "0.1"]


def test_a_repeated_step_counts_once_and_its_last_record_wins(tmp_path):
    run = make_run(tmp_path / "r")
    plain = read_log(run)
    log = log_of(run)
    stale = [r | {"loss": None} for r in log[4:9]]
    write_log(run, log[:4] + stale)
    assert math.isnan(read_log(run).train[-1]["loss"])
    write_log(run, log[:4] + stale + log[4:])  # stopped after line 9, resumed from line 4
    assert read_log(run) == plain


@pytest.mark.parametrize("n, t", [(2, 12.7062), (3, 4.3027), (10, 2.2622), (31, 2.0423)])
def test_half_width_of_the_interval_is_the_tabled_t_times_the_standard_error(n, t):
    d = [0.01 * math.sin(i * i) for i in range(n)]
    half = half_width(d)
    error = statistics.stdev(d) / n**0.5
    assert half / error == pytest.approx(t, abs=6e-5)
    assert plus_minus(d) == f"{statistics.mean(d):.4f} ± {half:.4f}"


def test_arms_are_paired_by_seed_in_any_order(tmp_path):
    shifts = {0: -0.012, 1: -0.016, 2: -0.010}
    runs = [make_run(tmp_path / f"e-s{s}", seed=s) for s in shifts]
    for seed, shift in reversed(shifts.items()):
        runs.append(make_run(tmp_path / f"z-s{seed}", "zoh", seed=seed, shift=shift))
    base, arm = arms_in(*runs)
    mean = statistics.mean(shifts.values())
    half = 4.30265 * statistics.stdev(shifts.values()) / 3**0.5
    assert compare(arm, base).sentence == (
        f"z is better than e: {mean:+.4f} ± {half:.4f} nats/token at 8 loops (3 seeds, 95 %)."
    )
    assert "2 seeds" in compare(arms_in(*runs[:-1])[1], base).sentence


def test_code_is_named_first_and_runs_of_mixed_code_are_no_arm(tmp_path):
    base = make_run(tmp_path / "base")
    both = make_run(tmp_path / "both", "zoh", code="c1")
    said, _, warned, _ = report.differences(arms_in(base, both))
    assert said == "both has other code, gain zoh instead of euler." and "more than one" in warned
    start = {"kind": "start", "step": 4, "tokens": 0, "code": "c2"}
    write_log(both, [start, *log_of(both)])
    (said, _) = report.not_compared([read_run(both, "both")])
    assert "both (continued by other code) is not compared" in said


@pytest.mark.parametrize("change, words", [
    ({"data": {"sha256": "d1"}}, "rows (--data) d1 instead of d0"),
    ({"versions": {"torch": "2.12.0"}}, "torch 2.12.0 instead of 2.13.0"),
    ({"dtype": "bfloat16"}, "dtype bfloat16 instead of float32"),
    ({"args": {"muon_lr": 0.004}}, "muon_lr 0.004 instead of 0.008"),
])  # fmt: skip
def test_what_else_differs_is_a_warning(tmp_path, change, words):
    paths = make_run(tmp_path / "a"), make_run(tmp_path / "b", "zoh", **change)
    said, _, warned, _ = report.differences(arms_in(*paths))
    assert words in said and "gain zoh instead of euler" in said
    assert warned.startswith("Warning: more than one thing differs")


@pytest.mark.parametrize("change", [{"final": False}, {"loss": {"8": None}}])
def test_a_seed_that_is_unfinished_or_lost_is_not_compared(tmp_path, change):
    runs = [make_run(tmp_path / f"e{seed}", seed=seed) for seed in (0, 1, 2)]
    runs += [make_run(tmp_path / f"z{s}", "zoh", seed=s, shift=0.01 * s) for s in (0, 1, 2)]
    log = log_of(runs[-1])
    log[-1] |= change
    write_log(runs[-1], log)
    base, arm = arms_in(*runs)
    assert "2 seeds" in compare(arm, base).sentence
    assert "z2 is not compared" in report.not_compared(arm.runs)[0]


def test_the_first_model_is_what_others_are_compared_with_over_training(tmp_path):
    network = {"mu_rec": 0, "n_core": 0}
    flat = make_run(tmp_path / "flat", shift=0.2, shifts={0: 0.2}, model=network)
    groups = arms_in(make_run(tmp_path / "euler"), flat)
    (_, none), (_, gaps) = pages.difference_over_training(groups, "").curves
    assert np.isnan(none).all() and np.allclose(gaps, 0.4)  # each at its own mu_rec
    (x, curve), (_, level) = pages.loss_by_depth(groups, "").curves
    assert list(x) == [0, 3, 4] and list(level) == [4.9] * 3 and curve[1] == 4.5


def steps(losses):
    return [{"step": i, "loss": x, "state_norm": 1.0} for i, x in enumerate(losses, 1)]


def test_divergence_rule():
    divergence = arms.divergence
    falling = [8 - 4 * i / 200 for i in range(200)]
    assert divergence(steps(falling)) is None
    spike = [*falling[:150], 12.0, *falling[151:]]  # one that it recovers from
    assert divergence(steps(spike)) is None
    up = falling[:100] + [9.0] * 100
    assert 101 <= divergence(steps(up)) <= 101 + 200 // 20
    for end, diverged in ((4.4, False), (4.8, True)):  # half a nat above the lowest
        found = divergence(steps([*falling, *[end] * 200]))
        assert (found is not None) == diverged
    stopped = [record | {"skipped": 1, "loss": math.nan} for record in steps([0] * 63)[60:]]
    assert divergence(steps(falling[:60]) + stopped) == 61
    growing = steps(falling)
    for record in growing:
        record["state_norm"] = 1.2 ** record["step"]  # 1.2^50 is 9,100, 1.2^51 10,920
    assert divergence(growing[:50]) is None and divergence(growing) == 52
    # a run that begins with another's weights need not become better than it began
    level = steps([3.0] * 10 + [3.1] * 190)
    assert divergence(level) is not None and divergence(level, from_scratch=False) is None
