"""Which services of a config can be looked at."""

import pytest

from rlightning.cluster.targets import targets_of
from rlightning.utils.config import ClientAuthConfig, MainConfig

SHARDS = {"type": "sharded", "num_shards": 2, "addresses": ["b:1", "b:2"]}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, []),
        ({"services": {"buffer": {"listen": "0.0.0.0:3"}}}, [("buffer", "127.0.0.1:3")]),
        (
            {"services": {name: {"address": f"{name}:1"} for name in ("env", "policy", "buffer")}},
            [("policy", "policy:1"), ("buffer", "buffer:1"), ("env", "env:1")],
        ),
        (
            {"services": {"policy": {"addresses": ["p:1", "p:2"]}}},
            [("policy-0", "p:1"), ("policy-1", "p:2")],
        ),
        (
            {"buffer": {"type": "ReplayBuffer", "capacity": 10, "storage": SHARDS}},
            [("buffer-0", "b:1"), ("buffer-1", "b:2")],
        ),
    ],
)
def test_those_whose_ports_are_named(config, found):
    targets = targets_of(MainConfig.from_dict(config))
    assert [(target.name, target.address) for target in targets] == found


def test_each_is_dialled_as_the_config_says_unless_told_otherwise():
    config = MainConfig(services={"env": {"address": "e:1", "auth": {"token": "a"}}})
    (target,) = targets_of(config)
    assert target.auth.token == "a"
    assert target.rpc == config.services.env.rpc
    other = ClientAuthConfig(token="b")
    assert [target.auth for target in targets_of(config, other)] == [other]
