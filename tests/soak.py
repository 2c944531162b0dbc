"""DETAILS.md's "What happens when …", tried by force: killed processes, full disks, mutated inputs, dead ranks.

    python tests/soak.py [--quick] [--only NAME]      # an hour; prints rows for results/soak.md

Programs run in forked children of this process, which has torch loaded: their main() without seconds of start-up.
Several ranks run under torchrun.
"""

import argparse
import contextlib
import copy
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

# ruff: noqa: E402
import numpy as np
import torch
from helpers import command, documents, naive_pack, write_parquet

import dataloader
import train
from looped import checkpoint, tokenizer
from looped.console import run_cli
from looped.core_tasks import load_panel
from looped.files import file_hash, write_checked
from looped.machine import Place, git, machine_name
from model import PRESETS, load_run, parameter_count
from tokenizer_train import train_bpe

FLAGS = (
    "--vocab-size 300 --seq-len 32 --d-model 32 --d-mlp 64 --mu-rec 4 --batch-size 12 --dtype float32 --compile off "
    f"--eval-tokens 320 --eval-depths 1,4 --eval-every 7 --tokens {20 * 12 * 32} --save-every 2"
).split()


def start(program, argv, said, largest_file=resource.RLIM_INFINITY):
    """A forked process that runs program(argv) as its script would. said: the file of all it prints."""

    def work():
        with open(said, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
        run_cli(partial(program, argv))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def call(*arguments):
    """start(), to its end -> (exit code, all that was printed)."""
    process = start(*arguments)
    process.join()
    return process.exitcode, Path(arguments[2]).read_text(errors="replace")


def says(said, message):
    """Whether a program's last line is this error; before it nothing may be a traceback."""
    last = said.strip().splitlines()[-1]
    return "Traceback" not in said and "error: " in last and message in last


def training(here, run, *more):
    return ["--data", str(here / "rows"), "--out", str(run), *FLAGS, "--resume", *more]


def packing(here, out, text="text"):
    line = f"pack --texts {here / text} --tokenizer {here}/tokenizer.json --out {out} --seq-len 32 --workers 1"
    return line.split()


def last_checkpoint(run):
    return max(run.glob("step_*.pt"))


def state_of(folder):
    """What a continued program must share with an uninterrupted one: rows, checkpoints, log, to the last bit.

    The log, {(kind, step): record}, is without what the clock gives, and without a line that a kill cut off.
    """
    state = {}
    for path in [*folder.glob("*.npy"), *folder.glob("step_*")]:
        state[path.name] = path.read_bytes()
    for line in (folder / "log.jsonl").open() if (folder / "log.jsonl").exists() else ():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            for name in ("tok_s", "ms", "mem_gb", "time"):
                record.pop(name, None)
            if record["kind"] != "start":
                state[record["kind"], record["step"]] = record
    return state


def make_texts(here):
    (here / "text").mkdir()
    for i in range(4):
        texts = documents(300, seed=i, mean=20)
        write_parquet(here / "text" / f"s{i}.parquet", texts, row_group_size=100)
    ranks = train_bpe(iter(documents(200, seed=9)), 300)
    tokenizer.save_tokenizer(here / "tokenizer.json", ranks)


def prepare(here):
    """Text, tokenizer, rows and an uninterrupted run; in children, whose threads would not survive a fork."""
    parameter_count(PRESETS["nano"])  # loads the rest of torch
    jobs = (
        (make_texts, here),
        (dataloader.main, packing(here, here / "rows")),
        (train.main, training(here, here / "whole")),
    )
    for program, argv in jobs:
        code, said = call(program, argv, here / "said")
        assert code == 0, said


# ---- processes killed, disks full


@dataclass
class Work:
    """A program that makes a folder, and the folder that it made undisturbed."""

    program: object
    argv: list[str]
    out: Path
    whole: Path


def works(here, name):
    run = here / f"{name}-run"
    rows = here / f"{name}-rows"
    yield Work(train.main, training(here, run), run, here / "whole")
    yield Work(dataloader.main, packing(here, rows), rows, here / "rows")


def kills(here, quick):
    """kill -9 at random moments of training and of packing, half of them while a file is being written"""
    rng = random.Random(1)
    seen = Counter()
    count = 6 if quick else 60
    for work in works(here, "killed"):
        kills = 0
        while kills < count or work.out.exists():
            process = start(work.program, work.argv, here / "said")
            # after so many kills it may come to its end
            process.join(rng.expovariate(1) if kills < count else None)
            writing = rng.random() < 0.5
            while writing and process.is_alive() and not any(work.out.glob(".*.tmp")):
                time.sleep(0.001)
            process.kill()
            process.join()
            if process.exitcode == -signal.SIGKILL:
                kills += 1
                seen[f"{work.whole.name}: kills"] += 1
                seen[f"{work.whole.name}: kills inside a file"] += any(work.out.glob(".*.tmp"))
            else:
                seen[f"{work.whole.name}: ends"] += 1
                assert state_of(work.out) == state_of(work.whole), (here / "said").read_text()
                shutil.rmtree(work.out)
    return f"{dict(seen)}; every end equals the uninterrupted one: checkpoints and log, rows"


def full_disk(here, quick):
    """no file may outgrow a limit (RLIMIT_FSIZE), during training and packing"""
    count = 3 if quick else 15
    refused = 0
    for work in works(here, "full"):
        for limit in np.geomspace(1000, 400_000, count).astype(int).tolist():
            code, said = call(work.program, work.argv, here / "said", limit)
            assert code == 0 or says(said, "File too large"), said
            assert not list(work.out.glob(".*.tmp"))
            refused += code != 0
        code, said = call(work.program, work.argv, here / "said")
        assert state_of(work.out) == state_of(work.whole), said
    return f"{count} limits each: {refused} times one line, nothing half written; both continued to the same end"


# ---- mutated inputs: a case ends with the right result, or raises SystemExit after one line

# fmt: off
NASTY = (None, True, -1, 0, 1, 2**31, 2**63, 1e308, math.nan, "", "x", "../../x", "\0", "é" * 99, [], [[]], {})
WORDS = (b"null", b"-1", b"0", b"1e999", b"9" * 20, b"[]", b"{}", b'"', b"\0", b"\xff\xfe", b"\n", b"NaN")
VALUES = ("0", "-1", "2", "7", "1e9", "-1e-9", "1e308", "nan", "inf", "x", "0.5", "9" * 20, "../x", "é", "1,2", ",", "", " ")
# fmt: on


def mutate(raw, rng):
    """Bytes with one to four accidents."""
    raw = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(raw) + 1)
        end = min(len(raw), at + rng.choice((1, 4, 64, len(raw))))
        flipped = raw[at:end]
        if flipped:
            flipped[0] ^= 1 << rng.randrange(8)
        other = (flipped, flipped, b"", rng.randbytes(end - at), raw[at:end] * 2, rng.choice(WORDS))
        raw[at:end] = rng.choice(other)
    return bytes(raw)


