"""The trainer as a program: what it computes, ranks, micro-batches, interruption, mistakes."""

import argparse
import fcntl
import functools
import json
import math
import multiprocessing
import os
import random
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import refused, run_program
from oracle import Oracle, SlowOptimizer

import launch
import train
from dataloader import PackedData
from looped import machine
from looped.depth import sample_depths, share_out
from looped.randomness import FOR_EVAL, FOR_STATE, hash_key
from looped.run import checkpoints, decisive, read_log
from looped.tokenizer import load_tokenizer
from model import PRESETS, Model, load_run

STEPS = 12
SIZES = "--vocab-size 300 --seq-len 32 --d-model 32 --d-mlp 64 --batch-size 12 --dtype float32 --eval-tokens 1000"
SAVING = "--eval-depths 1,8 --eval-every 5 --save-every 0 --momentum-warmup 6"
FLAGS = f"{SIZES} {SAVING} --tokens {STEPS * 32 * 12}".split()
NETWORK = replace(PRESETS["nano"], vocab_size=300, seq_len=32, d_model=32, d_mlp=64)


def flags(packed, run, *more):
    return ["--data", str(packed), "--out", str(run), *FLAGS, *map(str, more)]


def here(*args):
    """train.py in this process."""
    torch.set_num_threads(1)
    train.main(flags(*args))


def log(run):
    """The records of each step, without what depends on the clock."""
    found = {}
    for record in read_log(run).train + read_log(run).evals:
        for name in ("tok_s", "ms", "mem_gb"):
            record.pop(name, None)
        found["eval" if "eval_tokens" in record else "train", record["step"]] = record
    return found


def weights(run):
    return torch.load(checkpoints(run)[-1], weights_only=True)


def assert_close(run, other, tolerance=2e-4):
    a, b = log(run), log(other)
    assert a.keys() == b.keys()
    for key, record in a.items():
        loss, other_loss = record["loss"], b[key]["loss"]
        assert loss == pytest.approx(other_loss, abs=tolerance), key
        assert record.get("depth_mean") == b[key].get("depth_mean")


def assert_identical(run, other):
    """To the last bit: log, weights, optimiser."""
    assert log(run) == log(other)
    a, b = weights(run), weights(other)
    assert a["step"] == b["step"] and torch.equal(a["optimizer"]["steps"], b["optimizer"]["steps"])
    first, second = [(a["optimizer"][name], b["optimizer"][name]) for name in ("first", "second")]
    for x, y in ((a["model"], b["model"]), first, second):
        assert x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


