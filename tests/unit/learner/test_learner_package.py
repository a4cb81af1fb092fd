"""What `rlightning.learner` offers, and what it says without its extra."""

import subprocess
import sys

import pytest

import rlightning.learner

WITHOUT_TORCHRL = """
import sys
sys.modules["torchrl"] = None
import rlightning.learner
assert "torch" not in sys.modules
rlightning.learner.train_loop
try:
    rlightning.learner.PPO
except ImportError as error:
    print(error)
"""


def test_the_package_is_light_and_names_its_extra():
    out = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCHRL],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    expected = "rlightning.learner.PPO needs torchrl: pip install 'rlightning[learn]'"
    assert out.stdout.strip() == expected


def test_every_name_is_there_and_others_are_not():
    rlightning.learner.preload()
    for name in rlightning.learner.__all__:
        assert getattr(rlightning.learner, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = rlightning.learner.Nothing
