"""Serves `grpc.health.v1` and nothing else, for a process that is no server otherwise."""

from __future__ import annotations

import grpc
import grpc.aio

from rlightning.errors import ConfigError
from rlightning.rpc.binding import check_bindable
from rlightning.rpc.health import SERVICE_NAME, Health
from rlightning.rpc.options import server_options
from rlightning.utils.config.rpc import RpcConfig

_STOP_S = 0.5


class HealthServer:
    """One plaintext listener, which tells whoever reaches it of one `Health`.

    Belongs to one event loop, from `start` on.

    Args:
        health: What it tells of.
    """

    def __init__(self, health: Health) -> None:
        self._health = health
        self._server: grpc.aio.Server | None = None

    async def start(self, address: str) -> str:
        """Listens; returns the address with the real port.

        Args:
            address: `HOST:PORT`; port 0 lets the system choose.

        Raises:
            ConfigError: Nobody can listen there.
        """
        await check_bindable(address)
        server = grpc.aio.server(options=server_options(RpcConfig()))
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE_NAME, self._health.handlers()),)
        )
        try:
            port = server.add_insecure_port(address)
        except (RuntimeError, ValueError) as error:
            await server.stop(None)
            raise ConfigError(f"cannot listen on {address}: {error}") from error
        await server.start()
        self._server = server
        return f"{address.rpartition(':')[0]}:{port}"

    async def stop(self) -> None:
        """Tells those who watch, and closes the port. Safe to repeat."""
        self._health.set_ready(False)
        self._health.close()
        if self._server is not None:
            await self._server.stop(_STOP_S)
