"""What holds for all tests."""

import gc
import os
import random
import sys

import numpy as np
import pytest

# Several tests run at once, each with processes of its own: threads of one network would only wait for each other's turn.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Looks for garbage seldom, and not among the thousands of tests, which took a tenth of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """A test draws the same numbers whatever ran before it: one that fails fails again."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
