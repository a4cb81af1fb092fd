"""What LIBERO's observations and suites need to be made into arrays that a policy takes."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlightning.env.utils.video import (
    put_info_on_image,
    put_text_on_image,
    save_rollout_video,
    tile_images,
)
from rlightning.utils.conversions import map_leaves

__all__ = [
    "get_benchmark_overridden",
    "get_libero_image",
    "get_libero_state",
    "get_libero_wrist_image",
    "list_of_dict_to_dict_of_list",
    "put_info_on_image",
    "put_text_on_image",
    "quat2axisangle",
    "save_rollout_video",
    "tile_images",
    "to_tensor",
]

_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")


def get_libero_image(observation: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
    """Returns the picture of the scene, [H, W, 3], which LIBERO gives upside down."""
    return np.ascontiguousarray(observation["agentview_image"][::-1, ::-1])


def get_libero_wrist_image(observation: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
    """Returns the picture of the camera at the hand, [H, W, 3], the same way round."""
    return np.ascontiguousarray(observation["robot0_eye_in_hand_image"][::-1, ::-1])


def get_libero_state(observation: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """Returns position (metres) and axis-angle (radians) of the hand, and two fingers: [8]."""
    parts = [
        observation["robot0_eef_pos"],
        quat2axisangle(observation["robot0_eef_quat"]),
        observation["robot0_gripper_qpos"],
    ]
    return np.concatenate(parts).astype(np.float32)


def quat2axisangle(quat: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Returns the rotation of a quaternion (x, y, z, w) as axis times angle in radians, [3]."""
    x, y, z, w = np.asarray(quat, np.float64)
    w = min(1.0, max(-1.0, float(w)))
    sine = math.sqrt(1.0 - w * w)
    if math.isclose(sine, 0.0):
        return np.zeros(3)
    return np.array([x, y, z]) * 2.0 * math.acos(w) / sine


def list_of_dict_to_dict_of_list(dicts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the values of dicts that have the same keys, one list for each key.

    Raises:
        ValueError: They have not.
    """
    if any(one.keys() != dicts[0].keys() for one in dicts):
        raise ValueError(f"expected the same keys in each, got {[sorted(one) for one in dicts]}")
    return {key: [one[key] for one in dicts] for key in (dicts[0] if dicts else ())}


def to_tensor(value: Any, device: str = "cpu") -> Any:
    """Returns nested arrays as tensors on a device: float64 as float32, uint16 as int32.

    Tensors are moved to the device; what is neither stays as it is.

    Raises:
        ImportError: torch is not installed.
    """
    import torch

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            smaller = {"float64": np.float32, "uint16": np.int32}.get(leaf.dtype.name)
            leaf = leaf if smaller is None else leaf.astype(smaller)
            return torch.tensor(leaf, device=device)
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(convert, value)


def get_benchmark_overridden(name: str) -> Any:
    """Returns a suite of LIBERO by name; `libero_130` has the tasks of the four and of LIBERO-90.

    Raises:
        KeyError: There is none of that name; the message names similar ones.
    """
    from libero.libero import benchmark

    suites = benchmark.get_benchmark_dict()
    if name == "libero_130":
        return _Union([suites[one]() for one in _SUITES])
    if name.lower() not in suites:
        near = difflib.get_close_matches(name, suites, n=3) or _SUITES
        raise KeyError(f"LIBERO has no suite '{name}'; it has {', '.join(near)} and others")
    return suites[name.lower()]()


class _Union:
    """Several suites as one, with as much of a suite's interface as is used here."""

    def __init__(self, suites: list[Any]) -> None:
        self._tasks = [(suite, i) for suite in suites for i in range(suite.n_tasks)]
        self.n_tasks = len(self._tasks)

    def get_task(self, index: int) -> Any:
        suite, i = self._tasks[index]
        return suite.get_task(i)

    def get_task_init_states(self, index: int) -> Any:
        suite, i = self._tasks[index]
        return suite.get_task_init_states(i)
