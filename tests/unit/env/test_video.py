"""Films of episodes, and what is written on their frames."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest
import torch

from rlightning.env.utils.film import FilmWriter
from rlightning.env.utils.libero_utils import (
    list_of_dict_to_dict_of_list,
    put_info_on_image,
    put_text_on_image,
    save_rollout_video,
    tile_images,
    to_tensor,
)
from rlightning.env.utils.video import EpisodeVideo, VideoOptions


class Shades(gym.Env[Any, Any]):
    """Shows a shade of grey that grows, of an odd size; an episode has two steps."""

    observation_space = gym.spaces.Box(0, 255, (33, 49, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self._seen(), 1.0, False, self.steps == 2, {"success": False}

    def _seen(self) -> Any:
        return np.full((33, 49, 3), 60 * self.steps, np.uint8)


def frames(path: Any, height: int, width: int) -> Any:
    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    command = [ffmpeg, "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3)


@pytest.mark.parametrize("info_on_video", [False, True])
def test_every_episode_has_a_film(tmp_path: Any, info_on_video: bool) -> None:
    options = VideoOptions.of(
        {"save_video": True, "info_on_video": info_on_video, "video_base_dir": str(tmp_path)}
    )
    env = EpisodeVideo(Shades(), options, "shades", lambda seen: seen)
    env.reset(seed=1)
    env.step(0)
    env.step(0)
    (first,) = tmp_path.glob("shades-*/1.mp4")
    film = frames(first, 32, 48)  # complete as soon as the episode is
    assert len(film) == 3
    corners = film[:, -8:, -8:].mean(axis=(1, 2, 3))
    assert (np.diff(corners) > 20).all()
    assert (film[0].max() > 150) == info_on_video
    env.reset()
    env.close()
    assert len(frames(first.with_name("2.mp4"), 32, 48)) == 1


def test_frames_make_a_film(tmp_path: Any) -> None:
    shades = [np.full((16, 16, 3), shade, np.uint8) for shade in (0, 200)]
    path = save_rollout_video(shades, tmp_path / "new", "two", fps=5)
    assert path == tmp_path / "new" / "two.mp4"
    assert len(frames(path, 16, 16)) == 2


def test_ffmpeg_is_started_without_the_fork_handlers_of_this_process(tmp_path: Any) -> None:
    forks: list[int] = []
    os.register_at_fork(before=lambda: forks.append(1))
    with FilmWriter(tmp_path / "film.mp4", 5) as writer:
        writer.append(np.zeros((16, 16), np.uint8))
    assert len(frames(tmp_path / "film.mp4", 16, 16)) == 1
    assert not forks


def test_a_film_may_have_any_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("-dash.mp4", "a:b.mp4"):
        with FilmWriter(name, 5) as writer:
            writer.append(np.zeros((16, 16), np.uint8))
        assert len(frames(tmp_path / name, 16, 16)) == 1


def test_what_makes_no_film_is_an_error(tmp_path: Any) -> None:
    writer = FilmWriter(tmp_path / "missing" / "film.mp4", 5)
    writer.append(np.zeros((16, 16, 3), np.uint8))
    with pytest.raises(OSError, match=r"missing/film.mp4: .*No such file"):
        writer.close()
    writer.close()
    with FilmWriter(tmp_path / "film.mp4", 5) as writer:
        with pytest.raises(ValueError, match=r"no frame: float64 \[16, 16\]"):
            writer.append(np.zeros((16, 16)))
        writer.append(np.zeros((16, 16, 3), np.uint8))
        with pytest.raises(
            ValueError, match=r"frame uint8 \[16, 18, 3\] after uint8 \[16, 16, 3\]"
        ):
            writer.append(np.zeros((16, 18, 3), np.uint8))
        with pytest.raises(ValueError, match=r"frame float64 \[16, 16, 3\] after uint8"):
            writer.append(np.zeros((16, 16, 3)))
    assert len(frames(tmp_path / "film.mp4", 16, 16)) == 1


def test_pictures_are_tiled_row_by_row() -> None:
    images = [np.full((2, 3, 1), i, np.uint8) for i in (1, 2, 3)]
    tiled = tile_images(images, nrows=2)
    assert tiled[..., 0].tolist() == [[1, 1, 1, 2, 2, 2]] * 2 + [[3, 3, 3, 0, 0, 0]] * 2
    assert tile_images([np.zeros((5, 2, 3, 1))] * 2).shape == (5, 2, 6, 1)
    for wrong in ([], [images[0], images[0][:1]]):
        with pytest.raises(ValueError, match="expected pictures alike"):
            tile_images(wrong)


def test_what_is_written_leaves_the_picture_as_it_was() -> None:
    image = np.zeros((64, 96, 3), np.uint8)
    short = put_text_on_image(image, ["one two three four"], max_width=200)
    broken = put_text_on_image(image, ["one two three four"], max_width=40)
    lines = [np.flatnonzero(one.max(axis=(1, 2)))[-1] for one in (short, broken)]
    assert lines[0] < 14 < 30 < lines[1]
    info = {"reward": 0.5, "won": True, "text": "x", "more": {"a": 1}, "state": np.zeros(3)}
    written = put_info_on_image(image, info)
    assert np.array_equal(written, put_text_on_image(image, ["reward: 0.5", "won: 1"]))
    assert not np.array_equal(written, put_info_on_image(image, info, ["more"]))
    assert image.max() == 0


def test_values_become_tensors() -> None:
    value = {"a": np.zeros(2), "b": (np.ones(1, np.uint16), "text"), "c": torch.ones(1)}
    made = to_tensor(value)
    assert (made["a"].dtype, made["b"][0].dtype) == (torch.float32, torch.int32)
    assert made["b"][1] == "text"
    assert made["c"].dtype is torch.float32


def test_dicts_are_turned_around() -> None:
    assert list_of_dict_to_dict_of_list([{"a": 1}, {"a": 2}]) == {"a": [1, 2]}
    assert list_of_dict_to_dict_of_list([]) == {}
    with pytest.raises(ValueError, match="expected the same keys in each"):
        list_of_dict_to_dict_of_list([{"a": 1}, {"b": 2}])
