"""Where the services listen, where they are dialled, and their limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from rlightning.errors import ConfigError
from rlightning.utils.config.base import Config
from rlightning.utils.config.rpc import ClientAuthConfig, ListenConfig, RpcConfig, check_address

_REPLICA = re.compile(r"[A-Za-z0-9._-]{1,63}")


def http_address(address: Any) -> Any:
    """Returns where something is shown over HTTP; a port alone is one on 127.0.0.1.

    Raises:
        ValueError: It is no HOST:PORT.
    """
    if type(address) is int or (isinstance(address, str) and address.isdecimal()):
        address = f"127.0.0.1:{address}"
    if isinstance(address, str):
        if address.startswith("unix"):
            raise ValueError(f"expected HOST:PORT or a port, got {address!r}")
        check_address(address)
    return address


class ServiceConfig(Config):
    """One service.

    Attributes:
        listen: What it listens on; one address or one mapping stands for a list of one. Port 0 lets
            the system choose.
        address: Where others dial it. `rlightning serve` and `train` start a service only if this
            is absent.
        auth: What those who dial it show and expect.
        rpc: Limits and times of its connections, on both sides.
        replicas: Processes that do its work; one, but for `ReplicatedServiceConfig`.
        metrics: HOST:PORT where it shows its metrics to Prometheus, under `/metrics`; a port alone
            stands for one on 127.0.0.1, port 0 lets the system choose; None: nowhere.
    """

    listen: list[ListenConfig] = Field(default_factory=lambda: [ListenConfig()], min_length=1)
    address: str | None = None
    auth: ClientAuthConfig | None = None
    rpc: RpcConfig = Field(default_factory=RpcConfig)
    replicas: int = Field(default=1, ge=1, le=1)
    metrics: str | None = None

    @field_validator("listen", mode="before")
    @classmethod
    def listify_listen(cls, listen: Any) -> Any:
        """Makes one listener a list of one, and an address a listener."""
        listeners = [listen] if isinstance(listen, (str, Mapping, ListenConfig)) else listen
        if not isinstance(listeners, list):
            return listeners
        return [{"address": item} if isinstance(item, str) else item for item in listeners]

    @field_validator("address")
    @classmethod
    def check_address(cls, address: str | None) -> str | None:
        """Refuses what nobody can dial."""
        return None if address is None else check_address(address)

    @field_validator("metrics", mode="before")
    @classmethod
    def check_metrics(cls, metrics: Any) -> Any:
        """Makes a port an address, and refuses what is none."""
        return http_address(metrics)

    @property
    def dial_address(self) -> str:
        """Address at which others reach this service: `address`, or else its first listener.

        Raises:
            ConfigError: Neither names a port.
        """
        address = self.address or self.listen[0].address
        host, _, port = address.rpartition(":")
        if port == "0":
            raise ConfigError(
                f"no address to dial: '{address}' lets the system choose a port; set address"
            )
        host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
        return f"{host}:{port}" if host else address


class ReplicatedServiceConfig(ServiceConfig):
    """A service whose work several servers of the same config may do: replicas.

    Attributes:
        address: Where others dial it; a name with several addresses stands for as many replicas.
        addresses: Where others dial each replica, instead of `address`.
        replicas: Processes that `rlightning serve` and `train` start, where neither is given. With
            ports in `listen`, each replica has the next one after that of the one before, and so
            with `metrics`.
    """

    addresses: list[str] = Field(default_factory=list)
    replicas: int = Field(default=1, ge=1, le=256)

    @field_validator("addresses")
    @classmethod
    def check_addresses(cls, addresses: list[str]) -> list[str]:
        """Refuses what nobody can dial, and one server under two numbers."""
        if len(set(addresses)) != len(addresses):
            raise ValueError(f"expected each address once, got {addresses}")
        return [check_address(address) for address in addresses]

    @model_validator(mode="after")
    def check_replicas(self) -> Self:
        """Refuses two answers to where the replicas are."""
        if self.address is not None and self.addresses:
            raise ValueError("give address or addresses, not both")
        if self.replicas > 1 and self.addresses and len(self.addresses) != self.replicas:
            raise ValueError(
                f"replicas: {self.replicas} are to be started, and addresses names "
                f"{len(self.addresses)} that run elsewhere: give one of the two"
            )
        return self

    @property
    def dial_address(self) -> str:
        """Address of the first replica, or the name of all.

        Raises:
            ConfigError: No port is named.
        """
        return self.addresses[0] if self.addresses else super().dial_address

    @property
    def dial_addresses(self) -> list[str]:
        """Addresses of the replicas; one of them may be a name with several addresses.

        Raises:
            ConfigError: No port is named.
        """
        return self.addresses or [self.dial_address]

    @property
    def elsewhere(self) -> bool:
        """Whether it is said where it runs, so that nobody here starts it."""
        return self.address is not None or bool(self.addresses)


class EnvServiceConfig(ReplicatedServiceConfig):
    """The env server, or several of the same config, each with envs of its own: replicas.

    Attributes:
        pipeline_depth: Groups of rows in one env worker, each with one observation awaiting its
            answer, so that stepping overlaps inference; a worker with one sub-env has one group.
        chunk_ahead: Where an answer carries several actions: how many are left to be executed when
            the next answer is asked for; 0: none, and the env waits for it.
        step_inline_below_us: Env steps whose measured median is below this, in microseconds, run on
            the event loop, since handing them to a thread would cost more; 0 hands over all.
        attached_driver: Who steps the envs that clients attach: the `actor` loop, or an `external`
            program through `EnvService.Step`.
        min_clients: How many clients have to be attached before any env is stepped.
        clients_timeout_s: Seconds within which they have to be there; the server fails if not.
        replica: Name of this env server where several run the same config: it is part of the ids of
            the envs hosted here, and makes their seeds others. `auto` takes the name of the
            machine; None: there is no other. Who starts `replicas` gives each a name.
    """

    pipeline_depth: int = Field(default=2, ge=1)
    chunk_ahead: int = Field(default=0, ge=0)
    step_inline_below_us: int = Field(default=200, ge=0)
    attached_driver: Literal["actor", "external"] = "actor"
    min_clients: int = Field(default=0, ge=0)
    clients_timeout_s: float = Field(default=60.0, gt=0)
    replica: str | None = None

    @field_validator("replica")
    @classmethod
    def check_replica(cls, replica: str | None) -> str | None:
        """Refuses what cannot be a part of ids."""
        if replica is not None and not _REPLICA.fullmatch(replica):
            raise ValueError(f"expected 1 to 63 of A-Za-z0-9._-, got {replica!r}")
        return replica

    @model_validator(mode="after")
    def check_names(self) -> Self:
        """Refuses one name for several."""
        if self.replicas > 1 and self.replica is not None and not self.elsewhere:
            raise ValueError(
                f"replica: {self.replicas} replicas are to be started, each with a name of its own"
            )
        return self


class PolicyServiceConfig(ReplicatedServiceConfig):
    """The policy server, or several that are given the same weights: replicas."""


class ServicesConfig(Config):
    """All services, and how their processes are run.

    Attributes:
        env: The env server.
        policy: The policy server.
        buffer: The buffer server.
        reflection: Let clients ask which RPCs there are.
        start_timeout_s: Seconds within which every service must be SERVING.
        grace_s: Seconds that a service has to drain and stop.
        python_path: Folders, besides the current one, in which `module:Class` names are looked up;
            the commands add the folders of their config files.
        restart_window_s: Seconds that a run waits for a service that died to be SERVING again;
            0 ends the run at once.
    """

    env: EnvServiceConfig = Field(default_factory=EnvServiceConfig)
    policy: PolicyServiceConfig = Field(default_factory=PolicyServiceConfig)
    buffer: ServiceConfig = Field(default_factory=ServiceConfig)
    reflection: bool = False
    python_path: list[str] = Field(default_factory=list)
    start_timeout_s: float = Field(default=60.0, gt=0)
    grace_s: float = Field(default=10.0, gt=0)
    restart_window_s: float = Field(default=0.0, ge=0)
