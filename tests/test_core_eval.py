"""core_eval.py against a slow, obvious second implementation (slow_core.py), and on hand-made
examples of every trap."""

import copy
import json
import math
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import CORE_WORDS, ROOT, make_rows, refused, run_program, small_core, write_bundle
from slow_core import slow_task

import core_eval as ce
from dataloader import PackedData
from looped import core_tasks
from looped.common import file_hash
from looped.core_tasks import LAMBADA, TASKS, Panel, Task, bundle_at, load_panel, own_task
from looped.machine import ONE_PROCESS, Rank, code_files, code_hash
from looped.randomness import FOR_EVAL, hash_key
from looped.tokenizer import load_tokenizer, save_tokenizer, token_bytes
from looped.validation import HeldOut, validate
from model import Model, ModelConfig
from tokenizer_train import train_bpe

SMALL = {"seq_len": 48, "d_model": 32, "n_head": 2, "d_mlp": 64, "mu_rec": 2}


@pytest.fixture(scope="session")
def ranks():
    """The tokens of a tokenizer of CORE_WORDS."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices(CORE_WORDS, k=30)) for _ in range(200)]
    return train_bpe(iter(texts), 340)


@pytest.fixture(scope="session")
def enc(ranks, tmp_path_factory):
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    save_tokenizer(path, ranks)
    return load_tokenizer(path)


@pytest.fixture(scope="session")
def net(enc):
    """A looped model far from its initialisation, so that answers depend on states, depth and
    seed."""
    model = Model(ModelConfig(vocab_size=enc.n_vocab, **SMALL))
    model.init_weights(0)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=g)
    return model.eval()


def task_of(kind, shots=2, delimiter=" "):
    return Task("made", "made.jsonl", kind, shots, delimiter, 0.25, index=7)


def panel_of(task, rows, limit=None, name="own"):
    """A panel of one task with these rows."""
    return Panel(name, limit, [task], [task], {task.label: rows})


def answers_of(model, enc, panel, depths=(2,), seed=1234):
    (task,) = panel.tasks
    work = ce.encode_task(task, panel, seed, enc, model.cfg.seq_len)
    return ce.run_task(model, work, ce.Settings(depths, [seed]), seed)


# ---- laws

# CORE accuracies of a public log, in table order
LOG = """
.304023 .009920 .320407 .510522 .258532 .600000 .285012 .620239 .296000 .252086 .304621
.553114 .516180 .143000 .269565 .368939 .109524 .000000 .035478 .078542 .542813 .252300
"""


def test_core_of_a_public_log():
    entries = {}
    for task, accuracy in zip(TASKS, LOG.split()):
        score = (float(accuracy) - task.chance) / (1 - task.chance)
        entries[task.label] = {"centered": ce.spread([score], 0.1)}
    record = ce.summarise(Panel("core-extended", None, TASKS), entries)
    assert round(record["core"]["mean"], 6) == 0.119520
    assert record["core"]["std"] == pytest.approx(0.1 / math.sqrt(22))
    assert record["aggregate"]["name"] == "22 of the 46 tasks of CORE Extended"


def test_the_table_of_tasks_is_the_public_one():
    shots = "0 10 10 10 10 0 10 10 0 0 10 0 0 10 3 10 10 10 10 0 10 10 "
    shots += "0 5 10 10 10 10 10 0 10 10 10 10 10 10 10 10 3 3 10 3 10 10 10 3"
    chance = "25 25 33.3 50 20 50 50 0 25 20 20 0 0 20 27 0 20 20 20 25 50 50 50 50"
    assert [task.shots for task in TASKS] == list(map(int, shots.split()))
    assert [100 * task.chance for task in TASKS[22:]] == list(map(float, chance.split()))
    of_lines = [task.label for task in TASKS if task.delimiter == "\nAnswer: "]
    want = "jeopardy arc_easy arc_challenge piqa boolq mmlu_fewshot logi_qa"
    assert of_lines == want.split()


TASKS_MADE = [  # with so many shots some of the prompts are cropped, or all
    task_of("mc", 3),
    task_of("schema", 5),
    task_of("lm", 3),
    task_of("mc", 1, "\nAnswer: "),
    task_of("lm", 2, "\nAnswer: "),
]


@pytest.mark.parametrize("task", TASKS_MADE)
def test_scores_are_those_of_one_example_at_a_time(enc, net, task):
    """Shared rows, batches and the head at scored positions only change no loss and no answer, at any
    depth, cropped or not."""
    panel = panel_of(task, make_rows(task.kind, 30, seed=3), limit=20)
    answers = answers_of(net, enc, panel, [1, 3])
    assert answers.cropped.any()
    for d, depth in enumerate([1, 3]):
        correct, nats, cropped = slow_task(net, enc, task, panel, 1234, depth)
        assert answers.correct[d].tolist() == correct.tolist()
        assert answers.cropped.tolist() == cropped.tolist()
        assert answers.nats[d].tolist() == pytest.approx(nats.tolist(), rel=1e-5)


def test_scores_do_not_depend_on_batches_but_on_the_seed(enc, net, monkeypatch):
    panel = panel_of(task_of("mc"), make_rows("mc", 30, seed=4))
    nats = answers_of(net, enc, panel).nats
    for budget in (1, 10**9):
        monkeypatch.setitem(ce.BATCH_TOKENS, "cpu", budget)
        assert torch.allclose(answers_of(net, enc, panel).nats, nats, rtol=1e-5)
    other = answers_of(net, enc, panel, seed=1235).nats  # other shots and initial states
    assert not torch.allclose(other, nats, rtol=1e-2)


def test_an_error_is_the_scatter_over_seeds_or_the_binomial_one_and_never_zero():
    assert ce.spread([1.0, 3.0], 0.1)["std"] == 1
    share, error = ce.accuracy(torch.ones(12))
    assert share == 1
    assert error == pytest.approx(
        math.sqrt(13 / 14 * 1 / 14 / 12)
    )  # one more right, one more wrong


# ---- traps

LONG = " ".join(CORE_WORDS) * 3
TRAPS = {
    "an option whose tokens begin another's wins in first place": (
        task_of("mc", 0),
        {"query": "saw", "choices": ["a", "a mat"], "gold": 0},
        1,
    ),
    "and never elsewhere": (
        task_of("mc", 0),
        {"query": "saw", "choices": ["a mat", "a"], "gold": 0},
        1,
    ),
    "nothing to continue is right": (
        task_of("lm", 0, "."),
        {"context": "the cat", "continuation": ""},
        1,
    ),
    "tokens that do not begin with those of the context are wrong": (
        task_of("lm", 0, ""),
        {"context": "the c", "continuation": "at"},
        0,
    ),
    "an answer longer than the context is scored as far as it is kept": (
        task_of("mc", 0),
        {"query": "the", "choices": [LONG + " cat", "No " + LONG], "gold": 0},
        None,
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_odd_examples_are_scored_as_the_public_evaluators_do(enc, net, trap):
    task, row, right = TRAPS[trap]
    panel = panel_of(task, [row])
    answers = answers_of(net, enc, panel)
    correct, nats, _ = slow_task(net, enc, task, panel, 1234, 2)
    assert answers.correct[0] == correct
    assert right in (None, correct)
    assert answers.nats[0].item() == pytest.approx(nats.item(), rel=1e-5)


def test_lambada_perplexity_is_that_of_the_slow_sum(enc, net):
    """Two blanks are one token here where the context ends in one: its end is then stripped."""
    rows = [{"context": "the cat sat on", "continuation": "bread "}]
    rows.append({"context": "saw a dog ", "continuation": " barn"})
    nats = 0.0
    for i, text in enumerate(("the cat sat on bread", "saw a dog  barn")):
        ids = torch.tensor([enc.encode_ordinary(text)])
        keys = torch.tensor([hash_key(7, FOR_EVAL, 9, i)])
        losses = net.losses(ids[:, :-1], ids[:, 1:], [3], keys)[3]
        nats += losses[0, 3:].sum().item()  # four words, or three and a blank, come before
    panel = panel_of(LAMBADA, rows, name="lambada")
    record = ce.score_panel(net, enc, panel, ce.Settings([3], [7]))["3"]
    assert record["aggregate"]["mean"] == pytest.approx(math.exp(nats / 2), rel=1e-5)


def test_a_diverged_model_has_no_score(enc, net, capsys):
    """NaN would win wherever it comes first, and give a score like any other."""
    model = copy.deepcopy(net)
    model.wte.weight.data.fill_(math.nan)
    panel = panel_of(task_of("mc"), make_rows("mc", 9))
    refused(capsys, lambda: answers_of(model, enc, panel), "made at depth 2", "diverged")


# ---- tasks and their files


def test_lines_of_a_file_end_at_newline_only(tmp_path):
    files = small_core()
    files["world_knowledge/arc_easy.jsonl"][0]["query"] = "one\x85line\u2028 still"
    panel = load_panel(write_bundle(tmp_path / "b.zip", files))
    assert len(panel.rows) == 22
    assert panel.rows["arc_easy"] == files["world_knowledge/arc_easy.jsonl"]


def test_tasks_without_a_file_or_enough_examples_are_left_out(tmp_path, capsys):
    files = small_core()
    del files["commonsense_reasoning/copa.jsonl"]
    path = write_bundle(tmp_path / "b.zip", files)
    assert len(load_panel(path, limit=11).tasks) == 21
    assert capsys.readouterr().err.endswith("(--max-per-task)): copa\n")
    assert len(load_panel(path, limit=10).tasks) == 7


def test_a_malformed_row_of_ones_own_is_named_with_what_it_needs(tmp_path, capsys):
    path = tmp_path / "mine.jsonl"
    rows = '{"query": "q", "choices": ["a"], "gold": 0}', "", '{"query": "q", "choices": ["a"]}'
    path.write_text("\n".join(rows))
    own = [own_task(f"{path}:mc")]
    said = f"{path}, line 3 (KeyError('gold'))", "of kind mc has query, choices, gold"
    refused(capsys, lambda: load_panel(None, "own", own=own), *said)


def test_without_a_bundle_or_a_network_the_flag_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(core_tasks, "BUNDLE", tmp_path / "b.zip")
    monkeypatch.setattr(core_tasks, "URL", "http://nowhere.invalid/b.zip")
    refused(capsys, lambda: bundle_at(None, ONE_PROCESS), "cannot fetch", "--bundle PATH")
    refused(capsys, lambda: load_panel(tmp_path / "no.zip"), "no.zip", "--bundle PATH")


def test_blanks_between_context_and_answer_of_ones_own_task_are_one(enc, net, tmp_path):
    scores = []
    for before, after in (("", ""), (" ", ""), ("", " "), (" ", "  ")):
        row = {"query": "the" + before, "choices": [after + "cat", after + "dog"], "gold": 0}
        path = tmp_path / "mine.jsonl"
        path.write_text(json.dumps(row))
        task = own_task(f"{path}:mc")
        task.index = 7  # the same initial states
        panel = load_panel(None, "own", own=[task])
        scores.append(answers_of(net, enc, panel).nats.item())
    assert scores[1:] == scores[:1] * 3


# ---- validation


class Losses:
    """A model whose loss of a token is the token's id; keeps the shapes and keys it was given."""

    def __init__(self):
        self.shapes = set()
        self.keys = set()

    def losses(self, ids, targets, depths, keys):
        self.shapes.add(tuple(ids.shape))
        self.keys |= set(keys.tolist())
        return {depth: targets.float() * depth for depth in depths}