def mutate_json(data, rng):
    """A JSON value with one of its entries replaced or dropped."""
    data = copy.deepcopy(data)
    node = data
    while True:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        inner = node[key]
        if not inner or not isinstance(inner, dict | list) or rng.random() < 0.3:
            node[key] = copy.deepcopy(rng.choice(NASTY))
            if rng.random() < 0.2:
                del node[key]
            return data
        node = inner


def mutate_file(path, rng, write):
    """Alters the bytes half of the time, else what the JSON says, written by write(path, data)."""
    good = path.read_bytes()
    if rng.random() < 0.5:
        path.write_bytes(mutate(good, rng))
    else:
        data = json.loads(good)
        data.pop("checksum", None)
        write(path, mutate_json(data, rng))


def fresh(source, folder):
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(source, folder)


def case_jsonl(here, rng):
    """Its rows must be those of the texts that can be read in it."""
    folder = fresh(here / "text", here / "in")
    for path in sorted(folder.iterdir())[:3]:
        path.unlink()
    lines = [{"text": text} for text in documents(60, seed=5, mean=20)]
    raw = "\n".join(map(json.dumps, mutate_json(lines, rng))).encode()
    if rng.random() < 0.5:
        raw = mutate(raw, rng)
    (folder / "a.jsonl").write_bytes(raw)
    shutil.rmtree(here / "out", ignore_errors=True)
    dataloader.main(packing(here, here / "out", "in"))
    enc = tokenizer.load_tokenizer(here / "tokenizer.json")
    ids = []
    for line in raw.split(b"\n"):
        with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
            line = line.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
            text = json.loads(line)["text"]
            if isinstance(text, str) and text.strip():
                ids.append([enc.encode_single_token(tokenizer.BOS), *tokenizer.encode(enc, text)])
    rows = np.load(here / "out" / "shard_00000.npy").tolist()
    assert rows == naive_pack(ids, 33, False, 1000)[0], "other rows"


