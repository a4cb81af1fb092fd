"""The state of a learner as a file: what goes in comes out, and nothing in it is executed."""

import pytest
import torch

from rlightning.learner.state_file import dump_state, load_state


def test_what_goes_in_comes_out():
    shared = torch.arange(3)
    state = {
        "a": {0: shared, 1: shared[1:]},
        "groups": [{"lr": 1e-3, "betas": [0.9, 0.999], "fused": None, "names": ["x"]}],
        "generator": torch.get_rng_state(),
        "nothing": {},
        "scalar": torch.tensor(1.5),
        "half": torch.ones(2, dtype=torch.bfloat16),
    }
    got = load_state(dump_state(state))
    assert list(got) == list(state)
    assert list(got["a"]) == [0, 1]
    assert torch.equal(got["a"][1], shared[1:])
    assert got["groups"] == state["groups"]
    for name in ("generator", "scalar", "half"):
        assert torch.equal(got[name], state[name])
        assert got[name].dtype == state[name].dtype


def test_an_optimizer_goes_on():
    def make():
        layer = torch.nn.Linear(2, 2)
        return layer, torch.optim.Adam(layer.parameters())

    layer, optimizer = make()
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    _, other = make()
    other.load_state_dict(load_state(dump_state({"o": optimizer.state_dict()}))["o"])
    step = {key: value["step"] for key, value in other.state_dict()["state"].items()}
    assert step == {0: torch.tensor(1.0), 1: torch.tensor(1.0)}


def test_what_is_no_plain_value_is_refused():
    with pytest.raises(TypeError, match="cannot hold a object"):
        dump_state({"a": object()})


@pytest.mark.parametrize("data", [b"", b"x" * 30, b"\x80\x04N."])
def test_what_is_no_state_is_refused(data):
    with pytest.raises(ValueError, match="no state of a learner"):
        load_state(data)