@pytest.mark.parametrize("batch, world, rows", [(1, 1, 20), (7, 1, math.inf), (16, 3, 20)])
def test_validation_feeds_one_shape_and_counts_each_row_once(
    packed, monkeypatch, batch, world, rows
):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: None)  # summed below
    data = PackedData(packed)
    model = Losses()
    held_out = HeldOut(data, rows * data.seq_len, "cpu")
    ranks = [Rank(number, world, torch.device("cpu")) for number in range(world)]
    results = [validate(model, held_out, [1, 2], batch, rank) for rank in ranks]
    targets = data.get("val", held_out.ids)[:, 1:]
    loss = sum(of_rank["loss"][2] for of_rank in results)
    assert loss == pytest.approx(2 * targets.mean(), rel=1e-12)
    if world == 1:
        sizes = token_bytes(held_out.tokenizer)[targets]
        bits = targets[sizes > 0].sum() / sizes.sum() / math.log(2)
        assert results[0]["bpb"][1] == pytest.approx(bits, rel=1e-12)
    assert results[0]["eval_tokens"] == targets.size == min(rows, data.rows("val")) * data.seq_len
    assert model.shapes == {(batch, data.seq_len)}
    assert model.keys == {hash_key(FOR_EVAL, i) for i in held_out.ids.tolist()}


