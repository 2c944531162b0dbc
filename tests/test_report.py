"""The report's numbers against a second computation; broken and unmatched runs."""

import json
import math
import random
import re
import statistics
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from helpers import refused

from looped.figures import half_width, plus_minus
from looped.logs import read_log, read_run
from tools import report

DEPTHS, STEPS, STEP_TOKENS, UNIGRAM = (1, 2, 4, 8, 16), 160, 4096, 7.0123
SHIFTS = {0: 0.2, 1: 0.9, 2: 0.4, 4: 0.1, 8: 0.0, 16: 0.005}  # of the loss by depth
CONFIG = {
    "args": {"preset": "nano", "seed": 0, "tokens": 2.2e6, "muon_lr": 0.008},
    "model": {"d_model": 128, "mu_rec": 8, "n_core": 1, "gain": "euler"},
    "params": 1_180_000,
    "flops_per_token": 2.5e7,
    "git": {"commit": "abc", "diff": ""},
    "network_code": "n0",
    "code": "c0",
    "versions": {"python": "3.12.1", "torch": "2.13.0"},
    "machine": "x86_64, 2 cores",
    "ranks": 1,
    "tokenizer": {"path": "t", "sha256": "t0"},
    "data": {"path": "data", "sha256": "d0"},
    "device": "cpu",
    "dtype": "float32",
}


def records(seed, shift, steps, depths, flat):
    """A log whose loss falls from ln 4096 to about 4.5 nats, with a validation every 20 steps."""
    rng = random.Random(seed)
    for step in range(1, steps + 1):
        at = {"step": step, "tokens": step * STEP_TOKENS}
        fall = (3.81 - shift) * math.exp(-5 * step / steps) + rng.gauss(0, 0.04)
        decay = {} if flat else {"decay_max": 0.45 + 0.2 * step / steps, "decay_mean": 0.447}
        norms = {
            "grad_norm": 0.3 + 3 / step,
            "residual": 2 + 8 / step,
            "state_norm": 11 + step / 50,
        }
        cost = {"tok_s": 9000 + step**2, "ms": 450.0 + step, "mem_gb": 1.5 - step / 1000}
        yield {"kind": "train", **at, "loss": 4.5 + shift + fall, **decay, **norms, **cost}
        if step % 20 == 0:
            known = depths if step == steps else [0 if flat else 8]
            late = 0.002 * (steps - step) - (0.06 if step == steps - 20 else 0)
            loss = {str(d): 4.5 + 0.01 * seed + shift + SHIFTS[d] + late for d in known}
            bpb = {d: x / math.log(2) / 3.7 for d, x in loss.items()}
            final = {"final": True} if step == steps else {}
            yield {"kind": "eval", **at, "eval_tokens": 131072, "loss": loss, "bpb": bpb, **final}


def make_run(
    path, gain="euler", seed=0, shift=0.0, steps=STEPS, preset="nano", depths=DEPTHS, **config
):
    """A run as train.py leaves it."""
    flat = preset.startswith("transformer")
    data = path.parent / "data"
    data.mkdir(parents=True, exist_ok=True)
    (data / "manifest.json").write_text(json.dumps({"unigram_entropy": UNIGRAM}))
    settings = json.loads(json.dumps(CONFIG))
    settings["args"] |= {"preset": preset, "out": str(path), "seed": seed}
    settings["model"] |= {"gain": gain} | ({"mu_rec": 0, "n_core": 0} if flat else {})
    settings["data"]["path"] = str(data)
    for key, value in config.items():
        settings[key] = settings[key] | value if isinstance(value, dict) else value
    path.mkdir()
    (path / "config.json").write_text(json.dumps(settings))
    write_log(path, records(seed, shift, steps, depths, flat))
    return path


def write_log(run, log):
    (run / "log.jsonl").write_text("\n".join(json.dumps(record) for record in log) + "\n")


