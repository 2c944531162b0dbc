"""core_eval.py against a slow, obvious second implementation (slow_core.py), and on hand-made
examples of every trap.

EVAL_BUNDLE=/path/to/eval_bundle.zip pytest tests/test_core_eval.py     # real task files as well
"""

import copy
import dataclasses
import itertools
import json
import math
import os
import random
import re
import sys
import threading
import time
import zipfile
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
from helpers import CORE_WORDS, make_rows, refused, run_program, small_core, write_bundle
from slow_core import slow_examples, slow_rendered, slow_shots, slow_task

import core_eval as ce
from dataloader import PackedData
from looped import core_prompts as prompts
from looped import core_results, core_tasks
from looped.core_tasks import TASKS, Task
from looped.files import file_hash
from looped.machine import Place, exact_products
from looped.randomness import FOR_EVAL, hash_key
from looped.tokenizer import BOS, encoding, file_content, load_tokenizer, save_tokenizer
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


def prefer(enc, *pairs, strength=5.0):
    """A table under which each pair (before, next) of texts of one token is likely, everything else
    even."""
    table = torch.zeros(enc.n_vocab, enc.n_vocab)
    for before, after in pairs:
        (a,), (b,) = enc.encode_ordinary(before), enc.encode_ordinary(after)
        table[a, b] = strength
    return Scripted(table)


def even(enc, seq_len=512):
    return Scripted(torch.zeros(enc.n_vocab, enc.n_vocab), seq_len)


def task_of(kind, shots=2, delimiter=" ", label="made", by_category=False):
    chance = {"v1": 25, "v2": 50}
    task = Task(label, f"{label}.jsonl", kind, shots, delimiter, chance, index=7)
    task.by_category = by_category
    return task


def panel_of(tasks, rows, protocol="parcae", limit=None, name="core"):
    """A panel of one or several tasks, each with these rows."""
    tasks = tasks if isinstance(tasks, list) else [tasks]
    by_label = {task.label: rows for task in tasks}
    return core_tasks.Panel(name, protocol, limit, tasks, tasks, rows=by_label)


def answers_of(model, enc, task, rows, protocol="parcae", *, depths=(2,), **more):
    """The fast path -> {depth: {column: (n,)}}, summed over ranks; more: seed, ranks."""
    seed = more.get("seed", 1234)
    ranks = more.get("ranks", 1)
    panel = panel_of(task, rows, protocol)
    total = {depth: dict.fromkeys(ce.COLUMNS, 0) for depth in depths}
    for rank in range(ranks):
        place = Place(rank, ranks, torch.device("cpu"))
        work = ce.encode_task(task, panel, seed, enc, model.cfg.seq_len, place)
        settings = ce.Settings(list(depths), [seed])  # alone: the sum over ranks is taken here
        for depth, result in ce.run_task(model, work, settings, seed).items():
            for name, values in result.items():
                total[depth][name] = total[depth][name] + values
    return total


def entry_of(model, enc, panel, depth=2, seeds=(1234,)):
    entries = dict(ce.evaluate(model, enc, panel, ce.Settings([depth], list(seeds))))
    assert list(entries) == [task.label for task in panel.tasks]
    return entries[panel.tasks[0].label][depth]


# ---- laws

# CORE accuracies of a public log, in table order
LOG = """
.304023 .009920 .320407 .510522 .258532 .600000 .285012 .620239 .296000 .252086 .304621
.553114 .516180 .143000 .269565 .368939 .109524 .000000 .035478 .078542 .542813 .252300
"""


def test_core_of_a_public_log():
    panel = panel_of(TASKS[:22], [])
    for version, core, digits in (("v1", 0.119520, 6), ("v2", 0.0950, 4)):
        entries = {}
        for i, (task, accuracy) in enumerate(zip(panel.tasks, LOG.split())):
            score = core_results.centred(float(accuracy), task.chance[version])
            entries[task.label] = {
                "centered": core_results.spread({"1": score, "2": score + i % 3})
            }
        total = core_results.summarise(panel, entries)["aggregate"]
        assert total["name"] == "CORE"
        assert round(total["per_seed"]["1"], digits) == core
        other = core + 21 / 22  # a deviation is the population's, and that of the means
        assert total["std"] == pytest.approx((other - core) / 2)
        assert total["tasks_done"] == 22
    del entries["copa"]
    record = core_results.summarise(panel, entries)
    assert record["aggregate"]["name"] == "21 of the 22 tasks of CORE"
    assert "2 of the 3 tasks of commonsense reasoning" in record["categories_fine"]


def test_the_table_of_tasks_is_the_public_one():
    assert [len(panel) for panel in core_tasks.PANELS.values()] == [22, 46, 1, 0]
    assert len({task.label for task in TASKS}) == 46
    fine = Counter(task.category for task in TASKS)
    assert fine.pop("") == 24
    assert sorted(fine.values()) == [1, 1, 2, 2, 2, 3, 3, 3, 5]
    assert list(Counter(task.family for task in TASKS).values()) == [8, 7, 8, 11, 8, 4]
    assert sum(task.chance["v1"] != task.chance["v2"] for task in TASKS) == 12
    shots = [0, 10, 10, 10, 10, 0, 10, 10, 0, 0, 10, 0, 0, 10, 3, 10, 10, 10, 10, 0, 10, 10]
    more = [0, 5, 10, 10, 10, 10, 10, 0, 10, 10, 10, 10, 10, 10, 10, 10, 3, 3, 10, 3, 10, 10, 10, 3]
    assert [task.shots for task in TASKS] == shots + more
    v1 = "25 25 33.3 50 20 50 50 0 25 20 20 0 0 20 27 0 20 20 20 25 50 50 50 50"
    v2 = "25 25 50 50 25 50 50 0 33 25 25 0 0 20 25 0 25 25 25 25 50 50 50 50"
    for version, numbers in (("v1", v1), ("v2", v2)):
        chances = [task.chance[version] for task in TASKS[22:]]
        assert chances == list(map(float, numbers.split()))
    of_lines = "jeopardy arc_easy arc_challenge piqa boolq mmlu_fewshot logi_qa"
    for name, value, labels in (
        ("kind", "schema", "winograd winogrande"),
        ("delimiter", "Answer: ", "mmlu_zeroshot"),
        ("delimiter", "\nAnswer: ", of_lines),
        ("by_category", True, "jeopardy mmlu_zeroshot mmlu_fewshot bbq"),
        ("file", "language_understanding/winograd_wsc.jsonl", "winograd"),
    ):
        found = [task.label for task in TASKS if getattr(task, name) == value]
        assert found == labels.split()


