"""The file that names the format of a data directory."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from rlightning.buffer.durable import directory
from rlightning.buffer.durable.directory import FORMAT, DataDirectory


@pytest.mark.parametrize("older", [False, True], ids=["new", "older"])
def test_the_format_is_on_the_disk_before_it_has_its_name(
    older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    title = tmp_path / "FORMAT"
    if older:
        title.write_text("rlightning buffer, format 1\n")
    done: list[tuple[str, str, str]] = []

    def watch(module: Any, name: str) -> None:
        real = getattr(module, name)

        def noted(what: Any, *others: Any) -> Any:
            path = Path(os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else what)
            done.append((name, path.name, path.read_text() if path.is_file() else ""))
            return real(what, *others)

        monkeypatch.setattr(module, name, noted)

    watch(directory, "sync")
    watch(directory, "sync_folder")
    watch(directory.os, "replace")
    opened = DataDirectory(tmp_path)
    opened.upgrade()
    opened.upgrade()
    opened.close()
    text = f"rlightning buffer, format {FORMAT}\n"
    named = done.index(("replace", "FORMAT.tmp", text))
    assert done[named - 1] == ("sync", "FORMAT.tmp", text)
    assert done[named + 1] == ("sync_folder", tmp_path.name, "")
    assert [step for step, *_ in done].count("replace") == 1
    assert title.read_text() == text


def test_what_an_older_version_kept_for_the_next_checkpoint_goes(tmp_path: Path) -> None:
    (tmp_path / "spare").write_text("of somebody else")
    DataDirectory(tmp_path).close()
    assert (tmp_path / "spare").exists(), "a new directory has nothing of an older version"
    DataDirectory(tmp_path).close()
    assert not (tmp_path / "spare").exists()


def test_what_a_removed_checkpoint_took_is_kept_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = DataDirectory(tmp_path)
    real = os.replace

    def replace(path: Path, other: Path) -> None:
        inside = [opened.checkpoints in one.parents for one in (path, other)]
        if inside[0] != inside[1]:  # the checkpoints may be on a disk of their own
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        real(path, other)

    monkeypatch.setattr(directory.os, "replace", replace)
    for number in range(4):
        folder = opened.checkpoints / opened.next_name()
        folder.mkdir()
        (folder / "data").write_text(str(number))
        (folder / "position").write_text(str(100 + number))
    assert opened.prune(2) == 102
    assert len(opened.names()) == 2
    assert opened.spare.read_text() in ("0", "1")
    assert sorted(opened.checkpoints.iterdir()) == [
        opened.spare,
        *(opened.checkpoints / name for name in reversed(opened.names())),
    ]
    opened.close()
