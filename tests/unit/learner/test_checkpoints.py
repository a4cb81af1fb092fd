"""Checkpoints are whole or not there."""

import hashlib
import json

import pytest

from rlightning.learner import Checkpoints, LearnerStats


def test_a_checkpoint_holds_weights_and_a_manifest(tmp_path):
    folder = tmp_path / "checkpoints"
    Checkpoints(folder).save(
        LearnerStats(updates=3, rows=60, env_steps=90, policy_version=4), b"weights"
    )
    assert (folder / "4" / "weights.safetensors").read_bytes() == b"weights"
    assert json.loads((folder / "4" / "manifest.json").read_text()) == {
        "format": 2,
        "policy_version": 4,
        "updates": 3,
        "env_steps": 90,
        "rows": 60,
        "mean_return": None,
        "buffer_snapshot": None,
        "files": {"weights.safetensors": hashlib.sha256(b"weights").hexdigest()},
    }
    assert sorted(path.name for path in folder.iterdir()) == ["4", "latest"]


def test_latest_points_to_the_last_one(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for version in (4, 12):
        checkpoints.save(LearnerStats(policy_version=version), b"%d" % version)
    assert (tmp_path / "latest" / "weights.safetensors").read_bytes() == b"12"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["12", "4", "latest"]


def test_the_same_checkpoint_is_written_once(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(LearnerStats(policy_version=4), b"weights")
    written = (tmp_path / "4").stat().st_ino
    checkpoints.save(LearnerStats(policy_version=4), b"weights")
    assert (tmp_path / "4").stat().st_ino == written


def test_a_checkpoint_that_another_run_left_is_replaced(tmp_path):
    Checkpoints(tmp_path).save(LearnerStats(policy_version=4), b"old")
    Checkpoints(tmp_path).save(LearnerStats(policy_version=4), b"new")
    assert (tmp_path / "latest" / "weights.safetensors").read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "latest"]


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(LearnerStats(policy_version=1), b"1")

    def full(path, data):
        raise OSError("no space left")

    monkeypatch.setattr("rlightning.learner.checkpoints.write_atomically", full)
    with pytest.raises(OSError, match="no space"):
        checkpoints.save(LearnerStats(policy_version=2), b"2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "latest"]
    assert (tmp_path / "latest").resolve().name == "1"
