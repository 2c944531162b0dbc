"""core_eval.py against a slow, obvious second implementation (slow_core.py), and on hand-made
examples of every trap."""

import json
import math
import random
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import CORE_WORDS, make_rows, refused, run_program, small_core, write_bundle
from slow_core import slow_rendered, slow_task

import core_eval as ce
from dataloader import PackedData
from looped import core_prompts as prompts
from looped import core_tasks
from looped.common import file_hash
from looped.core_tasks import TASKS, Task
from looped.machine import Place
from looped.randomness import FOR_EVAL, hash_key
from looped.tokenizer import BOS, encode, load_tokenizer, save_tokenizer, token_bytes
from looped.validation import HeldOut, validate
from model import Model, ModelConfig
from tokenizer_train import train_bpe

SMALL = {"seq_len": 48, "d_model": 32, "n_head": 2, "d_mlp": 64, "mu_rec": 2}


@pytest.fixture(scope="session")
def enc(tmp_path_factory):
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    texts = [" ".join(rng.choices(CORE_WORDS, k=30)) for _ in range(200)]
    ranks = train_bpe(iter(texts), 340)
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


class Scripted:
    """A model that is a table: logits of the next token are a function of the token before, and of
    the depth."""

    def __init__(self, table, seq_len=512):
        self.table = torch.as_tensor(table, dtype=torch.float32)  # (V, V)
        self.cfg = SimpleNamespace(seq_len=seq_len, vocab_size=len(self.table), n_core=1)

    def uncompiled(self):
        return self

    def states(self, ids, depths, keys):
        for depth in sorted(set(depths)):
            yield depth, self.table[ids] * depth

    def coda(self, h, ids):
        return h

    def head(self, x):
        return x

    def hidden(self, ids, depth, keys):
        return self.table[ids] * depth


def prefer(enc, *pairs):
    """A table under which each pair (before, next) of texts of one token is likely, everything else
    even."""
    table = torch.zeros(enc.n_vocab, enc.n_vocab)
    for before, after in pairs:
        (a,), (b,) = enc.encode_ordinary(before), enc.encode_ordinary(after)
        table[a, b] = 5
    return Scripted(table)


def task_of(kind, shots=2, delimiter=" ", label="made"):
    chance = {"v1": 25, "v2": 50}
    task = Task(label, f"{label}.jsonl", kind, shots, delimiter, chance, index=7)
    task.by_category = label == "jeopardy"
    return task


def panel_of(task, rows, protocol="parcae", limit=None, name="core"):
    """A panel of one task with these rows."""
    return core_tasks.Panel(name, protocol, limit, [task], [task], {task.label: rows})


def answers_of(model, enc, task, rows, protocol="parcae", seed=1234):
    """The fast path at depth 2 -> {column: (n,)}."""
    work = ce.encode_task(task, panel_of(task, rows, protocol), seed, enc, model.cfg.seq_len)
    (result,) = ce.run_task(model, work, ce.Settings([2], [seed]), seed)
    return result


def entry_of(model, enc, panel, depth=2, seed=1234):
    ((label, entries),) = ce.evaluate(model, enc, panel, ce.Settings([depth], [seed]))
    assert label == panel.tasks[0].label
    return entries[depth]


# ---- laws

# CORE accuracies of a public log, in table order
LOG = """
.304023 .009920 .320407 .510522 .258532 .600000 .285012 .620239 .296000 .252086 .304621
.553114 .516180 .143000 .269565 .368939 .109524 .000000 .035478 .078542 .542813 .252300
"""


def test_core_of_a_public_log():
    panel = core_tasks.Panel("core-extended", "parcae", None, TASKS)
    for version, core, digits in (("v1", 0.119520, 6), ("v2", 0.0950, 4)):
        entries = {}
        for task, accuracy in zip(TASKS, LOG.split()):
            chance = task.chance[version]
            score = (100 * float(accuracy) - chance) / (100 - chance)
            entries[task.label] = {"centered": ce.spread([score], 0.1)}
        record = ce.summarise(panel, entries)
        assert round(record["core"]["mean"], digits) == core
        assert record["core"]["std"] == pytest.approx(0.1 / math.sqrt(22))
        assert record["aggregate"]["name"] == "22 of the 46 tasks of CORE Extended"
    assert ce.spread([1.0, 3.0], 0.1)["std"] == 1  # over seeds: the population's


