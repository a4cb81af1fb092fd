"""Which servers an address stands for."""

import asyncio
import socket

import pytest

from rlightning.errors import UnavailableError
from rlightning.rpc.replicas import auth_of_replica, find_replicas
from rlightning.utils.config import ClientAuthConfig


def known(monkeypatch, *ips):
    """Lets the name server know these numbers, whatever it is asked for."""

    async def getaddrinfo(self, host, port, **options):
        if not ips:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port))
            if "." in ip
            else (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (ip, port, 0, 0))
            for ip in ips
        ]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1:5", "[::1]:5", "unix:/tmp/x", "unix-abstract:x:5", "ipv4:10.0.0.1:5,10.0.0.2:5"],
)
async def test_what_is_no_name_is_one_server(address):
    assert await find_replicas(address) == [address]


@pytest.mark.parametrize(
    ("ips", "replicas"),
    [
        (["10.0.0.10", "10.0.0.9", "10.0.0.10"], ["10.0.0.9:5", "10.0.0.10:5"]),
        (["10.0.0.9"], ["10.0.0.9:5"]),
        (["fd00::2", "fd00::1"], ["[fd00::1]:5", "[fd00::2]:5"]),
        (["10.0.0.9", "10.0.0.8", "fd00::1", "fd00::2"], ["10.0.0.8:5", "10.0.0.9:5"]),
        (["127.0.0.1", "::1"], ["env:5"]),  # of one server, which may listen on one of them only
    ],
)
async def test_a_name_stands_for_the_servers_of_its_records(monkeypatch, ips, replicas):
    known(monkeypatch, *ips)
    assert await find_replicas("env:5") == replicas


async def test_a_name_that_is_gone_or_a_silent_name_server_is_told_in_time(monkeypatch):
    known(monkeypatch)
    with pytest.raises(UnavailableError, match="the name env is not known: .*Name or service"):
        await find_replicas("env:5")

    async def getaddrinfo(self, host, port, **options):
        await asyncio.sleep(60)

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    with pytest.raises(UnavailableError, match="the name env is not known: no answer"):
        await find_replicas("env:5", timeout_s=0.05)


def test_a_replica_shows_the_certificate_of_the_name():
    auth = ClientAuthConfig(ca_file="ca.pem")
    assert auth_of_replica(auth, "env:5", "10.0.0.9:5").server_name == "env"
    assert auth_of_replica(auth, "10.0.0.9:5", "10.0.0.9:5") is auth
    named = ClientAuthConfig(ca_file="ca.pem", server_name="other")
    assert auth_of_replica(named, "env:5", "10.0.0.9:5") is named
    assert auth_of_replica(None, "env:5", "10.0.0.9:5") is None
