"""The trainer as a program: ranks, micro-batches, interruption, matched pairs, refusals."""

import argparse
import contextlib
import errno
import functools
import gc
import json
import math
import os
import pty
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import ENV, ROOT, command, refused, run_program, small_core, write_bundle
from oracle import Oracle, SlowOptimizer

import core_eval
import train
from dataloader import PackedData
from looped import checkpoint, machine
from looped.checkpoint import (
    checkpoints,
    checksum_file,
    differences,
    same_settings,
    step_of,
    write_checkpoint,
)
from looped.core_tasks import load_panel
from looped.depth import sample_depths, share_out
from looped.endings import SIGNALS, explain
from looped.files import file_hash, read_checked, write_checked
from looped.logs import read_log, read_run
from looped.machine import ONE_PROCESS, Place, environment
from looped.memory import fit_memory
from looped.randomness import FOR_EVAL, FOR_STATE, hash_key
from looped.run_directory import CHANGEABLE, begun_config, decisive, is_finished
from looped.settings import eval_depths, ramp_steps, settle, settle_optimizer
from looped.tokenizer import load_tokenizer, save_tokenizer
from model import MLP, PRESETS, Model, ModelConfig, load_run, setting
from muon import AdamW, Muon, Optimizer

STEPS = 12
SIZES = "--vocab-size 300 --seq-len 32 --d-model 32 --d-mlp 64 --batch-size 12 --dtype float32 --eval-tokens 1000"
SAVING = "--eval-depths 1,8 --eval-every 5 --save-every 4 --momentum-warmup 6"
FLAGS = f"{SIZES} {SAVING} --tokens {STEPS * 32 * 12}".split()
NETWORK = replace(PRESETS["nano"], vocab_size=300, seq_len=32, d_model=32, d_mlp=64)


def flags(packed, run, *more):
    return ["--data", str(packed), "--out", str(run), *FLAGS, *map(str, more)]


def go(*args, script="train.py", **options):
    """train.py as a program of its own, on one rank or several."""
    return run_program(script, *flags(*args), **options)


def here(*args):
    run_here(flags(*args))