@pytest.fixture(scope="session")
def base(packed, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "base"
    here(packed, run)
    return run


# -- what a run computes -----------------------------------------------------------------------------------------------


def test_a_run_equals_the_oracles(base, packed):
    """Every step in float64, rebuilt from the seed alone: rows, depths, keys, initial weights, rates, both updates."""
    model, data = Model(NETWORK), PackedData(packed)
    model.init_weights(0)
    oracle = Oracle(NETWORK, model.state_dict())
    recipe = train.RECIPES["nano"]
    matrices = {name for name, p in model.named_parameters() if p.muon}
    slow = SlowOptimizer(oracle.w, matrices, recipe.muon_lr, recipe.adam_lr)
    records = log(base)
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
    assert records["train", STEPS]["loss"] < records["train", 1]["loss"] - 0.5
    for name, w in weights(base)["model"].items():
        assert (w - oracle.w[name]).norm() < 2e-3 * w.norm(), name


def test_recipes_are_the_papers():
    for size, tokens, adam_lr in (("140m", 11.2e9, 8e-3), ("1.3b", 104e9, 6e-3)):
        for family in ("parcae", "transformer"):
            recipe = train.RECIPES[f"{family}-{size}"]
            assert recipe == train.Recipe(tokens, batch_size=256, adam_lr=adam_lr, muon_lr=8e-3)
    assert train.RECIPES.keys() == PRESETS.keys()


def test_validation_equals_a_plain_loop_over_rows(base, packed):
    model, _ = load_run(base)
    data, enc = PackedData(packed), load_tokenizer(packed / "tokenizer.json")
    total, nats, size = 0.0, 0.0, 0
    final = log(base)["eval", STEPS]
    rows = train.HeldOut(data, 1000, torch.device("cpu")).ids
    assert len(set(rows.tolist())) == 31
    for i in rows.tolist():
        row = torch.from_numpy(data.get("val", [i]))
        key = torch.tensor([hash_key(FOR_EVAL, i)])
        logits = model.head(model.hidden(row[:, :-1], 8, key))[0].double()
        loss = F.cross_entropy(logits, row[0, 1:], reduction="none")
        words = row[0, 1:] < 297  # the others, specials, have no bytes
        total += loss.sum().item()
        nats += loss[words].sum().item()
        size += len(enc.decode_bytes(row[0, 1:][words].tolist()))
    assert final["final"] and final["eval_tokens"] == 31 * 32
    assert abs(final["loss"][8] - total / (31 * 32)) < 1e-5
    assert abs(final["bpb"][8] - nats / size / math.log(2)) < 1e-5


def test_micro_batches_change_nothing_and_checkpoints_are_kept(base, packed, tmp_path):
    here(packed, tmp_path / "r", "--device-batch-size", "3", "--keep-every", "3")
    assert_close(base, tmp_path / "r")
    kept = [path.name for path in checkpoints(tmp_path / "r")]
    assert kept == [f"step_{step:07d}.pt" for step in (3, 6, 9, 12)]
    assert [path.name[-5:] for path in checkpoints(base)] == ["12.pt"]


def compile_with(monkeypatch, backend):
    """Compiling by inductor takes a minute; test_compile.py has it."""
    pieces = functools.partialmethod(Model.compile_pieces, backend=backend)
    monkeypatch.setattr(Model, "compile_pieces", pieces)


def test_a_compiled_run_computes_the_same(base, packed, tmp_path, monkeypatch):
    compile_with(monkeypatch, "eager")
    here(packed, tmp_path / "r", "--compile", "on")
    assert_close(base, tmp_path / "r")


def test_a_compiler_that_fails_ends_only_a_run_that_asks_for_it(
    base, packed, tmp_path, monkeypatch
):
    def fails(graph, inputs):
        raise RuntimeError("no compiler")

    compile_with(monkeypatch, fails)
    monkeypatch.setattr(launch, "COMPILE_STEPS", 1)
    here(packed, tmp_path / "auto")
    assert_close(base, tmp_path / "auto")
    with pytest.raises(Exception, match="no compiler"):
        here(packed, tmp_path / "on", "--compile", "on")


def test_rates_rise_and_fall_over_a_fraction_of_the_run_or_a_number_of_steps():
    for warmup, cooldown in ((10, 20), (0.1, 0.2)):
        args = argparse.Namespace(warmup=warmup, cooldown=cooldown, momentum_warmup=0, steps=100)
        lrs = [train.schedule(step, args).lr for step in range(100)]
        assert lrs[0] == 0.1 and lrs[9:81] == [1.0] * 72
        assert abs(lrs[90] - 0.5) < 1e-12 and abs(lrs[99] - 0.05) < 1e-12


def test_the_deal_gives_every_sequence_once_and_ranks_equal_work():
    worst = []
    for step in range(100):
        n, k = sample_depths(PRESETS["parcae-140m"], 0, step, 256)
        parts = share_out(n, k, 8)
        assert sorted(np.concatenate(parts)) == list(range(256)) and {len(p) for p in parts} == {32}
        # in block applications: two core layers, prelude and coda 12, head 8.7, C and B e 0.4
        cost = np.array([(2 * n[p] + 6 * k[p]).sum() + 32 * 21.1 for p in parts])
        worst.append(cost.max() / cost.mean())
    assert np.mean(worst) < 1.005


def test_ranks_equal_one_and_a_run_resumes_on_another_number_of_them(packed, tmp_path):
    rates = ("--muon-lr", 1e-2, "--adam-lr", 1.6e-2)  # the recipe's, higher, enlarge rounding
    here(packed, tmp_path / "one", *rates)
    # micro-batches too: no rank may send a gradient before its last one
    line = flags(packed, tmp_path / "r", *rates, "--device-batch-size", "2")
    run_program("train.py", *line, "--stop-at", "8", ranks=3)
    train.main([*line, "--resume"])
    assert_close(tmp_path / "one", tmp_path / "r")
    a, b = weights(tmp_path / "one"), weights(tmp_path / "r")
    for name in a["model"]:
        assert torch.allclose(a["model"][name], b["model"][name], atol=2e-4), name
    assert a["optimizer"]["first"].keys() == b["optimizer"]["first"].keys()


# -- interruption ------------------------------------------------------------------------------------------------------


def test_resumed_is_bitwise_uninterrupted_and_a_finished_run_is_left_alone(
    base, packed, tmp_path, capfd
):
    run = tmp_path / "r"
    here(packed, run, "--stop-at", "5")  # its validation is left to the continued run
    assert "stopped after step 5 of 12 and saved" in capfd.readouterr().out
    here(packed, run, "--resume")
    assert_identical(run, base)
    before = (run / "log.jsonl").read_bytes()
    here(packed, run, "--resume")
    assert "is finished" in capfd.readouterr().out
    assert before == (run / "log.jsonl").read_bytes()


def test_a_run_that_is_killed_at_any_moment_loses_nothing(base, packed, tmp_path):
    run, rng = tmp_path / "r", random.Random(0)
    line = (packed, run, "--save-every", "1e-9", "--resume")
    for _ in range(3):
        process = multiprocessing.get_context("fork").Process(target=here, args=line)
        steps = len(read_log(run).train) if run.exists() else 0
        process.start()
        while process.is_alive() and not (run / "log.jsonl").exists():
            time.sleep(0.05)
        while process.is_alive() and len(read_log(run).train) <= steps:
            time.sleep(0.01)
        time.sleep(rng.random() / 10)
        process.kill()
        process.join()
    here(*line)
    assert_identical(run, base)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_at_hand(number, base, packed, tmp_path, monkeypatch):
    run, draw = tmp_path / "r", train.next_batch

    def next_batch(data, cfg, args, step, rank):
        if step == 5:
            os.kill(os.getpid(), number)
        return draw(data, cfg, args, step, rank)

    monkeypatch.setattr(train, "next_batch", next_batch)
    handler = signal.getsignal(number)
    with pytest.raises(SystemExit):
        here(packed, run)
    assert signal.getsignal(number) == handler
    assert checkpoints(run)[-1].name == "step_0000006.pt"
    monkeypatch.undo()
    here(packed, run, "--resume")
    assert_identical(run, base)


@pytest.mark.parametrize(
    ("network", "depths"),
    [
        ("--preset transformer-nano", {0}),
        ("--mechanism hyper --streams 2 --gain zoh --residual-dtype float32", {8, 1}),
        ("--granularity batch --injection concat --optimizer adamw", {8, 1}),
    ],
)
def test_other_models_train_validate_and_resume(network, depths, packed, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "r"
    line = f"--data {packed} {SIZES} --eval-depths 1,8 --warmup 0 --tokens {STEPS * 32 * 12} {network}".split()
    torch.set_num_threads(1)
    train.main([*line, "--out", str(whole)])
    train.main([*line, "--out", str(run), "--stop-at", "5"])
    train.main([*line, "--out", str(run), "--resume"])
    assert_identical(run, whole)
    records = log(whole)
    assert records["eval", STEPS]["loss"].keys() == depths
    assert records["train", STEPS]["loss"] < records["train", 1]["loss"] - 0.1


def test_a_dry_run_says_what_the_run_would_record(base, packed, capsys):
    here(packed, base, "--dry-run")
    config = json.loads(capsys.readouterr().out)
    ran = json.loads((base / "config.json").read_text())
    assert decisive(config) == decisive(ran) and config["flops"] == ran["flops"]
    assert train.planned(flags(packed, base))["steps"] == STEPS
    other = train.planned(flags(packed, base, "--rows", 100))
    assert other["data"]["rows"] == 100 and decisive(other) != decisive(ran)


def test_a_run_begins_with_another_runs_weights(base, packed, tmp_path, capfd):
    here(packed, tmp_path / "r", "--init-from", base, "--tokens", 32 * 12)
    assert "the same rows" in capfd.readouterr().err
    begun = log(tmp_path / "r")["train", 1]["loss"]
    assert begun < log(base)["train", 1]["loss"] - 0.5


# -- mistakes and edits ------------------------------------------------------------------------------------------------


def test_what_is_not_finite_is_skipped_and_written_as_null(packed, tmp_path, monkeypatch, capfd):
    head_loss, calls = Model.head_loss, []

    def sometimes(model, x, targets):
        calls.extend([] if x.is_meta else [1])  # FLOPs are counted with tensors on "meta"
        return head_loss(model, x, targets) * (math.nan if len(calls) in (2, 5, 6, 7) else 1)

    monkeypatch.setattr(Model, "head_loss", sometimes)
    with pytest.raises(SystemExit):
        here(packed, tmp_path / "r", "--compile", "off", "--eval-every", "0")
    assert "3 steps in a row, up to step 7, had no finite loss" in capfd.readouterr().err
    records = read_log(tmp_path / "r").train
    assert [record.get("skipped", False) for record in records] == [
        i in (1, 4, 5, 6) for i in range(7)
    ]
    assert math.isnan(records[1]["loss"])
    assert "NaN" not in (tmp_path / "r" / "log.jsonl").read_text()


def test_parameters_that_stay_as_they_were_are_named(packed, tmp_path, monkeypatch, capfd):
    class Edited(Model):
        def __init__(self, cfg, *more):
            super().__init__(cfg, *more)
            self.spare = self.norm_f.__class__(cfg.d_model)  # that no loss reads

    monkeypatch.setattr(train, "Model", Edited)
    here(packed, tmp_path / "r", "--tokens", 21 * 32 * 12, "--muon-lr", 0)
    notes = capfd.readouterr().err
    assert "spare.weight has had no gradient so far" in notes
    assert "blocks.0.attn.o.weight has not moved" in notes
    assert "wte" not in notes


def test_other_code_is_what_train_imports_but_for_comments_and_docstrings(tmp_path):
    (tmp_path / "looped" / "deep").mkdir(parents=True)
    (tmp_path / "train.py").write_text("import model\n")
    (tmp_path / "core_eval.py").write_text("import train\n")
    (tmp_path / "model.py").write_text('def f():\n    """A."""\n    from looped.deep import part\n')
    for folder in ("looped", "looped/deep"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "looped/deep/part.py").write_text("FACTOR = 0.5\n")
    before = code_of(tmp_path)
    (tmp_path / "core_eval.py").write_text("import train, model\n")
    model = '# one\ndef f():\n    """B."""\n    from looped.deep import part\n'
    (tmp_path / "model.py").write_text(model)
    assert code_of(tmp_path) == before
    (tmp_path / "looped/deep/part.py").write_text("FACTOR = 5.0\n")
    assert code_of(tmp_path) != before


def code_of(root):
    machine.code_hash.cache_clear()
    return machine.code_hash(root)


REFUSED = {
    "--batch-size 10 --device-batch-size 4": "ranks × device batch = 1 × 4; try 12",
    "--tokens 10": "--tokens 10 is less than a step's 384; try 384",
    "--d-model 33 --n-head 2": "--d-model 33",
    "--mu-rec 4 --mu-bwd 5": "--mu-bwd 5 exceeds --mu-rec 4; try --mu-bwd 4",
    "--preset transformer-nano --gain zoh": "--gain has no meaning without a loop",
    "--injection add --gain zoh": "--gain has no meaning with --injection add",
    "--mu-rec 0": "--mu-rec 0 is no loop; try --mu-rec 1",
    "--batch-size 0": "0 must be at least 1",
    "--optimizer adamw --weight-decay 0 --momentum-warmup 0": "--momentum-warmup has no meaning with --optimizer adamw",
    "--optimizer adamw --muon-lr 0.1": "--muon-lr has no meaning with --optimizer adamw",
    "--flops 1e9": "--tokens has no meaning with --flops",
}


@pytest.mark.parametrize("given", REFUSED)
def test_mistakes_are_one_line(given, packed, tmp_path, capsys):
    refused(capsys, lambda: here(packed, tmp_path / "r", *given.split()), REFUSED[given])
    assert not (tmp_path / "r").exists()


def test_a_run_is_neither_overwritten_nor_continued_as_another(base, packed, tmp_path, capsys):
    refused(capsys, lambda: here(packed, base), "exists; add --resume")
    other = ("--resume", "--muon-lr", 0.5)
    refused(capsys, lambda: here(packed, base, *other), "muon-lr 0.02 (now 0.5)")
    damaged = checkpoints(base)[-1]
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:1000])
    with pytest.raises(ValueError, match="step_0000012.pt cannot be read"):
        here(packed, base, "--resume")
    damaged.write_bytes(whole)


def test_a_run_is_trained_by_one_process_at_a_time(packed, tmp_path, capsys):
    (tmp_path / "r").mkdir()
    with open(tmp_path / "r" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(capsys, lambda: here(packed, tmp_path / "r"), "another process trains")
