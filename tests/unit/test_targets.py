"""Which services of a config can be looked at."""

import pytest

from rlightning.cluster.targets import replicas_of, targets_of
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
    assert [target.section for target in targets] == [name.partition("-")[0] for name, _ in found]


def test_each_is_dialled_as_the_config_says_unless_told_otherwise():
    config = MainConfig(services={"env": {"address": "e:1", "auth": {"token": "a"}}})
    (target,) = targets_of(config)
    assert target.auth.token == "a"
    assert target.rpc == config.services.env.rpc
    other = ClientAuthConfig(token="b")
    assert [target.auth for target in targets_of(config, other)] == [other]


async def test_servers_behind_one_name_are_of_its_section(monkeypatch):
    async def find(address, *, timeout_s):
        return ["10.0.0.3:1", "10.0.0.4:1"]

    monkeypatch.setattr("rlightning.cluster.targets.find_replicas", find)
    (target,) = targets_of(MainConfig(services={"env": {"address": "envs:1"}}))
    replicas = await replicas_of(target, timeout_s=1)
    assert [(one.name, one.address, one.section) for one in replicas] == [
        ("env@10.0.0.3", "10.0.0.3:1", "env"),
        ("env@10.0.0.4", "10.0.0.4:1", "env"),
    ]