def case_parquet(here, rng):
    folder = fresh(here / "text", here / "in")
    path = folder / "s1.parquet"
    path.write_bytes(mutate(path.read_bytes(), rng))
    dataloader.main(packing(here, fresh(here / "rows", here / "out"), "in"))
    rows_in(here / "out")


def rows_in(folder):
    """The rows, training and validation, of a packed folder."""
    dataloader.PATIENCE = 0.1
    data = dataloader.PackedData(folder, check=(0, 1))
    stream = data.get("train", data.stream_ids(0, 0, data.rows("train")))
    return set(map(bytes, [*stream, *data.get("val", range(data.rows("val")))]))


def case_rows(here, rng):
    folder = fresh(here / "rows", here / "bad")
    if rng.random() < 0.5:
        path = folder / rng.choice(("shard_00001.npy", "val.npy"))
        path.write_bytes(mutate(path.read_bytes(), rng))
    else:
        mutate_file(folder / "manifest.json", rng, write_checked)
    assert rows_in(folder) <= rows_in(here / "rows"), "rows that were never packed"


def settled(argv):
    """-> the settings that train.py makes of the flags, and the network."""
    args = train.parse_args(argv)
    cfg = train.model_config(args)
    train.settle(args, cfg, train.recipe_of(args.preset), 1)
    return args, cfg


def case_checkpoint(here, rng):
    """With its checksum, a damaged one is passed over; without, it is read or refused, and nothing in it is run."""
    run = fresh(here / "whole", here / "bad")
    new = last_checkpoint(run)
    good = new.read_bytes()
    new.write_bytes(mutate(good, rng))
    marked = rng.random() < 0.5
    if not marked:
        checkpoint.checksum_file(new).unlink()
    found = checkpoint.newest_checkpoint(run)
    whole = new.read_bytes() == good
    assert (found == new) == (whole or not marked), "a damaged checkpoint was taken"
    place = Place(0, 1, torch.device("cpu"))
    model, _, _ = train.build(*settled(FLAGS), None, found, place, compiled=False)
    if marked:
        want = torch.load(here / "whole" / found.name, weights_only=True)["model"]
        torch.testing.assert_close(dict(model.state_dict()), dict(want), rtol=0, atol=0)


def case_config(here, rng):
    run = fresh(here / "whole", here / "bad")
    file = run / "config.json"
    mutate_file(file, rng, lambda path, data: path.write_text(json.dumps(data)))
    before = file.read_bytes()
    # the two that the programs which evaluate put into one line
    with contextlib.suppress(FileNotFoundError, ValueError):
        _, cfg, _ = load_run(run)
        saved = torch.load(last_checkpoint(run), weights_only=True)
        assert asdict(cfg) == saved["config"], "another model"
    try:
        train.main(training(here, run, "--stop-at", "1"))
    finally:
        assert file.read_bytes() == before, "written over"