@pytest.mark.parametrize(
    "protocol, draw", [("parcae", prompts.parcae_shots), ("dclm", prompts.dclm_shots)]
)
def test_shots_are_those_of_the_slow_sampler(protocol, draw):
    for n, shots in ((2, 1), (3, 0), (12, 10), (40, 5), (300, 10)):
        for seed in (1234, 2345):
            slow = slow_shots(protocol, seed, n, shots)
            assert list(draw(seed, n, shots)) == slow
    if protocol == "dclm":  # it takes fewer where the pool is small
        few = list(draw(1234, 5, 10))
        assert few == slow_shots("dclm", 1234, 5, 10)
        assert all(len(shots) == 4 and i not in shots for i, shots in enumerate(few))


def options_of(enc, task, rows, protocol, limit=None):
    """Yields (number, [(tokens, scored)] of its options) of all examples, uncropped."""
    encode = prompts.line_encoder(enc)
    bos = enc.encode_single_token(BOS)
    for number, question in enumerate(prompts.questions(task, rows, protocol, limit, 1234)):
        options = prompts.OPTIONS[protocol](task, question, encode)
        whole = [(np.array([bos, *tokens]), scored) for tokens, scored in options]
        yield number, whole


@pytest.mark.parametrize("kind", ["mc", "schema", "lm"])
@pytest.mark.parametrize("protocol", ["parcae", "dclm"])
@pytest.mark.parametrize("limit, by_category", [(None, False), (9, False), (None, True), (9, True)])
def test_rows_and_spans_are_those_of_the_slow_renderer(enc, kind, protocol, limit, by_category):
    """Tokens, scored positions and order, whole and cropped."""
    rows = make_rows(kind, 30, category=True)
    label = "jeopardy" if by_category else "made"
    for delimiter in (" ", "\nAnswer: "):
        task = task_of(kind, 3, delimiter, label, by_category)
        found = list(options_of(enc, task, rows, protocol, limit))
        for context in (1000, 40, 12):
            slow = list(slow_rendered(enc, task, panel_of(task, rows, protocol, limit), context))
            assert len(found) == len(slow)
            for (number, options), (slow_number, _, want) in zip(found, slow):
                assert number == slow_number
                for option, (tokens, start, end) in zip(options, want, strict=True):
                    cropped, scored, odd = prompts.crop(*option, context, task, protocol)
                    assert cropped.tolist() == tokens
                    assert end == len(tokens)
                    if "cut" not in odd:
                        assert scored == end - start


def test_lines_are_tokenised_as_in_the_whole_text(enc):
    """Also where a cut would change tokens: before white space, at line ends of every kind, where
    tokens hold line ends, with another pattern."""
    single = [bytes([i]) for i in range(256)]
    with_ends = encoding(file_content([*single, b"\n\n", b"\n ", b" \n", b".\n"]))
    ranks = {token: i for i, token in enumerate([*single, b"\na"])}
    other = tiktoken.Encoding(
        "x", pat_str=r"(?s).+", mergeable_ranks=ranks, special_tokens={BOS: 257}
    )
    blanks = ["\n", "\n", "\n\n", " ", "  ", "\r\n", "\x85", "\u2028"]
    parts = [*CORE_WORDS, *blanks, "?", ".\n", "12", "'s", "é"]
    rng = random.Random(3)
    for tokenizer, texts in ((enc, parts), (with_ends, ["a", "b.", *blanks[:6]]), (other, parts)):
        encode = prompts.line_encoder(tokenizer)
        for _ in range(1000):
            whole = "".join(rng.choices(texts, k=rng.randint(0, 12)))
            assert encode(whole).tolist() == tokenizer.encode_ordinary(whole), repr(whole)


def agreeing(model, enc, task, rows, protocol, depths):
    """The fast path's results at these depths, in which all but near ties are the slow loop's; how many those are."""
    found = answers_of(model, enc, task, rows, protocol, depths=depths)
    for depth, result in found.items():
        want, gold = slow_task(model, enc, task, panel_of(task, rows, protocol), 1234, depth)
        safe = result["near_ties"] == 0  # a near tie may go either way
        assert (result["answer"] == want)[safe].all()
        assert ((result["correct"] == 1) == (np.array(want) == gold))[safe].all()
    return found, safe.sum()


@pytest.mark.parametrize("kind", ["mc", "schema", "lm"])
@pytest.mark.parametrize("protocol", ["parcae", "dclm"])
def test_answers_are_those_of_one_example_at_a_time(enc, net, kind, protocol):
    """Shared rows, batches and the head at scored positions only change no answer, at any depth,
    cropped or not."""
    rows = make_rows(kind, 40, seed=3)
    found, safe = agreeing(net, enc, task_of(kind), rows, protocol, (1, 2, 5))
    assert safe > 30
    if kind == "mc":
        assert len(set(found[5]["answer"])) > 1


@pytest.mark.parametrize("kind", [{"mechanism": "attnres"}, {"mechanism": "hyper"}, {"n_core": 0}])
def test_mechanisms_and_flat_models_give_the_answers_of_one_example_at_a_time(enc, kind):
    model = Model(ModelConfig(vocab_size=enc.n_vocab, **SMALL | kind))
    model.init_weights(3)
    rows = make_rows("mc", 12, seed=5)
    assert agreeing(model.eval(), enc, task_of("mc"), rows, "parcae", (model.cfg.mu_rec,))[1]


def test_scores_do_not_depend_on_batches_order_or_ranks(enc, net, monkeypatch):
    task, rows = task_of("mc"), make_rows("mc", 30, seed=4)
    whole = answers_of(net, enc, task, rows)[2]
    safe = whole["near_ties"] == 0
    for budget, ranks in ((1, 1), (200, 1), (10**9, 1), (1024, 3), (100, 7)):
        monkeypatch.setitem(ce.BATCH_TOKENS, "cpu", budget)
        again = answers_of(net, enc, task, rows, ranks=ranks)[2]
        assert (whole["answer"] == again["answer"])[safe].all()
        assert whole["cropped"].sum() == again["cropped"].sum()
        assert (whole["correct"] == again["correct"])[safe].all()
    other = answers_of(net, enc, task, rows, seed=1235)[2]
    assert (whole["answer"] != other["answer"]).any()  # shots and initial states do follow the seed


def test_an_option_that_begins_another_takes_no_row(enc):
    def rows_of(*choices):
        task, row = task_of("mc", shots=0), {"query": "the cat", "choices": choices, "gold": 0}
        panel = panel_of(task, [row] * 3)
        return ce.encode_task(task, panel, 1, enc, 64).rows

    assert len({len(enc.encode_ordinary(" " + c)) for c in ("Yes", "No")}) == 1
    assert len(rows_of("Yes", "No")) == 3  # they differ in their last token only
    rows = rows_of("a", "a mat", "a mat and")
    assert len(rows) == 3
    assert all(len(row) == 2 for row in rows)  # the first choice is empty