def test_the_table_of_tasks_is_the_public_one():
    shots = "0 10 10 10 10 0 10 10 0 0 10 0 0 10 3 10 10 10 10 0 10 10 "
    shots += "0 5 10 10 10 10 10 0 10 10 10 10 10 10 10 10 3 3 10 3 10 10 10 3"
    v1 = "25 25 33.3 50 20 50 50 0 25 20 20 0 0 20 27 0 20 20 20 25 50 50 50 50"
    v2 = "25 25 50 50 25 50 50 0 33 25 25 0 0 20 25 0 25 25 25 25 50 50 50 50"
    assert [task.shots for task in TASKS] == list(map(int, shots.split()))
    assert [task.chance["v1"] for task in TASKS[22:]] == list(map(float, v1.split()))
    assert [task.chance["v2"] for task in TASKS[22:]] == list(map(float, v2.split()))
    of_lines = [task.label for task in TASKS if task.delimiter == "\nAnswer: "]
    want = "jeopardy arc_easy arc_challenge piqa boolq mmlu_fewshot logi_qa"
    assert of_lines == want.split()


@pytest.mark.parametrize("kind", ["mc", "schema", "lm"])
@pytest.mark.parametrize("protocol", ["parcae", "dclm"])
@pytest.mark.parametrize("label", ["made", "jeopardy"])
@pytest.mark.parametrize("limit", [None, 12])
def test_rows_and_spans_are_those_of_the_slow_renderer(enc, kind, protocol, label, limit):
    """Shots, tokens, scored positions and order, whole and cropped."""
    rows = make_rows(kind, 30, category=True)
    bos = enc.encode_single_token(BOS)
    task = task_of(kind, 10, "\nAnswer: ", label)
    panel = panel_of(task, rows, protocol, limit)
    asked = prompts.examples(task, panel, 1234)
    options = [prompts.OPTIONS[protocol](task, example, partial(encode, enc)) for example in asked]
    for context in (1000, 40, 12):
        slow = slow_rendered(enc, task, panel, context)
        for found, (_, _, want) in zip(options, slow, strict=True):
            for (ids, scored), (tokens, start, end) in zip(found, want, strict=True):
                cropped, scored = prompts.crop([bos, *ids], scored, context, task, protocol)
                assert (cropped, len(cropped)) == (tokens, end)
                assert scored == end - start or start < 1


@pytest.mark.parametrize("kind", ["mc", "schema", "lm"])
@pytest.mark.parametrize("protocol", ["parcae", "dclm"])
def test_answers_are_those_of_one_example_at_a_time(enc, net, kind, protocol):
    """Shared rows, batches and the head at scored positions only change no answer, at any depth,
    cropped or not."""
    task = task_of(kind)
    panel = panel_of(task, make_rows(kind, 40, seed=3), protocol)
    work = ce.encode_task(task, panel, 1234, enc, net.cfg.seq_len)
    depths = [1, 2, 5]
    results = ce.run_task(net, work, ce.Settings(depths, [1234]), 1234)
    for depth, result in zip(depths, results):
        want, gold = slow_task(net, enc, task, panel, 1234, depth)
        assert result["answer"].tolist() == want
        assert (result["correct"] == (np.array(want) == gold)).all()


def test_scores_do_not_depend_on_batches(enc, net, monkeypatch):
    task, rows = task_of("mc"), make_rows("mc", 30, seed=4)
    whole = answers_of(net, enc, task, rows)["answer"]
    for budget in (1, 10**9):
        monkeypatch.setitem(ce.BATCH_TOKENS, "cpu", budget)
        assert (whole == answers_of(net, enc, task, rows)["answer"]).all()
    other = answers_of(net, enc, task, rows, seed=1235)["answer"]
    assert (whole != other).any()  # shots and initial states do follow the seed


def test_one_seeds_error_is_the_binomial_one_and_never_zero(enc):
    panel = panel_of(task_of("lm", 0), [{"context": "the", "continuation": "cat"}] * 12)
    error = math.sqrt(13 / 14 * 1 / 14 / 12)  # with one more right and one more wrong
    entry = entry_of(prefer(enc, ("the", " cat")), enc, panel)
    assert entry["accuracy"]["mean"] == 1
    assert entry["accuracy"]["std"] == pytest.approx(error)
    assert entry["centered"]["std"] == pytest.approx(error / 0.75)  # chance is 25 %


