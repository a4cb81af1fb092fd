from __future__ import annotations

import fcntl
import gc
import mmap
import os
import secrets
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from rlightning.errors import CodecError, MessageTooLargeError
from rlightning.types import EnvRet
from rlightning.v1.env_ret_pb2 import EnvRet as EnvRetMessage
from rlightning.v1.session_pb2 import SharedMemory as Offer
from rlightning.v1.tensor_pb2 import DTYPE_BOOL, DTYPE_FLOAT32, DTYPE_UINT8, Tensor
from rlightning.wire import Limits, Reader, Writer, fill_env_ret, read_env_ret, read_tensor
from rlightning.wire.shared import MIN_BYTES, SharedMemory, open_shared

SIZE = 2**20
IMAGES = np.arange(4 * 64 * 64 * 3, dtype=np.uint8).reshape(4, 64, 64, 3)


def shared(size: int = SIZE) -> tuple[SharedMemory, memoryview]:
    memory = SharedMemory(size)
    return memory, open_shared(memory.offer, max_bytes=size)


def encode(observation, memory: SharedMemory | None) -> bytes:
    w, message = Writer(memory=memory), EnvRetMessage()
    fill_env_ret(message, EnvRet("env", observation), w)
    return w.finish(message)


def decode(data: bytes, memory: memoryview | None, **limits: int) -> EnvRet:
    r = Reader(EnvRetMessage, data, limits=Limits(**limits), memory=memory)
    return read_env_ret(r.message, r)


def test_large_tensors_come_out_of_memory_as_they_went_in_and_small_ones_out_of_the_message():
    memory, there = shared()
    observation = {"camera": IMAGES, "turned": IMAGES[:, ::-1], "arm": np.ones((4, 7), "f4")}
    data = encode(observation, memory)
    assert len(data) < 1000
    back = decode(data, there).observation
    for name, array in observation.items():
        np.testing.assert_array_equal(back[name], array)
        assert not back[name].flags.writeable
    assert np.shares_memory(back["camera"], np.frombuffer(there, np.uint8))
    assert not np.shares_memory(back["arm"], np.frombuffer(there, np.uint8))


def test_flags_stay_in_the_message_since_they_are_checked_when_they_are_read():
    memory, there = shared()
    flags = np.ones(2 * MIN_BYTES, bool)
    data = encode(flags, memory)
    assert len(data) > len(flags)
    np.testing.assert_array_equal(decode(data, there).observation, flags)


def test_what_has_no_room_goes_by_bytes_until_something_is_freed():
    memory, there = shared(2**17)
    for key in (1, 2, 3):
        memory.begin(key)
        large = len(encode(IMAGES, memory)) > IMAGES.nbytes
        assert large == (key == 3)
    memory.free(1)
    memory.begin(4)
    data = encode((IMAGES, IMAGES), memory)
    assert IMAGES.nbytes < len(data) < 2 * IMAGES.nbytes
    for array in decode(data, there).observation:
        np.testing.assert_array_equal(array, IMAGES)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(1, 5), st.integers(1, 6 * 64)),
            st.tuples(st.just("free"), st.integers(1, 5), st.just(0)),
        ),
        max_size=40,
    )
)
def test_places_in_use_never_overlap_and_all_of_them_come_back(actions):
    memory = SharedMemory(64 + 16 * 64, min_bytes=1)
    there = open_shared(memory.offer, max_bytes=SIZE)
    held: dict[int, list[tuple[int, np.ndarray]]] = {}
    for action, key, size in actions:
        if action == "free":
            memory.free(key)
            held.pop(key, None)
            continue
        array = np.frombuffer(secrets.token_bytes(size), np.uint8)
        memory.begin(key)
        offset = memory.put(array)
        if offset is not None:
            held.setdefault(key, []).append((offset, array))
        for offset, array in [one for places in held.values() for one in places]:
            assert there[offset : offset + len(array)] == array.tobytes()
    for key in list(held):
        memory.free(key)
    assert memory.put(np.zeros(16 * 64, np.uint8)) == 64  # all that there is, at its beginning


