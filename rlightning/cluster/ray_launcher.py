"""Places the services of a config on a running Ray cluster; the data path stays gRPC."""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rlightning.cluster.launcher import LocalLauncher
from rlightning.cluster.process import label_of, name_of, role_of
from rlightning.cluster.ray_actor import ServiceActor
from rlightning.cluster.runs import Run
from rlightning.errors import ClusterError, ConfigError
from rlightning.rpc.auth import is_loopback
from rlightning.utils.config import Config, MainConfig

# Beyond the grace of a service, for the answer of its actor.
_MARGIN_S = 5.0
_AGAIN_S = 1.0
# A node is noticed to be gone after some seconds, and what was on it imports its libraries again.
_RESTART_WINDOW_S = 120.0
# Methods of an actor that run at the same time: `run`, and one that stops it.
_CONCURRENCY = 4

EFFECTIVE = frozenset({"cluster", "policy.eval_num_gpus", "env.num_cpus", "env.num_gpus"})
"""Keys that this launcher heeds and others do not; of a list, without the number."""


class RayLauncher(LocalLauncher):
    """The services of one run: those without a configured `address` as actors of a Ray cluster.

    Each has a bundle of one placement group, spread over the nodes; with `buffer.node_affinity_env`
    each shard shares its bundle with the env servers whose rows it keeps. A service that ends is
    started again where it was; when a node is gone, Ray starts its actors again on another one.
    Every service keeps its port wherever it is, and is dialled at all nodes: gRPC connects to the
    one that answers. So nobody needs to be told that it has moved.

    Args:
        config: Config of the run; copied.
        run: Folder for the effective config and, after the end, the logs.
        report: Takes one line for people; called from several threads.

    Raises:
        ConfigError: Ray is not installed, or the env servers cannot be dealt out to the shards.
    """

    def __init__(self, config: MainConfig, run: Run, *, report: Callable[[str], None]) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ConfigError("the launcher needs Ray: pip install 'rlightning[ray]'") from error
        config = config.model_copy(deep=True)
        if config.services.restart_window_s == 0:
            config.services.restart_window_s = _RESTART_WINDOW_S
        super().__init__(config, run, report=report)
        self._shard_of = self._pair() if config.buffer.node_affinity_env else {}
        self.config.buffer.node_affinity_env = False  # settled by who is placed beside whom
        self._ray: Any = ray
        self._connected = False
        self._group: Any = None
        self._actors: dict[str, Any] = {}
        self._followers: dict[str, threading.Thread] = {}
        self._first_end: str | None = None
        self._all_started = False

    def start(self) -> None:
        """Places the services and returns when each is SERVING, or waits for its first weights.

        Raises:
            ConfigError: There is no Ray cluster, or a listener is not reached from its nodes.
            ClusterError: A service ended, was not SERVING within `services.start_timeout_s`, or the
                cluster has no room for it; those that were started are stopped again.
        """
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._remove)
            self._connect()
            self._place()
            super().start()
            on_failure.pop_all()
        self._all_started = True

    def stop(self) -> None:
        """Stops the services, env servers first; one that overstays its grace is killed."""
        try:
            super().stop()
        finally:
            self._remove()

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return
        address = self.config.cluster.ray_address or "auto"
        mine = signal.getsignal(signal.SIGTERM)
        try:
            self._ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except ConnectionError as error:
            raise ConfigError(
                f"no Ray cluster at '{address}' (cluster.ray_address): start one with "
                f"`ray start --head`: {error}"
            ) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, mine)  # Ray sets one that ends this process
        self._connected = True

    def _place(self) -> None:
        """Makes an actor for each service that is ours, and says where it is dialled."""
        ours = [one for one in self.sections if self._service(one).address is None]
        hosts = self._hosts()
        for section in ours:
            service = self._service(section)
            listener = service.listen[0]
            host, _, port = listener.address.rpartition(":")
            if hosts != ["127.0.0.1"] and is_loopback(listener.address):
                role = section.partition("-")[0]
                raise ConfigError(
                    f"services.{role}.listen: {listener.address} is reached from its own node "
                    "only: expected 0.0.0.0 with tls, or with plaintext: true in a network that is "
                    "yours"
                )
            port = port if int(port) else str(_free_port())
            listener.address = f"{host}:{port}"
            at = [f"{one}:{port}" for one in hosts]
            service.address = at[0] if len(at) == 1 else f"ipv4:{','.join(at)}"
        self._tell_addresses(ours)
        bundles = self._bundles(ours)
        self._group = self._reserve(bundles)
        for index, sections in enumerate(bundles):
            for section in sections:
                self._actors[section] = self._make_actor(section, index)
                follower = threading.Thread(target=self._follow, args=(section,), daemon=True)
                follower.start()
                self._followers[section] = follower

    def _hosts(self) -> list[str]:
        """Returns the addresses of the nodes; 127.0.0.1 alone if all of them are this machine."""
        alive = [node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]]
        hosts = list(dict.fromkeys(alive))
        if any(":" in host for host in hosts):
            raise ConfigError(f"the launcher knows nodes with IPv4 addresses only, got {hosts}")
        here = self._ray.util.get_node_ip_address()
        return ["127.0.0.1"] if hosts == [here] else hosts

    def _pair(self) -> dict[str, str]:
        """Returns the buffer server that each env server shares a node with."""
        shards = self._shards or ("buffer",)
        if any(self._service(one).address is not None for one in (*shards, *self._env_servers)):
            raise ConfigError(
                "buffer.node_affinity_env: with this launcher for servers that it places, not for "
                "those with addresses"
            )
        if len(self._env_servers) % len(shards):
            raise ConfigError(
                f"services.env.replicas: with buffer.node_affinity_env, expected a multiple of the "
                f"{len(shards)} shards, got {len(self._env_servers)}"
            )
        return dict(zip(self._env_servers, itertools.cycle(shards)))

    def _bundles(self, sections: list[str]) -> list[list[str]]:
        """Returns which services share a node, for sure."""
        with_shards: dict[str, list[str]] = {}
        for section in sections:
            with_shards.setdefault(self._shard_of.get(section, section), []).append(section)
        return list(with_shards.values())

    def _reserve(self, bundles: list[list[str]]) -> Any:
        """Returns a placement group with these bundles, once there is room for all."""
        from ray.util.placement_group import placement_group

        needs = [self._needs_of(sections) for sections in bundles]
        group = placement_group(needs, strategy="SPREAD")
        timeout_s = self.config.services.start_timeout_s
        if not group.wait(timeout_s):
            self._ray.util.remove_placement_group(group)
            labels = [" with ".join(map(label_of, sections)) for sections in bundles]
            needed = ", ".join(f"{label} {need}" for label, need in zip(labels, needs, strict=True))
            raise ClusterError(
                f"the Ray cluster has no room after {timeout_s:g} s (services.start_timeout_s): "
                f"needed are {needed}; it has {self._ray.available_resources()}"
            )
        return group

    def _needs(self, section: str) -> dict[str, float]:
        """Returns the resources that a service reserves."""
        envs = self.config.env if role_of(section) == "env" else []
        cpus = sum(env.num_cpus * env.num_workers for env in envs)
        gpus = sum(env.num_gpus * env.num_workers for env in envs)
        if role_of(section) == "policy":
            device = self.config.policy.device
            there = self._ray.cluster_resources().get("GPU", 0) > 0
            if device.startswith("cuda") or (device == "auto" and there):
                gpus = self.config.policy.eval_num_gpus
        return {"CPU": max(1.0, cpus)} | ({"GPU": gpus} if gpus else {})

    def _needs_of(self, sections: list[str]) -> dict[str, float]:
        """Returns the resources that services reserve together."""
        total: dict[str, float] = {}
        for section in sections:
            for resource, amount in self._needs(section).items():
                total[resource] = total.get(resource, 0.0) + amount
        return total

    def _make_actor(self, section: str, index: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = self._needs(section)
        actor = self._ray.remote(ServiceActor).options(
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0),
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=_CONCURRENCY,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            ),
        )
        return actor.remote(section, dict(self._files(section)))

    def _files(self, section: str) -> Iterator[tuple[str, str]]:
        yield "config.yaml", self.config.to_yaml()
        if section in {*self._shards, *self._replicas, *self._shard_of}:
            yield f"{section}.yaml", self._own_config(section).to_yaml()

    def _own_config(self, section: str) -> Config:
        own = super()._own_config(section).to_dict()
        if section in self._shard_of:  # it knows no other buffer server
            storage = {"type": "unified", "addresses": [self.address(self._shard_of[section])]}
            own["buffer"] = {"storage": storage}
        return Config.from_dict(own)

    def _follow(self, section: str) -> None:
        """Starts a service again whenever it has ended."""
        label = label_of(section)
        while not self._stopping.is_set():
            try:
                # Of a node that is gone this does not tell: Ray calls it again on another one.
                end = self._ray.get(self._actors[section].run.remote())
            except self._ray.exceptions.RayError as error:
                end = f"the actor of the {label} is gone: {error}"
            if self._stopping.is_set():
                return
            if not self._all_started:
                self._first_end = end
                return
            self._report(f"{end}; it is started again")
            self._stopping.wait(_AGAIN_S)

    def _tell_of_absent(self) -> None:
        for section in self._actors:
            self._report(f"the {label_of(section)} is placed, for {self.address(section)}")

    def _check_start(self, deadline: float, complaint: str, absent: str | None = None) -> None:
        if self._first_end is not None:
            raise ClusterError(self._first_end)
        super()._check_start(deadline, complaint, absent)

    def _remove(self) -> None:
        """Stops what was placed, keeps its logs, and gives the room back."""
        self._stopping.set()
        for sections in (self._env_servers, self._dialled):
            self._stop_actors([one for one in sections if one in self._actors])
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None
        if self._connected:
            self._ray.shutdown()
            self._connected = False

    def _stop_actors(self, sections: list[str]) -> None:
        grace_s = self.config.services.grace_s
        asked = {one: self._actors[one].stop.remote(grace_s + 2.0) for one in sections}
        for section, answer in asked.items():
            try:
                log = self._ray.get(answer, timeout=grace_s + 2.0 + _MARGIN_S)
                (self._run.logs / f"{name_of(section)}.log").write_text(log, encoding="utf-8")
            except self._ray.exceptions.RayError as error:
                self._report(f"the {label_of(section)} is not stopped in order: {error}")
            self._followers[section].join(_MARGIN_S)  # or Ray would tell of a call that was cut off
            self._ray.kill(self._actors.pop(section))


def _free_port() -> int:
    """Returns a port that nobody listens on here."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port
