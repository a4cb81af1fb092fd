"""The page over real sockets: what is served, to whom, and who is let go."""

import asyncio
import contextlib
import json
import socket

import pytest

from rlightning.cluster.dashboard import server as server_module
from rlightning.cluster.dashboard.feed import Feed
from rlightning.cluster.dashboard.server import MAX_CLIENTS, PageServer
from rlightning.errors import ConfigError
from rlightning.testing import assert_eventually

FILES = ("/", "/app.js", "/app.css", "/uPlot.js", "/uPlot.css", "/uPlot.LICENSE")


@contextlib.asynccontextmanager
async def serving(address="127.0.0.1:0"):
    feed = Feed(("time",))
    server = PageServer(address, feed)
    bound = await server.start()
    try:
        yield feed, server, bound
    finally:
        await server.close()


async def connect(address):
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host.strip("[]"), int(port), limit=2**24)


async def ask(address, head, host=None):
    """Sends a request and returns (status, headers, body) of its answer."""
    reader, writer = await connect(address)
    lines = [head, *([] if host == "" else [f"Host: {host or address}"]), "", ""]
    writer.write("\r\n".join(lines).encode())
    try:
        return parse(await reader.read())
    finally:
        writer.close()


def parse(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


class Reader:
    """Reads events as a browser does."""

    def __init__(self, address, last_event_id=None):
        self._address = address
        self._last = last_event_id

    async def __aenter__(self):
        self.stream, self._writer = await connect(self._address)
        name = f"Last-Event-ID: {self._last}\r\n" if self._last else ""
        self._writer.write(f"GET /events HTTP/1.1\r\nHost: {self._address}\r\n{name}\r\n".encode())
        head = await self.stream.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        assert b"text/event-stream" in head
        return self

    async def __aexit__(self, *error):
        self._writer.close()

    async def event(self):
        """The next event: (id, data)."""
        while True:
            text = (await self.stream.readuntil(b"\n\n")).decode()
            fields = dict(line.split(": ", 1) for line in text.strip().split("\n"))
            if "data" in fields:
                return fields["id"], json.loads(fields["data"])


async def test_the_page_and_what_it_needs_come_from_here_alone():
    async with serving() as (_, _, address):
        for path in FILES:
            status, headers, body = await ask(address, f"GET {path}?x=1 HTTP/1.1")
            assert status == 200
            assert int(headers["Content-Length"]) == len(body) > 100
            assert "default-src 'none'; script-src 'self'" in headers["Content-Security-Policy"]
            assert headers["X-Content-Type-Options"] == "nosniff"
            if path in FILES[:3]:
                assert b"://" not in body
            assert (await ask(address, f"HEAD {path} HTTP/1.1"))[1:] == (headers, b"")


def test_the_page_is_small():
    pages = PageServer("127.0.0.1:0", Feed(("time",)))._pages
    assert sum(len(pages[path][0]) for path in ("/", "/app.js", "/app.css")) < 30_000


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("POST / HTTP/1.1", 405),
        ("POST /events HTTP/1.1", 405),
        ("DELETE /nothing HTTP/1.1", 405),
        ("OPTIONS * HTTP/1.1", 405),
        ("GET /nothing HTTP/1.1", 404),
        ("GET /../server.py HTTP/1.1", 404),
        ("GET /page/app.js HTTP/1.1", 404),
        ("GET /%2e%2e/server.py HTTP/1.1", 404),
        ("GET http://elsewhere/ HTTP/1.1", 404),
        ("GET /", 400),
        ("GET / HTTP/2.0", 400),
        ("\x16\x03\x01 \x02 \x00", 400),
        ("GET / HTTP/1.1\r\nHost: 127.0.0.1", 400),
        ("GET / HTTP/1.1\r\nno header", 400),
        ("GET / HTTP/1.1\r\nX: " + "x" * 20_000, 431),
    ],
)
async def test_what_is_refused(head, status):
    async with serving() as (_, _, address):
        assert (await ask(address, head))[0] == status
        assert (await ask(address, "GET / HTTP/1.1"))[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200),
        ("LOCALHOST", 200),
        ("192.168.3.4:50050", 200),
        ("[::1]:50050", 200),
        (socket.gethostname(), 200),
        ("", 421),
        ("evil.example:50050", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421),
        ("[evil.example]", 421),
    ],
)
async def test_only_names_of_this_machine_are_answered(host, status):
    async with serving() as (feed, _, address):
        feed.publish({}, (1.0,))
        assert (await ask(address, "GET / HTTP/1.1", host))[0] == status
        assert (await ask(address, "HEAD /events HTTP/1.1", host))[0] == status


