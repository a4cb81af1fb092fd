"""The steps that no server has taken yet."""

from __future__ import annotations

import numpy as np

from rlightning.env.remote_env.spool import Spool, nbytes_of
from rlightning.types import EnvRet


def filled(count, *, max_steps=100, max_bytes=10**6):
    spool = Spool(max_steps, max_bytes)
    for index in range(count):
        put(spool, index)
    return spool


def put(spool, index, nbytes=100):
    spool.put(EnvRet("e", index), index=index, observed_ns=0, nbytes=nbytes)


def seqs(spool, after, steps=100, max_bytes=10**6):
    return [step.seq for step in spool.after(after, steps=steps, max_bytes=max_bytes)]


def test_steps_are_numbered_and_handed_out_in_order():
    spool = filled(5)
    assert seqs(spool, 0) == [1, 2, 3, 4, 5]
    assert seqs(spool, 2, steps=2) == [3, 4]
    assert seqs(spool, 5) == []
    assert seqs(spool, 0, max_bytes=250) == [1, 2]
    assert seqs(spool, 0, max_bytes=1) == [1]  # a large one goes alone


def test_the_last_one_that_was_taken_is_kept():
    spool = filled(5)
    spool.take(3)
    assert len(spool) == 2
    assert spool.nbytes == 300
    assert seqs(spool, 2) == [3, 4, 5]
    assert seqs(spool, 3) == [4, 5]
    spool.take(5)
    assert len(spool) == 0
    assert seqs(spool, 4) == [5]


def test_it_says_when_it_is_full():
    spool = filled(0, max_steps=3)
    for index in range(2):
        assert not spool.is_last(100)
        put(spool, index)
    assert spool.is_last(100)
    assert not spool.is_half_empty
    spool.take(1)
    assert spool.is_half_empty
    assert not spool.is_last(100)
    small = filled(2, max_bytes=399)
    assert small.is_last(100)
    assert not small.is_half_empty


def test_the_size_of_a_step_is_that_of_its_arrays():
    picture = {"camera": np.zeros((1, 10, 10, 3), np.uint8), "text": "abc"}
    env_ret = EnvRet("e", picture, info={"final_observation": picture})
    assert 2 * 303 <= nbytes_of(env_ret) <= 2 * 303 + 16
