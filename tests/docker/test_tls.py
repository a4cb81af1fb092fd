"""Env clients outside of the compose network, through published ports with TLS and tokens."""

import json
import os
import signal
import socket
import ssl
import subprocess
from contextlib import contextmanager
from datetime import timedelta

import pytest

from rlightning.cluster import keys
from rlightning.env.remote_client import SERVICE, EnvClient
from rlightning.rpc.channel import connect
from rlightning.rpc.loop import shared_loop
from rlightning.utils.config import ClientAuthConfig
from tests.docker.stack import HERE, RLIGHTNING, ROOT, Stack, run, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


@pytest.fixture
def folder(tmp_path, monkeypatch, built):
    """Keys as docs/remote-clients.md makes them, and a client's certificate that has expired."""
    made_in_image = ["--user", f"{os.getuid()}:{os.getgid()}", "-v", f"{tmp_path}:/here"]
    command = ["keys", "--host", "localhost", "--client", "robot", "--out", "/here/keys"]
    run("docker", "run", "--rm", *made_in_image, "rlightning/env_server", "rlightning", *command)
    files = keys._Files(tmp_path / "keys")
    late = keys._identity("late", files.authority(), timedelta(minutes=-1))
    files.write_identity("late", late)
    monkeypatch.setenv("KEYS", str(tmp_path / "keys"))
    monkeypatch.setenv("PUBLISH", "127.0.0.1")
    return tmp_path / "keys"


@pytest.fixture
def stack(folder):
    stack = Stack(ROOT / "compose.tls.yml", HERE / "mtls.yml", HERE / "longer.yml")
    try:
        stack.up()
        yield stack
    finally:
        stack.down()


def attached(server, *options):
    return subprocess.Popen(
        [RLIGHTNING, "attach", "CartPole-v1", "--server", server, "--name", "robot", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def one_line_more(said, words):
    """Waits until what is done has brought a line with these words into a log, and no other."""
    before = len(said(words))
    yield
    wait_until(lambda: len(said(words)) > before, 10, words)
    assert len(said(words)) == before + 1


def call_once(server, folder, token):
    """Attaches in one call without any other attempt; returns the code that it ends with."""
    auth = ClientAuthConfig(ca_file=str(folder / "ca.pem"), token=token)

    async def call():
        async with connect(server, auth=auth) as channel:
            stream = channel.stream_stream(f"/{SERVICE}/Attach")()
            return (await stream.code()).name

    return shared_loop().run(call())


def connect_once(port, folder, identity):
    """Makes one connection with TLS; returns what the server sends on it before it closes it."""
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.set_alpn_protocols(["h2"])
    if identity is not None:
        context.load_cert_chain(folder / f"{identity}.pem", folder / f"{identity}.key")
    with (
        socket.create_connection(("127.0.0.1", int(port)), timeout=30) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as encrypted,
    ):
        return encrypted.recv(1)


def inside(server, folder):
    """Returns the ids of the envs at an env server, and the sessions that clients have there."""
    auth = ClientAuthConfig(
        ca_file=str(folder / "ca.pem"), token_file=str(folder / "learner.token")
    )

    async def ask():
        async with EnvClient(server, auth=auth) as client:
            status = await client.describe()
        return [env.env_id for env in status.envs], status.stats["sessions"]

    return shared_loop().run(ask())


def test_a_client_elsewhere_needs_the_authority_a_token_and_where_asked_a_certificate(
    stack, folder
):
    def server_log():
        return stack("logs", "--no-log-prefix", "env_server")

    def said(words):
        return [line for line in server_log().splitlines() if words in line]

    port = stack("port", "env_server", 50443).rpartition(":")[2].strip()
    mutual = stack("port", "env_server", 50444).rpartition(":")[2].strip()
    ca = ["--ca", folder / "ca.pem"]
    token = ["--token-file", folder / "env.token"]

    before = inside(f"localhost:{port}", folder)
    late = [*ca, *token, "--cert", folder / "late.pem", "--key", folder / "late.key"]
    refusals = [
        ("this server wants a token", port, ca),
        ("the token is not known here", port, [*ca, "--token", "x" * 43]),
        ("a token with scope env", port, [*ca, "--token-file", folder / "learner.token"]),
        ("connect", port, token),  # no TLS
        ("connect", mutual, [*ca, *token]),
        ("connect", mutual, late),
    ]
    clients = [(words, attached(f"127.0.0.1:{at}", *shown)) for words, at, shown in refusals]
    for words, client in clients:
        _, err = client.communicate(timeout=90)
        assert client.returncode != 0
        (line,) = (line for line in err.splitlines() if line.startswith("error: "))
        assert words in line
    # A client whose connection broke before it heard has called again. So each of these calls once.
    learner = (folder / "learner.token").read_text().strip()
    for shown, code in (
        (None, "UNAUTHENTICATED"),
        ("x" * 43, "UNAUTHENTICATED"),
        (learner, "PERMISSION_DENIED"),
    ):
        with one_line_more(said, "refused a call"):
            assert call_once(f"localhost:{port}", folder, shown) == code
    assert len({json.loads(line)["message"] for line in said("refused a call")}) == 3
    for identity, reason in (("late", "has expired"), (None, "DID_NOT_RETURN_A_CERTIFICATE")):
        with one_line_more(said, reason):
            assert connect_once(mutual, folder, identity) == b""
    assert inside(f"localhost:{port}", folder) == before
    assert not said("client robot")

    for server, options in (
        (f"localhost:{port}", []),
        (f"localhost:{mutual}", ["--cert", folder / "robot.pem", "--key", folder / "robot.key"]),
    ):
        before = len(said("client robot opened"))
        client = attached(server, *ca, *token, *options)
        try:
            wait_until(
                lambda before=before: len(said("client robot opened")) == before + 1,
                60,
                "attached",
            )
        finally:
            client.send_signal(signal.SIGINT)
            print(*client.communicate(timeout=30))

    for name in ("policy_server", "buffer_server"):
        address = stack("port", name, 50443).strip().replace("127.0.0.1", "localhost")
        assert run(RLIGHTNING, "health", address, *ca) == "SERVING\n"
        # What is published is this listener alone.
        ports = stack.inspect(name)["NetworkSettings"]["Ports"]
        assert [port for port, published in ports.items() if published] == ["50443/tcp"]
