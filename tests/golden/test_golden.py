"""The bytes on the wire stay what clients in the field read.

A change here needs an ADR on the wire version; then `python tests/golden/golden_messages.py` writes
the files anew.
"""

from __future__ import annotations

import numpy as np
import pytest
from golden_messages import FOLDER, codec_messages, golden, text_of
from google.protobuf import text_format
from gymnasium import Space

from rlightning import wire
from rlightning.types import EnvMeta

GOLDEN = {name: (kind, data) for name, kind, data in golden()}
CODEC = {name: (data, item) for name, _, data, item in codec_messages()}


def test_there_is_one_file_of_each_kind_per_message():
    for suffix in ("binpb", "txtpb"):
        assert {path.name[: -len(suffix) - 1] for path in FOLDER.glob(f"*.{suffix}")} == {*GOLDEN}


@pytest.mark.parametrize("name", GOLDEN)
def test_bytes_and_text_are_those_of_the_first_release(name):
    kind, data = GOLDEN[name]
    assert (FOLDER / f"{name}.binpb").read_bytes() == data
    text = (FOLDER / f"{name}.txtpb").read_text(encoding="utf-8")
    assert text_of(kind, data) == text
    assert text_format.Parse(text, kind()) == kind.FromString(data)


@pytest.mark.parametrize("name", CODEC)
def test_the_codec_reads_what_the_first_release_wrote(name):
    _, item = CODEC[name]
    data = (FOLDER / f"{name}.binpb").read_bytes()
    if isinstance(item, (EnvMeta, Space)):
        decode = wire.decode_env_meta if isinstance(item, EnvMeta) else wire.decode_space
        assert decode(data) == item
        return
    kind = name.removeprefix("codec.").removeprefix("MultiAgent")
    decode = {
        "Value": wire.decode_value,
        "EnvRet": wire.decode_env_ret,
        "PolicyResponse": wire.decode_policy_response,
        "Batch": wire.decode_batch,
    }[kind]
    back = decode(data)
    if kind == "Value":
        np.testing.assert_equal(back, item)
    elif kind == "Batch":
        np.testing.assert_equal(back._asdict(), item._asdict())
    else:
        assert type(back) is type(item)
        np.testing.assert_equal(vars(back), vars(item))