def log_of(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def score(depth, n, shift):
    return {"mean": 0.1 * math.sin(n) + 0.02 * math.log2(depth) + shift, "std": 0.001 * n}


def make_core(run, panel="core", depths=(1, 8, 16), shift=0.0, baselines="v1"):
    tasks = {}
    for n in range(4):
        accuracy, centred = score(16, n, shift), score(8, n, shift)
        tasks[f"task_{n}"] = {"accuracy": accuracy, "centered": centred, "n": 100, "near_ties": n}
    found = {}
    for depth in depths:
        mean = {"name": "mean of 4 of 22 tasks", "tasks_done": 4, "tasks_total": 22}
        fine = {
            name: score(depth, n, shift)["mean"]
            for n, name in enumerate(["Cloze", "QA", "3 of the 5 tasks of X"])
        }
        found[depth] = {"aggregate": mean | score(depth, 1, shift), "tasks": tasks,
                        "categories_fine": fine, "categories_ext": fine}  # fmt: skip
    rules = {"panel": panel, "protocol": "parcae", "baselines": baselines, "max_per_task": 100}
    rules |= {"seeds": [1234], "checkpoint": f"step_{STEPS:07d}.pt 0123abcd"}
    (run / f"core_{panel}_parcae.json").write_text(json.dumps(rules | {"depths": found}))


@pytest.fixture
def run_report(monkeypatch, capsys):
    """Runs the program, without drawing unless asked to; returns what it prints."""

    def call(*args, draw=False):
        if not draw:
            monkeypatch.setattr(report, "figure", lambda path, *_, **__: [path.name])
        report.main([*map(str, args)])
        return capsys.readouterr().out

    return call


def compare(*paths):
    return report.compare_arms([read_run(path) for path in paths])


def tables(text):
    """Every markdown table as a list of rows of cells, header first."""
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.M):
        rows = [re.split(r" *\| *", line)[1:-1] for line in block.strip().split("\n")]
        found.append([rows[0], *rows[2:]])
    return found


def test_tables_equal_a_second_computation(tmp_path, run_report):
    runs = {"e": make_run(tmp_path / "e"), "z": make_run(tmp_path / "z", "zoh", shift=-0.0151)}
    screen = run_report(*runs.values())
    text = (tmp_path / "report.md").read_text()
    losses, differs, cost = tables(text)
    base = log_of(runs["e"])[-1]["loss"]["8"]
    for name, mu_rec, *numbers in losses[1:]:
        by_depth = log_of(runs[name])[-1]["loss"]
        loss = by_depth["8"]
        best = min(entry["loss"]["8"] for entry in log_of(runs[name]) if entry["kind"] == "eval")
        want = [loss, loss - base, best, math.e**loss, loss / math.log(2) / 3.7]
        want += by_depth.values()
        assert mu_rec == "8"
        assert [float(x) for x in numbers] == [round(x, 4) for x in want]
    assert losses[0][7:] == [f"depth {depth}" for depth in DEPTHS] and losses[2][3] == "-0.0151"
    assert differs[1:] == [["gain", "euler", "zoh"]] and "Warning" not in text
    tokens = STEPS * STEP_TOKENS
    minutes = sum(450 + s for s in range(1, STEPS + 1)) / 6e4
    speed = statistics.median(9000 + s**2 for s in range(1, STEPS + 1))
    want = ["1,180,000", f"{tokens:,}", f"{tokens * 2.5e7:.3g}", f"{speed:,.0f}", f"{minutes:.1f}"]
    assert cost[1][1:] == [*want, "1.50", "x86_64, 2 cores"]
    assert "-0.0151 nats/token, n = 1" in text and "One seed gives no interval" in text
    shown, _ = screen.split("\nwritten: ")
    assert text.startswith(shown) and screen.endswith(f"written: {tmp_path / 'report.md'}\n")


