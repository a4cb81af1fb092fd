"""Which policy servers there are, and where each replica of a launcher listens."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from rlightning.cluster.launcher import LocalLauncher
from rlightning.cluster.runs import Run
from rlightning.errors import ConfigError
from rlightning.rpc.replicas import resolve
from rlightning.utils.config import ClientAuthConfig, MainConfig


async def test_all_servers_behind_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, 0, 6, "", (f"10.0.0.{i}", 5)) for i in (1, 2)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    one, other, literal = await resolve(["policy:5", "10.0.0.9:1"])
    assert [one.address, other.address, literal.address] == [
        "10.0.0.1:5",
        "10.0.0.2:5",
        "10.0.0.9:1",
    ]
    auth = ClientAuthConfig(tls=True)
    expected = [one.auth(auth).server_name, literal.auth(auth).server_name]  # type: ignore[union-attr]
    assert expected == ["policy", None]


def test_each_replica_of_a_launcher_listens_on_the_next_port(tmp_path: Any) -> None:
    config = MainConfig.from_dict(
        {
            "log": {"log_dir": str(tmp_path)},
            "services": {"policy": {"replicas": 2, "listen": "127.0.0.1:7000", "metrics": 9000}},
        }
    )
    launcher = LocalLauncher(config, Run.create(config, command="x"), report=print)
    assert launcher.sections == ("policy-0", "policy-1", "buffer", "env")
    assert [launcher.address(f"policy-{i}") for i in (0, 1)] == ["127.0.0.1:7000", "127.0.0.1:7001"]
    metrics = [launcher._service(f"policy-{i}").metrics for i in (0, 1)]
    assert metrics == ["127.0.0.1:9000", "127.0.0.1:9001"]
    elsewhere = MainConfig.from_dict(
        {**config.to_dict(), "services": {"policy": {"addresses": ["a:1", "b:1"]}}}
    )
    launcher = LocalLauncher(elsewhere, Run.create(elsewhere, command="x"), report=print)
    assert [launcher.address(f"policy-{i}") for i in (0, 1)] == ["a:1", "b:1"]
    one = MainConfig.from_dict({**config.to_dict(), "services": {"policy": {"addresses": ["a:1"]}}})
    launcher = LocalLauncher(one, Run.create(one, command="x"), report=print)
    assert launcher._service("policy-0").address == "a:1"  # it is not started here


def test_env_servers_of_a_launcher_have_names_and_ports_of_their_own(tmp_path: Any) -> None:
    env = {"replicas": 2, "listen": "127.0.0.1:7000"}
    config = MainConfig.from_dict({"log": {"log_dir": str(tmp_path)}, "services": {"env": env}})
    launcher = LocalLauncher(config, Run.create(config, command="x"), report=print)
    assert launcher.sections == ("policy", "buffer", "env-0", "env-1")
    own = [launcher._own_config(f"env-{i}").to_dict()["services"]["env"] for i in (0, 1)]
    assert [one["replica"] for one in own] == ["env0", "env1"]
    assert [one["listen"][0]["address"] for one in own] == ["127.0.0.1:7000", "127.0.0.1:7001"]
    with pytest.raises(ConfigError, match="2 replicas are to be started, each with a name of its"):
        MainConfig.from_dict({"services": {"env": {**env, "replica": "a"}}})