async def test_readers_see_what_happens_and_who_comes_late_sees_what_happened():
    async with serving() as (feed, _, address):
        async with Reader(address) as early:
            feed.publish({"n": 1}, (1.0,))
            assert (await early.event())[1]["points"] == [[1.0]]
            feed.publish({"n": 2}, (2.0,))
            name, data = await early.event()
            assert (data["state"], data["points"], data["fresh"]) == ({"n": 2}, [[2.0]], False)
            async with Reader(address) as late:
                data = (await late.event())[1]
                assert (data["points"], data["fresh"]) == ([[1.0], [2.0]], True)
        feed.publish({"n": 3}, (3.0,))
        async with Reader(address, last_event_id=name) as back:
            assert (await back.event())[1]["points"] == [[3.0]]


async def test_the_last_event_reaches_the_readers_before_the_end():
    async with serving() as (feed, server, address):
        async with Reader(address) as reader:
            feed.publish({"n": 1}, (1.0,))
            await reader.event()
            feed.publish({"n": 2}, (2.0,))
            await server.close()
            assert (await reader.event())[1]["state"] == {"n": 2}
            assert await reader.stream.read() == b""
        with pytest.raises(OSError, match="refused|Connect"):
            await connect(address)


async def test_many_readers_at_once_and_one_too_many_is_told_so():
    async with serving() as (feed, _, address), contextlib.AsyncExitStack() as stack:
        readers = [await stack.enter_async_context(Reader(address)) for _ in range(MAX_CLIENTS)]
        assert (await ask(address, "GET / HTTP/1.1"))[0] == 503
        feed.publish({"n": 1}, (1.0,))
        got = await asyncio.gather(*(reader.event() for reader in readers))
        assert {data["state"]["n"] for _, data in got} == {1}
        await readers[0].__aexit__()
        feed.publish({"n": 2}, (2.0,))  # by which it is noticed that one has gone

        async def answered():
            feed.publish({"n": 3}, (3.0,))
            return (await ask(address, "GET / HTTP/1.1"))[0] == 200

        await assert_eventually(answered)


async def test_silent_connections_keep_no_reader_out():
    async with serving() as (_, server, address), contextlib.AsyncExitStack() as stack:
        reader = await stack.enter_async_context(Reader(address))
        silent = [await connect(address) for _ in range(2 * MAX_CLIENTS)]
        for _, writer in silent:
            stack.callback(writer.close)
        await assert_eventually(lambda: len(server._clients) == MAX_CLIENTS)
        for _ in range(3):
            assert (await asyncio.wait_for(ask(address, "GET / HTTP/1.1"), 30))[0] == 200
        # The oldest had to go, and no reader.
        assert await silent[0][0].read() == b""
        assert not silent[-1][0].at_eof()
        assert not reader.stream.at_eof()


async def test_a_slow_reader_gets_fewer_events_but_every_point():
    state = {"filler": "x" * 250_000}
    async with serving() as (feed, _, address), Reader(address) as reader:
        count = 200
        for number in range(count):  # 50 MB, more than sockets hold
            feed.publish({**state, "n": number}, (float(number),))
            await asyncio.sleep(0)
        points, events, data = [], 0, {}
        while not points or points[-1] != [count - 1.0]:
            text = (await reader.stream.readuntil(b"\n\n")).decode()
            if "data: " in text:
                data = json.loads(text.partition("data: ")[2])
                points += data["points"]
                events += 1
        assert points == [[float(number)] for number in range(count)]
        assert events < count / 2
        assert data["state"]["n"] == count - 1


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\nHost: local"])
async def test_who_is_silent_in_the_request_is_let_go(monkeypatch, head):
    monkeypatch.setattr(server_module, "_REQUEST_S", 0.2)
    async with serving() as (_, server, address):
        reader, writer = await connect(address)
        writer.write(head)
        assert await reader.read() == b""
        writer.close()
        assert not server._clients


async def test_who_does_not_read_is_let_go(monkeypatch):
    monkeypatch.setattr(server_module, "_READ_S", 0.3)
    async with serving() as (feed, server, address), Reader(address):

        async def let_go():
            feed.publish({"filler": "x" * 1_000_000}, (1.0,))
            return not server._clients

        await assert_eventually(let_go)


async def test_a_stream_without_news_shows_that_it_lives(monkeypatch):
    monkeypatch.setattr(server_module, "_STILL_HERE_S", 0.05)
    async with serving() as (_, _, address), Reader(address) as reader:
        while await reader.stream.readuntil(b"\n\n") != b": still here\n\n":
            pass


async def test_where_it_listens(caplog):
    async with serving("127.0.0.1:0") as (_, _, address):
        with pytest.raises(ConfigError, match=f"dashboard: cannot listen on {address}"):
            await PageServer(address, Feed(("time",))).start()
    assert not caplog.records
    async with serving("0.0.0.0:0") as (_, _, address):
        assert "shows the dashboard to anyone" in caplog.text
        assert (await ask(address, "GET / HTTP/1.1", "evil.example"))[0] == 421


@pytest.mark.parametrize("address", ["here", "127.0.0.1", "unix:/tmp/x", "127.0.0.1:70000"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError, match="dashboard: expected HOST:PORT"):
        PageServer(address, Feed(("time",)))
