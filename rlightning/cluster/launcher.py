"""Starts the services of a config as local processes, watches them, and stops them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlightning.cluster.process import ServiceProcess, label_of, role_of
from rlightning.cluster.runs import Run, write_atomically
from rlightning.errors import ClusterError, ConfigError, RemoteError
from rlightning.rpc import health
from rlightning.rpc.loop import shared_loop
from rlightning.utils.config import Config, MainConfig, ReplicatedServiceConfig, ServiceConfig

_POLL_S = 0.02
_PROBE_S = 1.0
_MISSED_PROBES = 3
# What stands before the reason in the last log lines of a service that gave up.
_REASON_MARKS = (" did not start: ", " cannot go on: ")


class LocalLauncher:
    """The services of one run: those without a configured `address` as child processes.

    A service that dies is reported at once, with its last log lines and the command that starts it
    again; the run may wait `services.restart_window_s` for that. Use as a context manager, or call
    `start` and `stop`.

    Args:
        config: Config of the run; copied.
        run: Folder for the effective config and the logs.
        report: Takes one line for people; called from several threads.

    Attributes:
        config: The effective config: every listener has the address that it bound.
        failed: Set when a service is gone for good; `check` raises then.
        sections: The services by name: env servers come last, since they dial the others, and stop
            first, since they feed them.
        hosts_envs: Whether the env servers are of this run, and do nothing for others.
    """

    def __init__(self, config: MainConfig, run: Run, *, report: Callable[[str], None]) -> None:
        self.config = config.model_copy(deep=True)
        self.failed = threading.Event()
        self._shards = _shards_of(self.config)
        policies = _replicas_of("policy", self.config.services.policy)
        envs = _replicas_of("env", self.config.services.env)
        self._replicas = policies | envs
        self._env_servers = tuple(envs or ("env",))
        self._dialled = (*(policies or ("policy",)), *(self._shards or ("buffer",)))
        self.sections = (*self._dialled, *self._env_servers)
        self.hosts_envs = not self.config.services.env.elsewhere
        self._run = run
        self._report = report
        self._failure: ClusterError | None = None
        self._stopping = threading.Event()
        self._processes: dict[str, ServiceProcess] = {}
        self._watchers: list[threading.Thread] = []
        self._strangers: set[str] = set()
        self._away: set[str] = set()
        self._window_s = self.config.services.restart_window_s

    def __enter__(self) -> LocalLauncher:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the services and returns when each is SERVING, or waits for its first weights.

        Raises:
            ConfigError: One would be dialled in plaintext at a listener with TLS.
            ClusterError: One died, or was not SERVING within `services.start_timeout_s`; those that
                were started are stopped again.
        """
        self._check_auth()
        deadline = time.monotonic() + self.config.services.start_timeout_s
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._kill_all)
            self._run.save_config(self.config)
            self._tell_of_absent()
            try:
                self._launch(self._dialled, deadline)
                self._launch(self._env_servers, deadline)
                self._wait_serving(deadline)
            except ClusterError as error:
                logs = str(self._run.logs)
                if logs in str(error) or not self._run.has_logs:
                    raise
                raise ClusterError(f"{error}; logs in {logs}") from None
            on_failure.pop_all()
        self._restart_with_all()
        self._run.begin()
        for section in self.sections:
            watcher = threading.Thread(target=self._watch, args=(section,), daemon=True)
            watcher.start()
            self._watchers.append(watcher)

    def _restart_with_all(self) -> None:
        """Lets a buffer server that began with a checkpoint come back with all that it has then."""
        buffer = self.config.buffer
        if buffer.restore not in ("none", "latest"):
            buffer.restore = "latest"
            for section in self._shards:
                self._tell_listeners(section)
            self._run.save_config(self.config)

    def check(self) -> None:
        """Raises when a service is gone for good.

        Raises:
            ClusterError: Which one, and how it ended.
        """
        if self._failure is not None:
            raise self._failure

    @property
    def waiting(self) -> bool:
        """Whether a service is away and waited for: no replica does its work."""
        return any(not self._is_spared(section) for section in tuple(self._away))

    def processes(self) -> Iterator[ServiceProcess]:
        """Yields the services that run as children of this process."""
        yield from self._processes.values()

    def stop(self) -> None:
        """Stops the services, env servers first; one that overstays its grace is killed."""
        self._stopping.set()
        try:
            self._stop_together(self._env_servers)
            self._stop_together(self._dialled)
        finally:
            self._kill_all()
        for watcher in self._watchers:
            watcher.join()
        for section in sorted(self._strangers):
            where = f"the {label_of(section)} at {self.address(section)}"
            self._report(f"{where} was started by hand and is left to itself")

    def summary(self) -> Iterator[str]:
        """Yields one line for each service: its state and where it is dialled."""
        for section in self.sections:
            serving = self._serving(section)
            state = "SERVING" if serving else "waits for weights"
            several = f"  {serving} replicas" if serving > 1 else ""
            yield f"{label_of(section):14} {state}  {self.address(section)}{several}"

    def address(self, section: str) -> str:
        """Returns where a service is dialled."""
        return self._service(section).dial_address

    def _service(self, section: str) -> ServiceConfig:
        service: ServiceConfig
        if section in self._shards:
            service = self._shards[section]
        elif section in self._replicas:
            service = self._replicas[section]
        else:
            service = getattr(self.config.services, section)
        return service

    def _launch(self, sections: Sequence[str], deadline: float) -> None:
        """Starts those of the services that are ours and records what they bound."""
        ours = [section for section in sections if self._service(section).address is None]
        for section in ours:
            self._processes[section] = ServiceProcess(
                section,
                self._run.config_file,
                self._run.logs,
                options=self._tell_listeners(section),
            )
        for section in ours:
            process = self._processes[section]
            while (announcement := process.announced()) is None:
                self._check_start(deadline, f"the {process.label} has not bound its port")
                time.sleep(_POLL_S)
            for listener, address in zip(
                self._service(section).listen, announcement.addresses, strict=True
            ):
                listener.address = address
            self._tell_listeners(section)
        if ours:
            self._tell_addresses(sections)
        self._run.save_config(self.config)

    def _tell_addresses(self, sections: Sequence[str]) -> None:
        """Writes into the config where those of the services that are several are dialled."""
        for role in ("policy", "env"):
            own = [one for one in sections if one in self._replicas and role_of(one) == role]
            if own:
                service: ReplicatedServiceConfig = getattr(self.config.services, role)
                service.addresses = [self.address(section) for section in own]
        if shards := [one for one in sections if one in self._shards]:
            self.config.buffer.storage.addresses = [self.address(one) for one in shards]

    def _tell_listeners(self, section: str) -> Sequence[str]:
        """Writes what is one server's own to a file; returns the options that name it.

        Of a shard these are listeners and folder, of a replica listeners and metrics.
        """
        if section not in {*self._shards, *self._replicas}:
            return ()
        file = self._run.config_file.with_name(f"{section}.yaml")
        write_atomically(file, self._own_config(section).to_yaml(), mode=0o600)
        return ("--config", str(file))

    def _own_config(self, section: str) -> Config:
        """Returns what the config of a shard or a replica has that those of others have not."""
        service, role = self._service(section), role_of(section)
        listen = [one.to_dict() for one in service.listen]
        own: dict[str, Any] = {"services": {role: {"listen": listen, "metrics": service.metrics}}}
        if role == "env" and section in self._replicas:
            own["services"]["env"] |= {"replica": section.replace("-", ""), "replicas": 1}
        if role == "buffer" and self.config.buffer.data_dir is not None:
            own["buffer"] = {"data_dir": str(Path(self.config.buffer.data_dir) / section)}
            names = self.config.buffer.restore.split(",")
            if len(names) == len(self._shards):  # each has a checkpoint of its own
                own["buffer"]["restore"] = names[list(self._shards).index(section)]
        return Config.from_dict(own)

    def _check_auth(self) -> None:
        for section in self.sections:
            service, role = self._service(section), role_of(section)
            dials_tls = service.auth is not None and service.auth.with_tls
            if service.address is None and service.listen[0].tls is not None and not dials_tls:
                raise ConfigError(
                    f"services.{role}.auth: expected ca_file, or tls: true, since the first of "
                    f"services.{role}.listen has TLS, and the others dial that one"
                )

    def _tell_of_absent(self) -> None:
        """Says which services are waited for that others have to start."""
        for section in self.sections:
            address = self._service(section).address
            if address is not None and not self._is_up(section):
                timeout_s = self.config.services.start_timeout_s
                self._report(
                    f"waiting up to {timeout_s:g} s for the {label_of(section)} at {address} ..."
                )

    def _is_up(self, section: str) -> bool:
        return self.probe(section, self._needed(section))

    def _needed(self, section: str) -> str:
        # One that waits for its first weights is SERVING once a learner has given it some.
        waits = section.startswith("policy") and self.config.policy.initial_weights == "none"
        return health.LIVENESS if waits else health.OVERALL

    def _wait_serving(self, deadline: float) -> None:
        for section in self.sections:
            while not self._is_up(section):
                self._check_start(deadline, self._not_serving(section), absent=section)
                time.sleep(_POLL_S)

    def _not_serving(self, section: str) -> str:
        return f"the {label_of(section)} at {self.address(section)} is not SERVING"

    def _check_start(self, deadline: float, complaint: str, absent: str | None = None) -> None:
        for process in self._processes.values():
            if process.poll() is not None:
                raise ClusterError(last_words(process))
        if time.monotonic() > deadline:
            timeout_s = self.config.services.start_timeout_s
            for section in self.sections:  # others may only wait for one that nobody can reach
                if self._service(section).address is not None and not self._is_up(section):
                    complaint, absent = self._not_serving(section), section
                    break
            reason = "" if absent is None else self._reason(absent)
            raise ClusterError(
                f"{complaint} after {timeout_s:g} s (services.start_timeout_s){reason}"
            )

    def _reason(self, section: str) -> str:
        """Returns what a service that is not SERVING says, or why it does not answer."""
        for answer in self._ask(section, self._needed(section)):
            if isinstance(answer, RemoteError):
                return f": {str(answer).removeprefix(f'{self.address(section)}: ')}"
            if answer is not health.ServingStatus.SERVING:
                return f": it says {answer.name}"
        return ""

    def probe(self, section: str, check: str = health.OVERALL) -> bool:
        """Returns whether a check of a service, or of one of its replicas, is SERVING.

        Blocks for at most a second, or two where a name server does not answer.
        """
        return self._serving(section, check) > 0

    def _serving(self, section: str, check: str = health.OVERALL) -> int:
        return sum(one is health.ServingStatus.SERVING for one in self._ask(section, check))

    def _ask(self, section: str, check: str) -> list[health.ServingStatus | RemoteError]:
        """Returns the answers of a service, or of each of its replicas."""
        service = self._service(section)
        address, auth = service.dial_address, service.auth
        asked = health.check_replicas(address, check, timeout_s=_PROBE_S, auth=auth)
        try:
            return list(shared_loop().run(asked).values())
        except RemoteError as error:
            return [error]

    def _watch(self, section: str) -> None:
        """Follows one service until the run ends or the service is gone for good."""
        process = self._processes.get(section)
        label = label_of(section)
        while not self._stopping.is_set():
            if process is not None:
                process.wait()
                if self._stopping.is_set():
                    return
                self._away.add(section)
                loss, window_s = self._report_death(process), self._window_s
                process = None  # who comes in its place is not our child
            else:
                if not self._lost_contact(section):
                    return
                self._away.add(section)
                loss = f"the {label} at {self.address(section)} does not answer"
                window_s = max(self._window_s, self._service(section).rpc.resume_window_s)
                self._report(f"{loss}; waiting up to {window_s:g} s for it")
            lost_at = time.monotonic()
            back = self._comes_back(section, window_s)
            self._away.discard(section)
            if not back:
                if not self._stopping.is_set():
                    self._failure = ClusterError(loss)
                    self.failed.set()
                return
            self._report(f"the {label} is SERVING again after {time.monotonic() - lost_at:.1f} s")
            if section in self._processes:
                self._strangers.add(section)

    def _report_death(self, process: ServiceProcess) -> str:
        loss = process.obituary()
        self._report(f"{loss}; last lines of {process.log}:")
        for line in process.tail():
            self._report(f"  | {line}")
        if self._is_spared(process.section):
            self._report("the other replicas go on; start it again with:")
            self._report(f"  {process.command}")
        elif self._window_s > 0:
            self._report(f"waiting up to {self._window_s:g} s; start it again with:")
            self._report(f"  {process.command}")
        return written_reason(process) or loss

    def _comes_back(self, section: str, window_s: float) -> bool:
        deadline = time.monotonic() + window_s
        while not self._stopping.is_set():
            if self._is_spared(section):
                deadline = time.monotonic() + window_s
            elif time.monotonic() >= deadline:
                return False
            if self._is_up(section):
                return True
            self._stopping.wait(0.2)
        return False

    def _is_spared(self, section: str) -> bool:
        """Whether another replica does the work of one that is away."""
        role = role_of(section)
        others = {one for one in self._replicas if role_of(one) == role} - {section}
        return section in self._replicas and not others <= self._away

    def _lost_contact(self, section: str) -> bool:
        """Probes until several probes in a row fail; False when the run ends first."""
        missed = 0
        while not self._stopping.wait(_PROBE_S):
            missed = 0 if self.probe(section, health.LIVENESS) else missed + 1
            if missed == _MISSED_PROBES:
                return True
        return False

    def _stop_together(self, sections: Sequence[str]) -> None:
        processes = [self._processes[section] for section in sections if section in self._processes]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + self.config.services.grace_s + 2.0
        for process in processes:
            if process.wait(max(0.0, deadline - time.monotonic())) is None:
                self._report(f"the {process.label} did not stop in time and is killed")
                process.kill()

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()


