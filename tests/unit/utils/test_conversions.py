from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlightning.utils.conversions import BFloat16Array, array_of, map_leaves
from rlightning.utils.utils import InternalFlag, to_device, to_numpy, torch_dtype_from_precision

Point = namedtuple("Point", "x y")


def test_containers_are_rebuilt_around_converted_leaves():
    data = {
        "od": OrderedDict(b=1, a=2),
        "dd": defaultdict(list, {"k": 3}),
        "dq": deque([4], maxlen=2),
        "nt": Point(5, (6, [7])),
    }
    result = map_leaves(lambda leaf: leaf * 10, data)
    assert result == {
        "od": OrderedDict(b=10, a=20),
        "dd": {"k": 30},
        "dq": deque([40]),
        "nt": Point(50, (60, [70])),
    }
    assert type(result["dd"]) is defaultdict
    assert result["dd"]["new"] == []
    assert result["dq"].maxlen == 2
    assert type(result["nt"]) is Point
    assert result is not data


def test_other_objects_are_leaves():
    leaves = []
    map_leaves(leaves.append, ["text", None, 1, 2.0, np.float32(3), object, torch.Size([1, 2])])
    assert len(leaves) == 7


@pytest.mark.parametrize(
    "dtype",
    ["?", "i1", "i2", "i4", "i8", "u1", "u4", "u8", "f2", "f4", "f8", "c8", "c16", ">i4", ">f8"],
)
def test_arrays_become_tensors_of_the_same_values(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    tensor = to_device(array, "cpu")
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_array_equal(tensor.numpy(), array)
    assert tensor.numpy().dtype == array.dtype.newbyteorder("=")


def test_a_writable_array_shares_its_memory():
    array = np.zeros(3)
    to_device(array, "cpu")[0] = 5
    assert array[0] == 5


def _read_only():
    array = np.arange(4.0)
    array.flags.writeable = False
    return array


def _unaligned():
    return np.frombuffer(bytearray(33), np.uint8)[1:].view(np.float64)


def _field_of_records():
    return np.zeros(4, [("a", "u1"), ("b", "f4")])["b"]


@pytest.mark.parametrize(
    "make",
    [
        _read_only,
        _unaligned,
        _field_of_records,
        lambda: np.arange(6.0)[::-1],
        lambda: np.arange(12.0).reshape(3, 4)[:, ::-2],
        lambda: np.arange(12.0).reshape(3, 4).T,
        lambda: np.zeros((0, 3)),
        lambda: np.array(5.0),
    ],
)
def test_arrays_that_torch_cannot_view_are_copied(make):
    array = make()
    np.testing.assert_array_equal(to_device(array, "cpu").numpy(), array)


@pytest.mark.parametrize(
    "array",
    [
        np.array([None, "x"], object),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(2, [("a", "i4")]),
        np.zeros(2, np.longdouble),
    ],
)
def test_arrays_that_torch_has_no_dtype_for_stay(array):
    assert to_device({"x": array}, "cpu")["x"] is array


def test_numpy_scalars_stay():
    scalar = np.float32(1)
    assert to_device([scalar], "cpu")[0] is scalar


def test_uint16_is_taken_as_bfloat16_and_comes_back():
    bits = np.array([[0x3F80, 0x4000], [0xBF80, 0x7FC0]], np.uint16)
    tensor = to_device(bits, "cpu")
    assert tensor.dtype == torch.bfloat16
    assert tensor[:, 0].tolist() == [1.0, -1.0]
    back = to_numpy(tensor)
    assert type(back) is BFloat16Array
    assert back.dtype == np.uint16
    np.testing.assert_array_equal(back, bits)
    assert to_device(back, "cpu").dtype == torch.bfloat16


def test_to_numpy_refuses_what_would_come_back_as_bfloat16():
    with pytest.raises(ValueError, match=r"torch.uint16"):
        to_numpy([torch.zeros(2, dtype=torch.uint16)])
    assert array_of(torch.ones(2, dtype=torch.uint16)).tolist() == [1, 1]


def test_tensors_leave_autograd_and_lazy_views():
    assert to_numpy(torch.ones(2, requires_grad=True)).tolist() == [1, 1]
    assert to_numpy(torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j]


def test_arrays_pass_to_numpy_as_they_are():
    array = np.zeros(2)
    assert to_numpy({"x": array})["x"] is array


def test_a_tensordict_is_moved_and_becomes_a_dict():
    data = TensorDict({"a": torch.ones(2), "b": TensorDict({"c": torch.zeros(2, 3)}, [2])}, [2])
    moved = to_device([data], torch.device("cpu"))[0]
    assert isinstance(moved, TensorDict)
    arrays = to_numpy([moved])[0]
    assert arrays["a"].tolist() == [1, 1]
    assert arrays["b"]["c"].shape == (2, 3)


def test_without_torch_the_cpu_leaves_data_and_other_devices_are_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    array = np.zeros(2)
    assert to_device({"x": [array]}, "cpu")["x"][0] is array
    assert to_numpy({"x": [array]})["x"][0] is array
    with pytest.raises(ImportError, match=r"device 'cuda' needs torch: .*rlightning\[policy\]"):
        to_device(array, "cuda")


def test_nothing_of_types_and_wire_imports_torch():
    code = (
        "import sys, numpy as np, rlightning.types, rlightning.wire, rlightning.utils.utils as u;"
        "u.to_numpy([np.zeros(2)]);"
        "rlightning.wire.encode_value({'x': np.zeros(2)});"
        "assert not {'torch', 'tensordict', 'grpc'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=30)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("bf16-mixed", torch.bfloat16),
        (16, torch.float16),
        ("16", torch.float16),
        ("fp16", torch.float16),
        ("16-mixed", torch.float16),
        (32, torch.float32),
        ("32", torch.float32),
        ("32-true", torch.float32),
        (None, None),
    ],
)
def test_precisions_have_their_dtype(precision, dtype):
    assert torch_dtype_from_precision(precision) is dtype


@pytest.mark.parametrize("precision", ["64", 8, "", True])
def test_other_precisions_are_refused(precision):
    with pytest.raises(ValueError, match="unknown precision"):
        torch_dtype_from_precision(precision)


@pytest.mark.parametrize(
    "name", ["DEBUG", "VERBOSE", "REMOTE_TRAIN", "REMOTE_EVAL", "REMOTE_STORAGE", "REMOTE_ENV"]
)
def test_flags_follow_the_environment(monkeypatch, name):
    monkeypatch.delenv(f"RLIGHTNING_{name}", raising=False)
    assert getattr(InternalFlag, name) is False
    monkeypatch.setenv(f"RLIGHTNING_{name}", "1")
    assert getattr(InternalFlag, name) is True
    assert InternalFlag.get_env_vars()[f"RLIGHTNING_{name}"] == "1"
    monkeypatch.setenv(f"RLIGHTNING_{name}", "true")
    assert getattr(InternalFlag, name) is False
    assert len(InternalFlag.get_env_vars()) == 6