def run_here(line):
    """train.py in this process."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.faulthandler, "enable", Mock())
        train.main(line)


def log(run, *kinds):
    """The last record of each step, without what depends on the clock."""
    records = {}
    for line in (run / "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name in ("tok_s", "ms", "mem_gb", "time"):
            record.pop(name, None)
        if record["kind"] in (kinds or ("train", "eval")):
            records[record["kind"], record["step"]] = record
    return records


def weights(run):
    return torch.load(max(run.glob("step_*.pt")), weights_only=True)


def contents(folder):
    return {path: path.read_bytes() for path in folder.iterdir()}


def assert_close(a, b, tolerance=2e-4):
    assert a.keys() == b.keys()
    for key in a:
        for name, x in a[key].items():
            y = b[key][name]
            if isinstance(x, dict):
                assert all(abs(x[depth] - y[depth]) < tolerance for depth in x), (key, name)
            elif isinstance(x, float) and name != "grad_norm":
                assert abs(x - y) < tolerance * max(1, abs(x)), (key, name, x, y)
            elif name in ("rows", "tokens"):
                assert x == y, (key, name)


def assert_identical(run, other):
    """To the last bit: log, weights, optimiser."""
    assert log(run) == log(other)
    a, b = weights(run), weights(other)
    assert a["step"] == b["step"] and torch.equal(a["optimizer"]["steps"], b["optimizer"]["steps"])
    first, second = [(a["optimizer"][name], b["optimizer"][name]) for name in ("first", "second")]
    for x, y in ((a["model"], b["model"]), first, second):
        assert x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


def wait_for_steps(run, count, processes):
    """Until the log has so many steps."""
    file = run / "log.jsonl"
    while not file.is_file() or file.read_text().count('"train"') < count:
        assert all(p.poll() is None for p in processes)
        time.sleep(0.01)


def two_machines(*lines):
    """Command lines of two ranks, each the only one of its machine, as torchrun starts them -> their
    processes.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    ranks = []
    for rank, line in enumerate(lines):
        env = ENV | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env |= {"WORLD_SIZE": "2", "RANK": str(rank), "TORCHELASTIC_RUN_ID": "none"}
        # torch warns where the machine's own name does not resolve, as a Mac's often does not
        env["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        ranks.append(subprocess.Popen(line, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True))
    return ranks


def both_refuse(*lines):
    """Of two machines: both must end with exit code 2 and one line -> the lines."""
    errors = []
    for process in two_machines(*lines):
        errors += process.communicate(timeout=60)[1].splitlines()
        assert process.returncode == 2, errors
    first, second = errors
    return first, second


@pytest.fixture(scope="session")
def base(packed, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "the base"
    here(packed, run)
    return run


# -- what a run computes -----------------------------------------------------------------------------------------------


def test_a_run_equals_the_oracles(base, packed):
    """Every step in float64, rebuilt from the seed alone: rows, depths, keys, initial weights, rates, both updates."""
    model, data = Model(NETWORK), PackedData(packed)
    model.init_weights(0)
    oracle = Oracle(NETWORK, model.state_dict())
    recipe = train.RECIPES["nano"]
    matrices = set()
    for name, w in oracle.w.items():
        if name.startswith("blocks.") and w.dim() == 2 and "gate" not in name:
            matrices.add(name)
    slow = SlowOptimizer(oracle.w, matrices, recipe.muon_lr, recipe.adam_lr)
    records = log(base, "train")
    for step in range(STEPS):
        rows = torch.from_numpy(data.get("train", data.stream_ids(0, 12 * step, 12)))
        keys = [hash_key(0, FOR_STATE, 12 * step + i) for i in range(12)]
        n, k = sample_depths(NETWORK, 0, step, 12)
        loss, norms = oracle.loss(rows[:, :-1], rows[:, 1:], keys, n, k)
        gradients = oracle.gradients(loss / (12 * 32))
        record = records["train", step + 1]
        for name, total in {"loss": loss.item(), **norms}.items():
            assert record[name] == pytest.approx(total / (12 * 32), rel=1e-3), (step, name)
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-3), step
        assert record["depth_mean"] == pytest.approx((n + k).mean())
        left = (STEPS - step) / STEPS
        slow.step(gradients, min(1, 2 * left), left, 0.85 + 0.1 * min(1, step / 6))
    assert abs(records["train", 1]["decay_max"] - math.sqrt(1 / 5)) < 1e-6
    assert records["train", STEPS]["loss"] < records["train", 1]["loss"] - 0.5
    for name, w in weights(base)["model"].items():
        assert (w - oracle.w[name]).norm() < 2e-3 * w.norm(), name


def test_a_batch_is_a_function_of_seed_step_and_sequence(packed):
    data, args = PackedData(packed), argparse.Namespace(seed=3, batch_size=12)
    n, k = sample_depths(NETWORK, 3, 5, 12)
    rows = data.stream_ids(3, 60, 12)
    for rank, mine in enumerate(share_out(n, k, 2)):
        place = Place(rank, 2, torch.device("cpu"))
        batch, _ = train.next_batch(data, NETWORK, args, 5, place)
        assert (batch.n == n[mine]).all() and (batch.k == k[mine]).all()
        assert batch.keys.tolist() == [hash_key(3, FOR_STATE, 60 + i) for i in mine.tolist()]
        assert (batch.tokens.numpy() == data.get("train", rows[mine])).all()


def test_the_log_tells_the_tokens_and_the_rates_of_each_step(base):
    args = argparse.Namespace(warmup=0, cooldown=0.5, momentum_warmup=6)
    for (_, step), record in log(base, "train").items():
        assert record["tokens"] == step * 12 * 32
        assert record["lr_multiple"] == train.schedule(step - 1, STEPS, args).lr


def test_the_record_is_the_same_where_a_steps_numbers_are_read_one_step_later(
    base, packed, tmp_path, monkeypatch
):
    """As on GPUs, which are given the next step before."""

    class Gpu(Place):
        is_gpu = True

    def train_steps(run, *rest, real=train.train_steps):
        run.place = Gpu(*run.place)
        return real(run, *rest)

    real = train.from_device
    monkeypatch.setattr(train, "train_steps", train_steps)
    monkeypatch.setattr(train, "from_device", lambda numbers, place: real(numbers, ONE_PROCESS))
    here(packed, tmp_path / "r")
    assert log(tmp_path / "r") == log(base)


def test_flags_reach_the_model_and_its_optimiser():
    line = "--muon-lr 1 --adam-lr 2 --weight-decay 3 --clip 0.3 --seed 5"
    more = ["--checkpoint-loops", "--dtype", "bfloat16", "--residual-dtype", "float32"]
    args = train.parse_args([*line.split(), *more])
    settle(args, NETWORK, train.recipe_of("nano"), 1)
    model, optimizer, _ = train.build(args, NETWORK, None, None, ONE_PROCESS, compiled=False)
    rules = {type(rule): rule for rule, _ in optimizer.buffers}
    assert (rules[AdamW].lr, rules[Muon].lr, rules[Muon].weight_decay) == (2, 1, 3)
    assert (rules[AdamW].betas, rules[AdamW].eps) == ((0.8, 0.95), 1e-10)
    assert optimizer.clip == 0.3 and model.checkpoint_loops
    assert (model.dtype, model.residual_dtype) == (torch.bfloat16, torch.float32)
    same = Model(NETWORK)
    same.init_weights(5)
    weights = model.state_dict()
    assert all(torch.equal(weights[name], p) for name, p in same.state_dict().items())
    ((rule, _),) = train.adamw_groups(model, args, compiled=False)
    assert (rule.lr, rule.betas, rule.eps, rule.update_clip) == (2, (0.9, 0.95), 0.0, True)


def test_recipes_are_the_papers():
    """Tokens, rates of AdamW and of Muon; of the RDM's setup the rates and ramps."""
    papers = {
        "140m": (11.2e9, 8e-3),
        "370m": (29.6e9, 8e-3),
        "770m": (61.6e9, 6e-3),
        "1.3b": (104e9, 6e-3),
    }
    for name, (tokens, adam_lr) in papers.items():
        want = train.Recipe(tokens, batch_size=256, adam_lr=adam_lr, muon_lr=8e-3)
        assert train.RECIPES[name] == want
        assert (want.warmup, want.cooldown, want.momentum_warmup) == (0, 0.5, 300)
    for name, adam_lr in {"rdm-100m": 4e-4, "rdm-350m": 2e-4}.items():
        recipe = train.RECIPES[name]
        assert (recipe.optimizer, recipe.adam_lr) == ("adamw", adam_lr)
        assert recipe.warmup == recipe.cooldown == 4096


def test_only_bad_steps_in_a_row_end_a_run():
    args = train.parse_args(["--batch-size", "4"])
    run = train.Run(args, None, {}, None, ONE_PROCESS, 9, None, None, None)
    for loss in (math.nan, math.nan, 1.0, math.nan, math.nan):
        numbers = {"stop": 0, "grad_norm2": 1.0, "loss": loss}
        train.finish_step(run, train.Finished({"step": 1}, numbers.copy))
    assert run.bad == 2


def test_validation_equals_a_plain_loop_over_rows(base, packed):
    model, _, _ = load_run(base)
    data, enc = PackedData(packed), load_tokenizer(packed / "tokenizer.json")
    total, nats, size = 0.0, 0.0, 0
    for i in range(1000 // 32):
        row = torch.from_numpy(data.get("val", [i]))
        key = torch.tensor([hash_key(FOR_EVAL, i)])
        logits = model.head(model.hidden(row[:, :-1], 8, key))[0].double()
        loss = F.cross_entropy(logits, row[0, 1:], reduction="none")
        words = row[0, 1:] < 297  # the others, specials, have no bytes
        total += loss.sum().item()
        nats += loss[words].sum().item()
        size += len(enc.decode_bytes(row[0, 1:][words].tolist()))
    final = log(base, "eval")["eval", STEPS]
    assert final["final"] and final["eval_tokens"] == 31 * 32
    assert abs(final["loss"]["8"] - total / (31 * 32)) < 1e-5
    assert abs(final["bpb"]["8"] - nats / size / math.log(2)) < 1e-5


def test_every_validation_has_the_depths_asked_for(base):
    evals = log(base, "eval")
    assert [step for _, step in evals] == [5, 10, STEPS]
    assert all(set(record["loss"]) == {"1", "8"} for record in evals.values())
    start = log(base, "start")["start", 0]["choices"]
    assert {"activations", "compile", "device batch", "loss chunk"} <= start.keys()
    assert all(len(choice) == 2 for choice in start.values())  # what, and why


def test_micro_batch_does_not_change_the_step_and_keep_every_keeps(base, packed, tmp_path):
    rows = ["--device-batch-size", "3"]
    here(packed, tmp_path / "r", *rows, "--keep-every", "3", "--eval-every", "6")
    assert_close(log(base, "train"), log(tmp_path / "r", "train"))
    last = log(base, "eval")["eval", STEPS]["loss"]
    assert log(tmp_path / "r", "eval")["eval", STEPS]["loss"] == pytest.approx(last, abs=2e-4)
    assert (tmp_path / "r" / "log.jsonl").read_text().count('"kind": "eval"') == 2  # none twice
    kept = [path.name for path in sorted((tmp_path / "r").glob("step_*.pt"))]
    assert kept == [f"step_{step:07d}.pt" for step in (3, 6, 9, 12)]
    assert [path.name[-5:] for path in sorted(base.glob("step_*.pt"))] == ["08.pt", "12.pt"]


def test_matched_pair_differs_in_the_gain_alone(base, packed, tmp_path):
    here(packed, tmp_path / "zoh", "--gain", "zoh")
    a, b = log(base, "train"), log(tmp_path / "zoh", "train")
    for key in a:
        assert all(
            a[key][name] == b[key][name] for name in ("rows", "depth_mean", "lr_multiple", "tokens")
        )
    assert a["train", STEPS]["loss"] != b["train", STEPS]["loss"]
    x, y = [json.loads((run / "config.json").read_text()) for run in (base, tmp_path / "zoh")]
    assert {name for name in x["model"] if x["model"][name] != y["model"][name]} == {"gain"}
    assert {name for name in x["args"] if x["args"][name] != y["args"][name]} == {"out"}


@pytest.mark.parametrize("preset, recipe", [
    ("parcae-140m", "140m"), ("mine-nano", "nano"), ("parcae-rdm-nano", "rdm-nano"),
])  # fmt: skip
def test_a_presets_name_ends_in_its_recipes(preset, recipe, capsys):
    assert train.recipe_of(preset) is train.RECIPES[recipe]
    for wrong in ("mine", "wide2140m"):
        refused(capsys, lambda name=wrong: train.recipe_of(name), f"--preset {wrong} has no recipe")


@pytest.fixture
def sharing(tmp_path):
    """train.py whose ranks share out the update of a small model as they do of a large one."""
    script = tmp_path / "sharing.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import muon, train
muon.LARGE = 4096
train.main(sys.argv[1:])
""")
    return script


@pytest.mark.parametrize(("ranks", "shared"), [(2, False), (3, True)])
def test_ranks_equal_one(ranks, shared, sharing, packed, tmp_path):
    rates = (
        "--muon-lr",
        1e-2,
        "--adam-lr",
        1.6e-2,
    )  # the recipe's, which are higher, enlarge rounding
    here(packed, tmp_path / "one", *rates)
    script = sharing if shared else "train.py"
    # micro-batches too: no rank may send a gradient before its last one
    go(packed, tmp_path / "r", *rates, "--device-batch-size", "2", ranks=ranks, script=script)
    assert_close(log(tmp_path / "one"), log(tmp_path / "r"))
    a, b = weights(tmp_path / "one"), weights(tmp_path / "r")
    for name in a["model"]:
        assert torch.allclose(a["model"][name], b["model"][name], atol=2e-4), name
    assert a["optimizer"]["first"].keys() == b["optimizer"]["first"].keys()
    assert str(tmp_path / "r") in shlex.split(
        json.loads((tmp_path / "r/config.json").read_text())["command"]
    )


def test_core_in_training_is_core_eval_of_the_weights_then(base, packed, tmp_path):
    """--core-every changes nothing else, and gives what core_eval gives of that step's checkpoint; a run that was
    stopped at that step makes up for it."""
    run, bundle = tmp_path / "run", write_bundle(tmp_path / "bundle.zip", small_core())
    for more in (["--stop-at", "8"], ["--resume"]):
        here(packed, run, "--core-every", "8", "--bundle", bundle, *more)
    assert_identical(run, base)
    for path in run.glob("step_*12.pt*"):
        path.unlink()
    model, enc = load_run(run)[0], load_tokenizer(run / "tokenizer.json")
    panel = load_panel(bundle, limit=train.CORE_EXAMPLES)
    settings = core_eval.Settings([8], [1234], ONE_PROCESS)
    found = core_eval.evaluate(model, enc, panel, settings)
    entries = {label: entry[8] for label, entry in found}
    assert len(entries) == 22
    want = core_eval.summarise(panel, entries)["aggregate"]
    assert log(run, "core")["core", 8].items() >= want.items()


def test_a_panel_without_a_score_does_not_end_training(base, packed, tmp_path, monkeypatch, capsys):
    def no_number(model, x, targets):
        return torch.full((3, len(targets)), math.nan)

    monkeypatch.setattr(core_eval, "token_scores", no_number)
    run, bundle = tmp_path / "run", write_bundle(tmp_path / "bundle.zip", small_core())
    here(packed, run, "--core-every", "8", "--bundle", bundle)
    assert_identical(run, base)
    kind = "core without a score"
    assert "depth 8 is not finite" in log(run, kind)[kind, 8]["reason"]
    assert "step 8  CORE: no score" in capsys.readouterr().out


def test_a_long_cpu_run_is_compiled_only_where_there_is_what_it_takes(monkeypatch, tmp_path):
    assert not machine.choose_compile("auto", 10, ONE_PROCESS)
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        assert not machine.choose_compile("auto", 10_000, ONE_PROCESS)
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    monkeypatch.setattr(machine.sys, "platform", "linux")
    assert not machine.choose_compile("auto", 10_000, ONE_PROCESS)
    (tmp_path / "Python.h").touch()
    assert machine.choose_compile("auto", 10_000, ONE_PROCESS)


def test_a_gpu_run_is_compiled_only_where_there_is_what_it_takes(monkeypatch, tmp_path, capsys):
    gpu = ONE_PROCESS._replace(device=torch.device("cuda"))
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
    for wish in ("auto", "on"):
        choose = functools.partial(machine.choose_compile, wish, 10, gpu)
        refused(capsys, choose, "Python's headers", "try --compile off")
    assert not machine.choose_compile("off", 10, gpu)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(machine.shutil, "which", lambda name: name == "clang")
    assert machine.choose_compile("auto", 10, gpu)


def test_schedule():
    args = argparse.Namespace(warmup=0, cooldown=0.5, momentum_warmup=300)
    rates = [train.schedule(step, 1000, args) for step in range(1000)]
    momentum, lr = 0.85, 1.0
    for step, rate in enumerate(rates):
        assert abs(rate.momentum - momentum) < 1e-9 and abs(rate.lr - lr) < 1e-9
        assert abs(rate.weight_decay - (1 - step / 1000)) < 1e-12
        momentum = min(0.95, momentum + 0.1 / 300)
        lr = lr - 1 / 500 if step >= 500 else 1.0
    args = argparse.Namespace(warmup=10, cooldown=20, momentum_warmup=0)
    lrs = [train.schedule(step, 100, args).lr for step in range(100)]
    assert lrs[0] == 0.1 and lrs[9:81] == [1.0] * 72
    assert abs(lrs[90] - 0.5) < 1e-12 and abs(lrs[99] - 0.05) < 1e-12
    assert train.schedule(0, 100, args).momentum == 0.95
    args = argparse.Namespace(warmup=0.1, cooldown=0.2, momentum_warmup=0)  # shares of the run
    assert [train.schedule(step, 100, args).lr for step in range(100)] == lrs


def test_deal_gives_every_sequence_once_and_ranks_equal_work():
    cfg = PRESETS["parcae-140m"]
    worst = []
    for step in range(100):
        n, k = sample_depths(cfg, 0, step, 256)
        parts = share_out(n, k, 8)
        assert sorted(np.concatenate(parts)) == list(range(256)) and {len(p) for p in parts} == {32}
        # in block applications: two core layers, prelude and coda 12, head 8.7, C and B e 0.4
        cost = np.array([(2 * n[p] + 6 * k[p]).sum() + 32 * 21.1 for p in parts])
        worst.append(cost.max() / cost.mean())
    assert np.mean(worst) < 1.005


# -- interruption ------------------------------------------------------------------------------------------------------


def test_the_log_has_no_field_that_a_statistic_could_be_called(base):
    statistics = {"residual", "state_norm", "decay_max", "decay_mean"}
    for line in (base / "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "train":
            assert record.keys() - statistics <= train.LOGGED


def test_resumed_is_bitwise_uninterrupted_and_a_finished_run_is_left_alone(
    base, packed, tmp_path, capfd
):
    run = tmp_path / "r"
    here(packed, run, "--stop-at", "5")  # its validation is left to the continued run
    assert "stopped after step 5 of 12 and saved" in capfd.readouterr().out
    here(packed, run, "--stop-at", "2", "--resume")
    assert "nothing was done: the run is at step 5 of 12" in capfd.readouterr().out
    here(packed, run, "--resume")
    assert_identical(run, base)
    before = contents(run)
    here(packed, run, "--resume")
    assert "is finished" in capfd.readouterr().out
    assert before == contents(run)
    here(
        packed, run, "--resume", "--eval-tokens", "640"
    )  # the wish for another validation is heard
    last = json.loads((run / "log.jsonl").read_text().splitlines()[-1])
    assert last["final"] and last["eval_tokens"] == 640


@pytest.mark.parametrize(
    ("network", "depths"),
    [
        ("--preset transformer-nano", {0}),
        ("--preset parcae-rdm-nano --d-model 128 --n-head 1", {8, 1}),
        ("--mechanism hyper --streams 2", {8, 1}),
        ("--granularity token --injection concat", {8, 1}),
        ("--optimizer adamw --gain zoh --residual-dtype float32", {8, 1}),
    ],
)
def test_other_models_train_validate_and_resume(network, depths, packed, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "r"
    line = f"--data {packed} {SIZES} --eval-depths 1,8 --warmup 0 --tokens {STEPS * 32 * 12} {network}".split()
    run_here([*line, "--out", str(whole)])
    run_here([*line, "--out", str(run), "--stop-at", "5"])
    run_here([*line, "--out", str(run), "--resume"])
    assert_identical(run, whole)
    records = log(whole)
    assert records["eval", STEPS]["loss"].keys() == {str(depth) for depth in depths}
    assert records["train", STEPS]["loss"] < records["train", 1]["loss"] - 0.1


def begun_before(base, run, names):
    """A copy of a run, stopped half way, whose network's configuration lacks these fields."""
    shutil.copytree(base, run)
    old, new = sorted(run.glob("step_*.pt"))
    new.unlink()
    state = torch.load(old, weights_only=True)
    config = json.loads((run / "config.json").read_text())
    for name in names:
        del config["model"][name], state["config"][name]
    del config["args"]["clip"]
    (run / "config.json").write_text(json.dumps(config))
    torch.save(state, old)
    Path(f"{old}.sha256").write_text(file_hash(old))
    return run


def test_a_run_whose_config_lacks_a_field_resumes_with_its_default(base, packed, tmp_path, capsys):
    """It was begun before the field was there."""
    run = begun_before(base, tmp_path / "r", ["rope_theta", "granularity"])
    here(packed, run, "--resume")
    assert_identical(run, base)
    older = begun_before(base, tmp_path / "older", ["token_shift"])  # nano had none then
    refused(capsys, lambda: here(packed, older, "--resume"), "--token-shift False (now True)")
    here(packed, older, "--resume", "--no-token-shift")
    assert len(checkpoints(older)) == 2


@pytest.mark.parametrize("preset", ["transformer-nano", "nano"])
def test_a_model_without_a_loop_heeds_none_of_the_loops_settings(preset):
    cfg = PRESETS[preset]
    before = replace(cfg, prelude_norm=not cfg.prelude_norm)
    if cfg.n_core:
        with pytest.raises(ValueError, match="^--prelude-norm True .now False.$"):
            same_settings({"config": asdict(before)}, cfg)
    else:
        same_settings({"config": asdict(before)}, cfg)
    with pytest.raises(ValueError, match="--key-offset True .now None"):
        same_settings({"config": asdict(cfg) | {"key_offset": True}}, cfg)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_at_hand(number, base, packed, tmp_path, monkeypatch):
    run = tmp_path / "r"
    draw = train.next_batch

    def next_batch(data, cfg, args, step, place):
        if step == 5:
            gc.disable()  # as from the 20th step on
            os.kill(os.getpid(), number)
        return draw(data, cfg, args, step, place)

    monkeypatch.setattr(train, "next_batch", next_batch)
    handlers = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(SystemExit) as stop:
        here(packed, run)
    assert stop.value.code == 128 + number
    assert [signal.getsignal(each) for each in SIGNALS] == handlers  # one of several runs, perhaps
    assert gc.isenabled()
    assert checkpoints(run)[-1].name == "step_0000006.pt"
    monkeypatch.undo()
    here(packed, run, "--resume")
    assert_identical(run, base)


def test_a_terminal_that_closes_costs_no_step(packed, tmp_path):
    run = tmp_path / "r"
    line = command("train.py", *flags(packed, run, "--tokens", "1e6", "--compile", "off"))
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execve(line[0], line, ENV)
    while b"step      1" not in os.read(terminal, 4096):
        pass
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    assert checkpoints(run) and checksum_file(checkpoints(run)[-1]).is_file()


def test_ctrl_c_into_a_pipe_saves_and_says_so(packed, tmp_path):
    """As under `python train.py … | tee log`, whose tee ends first."""
    run = tmp_path / "r"
    line = command("train.py", *flags(packed, run, "--tokens", "1e6", "--compile", "off"))
    log = tmp_path / "log"
    child, terminal = pty.fork()
    if child == 0:
        every = ["--log-every", "1"]
        os.execve("/bin/sh", ["sh", "-c", f"{shlex.join([*line, *every])} | tee {log}"], ENV)
    said = b""
    while b"step      1" not in said:
        said += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # Linux's way to say that a terminal has ended
        while b"and saved" not in said:
            said += os.read(terminal, 4096)
    os.waitpid(child, 0)
    (saved,) = checkpoints(run)
    assert f"stopped after step {step_of(saved)} of" in said.decode()
    assert len(read_log(run / "log.jsonl").train) == step_of(saved)


SIGNALLED = """
import os, signal, sys, torch
from looped.endings import catch_signals
signal.signal(signal.SIGHUP, signal.SIG_DFL)
caught = catch_signals()
"""


def test_a_terminal_that_was_taken_away_costs_no_step():
    """As macOS does when its session ends: what asks about it fails, like one that was closed."""
    program = (
        f"{SIGNALLED}"
        "os.close(1), os.close(2)\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "print('a step', flush=True)\n"
        "sys.exit(caught != [signal.SIGHUP])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=ENV, capture_output=True)
    assert done.returncode == 0 and not done.stdout


@pytest.mark.parametrize("reader", ["lives", "has ended"])
def test_without_a_terminal_sigint_loses_only_words_that_nobody_reads(reader):
    """As torchrun's processes have none; `tee` ends by the Ctrl-C that it passes on, others live."""
    program = (
        f"{SIGNALLED}"
        "os.read(0, 1)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print('a step', flush=True)\n"
        "sys.exit(caught != [signal.SIGINT])\n"
    )
    line = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = subprocess.Popen(line, cwd=ROOT, env=ENV, start_new_session=True, **pipes)
    said = b""
    if reader == "has ended":
        child.stdout.close()
    child.stdin.write(b"x")
    child.stdin.close()
    if reader == "lives":
        said = child.stdout.read()
    assert child.wait(timeout=60) == 0
    assert said == (b"a step\n" if reader == "lives" else b"")


def test_a_damaged_checkpoint_is_passed_over(base, packed, tmp_path, capfd):
    run = tmp_path / "r"
    here(packed, run, "--stop-at", "6")
    newest = checkpoints(run)[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    here(packed, run, "--resume")
    assert f"{newest} is damaged" in capfd.readouterr().out
    assert newest.with_name(f"{newest.name}.damaged").is_file()
    assert_identical(run, base)


def test_rows_that_moved_are_followed_and_others_in_their_place_are_not(base, packed, tmp_path):
    rows = shutil.copytree(packed, tmp_path / "rows")
    run = tmp_path / "r"
    here(rows, run, "--stop-at", "5")
    moved = rows.rename(tmp_path / "moved")
    rows.mkdir()
    (rows / "tokenizer.json").write_text("another")
    (run / "log.jsonl").rename(tmp_path / "log")
    here(moved, run, "--resume", "--stop-at", "6")  # nor is a log needed
    here(moved, run, "--resume")
    assert (run / "tokenizer.json").read_bytes() == (packed / "tokenizer.json").read_bytes()
    config = json.loads((run / "config.json").read_text())
    found = {config["data"]["path"], config["args"]["data"]}
    assert found == {str(moved)} and config["tokenizer"]["path"].startswith(str(moved))
    assert all(
        torch.equal(w, weights(base)["model"][name]) for name, w in weights(run)["model"].items()
    )


def test_a_run_keeps_its_identity_while_it_is_continued(packed, tmp_path, monkeypatch):
    """In config.json and for what RunLog tells others; one that begins again is another."""
    run = tmp_path / "r"
    known = []
    usual = train.RunLog

    def opened(folder, config, *rest):
        written = json.loads((folder / "config.json").read_text())
        known.append((config["id"], written["id"]))
        return usual(folder, config, *rest)

    monkeypatch.setattr(train, "RunLog", opened)
    for stop in (1, 2, 3):
        here(packed, run, "--stop-at", stop, "--resume")
    assert len(set(known)) == 1 and known[0][0] == known[0][1]
    for path in run.glob("step_*"):
        path.unlink()
    here(packed, run, "--stop-at", 1, "--resume")
    again = known.pop()
    assert again[0] == again[1] and again not in known


def test_what_decides_a_runs_numbers_may_not_change_when_it_is_continued():
    """Network, optimiser and seed; the groups that --help shows."""
    parser = train.Parser()
    train.add_network_flags(parser)
    network = {action.dest for action in parser._actions}
    optimiser = {
        "batch_size", "optimizer", "muon_lr", "adam_lr", "warmup", "cooldown", "momentum_warmup",
        "weight_decay", "clip",
    }  # fmt: skip
    decides = (
        (network - {"help"})
        | optimiser
        | {"seed", "tokens", "flops", "init_from", "dtype", "residual_dtype"}
    )
    assert not decides & CHANGEABLE
    assert decides | CHANGEABLE | {"preset"} == set(vars(train.parse_args([])))


def test_resume_on_another_number_of_ranks(base, sharing, packed, tmp_path):
    run = tmp_path / "r"
    go(packed, run, "--stop-at", "4", ranks=2, script=sharing)
    go(packed, run, "--resume", "--stop-at", "6", ranks=3, script=sharing)
    here(packed, run, "--resume")
    assert_close(log(base), log(run))


def test_rest_of_cores_is_counted_from_the_systems_ticks(tmp_path, monkeypatch):
    """Hundredths of a second: user, nice, system, idle, iowait, irq, softirq, steal, guest, guest nice."""
    before = tmp_path / "before"
    before.write_text(
        "cpu 9 9 9 9 9 9 9 9 9 9\ncpu0 5 0 5 90 0 0 0 0 0 0\ncpu1 50 0 0 50 0 0 0 0 0 0\n"
        "cpu2 0 0 0 100 0 0 0 0 0 0\ncpu7 0 0 0 100 0 0 0 0 0 0\nintr 12345 0\n"
    )
    after = tmp_path / "after"
    after.write_text(  # at rest; busy; taken by another guest of the host; not ours
        "cpu 9 9 9 9 9 9 9 9 9 9\ncpu0 5 0 6 110 3 0 0 0 0 0\ncpu1 74 0 0 51 0 0 0 0 9 9\n"
        "cpu2 0 0 0 110 0 0 0 15 0 0\ncpu7 0 0 0 125 0 0 0 0 0 0\nintr 12399 0\n"
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    rested = machine.seconds_at_rest(after) - machine.seconds_at_rest(before)
    assert rested.tolist() == pytest.approx([0.23, 0.01, 0.1])


def test_how_long_ranks_wait_for_each_other(tmp_path):
    """Five minutes in training, an hour around it."""
    dist.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        for training, seconds in ((True, 300), (False, 3600)):
            machine.limit_waiting(Place(0, 2, torch.device("cpu")), training)
            group = dist.group.WORLD._get_backend(torch.device("cpu"))
            assert group.options._timeout == timedelta(seconds=seconds)
    finally:
        dist.destroy_process_group()


def test_all_ranks_stop_together_when_one_is_asked_to_in_the_last_step(packed, tmp_path):
    script = tmp_path / "signalled.py"
    script.write_text(f"""
import datetime, os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import looped.machine, train
def sample_depths(cfg, seed, step, *rest, draw=train.sample_depths):
    if step == 11 and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGTERM)
    return draw(cfg, seed, step, *rest)
train.sample_depths, looped.machine.HANG = sample_depths, datetime.timedelta(seconds=60)
train.main(sys.argv[1:])
""")
    out = go(packed, tmp_path / "r", ranks=2, script=script, check=False)
    assert "stopped after step 12 of 12 and saved" in out.stdout
    assert "another rank ended" not in out.stderr


def test_when_a_rank_is_killed_the_other_ends_with_one_line(packed, tmp_path):
    line = command(
        "train.py", *flags(packed, tmp_path / "r", "--tokens", "1e6", "--compile", "off")
    )
    ranks = two_machines(line, line)
    wait_for_steps(tmp_path / "r", 4, ranks)
    ranks[0].kill()
    error = ranks[1].communicate(timeout=60)[1].strip()
    ranks[0].communicate()
    assert ranks[1].returncode == 1
    wanted = r"error: rank 1 of 2, after step \d+: another rank ended .*--resume continues"
    assert re.fullmatch(wanted, error)


def test_diverging_run_stops_with_one_message(packed, tmp_path, capfd):
    with pytest.raises(SystemExit, match="1"):
        here(packed, tmp_path / "r", "--muon-lr", "1e30", "--adam-lr", "1e30")
    out, err = capfd.readouterr()
    assert (
        "3 steps in a row" in err
        and "--adam-lr (now 1e+30)" in err
        and re.search(r"step 2: .*, sequences 12 to 23; the step was skipped on all ranks", out)
    )


def test_faults_from_outside_are_one_line_and_others_are_not(base, capsys):
    args = train.parse_args(["--out", str(base), "--batch-size", "12", "--device-batch-size", "6"])
    smaller = "try --device-batch-size 3"
    for error, words in (
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), smaller),
        (MemoryError(), smaller),
        (torch.OutOfMemoryError("CUDA"), smaller),
        (dist.DistBackendError("NCCL communicator was aborted"), "another rank ended or hangs"),
        (dist.DistBackendError("NCCL error in: x.cpp:9\nLast error:\nno /dev/shm"), "no /dev/shm"),
        (OSError(28, "No space left on device", "x.pt"), "x.pt: No space left on device"),
    ):
        with pytest.raises(SystemExit, match="1"):
            explain(error, args, {"step": 7})
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line and "after step 7" in line and "step_0000012.pt" in line
    unsettled = train.parse_args([])  # before the device batch is found
    with pytest.raises(SystemExit, match="1"):
        explain(torch.OutOfMemoryError("CUDA"), unsettled, {"step": 0})
    assert "out of memory" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="a fault of ours"):
        explain(RuntimeError("a fault of ours"), args, {"step": 7})


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_run_without_a_checkpoint_begins_again_with_todays_code(base, packed, tmp_path):
    run = tmp_path / "r"
    run.mkdir()
    config = json.loads((base / "config.json").read_text())
    config["args"]["out"] = str(run)
    (run / "config.json").write_text(json.dumps(config | {"network_code": "0" * 64, "params": 7}))
    here(packed, run, "--resume")
    begun = json.loads((run / "config.json").read_text())
    assert begun["network_code"] == machine.network_code()
    assert begun["params"] == config["params"]


def test_a_run_of_other_code_says_so(base, tmp_path, capsys):
    run = shutil.copytree(base, tmp_path / "r")
    load_run(run)
    assert not capsys.readouterr().err
    config = json.loads((run / "config.json").read_text())
    config["network_code"] = "0" * 64  # as if model.py had been edited since
    (run / "config.json").write_text(json.dumps(config))
    load_run(run)
    assert f"{run} was trained with another version of model.py" in capsys.readouterr().err


def test_a_run_continued_by_other_code_says_where(packed, tmp_path, capsys):
    run = tmp_path / "r"
    here(packed, run, "--stop-at", "2")
    code = machine.program_code()
    for file in (run / "config.json", run / "log.jsonl"):  # as if train.py had been edited since
        text = file.read_text()
        assert text.count(code) == 1
        file.write_text(text.replace(code, "0" * 64))
    here(packed, run, "--resume", "--stop-at", "4")
    assert f"{run} was begun by other code" in capsys.readouterr().err
    assert f"trained by other code ({code[:8]}) after step 2" in read_run(run).notes
    here(packed, run, "--resume")
    assert sum("other code" in text for text in read_run(run).notes) == 1
    log = run / "log.jsonl"
    earlier = json.dumps({"kind": "start", "step": 0, "code": "1" * 64})  # it crashed at once
    log.write_text(f"{earlier}\n{log.read_text()}")
    assert sum("other code" in text for text in read_run(run).notes) == 1


def test_evaluation_passes_over_a_damaged_checkpoint(base, tmp_path, capsys):
    run = shutil.copytree(base, tmp_path / "r")
    old, new = sorted(run.glob("step_*.pt"))
    new.write_bytes(new.read_bytes()[:-1] + b"x")
    model, _, config = load_run(run)
    assert f"{new} is damaged" in capsys.readouterr().out and config["checkpoint"] == old.name
    want = torch.load(old, weights_only=True)["model"]
    assert all(torch.equal(w, want[name]) for name, w in model.state_dict().items())
    old.write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="no whole checkpoint"):
        load_run(run)


def test_files_called_like_checkpoints_stay_and_are_none(base, tmp_path):
    run = shutil.copytree(base, tmp_path / "r")
    state = weights(run)
    for name in ("step_0000008.keep.pt", "step_0000001_before.pt", "step_best.pt"):
        (run / name).write_bytes(b"the user's")
    for step in (13, 14):
        write_checkpoint(run / f"step_{step:07d}.pt", state, keep_every=7)
    assert load_run(run)[2]["checkpoint"] == "step_0000014.pt"
    assert [path.name for path in checkpoints(run)] == ["step_0000013.pt", "step_0000014.pt"]
    assert sum(path.read_bytes() == b"the user's" for path in run.glob("step_*.pt")) == 3


def test_a_save_removes_older_checkpoints_alone(base, tmp_path):
    """Newer ones were damaged and passed over: what is written after them must stay."""
    run = shutil.copytree(base, tmp_path / "r")
    state = weights(run)
    steps = [path.name for path in checkpoints(run)]
    write_checkpoint(run / "step_0000001.pt", state)
    assert [path.name for path in checkpoints(run)] == ["step_0000001.pt", *steps]
    write_checkpoint(run / "step_0000003.pt", state)
    write_checkpoint(run / "step_0000005.pt", state)
    left = ["step_0000003.pt", "step_0000005.pt", *steps]
    assert [path.name for path in checkpoints(run)] == left


def test_a_continued_run_keeps_the_checkpoints_that_it_began_to_keep(packed, tmp_path):
    run = tmp_path / "r"
    here(packed, run, "--keep-every", "1", "--stop-at", "4")
    here(packed, run, "--resume")
    assert len(checkpoints(run)) == STEPS
    here(packed, tmp_path / "none", "--save-every", "1")
    assert len(checkpoints(tmp_path / "none")) == 2


def test_a_signal_while_a_run_waits_for_rows_saves_its_last_step(packed, tmp_path):
    rows = shutil.copytree(packed, tmp_path / "rows")
    manifest = read_checked(rows / "manifest.json")
    write_checked(rows / "manifest.json", manifest | {"shuffle": "shard", "complete": False})
    run = tmp_path / "r"
    line = command("train.py", *flags(rows, run, "--tokens", "5e5"))
    p = subprocess.Popen(line, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True)
    while not p.stdout.readline().startswith("waiting for data"):
        assert p.poll() is None
    p.send_signal(signal.SIGTERM)
    assert p.wait(60) == 128 + signal.SIGTERM
    last = json.loads((run / "log.jsonl").read_text().splitlines()[-1])
    assert checkpoints(run)[-1].name == f"step_{last['step']:07d}.pt"


def test_a_stream_lengthened_after_a_runs_first_epoch_is_refused(packed, tmp_path, capsys):
    rows = shutil.copytree(packed, tmp_path / "rows")
    manifest = read_checked(rows / "manifest.json") | {"shuffle": "shard"}
    write_checked(rows / "manifest.json", manifest)
    run = tmp_path / "r"
    epoch = sum(entry["rows"] for entry in manifest["train"]) // 12 + 2  # steps, and one more
    length = ("--tokens", epoch * 2 * 12 * 32)
    here(rows, run, *length, "--stop-at", epoch)
    longer = manifest["train"] + [manifest["train"][0]]
    write_checked(rows / "manifest.json", manifest | {"train": longer})
    refused(capsys, lambda: here(rows, run, *length, "--resume"), f"so step {epoch} had other rows")
    write_checked(rows / "manifest.json", manifest)
    here(rows, run, *length, "--resume", "--stop-at", epoch + 1)


def test_machines_with_other_flags_code_or_rows_are_refused_by_all(packed, tmp_path):
    for file in ("train.py", "model.py", "muon.py", "dataloader.py", "core_eval.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    shutil.copytree(ROOT / "looped", tmp_path / "looped")
    with open(tmp_path / "model.py", "a") as code:
        code.write("# edited on one machine\n")
    rows = shutil.copytree(packed, tmp_path / "rows")
    manifest = read_checked(rows / "manifest.json")
    write_checked(rows / "manifest.json", manifest | {"long_docs": "other"})
    line = command("train.py", *flags(packed, tmp_path / "r"))
    other = command(tmp_path / "train.py", *flags(rows, tmp_path / "r", "--seed", "1"))
    first, second = both_refuse(line, other)
    wanted = r"error: rank 1, on .+, is unlike rank 0: --seed 1 \(there 0\), code .+, rows .+; give"
    assert re.match(wanted, first) and first == second
    assert not (tmp_path / "r").exists()


def test_ranks_that_never_meet_end_in_one_line(monkeypatch, capsys):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    for name, value in (place | {"RANK": "0", "WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine, "MEETING", timedelta(seconds=1))
    words = ("ranks cannot reach each other", "1/2 clients joined", "GLOO_SOCKET_IFNAME")
    refused(capsys, lambda: machine.distributed("cpu"), *words)


def test_on_a_machine_without_rank_0_one_line_says_where_the_reason_is(packed, base):
    line = command("train.py", *flags(packed, base))
    first, second = both_refuse(line, line)
    assert "add --resume" in first and "rank 0 refused, and said why on its machine" in second


def test_a_signal_to_one_machine_ends_all_as_a_signal_would(packed, tmp_path):
    run = tmp_path / "r"
    line = command("train.py", *flags(packed, run, "--tokens", "1e6", "--compile", "off"))
    ranks = two_machines(line, line)
    wait_for_steps(run, 4, ranks)
    ranks[1].send_signal(signal.SIGTERM)
    for process in ranks:
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == 128 + signal.SIGTERM
    last = json.loads((run / "log.jsonl").read_text().splitlines()[-1])
    assert checkpoints(run)[-1].name == f"step_{last['step']:07d}.pt"


def test_a_run_begun_again_leaves_the_steps_of_before_out(packed, tmp_path, capfd):
    run = tmp_path / "r"
    here(packed, run, "--stop-at", "5")
    for path in checkpoints(run):
        path.unlink()
    here(packed, run, "--resume", "--stop-at", "3")
    assert "beginning again at step 0" in capfd.readouterr().out
    assert {step for kind, step in log(run) if kind == "train"} == {1, 2, 3}
    assert (run / "log.before.jsonl").exists()


def test_keep_every_given_at_a_resume_holds_from_then_on(packed, tmp_path):
    run = tmp_path / "r"
    here(packed, run, "--stop-at", "2")
    here(packed, run, "--resume", "--keep-every", "2", "--stop-at", "6")
    here(packed, run, "--resume")
    assert {2, 4, 6, 8, 10, 12} <= {step_of(path) for path in checkpoints(run)}


@pytest.mark.parametrize("size", [10, 20_000, 60_000])
def test_a_checkpoint_that_was_cut_is_refused_in_one_line(size, base, tmp_path, capsys):
    run = shutil.copytree(base, tmp_path / "r")
    newest = checkpoints(run)[-1]
    newest.write_bytes(newest.read_bytes()[:size])
    Path(f"{newest}.sha256").unlink()
    with pytest.raises(ValueError, match="is not a checkpoint"):
        load_run(run)


def test_a_last_checkpoint_that_is_not_written_ends_the_run_with_an_error(
    packed, tmp_path, monkeypatch, capsys
):
    def full(path, state, keep_every):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write_checkpoint", full)
    with pytest.raises(SystemExit) as stop:
        here(packed, tmp_path / "r", "--save-every", "1000")
    assert stop.value.code == 1
    assert "after step 12: " in capsys.readouterr().err


def test_a_run_is_loaded_with_its_residual_stream(packed, tmp_path):
    here(packed, tmp_path / "r", "--dtype", "bfloat16", "--residual-dtype", "float32")
    model = load_run(tmp_path / "r")[0]
    assert (model.dtype, model.residual_dtype) == (torch.bfloat16, torch.float32)
    assert load_run(tmp_path / "r", dtype=torch.float32)[0].residual_dtype is None


def test_a_changed_training_token_is_refused(packed, tmp_path, capsys):
    rows = shutil.copytree(packed, tmp_path / "rows")
    (shard,) = rows.glob("shard_*.npy")
    changed = bytearray(shard.read_bytes())
    changed[150] ^= 1  # still a token
    shard.write_bytes(changed)
    refused(capsys, lambda: here(rows, tmp_path / "r"), f"{shard.name} is damaged")


def test_a_full_disk_leaves_the_earlier_checkpoints_alone(base, tmp_path):
    run = shutil.copytree(base, tmp_path / "r")
    before, state = contents(run), weights(base)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 100, 100_000, 400_000):  # of files, which may not grow further
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large") as e:
                write_checkpoint(run / "step_0000013.pt", state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "step_0000013.pt" in str(e.value.filename) and contents(run) == before


class Payload:
    """Code in a checkpoint."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


def spoil_checkpoint(run, **changes):
    path = max(run.glob("step_*.pt"))
    torch.save(weights(run) | changes, path)
    Path(f"{path}.sha256").write_text(file_hash(path))


SPOILED = {
    "size mismatch for ": {"model": {**Model(replace(NETWORK, d_model=16)).state_dict()}},
    "Missing key(s) in state_dict": {"model": {}},
    "is not a checkpoint": {"model": Payload()},
    "--mu-rec 9 (now 8)": {"config": {"mu_rec": 9}},
    "KeyError": {"optimizer": {}},
}


@pytest.mark.parametrize("words", SPOILED)
def test_a_checkpoint_that_does_not_fit_is_refused_and_left_alone(
    words, base, packed, tmp_path, capsys, monkeypatch
):
    """Of another model, with code in it, of other settings, without the optimiser's state."""
    monkeypatch.chdir(tmp_path)
    run, changes = shutil.copytree(base, tmp_path / "r"), dict(SPOILED[words])
    if "config" in changes:
        changes["config"] = weights(run)["config"] | changes["config"]
    spoil_checkpoint(run, **changes)
    before = contents(run)
    line = refused(capsys, lambda: here(packed, run, "--resume"), words)
    assert ("move it away" in line) == (words == "is not a checkpoint")
    assert contents(run) == before and not (tmp_path / "pwned").exists()
    if "optimizer" not in changes:
        with pytest.raises(ValueError):
            load_run(run)


def test_directories_that_are_something_else_are_refused(base, packed, tmp_path, capsys):
    run = shutil.copytree(base, tmp_path / "r")
    (run / "config.json").unlink()
    refused(capsys, lambda: here(packed, run, "--resume"), "no config.json")
    rows = shutil.copytree(packed, tmp_path / "rows")
    before = contents(rows)
    refused(capsys, lambda: here(packed, rows, "--resume"), "no run to continue", "--out")
    assert contents(rows) == before
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / ".config.json.tmp").write_bytes(b"{")  # a start was cut off
    here(packed, tmp_path / "begun", "--resume", "--stop-at", "1")
    save_tokenizer(rows / "tokenizer.json", [bytes([i]) for i in range(256)])
    refused(capsys, lambda: here(rows, tmp_path / "x"), "not the tokenizer of these rows")
    inside = packed / "manifest.json" / "r"
    refused(capsys, lambda: here(packed, inside), "the run directory is")


def test_a_file_system_without_locks_is_named(packed, tmp_path, monkeypatch, capsys):
    flock = Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr("fcntl.flock", flock)
    words = (f"{tmp_path}/r is on a file system without file locks", "No locks available")
    refused(capsys, lambda: here(packed, tmp_path / "r"), *words)


def test_a_run_is_trained_by_one_process_at_a_time(packed, tmp_path, capsys):
    run = tmp_path / "r"
    p = subprocess.Popen(command("train.py", *flags(packed, run, "--tokens", "5e5")), env=ENV)
    wait_for_steps(run, 2, [p])
    try:
        again = ["--tokens", "5e5", "--resume", "--stop-at", "1"]
        refused(capsys, lambda: here(packed, run, *again), "is being used by another process")
    finally:
        p.kill()
        p.wait()
    here(packed, run, *again)  # at once
    with pytest.raises(SystemExit):
        here(packed, run, *again, "--muon-lr", "1")
    here(packed, run, *again)  # an error has let it go


def test_a_refusal_by_rank_0_ends_all_ranks_with_one_line(base, packed):
    done = go(packed, base, ranks=2, check=False)
    assert done.returncode and done.stderr.count("error: ") == 1
    assert "exists; add --resume" in done.stderr


def test_a_run_that_made_no_step_is_begun_again(base, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert begun_config(tmp_path, resume=False) is None
    (tmp_path / "log.jsonl").write_text('{"kind": "start", "step": 0}\n')
    assert begun_config(tmp_path, resume=False) is None
    kept = checkpoints(base)[-1]
    names = {"log.jsonl": base / "log.jsonl", kept.name: kept, "step_0000010.keep.pt": kept}
    for name, file in names.items():
        copy = tmp_path / name
        copy.write_bytes(file.read_bytes())
        refused(capsys, lambda: begun_config(tmp_path, resume=False), "exists; add --resume")
        copy.unlink()


def test_an_existing_run_is_not_overwritten(base, packed, capsys):
    before = contents(base)
    refused(capsys, lambda: here(packed, base), "--resume")
    (base.parent / "text").write_text("not a run")
    (base.parent / "texts").mkdir()
    (base.parent / "texts" / "a.txt").write_text("not a run")
    refused(capsys, lambda: here(packed, base.parent / "text"), "cannot be made")
    refused(capsys, lambda: here(packed, base.parent / "texts"), "holds a.txt but no config.json")
    other = ["--resume", "--gain", "zoh", "--muon-lr", "1e-3"]
    refused(
        capsys,
        lambda: here(packed, base, *other),
        "--gain euler (now zoh), --muon-lr 0.02 (now 0.001)",
    )
    assert contents(base) == before


@pytest.mark.parametrize("value, found", [(torch.ones(2, 3), r"\(2, 3\)"), (1.5, "float")])
def test_a_statistic_that_is_no_sum_is_named(value, found, packed, tmp_path, monkeypatch):
    monkeypatch.setattr(Model, "statistics", lambda *_: {"mine": value})
    with pytest.raises(ValueError, match=f"statistic mine is {found}"):
        here(packed, tmp_path / "r")


def test_an_edited_head_trains_on_all_logits_and_says_so(packed, tmp_path, monkeypatch, capfd):
    losses = []
    usual = Model.head
    for head in (usual, lambda model, x: 0.5 * usual(model, x)):
        monkeypatch.setattr(Model, "head", head)
        run = tmp_path / str(len(losses))
        here(packed, run, "--stop-at", "1")
        losses.append(log(run)["train", 1]["loss"])
    assert losses[0] != losses[1]
    out = capfd.readouterr().out
    assert "loss chunk: 256 tokens (always so on a CPU)" in out
    assert "loss chunk: all tokens (the head or its loss was edited)" in out


@pytest.mark.parametrize("name", ["step", "loss", "grad_norm2", "ms"])
def test_a_statistic_named_as_a_field_of_the_log_is_refused(name, packed, tmp_path, monkeypatch):
    monkeypatch.setattr(Model, "statistics", lambda *_: {name: torch.ones(())})
    with pytest.raises(ValueError, match=f"a statistic is called {name}"):
        here(packed, tmp_path / "r")


def test_a_statistic_of_some_micro_batches_is_refused(packed, tmp_path, monkeypatch):
    usual = Model.statistics
    calls = []

    def statistics(model, state, inputs):
        calls.append(1)
        more = {"second": torch.ones(())} if len(calls) == 2 else {}
        return usual(model, state, inputs) | more

    monkeypatch.setattr(Model, "statistics", statistics)
    with pytest.raises(ValueError, match="not every micro-batch has the statistic second"):
        here(packed, tmp_path / "r", "--device-batch-size", "6")


def test_a_network_that_draws_from_torchs_generator_is_noted(packed, tmp_path, monkeypatch, capfd):
    here(packed, tmp_path / "plain", "--tokens", "8000")
    assert not re.search("generator|gradient", capfd.readouterr().err)
    usual = Model.core_step

    def noisy(*given):
        h = usual(*given)
        return h + 1e-3 * torch.randn_like(h)

    monkeypatch.setattr(Model, "core_step", noisy)
    here(packed, tmp_path / "noisy", "--tokens", "8000")
    assert "note: the network draws from torch's generator" in capfd.readouterr().err


def test_parameters_that_no_gradient_reaches_are_noted(packed, tmp_path, monkeypatch, capfd):
    """Muon's matrices too, which its weight decay shrinks, but not what an edit keeps as it is."""
    usual = Model.__init__

    def with_another(model, cfg):
        usual(model, cfg)
        model.blocks[0].norm1.requires_grad_(False)
        model.unused = torch.nn.Parameter(torch.zeros(3))

    initial = Model._initial
    monkeypatch.setattr(Model, "__init__", with_another)
    monkeypatch.setattr(
        Model,
        "_initial",
        lambda *a: torch.zeros(3) if a[1] == "unused" else initial(*a),
    )
    here(packed, tmp_path / "one", "--tokens", "8000")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("note: no gradient has reached unused so far")
    forward = MLP.forward
    monkeypatch.setattr(MLP, "forward", lambda mlp, x: x + 0 * forward(mlp, x))
    here(packed, tmp_path / "both of each MLP", "--tokens", "8000")
    assert "has reached unused and 6 more so far" in capfd.readouterr().err


def test_what_an_edit_freezes_stays_as_it_is(packed, tmp_path, monkeypatch):
    """Also a matrix of Muon's, which its weight decay would shrink, and when the run is continued."""
    usual = Model.__init__

    def frozen(model, cfg):
        usual(model, cfg)
        model.blocks[0].mlp.fc.requires_grad_(False)
        model.wte.requires_grad_(False)

    monkeypatch.setattr(Model, "__init__", frozen)
    run = tmp_path / "r"
    here(packed, run, "--stop-at", "6")
    here(packed, run, "--resume")
    model, cfg, _ = load_run(run)
    begun = Model(cfg)
    begun.init_weights(0)
    before = dict(begun.named_parameters())
    same = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert same == {"blocks.0.mlp.fc.weight", "wte.weight"}


def test_tied_parameters_stay_tied_when_they_begin_with_another_runs_weights(base, packed):
    model = Model(load_run(base)[1])
    tables = list(model.ve.values())
    tables[0].weight = tables[1].weight
    train.begin_from(base, model, PackedData(packed))
    assert tables[0].weight is tables[1].weight


@dataclass
class OwnConfig(ModelConfig):
    z_loss: float = 0.0
    bias: float = setting(-3.0, "where a gate begins", least=-10, most=10)


def test_a_new_field_of_the_network_is_a_flag(monkeypatch):
    parser = argparse.ArgumentParser()
    monkeypatch.setattr(train, "ModelConfig", OwnConfig)
    train.add_network_flags(parser)
    args = parser.parse_args(["--z-loss", "1e-4", "--bias", "-4"])
    assert OwnConfig(z_loss=args.z_loss, bias=args.bias).bias == -4
    with pytest.raises(ValueError, match="--bias -11.0 must lie between -10 and 10"):
        OwnConfig(bias=-11.0)


def test_a_run_begins_with_another_runs_weights(base, packed, tmp_path, capsys):
    still = ["--adam-lr", "0", "--muon-lr", "0", "--weight-decay", "0", "--stop-at", "1"]
    here(packed, tmp_path / "run", "--init-from", base, *still)
    old, new = [weights(run)["model"] for run in (base, tmp_path / "run")]
    assert all(torch.equal(w, new[name]) for name, w in old.items())
    other = ["--init-from", base, "--d-mlp", "48"]
    refused(
        capsys,
        lambda: here(packed, tmp_path / "other", *other),
        "--init-from",
        "other weights: --d-mlp 64 (now 48)",
    )
    tokenizer = shutil.copytree(base, tmp_path / "tokenizer")
    config = json.loads((tokenizer / "config.json").read_text())
    config["tokenizer"]["sha256"] = "0" * 64
    (tokenizer / "config.json").write_text(json.dumps(config))
    begin = ["--init-from", tokenizer]
    refused(capsys, lambda: here(packed, tmp_path / "other", *begin), "another tokenizer")
    for other in (["--init-from", "nowhere"], ["--core-every", "1", "--bundle", "nowhere"]):
        refused(capsys, lambda other=other: here(packed, tmp_path / "other", *other), "nowhere")
    assert not (tmp_path / "other").exists()  # the corrected command may make it
    strange = shutil.copytree(base, tmp_path / "strange")
    config = json.loads((strange / "config.json").read_text())
    del config["tokenizer"]
    (strange / "config.json").write_text(json.dumps(config))
    begin = ["--init-from", strange]
    refused(capsys, lambda: here(packed, tmp_path / "r", *begin), "KeyError: 'tokenizer'")


def test_a_continued_run_keeps_the_dtype_of_its_beginning(packed, tmp_path, monkeypatch, capfd):
    for found, end in (("bfloat16", 1), ("float32", 2)):
        monkeypatch.setattr(train, "best_dtype", lambda device, name=found: name)
        here(packed, tmp_path / "r", "--dtype", "auto", "--resume", "--stop-at", end)
    assert "activations: bfloat16 (as the run began)" in capfd.readouterr().out
    assert list(log(tmp_path / "r")) == [("train", 1), ("train", 2)]


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED = {
    "--batch-size 10 --device-batch-size 4": "10 is not a multiple of ranks × device batch = 1 × 4; try --device-batch-size 2",
    "--mu-bwd 9": "--mu-bwd 9 exceeds --mu-rec 8",
    "--n-head 3": "--n-head 3",
    "--tokens 10": "--tokens 10 is less than one step",
    "--mu-rec 1000000000": "--mu-rec 1000000000 must lie between 0 and 10000",
    "--tokens 0": "--tokens: 0 is not",
    "--device-batch-size 0": "--device-batch-size: 0 is not",
    "--tokens 1e6 --flops 1e12": "--tokens and --flops both",
    "--cooldown -1": "--cooldown: -1 is not",
    "--warmup 7 --cooldown 6": "--warmup 7 and --cooldown 6 are 7 and 6 steps, more than the run's 12",
    "--warmup 0.6 --cooldown 0.5": "--warmup 0.6 and --cooldown 0.5 are 7.2 and 6 steps, more than the run's 12",
    "--preset rdm-nano --optimizer muon": "--optimizer muon needs a rate",
    "--eval-depths 1,x": "--eval-depths: 1,x must be whole numbers",
    "--eval-depths 0,1": "--eval-depths: 0,1 must be whole numbers",
    "--eval-depths 1,10001": "--eval-depths 10001 is more than 10,000",
    "--eval-tokens 31": "--eval-tokens 31 is less than a row of 32 tokens",
    "--vocab-size 301": "vocab_size 300, the model has 301",
    "--seq-len 64": "seq_len 32, the model has 64",
    "--seq-len 64 --vocab-size 301": "the model has 64; try --seq-len 32",
    "--batch-size 4096 --tokens 1e6": "training rows, fewer than --batch-size 4096; give more text",
    "--d-model 2000000000": "--d-model 2000000000 must lie between 1 and 1048576",
    "--n-core 5000": "--n-core 5000 must lie between 0 and 4096",
    "--data nowhere": "--data nowhere holds no packed rows",
    "--preset transformer-nano --gain zoh": "--gain has no meaning without a loop (--n-core 0)",
    "--n-core 0 --ssm-decay 0.9": "--ssm-decay has no meaning",
    "--n-core 0 --state-init zero --no-prelude-norm": "--prelude-norm --state-init has no meaning",
    "--injection add --gain zoh": "--gain has no meaning with --injection add",
    "--preset rdm-nano --input-matrix": "--input-matrix has no meaning with --injection concat",
    "--streams 2": "--streams has no meaning without --mechanism hyper",
    "--sampling poisson-full --mu-bwd 2": "--mu-bwd has no meaning with --sampling poisson-full",
    "--preset transformer-nano --checkpoint-loops": "--checkpoint-loops has no meaning without a loop (--n-core 0)",
    "--bundle x.zip": "--bundle has no meaning without --core-every",
    "--n-core 0 --mu-rec 4": "--mu-rec has no meaning without a loop (--n-core 0)",
    "--data /dev/null": "--data /dev/null holds no packed rows",
}


def test_a_new_optimizer_takes_muons_flags_and_defaults(monkeypatch):
    """The line that README names suffices."""
    monkeypatch.setitem(train.OPTIMIZERS, "mine", train.muon_groups)
    args = train.parse_args(["--optimizer", "mine", "--muon-lr", "0.5"])
    settle(args, train.model_config(args), train.recipe_of("nano"), 1)
    assert (args.muon_lr, args.weight_decay) == (0.5, 0.2)


@pytest.mark.parametrize(("count", "wrong"), [(0, "in 0 groups"), (2, "in 2 groups")])
def test_an_optimizer_that_forgets_a_parameter_or_has_it_twice_is_refused(
    count, wrong, packed, tmp_path, monkeypatch
):
    def groups(model, args, compiled):
        ((rule, members),) = train.adamw_groups(model, args, compiled)
        others = [(name, p) for name, p in members if name != "wte.weight"]
        return [(rule, others + [("wte.weight", model.wte.weight)] * count)]

    monkeypatch.setitem(train.OPTIMIZERS, "mine", groups)
    with pytest.raises(ValueError, match=f"wte.weight is {wrong}"):
        here(packed, tmp_path / "r", "--optimizer", "mine")


@pytest.mark.parametrize("given", REFUSED)
def test_bad_flags_are_refused_in_one_line(given, packed, tmp_path, capsys):
    refused(capsys, lambda: here(packed, tmp_path / "r", *given.split()), REFUSED[given])
    assert not (tmp_path / "r").exists()


def test_every_flag_refuses_what_is_out_of_its_range(packed, tmp_path, capsys, monkeypatch):
    actions = []
    with monkeypatch.context() as patch:
        patch.setattr(
            argparse.ArgumentParser, "parse_args", lambda p, _: actions.extend(p._actions)
        )
        train.parse_args([])
    names = [a.option_strings[0] for a in actions if a.nargs is None and (a.type or a.choices)]
    assert len(names) > 40
    for name in names:
        for bad in ("-7", "nan", "x"):
            refused(capsys, lambda: here(packed, tmp_path / "r", name, bad))  # noqa: B023
    if not find_spec("wandb"):
        refused(capsys, lambda: here(packed, tmp_path / "r", "--wandb"), "--wandb")
    if not torch.cuda.is_available():
        refused(capsys, lambda: here(packed, tmp_path / "r", "--device", "cuda"), "--device")
    assert not (tmp_path / "r").exists()


def test_too_few_flops_are_named(tmp_path, capsys):
    line = ["--flops", "1", "--out", str(tmp_path / "r")]
    refused(capsys, lambda: train.main(["--data", str(tmp_path), *line]), "--flops 1 is ", "tokens")


def test_a_device_that_is_not_there_is_refused(packed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert train.best_dtype(torch.device("mps")) == "float32"
    for native, name in {True: "bfloat16", False: "float32"}.items():  # a T4 only emulates it
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, found=native: found
        )
        assert train.best_dtype(torch.device("cuda")) == name
    for name in ("mps", "cuda"):
        words = f"--device {name}: torch finds none here"
        refused(capsys, lambda n=name: here(packed, tmp_path / "r", "--device", n), words)


def test_an_apple_gpu_is_taken_where_asked_for_by_one_process(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert (machine.pick_device("auto"), machine.pick_device("mps")) == ("cpu", "mps")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(capsys, lambda: machine.distributed("mps"), "is one GPU", "--device cpu")


@pytest.mark.parametrize("name", ["--muon-lr", "--momentum-warmup", "--weight-decay"])
def test_muons_flags_are_refused_with_adamw(name, capsys):
    for given in (["--optimizer", "adamw"], ["--preset", "rdm-nano"]):
        args = train.parse_args([*given, name, "0"])
        recipe = train.recipe_of(args.preset)
        words = f"{name} has no meaning with --optimizer adamw"
        refused(capsys, lambda: settle_optimizer(args, recipe), words)  # noqa: B023


def test_a_flat_preset_with_a_core_is_looped():
    looped = "--preset transformer-nano --n-prelude 1 --n-core 1 --n-coda 1 --mu-rec 8"
    assert train.model_config(train.parse_args(looped.split())) == PRESETS["nano"]


# -- the machine -------------------------------------------------------------------------------------------------------


class Cramped(Model):
    """On a device with room for five rows."""

    def loss(self, ids, *rest):
        if len(ids) > 5:
            raise torch.OutOfMemoryError("full")
        return super().loss(ids, *rest)


def test_memory_probe_shrinks_to_what_fits_and_refuses_what_was_asked_for(capsys):
    model = Cramped(NETWORK)
    model.init_weights(0)
    model.is_compiled = True  # or nothing is tried on a CPU
    optimizer = Optimizer([(AdamW(), list(model.named_parameters()))])
    place = ONE_PROCESS

    def fit(batch, rows=None):
        settings = {"optimizer": "adamw", "loss_chunk": None}
        args = argparse.Namespace(batch_size=batch, device_batch_size=rows, **settings)
        fit_memory(model, optimizer, args, place)
        assert not any(p.grad.any() for p in model.parameters())
        return args.device_batch_size

    assert fit(48) == 4 and fit(27) == 3  # the largest up to 5 that divide the batch
    refused(capsys, lambda: fit(48, 16), "try --device-batch-size 8")


def test_default_data_whose_making_was_cut_off_is_made_again(packed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(packed, tmp_path / "data" / "stdlib-v300" / "rows-32-split")
    whole, made = read_checked(folder / "manifest.json"), []

    def make(out, *_):
        made.append(out)
        write_checked(out / "manifest.json", whole)

    monkeypatch.setattr(train, "prepare_stdlib", make)
    place = ONE_PROCESS
    for complete in (False, True):
        write_checked(folder / "manifest.json", whole | {"complete": complete})
        assert train.open_data(train.parse_args([]), NETWORK, place).rows("train")
        assert len(made) == 1


def test_a_machine_without_git_can_train(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment()["git"] == {"commit": None, "diff": None}


def settled(line):
    args = train.parse_args(line.split())
    cfg = train.model_config(args)
    return settle(args, cfg, train.recipe_of(args.preset), 1), args, cfg


def test_settings_that_follow_from_others():
    tokens = 7.6 * 64 * 256
    steps, args, cfg = settled(f"--tokens {tokens} --batch-size 64 --warmup 0.5 --cooldown 0.5")
    assert (steps, args.eval_every) == (8, 2)
    assert eval_depths(args, cfg, final=True) == [1, 2, 4, 8, 16]
    assert ramp_steps(1, 50) == 50  # a fraction, not a step
    _, args, _ = settled("--optimizer adamw --tokens 1e6")
    assert args.weight_decay == 0
    steps, args, cfg = settled("--flops 1e13")
    assert steps == round(1e13 / cfg.flops_per_token() / (args.batch_size * cfg.seq_len))


def test_a_run_goes_on_with_its_own_data_and_seed_only():
    config = {"args": vars(train.parse_args([])), "model": {"n_core": 1}}
    config |= {"tokenizer": {"sha256": "t"}, "data": {"sha256": "d"}}
    begun = decisive(config)
    new = decisive(config | {"data": {"sha256": "e"}})
    assert differences(begun, new) == ["--data d (now e)"]
    new = decisive(config | {"args": config["args"] | {"seed": 7, "adam_lr": 9.0, "out": "x"}})
    assert len(differences(begun, new)) == 2


def test_a_run_is_finished_when_its_last_validation_has_the_depths_asked_for(tmp_path):
    args = argparse.Namespace(eval_depths=[1], eval_tokens=64)
    data = Mock(rows=lambda split: 9, seq_len=32)
    found = []
    for depths in (["1", "8"], ["8"]):
        last = {"final": True, "loss": dict.fromkeys(depths, 1.0), "eval_tokens": 64}
        (tmp_path / "log.jsonl").write_text(json.dumps(last) + "\n")
        found.append(is_finished(tmp_path, args, NETWORK, data))
    assert found == [True, False]