# ---- traps


def test_an_option_without_tokens_wins_in_first_place_never_elsewhere_and_is_named(enc):
    """A choice whose tokens begin another's: the public evaluators average nothing, get NaN, and
    take min and index."""
    for choices in (["a", "a mat"], ["a mat", "a"], ["a mat", "a", "a dog"]):
        rows = [{"query": "saw", "choices": choices, "gold": 0}]
        task = task_of("mc", 0)
        panel = panel_of(task, rows)
        model = prefer(enc, (" a", " dog"))
        found = answers_of(model, enc, task, rows)
        assert found["answer"].tolist() == slow_task(model, enc, task, panel, 1, 2)[0]
        assert entry_of(model, enc, panel)["empty"] == 1
    assert not answers_of(model, enc, task, rows, "dclm")["empty"]  # scores the whole answer


def test_lm_prompts_without_a_continuation_are_right_and_those_that_are_no_prefix_wrong(enc):
    for text, continuation, delimiter, right in (
        ("the cat", "", ".", 1),  # Parcae: all() of nothing
        ("the c", "at", "", 0),
    ):
        rows = [{"context": text, "continuation": continuation}]
        found = answers_of(prefer(enc), enc, task_of("lm", 0, delimiter), rows)
        assert found["correct"] == right


def test_answers_longer_than_the_context_are_sliced_as_parcae_does(enc, net):
    """With negative indices, as the slow loop; dclm would stop, here what is left is scored."""
    long, task = " ".join(CORE_WORDS) * 3, task_of("mc", 0)
    rows = [{"query": "the", "choices": [long + " cat", "No " + long, "Yes"], "gold": 2}]
    found = answers_of(net, enc, task, rows)
    assert found["answer"].tolist() == slow_task(net, enc, task, panel_of(task, rows), 1234, 2)[0]
    assert prompts.crop([7] * 53, 51, 48, task, "dclm")[1] == 47


def test_dclm_compares_float32_exponentials(enc):
    """Losses past 88 all become infinity, so the first choice wins; the other protocols still see
    the difference."""
    model = prefer(enc)
    (the,), (dog,) = enc.encode_ordinary("the"), enc.encode_ordinary(" dog")
    (cat,) = enc.encode_ordinary(" cat")
    model.table[the, [0, dog, cat]] = torch.tensor([100.0, -50.0, -40.0])
    rows = [{"query": "the", "choices": ["dog", "cat"], "gold": 1}]
    for protocol, answer in (("parcae", 1), ("dclm", 0)):
        assert answers_of(model, enc, task_of("mc", 0), rows, protocol)["answer"] == answer


def test_dclm_averages_over_categories(enc):
    rows = [{"context": "the", "continuation": "cat", "category": "big"}] * 5
    rows = [*rows, {"context": "the", "continuation": "dog", "category": "small"}]
    task = task_of("lm", 0, label="jeopardy")
    for protocol, mean in (("dclm", 0.5), ("parcae", 5 / 6)):
        found = entry_of(prefer(enc, ("the", " cat")), enc, panel_of(task, rows, protocol))
        assert found["accuracy"]["mean"] == pytest.approx(mean, abs=1e-7)


def test_lambada_perplexity_is_that_of_the_slow_sum(enc, net):
    """Two blanks are one token here where the context ends in one: its end is then stripped."""
    rows = [{"context": "the cat sat on", "continuation": "bread "}]
    rows.append({"context": "saw a dog ", "continuation": " barn"})
    panel = panel_of(core_tasks.LAMBADA, rows, "lambada", name="lambada")
    nats = 0.0
    for i, text in enumerate(("the cat sat on bread", "saw a dog  barn")):
        ids = torch.tensor([enc.encode_ordinary(text)])
        keys = torch.tensor([hash_key(7, FOR_EVAL, 9, i)])
        losses = net.losses(ids[:, :-1], ids[:, 1:], [3], keys)[3]
        nats += losses[0, 3:].sum().item()  # four words, or three and a blank, come before
    entry = entry_of(net, enc, panel, 3, 7)
    assert entry["perplexity"]["mean"] == pytest.approx(math.exp(nats / 2), rel=1e-5)


