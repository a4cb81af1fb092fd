"""Films of episodes: what their frames show, and the file."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rlightning.env.utils.film import FilmWriter, load_ffmpeg
from rlightning.env.utils.options import check_known
from rlightning.env.utils.pictures import load_pillow

Frame = npt.NDArray[np.uint8]

_LINE_PX = 12


@dataclass(frozen=True)
class VideoOptions:
    """What `video_cfg` may hold.

    Attributes:
        save_video: Whether to write a film of each episode.
        info_on_video: Write step, reward and the numbers of the info on each frame.
        video_base_dir: Folder of the films.
        fps: Frames in a second of them.
    """

    save_video: bool = False
    info_on_video: bool = False
    video_base_dir: str = "videos"
    fps: int = 20

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> VideoOptions:
        """Returns the options of a config.

        Raises:
            ConfigError: One is not known, or a library is missing that they need.
        """
        known = [item.name for item in fields(VideoOptions)]
        check_known(given or {}, known, "env.env_kwargs.video_cfg")
        options = VideoOptions(**(given or {}))
        if options.save_video:
            load_ffmpeg()
            if options.info_on_video:
                load_pillow()
        return options


class EpisodeVideo(gym.Wrapper[Any, Any, Any, Any]):
    """Writes a film of each episode: `<folder>/<name>-<random>/<number>.mp4`, counted from 1.

    Frames are written as they come, so that an episode may be long; its file is complete when the
    episode has ended, or the env is reset or closed.

    Args:
        env: Whose episodes.
        options: Where to, and how.
        name: Of the env; rows of one env draw different folders.
        see: Makes the frame of an observation, uint8 [height, width, 3].
    """

    def __init__(
        self, env: gym.Env[Any, Any], options: VideoOptions, name: str, see: Callable[[Any], Frame]
    ) -> None:
        super().__init__(env)
        self._options = options
        self._folder = Path(options.video_base_dir, f"{name}-{uuid.uuid4().hex[:8]}")
        self._see = see
        self._episodes = 0
        self._steps = 0
        self._writer: FilmWriter | None = None

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begins an episode, and its film."""
        self._finish()
        observation, info = self.env.reset(**kwargs)
        self._episodes += 1
        self._steps = 0
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._episodes}.mp4"
        self._writer = FilmWriter(path, self._options.fps)
        self._write(observation, 0.0, info)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Executes an action, and films what came of it."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        self._write(observation, float(reward), info)
        if terminated or truncated:
            self._finish()
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Completes the film and closes the env."""
        self._finish()
        self.env.close()

    def _write(self, observation: Any, reward: float, info: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        frame = self._see(observation)
        if self._options.info_on_video:
            frame = put_info_on_image(frame, {"step": self._steps, "reward": reward, **info})
        self._writer.append(frame)

    def _finish(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def save_rollout_video(
    rollout_images: Iterable[Any], output_dir: str | Path, video_name: str, fps: int = 30
) -> Path:
    """Writes frames as `<output_dir>/<video_name>.mp4`, and makes the folder.

    Args:
        rollout_images: uint8 [height, width, 3] each, all of one size.
        output_dir: Folder.
        video_name: Without the ending.
        fps: Frames in a second.

    Returns:
        The file.

    Raises:
        ConfigError: The extra `video` is not installed.
    """
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    path = Path(output_dir, f"{video_name}.mp4")
    with FilmWriter(path, fps) as writer:
        for frame in rollout_images:
            writer.append(np.asarray(frame))
    return path


def tile_images(images: Sequence[Any], nrows: int = 1) -> npt.NDArray[Any]:
    """Returns pictures side by side, in rows of as many, filled up with black.

    Args:
        images: [height, width, channels] each, or [batch, height, width, channels], all alike.
        nrows: How many rows.

    Returns:
        [nrows * height, columns * width, channels], with the batch in front if there is one.

    Raises:
        ValueError: There are no pictures, or they are not alike.
    """
    arrays = [np.asarray(image) for image in images]
    if not arrays or any(array.shape != arrays[0].shape for array in arrays):
        raise ValueError(f"expected pictures alike, got {[array.shape for array in arrays]}")
    columns = math.ceil(len(arrays) / nrows)
    arrays += [np.zeros_like(arrays[0])] * (nrows * columns - len(arrays))
    rows = [
        np.concatenate(arrays[row * columns : (row + 1) * columns], axis=-2) for row in range(nrows)
    ]
    return np.concatenate(rows, axis=-3)


def put_text_on_image(image: Any, lines: Sequence[str], max_width: int | None = None) -> Frame:
    """Returns a picture with lines of text on it, from its upper left corner downwards.

    Args:
        image: uint8 [height, width, 3]; left as it is.
        lines: The text.
        max_width: Pixels after which a line goes on in the next; None: the picture's.

    Raises:
        ConfigError: The extra `robot` is not installed.
    """
    drawn = load_pillow().fromarray(np.asarray(image))
    from PIL import ImageDraw, ImageFont

    font, draw = ImageFont.load_default(size=_LINE_PX - 2), ImageDraw.Draw(drawn)
    width = drawn.width if max_width is None else max_width
    broken = (part for line in lines for part in _broken(line, width, font.getlength))
    for i, line in enumerate(broken):
        at = (1, 1 + i * _LINE_PX)
        draw.text(at, line, font=font, fill=(255, 255, 255), stroke_width=1, stroke_fill=(0, 0, 0))
    return np.asarray(drawn)


def put_info_on_image(
    image: Any, info: Mapping[str, Any], extras: Sequence[str] | None = None
) -> Frame:
    """Returns a picture with the numbers of an info on it, a line each, and lines after them.

    Args:
        image: uint8 [height, width, 3]; left as it is.
        info: What is no number, bool or array of one is left out.
        extras: More lines.

    Raises:
        ConfigError: The extra `robot` is not installed.
    """
    numbers = {key: np.asarray(value) for key, value in info.items() if not isinstance(value, dict)}
    lines = [
        f"{key}: {value.item():.4g}"
        for key, value in numbers.items()
        if value.dtype.kind in "biuf" and value.size == 1
    ]
    return put_text_on_image(image, [*lines, *(extras or ())])


def _broken(line: str, width: float, measure: Callable[[str], float]) -> Iterable[str]:
    """Yields a line in parts that are no wider, broken between words where there are some."""
    part = ""
    for word in line.split(" "):
        longer = f"{part} {word}" if part else word
        if part and measure(longer) > width:
            yield part
            longer = word
        part = longer
    yield part