def test_a_model_without_a_loop_answers_once_for_all_seeds(enc, net, monkeypatch):
    """Unless the shots are drawn anew; a looped one has other initial states."""
    flat = Model(ModelConfig(vocab_size=enc.n_vocab, **SMALL | {"n_core": 0}))
    flat.init_weights(3)
    seen = []
    real = ce.run_task

    def run_task(model, work, settings, seed):
        seen.append(seed)
        return real(model, work, settings, seed)

    monkeypatch.setattr(ce, "run_task", run_task)
    cases = ((flat, 0, "parcae", [1]), (flat, 2, "parcae", [1, 2, 3]), (flat, 2, "dclm", [1]))
    for model, shots, protocol, want in (*cases, (net, 0, "parcae", [1, 2, 3])):
        panel = panel_of(task_of("mc", shots), make_rows("mc", 8), protocol)
        entry = entry_of(model, enc, panel, model.cfg.mu_rec, (1, 2, 3))
        assert seen == want
        assert list(entry["accuracy"]["per_seed"]) == ["1", "2", "3"]
        seen.clear()


def test_a_model_in_training_can_be_evaluated(enc, net):
    """What train.py does at --core-every: compiled pieces, and nothing is left changed."""
    model = copy.deepcopy(net).train()
    panel = panel_of(task_of("mc", label="copa"), make_rows("mc", 12, seed=6))
    want = entry_of(net, enc, panel, net.cfg.mu_rec)["centered"]
    calls = []
    model.compile_pieces(backend=lambda graph, inputs: calls.append(1) or graph)
    torch.backends.cuda.matmul.allow_tf32 = True
    before = torch.get_num_threads(), torch.get_rng_state(), random.getstate(), model.core_step
    score = ce.quick_score(model, enc, panel, Place(0, 1, torch.device("cpu")))
    assert score["mean"] == want["mean"]
    assert not calls
    assert model.training
    assert torch.equal(torch.get_rng_state(), before[1])
    assert model.core_step is before[3]
    assert (torch.get_num_threads(), random.getstate()) == (before[0], before[2])
    assert torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False


def test_scoring_is_without_tf32():
    torch.backends.cuda.matmul.allow_tf32 = True
    with exact_products(torch.device("cpu")):
        assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False