def test_a_diverged_model_has_no_score(enc):
    """NaN would win wherever it comes first, and give a score like any other."""
    model = Scripted(torch.full((enc.n_vocab, enc.n_vocab), math.nan))
    for kind in ("mc", "schema", "lm"):
        with pytest.raises(ce.NotFiniteError, match="depth 2"):
            answers_of(model, enc, task_of(kind), make_rows(kind, 9))


# ---- tasks and their files


def test_lines_of_a_file_end_at_newline_only(tmp_path):
    files = small_core()
    files["world_knowledge/arc_easy.jsonl"][0]["query"] = "one\x85line\u2028 still"
    panel = core_tasks.load_panel(write_bundle(tmp_path / "b.zip", files))
    assert len(panel.rows) == 22
    assert panel.rows["arc_easy"] == files["world_knowledge/arc_easy.jsonl"]


def test_tasks_without_a_file_or_enough_examples_are_left_out(tmp_path):
    files = small_core()
    del files["commonsense_reasoning/copa.jsonl"]
    path = write_bundle(tmp_path / "b.zip", files)
    assert core_tasks.load_panel(path, limit=11).left_out == ["copa"]
    short = core_tasks.load_panel(path, limit=10)
    assert len(short.left_out) == 15 and "jeopardy" in short.left_out
    assert core_tasks.load_panel(path, protocol="dclm", limit=10).left_out == ["copa"]


def test_a_malformed_row_of_ones_own_is_named_with_what_it_needs(tmp_path, capsys):
    path = tmp_path / "mine.jsonl"
    rows = '{"query": "q", "choices": ["a"], "gold": 0}', "", '{"query": "q", "choices": ["a"]}'
    path.write_text("\n".join(rows))
    own = [core_tasks.own_task(f"{path}:mc")]
    said = f"{path}, line 3 (KeyError('gold'))", "of kind mc has query, choices, gold"
    refused(capsys, lambda: core_tasks.load_panel(None, "own", own=own), *said)


def test_without_a_bundle_or_a_network_the_flag_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(core_tasks, "BUNDLE", tmp_path / "b.zip")
    monkeypatch.setattr(core_tasks, "URL", "http://nowhere.invalid/b.zip")
    refused(capsys, lambda: core_tasks.bundle_at(None), "cannot fetch", "--bundle PATH")
    refused(capsys, lambda: core_tasks.load_panel(tmp_path / "no.zip"), "no.zip", "--bundle PATH")


# ---- validation


class Losses:
    """A model whose loss of a token is the token's id; keeps the shapes and keys it was given."""

    def __init__(self, seq_len):
        self.cfg = SimpleNamespace(seq_len=seq_len)
        self.shapes = set()
        self.keys = set()

    def losses(self, ids, targets, depths, keys):
        self.shapes.add(tuple(ids.shape))
        self.keys |= set(keys.tolist())
        return {depth: targets.float() * depth for depth in depths}


@pytest.mark.parametrize("batch, ranks, rows", [(1, 1, 20), (7, 1, math.inf), (16, 3, 20)])
def test_validation_feeds_one_shape_and_counts_each_row_once(
    packed, monkeypatch, batch, ranks, rows
):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: None)  # summed below
    data = PackedData(packed)
    model = Losses(data.seq_len)
    held_out = HeldOut(data, rows * data.seq_len, "cpu")
    places = [Place(rank, ranks, torch.device("cpu")) for rank in range(ranks)]
    found = [validate(model, held_out, [1, 2], batch, place) for place in places]
    targets = data.get("val", held_out.ids)[:, 1:]
    loss = sum(of_rank["loss"][2] for of_rank in found)
    assert loss == pytest.approx(2 * targets.mean(), rel=1e-12)
    if ranks == 1:
        sizes = token_bytes(held_out.tokenizer)[targets]
        bits = targets[sizes > 0].sum() / sizes.sum() / math.log(2)
        assert found[0]["bpb"][1] == pytest.approx(bits, rel=1e-12)
    assert found[0]["eval_tokens"] == targets.size == min(rows, data.rows("val")) * data.seq_len
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


# ---- the program