def test_what_lies_there_counts_towards_the_cap_of_the_message():
    memory, there = shared()
    data = encode({"left": IMAGES, "right": IMAGES}, memory)
    total = len(data) + 2 * IMAGES.nbytes
    for most in (total, total - 1, IMAGES.nbytes):
        r = Reader(EnvRetMessage, data, memory=there, max_total_bytes=most)
        if most == total:
            assert read_env_ret(r.message, r).observation.keys() == {"left", "right"}
        else:
            with pytest.raises(MessageTooLargeError, match=f"cap is {most}") as told:
                read_env_ret(r.message, r)
            assert told.value.path == f"observation.{'left' if most < total - 1 else 'right'}"


BAD = [
    (Tensor(dtype=DTYPE_UINT8, shape=[4], shared_offset=-1), "bytes -1 to 3"),
    (Tensor(dtype=DTYPE_UINT8, shape=[4], shared_offset=SIZE - 3), f"which has {SIZE}"),
    (Tensor(dtype=DTYPE_UINT8, shape=[4], shared_offset=2**62), f"which has {SIZE}"),
    (Tensor(dtype=DTYPE_FLOAT32, shape=[2**40], shared_offset=64), f"which has {SIZE}"),
    (Tensor(dtype=DTYPE_UINT8, shape=[2**62, 2**62], shared_offset=64), "too large"),
    (Tensor(dtype=DTYPE_UINT8, shape=[-1], shared_offset=64), "negative axis"),
    (Tensor(dtype=DTYPE_UINT8, shape=[1] * 33, shared_offset=64), "33 axes"),
    (Tensor(dtype=DTYPE_UINT8, shape=[0], shared_offset=64), "expected numbers"),
    (Tensor(dtype=DTYPE_BOOL, shape=[4], shared_offset=64), "expected numbers"),
    (Tensor(dtype=DTYPE_UINT8, shape=[1], data=b"1", shared_offset=64), "expected numbers"),
    (Tensor(dtype=99, shape=[1], shared_offset=64), "unknown dtype"),
]


@pytest.mark.parametrize(("tensor", "message"), BAD, ids=lambda item: str(item)[:20])
def test_a_place_that_is_none_is_refused_by_the_name_of_its_leaf(tensor, message):
    _, there = shared()
    pb = EnvRetMessage(env_id="env")
    entry = pb.observation.map_value.entries.add(key="camera")
    entry.value.tensor_value.CopyFrom(tensor)
    with pytest.raises(CodecError, match=message) as caught:
        decode(pb.SerializeToString(), there)
    assert caught.value.path == "observation.camera"


def test_a_reference_without_shared_memory_is_refused():
    memory, _ = shared()
    with pytest.raises(CodecError, match="none was agreed on") as caught:
        decode(encode({"camera": IMAGES}, memory), None)
    assert caught.value.path == "observation.camera"


def test_one_place_read_many_times_counts_every_time():
    _, there = shared()
    pb = EnvRetMessage(env_id="env")
    for _ in range(3):
        value = pb.observation.list_value.values.add()
        value.tensor_value.CopyFrom(Tensor(dtype=DTYPE_UINT8, shape=[60_000], shared_offset=64))
    data = pb.SerializeToString()
    assert len(decode(data, there, max_bytes=180_000).observation) == 3
    with pytest.raises(CodecError, match="needs more than 179999 bytes"):
        decode(data, there, max_bytes=179_999)


def test_a_reader_counts_what_it_read_from_memory():
    memory, there = shared()
    data = encode(IMAGES, memory)
    r = Reader(EnvRetMessage, data, memory=there)
    read_tensor(r.message.observation.tensor_value, r)
    assert r.shared_bytes == IMAGES.nbytes
    assert r.nbytes == len(data) + IMAGES.nbytes