def test_the_report_opens_with_one_sentence_and_the_losses_by_depth(tmp_path, run_report):
    flat = make_run(tmp_path / "flat", preset="transformer-nano", depths=(0,))
    loop = make_run(tmp_path / "loop")
    run_report(loop, flat)
    lines = (tmp_path / "report.md").read_text().split("\n")
    assert lines[2] == (
        "loop has a validation loss of 4.5000 nats/token at depth 8, "
        "0.2000 less than flat, which has no loop."
    )
    assert lines[4] == "depth.png"
    losses = [read_run(run).last["loss"] for run in (loop, flat)]
    (_, curve), (x, level) = report.depth_plot(losses, "loss").curves
    assert list(curve) == [4.5 + SHIFTS[d] for d in DEPTHS]
    assert list(x) == [0, 4] and list(level) == [4.7, 4.7]  # as wide as log2 of the depths


def test_figures_stand_beside_the_report_and_are_linked_by_name(tmp_path, run_report):
    runs = [make_run(tmp_path / "runs" / "a"), make_run(tmp_path / "runs" / "b", "zoh")]
    for i, run in enumerate(runs):
        make_core(run, shift=0.01 * i)
        make_core(run, "core-extended", shift=0.01 * i)
    out = tmp_path / "out dir"
    run_report(*runs, "--out", out, draw=True)
    text = (out / "report.md").read_text()
    links = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert len(links) == 4 == len(set(links))
    for link in links:
        assert (out / link).read_bytes().startswith(b"\x89PNG")
    scores = tables(text)[3]
    means = [[r, d, "mean of 4 of 22 tasks"] for r in "ab" for d in ("1", "8", "16")]
    assert [row[:3] for row in scores[1:]] == means
    assert scores[1][3:] == [f"{0.1 * math.sin(1):.4f}", "0.0010", "4", "22"]


