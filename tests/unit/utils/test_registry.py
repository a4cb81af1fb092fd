"""Registries of envs, buffers and policies."""

from __future__ import annotations

import pytest

from rlightning.utils.registry import BUFFERS, ENVS, POLICY, Registry


def test_what_is_registered_is_found_and_stays_as_it_was():
    registry = Registry("thing")

    @registry.register("one")
    class One:
        pass

    assert registry.get("one") is One
    assert "one" in registry
    assert "two" not in registry
    assert (list(registry), len(registry)) == (["one"], 1)


def test_a_taken_key_is_refused():
    registry = Registry("thing")
    registry.register("one")(1)
    with pytest.raises(KeyError, match="thing 'one' is already registered"):
        registry.register("one")(2)
    assert registry.get("one") == 1


def test_a_missing_key_names_similar_ones():
    registry = Registry("thing")
    with pytest.raises(KeyError, match="no thing 'gymnasium' is registered; known: none"):
        registry.get("gymnasium")
    registry.register("gymnasium")(1)
    with pytest.raises(KeyError, match="did you mean gymnasium"):
        registry.get("gymnasiun")
    with pytest.raises(KeyError, match="known: gymnasium"):
        registry.get("x")


def test_the_documented_registries():
    import rlightning.env  # noqa: F401 - registers its backends

    assert "gymnasium" in ENVS
    assert {registry.name for registry in (ENVS, BUFFERS, POLICY)} == {
        "env backend",
        "buffer",
        "policy",
    }
