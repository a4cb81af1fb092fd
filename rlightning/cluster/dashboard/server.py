"""Serves a page over HTTP, to look at only: its files, and a stream of server-sent events."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import files

from rlightning.cluster.dashboard.feed import Feed
from rlightning.errors import ConfigError
from rlightning.rpc.auth import is_loopback
from rlightning.utils.config.services import http_address
from rlightning.utils.waiting import wait_within

_LOG = logging.getLogger(__name__)

MAX_CLIENTS = 64
"""Connections at a time. One more gets the place of one that has not asked yet, or else 503."""

_HEAD_BYTES = 16 * 2**10
# A client has so long for all of its request, and then for each part of the answer.
_REQUEST_S = 10.0
_READ_S = 20.0
_CLOSE_S = 1.0
# Shows that a stream lives on while there is nothing new.
_STILL_HERE_S = 10.0
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/app.css": ("app.css", "text/css; charset=utf-8"),
    "/uPlot.js": ("uplot/uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uPlot.css": ("uplot/uPlot.min.css", "text/css; charset=utf-8"),
    "/uPlot.LICENSE": ("uplot/LICENSE", "text/plain; charset=utf-8"),
}
_EVENTS = "/events"
_HEADERS = {
    "Cache-Control": "no-cache",
    "Connection": "close",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _Refused(Exception):
    """A request that gets a status instead of what it asks for."""

    def __init__(self, status: HTTPStatus, reason: str, **headers: str) -> None:
        super().__init__(reason)
        self.status = status
        self.headers = headers


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    headers: Mapping[str, str]


class PageServer:
    """Answers GET and HEAD for the files of the page and the events of a feed, and nothing else.

    Belongs to one event loop. A client that is silent in its request, or does not read its answer,
    is let go; the former at once where another one needs its place. Only requests under a name of
    this machine are answered, so that no page from elsewhere reads along under a name that it lets
    point here.

    Args:
        address: `HOST:PORT`; port 0 lets the system choose.
        feed: What `/events` sends.

    Raises:
        ConfigError: It is no address.
    """

    def __init__(self, address: str, feed: Feed) -> None:
        try:
            host, _, port = http_address(address).rpartition(":")
        except ValueError as error:
            raise ConfigError(f"dashboard: {error}") from None
        self._host, self._port = host.strip("[]"), int(port)
        self._feed = feed
        name = socket.gethostname().lower()
        self._names = {"localhost", name, f"{name}.local", self._host.lower()} - {""}
        self._clients: set[asyncio.Task[None]] = set()
        # Those that have not asked for anything yet, oldest first.
        self._silent: dict[asyncio.Task[None], None] = {}
        self._pages = {
            path: ((files(__package__) / "page" / name).read_bytes(), kind)
            for path, (name, kind) in _FILES.items()
        }

    async def start(self) -> str:
        """Listens; returns the address that was bound.

        Raises:
            ConfigError: Nobody can listen there.
        """
        where = f"{self._host or '0.0.0.0'}:{self._port}"
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host or "0.0.0.0", self._port, limit=_HEAD_BYTES
            )
        except OSError as error:
            raise ConfigError(
                f"dashboard: cannot listen on {where}: {error.strerror or error}; "
                "port 0 lets the system choose"
            ) from error
        host, port = self._server.sockets[0].getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not is_loopback(address):
            _LOG.warning("%s shows the dashboard to anyone who reaches it", address)
        return address

    async def close(self) -> None:
        """Ends the feed and every connection; who reads gets the newest event before."""
        self._server.close()
        self._feed.end()
        if self._clients:
            _, slow = await asyncio.wait(self._clients, timeout=_CLOSE_S)
            for client in slow:
                client.cancel()
            await asyncio.gather(*slow, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._clients) >= MAX_CLIENTS and self._silent:
            self._let_go(next(iter(self._silent)))
        full = len(self._clients) >= MAX_CLIENTS
        self._clients.add(task)
        # `drain` then waits until the system has taken everything.
        writer.transport.set_write_buffer_limits(high=0)
        try:
            await self._answer(reader, writer, full=full)
            writer.close()
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
            pass  # gone, or silent for too long
        except asyncio.CancelledError:
            pass  # closed; the stream's callback would complain of it
        finally:
            self._clients.discard(task)
            if not writer.is_closing():
                writer.transport.abort()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, full: bool
    ) -> None:
        method = "GET"
        try:
            if full:
                raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many readers", Retry_After="5")
            request = await self._asked(reader)
            method = request.method
            self._check(request)
        except _Refused as error:
            body = f"{error}\n".encode()
            head = _head(error.status, "text/plain; charset=utf-8", len(body), **error.headers)
            return await _send(writer, head if method == "HEAD" else head + body)
        if request.path == _EVENTS:
            return await self._stream(request, writer)
        body, kind = self._pages[request.path]
        head = _head(HTTPStatus.OK, kind, len(body))
        return await _send(writer, head if method == "HEAD" else head + body)

    async def _asked(self, reader: asyncio.StreamReader) -> _Request:
        task = asyncio.current_task()
        assert task is not None
        self._silent[task] = None
        try:
            return await wait_within(_read_request(reader), _REQUEST_S)
        finally:
            self._silent.pop(task, None)

    def _let_go(self, client: asyncio.Task[None]) -> None:
        del self._silent[client]
        self._clients.discard(client)
        client.cancel()

    async def _stream(self, request: _Request, writer: asyncio.StreamWriter) -> None:
        await _send(writer, _head(HTTPStatus.OK, "text/event-stream; charset=utf-8", None))
        if request.method == "HEAD":
            return
        seen = self._feed.resume(request.headers.get("last-event-id", ""))
        await _send(writer, b"retry: 1000\n\n")
        while True:
            try:
                await wait_within(self._feed.newer(seen), _STILL_HERE_S)
            except asyncio.TimeoutError:
                await _send(writer, b": still here\n\n")
                continue
            if self._feed.last > seen:
                event, seen = self._feed.event(seen), self._feed.last
                await _send(writer, event)
            elif self._feed.ended:
                return

    def _check(self, request: _Request) -> None:
        if not self._is_mine(request.headers.get("host", "")):
            raise _Refused(
                HTTPStatus.MISDIRECTED_REQUEST,
                "this is not the host that the request is for; use an IP address or localhost",
            )
        if request.method not in {"GET", "HEAD"}:
            raise _Refused(
                HTTPStatus.METHOD_NOT_ALLOWED, "this page is to look at only", Allow="GET, HEAD"
            )
        if request.path != _EVENTS and request.path not in self._pages:
            raise _Refused(HTTPStatus.NOT_FOUND, "there is nothing here; the page is at /")

    def _is_mine(self, host: str) -> bool:
        """Tells whether a Host header names this machine; a name of others may lead here, too."""
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower() in self._names
        return True


async def _read_request(reader: asyncio.StreamReader) -> _Request:
    """Reads a request up to the end of its headers; a body is left unread.

    Raises:
        _Refused: It is no HTTP request, or a large one.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _Refused(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"expected at most {_HEAD_BYTES} bytes"
        ) from None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _Refused(HTTPStatus.BAD_REQUEST, "expected an HTTP/1.1 request")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or (name == "host" and name in headers):
            raise _Refused(HTTPStatus.BAD_REQUEST, "expected one 'Name: value' a line")
        headers[name] = value.strip()
    return _Request(words[0], words[1].partition("?")[0], headers)


def _head(status: HTTPStatus, kind: str, length: int | None, **more: str) -> bytes:
    headers = {**_HEADERS, "Content-Type": kind}
    if length is not None:
        headers["Content-Length"] = str(length)
    headers |= {name.replace("_", "-"): value for name, value in more.items()}
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *map(": ".join, headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Sends bytes; returns when the system has taken them all.

    Raises:
        asyncio.TimeoutError: The client reads too slowly, or not at all.
        OSError: It has gone.
    """
    writer.write(data)
    await wait_within(writer.drain(), _READ_S)
