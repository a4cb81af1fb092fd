"""How a client shrinks and compresses its cameras, and how a server gets the pixels."""

from __future__ import annotations

import sys

import gymnasium as gym
import numpy as np
import pytest

from rlightning.env.attached_cameras import CameraDecoder
from rlightning.env.remote_env.cameras import CameraEncoder, CameraOption
from rlightning.errors import (
    ConfigError,
    InvalidRequestError,
    PreconditionError,
    ResourceExhaustedError,
)
from rlightning.types import EnvMeta, EnvRet
from rlightning.v1 import env_service_pb2 as pb

IMAGE = gym.spaces.Box(0, 255, (24, 32, 3), np.uint8)
SPACE = gym.spaces.Dict(
    [
        ("state", gym.spaces.Box(-1, 1, (3,), np.float32)),
        ("images", gym.spaces.Dict([("wrist", IMAGE), ("a.b", IMAGE)])),
        ("pair", gym.spaces.Tuple([IMAGE, gym.spaces.Discrete(3)])),
    ]
)
META = EnvMeta("e", gym.spaces.Discrete(2), SPACE, 1)


def options(**named):
    return {name: CameraOption.parse(text, name) for name, text in named.items()}


def observed(rows=1):
    random = np.random.default_rng(3)

    def images():
        return random.integers(0, 256, (rows, 24, 32, 3), np.uint8)

    return {
        "state": np.ones((rows, 3), np.float32),
        "images": {"wrist": images(), "a.b": images()},
        "pair": (images(), np.zeros(rows, np.int64)),
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("png", ("png", 1, None)),
        ("png:9", ("png", 9, None)),
        ("jpeg", ("jpeg", 80, None)),
        ("jpeg:95@320x240", ("jpeg", 95, (240, 320))),
        ("none@16x8", (None, 0, (8, 16))),
    ],
)
def test_options(text, expected):
    option = CameraOption.parse(text, "c")
    assert (option.codec, option.quality, option.size) == expected


@pytest.mark.parametrize(
    "text",
    ["", "jpg", "jpeg:", "jpeg:0", "jpeg:96", "png:10", "none:3", "png@0x3", "png@3", "@3x3"],
)
def test_what_is_no_option_names_the_camera(text):
    with pytest.raises(ConfigError, match="camera 'wrist'"):
        CameraOption.parse(text, "wrist")


@pytest.mark.parametrize("name", ["state", "wrist", "images", "pair.1", "observation"])
def test_what_is_no_camera_is_refused_with_those_there_are(name):
    with pytest.raises(ConfigError, match=r"'images\.wrist', 'images\.a\.b', 'pair\.0'"):
        CameraEncoder(options(**{name: "png"}), META)


def test_pillow_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"rlightning\[robot\]"):
        CameraEncoder(options(**{"pair.0": "png"}), META)
    with pytest.raises(PreconditionError, match=r"this server .*rlightning\[robot\]"):
        CameraDecoder([pb.CameraEncoding()], IMAGE, 1)


async def test_pixels_come_out_as_they_went_in_or_in_the_size_that_was_declared():
    named = {"images.wrist": "png", "images.a.b": "jpeg:90@16x12", "pair.0": "none@8x6"}
    encoder = CameraEncoder(options(**named), META)
    hello = pb.AttachHello()
    assert encoder.declare(hello)
    space = encoder.meta.observation_space
    assert list(space) == list(SPACE)
    assert space["images"]["wrist"] == IMAGE
    assert space["images"]["a.b"].shape == (12, 16, 3)
    assert space["pair"][0].shape == (6, 8, 3)
    assert encoder.meta.lossy == ("images.a.b", "pair.0")
    before, final = observed(2), observed(1)
    info = {"final_rows": np.zeros(1, np.int32), "final_observation": final, "x": 1}
    env_ret = EnvRet("e", before, 0.0, False, False, info)
    sent = await encoder.encode(env_ret)
    assert env_ret.observation is before, "what the env holds is left alone"
    assert [type(one) for one in sent.observation["images"]["wrist"]] == [bytes, bytes]
    decoder = CameraDecoder(hello.cameras, space, 2)
    assert decoder.lossy == ["images.a.b"]
    await decoder.decode(sent)
    for was, now in ((before, sent.observation), (final, sent.info["final_observation"])):
        np.testing.assert_array_equal(now["images"]["wrist"], was["images"]["wrist"])
        assert now["images"]["a.b"].shape[1:] == (12, 16, 3)
        assert now["pair"][0].shape[1:] == (6, 8, 3)
        assert now["state"] is was["state"]
    assert sent.info["x"] == 1
    encoder.close()


async def test_an_observation_that_is_a_picture():
    encoder = CameraEncoder(options(observation="png"), EnvMeta("e", None, IMAGE, 1))
    hello = pb.AttachHello()
    encoder.declare(hello)
    assert list(hello.cameras[0].path) == []
    before = observed()["pair"][0]
    sent = await encoder.encode(EnvRet("e", before))
    await CameraDecoder(hello.cameras, IMAGE, 1).decode(sent)
    np.testing.assert_array_equal(sent.observation, before)
    encoder.close()


async def test_only_resized_cameras_need_nothing_of_the_server():
    encoder = CameraEncoder(options(**{"pair.0": "none@8x6"}), META)
    assert not encoder.declare(pb.AttachHello())
    encoder.close()


@pytest.mark.parametrize(
    "cameras",
    [
        [pb.CameraEncoding(path=["images", "wrist"])],
        [pb.CameraEncoding(path=["images", "wrist"], format=7)],
        [pb.CameraEncoding(path=["state"], format=pb.PICTURE_FORMAT_PNG)],
        [pb.CameraEncoding(path=["pair", "7"], format=pb.PICTURE_FORMAT_PNG)],
        [pb.CameraEncoding(path=["pair", "0"], format=pb.PICTURE_FORMAT_PNG)] * 2,
    ],
)
def test_a_hello_with_nonsense_is_refused(cameras):
    with pytest.raises(InvalidRequestError, match="camera '"):
        CameraDecoder(cameras, SPACE, 1)


def test_pixels_beyond_what_is_allowed_are_refused_before_one_came():
    camera = pb.CameraEncoding(path=["images", "wrist"], format=pb.PICTURE_FORMAT_PNG)
    size = int(np.prod(IMAGE.shape))
    assert CameraDecoder([camera], SPACE, 10, 10 * size).nbytes == 10 * size
    with pytest.raises(ResourceExhaustedError, match="max_message_bytes"):
        CameraDecoder([camera], SPACE, 11, 10 * size)


@pytest.mark.parametrize("rows", [[], [b"x", b"x"], ["x"], np.zeros((1, 24, 32, 3), np.uint8)])
async def test_other_than_one_picture_a_row_is_refused_by_name(rows):
    camera = pb.CameraEncoding(path=["images", "wrist"], format=pb.PICTURE_FORMAT_PNG)
    decoder = CameraDecoder([camera], SPACE, 1)
    value = observed()
    value["images"]["wrist"] = rows
    with pytest.raises(InvalidRequestError, match=r"observation\.images\.wrist: expected a list"):
        await decoder.decode(EnvRet("e", value))
