"""The journal: what is written is read, what a crash cut off is not, and damage is refused."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from rlightning.buffer.durable import files, journal
from rlightning.buffer.durable.files import CorruptError, SyncError
from rlightning.buffer.durable.journal import Entry, Journal, JournalReader, segment_starts
from rlightning.errors import ConfigError
from rlightning.testing import wait_until
from rlightning.utils.memory import in_memory


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1024)


def write(folder: Path, payloads: list[bytes], start: int = 0, *, power: bool = False) -> int:
    """Writes each payload by itself; returns where the journal ends."""
    written = Journal(folder, start, power=power)
    for number, payload in enumerate(payloads):
        written.write([Entry(written.end, number, [payload[:5], payload[5:]])])
    written.close()
    return written.end


def read(folder: Path, position: int = 0) -> list[bytes]:
    return [bytes(record.payload) for record in JournalReader(folder, position)]


def payloads(count: int) -> list[bytes]:
    return [bytes([number]) * (number * 7 % 300) for number in range(count)]


@pytest.mark.parametrize("power", [False, True])
def test_what_is_written_is_read_across_segments(tmp_path: Path, power: bool) -> None:
    end = write(tmp_path, payloads(50), power=power)
    assert len(segment_starts(tmp_path)) > 5
    reader = JournalReader(tmp_path, 0)
    records = list(reader)
    assert [bytes(record.payload) for record in records] == payloads(50)
    assert [record.kind for record in records] == list(range(50))
    assert reader.end == end == records[-1].end
    assert read(tmp_path, records[30].position) == payloads(50)[30:]


@pytest.mark.parametrize("power", [False, True])
def test_it_tells_how_long_the_disk_took_where_the_disk_was_asked(
    tmp_path: Path, power: bool
) -> None:
    written = Journal(tmp_path, 0, power=power)
    assert written.synced_s is None
    written.write([Entry(0, 1, [b"one"])])
    assert (written.synced_s is not None) is power
    written.close()


def test_a_record_may_be_larger_than_a_segment(tmp_path: Path) -> None:
    large = [b"a" * 10, b"b" * 5000, b"c" * 10]
    write(tmp_path, large)
    assert read(tmp_path) == large


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_cut_record_at_the_end_is_left_out_and_written_over(tmp_path: Path, cut: int) -> None:
    first = write(tmp_path, [b"one" * 5])
    end = write(tmp_path, [b"two" * 9], first)
    (path,) = tmp_path.glob("*.journal")
    head = journal._HEAD.size
    with path.open("r+b") as file:
        file.truncate(head + end - cut)
    whole = cut <= -len(b"two" * 9) % 8  # only its padding is gone
    reader = JournalReader(tmp_path, 0)
    assert len(list(reader)) == (2 if whole else 1)
    assert reader.end == (end if whole else first)
    assert reader.end is not None
    write(tmp_path, [b"three"], reader.end)
    assert read(tmp_path)[-1] == b"three"
    assert len(read(tmp_path)) == (3 if whole else 2)


def test_what_a_crash_left_behind_does_not_follow_what_is_written_later(tmp_path: Path) -> None:
    first = write(tmp_path, [b"same size 1"])
    write(tmp_path, [b"lost"], write(tmp_path, [b"same size 2"], first))
    (path,) = tmp_path.glob("*.journal")
    damage(path, journal._HEAD.size + first + 8)
    # Both were written together, so that the second may be whole though the first is not.
    assert journal.record_bytes(len(b"same size 2")) == journal.record_bytes(len(b"same size 3"))
    write(tmp_path, [b"same size 3"], first)
    assert read(tmp_path) == [b"same size 1", b"same size 3"]


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0xFF]))


def test_a_damaged_record_before_the_last_segment_is_refused(tmp_path: Path) -> None:
    write(tmp_path, payloads(50))
    path = sorted(tmp_path.glob("*.journal"))[2]
    damage(path, 300)
    with pytest.raises(CorruptError, match=rf"{path.name}: offset \d+: a record is damaged or cut"):
        read(tmp_path)


def test_a_damaged_record_that_others_followed_is_refused(tmp_path: Path) -> None:
    first = write(tmp_path, [b"one"])
    write(tmp_path, [b"two", b"three"], first)
    (path,) = tmp_path.glob("*.journal")
    damage(path, journal._HEAD.size + first + 33)
    said = rf"{path.name}: offset {journal._HEAD.size + first}: .* was written after it"
    with pytest.raises(CorruptError, match=said):
        read(tmp_path)


def test_a_damaged_head_and_a_missing_segment_are_refused(tmp_path: Path) -> None:
    write(tmp_path, payloads(50))
    paths = sorted(tmp_path.glob("*.journal"))
    paths[0].unlink()
    with pytest.raises(CorruptError, match="begins at .* is needed from 0 on"):
        read(tmp_path)
    damage(paths[2], 9)
    with pytest.raises(CorruptError, match=f"{paths[2].name}: offset 0: no head"):
        read(tmp_path, int(paths[2].stem))


def test_a_newer_format_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "FORMAT", 2)
    write(tmp_path, [b"one"])
    monkeypatch.setattr(journal, "FORMAT", 1)
    with pytest.raises(ConfigError, match="format 2 is newer than 1"):
        read(tmp_path)


def test_segments_that_nobody_needs_are_used_again(tmp_path: Path) -> None:
    end = write(tmp_path, payloads(50))
    starts = segment_starts(tmp_path)
    kept = Journal(tmp_path, end, power=False)
    kept.forget(starts[4])
    assert segment_starts(tmp_path)[0] == starts[4]
    spares = len(list(tmp_path.glob("spare-*")))
    assert spares == 4
    kept.write([Entry(kept.end, 0, [b"x" * 900])])
    kept.write([Entry(kept.end, 0, [b"y" * 900])])
    kept.close()
    assert len(list(tmp_path.glob("spare-*"))) == spares - 2
    assert read(tmp_path, starts[4])[-2:] == [b"x" * 900, b"y" * 900]
    kept.forget(10**9)
    assert segment_starts(tmp_path), "the one that is written stays"


def held(path: Path) -> bool:
    """Tells whether the system has all of a file in memory."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(data)))
        pages = (ctypes.c_ubyte * -(-len(data) // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(start, ctypes.c_size_t(len(data)), pages) == 0
    return all(page & 1 for page in pages)


def drop(path: Path) -> None:
    """Has the system drop what it holds of a file."""
    with path.open("r+b", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if held(path):
        pytest.skip("this file system keeps everything in memory")


def need_word_of_memory(folder: Path) -> None:
    """Skips where the system does not say what it holds of a file."""
    if in_memory(folder):
        return
    with (folder / "asked").open("w+b", buffering=0) as file:
        file.write(b"x")
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
        except (AttributeError, NotImplementedError, OSError) as error:
            pytest.skip(f"this system does not say what it holds of a file: {error}")


def test_what_the_system_would_read_from_the_disk_first_is_not_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_word_of_memory(tmp_path)
    size = 2**20
    monkeypatch.setattr(journal, "SEGMENT_BYTES", size)
    (tmp_path / "spare-0").write_bytes(os.urandom(size))
    drop(tmp_path / "spare-0")
    written = Journal(tmp_path, 0, power=False)
    written.write([Entry(0, 0, [b"one"])])
    (path,) = tmp_path.glob("*.journal")
    # All of it is read in beside, or each page of it would be waited for.
    wait_until(lambda: held(path))
    short = [Entry(written.end, 0, [b"two"])]
    wait_until(lambda: written.is_short(short))
    drop(path)
    assert not written.is_short(short)
    written.write(short)
    written.close()
    assert read(tmp_path) == [b"one", b"two"]


def raises(error: Exception) -> Callable[..., int]:
    def preadv(*_: object) -> int:
        raise error

    return preadv


@pytest.mark.parametrize(
    ("preadv", "knows_flag"),
    [
        pytest.param(os.preadv, False, id="a Python without the flag"),
        pytest.param(raises(NotImplementedError()), True, id="a Python without the call"),
        pytest.param(raises(OSError(errno.EOPNOTSUPP, "")), True, id="a file system as NFS"),
    ],
)
def test_where_it_cannot_be_told_only_what_is_in_memory_as_a_whole_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preadv: Callable[..., int], knows_flag: bool
) -> None:
    monkeypatch.setattr(journal.os, "preadv", preadv)
    if knows_flag:
        monkeypatch.setattr(journal.os, "RWF_NOWAIT", 8, raising=False)
    else:
        monkeypatch.delattr(journal.os, "RWF_NOWAIT", raising=False)
    for whole in (False, True):
        monkeypatch.setattr(journal, "in_memory", lambda _, whole=whole: whole)
        folder = tmp_path / str(whole)
        folder.mkdir()
        written = Journal(folder, 0, power=False)
        written.write([Entry(0, 0, [b"one"])])
        assert written.is_short([Entry(written.end, 0, [b"two"])]) is whole
        written.close()


def test_what_goes_into_a_new_segment_is_short_soon(tmp_path: Path) -> None:
    need_word_of_memory(tmp_path)
    written = Journal(tmp_path, 0, power=False)
    written.write([Entry(0, 0, [b"one"])])
    wait_until(lambda: written.is_short([Entry(written.end, 0, [b"two"])]))
    assert not written.is_short([Entry(written.end, 0, [b"x" * 1000])]), "it has no room for that"
    written.close()
    again = Journal(tmp_path, written.end, power=False)
    wait_until(lambda: again.is_short([Entry(again.end, 0, [b"two"])]))
    again.close()


def test_no_more_segments_are_kept_than_memory_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = write(tmp_path, payloads(50))
    monkeypatch.setattr(journal, "memory_limit", lambda: 8 * 2 * 1024)
    kept = Journal(tmp_path, end, power=False)
    kept.forget(segment_starts(tmp_path)[5])
    assert len(list(tmp_path.glob("spare-*"))) == 2
    kept.close()


def test_a_segment_counts_as_large_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = write(tmp_path, [b"a" * 5000, b"b" * 5000, b"c" * 500, b"d" * 900, b"e" * 900])
    monkeypatch.setattr(journal, "memory_limit", lambda: 8 * 7000)
    kept = Journal(tmp_path, end, power=False)
    starts = segment_starts(tmp_path)
    kept.forget(starts[-1])
    sizes = sorted(path.stat().st_size for path in tmp_path.glob("spare-*"))
    assert sum(sizes) <= 7000 < sum(sizes) + 5000
    assert sizes[-1] > 5000 > sizes[0], "those that have room are kept, whatever their size"
    kept.close()


def test_as_many_segments_are_kept_to_be_used_again_as_stay(tmp_path: Path) -> None:
    end = write(tmp_path, payloads(90))
    starts = segment_starts(tmp_path)
    assert len(starts) > 14
    kept = Journal(tmp_path, end, power=False)
    kept.forget(starts[6])
    assert len(list(tmp_path.glob("spare-*"))) == 6
    kept.forget(starts[-1])
    assert segment_starts(tmp_path) == starts[-1:]
    assert len(list(tmp_path.glob("spare-*"))) == 6, "those that there are stay"
    kept.close()


def test_checksums_are_those_of_zlib() -> None:
    assert files.crc32(b"123456789") == zlib.crc32(b"123456789") == 0xCBF43926
    assert files.crc32(memoryview(b"6789"), files.crc32(b"12345")) == 0xCBF43926


def test_a_full_disk_leaves_the_journal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Journal(tmp_path, 0, power=True)
    written.write([Entry(0, 0, [b"one"])])
    end = written.end
    real = os.pwritev

    def half(fd: int, buffers: list[bytes], offset: int) -> int:
        real(fd, [bytes(buffers[0])[:8]], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "pwritev", half)
    with pytest.raises(OSError, match="No space left"):
        written.write([Entry(end, 0, [b"two"])])
    assert written.end == end
    assert read(tmp_path) == [b"one"]
    monkeypatch.setattr(files.os, "pwritev", real)
    written.write([Entry(end, 0, [b"two"])])
    written.close()
    assert read(tmp_path) == [b"one", b"two"]


def test_a_disk_that_is_full_after_a_new_segment_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Journal(tmp_path, 0, power=False)
    entries, end = [], 0
    for number in range(6):
        entries.append(Entry(end, number, [bytes([number]) * 400]))
        end = entries[-1].end
    real, left = os.pwritev, [3]

    def few(fd: int, buffers: list[bytes], offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, buffers, offset)

    monkeypatch.setattr(files.os, "pwritev", few)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            written.write(entries)
    assert len(segment_starts(tmp_path)) == 2
    left[0] = 100
    written.write(entries)
    written.close()
    assert written.end == end
    assert read(tmp_path) == [bytes([number]) * 400 for number in range(6)]


def test_what_the_disk_does_not_confirm_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    written = Journal(tmp_path, 0, power=True)
    written.write([Entry(0, 0, [b"one"])])
    monkeypatch.setattr(files.os, "fdatasync", fail)
    with pytest.raises(SyncError, match="Input/output error"):
        written.write([Entry(written.end, 0, [b"two"])])
    written.close()


def test_a_short_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(files.os, "pwritev", lambda fd, b, at: real(fd, [bytes(b[0])[:3]], at))
    write(tmp_path, payloads(6))
    assert read(tmp_path) == payloads(6)
