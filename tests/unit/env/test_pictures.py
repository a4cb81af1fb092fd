"""Pictures that come from anywhere: the right pixels, or an error, and no more memory than they take."""

from __future__ import annotations

import io
import struct
import zlib

import gymnasium as gym
import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from rlightning.env.utils.pictures import (
    decode_picture,
    encode_picture,
    is_picture,
    resize_picture,
)
from rlightning.errors import CodecError

SHAPES = [(24, 32), (24, 32, 1), (24, 32, 3), (24, 32, 4)]


def picture(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def smooth(shape=(24, 32, 3)):
    return np.indices(shape).sum(0).astype(np.uint8)


def saved(array, name, **options):
    out = io.BytesIO()
    Image.fromarray(array).save(out, name, **options)
    return out.getvalue()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_png_comes_back_bit_for_bit(shape):
    before = picture(shape)
    np.testing.assert_array_equal(
        decode_picture(encode_picture(before, "png", 1), "png", shape), before
    )


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_a_jpeg_comes_back_alike(shape):
    before = smooth(shape)
    after = decode_picture(encode_picture(before, "jpeg", 90), "jpeg", shape)
    assert after.shape == shape
    assert after.dtype == np.uint8
    assert 0 < np.abs(after.astype(int) - before).max() < 12


def test_shrinking_averages():
    before = np.zeros((4, 8, 3), np.uint8)
    before[:, 4:] = 200
    after = resize_picture(before, (2, 2))
    assert after.shape == (2, 2, 3)
    assert (after[:, 0] < 60).all()
    assert (after[:, 1] > 140).all()
    assert resize_picture(before[:, :, :1], (2, 4)).shape == (2, 4, 1)


def png_of(width, height, pixels=b"", depth=8, colour=2):
    def chunk(kind, data):
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(pixels)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def text():
    info = PngImagePlugin.PngInfo()
    info.add_text("a", "b" * 100_000, zip=True)
    return info


@pytest.mark.parametrize(
    ("data", "name", "expected"),
    [
        (b"", "png", "no valid PNG"),
        (b"no picture", "jpeg", "no valid JPEG"),
        (encode_picture(smooth(), "jpeg", 80), "png", "no valid PNG"),
        (encode_picture(smooth((24, 30, 3)), "jpeg", 80), "jpeg", "got a JPEG of 30x24 RGB"),
        (encode_picture(smooth((24, 32)), "png", 1), "png", "got a PNG of 32x24 L"),
        (png_of(9_000, 8_000), "png", "got a PNG of 9000x8000 RGB"),
        (png_of(2**31 - 1, 2**31 - 1), "png", "no valid PNG"),
        (encode_picture(picture((24, 32, 3)), "png", 1)[:900], "png", "no valid PNG"),
        (encode_picture(picture((24, 32, 3)), "jpeg", 80)[:900], "jpeg", "no valid JPEG"),
        (saved(smooth(), "JPEG", progressive=True), "jpeg", "baseline"),
        (saved(smooth(), "PNG", pnginfo=text()), "png", "zTXt"),
        (saved(smooth(), "PNG", icc_profile=b"x" * 99), "png", "iCCP"),
    ],
)
def test_what_is_no_such_picture_is_refused(data, name, expected):
    with pytest.raises(CodecError, match=expected):
        decode_picture(data, name, (24, 32, 3))


def scans_of(*numbers):
    """A JPEG of three components of which each scan has one, and no data."""
    whole = saved(np.zeros((24, 32, 3), np.uint8), "JPEG", subsampling=0)
    head = whole[: whole.index(b"\xff\xda")]
    scan = "ffda 0008 01 {:02x} {:02x} 003f00"
    tables = {1: 0x00, 2: 0x11, 3: 0x11}
    scans = [bytes.fromhex(scan.format(number, tables[number])) for number in numbers]
    return head + b"".join(scans) + b"\xff\xd9"


@pytest.mark.parametrize("before", [b"", b"\xff", b"\xff\xd0", b"\0" * 9, b"\xff" * 5])
def test_scans_beyond_those_of_the_components_are_refused(before):
    assert decode_picture(scans_of(1, 2, 3), "jpeg", (24, 32, 3)).shape == (24, 32, 3)
    data = scans_of(*[1] * 1000, 2, 3).replace(b"\xff\xda", before + b"\xff\xda")
    with pytest.raises(CodecError, match="at most 3 scans"):
        decode_picture(data, "jpeg", (24, 32, 3))


def test_a_scan_in_a_comment_is_none():
    whole = saved(smooth(), "JPEG")
    comment = b"\xff\xfe\x00\x12" + 4 * b"\xff\xda\x00\x08"
    assert decode_picture(whole[:2] + comment + whole[2:], "jpeg", (24, 32, 3)).any()


@pytest.mark.filterwarnings("error")
def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch):
    bomb = png_of(9_000, 9_000, b"\0" * 10_000_000)
    assert len(bomb) < 20_000

    def load(image):
        raise AssertionError("decoded")

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", load)
    with pytest.raises(CodecError):
        decode_picture(bomb, "png", (24, 32, 3))


@pytest.mark.parametrize("name", ["png", "jpeg"])
def test_a_damaged_picture_is_a_picture_of_that_shape_or_an_error(name):
    whole = encode_picture(smooth(), name, 9 if name == "png" else 50)
    random, refused = np.random.default_rng(1), 0
    for _ in range(300):
        data = bytearray(whole)
        for position in random.integers(0, len(data), random.integers(1, 4)):
            data[position] = random.integers(256)
        try:
            assert decode_picture(bytes(data), name, (24, 32, 3)).shape == (24, 32, 3)
        except CodecError:
            refused += 1
    assert refused > 20


def test_which_spaces_are_pictures():
    def box(shape, dtype=np.uint8):
        return gym.spaces.Box(0, 255, shape, dtype)

    assert all(is_picture(box(shape)) for shape in SHAPES)
    other = [box((3, 24, 32)), box((24, 32, 3), np.float32), box((5,)), box((24, 32, 2))]
    assert not any(map(is_picture, [*other, gym.spaces.Discrete(3), None]))