def training_flags():
    """The argparse actions of train.py's flags, but those that say where."""
    with mock.patch.object(argparse.ArgumentParser, "parse_args", lambda parser, _: parser._actions):  # fmt: skip
        actions = train.parse_args()
    where = {"--help", "--out", "--resume", "--data", "--bundle"}
    return [action for action in actions if not where & set(action.option_strings)]


def case_flags(here, rng):
    """One to three flags with odd values; what is accepted, and small, must train a step."""
    run = here / "bad"
    shutil.rmtree(run, ignore_errors=True)
    argv = training(here, run, "--bundle", str(here / "none"), "--stop-at", "1")
    for action in rng.sample(training_flags(), rng.choice((1, 1, 2, 3))):
        argv.append(rng.choice(action.option_strings))
        if action.nargs is None:
            argv.append(str(rng.choice([*VALUES, *(action.choices or ())])))
    args, cfg = settled(argv)
    deepest = max(args.eval_depths)
    work = parameter_count(cfg) * args.batch_size * cfg.mu_rec * deepest
    if work < 1e9 and args.eval_tokens < 1e4 and args.compile == "off":
        train.main(argv)


CASES = (case_jsonl, case_parquet, case_rows, case_checkpoint, case_config, case_flags)


def judge(case, here, rng):
    """-> what became of a case: right, refused in one line, or what is wrong."""
    with open(here / "stderr", "w+") as said, contextlib.redirect_stderr(said):
        try:
            case(here, rng)
        except SystemExit as e:
            text = (here / "stderr").read_text()
            fine = says(text, "") or "no finite loss" in text
            return "refused" if fine and e.code in (1, 2) else f"exit code {e.code}: {text}"
        except BaseException:
            return traceback.format_exc()[-1500:]
    return "right"


def judge_cases(here, count):
    with open(here / "judged", "w") as file:
        for case in CASES:
            for i in range(count):
                signal.alarm(30)
                result = judge(case, here, random.Random(f"{case.__name__} {i}"))
                print(json.dumps([case.__name__, i, result]), file=file, flush=True)


def mutations(here, quick):
    """seeded mutations of every input: refused in one line or the right result, within 30 s"""
    code, said = call(partial(judge_cases, here), 20 if quick else 250, here / "said")
    judged = [json.loads(line) for line in (here / "judged").open()]
    findings = [row for row in judged if row[2] not in ("right", "refused")]
    assert code == 0 and not findings, (said[-1500:], judged[-1], findings)  # -14: too long
    return (
        f"{len(judged)} inputs: {dict(Counter(f'{name} {result}' for name, _, result in judged))}"
    )


# ---- hostile inputs


class Payload:
    """Unpickled, it runs a command."""

    def __init__(self, line):
        self.line = line

    def __reduce__(self):
        return os.system, (self.line,)


def hostile(here, quick):
    """archives with paths that lead out of them, or a symbolic link; checkpoints that run a command"""
    link = "eval_data/world_knowledge/arc_easy.jsonl"
    names = ("../evil.jsonl", "/tmp/evil.jsonl", "..\\evil.jsonl", "C:\\evil.jsonl", link)
    for name in names:
        info = zipfile.ZipInfo(name)
        info.external_attr = 0o120777 << 16 if name == link else 0
        with zipfile.ZipFile(here / "evil.zip", "w") as archive:
            archive.writestr(info, "/etc/passwd")
        code, said = call(load_panel, here / "evil.zip", here / "said")
        assert code == 2 and says(said, ""), said
    payload = Payload(f"touch {here}/pwned")
    torch.save({"step": 1, "model": payload}, here / "evil.pt")
    run = fresh(here / "whole", here / "hostile")
    new = last_checkpoint(run)
    for content in (pickle.dumps(payload), (here / "evil.pt").read_bytes()):
        new.write_bytes(content)
        checkpoint.checksum_file(new).write_text(file_hash(new))
        code, said = call(train.main, training(here, run), here / "said")
        assert code == 2 and says(said, "is not a checkpoint"), said
        with contextlib.suppress(ValueError):
            load_run(run)
            raise AssertionError("loaded")
    assert not (here / "pwned").exists()
    return f"{len(names)} archives and 2 checkpoints refused in one line, nothing unpacked, nothing run"