def test_any_number_of_validation_rows_is_spread_over_the_shard(packed):
    """Packed so that long documents come last."""
    shard = SimpleNamespace(folder=packed, seq_len=10, rows=lambda split: 10_000)
    few = HeldOut(shard, 4000, "cpu").ids
    assert set(few) < set(HeldOut(shard, 8000, "cpu").ids)
    in_tenths = np.bincount(few // 1000, minlength=10)
    assert (abs(in_tenths / 400 - 0.1) < 4 * math.sqrt(0.09 / 400)).all()
    assert HeldOut(shard, math.inf, "cpu").ids.tolist() == list(range(10_000))


def test_validation_rows_of_another_tokenizer_are_refused(packed, capsys):
    sha256 = PackedData(packed).manifest["tokenizer_sha256"]
    assert ce.open_rows(packed, {"tokenizer": {"sha256": sha256}}).rows("val")
    other = {"tokenizer": {"sha256": "x"}}
    refused(capsys, lambda: ce.open_rows(packed, other), "another tokenizer", "--data")


# ---- the program


@pytest.fixture
def run(tmp_path, ranks, net):
    """A run directory as train.py leaves it, and a bundle."""
    path = tmp_path / "r"
    path.mkdir()
    save_tokenizer(path / "tokenizer.json", ranks)
    tokenizer = {"path": "data/tokenizer.json", "sha256": file_hash(path / "tokenizer.json")}
    config = {"args": {}, "model": vars(net.cfg), "tokenizer": tokenizer, "data": {"path": "gone"}}
    config |= {"code": "of then", "git": {"commit": "0123456789abcdef"}}
    (path / "config.json").write_text(json.dumps(config))
    torch.save({"step": 3, "model": net.state_dict()}, path / "step_0000003.pt")
    write_bundle(tmp_path / "b.zip", small_core())
    return path


@pytest.fixture
def start(run, monkeypatch, capsys):
    """start(flags) runs core_eval.py on the run; returns what it printed and the scores it wrote."""

    def go(*flags):
        bundle = str(run.parent / "b.zip")
        flags = "--bundle", bundle, "--seeds", "5", *flags
        monkeypatch.setattr(sys, "argv", ["core_eval.py", str(run), *flags])
        capsys.readouterr()
        ce.main()
        said = capsys.readouterr()
        path = said.out.splitlines()[-1].removeprefix("written: ")
        return said, json.loads(open(path).read())

    return go


def test_two_ranks_give_the_scores_of_one(run, start):
    flags = "--depth", "1,2", "--max-per-task", "3"
    _, scores = start(*flags)
    (path,) = run.glob("core_eval_core_*.json")
    path.unlink()
    bundle = run.parent / "b.zip"
    run_program("core_eval.py", run, "--bundle", bundle, "--seeds", 5, *flags, ranks=2)
    assert json.loads(path.read_text()) == scores


def test_the_code_that_trained_and_the_code_that_scored_are_told_apart(run, start):
    said, scores = start("--max-per-task", "3")
    (line,) = [line for line in said.err.splitlines() if "other code" in line]
    assert "commit 0123456789" in line
    assert scores["code"] == code_hash(script="core_eval.py")
    assert ROOT / "core_eval.py" in code_files(script="core_eval.py")
    del scores["checkpoint"], scores["depths"]
    assert ce.score_file(run, scores).exists()
    assert not ce.score_file(run, scores | {"code": "edited"}).exists()


def test_the_score_of_ones_own_tasks_is_of_those_asked_and_of_their_present_content(
    run, start, tmp_path
):
    """An option whose tokens begin another's is the answer, whatever the model."""
    row = {"query": "saw", "choices": ["a", "a mat"]}
    easy, hard = (json.dumps(row | {"gold": gold}) for gold in (0, 1))
    files = {"easy": tmp_path / "easy.jsonl", "hard": tmp_path / "hard.jsonl"}

    def score(*names):
        flags = [f"--task={files[name]}:mc,chance=0.5" for name in names]
        said, scores = start("--panel", "own", *flags)
        mean = scores["depths"]["2"]["aggregate"]["mean"]
        assert f"own tasks {mean:.4f}" in said.out
        return mean

    files["easy"].write_text(easy)
    files["hard"].write_text(hard)
    asked = ["easy"], ["hard"], ["easy", "hard"], ["easy"]
    assert [score(*names) for names in asked] == [1, -1, 0, 1]
    files["easy"].write_text(hard)
    assert score("easy") == -1
    files["easy"].write_text(easy)
    assert score("easy") == 1
    assert len(list(run.glob("core_eval_own_*"))) == 4  # easy, hard, both, the other easy


def test_ones_own_task_is_in_no_average_but_its_own(start, tmp_path):
    mine = tmp_path / "mine.jsonl"
    mine.write_text("\n".join(json.dumps(row) for row in make_rows("mc", 12)))
    own = "--task", f"{mine}:mc,shots=2,chance=0.25"
    few = "--max-per-task", "3"
    _, before = start(*few)
    _, beside = start(*few, *own)
    _, alone = start(*few, *own, "--panel", "own")
    before, beside, alone = (scores["depths"]["2"] for scores in (before, beside, alone))
    assert beside["aggregate"] == before["aggregate"]
    ((label, entry),) = alone["tasks"].items()
    assert beside["tasks"] == before["tasks"] | {label: entry}
    assert alone["aggregate"]["mean"] == entry["centered"]["mean"]


@pytest.mark.parametrize("wrong", ["chance=25", "chance=100", "shots=-1", "shots=2,shots=3"])
def test_settings_of_ones_own_task_are_checked(start, tmp_path, capsys, wrong):
    (tmp_path / "mine.jsonl").touch()
    task = f"{tmp_path}/mine.jsonl:mc,{wrong}"
    refused(capsys, lambda: start("--task", task), task, "[,shots=N][,chance=P]", "0.25 for 25 %")


def test_what_cannot_be_evaluated_is_refused_in_one_line(run, start, capsys):
    (run / "tokenizer.json").write_text((run / "tokenizer.json").read_text() + "\n")
    copy_it = "copy data/tokenizer.json there"
    refused(capsys, start, "not the tokenizer of the checkpoint", copy_it)
    for path in run.glob("step_*"):
        path.unlink()
    refused(capsys, start, "(step_*.pt)", "name a run")
