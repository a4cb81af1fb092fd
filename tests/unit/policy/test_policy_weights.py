"""Weights as bytes, in a directory, and back into a policy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlightning.errors import ConfigError, InvalidRequestError
from rlightning.policy import weight_store
from rlightning.policy.weight_store import Weights, WeightStore, write_atomically
from rlightning.policy.weights import (
    check_numbers,
    check_weights,
    dump_weights,
    parse_weights,
)


def test_bytes_bring_every_tensor_back() -> None:
    shared = torch.arange(6.0)
    tensors = {
        "actor.weight": torch.randn(3, 2).t(),
        "actor.bias": torch.zeros(3, dtype=torch.bfloat16),
        "step": torch.tensor(7),
        "tied.a": shared,
        "tied.b": shared,
    }
    back = parse_weights(dump_weights(tensors))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


@pytest.mark.parametrize(
    "data", [b"", b"not weights", b"\xff" * 64, b"\x08" + b"\0" * 7 + b"{}      "]
)
def test_other_bytes_are_refused(data: bytes) -> None:
    if data.endswith(b"{}      "):
        assert parse_weights(data) == {}
        return
    with pytest.raises(InvalidRequestError, match="not a safetensors file"):
        parse_weights(data)


def test_a_mismatch_is_listed() -> None:
    expected = {"a": torch.zeros(2, 3), "b": torch.zeros(1), "c": torch.zeros(1)}
    got = {"a": torch.zeros(3, 2), "b": torch.zeros(1).long(), "d": torch.zeros(1)}
    with pytest.raises(InvalidRequestError) as caught:
        check_weights(expected, got)
    text = str(caught.value)
    assert "c: missing" in text
    assert "d: not in the network" in text
    assert "a: expected float32[2, 3], got float32[3, 2]" in text
    assert "b: expected float32[1], got int64[1]" in text
    with pytest.raises(InvalidRequestError, match="and 10 more"):
        check_weights({f"w{i}": torch.zeros(1) for i in range(20)}, {})


def test_weights_of_a_learner_that_diverged_are_refused() -> None:
    good = {"mask": torch.tensor([-torch.inf, 0.0]), "step": torch.tensor(7)}
    check_numbers(good)
    with pytest.raises(InvalidRequestError, match=r"no numbers \(NaN\): actor.bias"):
        check_numbers(good | {"actor.bias": torch.tensor([0.0, torch.nan])})


def test_the_newest_weights_come_back_and_older_ones_go(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "state")
    assert store.load() is None
    for version in (1, 2, 10):
        store.save(Weights.of(version, b"weights %d" % version))
    assert [path.name.split("-")[1] for path in (tmp_path / "state").iterdir()] == ["10"]
    assert WeightStore(tmp_path / "state").load() == Weights.of(10, b"weights 10")


def test_a_damaged_file_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = WeightStore(tmp_path)
    store.save(Weights.of(3, b"good"))
    good = next(tmp_path.iterdir())
    (tmp_path / good.name.replace("weights-3", "weights-4")).write_bytes(b"bad")
    assert store.load() == Weights.of(3, b"good")
    assert "is damaged" in caplog.text


def test_what_a_killed_process_left_half_written_is_removed_and_no_write_that_goes_on(
    tmp_path: Path,
) -> None:
    old, new = (tmp_path / f".weights-{n}-ab.safetensors.x" for n in (1, 2))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    (tmp_path / "mine.txt").write_bytes(b"kept")
    WeightStore(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [new.name, "mine.txt"]


def test_replicas_may_share_a_directory(tmp_path: Path, monkeypatch: Any) -> None:
    """One lists the files just before the other replaces them by newer ones."""
    one, other = WeightStore(tmp_path), WeightStore(tmp_path)
    one.save(Weights.of(1, b"one"))
    files = one._files

    def list_then_lose() -> Any:
        found = files()
        other.save(Weights.of(2, b"two"))
        return found

    monkeypatch.setattr(one, "_files", list_then_lose)
    found = one.load()
    assert found == Weights.of(2, b"two")


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_the_file_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: Any) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, weight_store.Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(
        weight_store.Path, "replace", lambda a, b: (calls.append("rename"), replace(a, b))[1]
    )
    write_atomically(tmp_path / "file", b"x")
    assert calls == ["fsync", "rename", "fsync"]


def test_a_state_directory_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="policy.state_dir"):
        WeightStore(tmp_path / "file" / "state")
