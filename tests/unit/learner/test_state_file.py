"""The state of a learner as a file: what goes in comes out, and nothing in it is executed."""

import pytest
import torch

from rlightning.learner.state_file import check_alike, dump_state, load_state


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


def test_a_tree_of_odd_things_is_refused():
    data = dump_state({"a": torch.ones(1)})
    for odd in (
        b'{\\"tensor\\": [1]}',
        b'{\\"pairs\\": [[[1], 2]]}',
        b'{\\"pairs\\": [1, 2]}',
        b"[1, 2, 3]",
    ):
        tree = b'{\\"pairs\\": [[\\"a\\", {\\"tensor\\": \\"0\\"}]]}'
        assert tree in data
        with pytest.raises(ValueError, match="no state of a learner"):
            load_state(data.replace(tree, odd + b" " * (len(tree) - len(odd))))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ([], r"the state: expected a dict, got \[\]"),
        ({"rows": "9"}, "rows: expected a number, got '9'"),
        ({"rows": True}, "rows: expected a number, got True"),
        ({"generator": 3}, "generator: expected a tensor, got 3"),
        ({"random": {"0": 1}}, "random: expected a list"),
        ({"random": [None]}, r"random\[0\]: expected a tensor, got None"),
        (
            {"optimizer": {"state": {}, "param_groups": [{"lr": "fast"}]}},
            r"optimizer.param_groups\[0\].lr: expected a number, got 'fast'",
        ),
        (
            {"optimizer": {"state": {0: {"step": "1"}}, "param_groups": []}},
            "optimizer.state.0.step: expected a tensor or a number, got '1'",
        ),
        (
            {"optimizer": {"state": {0: 1}, "param_groups": []}},
            "optimizer.state.0: expected a dict",
        ),
    ],
)
def test_odd_typed_values_are_named(state, said):
    optimizer = torch.optim.Adam([torch.ones(1, requires_grad=True)])
    like = {
        "rows": 0,
        "generator": torch.get_rng_state(),
        "random": [torch.get_rng_state()],
        "optimizer": optimizer.state_dict(),
        "anything": None,
    }
    check_alike({**like, "anything": "x", "more": [1]}, like)
    with pytest.raises(ValueError, match=said):
        check_alike(state, like)