@pytest.fixture
def run(tmp_path, enc, net):
    """A run directory as train.py leaves it, and a bundle."""
    path = tmp_path / "r"
    path.mkdir()
    ranks = [enc.decode_single_token_bytes(i) for i in range(enc.n_vocab - 3)]
    save_tokenizer(path / "tokenizer.json", ranks)
    tokenizer = {"path": "data/tokenizer.json", "sha256": file_hash(path / "tokenizer.json")}
    config = {"args": {}, "model": vars(net.cfg), "tokenizer": tokenizer, "data": {"path": "gone"}}
    (path / "config.json").write_text(json.dumps(config))
    torch.save({"step": 3, "model": net.state_dict()}, path / "step_0000003.pt")
    write_bundle(tmp_path / "b.zip", small_core())
    return path


@pytest.fixture
def start(run, monkeypatch, capsys):
    """start(flags) runs core_eval.py on the run, and returns its lines about tasks."""

    def go(*flags):
        bundle = str(run.parent / "b.zip")
        monkeypatch.setattr(sys, "argv", ["core_eval.py", str(run), "--bundle", bundle, *flags])
        capsys.readouterr()
        ce.main()
        said = capsys.readouterr().out.splitlines()
        return [line.split() for line in said if " depth " in line]

    return go


def results(run, name="core_parcae"):
    return json.loads((run / f"core_{name}.json").read_text())


def test_results_continue_with_equal_settings_and_are_overwritten_with_others(run, start):
    flags = "--depth", "1,2", "--seeds", "5", "--max-per-task", "11"
    lines = start(*flags)
    assert [line[:3] for line in lines[:2]] == [["hellaswag_zeroshot", "depth", d] for d in "12"]
    assert len(lines) == 44
    assert len(start(*flags, "--depth", "3")) == 22
    part = results(run)
    assert part["depths"].keys() == {"1", "2", "3"}
    del part["depths"]["1"]["tasks"]["copa"]
    (run / "core_core_parcae.json").write_text(json.dumps(part))
    assert [line[0] for line in start(*flags)] == ["copa", "copa"]
    assert len(start(*flags, "--baselines", "v2")) == 44
    entry = results(run)["depths"]["2"]["tasks"]["commonsense_qa"]
    centred = (entry["accuracy"]["mean"] - 0.403) / 0.597
    assert entry["centered"]["mean"] == pytest.approx(centred)


def test_nanochat_is_parcae_at_seed_1234_and_two_ranks_give_the_scores_of_one(run, start):
    few = "--max-per-task", "3"
    start("--seeds", "1234", *few)
    flags = run, "--bundle", run.parent / "b.zip", "--protocol", "nanochat", *few
    run_program("core_eval.py", *flags, ranks=2)
    assert results(run, "core_nanochat")["depths"] == results(run)["depths"]


def test_ones_own_task_is_in_no_average_but_its_own(run, start, tmp_path):
    mine = tmp_path / "mine.jsonl"
    mine.write_text("\n".join(json.dumps(row) for row in make_rows("mc", 12)))
    own = "--task", f"{mine}:mc,shots=2,chance=25"
    flags = "--seeds", "5", "--max-per-task", "11"
    start(*flags)
    before = results(run)["depths"]["2"]["aggregate"]
    ((label, *_),) = start(*flags, *own)
    after = results(run)["depths"]["2"]
    assert after["aggregate"] == before
    start(*flags, *own, "--panel", "own")
    alone = results(run, "own_parcae")["depths"]["2"]
    assert alone["tasks"] == {label: after["tasks"][label]}
    assert alone["aggregate"]["mean"] == alone["tasks"][label]["centered"]["mean"]


def test_validation_rows_of_another_tokenizer_are_refused(packed, capsys):
    score = partial(ce.validation, Losses(32), folder=packed, settings=ce.Settings([1], [1]))
    sha256 = PackedData(packed).manifest["tokenizer_sha256"]
    assert score({"tokenizer": {"sha256": sha256}}).keys() == {"1"}
    refused(capsys, lambda: score({"tokenizer": {"sha256": "x"}}), "another tokenizer", "--data")


def test_what_cannot_be_evaluated_is_refused_in_one_line(run, start, net, capsys):
    (run / "tokenizer.json").write_text((run / "tokenizer.json").read_text() + "\n")
    copy_it = "copy data/tokenizer.json there"
    refused(capsys, start, "not the tokenizer of the checkpoint", copy_it)
    for path in run.glob("step_*"):
        path.unlink()
    refused(capsys, start, "(step_*.pt)", "name a run")
