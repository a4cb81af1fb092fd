"""Imports that no garbage collection goes through."""

import gc
from collections.abc import Iterator

import pytest

from rlightning.utils.garbage import uncollected


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


def test_nothing_is_collected_inside_and_what_was_made_is_not_looked_at_again():
    before = gc.get_freeze_count()
    with uncollected():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() > before + len(made)


def test_a_collector_that_was_off_stays_off_and_an_error_turns_it_on_again():
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()
