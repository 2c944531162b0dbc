"""Checkpoints: what is written, and what a failure on the way leaves."""

import errno
import os
import stat

import pytest
import torch

from looped import checkpoint
from looped.checkpoint import (
    checkpoints,
    checksum_file,
    join_writer,
    newest_checkpoint,
    save_checkpoint,
    set_aside_newer,
    write_checkpoint,
)
from looped.files import write_atomic
from model import PRESETS, Model
from muon import AdamW, Optimizer


def test_a_save_is_a_copy_and_its_error_is_raised_by_the_next(tmp_path, monkeypatch):
    model = Model(PRESETS["nano"])
    model.init_weights(0)
    optimizer = Optimizer([(AdamW(), list(model.named_parameters()))])
    ((_, buffer),) = optimizer.buffers
    for moment in buffer.state.values():
        moment.fill_(1)
    kept = []
    monkeypatch.setattr(
        checkpoint, "write_checkpoint", lambda path, state, keep: kept.append(state)
    )
    save_checkpoint(tmp_path, 1, model, optimizer, rank=0)
    join_writer()
    for tensor in (buffer.data, *buffer.state.values()):  # what the next step would do
        tensor.zero_()
    (state,) = kept
    assert state["model"]["wte.weight"].all()
    assert state["optimizer"]["first"]["wte.weight"].all()

    def full(path, state, keep):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_checkpoint", full)
    save_checkpoint(tmp_path, 2, model, optimizer, rank=0)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, 3, model, optimizer, rank=0)


def test_damaged_checkpoints_are_set_aside_and_whole_ones_are_not(tmp_path):
    for step in (1, 2, 3):
        write_checkpoint(tmp_path / f"step_000000{step}.pt", {}, keep_every=1)
    for step in (2, 3):
        (tmp_path / f"step_000000{step}.pt").write_bytes(b"damaged")
    (tmp_path / "step_0000001.pt.sha256").unlink()
    newest = newest_checkpoint(tmp_path)
    set_aside_newer(tmp_path, newest)
    assert checkpoints(tmp_path) == [newest] == [tmp_path / "step_0000001.pt"]
    assert len(list(tmp_path.glob("*.damaged"))) == 2
    set_aside_newer(tmp_path, None)
    assert not checkpoints(tmp_path)


def test_a_save_that_fails_leaves_the_same_steps_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "step_0000001.pt"
    write_checkpoint(path, {"step": torch.tensor(1)})
    before = path.read_bytes()

    def full(state, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(path, {})
    assert path.read_bytes() == before and newest_checkpoint(tmp_path) == path


def test_no_checksum_is_of_another_file(tmp_path, monkeypatch):
    """Killed between a checkpoint and its checksum, it counts as whole; checksums go with their files."""
    path = tmp_path / "step_0000001.pt"
    checksum_file(path).write_text("of a damaged one")

    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "file_hash", killed)
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(path, {"step": torch.tensor(1)})
    assert newest_checkpoint(tmp_path) == path
    for step in (2, 3, 4):
        write_checkpoint(tmp_path / f"step_000000{step}.pt", {})
    assert len(list(tmp_path.glob("*.sha256"))) == len(list(tmp_path.glob("*.pt"))) == 2


def test_a_file_system_that_does_not_flush_folders_is_borne(tmp_path, monkeypatch):
    flush = os.fsync

    def files_alone(number):
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        flush(number)

    monkeypatch.setattr(os, "fsync", files_alone)
    write_atomic(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"
