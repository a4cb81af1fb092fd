from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlightning.errors import ConfigError
from rlightning.testing import FailpointError, armed, failpoint
from rlightning.utils import failpoints


def test_nothing_happens_unless_armed():
    failpoint("anything")
    assert failpoints._armed == {}


def test_an_armed_place_raises_at_its_hit_only():
    with armed("here=raise@2,there=sleep:0"):
        failpoint("here")
        failpoint("there")
        with pytest.raises(FailpointError, match="here"):
            failpoint("here")
        failpoint("here")
        assert failpoints.passed("here") == 3
        assert failpoints.passed("nowhere") == 0
    failpoint("here")


def test_an_armed_place_raises_each_time_without_a_hit():
    with armed("here=raise"):
        for _ in range(2):
            with pytest.raises(FailpointError):
                failpoint("here")


@pytest.mark.parametrize("spec", ["here", "here=explode", "here=sleep", "here=exit:1", "a b=exit"])
def test_a_spec_that_cannot_be_read_is_an_error(spec):
    with pytest.raises(ConfigError, match="failpoint"), armed(spec):
        pass


def test_the_environment_arms_a_child():
    script = (
        "from rlightning.utils.failpoints import failpoint\n"
        "failpoint('a'); print('once', flush=True); failpoint('a'); print('twice')"
    )
    environment = dict(os.environ) | {failpoints.VARIABLE: "a=exit@2"}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (failpoints.EXIT_CODE, "once\n"), ended.stderr