# ---- several ranks


def starts(here, quick):
    """torchrun of 4 ranks to its end: 4 steps, checkpoint, validation; a rank that aborts says where"""
    seen = Counter()
    for i in range(2 if quick else 20):
        argv = training(here, here / f"start-{i}", "--tokens", str(4 * 12 * 32))
        line = command("train.py", *argv, ranks=4)
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=900)
        aborted = "SIGABRT" in done.stderr
        seen["starts"] += 1
        seen["SIGABRT"] += aborted
        seen["other failures"] += done.returncode != 0 and not aborted
        if done.returncode:
            print(done.stderr, flush=True)
    assert seen["SIGABRT"] + seen["other failures"] == 0, seen
    return f"{dict(seen)}; load {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores"


def start_ranks(here, world, *more):
    """A training's ranks, started without torchrun, which would end them; what rank r prints goes to said-r."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for rank in range(world):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        argv = training(here, here / "ranks", "--tokens", "1e7", "--eval-every", "99999", *more)
        with mock.patch.dict(os.environ, {name: str(value) for name, value in place.items()}):
            processes.append(start(train.main, argv, here / f"said-{rank}"))
    return processes


def lose_rank(here, number):
    """Three ranks, one gets a signal; -> after how many seconds the others had ended, and what one said."""
    processes = start_ranks(here, 3)
    while not list((here / "ranks").glob("step_*.pt")):
        assert processes[0].is_alive(), (here / "said-0").read_text()
        time.sleep(0.05)
    os.kill(processes[1].pid, number)
    began = time.time()
    for rank in (0, 2):
        processes[rank].join(600)
        said = (here / f"said-{rank}").read_text()
        assert processes[rank].exitcode == 1 and says(said, "another rank ended or hangs"), said
        assert re.search("last checkpoint: .*--resume continues", said), said
    processes[1].kill()
    return f"after {time.time() - began:.1f} s: {said.splitlines()[-1]}"


def dead_rank(here, quick):
    """three ranks, one killed: the others end with a message, and two ranks continue the run"""
    result = lose_rank(here, signal.SIGKILL)
    last = checkpoint.step_of(last_checkpoint(here / "ranks"))
    for process in start_ranks(here, 2, "--stop-at", str(last + 4)):
        process.join()
        assert process.exitcode == 0, (here / "said-0").read_text()
    shutil.rmtree(here / "ranks")
    return result


def hung_rank(here, quick):
    """three ranks, one stopped (SIGSTOP): the others end after looped.machine.HANG"""
    return "left out" if quick else lose_rank(here, signal.SIGSTOP)


TRIALS = (kills, full_disk, mutations, hostile, starts, dead_rank, hung_rank)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few cases")
    names = [trial.__name__ for trial in TRIALS]
    parser.add_argument("--only", choices=names, help="one of them")
    args = parser.parse_args()
    commit = (git("rev-parse", "HEAD") or "no git")[:7]
    where = f"{date.today()}, {commit}, torch {torch.__version__}, {machine_name()}"
    failed = False
    memory_disk = "/dev/shm" if Path("/dev/shm").is_dir() else None  # fsync costs nothing there
    with tempfile.TemporaryDirectory(dir=memory_disk) as folder:
        prepare(Path(folder))
        for trial in TRIALS:
            if args.only in (None, trial.__name__):
                began = time.time()
                try:
                    result = trial(Path(folder), args.quick).replace(folder, "…")
                except Exception:
                    failed = True
                    result = f"FAILED: {traceback.format_exc()}"
                seconds = time.time() - began
                print(f"| {trial.__doc__} | {result} | {seconds:.0f} | {where} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
