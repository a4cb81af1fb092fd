"""A TCP proxy that does to a connection what networks do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

from typing_extensions import Self

_CHUNK = 64 * 1024
# What may be on its way in one direction of one connection: a link, not a warehouse.
_IN_FLIGHT = 64


class FaultProxy:
    """Forwards TCP connections to a target, with faults; lives in one event loop.

    ```python
    async with FaultProxy(server.address) as proxy:
        client = connect(proxy.address)
        proxy.delay_s = 0.04  # each way, from now on
        proxy.black_hole()    # nothing arrives any more, and nobody is told
        proxy.restore()
    ```

    Args:
        target: `HOST:PORT` of the server.

    Attributes:
        delay_s: How long each chunk is under way, in seconds, each way.
        delay_back_s: The same on the way back, if it is another; None: it is not.
        bytes_per_s: Bandwidth of each direction of each connection; None: as fast as it goes.
        accepted: Connections that were accepted so far.
    """

    def __init__(self, target: str) -> None:
        self.delay_s = 0.0
        self.delay_back_s: float | None = None
        self.bytes_per_s: float | None = None
        self.accepted = 0
        self._target = target
        self._port = 0
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    @property
    def address(self) -> str:
        """Where to connect; stays the same for the life of the proxy."""
        return f"127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Begins to accept connections, also again after `refuse`."""
        if self._server is None:
            self._server = await asyncio.start_server(
                self._accept, "127.0.0.1", self._port, reuse_address=True
            )
            self._port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Closes every connection and refuses new ones, as the machine of a dead server does."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    def cut(self) -> None:
        """Closes every connection in order (FIN); new ones are accepted."""
        for link in tuple(self._links):
            link.close()

    def reset(self) -> None:
        """Aborts every connection (RST); new ones are accepted."""
        for link in tuple(self._links):
            link.abort()

    def black_hole(self) -> None:
        """Forwards nothing more, on old and new connections, and tells nobody."""
        self._flowing.clear()

    def restore(self) -> None:
        """Ends a black hole; what was sent meanwhile arrives, as TCP would send it again."""
        self._flowing.set()

    async def close(self) -> None:
        """Closes everything."""
        await self.refuse()
        while self._links:
            await asyncio.wait([asyncio.ensure_future(link.gone.wait()) for link in self._links])

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        host, _, port = self._target.rpartition(":")
        link = _Link(writer)
        self._links.add(link)
        try:
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(host, int(port))
                link.ends.append(far_writer)
                await link.run(
                    self._forward(reader, far_writer, lambda: self.delay_s),
                    self._forward(
                        far_reader,
                        writer,
                        lambda: self.delay_s if self.delay_back_s is None else self.delay_back_s,
                    ),
                )
        finally:
            link.close()
            self._links.discard(link)
            link.gone.set()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        delay_s: Callable[[], float],
    ) -> None:
        """Carries one direction until it ends."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_IN_FLIGHT)
        arriving = asyncio.ensure_future(self._arrive(under_way, writer))
        loop = asyncio.get_running_loop()
        try:
            while True:
                data = await reader.read(_CHUNK)
                if self.bytes_per_s:
                    await asyncio.sleep(len(data) / self.bytes_per_s)
                await under_way.put((loop.time() + delay_s(), data))
                if not data:
                    break
            await arriving
        finally:
            arriving.cancel()
            await asyncio.wait({arriving})

    async def _arrive(
        self, under_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await under_way.get()
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            await self._flowing.wait()
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()


class _Link:
    """One connection through the proxy."""

    def __init__(self, near: asyncio.StreamWriter) -> None:
        self.ends = [near]
        self.gone = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, *directions: Coroutine[Any, Any, None]) -> None:
        """Carries both directions until one breaks or both have ended."""
        self._tasks = {asyncio.create_task(direction) for direction in directions}
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        self._stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """Closes both ends."""
        for end in self.ends:
            end.close()
        self._stop()

    def abort(self) -> None:
        """Resets both ends."""
        for end in self.ends:
            raw: socket.socket = end.get_extra_info("socket")
            # Lingering for no time: the kernel sends RST instead of FIN.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.transport.abort()
        self._stop()

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
