"""The three services as processes of their own, started one by one as people do by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typing_extensions import Self

from rlightning.testing import ServerProcess, free_address, wait_until
from rlightning.utils.failpoints import VARIABLE

NAMES = {
    "policy": "rlightning.v1.PolicyService",
    "buffer": "rlightning.v1.BufferService",
    "env": "rlightning.v1.EnvService",
}


class Services:
    """Policy, buffer and env server on addresses that they come back under.

    Args:
        folder: For the config, the logs and the announcements.
        config: YAML of all services.
        python_options: Options of the interpreter.
        names: Which of them to start.
        failpoints: Of each, what is armed until it is restarted.

    Attributes:
        addresses: Where each listens.
        dialled: Where the env server dials the others; change it before they start.
        processes: Those that were started.
    """

    def __init__(
        self,
        folder: Path,
        config: str,
        *,
        python_options: Sequence[str] = (),
        names: Sequence[str] = tuple(NAMES),
        failpoints: Mapping[str, str] | None = None,
    ) -> None:
        self.addresses = {name: free_address() for name in NAMES}
        self.dialled = {name: self.addresses[name] for name in ("policy", "buffer")}
        self.processes: dict[str, ServerProcess] = {}
        self._folder = folder
        self._file = folder / "config.yaml"
        self._file.write_text(config)
        self._python_options = python_options
        self._names = names
        self._failpoints = dict(failpoints or {})
        self._stack = ExitStack()

    def _arguments(self, name: str) -> list[str]:
        arguments = [
            *(*self._python_options, "-m", f"rlightning.services.{name}_server"),
            *("--config", str(self._file), "--listen", self.addresses[name]),
        ]
        for other, address in self.dialled.items() if name == "env" else ():
            arguments += ["--set", f"services.{other}.address={address}"]
        return arguments

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name in self._names:
                folder = self._folder / name
                folder.mkdir()
                armed = {VARIABLE: self._failpoints.get(name, "")}
                process = ServerProcess(self._arguments(name), folder, environment=armed)
                self.processes[name] = stack.enter_context(process)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def kill(self, name: str) -> None:
        """Ends one as a crash would."""
        self.processes[name].kill()

    def restart(self, name: str) -> None:
        """Starts it again under its address."""
        self.processes[name].environment.clear()
        self.processes[name].start()

    def status(self, name: str, service: str = "") -> str:
        """What a stock health client is told; `DOWN` when it cannot connect."""
        with grpc.insecure_channel(self.addresses[name]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            except grpc.RpcError as error:
                return "DOWN" if error.code() is grpc.StatusCode.UNAVAILABLE else error.code().name
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    def wait_serving(self, *names: str, timeout_s: float = 60.0) -> None:
        """Waits until these, or all, are SERVING; fails at once when one has ended."""
        for name in names or self.processes:
            wait_until(
                lambda name=name: self._is_serving(name), timeout_s, f"{name} is not SERVING"
            )

    def _is_serving(self, name: str) -> bool:
        process = self.processes[name]
        assert process.child.poll() is None, process.log
        return self.status(name) == "SERVING"