def changed(offer: Offer, **fields) -> Offer:
    result = Offer()
    result.CopyFrom(offer)
    for name, value in fields.items():
        setattr(result, name, value)
    return result


def memfd(name: str = "rlightning", size: int = SIZE, flags: int = os.MFD_ALLOW_SEALING) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | flags)
    os.ftruncate(fd, size)
    return fd


def test_only_what_was_offered_is_opened(tmp_path):
    memory = SharedMemory(SIZE)
    offer = memory.offer
    with pytest.raises(ValueError, match=f"{SIZE} bytes; at most {SIZE - 1} are allowed"):
        open_shared(offer, max_bytes=SIZE - 1)
    for size in (-1, 0, 63):
        with pytest.raises(ValueError, match="are allowed"):
            open_shared(changed(offer, size_bytes=size), max_bytes=SIZE)
    with pytest.raises(ValueError, match=f"{SIZE} bytes, offered were {SIZE - 1}"):
        open_shared(changed(offer, size_bytes=SIZE - 1), max_bytes=SIZE)
    for nonce in (b"", offer.nonce[:-1], offer.nonce + b"\0", bytes(32)):
        with pytest.raises(ValueError, match="other bytes than were offered"):
            open_shared(changed(offer, nonce=nonce), max_bytes=SIZE)
    for fields in ({"fd": 10**6}, {"fd": -1}, {"pid": -1}, {"pid": 2**62}):
        with pytest.raises(OSError, match="No such file"):
            open_shared(changed(offer, **fields), max_bytes=SIZE)
    memory.withdraw()
    memory.withdraw()
    with pytest.raises((OSError, ValueError)):
        open_shared(offer, max_bytes=SIZE)


def test_files_pipes_and_memory_that_may_shrink_are_not_opened(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    reading, writing = os.pipe()
    cases = {
        os.open(path, os.O_RDONLY): "no memory for tensors",
        reading: "no memory for tensors",
        memfd("other"): "no memory for tensors",
        memfd(): "it may shrink",
        memfd(flags=0): "it may shrink",
    }
    try:
        for fd, message in cases.items():
            offer = Offer(pid=os.getpid(), fd=fd, size_bytes=SIZE, nonce=bytes(32))
            with pytest.raises(ValueError, match=message):
                open_shared(offer, max_bytes=SIZE)
    finally:
        for fd in (*cases, writing):
            os.close(fd)


def test_memory_of_huge_pages_is_not_opened_since_a_missing_one_ends_the_reader(monkeypatch):
    try:
        fd = memfd(size=2**21, flags=os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError:  # this kernel has none: plain memory that says it were of them
        fd = memfd(size=2**21)
        monkeypatch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_bsize=2**21))
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        offer = Offer(pid=os.getpid(), fd=fd, size_bytes=2**21, nonce=bytes(32))
        with pytest.raises(ValueError, match="huge pages"):
            open_shared(offer, max_bytes=2**22)
    finally:
        os.close(fd)


def test_its_writer_can_neither_shrink_it_nor_take_it_away_from_the_reader():
    memory = SharedMemory(SIZE)
    there = open_shared(memory.offer, max_bytes=SIZE)
    path = f"/proc/{os.getpid()}/fd/{memory.offer.fd}"
    fd = os.open(path, os.O_RDWR)
    try:
        for size in (0, SIZE - mmap.PAGESIZE, SIZE + mmap.PAGESIZE):
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)
    memory.begin(1)
    offset = memory.put(IMAGES)
    memory.withdraw()
    del memory
    assert there[offset : offset + IMAGES.nbytes] == IMAGES.tobytes()
    with pytest.raises(TypeError, match="read-only"):
        there[0] = 1


def test_what_was_read_lives_on_when_both_ends_have_let_go():
    memory, there = shared()
    back = decode(encode(IMAGES, memory), there).observation
    del memory, there
    gc.collect()
    np.testing.assert_array_equal(back, IMAGES)