def _replicas_of(role: str, service: ReplicatedServiceConfig) -> dict[str, ServiceConfig]:
    """Returns the servers of a service by name; {} if there is one, or one name for all."""
    if service.address is not None or (service.replicas == 1 and not service.addresses):
        return {}
    one = service.model_copy(update={"addresses": []})
    number = len(service.addresses) or service.replicas
    return _several(role, one, number, service.addresses)


def _several(
    role: str, service: ServiceConfig, number: int, addresses: Sequence[str]
) -> dict[str, ServiceConfig]:
    """Returns the sections of several servers of a service by name.

    Those with an address run elsewhere; others listen, and show metrics, like the section of the
    service, each on a port of its own: the next one after that of the one before, or any.
    """
    servers = {}
    for index in range(number):
        server = servers[f"{role}-{index}"] = service.model_copy(deep=True)
        if addresses:
            server.address = addresses[index]
        for listener in server.listen:
            listener.address = _next_port(listener.address, index)
        if server.metrics is not None:
            server.metrics = _next_port(server.metrics, index)
    return servers


def _next_port(address: str, steps: int) -> str:
    """Returns an address some ports on; one that lets the system choose, or names none, as is."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + steps}" if port.isdecimal() and int(port) else address


def _shards_of(config: MainConfig) -> dict[str, ServiceConfig]:
    """Returns the buffer servers of sharded storage by name; {} if it is not sharded.

    Raises:
        ConfigError: Nothing says how many there are.
    """
    storage = config.buffer.storage
    if storage.type != "sharded":
        return {}
    if storage.num_shards is None and not storage.addresses:
        raise ConfigError(
            "buffer.storage.type: 'sharded' needs storage.num_shards, or storage.addresses of "
            "buffer servers"
        )
    return _several("buffer", config.services.buffer, storage.shards, storage.addresses)


def last_words(process: ServiceProcess) -> str:
    """Returns why a process ended: the error it wrote, or how it ended and its last log lines."""
    reason = written_reason(process)
    if reason is not None:
        return reason
    lines = "".join(f"\n  | {line}" for line in process.tail())
    return f"{process.obituary()}; last lines of {process.log}:{lines}"


def written_reason(process: ServiceProcess) -> str | None:
    """Returns the error that a process wrote before it ended; None if there is none."""
    for line in reversed(process.tail()):
        for mark in _REASON_MARKS:
            _, found, reason = line.partition(mark)
            if found:
                return f"{process.label}: {reason}"
        if line.startswith("error: "):
            return f"{process.label}: {line.removeprefix('error: ')}"
    return None