def test_a_repeated_step_counts_once_and_its_last_record_wins(tmp_path):
    run = make_run(tmp_path / "r")
    plain = read_log(run / "log.jsonl")
    log = log_of(run)
    stale = [r | {"loss": {"8": 99.0} if r["kind"] == "eval" else 99.0} for r in log[40:90]]
    write_log(run, log[:40] + stale + log[40:])  # stopped after line 90, resumed from line 40
    again = read_log(run / "log.jsonl")
    assert again == plain and list(map(len, again)) == [STEPS, STEPS // 20, 0, 0]


@pytest.mark.parametrize(
    "n,t", [(2, 12.7062), (3, 4.3027), (5, 2.7764), (10, 2.2622), (31, 2.0423)]
)
def test_half_width_of_the_interval_is_the_tabled_t_times_the_standard_error(n, t):
    d = [0.01 * math.sin(i * i) for i in range(n)]
    half = half_width(d)
    error = statistics.stdev(d) / n**0.5
    assert half / error == pytest.approx(t, abs=6e-5)
    assert plus_minus(d) == f"{statistics.mean(d):.4f} ± {half:.4f}"


def test_arms_are_paired_by_seed_in_any_order(tmp_path, run_report):
    shifts = {0: -0.012, 1: -0.016, 2: -0.010}
    runs = [make_run(tmp_path / f"e{s}", seed=s) for s in shifts]
    for seed, shift in reversed(shifts.items()):
        runs.append(make_run(tmp_path / f"z{seed}", "zoh", seed=seed, shift=shift))
    run_report(*runs)
    text = (tmp_path / "report.md").read_text()
    mean = statistics.mean(shifts.values())
    half = 4.30265 * statistics.stdev(shifts.values()) / 3**0.5
    change = (
        f"With gain zoh instead of euler the loss changes by {mean:+.4f} ± {half:.4f} nats/token"
    )
    spread = statistics.stdev(shifts.values())
    note = f"n = 3 (95 % t interval; standard deviation {spread:.4f}), paired by seed."
    assert f"{change}, {note}" in text
    assert "Warning" not in text
    said, warned = compare(*runs[:-1])
    assert "n = 2" in said and "not every seed is also there with gain zoh" in warned


def test_flags_without_an_effect_on_the_numbers_make_no_arms(tmp_path):
    runs = [make_run(tmp_path / f"s{seed}", seed=seed) for seed in (0, 1)]
    for seed, shift in ((0, 0.01), (1, -0.01)):
        more = {"core_every": 1000, "bundle": "b.zip"}
        runs.append(make_run(tmp_path / f"z{seed}", "zoh", seed=seed, shift=shift, args=more))
    (said,) = compare(*runs)
    assert "n = 2" in said and ", includes 0" in said


@pytest.mark.parametrize("change,warning", [
    ({"data": {"sha256": "d1"}}, "flag differs: gain zoh instead of euler, rows d1 instead of"),
    ({"tokenizer": {"sha256": "t1"}}, "differ in tokenizer.sha256"),
    ({"git": {"commit": "abd"}}, "differ in git.commit"),
    ({"dtype": "bfloat16"}, "flag differs: gain zoh instead of euler, dtype bfloat16 instead of"),
    ({"network_code": "abcd"}, "differ in network_code"),
    ({"steps": 180, "tokenizer": {"sha256": "t1"}}, "differ in tokenizer.sha256, tokens"),
    ({"args": {"muon_lr": 0.004}}, "flag differs: gain zoh instead of euler, muon_lr 0.004 instead of 0.008"),
    ({"steps": 180}, "differ in tokens"),
])  # fmt: skip
def test_what_else_differs_is_a_warning(tmp_path, change, warning):
    _, warned = compare(make_run(tmp_path / "a"), make_run(tmp_path / "b", "zoh", **change))
    assert warned.startswith("Warning: ") and warning in warned


def test_edits_without_a_flag_are_arms_of_their_own_and_repeated_runs_are_named(tmp_path):
    base = make_run(tmp_path / "base")
    loop = make_run(tmp_path / "loop", shift=0.01, code="c1")
    other = make_run(tmp_path / "other", shift=0.02, code="c2")
    rule = make_run(tmp_path / "rule", shift=0.03, code="c3")
    said = [text for text in compare(base, loop, other, rule) if text.startswith("With other code")]
    for text, gap in zip(said, ("+0.0100", "+0.0200", "+0.0300"), strict=True):
        assert f"the loss changes by {gap} nats/token, n = 1" in text
    comment = {"git": {"diff": "a comment in tools/"}}
    same = make_run(tmp_path / "same"), make_run(tmp_path / "comment", **comment)
    assert not [text for text in compare(*same) if text.startswith("With other code")]
    twice = make_run(tmp_path / "twice", shift=0.04)
    (said,) = compare(base, twice)
    assert said.endswith("repeats a run, and is not compared.")


def test_runs_in_another_dtype_or_on_other_rows_are_arms_of_their_own(tmp_path):
    base = make_run(tmp_path / "base")
    other = make_run(tmp_path / "other", shift=0.01, dtype="bfloat16")
    rows = make_run(tmp_path / "rows", shift=0.02, data={"sha256": "d1"})
    for run, change, gap in ((other, "dtype bfloat16", "+0.0100"), (rows, "rows d1", "+0.0200")):
        (said,) = compare(base, run)
        assert said.startswith(f"With {change} instead of") and f"changes by {gap} nats" in said


@pytest.mark.parametrize("loss", [None, math.nan])
def test_a_seed_that_is_unfinished_or_lost_is_not_compared(tmp_path, loss):
    runs = [make_run(tmp_path / f"e{seed}", seed=seed) for seed in (0, 1, 2)]
    runs += [make_run(tmp_path / f"z{s}", "zoh", seed=s, shift=0.01 * s) for s in (0, 1, 2)]
    log = log_of(runs[-1])
    if loss is None:
        del log[-1]["final"]
    else:
        log[-1]["loss"] = dict.fromkeys(log[-1]["loss"], loss)
    write_log(runs[-1], log)
    said = compare(*runs)
    assert "is not compared: it" in said[0] and "n = 2" in said[1]
    write_log(runs[0], log_of(runs[0])[:-1])
    write_log(runs[3], log_of(runs[3])[:-1])  # both under way, evaluated at one step
    assert "n = 1" in compare(runs[0], runs[3])[0]


def test_scores_of_an_older_checkpoint_or_other_seeds_are_not_beside_others(tmp_path):
    runs = [make_run(tmp_path / name) for name in "abc"]
    for run, more in zip(
        runs, ({"seeds": [1]}, {"seeds": [1, 2]}, {"checkpoint": "step_0000004.pt x"})
    ):
        make_core(run)
        file = run / "core_core_parcae.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
    a, b, c = map(read_run, runs)
    assert [rules.seeds for rules in [*a.core, *b.core]] == ["1", "1,2"]
    assert not c.core and c.notes == [
        "core_core_parcae.json has scores of step 4, which are left out"
    ]
    log = log_of(runs[2])
    del log[-1]["final"]
    write_log(runs[2], log)
    assert read_run(runs[2]).core


def test_a_flag_that_one_run_was_not_given_differs(tmp_path):
    values = (None, None, "a")
    runs = [make_run(tmp_path / str(i), args={"init_from": x}) for i, x in enumerate(values)]
    lines = report.flag_table([read_run(path, path.name) for path in runs])
    assert tables("\n".join(lines))[0][1:] == [["init_from", "–", "–", "a"]]


def test_the_flat_twin_differs_in_one_thing_and_so_do_the_gains(tmp_path, run_report):
    preset = "transformer-nano"
    runs = [make_run(tmp_path / "euler"), make_run(tmp_path / "zoh", "zoh")]
    network = {"mu_rec": 0, "n_core": 0, "n_prelude": 3, "gain": "zoh"}
    flat = make_run(tmp_path / "flat", preset=preset, depths=(0, 8), shift=0.2, model=network)
    log = log_of(flat)
    log[-1]["loss"] = {"0": log[-1]["loss"]["0"]}
    write_log(flat, log)
    run_report(*runs, flat)
    text = (tmp_path / "report.md").read_text()
    assert "Warning" not in text and ["mu_rec", "8", "8", "0"] in tables(text)[1]
    assert tables(text)[0][3][3] == "0.4000"  # each at its own mu_rec
    write_log(flat, log)
    _, warned = compare(
        runs[0],
        make_run(tmp_path / "b", preset=preset, depths=(0,), model=network, args={"muon_lr": 1}),
    )
    assert "muon_lr 1 instead of" in warned and "n_prelude" not in warned
    run_report(flat, draw=True)  # a flat run alone: no decay to draw
    assert (flat / "report.md").is_file()


def test_unfinished_damaged_and_diverged_runs_are_named(tmp_path, run_report):
    good, cut, bad = (make_run(tmp_path / name) for name in ("good", "cut", "bad"))
    write_log(good, [{"kind": "start", "step": 0, "choices": {}, "code": "c0"}, *log_of(good)])
    lines = (cut / "log.jsonl").read_text().splitlines()
    (cut / "log.jsonl").write_text("\n".join(lines[:70]) + "\n" + lines[70][:33])
    log = log_of(bad)
    for record in log:
        if record["kind"] == "train" and record["step"] > 150:
            record["loss"] = math.nan
    log[-1]["loss"]["8"] = math.nan
    write_log(bad, log)
    screen = run_report(good, cut, bad)
    text = (tmp_path / "report.md").read_text()
    for where in (screen, text):
        assert "unfinished at step 67, last evaluated at step 60" in where
        assert "line 71 of log.jsonl is damaged and left out" in where
        assert where.count("is damaged") == 1  # a line of another kind is not
        assert "the loss is not finite at step 151" in where
    assert tables(text)[0][3][2] == "–"


def test_a_run_that_was_never_evaluated_is_reported(tmp_path, run_report):
    run = make_run(tmp_path / "young", steps=14)
    (tmp_path / "data" / "manifest.json").unlink()
    screen = run_report(run)
    assert "| young | 8 | – | – |" in screen and "unfinished at step 14" in screen
    assert "No validation loss is finite yet." in screen
    assert "Knowing token frequencies only: – nats/token" in screen


@pytest.mark.parametrize("file,content,message", [
    ("log.jsonl", '{"kind": "tr', "log.jsonl has no whole step"),
    ("log.jsonl", '{"kind":"train","step":5}', "is damaged (KeyError: 'loss')"),
    ("log.jsonl", None, "lacks config.json or log.jsonl"),
    ("config.json", '{"args": ', "config.json is damaged"), ("config.json", "{}", "is damaged (KeyError: 'args')"),
    ("core_core_parcae.json", '{"panel": "core"', "core_core_parcae.json is damaged"),
])  # fmt: skip
def test_user_mistakes_end_in_one_line(tmp_path, run_report, capsys, file, content, message):
    path = make_run(tmp_path / "r") / file
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(SystemExit, match="2"):
        run_report(path.parent)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


@pytest.mark.parametrize("change", [
    {"args": None}, {"data": None}, {"data": {"path": 3}}, {"data": {}}, {"model": {}}, {"model": []},
])  # fmt: skip
def test_an_altered_config_is_refused(tmp_path, capsys, change):
    run = make_run(tmp_path / "r")
    (run / "config.json").write_text(json.dumps(CONFIG | change))
    refused(capsys, lambda: read_run(run), "is damaged")


@pytest.mark.parametrize("content", [
    "[]", '{"panel": "core"}', '{"depths": {"x": 1}}', '{"panel": [], "depths": {"8": {}}}',
])  # fmt: skip
def test_scores_that_are_none_are_named(tmp_path, capsys, content):
    run = make_run(tmp_path / "r")
    (run / "core_core_parcae.json").write_text(content)
    refused(capsys, lambda: read_run(run), "is damaged")


def test_lines_that_are_no_records_are_left_out(tmp_path, run_report):
    run = make_run(tmp_path / "r")
    good = log_of(run)
    step, evaluation = good[0], good[-1]
    unnamed = {name: value for name, value in step.items() if name != "step"}
    bad = [
        unnamed,
        step | {"step": None},
        evaluation | {"bpb": None},
        evaluation | {"loss": {"x": 1}},
        [],
        1,
    ]
    write_log(run, [*bad, *good])
    train, evals, _, damaged = read_log(run / "log.jsonl")
    assert damaged == list(range(1, len(bad) + 1))
    assert len(train) == STEPS and train[0] | {"kind": "train"} == step
    assert evals[-1]["loss"][8] == evaluation["loss"]["8"]
    assert f"line {len(bad)} of log.jsonl is damaged and left out" in run_report(run)


def test_scores_under_other_rules_are_not_put_side_by_side(tmp_path, run_report):
    runs = [
        make_run(tmp_path / "a"),
        make_run(tmp_path / "b", "zoh"),
        make_run(tmp_path / "c", seed=1),
    ]
    make_core(runs[0], depths=[8])
    make_core(runs[1], depths=[8], baselines="v2")  # the third was not evaluated
    run_report(*runs)
    text = (tmp_path / "report.md").read_text()
    assert re.findall(r"^## panel core, protocol parcae, baselines (v.), .*$", text, re.M) == [
        "v1",
        "v2",
    ]
    assert [found[1][0] for found in tables(text)[3:]] == ["a", "b"]


def test_the_headline_names_the_best_looped_run_and_the_best_flat_one():
    runs = []
    for name, loss, depth in (("a", 4.0, 8), ("b", 3.9, 8), ("f", 4.2, 0), ("g", 4.3, 0)):
        runs.append(SimpleNamespace(name=name, loss=loss, depth=depth))
    wanted = "b has a validation loss of 3.9000 nats/token at depth 8, 0.3000 less than f"
    assert report.headline(runs).startswith(wanted)


def test_curves_are_means_of_a_hundred_parts_and_radars_are_closed():
    records = pd.DataFrame({"tokens": np.arange(200) * 1e6, "loss": np.arange(200.0)})
    tokens, means = report.curve(records, "loss")
    assert list(means[:2]) == list(tokens[:2]) == [0.5, 2.5] and len(means) == 100
    plot = report.radar([{"a": 1, "b": 2}])
    assert [list(y) for _, y in plot.curves] == [[1, 2, 1], [0, 0, 0]]
