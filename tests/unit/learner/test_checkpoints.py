"""Checkpoints are whole or not there."""

import hashlib
import json
from pathlib import Path

import pytest

from rlightning.errors import ConfigError
from rlightning.learner import Checkpoint, Checkpoints, LearnerStats


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
        "buffer_checkpoint": None,
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


def test_what_was_saved_is_read_again(tmp_path):
    stats = LearnerStats(updates=3, rows=60, env_steps=90, policy_version=4)
    Checkpoints(tmp_path).save(
        stats, b"weights", b"state", mean_return=1.5, buffer_checkpoint="checkpoint-1"
    )
    read = Checkpoint.read(tmp_path / "latest")
    assert (read.weights, read.state, read.mean_return) == (b"weights", b"state", 1.5)
    assert (read.path, read.buffer_checkpoint) == (tmp_path / "4", "checkpoint-1")
    again = read.stats()
    assert (again.updates, again.rows, again.env_steps, again.policy_version) == (3, 60, 90, 4)


def test_a_better_one_takes_the_place_of_the_best_but_never_of_the_latest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints(Path("checkpoints"))

    def kept():
        return sorted(path.name for path in Path("checkpoints").iterdir() if not path.is_symlink())

    for version in (3, 5):
        checkpoints.save(LearnerStats(policy_version=version), b"w", link="best")
    assert kept() == ["5"]
    checkpoints.save(LearnerStats(policy_version=7), b"w", b"state")
    checkpoints.save(LearnerStats(policy_version=7), b"w", link="best")
    assert kept() == ["7"]
    assert Checkpoint.read(Path("checkpoints/best")).state == b"state"
    checkpoints.save(LearnerStats(policy_version=9), b"w", link="best")
    assert kept() == ["7", "9"]


def test_the_last_ones_and_the_best_are_kept_to_go_on_from(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in range(1, 6):
        stats = LearnerStats(policy_version=version)
        of_buffer = None if version == 4 else f"checkpoint-{version}"
        checkpoints.save(stats, b"w", b"state", buffer_checkpoint=of_buffer)
        if version == 2:
            checkpoints.save(stats, b"w", link="best", mean_return=1.0)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["2", "4", "5", "best", "latest"]
    assert checkpoints.of_buffer == ["checkpoint-2", "checkpoint-5"]
    for name in ("2", "4", "5"):
        assert Checkpoint.read(tmp_path / name).state == b"state"
    checkpoints.save(LearnerStats(policy_version=6), b"w", link="best", mean_return=2.0)
    checkpoints.save(LearnerStats(policy_version=7), b"w", b"state")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "6", "7", "best", "latest"]


def damage(path):
    path.write_bytes(b"x" + path.read_bytes()[1:])


def rename_weights(folder, name):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("weights.safetensors", name))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: damage(folder / "weights.safetensors"), "its checksum does not match"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "the manifest is damaged"),
        (lambda folder: (folder / "weights.safetensors").unlink(), "no checkpoint"),
        (
            lambda folder: (folder / "manifest.json").write_text('{"format": 99}'),
            "of format 99, which a newer version wrote",
        ),
        (lambda folder: rename_weights(folder, "/dev/null"), "files: expected weights.safetensors"),
        (lambda folder: rename_weights(folder, "../x"), "files: expected weights.safetensors"),
    ],
)
def test_a_damaged_one_is_refused(tmp_path, spoil, said):
    Checkpoints(tmp_path).save(LearnerStats(policy_version=4), b"weights")
    spoil(tmp_path / "4")
    with pytest.raises(ConfigError, match=said):
        Checkpoint.read(tmp_path / "latest")
