from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from rlightning.errors import CodecError
from rlightning.utils.conversions import BFloat16Array
from rlightning.v1.tensor_pb2 import DTYPE_BOOL, DTYPE_FLOAT32, DTYPE_INT64, DTYPE_UINT8, Tensor
from rlightning.wire import Reader, Writer, fill_tensor, read_tensor

# (a Tensor as it may come, what its error says)
BAD = [
    (Tensor(), "unknown dtype 0"),
    (Tensor(dtype=99, data=b"1"), "unknown dtype 99"),
    (Tensor(dtype=DTYPE_UINT8, shape=[-1], data=b"1"), "negative axis"),
    (Tensor(dtype=DTYPE_UINT8, shape=[-1, -1], data=b"1"), "negative axis"),
    (
        Tensor(dtype=DTYPE_UINT8, shape=[2], data=b"1"),
        r"1 bytes of data; shape \[2\] of uint8 needs 2",
    ),
    (Tensor(dtype=DTYPE_UINT8, shape=[2], data=b"123"), "3 bytes of data"),
    (Tensor(dtype=DTYPE_FLOAT32, data=b""), r"shape \[\] of float32 needs 4"),
    (Tensor(dtype=DTYPE_FLOAT32, shape=[1], data=b"123"), "needs 4"),
    (Tensor(dtype=DTYPE_UINT8, shape=[2**62, 2**62], data=b"1"), "1 bytes of data"),
    (Tensor(dtype=DTYPE_INT64, shape=[2**61, 8], data=b""), "0 bytes of data"),
    (Tensor(dtype=DTYPE_UINT8, shape=[2**62, 2**62, 0], data=b""), "too large"),
    (Tensor(dtype=DTYPE_UINT8, shape=[0, -1], data=b""), "negative axis"),
    (Tensor(dtype=DTYPE_UINT8, shape=[1] * 33, data=b"1"), "33 axes"),
    (Tensor(dtype=DTYPE_BOOL, shape=[2], data=b"\1\2"), "neither 0 nor 1"),
]


def encode(array, **options):
    w = Writer(**options)
    message = Tensor()
    fill_tensor(message, array, w)
    return w.finish(message)


def decode(data, **options):
    r = Reader(Tensor, data, **options)
    return read_tensor(r.message, r)


def assert_round_trip(array, expected=None):
    for splice_bytes in (1, 2**62):
        data = encode(array, splice_bytes=splice_bytes)
        for read_splice_bytes in (1, 2**62):
            back = decode(data, splice_bytes=read_splice_bytes)
            np.testing.assert_array_equal(back, array if expected is None else expected)
            assert back.shape == np.shape(array)
            assert not back.flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.array(5.0),
        np.zeros((0,), np.float32),
        np.zeros((3, 0, 2), np.int16),
        np.zeros([1] * 32, np.uint8),
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
        np.arange(10)[::-3],
        np.broadcast_to(np.float32(1), (4, 5)),
        np.arange(4, dtype=">c16"),
        np.array([0.0, -0.0, np.nan, np.inf], np.float16),
        np.float32(3),
        np.bool_(True),
        np.array([True, False]),
    ],
)
def test_arrays_of_every_form_come_back(array):
    assert_round_trip(array)


@pytest.mark.parametrize("name", ["l", "q", "L", "Q", "i", "I"])
def test_every_name_of_a_c_integer_is_one_of_the_dtypes(name):
    array = np.arange(3).astype(name)
    assert decode(encode(array)).dtype == array.dtype


def test_big_endian_arrays_come_back_native():
    back = decode(encode(np.array([1, 256], ">u4")))
    assert back.dtype == np.dtype("u4")
    assert back.dtype.isnative
    assert back.tolist() == [1, 256]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).T,
        torch.ones(3, requires_grad=True),
        torch.tensor(2.0),
        torch.zeros(0, 2),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(2, dtype=torch.uint16),
    ],
)
def test_torch_tensors_are_detached_and_sent(tensor):
    assert_round_trip(tensor, tensor.detach().resolve_conj().numpy())


def test_bfloat16_comes_back_as_its_bits():
    back = decode(encode(torch.tensor([1.0, -2.0], dtype=torch.bfloat16)))
    assert type(back) is BFloat16Array
    assert back.tolist() == [0x3F80, 0xC000]
    assert encode(back) == encode(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    assert type(decode(encode(np.zeros(2, np.uint16)))) is np.ndarray


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(2, np.longdouble), "no dtype"),
        (np.array(["2020"], "M8[s]"), "no dtype datetime64"),
        (np.zeros(2, [("a", "i4")]), "no dtype"),
        (np.ma.masked_array([1, 2], [True, False]), "mask"),
        (torch.zeros(2, dtype=torch.float8_e5m2), "cannot send a tensor of torch.float8_e5m2"),
        (
            torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True),
            "cannot send a tensor",
        ),
    ],
)
def test_what_the_wire_has_no_form_for_is_refused(array, message):
    with pytest.raises(CodecError, match=message):
        encode(array)


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="numpy 1 has 32 axes")
def test_more_than_32_axes_are_refused():
    with pytest.raises(CodecError, match="33 axes"):
        encode(np.zeros([1] * 33))


@pytest.mark.parametrize("splice_bytes", [1, 2**62])
@pytest.mark.parametrize(("message", "error"), BAD)
def test_bad_tensors_are_refused(message, error, splice_bytes):
    with pytest.raises(CodecError, match=error):
        decode(message.SerializeToString(), splice_bytes=splice_bytes)


@pytest.mark.parametrize("shape", [[2**40], [2**20, 2**20], [10**9, 0, 10**9]])
def test_a_huge_shape_is_refused_before_anything_is_allocated(shape):
    data = Tensor(dtype=DTYPE_FLOAT32, shape=shape, data=b"1234").SerializeToString()
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_an_array_without_elements_says_nothing_huge():
    for axes in ([2**24, 0], [0, 480, 640, 3]):
        assert decode(encode(np.zeros(axes, np.uint8))).shape == tuple(axes)
    data = Tensor(dtype=DTYPE_UINT8, shape=[2**24 + 1, 0]).SerializeToString()
    with pytest.raises(CodecError, match="too large"):
        decode(data)


def test_a_large_array_is_a_view_over_the_bytes_that_came():
    data = encode(np.arange(100_000, dtype=np.uint16))
    back = decode(data)
    owner = np.frombuffer(data, np.uint8)
    assert np.shares_memory(back, owner)
    with pytest.raises(ValueError, match="read-only"):
        back[0] = 1


def test_arrays_over_writable_bytes_are_read_only_too():
    for size in (4, 100_000):
        back = decode(bytearray(encode(np.zeros(size, np.uint8))))
        assert not back.flags.writeable


def test_a_large_array_is_not_copied_before_finish():
    array = np.zeros(100_000, np.uint8)
    w = Writer()
    message = Tensor()
    fill_tensor(message, array, w)
    array[0] = 7
    assert decode(w.finish(message))[0] == 7
