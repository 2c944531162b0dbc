"""Numbers on the command line, errors from outside, and what run_cli makes of them."""

import math
import subprocess
import sys
from functools import partial

import pytest
from helpers import ROOT, refused

from looped import console


@pytest.mark.parametrize("kind, good, bad", [
    ("positive_int", {"1": 1, "300": 300}, "0 -7 1.5 x nan 1e3"),
    ("non_negative_int", {"0": 0}, "-1 0.5"),
    ("positive_float", {"1e-9": 1e-9, "2": 2.0}, "0 -1 nan inf x"),
    ("non_negative_float", {"0": 0.0}, "-1e-9 nan"),
    ("fraction", {"0": 0.0, "0.5": 0.5, "1": 1.0}, "1.01 -0.1 nan"),
])  # fmt: skip
def test_numbers_of_the_command_line(kind, good, bad, capsys):
    parser = console.Parser(description="about it")
    parser.add_argument("--n", type=getattr(console, kind))
    for text, value in good.items():
        assert parser.parse_args(["--n", text]).n == value
    for text in bad.split():
        refused(capsys, partial(parser.parse_args, [f"--n={text}"]), f"--n: {text} is not a")


def test_what_comes_from_outside_ends_in_one_line(tmp_path, capsys):
    def damaged():
        with console.outside("x.json is damaged", "delete it"):
            math.sqrt(-1)

    said = refused(capsys, damaged, "x.json is damaged (ValueError: ")
    assert said.endswith("; delete it")
    with pytest.raises(KeyboardInterrupt), console.outside("x", "y"):
        raise KeyboardInterrupt
    missing = tmp_path / "nowhere"
    refused(capsys, lambda: console.run_cli(missing.read_bytes), f"{missing} No such file")


def test_more_files_than_a_shell_begins_with_can_be_open(tmp_path):
    program = (
        "from looped.console import run_cli\n"
        "run_cli(lambda: print(len([open('/dev/null') for _ in range(300)])))"
    )
    line = f'ulimit -Sn 100 && "{sys.executable}" -c "{program}"'
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "300\n", done.stderr


def test_where_the_system_caps_what_it_calls_unlimited_more_files_can_be_open(monkeypatch):
    """As macOS does."""
    limits = [256, 2**63 - 1]

    def setrlimit(which, new):
        if new[0] > 10_240:
            raise ValueError("current limit exceeds maximum limit")
        limits[:] = new

    monkeypatch.setattr(console.resource, "getrlimit", lambda which: tuple(limits))
    monkeypatch.setattr(console.resource, "setrlimit", setrlimit)
    console.run_cli(lambda: None)
    assert limits == [10_240, 2**63 - 1]
    limits[:] = [20_000, 2**63 - 1]
    console.run_cli(lambda: None)
    assert limits[0] == 20_000


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_neither_fail_nor_give_their_number_to_a_file(closed, tmp_path):
    program = (
        "import faulthandler, os, signal, sys\n"
        "from looped.console import run_cli\n"
        "def main():\n"
        "    faulthandler.enable(sys.__stderr__)\n"
        "    file = open(sys.argv[1], 'w')\n"
        "    print(file.fileno() > 2, file=file, flush=True)\n"
        "    print('nowhere'), os.write(1, b'nowhere'), os.write(2, b'nowhere')\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "run_cli(main)"
    )
    line = f'exec "{sys.executable}" -c "$0" "$1" {closed}'
    file = tmp_path / "file"
    done = subprocess.run(["bash", "-c", line, program, file], cwd=ROOT, capture_output=True)
    assert (done.returncode, file.read_text()) == (130, "True\n"), done.stderr


def test_waiting_has_an_end(capsys):
    asked = []

    def third_time():
        asked.append(0)
        return len(asked) == 3

    console.wait_until(third_time, 0.1, "it")
    refused(capsys, lambda: console.wait_until(lambda: False, 0.05, "it"), "waited 0.05 s for it")
    refused(capsys, lambda: console.wait_until(lambda: False, 9, "it", [15]), "ended by a signal")


def test_a_nodes_first_rank_speaks_for_all(monkeypatch, capsys):
    for rank, said in (("1", ""), ("0", "error: a bad flag\n")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as end:
            console.refuse("a bad flag")
        assert end.value.code == 2 and capsys.readouterr().err == said
