"""What several test files use and is no fixture: made-up documents, running a program, float64 models."""

import json
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)  # of a shell that torchrun started
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}  # the tests' models are too small for two threads

WORDS = ["the ", "loop ", "core", " and", "ing", "\n", "é", "42", ". ", "state ", "x"]


def documents(n, seed=0):
    """n texts of WORDS, of exponentially distributed length, 120 words on average."""
    rng = random.Random(seed)
    texts = []
    for _ in range(n):
        words = rng.choices(WORDS, k=1 + int(rng.expovariate(1 / 120)))
        texts.append("".join(words) + ".")
    return texts


def write_parquet(path, texts):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path)


def write_jsonl(path, texts):
    lines = [json.dumps({"text": text}) for text in texts]
    path.write_text("\n".join(lines))


def command(script, *arguments, ranks=1):
    """The command line of a script (a path under ROOT, or `-m module`), under torchrun where ranks > 1."""
    launch = []
    if ranks > 1:
        local = ["--standalone", "--local-addr=localhost"]  # as in speedrun.sh
        launch = ["-m", "torch.distributed.run", *local, f"--nproc_per_node={ranks}"]
    program = script.split() if str(script).startswith("-m ") else [str(ROOT / script)]
    return [sys.executable, *launch, *program, *map(str, arguments)]


def run_program(script, *arguments, ranks=1, cwd=ROOT, env=ENV, check=True, timeout=300):
    """Runs it to its end; returns the CompletedProcess with .returncode, .stdout and .stderr as text."""
    line = command(script, *arguments, ranks=ranks)
    done = subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def refused(capsys, action, *fragments):
    """action() must end in exit code 2 after one line "error: …", with all fragments in it; returns the line.

    Before it only notes and skipped files may be named.
    """
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        action()
    errors = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert errors[-1].startswith("error: ")
    assert all(line.startswith(("note: ", "skipped: ")) for line in errors[:-1]), errors
    for fragment in fragments:
        assert fragment in errors[-1], errors[-1]
    return errors[-1]


def write_bundle(path, rows_by_file):
    """An evaluation bundle (zip) of {file: rows or raw bytes}; returns its path."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, rows in rows_by_file.items():
            content = rows
            if not isinstance(rows, bytes):
                content = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
            archive.writestr("eval_bundle/eval_data/" + name, content)
    return path


CORE_TEXT = "the cat sat on a mat and saw bad dog run far away from old red barn then ate some good bread Yes No"
CORE_WORDS = CORE_TEXT.split()


def make_rows(kind, n, seed=0):
    """Random CORE rows ("mc", "schema" or "lm") with the blanks, line ends, U+0085 and repeated choices of the real files."""
    rng = random.Random(seed)

    def text(low, high):
        return " ".join(rng.choices(CORE_WORDS, k=rng.randint(low, high)))

    rows = []
    for _ in range(n):
        tail = rng.choice(["", "", " ", "\n", "\x85", "\nAnswer: "])
        if kind == "mc":
            lead = rng.choice(["", "", " "])
            choices = rng.choice(
                [["A", "B", "C", "D"], ["Yes", "No"], [lead + text(1, 4) for _ in range(4)]]
            )
            if rng.random() >= 0.8:
                choices = [*choices[:-1], choices[0]]
            query = text(2, 12) + tail
            row = {"query": query, "choices": choices, "gold": rng.randrange(len(choices))}
        elif kind == "schema":
            end = text(1, 3)
            same = rng.choice(["", " " + text(1, 2)])
            options = [text(2, 5) + same, text(2, 5) + same]
            row = {"context_options": options, "continuation": end, "gold": rng.randrange(2)}
        else:
            context = text(2, 12) + tail
            row = {"context": context, "continuation": rng.choice(["", "", " "]) + text(1, 2)}
        rows.append(row)
    return rows


def small_core():
    """Every CORE file, 14 rows each: enough for ten shots."""
    from looped.core_tasks import TASKS

    return {t.file: make_rows(t.kind, 14, seed=t.index) for t in TASKS[:22]}


def gradients(model, loss):
    """{name: gradient} of every parameter, zeros where there is none."""
    import torch

    model.zero_grad()
    loss.backward()
    found = {}
    for name, p in model.named_parameters():
        found[name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
    return found


def assert_same_gradients(a, b, tolerance=2e-5):
    for name in a:
        assert (a[name] - b[name]).norm() <= tolerance * b[name].norm() + 1e-6, name


def small_model(cfg, noise=0.05, seed=0):
    """A float64 model of which every weight matters (zeros would hide errors); noise 0 keeps the initial weights."""
    import torch

    from model import Model

    model = Model(cfg)
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale = 6 * noise if name.startswith("mechanism.") else noise
            p.add_(scale * torch.randn(p.shape, generator=generator))
    model.dtype = torch.float64
    return model.double()


def token_batch(cfg, rows=6, seed=1):
    """Random ids and targets (rows, T), and keys."""
    import torch

    from looped.randomness import hash_key

    generator = torch.Generator().manual_seed(seed)
    block = torch.randint(0, cfg.vocab_size, (rows, cfg.seq_len + 1), generator=generator)
    keys = torch.tensor([hash_key(7, i) for i in range(rows)])
    return block[:, :-1], block[:, 1:], keys


def check_against_oracle(model, n, k):
    """Loss, every gradient and the logged norms of a batch of depths n + k: the model's and the slow network's."""
    from oracle import Oracle

    deepest_first = (-(n + k)).argsort(kind="stable")
    n, k = n[deepest_first], k[deepest_first]
    ids, targets, keys = token_batch(model.cfg, len(n))
    loss, stats = model.loss(ids, targets, keys, n, k)
    oracle = Oracle(model.cfg, model.state_dict())
    want, norms = oracle.loss(ids, targets, keys, n, k)
    assert abs(loss - want) < 1e-6 * want
    wanted = oracle.gradients(want)
    for name, grad in wanted.items():
        assert grad.norm() > 0, f"{name}: an error would not be seen"
    assert_same_gradients(gradients(model, loss), wanted, 1e-5)
    for name in stats.keys() & norms.keys():
        assert abs(stats[name] - norms[name]) < 1e-5 * norms[name], name