def test_an_interrupt_does_not_wait_for_the_next_tasks_texts(enc, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    go = threading.Event()
    tasks = [task_of("mc", 0), task_of("mc", 0, label="next")]
    rows = make_rows("mc", 3)
    panel = panel_of(tasks, rows)
    real = ce.encode_task

    def encode(task, *args):
        if task.label == "next":
            go.wait(10)
        return real(task, *args)

    monkeypatch.setattr(ce, "encode_task", encode)
    monkeypatch.setattr(ce, "run_task", interrupted)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        entry_of(even(enc), enc, panel)
    assert time.monotonic() - start < 5
    go.set()


def test_scripted_model_is_right_where_it_should_be(enc):
    """Each kind of task with a model that knows one fact, and with one that believes the
    opposite."""
    mc = [{"query": "the", "choices": ["cat", "dog"], "gold": 0}]
    mc.append({"query": "the", "choices": ["dog", "cat"], "gold": 1})
    schema = [{"context_options": ["saw the cat", "saw the dog"], "continuation": "run", "gold": 1}]
    lm = [{"context": "the old", "continuation": "red barn"}]
    facts = (("the", " cat"), (" dog", " run"), (" old", " red"), (" red", " barn"))
    lies = (("the", " dog"), (" cat", " run"), (" old", " red"), (" red", " cat"))
    for protocol in ("parcae", "dclm"):
        for kind, rows in (("mc", mc), ("schema", schema), ("lm", lm)):
            for model, right in ((prefer(enc, *facts), 1), (prefer(enc, *lies), 0)):
                found = answers_of(model, enc, task_of(kind, shots=0), rows, protocol)[2]
                assert found["correct"].tolist() == [right] * len(rows)
    lm.append({"context": "the old", "continuation": "red dog"})
    found = answers_of(prefer(enc, *facts), enc, task_of("lm", shots=0), lm, "dclm")[2]
    assert found["correct"].tolist() == [1, 0]


# ---- traps


def test_an_empty_span_in_first_place_wins_and_elsewhere_loses(enc):
    """A choice whose tokens begin another's: the public evaluators average nothing, get NaN, and
    take min and index."""
    a, mat = enc.encode_ordinary(" a"), enc.encode_ordinary(" a mat")
    assert mat[: len(a)] == a
    task = task_of("mc", 0)
    for choices, chosen in ((["a", "a mat"], 0), (["a mat", "a"], 0), (["a mat", "a", "a dog"], 0)):
        for gold in range(len(choices)):
            rows = [{"query": "saw", "choices": choices, "gold": gold}]
            for model in (even(enc), prefer(enc, (" a", " dog"))):
                found = answers_of(model, enc, task, rows)[2]
                assert found["empty"].sum() == 1
                assert len(choices) > 2 or found["answer"].tolist() == [chosen]
                want, _ = slow_task(model, enc, task, panel_of(task, rows), 1, 2)
                assert found["answer"].tolist() == want
    found = answers_of(even(enc), enc, task, rows, "dclm")[2]
    assert found["empty"].sum() == 0  # the whole answer is scored there


def test_equal_scores_go_to_the_first_and_are_counted_unless_the_options_are_the_same(enc):
    lists = (["dog", "cat", "cat"], ["cat", "cat"], ["dog", "run", "cat"])
    rows = [{"query": "the", "choices": choices, "gold": 1} for choices in lists]
    model = prefer(enc, ("the", " cat"))
    for protocol in ("parcae", "dclm"):
        panel_rows = rows if protocol == "dclm" else rows[:1]
        found = answers_of(model, enc, task_of("mc", 0), panel_rows, protocol)[2]
        assert found["answer"].tolist() == [1, 0, 2][: len(panel_rows)]
        assert not found["near_ties"].any()
    ties = answers_of(even(enc), enc, task_of("mc", 0), rows, "dclm")[2]
    assert ties["answer"].tolist() == [0, 0, 0]
    assert ties["near_ties"].tolist() == [1, 0, 1]


def test_dclm_compares_float32_exponentials(enc):
    """Losses past 88 all become infinity, so the first choice wins; the other protocols still see
    the difference."""
    table = torch.zeros(enc.n_vocab, enc.n_vocab)
    (the,), (cat,), (dog,) = (enc.encode_ordinary(t) for t in ("the", " cat", " dog"))
    table[the, 0] = 100
    table[the, dog] = -50
    table[the, cat] = -40
    rows = [{"query": "the", "choices": ["dog", "cat"], "gold": 1}]
    for protocol, answer in (("parcae", 1), ("dclm", 0)):
        found = answers_of(Scripted(table), enc, task_of("mc", 0), rows, protocol)[2]
        assert found["answer"].tolist() == [answer]


def test_blanks_are_kept_by_parcae_and_stripped_by_dclm():
    """On characters as tokens."""

    def encode(text):
        return np.array([ord(c) for c in text], np.int32)

    def joined(text):
        return encode(text.replace(" a", "A"))

    def texts(task, protocol, row, shots, encode=joined):
        solved = []
        for shot in shots:
            pairs = prompts.option_texts(shot, task.kind, protocol)
            solved.append(task.delimiter.join(pairs[shot["gold"]]))
        pairs = prompts.option_texts(row, task.kind, protocol)
        question = prompts.Question(0, pairs, row["gold"], solved)
        found = []
        for tokens, scored in prompts.OPTIONS[protocol](task, question, encode):
            said = "".join(map(chr, tokens))
            found.append((said[:-scored], said[-scored:]))
        return found

    row = {"query": "q \n", "choices": [" x", "y"], "gold": 0}
    shot = {"query": "s\n", "choices": ["n", " m"], "gold": 1}
    task = task_of("mc", 1, "\nAnswer: ")
    stem = "s\n\nAnswer:  m\n\nq \n\nAnswer: "
    assert texts(task, "parcae", row, [shot]) == [(stem, " x"), (stem, "y")]
    stem = "s\nAnswer:  m\nq\nAnswer:"
    assert texts(task, "dclm", row, [shot]) == [(stem, " x"), (stem, " y")]
    assert texts(task, "dclm", row, [], encode) == [("q\nAnswer:", " x"), ("q\nAnswer:", "y")]
    schema = {"context_options": ["a ", "b"], "continuation": "c", "gold": 0}
    task = task_of("schema", 0, "\nAnswer: ")
    assert texts(task, "dclm", schema, []) == [("a ", " c"), ("b", " c")]
    task = task_of("schema", 1)
    assert texts(task, "dclm", schema, [schema]) == [("a  c\na ", " c"), ("a  c\nb", " c")]


def test_an_empty_continuation_is_right_and_named(enc):
    """Parcae: all() of nothing. The delimiter here ends in no blank, so both prompts are the
    same."""
    rows = [{"context": "the cat", "continuation": ""}]
    found = answers_of(even(enc), enc, task_of("lm", 0, "."), rows)[2]
    assert found["correct"].tolist() == [1]
    assert found["empty"].sum() == 1


def test_a_prompt_that_is_no_prefix_is_wrong_and_named(enc):
    rows = [{"context": "the c", "continuation": "at"}]
    found = answers_of(even(enc), enc, task_of("lm", 0, ""), rows)[2]
    assert found["correct"].tolist() == [0]
    assert found["not_prefix"].sum() == 1


def test_answers_longer_than_the_context_are_named(enc, net):
    """parcae slices with negative indices, as the slow loop does; dclm would stop, here what is
    left is scored."""
    long, task = " ".join(CORE_WORDS) * 3, task_of("mc", 0)
    rows = [{"query": "the", "choices": [long + " cat", "No " + long, "Yes"], "gold": 2}] * 4
    found = answers_of(net, enc, task, rows)[2]
    want, _ = slow_task(net, enc, task, panel_of(task, rows), 1234, 2)
    assert found["cut"].sum() == found["cropped"].sum() == 4
    assert found["answer"].tolist() == want
    tokens = np.array([0, 5, *[7] * 51])  # the first scored index becomes 2 - 5 = -3
    assert prompts.crop(tokens, 51, 48, task, "parcae")[1] == 3
    assert answers_of(net, enc, task, rows, "dclm")[2]["cut"].sum() == 4
    lm = [{"context": "the", "continuation": long}]
    for protocol in ("parcae", "dclm", "lambada"):
        assert answers_of(net, enc, task_of("lm", 0), lm, protocol)[2]["cut"].sum() == 1


def test_dclm_averages_over_categories(enc):
    rows = [{"context": "the", "continuation": "cat", "category": "big"}] * 5
    rows = [*rows, {"context": "the", "continuation": "dog", "category": "small"}]
    task = dataclasses.replace(core_tasks.TASKS[1], shots=0, delimiter=" ")
    assert task.label == "jeopardy"
    for protocol, mean in (("dclm", 0.5), ("parcae", 5 / 6)):
        found = entry_of(prefer(enc, ("the", " cat")), enc, panel_of(task, rows, protocol))
        assert found["accuracy"]["mean"] == pytest.approx(mean, abs=1e-7)


def test_lambada_perplexity_is_that_of_the_slow_sum(enc, net):
    rows = [
        {"context": "the cat sat on", "continuation": "bread "},
        {"context": "saw a dog ", "continuation": " barn"},
    ]
    panel = panel_of(core_tasks.LAMBADA, rows, "lambada", name="lambada")
    found, nats = entry_of(net, enc, panel, 3, (7,)), 0.0
    for i, start in enumerate((4, 4)):  # four words; three words and a blank
        word = rows[i]["continuation"].strip()
        whole = enc.encode_ordinary(f"{rows[i]['context']} {word}")
        key = torch.tensor([hash_key(7, FOR_EVAL, 9, i)])
        hidden = net.hidden(torch.tensor([whole[:-1]]), 3, key)
        logp = net.head(hidden).log_softmax(-1)[0]
        for t in range(start, len(whole)):
            nats -= logp[t - 1, whole[t]].item()
    total = core_results.summarise(panel, {"lambada_openai": found})["aggregate"]["mean"]
    assert total == found["perplexity"]["mean"]
    assert total == pytest.approx(math.exp(nats / 2), rel=1e-5)


def test_a_lambada_context_that_is_no_prefix_is_tokenised_without_its_end_blanks():
    """On a tokenizer that joins two blanks to one token."""

    def encode(text):
        return np.array([ord(c) for c in text.replace("  ", "\t")], np.int32)

    for context in ("a b ", "a b"):
        question = prompts.Question(0, [(context, "c")], 0, [])
        ((tokens, scored),) = prompts.lambada_options(core_tasks.LAMBADA, question, encode)
        assert "".join(map(chr, tokens)) == "a b c"
        assert scored == 2


def test_a_diverged_model_has_no_score(enc):
    """NaN would win wherever it comes first, and give a score like any other."""
    for kind in ("mc", "schema", "lm"):
        model = Scripted(torch.full((enc.n_vocab, enc.n_vocab), math.nan))
        rows = make_rows(kind, 9)
        with pytest.raises(ce.NotFiniteError, match="depth 2 is not finite"):
            answers_of(model, enc, task_of(kind), rows)
    rows = [{"context": "the", "continuation": "cat"}]
    hopeless = prefer(enc, ("the", " dog"), strength=1e3)
    panel = panel_of(core_tasks.LAMBADA, rows, "lambada", name="lambada")
    found = entry_of(hopeless, enc, panel)  # e^2000 nats
    assert found["perplexity"]["mean"] == math.inf


# ---- bundles


def test_zip_and_folder_are_the_same_and_lines_end_at_newline_only(tmp_path):
    files = small_core()
    files["world_knowledge/arc_easy.jsonl"][0]["query"] = "one\x85line\u2028 still"
    whole = write_bundle(tmp_path / "b.zip", files)
    with zipfile.ZipFile(whole) as z:
        z.extractall(tmp_path)
    places = (whole, tmp_path, tmp_path / "eval_bundle", tmp_path / "eval_bundle/eval_data")
    panels = [core_tasks.load_panel(place) for place in places]
    for panel in panels:
        assert panel.rows == panels[0].rows
        assert not panel.missing
        assert len(panel.rows) == 22
    assert len({panel.sha256 for panel in panels[1:]}) == 1
    assert panels[0].rows["arc_easy"] == files["world_knowledge/arc_easy.jsonl"]


def test_what_cannot_be_run_is_named(tmp_path, capsys):
    files = small_core()
    del files["commonsense_reasoning/copa.jsonl"]
    files["reading_comprehension/squad.jsonl"] = files["reading_comprehension/squad.jsonl"][:10]
    files["world_knowledge/jeopardy_all.jsonl"] = make_rows("lm", 14, category=True)
    path = write_bundle(tmp_path / "b.zip", files)
    missing = core_tasks.load_panel(path).missing
    assert set(missing) == {"copa", "squad"}
    assert missing["copa"] == "commonsense_reasoning/copa.jsonl is not there"
    assert "10 shots need more than the 10" in missing["squad"]
    assert set(core_tasks.load_panel(path, protocol="dclm").missing) == {"copa"}
    assert "boolq" in core_tasks.load_panel(path, limit=10).missing
    assert "boolq" not in core_tasks.load_panel(path, limit=11).missing


def test_damaged_bundles_are_refused_in_one_line(tmp_path, capsys):
    good = write_bundle(tmp_path / "good.zip", small_core()).read_bytes()
    (tmp_path / "cut.zip").write_bytes(good[: len(good) // 2])
    flipped = bytearray(good)
    flipped[2000] ^= 255
    (tmp_path / "flip.zip").write_bytes(flipped)
    for name in ("cut.zip", "flip.zip"):
        action = lambda: core_tasks.load_panel(tmp_path / name)  # noqa: B023, E731
        refused(capsys, action, name, "not a usable zip")
    refused(capsys, lambda: core_tasks.load_panel(tmp_path / "no.zip"), "--bundle")
    (tmp_path / "empty").mkdir()
    said = "has no task of CORE", "--bundle"
    refused(capsys, lambda: core_tasks.load_panel(tmp_path / "empty"), *said)
    for copy_of in ("a", "b"):
        (tmp_path / "twice" / copy_of / "world_knowledge").mkdir(parents=True)
        (tmp_path / "twice" / copy_of / "world_knowledge" / "arc_easy.jsonl").write_text("{}")
    said = "two files world_knowledge/arc_easy.jsonl", "twice/b/"
    refused(capsys, lambda: core_tasks.load_panel(tmp_path / "twice"), *said)


QUESTION = '"query": "q", "choices": ["a", "b"]'


@pytest.mark.parametrize("line, said", [
    ("{not json", "Expecting property name"),
    ("[1]", "TypeError"),
    ("3", "TypeError"),
    (b'{"a": "\xff"}', "codec can't decode"),
    ('{"query": "q", "choices": ["a"]}', "KeyError: 'gold'"),
    (f'{{{QUESTION}, "gold": 2}}', "gold 2 is no place in the 2 choices"),
    (f'{{{QUESTION}, "gold": -1}}', "gold -1 is no place in the 2 choices"),
    (f'{{{QUESTION}, "gold": true}}', "gold must be int, and is True"),
    ('{"query": "q", "choices": ["a", 3], "gold": 0}', "choices must be texts, and are ['a', 3]"),
    ('{"query": 7, "choices": ["a"], "gold": 0}', "query must be str, and is 7"),
    ('{"query": "q", "choices": [], "gold": 0}', "gold 0 is no place in the 0 choices"),
])  # fmt: skip
def test_bad_lines_are_named_by_file_and_number(tmp_path, capsys, line, said):
    name = "commonsense_reasoning/copa.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    content = f'{{{QUESTION}, "gold": 1}}\n\n'.encode() + line + b"\n"
    path = write_bundle(tmp_path / "b.zip", {name: content})
    refused(capsys, lambda: core_tasks.load_panel(path), f"{name}, line 3", said)


def test_dclm_needs_the_categories_of_its_tasks(tmp_path, capsys):
    name = "world_knowledge/jeopardy_all.jsonl"
    for given, said in (
        ({}, "KeyError: 'category'"),
        ({"category": 3}, "category must be str, and is 3"),
    ):
        rows = [{"context": "c", "continuation": "d"} | given] * 14
        path = write_bundle(tmp_path / "b.zip", {name: rows})
        action = lambda: core_tasks.load_panel(path, protocol="dclm")  # noqa: B023, E731
        refused(capsys, action, f"{name}, line 1", said)
        assert "jeopardy" in core_tasks.load_panel(path).rows  # the others do not read it


def test_the_bundle_is_fetched_once(tmp_path, capsys, monkeypatch):
    """How a download is continued and checked: test_corpus.py."""
    monkeypatch.setattr(core_tasks, "BUNDLE", tmp_path / "data" / "b.zip")
    asked = []

    def fetch_file(url, path, whole):
        asked.append(url)
        if len(asked) == 1:
            return "nobody there"
        write_bundle(path, small_core())
        assert whole(path)
        return None

    monkeypatch.setattr(core_tasks, "fetch_file", fetch_file)
    assert core_tasks.bundle_at("mine.zip") == "mine.zip"
    said = "cannot fetch https://karpathy", "nobody there", "continues", "--bundle"
    refused(capsys, lambda: core_tasks.bundle_at(""), *said)
    for _ in range(2):
        path = core_tasks.bundle_at(None)
    assert len(core_tasks.load_panel(path).rows) == 22
    assert asked == [core_tasks.URL] * 2


# ---- the program


@pytest.fixture
def run(tmp_path, enc, net):
    """A run directory as train.py leaves it, and a bundle."""
    path = tmp_path / "r"
    path.mkdir()
    ranks = [enc.decode_single_token_bytes(i) for i in range(enc.n_vocab - 3)]
    save_tokenizer(path / "tokenizer.json", ranks)
    config = {
        "args": {},
        "model": vars(net.cfg),
        "tokenizer": {
            "path": "data/tokenizer.json",
            "sha256": file_hash(path / "tokenizer.json"),
        },
        "dtype": "bfloat16",
        "data": {"path": "x"},
    }
    (path / "config.json").write_text(json.dumps(config))
    torch.save({"step": 3, "model": net.state_dict()}, path / "step_0000003.pt")
    write_bundle(tmp_path / "b.zip", small_core())
    return path


@pytest.fixture
def start(run, monkeypatch):
    """start(flags) runs core_eval.py on the run, here."""

    def go(*flags, path=run):
        bundle = str(run.parent / "b.zip")
        monkeypatch.setattr(sys, "argv", ["core_eval.py", str(path), "--bundle", bundle, *flags])
        ce.main()

    return go


def results(run, name="core_parcae"):
    return json.loads((run / f"core_{name}.json").read_text())


def write_rows(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))


@pytest.fixture
def encoded(monkeypatch):
    """The labels of the tasks that are run."""
    seen, real = [], ce.encode_task

    def encode(task, *args):
        seen.append(task.label)
        return real(task, *args)

    monkeypatch.setattr(ce, "encode_task", encode)
    return seen


def test_program_says_in_one_line_that_a_diverged_run_has_no_score(start, monkeypatch, capsys):
    def no_number(model, x, targets):
        return torch.full((3, len(targets)), math.nan)

    monkeypatch.setattr(ce, "token_scores", no_number)
    refused(capsys, start, "is not finite: training diverged")


def test_program_writes_results_and_skips_what_is_done(run, start, encoded, capsys):
    flags = "--depth", "2", "--seeds", "5,6"
    start(*flags, "--depth", "1,2")
    file = run / "core_core_parcae.json"
    out = capsys.readouterr().out
    assert "written" in out
    assert "CORE" in out
    first = results(run)
    wanted = {"panel", "protocol", "baselines", "bundle_sha256", "max_per_task", "command", "date"}
    assert wanted <= set(first)
    assert first["dtype"] == "float32"
    record = first["depths"]["2"]
    assert record["aggregate"]["name"] == "CORE"
    assert set(record["aggregate"]["per_seed"]) == {"5", "6"}
    assert len(record["tasks"]) == 22
    assert len(record["categories_fine"]) == 9

    # a second start computes what is missing, and keeps the rest
    encoded.clear()
    start(*flags)
    assert not encoded
    assert results(run)["depths"] == first["depths"]
    part = dict(record, tasks={"copa": record["tasks"]["copa"]})
    file.write_text(json.dumps(dict(first, depths={"2": part})))
    start(*flags)
    assert "copa" not in encoded
    assert len(set(encoded)) == 21
    assert results(run)["depths"]["2"] == record

    # with other settings nothing is taken over, nor lost
    encoded.clear()
    olds = {file.read_bytes()}
    start(*flags, "--max-per-task", "12")
    assert len(set(encoded)) == 22
    assert "another max_per_task; it is kept" in capsys.readouterr().out
    file.write_text(json.dumps({**results(run), "bundle_sha256": "0"}))
    olds.add(file.read_bytes())
    start(*flags, "--max-per-task", "12")
    assert "made with another bundle_sha256" in capsys.readouterr().out
    assert {path.read_bytes() for path in run.glob("*.old-*")} == olds
    file.write_text("{")
    refused(capsys, lambda: start(*flags), "core_core_parcae.json is damaged", "delete it")


def test_edited_code_is_evaluated_anew(run, start, encoded, capsys, monkeypatch):
    start("--seeds", "5")
    encoded.clear()
    monkeypatch.setattr(ce, "network_code", lambda: "of an edited model.py")
    start("--seeds", "5")
    assert len(set(encoded)) == 22
    assert "made with another network_code; it is kept" in capsys.readouterr().out


@pytest.fixture
def another_meanwhile(start, monkeypatch):
    """A second evaluation begins, and ends, after the first has looked for earlier results."""
    found = core_results.earlier

    def earlier(path, header):
        monkeypatch.setattr(ce, "earlier", found)
        kept = found(path, header)
        start("--seeds", "5", "--depth", "3")
        return kept

    monkeypatch.setattr(ce, "earlier", earlier)


def test_evaluations_of_a_run_at_once_keep_each_others_depths(run, start, another_meanwhile):
    start("--seeds", "5", "--depth", "1")
    depths = results(run)["depths"]
    assert [depth for depth in depths if len(depths[depth]["tasks"]) == 22] == ["1", "3"]


def test_of_evaluations_at_once_with_other_settings_one_ends_and_none_loses(
    run, start, another_meanwhile, capsys
):
    refused(capsys, lambda: start("--seeds", "6", "--depth", "3"), "another seeds, now writes")
    assert len(results(run)["depths"]["3"]["tasks"]) == 22

    header, own = results(run), results(run)["depths"]["3"]["tasks"]
    header.pop("depths")
    (run / "core_core_parcae.json").unlink()  # as one that begins meanwhile renames it
    panel = SimpleNamespace(name="own", limit=None, averaged=[])
    records = core_results.merge(run / "core_core_parcae.json", header, panel, {3: own})
    assert records[3]["tasks"] == own


def test_ones_own_task_is_in_no_average_and_reruns_nothing(run, start, encoded, tmp_path, capsys):
    mine = tmp_path / "mine.jsonl"
    write_rows(mine, make_rows("mc", 9))
    flags = "--seeds", "5", "--task", f"{mine}:mc,shots=2,chance=25"
    start("--seeds", "5")
    before = results(run)["depths"]["2"]
    encoded.clear()
    start(*flags)
    (label,) = encoded
    after = results(run)["depths"]["2"]
    assert label.startswith("mine-")
    assert after["aggregate"] == before["aggregate"]
    added = after["tasks"].pop(label)
    assert after["tasks"] == before["tasks"]
    assert added["n"] == 9
    score = added["accuracy"]["mean"]
    assert added["centered"]["mean"] == pytest.approx((score - 0.25) / 0.75)
    encoded.clear()
    capsys.readouterr()
    start(*flags)
    assert not encoded
    assert re.search(rf"{label} +{score:.4f} .*\(kept\)", capsys.readouterr().out)
    write_rows(mine, make_rows("mc", 10))
    start(*flags)  # another file is another task
    assert len(encoded) == 1
    assert label not in encoded
    for settings in ("xx", "mc,shots=x", "mc,chance=200", "mc,many=3", "mc,chance=5,shots=2"):
        bad = f"{mine}:{settings}"
        refused(capsys, lambda: start("--task", bad), f"--task: {bad} is not FILE:KIND")  # noqa: B023
    with pytest.raises(FileNotFoundError):  # one line by run_cli
        start("--task", "no.jsonl:mc")


def test_ones_own_tasks_alone_need_no_bundle(run, start, tmp_path, capsys):
    flags = ["--seeds", "5"]
    for name, count in (("one", 9), ("two", 5)):
        write_rows(tmp_path / f"{name}.jsonl", make_rows("mc", count))
        flags += ["--task", f"{tmp_path}/{name}.jsonl:mc,shots=2,chance=25"]
    own = "--panel", "own", "--bundle", ""
    start(*flags)
    beside = results(run)["depths"]["2"]["tasks"]
    start(*flags, *own)
    alone = results(run, "own_parcae")["depths"]["2"]
    assert alone["tasks"] == {name: beside[name] for name in beside if "-" in name}
    means = [entry["centered"]["mean"] for entry in alone["tasks"].values()]
    assert len(means) == 2
    assert alone["aggregate"]["mean"] == pytest.approx(np.mean(means))
    assert "own tasks" in capsys.readouterr().out
    (tmp_path / "two.jsonl").write_text("")  # too few for its shots: it is left out by name
    start(*flags, *own)
    assert "2 shots need more than the 0 examples" in capsys.readouterr().out
    assert results(run, "own_parcae")["depths"]["2"]["aggregate"]["name"].startswith("1 of the 2")
    refused(capsys, lambda: start(*flags[:2], *flags[4:], *own), "the 0 examples")


def test_nanochat_is_parcae_at_seed_1234(run, start):
    start("--protocol", "nanochat")
    start("--seeds", "1234")
    one = results(run, "core_nanochat")
    other = results(run)
    assert one["depths"] == other["depths"]
    assert one["protocol"] == "nanochat"


def test_two_ranks_give_the_scores_of_one(run):
    flags = run, "--bundle", run.parent / "b.zip", "--protocol", "nanochat", "--depth", "2"
    scores = []
    for ranks in (1, 2):
        run_program("core_eval.py", *flags, ranks=ranks)
        scores.append(results(run, "core_nanochat")["depths"])
        (run / "core_core_nanochat.json").unlink()
    assert scores[0] == scores[1]


class Losses:
    """A model whose loss of a token is the token's id; keeps the shapes and keys it was given."""

    def __init__(self):
        self.shapes = set()
        self.keys = set()

    def losses(self, ids, targets, depths, keys):
        self.shapes.add((tuple(ids.shape), len(keys)))
        self.keys |= set(keys.tolist())
        return {depth: targets.float() * depth for depth in depths}


@pytest.mark.parametrize("batch, ranks, rows", [(1, 1, 20), (7, 1, math.inf), (16, 3, 20)])
def test_validation_feeds_one_shape_and_counts_each_row_once(
    packed, monkeypatch, batch, ranks, rows
):
    """The last batch is filled up; no rank, and no rest, feeds another shape."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: None)  # summed below
    data = PackedData(packed)
    model = Losses()
    sizes = torch.arange(300) % 3  # no bytes for a third of the tokens
    held_out = HeldOut(data, sizes, rows * data.seq_len)
    found = [validate(model, held_out, [1, 2], batch, rank, ranks) for rank in range(ranks)]
    asked = range(min(rows, data.rows("val")))
    targets = data.get("val", asked)[:, 1:]
    for depth in (1, 2):
        loss = sum(of_rank["loss"][str(depth)] for of_rank in found)
        assert loss == pytest.approx(targets.mean() * depth, rel=1e-12)
    if ranks == 1:
        nats = targets[targets % 3 > 0].sum()
        bits = nats / (targets % 3).sum() / math.log(2)
        assert found[0]["bpb"]["1"] == pytest.approx(bits, rel=1e-12)
    assert found[0]["eval_tokens"] == targets.size
    assert model.shapes == {((batch, data.seq_len), batch)}
    assert model.keys == {hash_key(FOR_EVAL, i) for i in asked}  # of the row, not of its place


def test_validation_is_on_the_rows_of_the_run(enc, net, monkeypatch, capsys):
    config = {"tokenizer": {"sha256": "t"}, "data": {"path": "f", "sha256": "d"}}
    for tokens, longest, rows, said in (
        ("other", 48, "d", "does not fit the run"),
        ("t", 49, "d", "--seq-len 48"),
        ("t", 48, "other", "holds other rows"),
    ):
        data = SimpleNamespace(folder="f", seq_len=longest, manifest={"tokenizer_sha256": tokens})
        data.sha256 = lambda rows=rows: rows
        monkeypatch.setattr(ce, "PackedData", lambda path, data=data: data)
        settings = ce.Settings([2], [1])
        refused(capsys, lambda: ce.validation(net, enc, config, settings), said)  # noqa: B023


def test_the_score_of_validation_is_the_mean_over_all_rows_if_it_is_a_number(packed, enc, capsys):
    data = PackedData(packed)
    tokens = {"sha256": data.manifest["tokenizer_sha256"]}
    config = {"tokenizer": tokens, "data": {"path": str(packed), "sha256": data.sha256()}}
    model = Losses()
    model.cfg = SimpleNamespace(seq_len=data.seq_len)
    targets = data.get("val", range(data.rows("val")))[:, 1:]
    settings = ce.Settings([1, 2], [1])  # Losses gives each token its id times the depth
    for depth, record in ce.validation(model, enc, config, settings).items():
        assert record["aggregate"]["mean"] == pytest.approx(targets.mean() * depth, rel=1e-12)
    settings = ce.Settings([math.nan], [1])
    refused(capsys, lambda: ce.validation(model, enc, config, settings), "training diverged")


def test_flags_that_would_have_no_effect_are_refused(run, start, monkeypatch, capsys):
    for flags, said in (
        ("--panel lambada --protocol dclm", "--protocol has no effect on lambada"),
        ("--panel lambada --baselines v1", "--baselines"),
        (f"--panel lambada --task {__file__}:mc", "--task"),
        ("--panel val --seeds 1", "--seeds has no effect on val"),
        ("--panel val --max-per-task 3", "--max-per-task"),
        ("--panel val", "--bundle"),
        (f"--panel own --task {__file__}:mc", "--bundle has no effect on own"),
        ("--protocol nanochat --seeds 5", "--seeds has no effect on nanochat"),
    ):
        refused(capsys, lambda: start(*flags.split()), said)  # noqa: B023
    refused(capsys, lambda: start("--panel", "own", "--bundle", ""), "needs a --task")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"data": None}))
    monkeypatch.setattr(sys, "argv", ["core_eval.py", str(run), "--panel", "val"])
    refused(capsys, ce.main, "config.json names no rows")
    monkeypatch.setattr(
        ce, "validation", lambda *_: {2: {"aggregate": {"name": "x", "mean": 1, "std": 0}}}
    )
    ce.main()
    assert "depth 2: x 1.0000 ± 0.0000\n" in capsys.readouterr().out
    flat = Model(ModelConfig(**SMALL | {"n_core": 0, "vocab_size": config["model"]["vocab_size"]}))
    torch.save({"step": 4, "model": flat.state_dict()}, run / "step_0000004.pt")
    (run / "config.json").write_text(json.dumps(config | {"model": vars(flat.cfg)}))
    refused(capsys, lambda: start("--depth", "4"), "the model has no loop; leave --depth out")


def test_user_mistakes_end_in_one_line(run, start, tmp_path, capsys):
    mistakes = ("--depth", "two"), ("--depth", "0"), ("--depth", "1,10001"), ("--seeds", "1,,2")
    for flag, value in mistakes:
        refused(capsys, lambda: start(flag, value), flag, value.split(",")[-1])  # noqa: B023
    other = tmp_path / "other"
    other.mkdir()
    refused(capsys, lambda: start(path=other), "config.json")
    for file in run.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "tokenizer.json").write_text((run / "tokenizer.json").read_text() + "\n")
    copy_it = "copy data/tokenizer.json there"
    refused(capsys, lambda: start(path=other), "not the tokenizer of the checkpoint", copy_it)
    (other / "tokenizer.json").unlink()
    refused(capsys, lambda: start(path=other), "is not there", copy_it)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"imported": {}}))
    refused(capsys, lambda: start(path=other), "is not there", "import the weights again")
    del config["tokenizer"]
    (other / "config.json").write_text(json.dumps(config))
    refused(capsys, lambda: start(path=other), "KeyError: 'tokenizer'")


@pytest.mark.skipif("EVAL_BUNDLE" not in os.environ, reason="EVAL_BUNDLE is not set")
@pytest.mark.parametrize("protocol", ["parcae", "dclm"])
def test_every_real_task_parses_and_renders(enc, protocol):
    panel = core_tasks.load_panel(os.environ["EVAL_BUNDLE"], "core-extended", protocol)
    assert len(panel.rows) >= 44
    for task in panel.tasks:
        if task.label not in panel.rows:
            continue
        rows = panel.rows[task.label]
        found = options_of(enc, task, rows, protocol)
        asked = prompts.questions(task, rows, protocol, None, 1234)
        assert len(asked) == len(slow_examples(task, rows, protocol))
        slow = slow_rendered(enc, task, panel, 2048)
        for (_, options), (_, _, want) in itertools.islice(zip(found, slow), 20):
            for option, (tokens, _, _) in zip(options, want):
                assert prompts.crop(*option, 2048, task, protocol)[0].tolist() == tokens


def test_other_weights_are_scored_anew_and_so_are_depths_that_are_missing(run, start, net, capsys):
    start("--seeds", "5", "--depth", "2")
    start("--seeds", "5", "--depth", "1,2")
    depths = results(run)["depths"]
    assert len(depths["1"]["tasks"]) == 22
    torch.save({"step": 4, "model": net.state_dict()}, run / "step_0000004.pt")
    start("--seeds", "5", "--depth", "2")
    assert "another checkpoint" in capsys.readouterr().out


def test_baselines_v2_are_those_scores_are_centred_by(run, start):
    start("--seeds", "5", "--baselines", "v2")
    record = results(run)["depths"]["2"]
    entry = record["tasks"]["commonsense_qa"]
    wanted = (entry["accuracy"]["mean"] - 0.403) / 0.597
    assert entry["centered"]["mean"] == pytest.approx(wanted)


def test_the_device_can_be_chosen_as_the_ranks_are_told(monkeypatch):
    asked = []

    def distributed(name):
        asked.append(name)
        sys.exit()

    monkeypatch.setattr(ce, "distributed", distributed)
    for flags in ([], ["--device", "cpu"]):
        monkeypatch.setattr(sys, "argv", ["core_eval.py", "x", *flags])
        with pytest.raises(SystemExit):
            ce.main()
    assert asked == ["auto", "cpu"]


def test_ranks_compare_what_decides_their_work(start, tmp_path, monkeypatch):
    """With other tasks, or a bundle of other rows, they would wait for each other or mix scores."""
    told = {}
    monkeypatch.setattr(ce, "refuse_unlike", lambda own, place: told.update(own))
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"query": "a", "gold": 0, "choices": ["b", "c"]}')
    start("--task", f"{mine}:mc", "--max-per-task", "1", "--depth", "2", "--seeds", "1")
    assert told["task"] == [ce.own_task(f"{mine}:mc").label] and told["depth"] == [2]
    assert told["bundle"] == file_hash(tmp_path / "b.zip")
    assert {"checkpoint", "network_code", "dtype", "seeds", "max_per_task"} <= told.keys()


def test_dclms_shots_do_not_follow_the_seeds(enc, monkeypatch):
    seeds = set()
    real = ce.encode_task

    def encode_task(task, panel, seed, *more):
        seeds.add(seed)
        return real(task, panel, seed, *more)

    monkeypatch.setattr(ce, "encode_task", encode_task)
    panel = panel_of(task_of("mc"), make_rows("mc", 5), "dclm")
    entry_of(even(enc), enc, panel, 2, (7, 8))
    assert seeds == {1234}
    monkeypatch.setattr(sys, "argv", ["core_eval.py", "x"])
    assert ce.parse_args().seeds == [1234, 2345, 3456]


def test_extended_has_cores_average_of_the_22_and_its_own_of_all():
    panel = panel_of(TASKS, [], name="core-extended")
    entries = {}
    for i, task in enumerate(TASKS):
        entries[task.label] = {"centered": core_results.spread({"1": float(i >= 22)})}
    record = core_results.summarise(panel, entries)
    assert (record["core"]["mean"], record["core"]["tasks_total"]) == (0, 22)
    assert record["aggregate"]["mean"] == pytest.approx(24 / 46)
    assert len(record["categories_fine"]) == 9
    assert set(record["categories_ext"]) == set(core_tasks.FAMILIES.values())
