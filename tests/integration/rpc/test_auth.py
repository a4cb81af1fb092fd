"""TLS, client certificates and tokens on real sockets."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import ipaddress
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import grpc
import gymnasium as gym
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rlightning.env.remote_env.link import LockstepLink
from rlightning.errors import (
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from rlightning.rpc import health
from rlightning.rpc.channel import connect, unary
from rlightning.rpc.health import ServingStatus
from rlightning.rpc.server import serve
from rlightning.types import EnvMeta
from rlightning.utils.config.rpc import ClientAuthConfig, ListenConfig, TlsConfig
from rlightning.v1 import policy_service_pb2 as pb
from tests.integration.rpc.echo import METHOD, EchoService
from tests.integration.rpc.harness import FAST, EchoClient

DESCRIBE = "/rlightning.v1.PolicyService/Describe"
Code = grpc.StatusCode
NOW = datetime.datetime.now(datetime.timezone.utc)
DAY = datetime.timedelta(days=1)


class Identity(NamedTuple):
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_identity(name: str, issuer: Identity | None = None) -> Identity:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - DAY)
        .not_valid_after(NOW + DAY)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer is not None:
        names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    signer = key if issuer is None else issuer.key
    return Identity(builder.sign(signer, hashes.SHA256()), key)


def save(folder: Path, name: str, identity: Identity) -> tuple[str, str]:
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    certificate.write_bytes(identity.certificate.public_bytes(pem))
    key.write_bytes(identity.key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return str(certificate), str(key)


class Files(NamedTuple):
    ca: str
    tls: TlsConfig
    mtls: TlsConfig
    client: dict[str, str]
    stranger: dict[str, str]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    ca = make_identity("ca")
    ca_file, _ = save(folder, "ca", ca)
    certificate, key = save(folder, "server", make_identity("server.test", ca))
    client = save(folder, "robot", make_identity("robot", ca))
    stranger = save(folder, "stranger", make_identity("stranger", make_identity("other ca")))
    return Files(
        ca_file,
        TlsConfig(cert_file=certificate, key_file=key),
        TlsConfig(cert_file=certificate, key_file=key, client_ca_file=ca_file),
        {"cert_file": client[0], "key_file": client[1]},
        {"cert_file": stranger[0], "key_file": stranger[1]},
    )


async def describe(address: str, auth: ClientAuthConfig | None) -> None:
    async with connect(address, rpc=FAST, auth=auth) as channel:
        request = pb.PolicyServiceDescribeRequest()
        await unary(channel, DESCRIBE, request, pb.PolicyServiceDescribeResponse, timeout=5)


async def test_tls_carries_sessions_and_health(files):
    service = EchoService(FAST)
    server = await serve(service, listen=[ListenConfig(tls=files.tls)], rpc=FAST)
    await server.ready()
    auth = ClientAuthConfig(ca_file=files.ca)
    async with connect(server.address, rpc=FAST, auth=auth) as channel:
        client = EchoClient(channel)
        await client.session.start(5)
        assert (await client.ask()).seq == 1
        await client.session.close()
    assert await health.check(server.address, auth=auth) is ServingStatus.SERVING
    await describe(server.address, ClientAuthConfig(ca_file=files.ca, server_name="server.test"))
    for wrong in (
        None,  # plaintext
        ClientAuthConfig(tls=True),  # the system's authorities know nothing of ours
        ClientAuthConfig(ca_file=files.ca, server_name="another.test"),
    ):
        with pytest.raises(UnavailableError):
            await describe(server.address, wrong)
    await server.stop()


async def test_an_env_that_is_attached_in_plaintext_is_told_of_tls(files):
    server = await serve(EchoService(FAST), listen=[ListenConfig(tls=files.tls)], rpc=FAST)
    space = gym.spaces.Discrete(2)
    meta = EnvMeta(action_space=space, observation_space=space, num_envs=1)
    hint = "does it want TLS? give --ca"
    for auth, hinted in ((None, True), (ClientAuthConfig(tls=True), False)):
        link = LockstepLink(server.address, meta, "robot", rpc=FAST, auth=auth)
        with pytest.raises(UnavailableError, match="failed to connect") as caught:
            await link.start(1.0)
        assert (hint in str(caught.value), hint in link.trouble) == (hinted, hinted)
        assert caught.value.peer == server.address
        await link.close()
    await server.stop()


async def test_mtls_refuses_clients_without_a_certificate_of_the_right_authority(files):
    service = EchoService(FAST)
    server = await serve(service, listen=[ListenConfig(tls=files.mtls)], rpc=FAST)
    await server.ready()
    await describe(server.address, ClientAuthConfig(ca_file=files.ca, **files.client))
    for wrong in ({}, files.stranger):
        with pytest.raises(UnavailableError):
            await describe(server.address, ClientAuthConfig(ca_file=files.ca, **wrong))
    assert service.log == ["start", "describe"]
    await server.stop()


async def probe(address: str, **options: str | Path) -> tuple[int | None, str, str]:
    """Runs `rlightning health`; returns (exit code, stdout, stderr)."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [str(Path(sys.executable).parent / "rlightning"), "health", address, *words]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_probe_shows_a_certificate(files):
    server = await serve(EchoService(FAST), listen=[ListenConfig(tls=files.mtls)], rpc=FAST)
    await server.ready()
    cert, key = files.client.values()
    shown = {"ca": files.ca, "cert": cert, "key": key, "token": "any"}
    assert await probe(server.address, **shown) == (0, "SERVING\n", "")
    code, _, err = await probe(server.address, ca=files.ca)
    assert (code, len(err.splitlines())) == (1, 1)
    assert await probe(server.address, cert=cert) == (
        2,
        "",
        "error: --cert and --key belong together\n",
    )
    code, _, err = await probe("nonsense")
    assert (code, err[:33]) == (2, "error: ADDR: expected HOST:PORT, ")
    await server.stop()


TOKENS = {name: f"{name}-token-0123456789" for name in ("env", "actor", "admin", "late")}


@pytest.fixture
def token_file(tmp_path) -> str:
    entries = [
        {"name": "env", "token": TOKENS["env"], "scopes": ["env"]},
        {
            "name": "actor",
            "sha256": hashlib.sha256(TOKENS["actor"].encode()).hexdigest(),
            "scopes": ["actor"],
            "expires": (NOW + DAY).isoformat(),
        },
        {"name": "admin", "token": TOKENS["admin"], "scopes": ["admin"]},
        {
            "name": "late",
            "token": TOKENS["late"],
            "scopes": ["admin"],
            "expires": "2020-01-01T00:00:00",
        },
    ]
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(entries))
    return str(path)


async def test_tokens_open_what_their_scope_allows(token_file, tmp_path):
    service = EchoService(FAST)
    server = await serve(service, listen=[ListenConfig(tokens=token_file)], rpc=FAST)
    await server.ready()
    await describe(server.address, ClientAuthConfig(token=TOKENS["env"]))
    await describe(server.address, ClientAuthConfig(token=TOKENS["admin"]))
    in_file = tmp_path / "token"
    in_file.write_text(TOKENS["admin"] + "\n")
    await describe(server.address, ClientAuthConfig(token_file=str(in_file)))
    refused = {
        UnauthenticatedError: (None, ClientAuthConfig(token="x" * 20), TOKENS["late"]),
        PermissionDeniedError: (TOKENS["actor"],),
    }
    for kind, shown in refused.items():
        for auth in shown:
            wanted = ClientAuthConfig(token=auth) if isinstance(auth, str) else auth
            with pytest.raises(kind) as error:
                await describe(server.address, wanted)
            assert "x" * 20 not in str(error.value)
    assert "needs a token with scope env or learner" in str(error.value)
    async with connect(
        server.address, rpc=FAST, auth=ClientAuthConfig(token=TOKENS["actor"])
    ) as channel:
        client = EchoClient(channel)
        await client.session.start(5)
        assert (await client.ask()).seq == 1
        await client.session.close()
    assert await health.check(server.address) is ServingStatus.SERVING  # needs no token
    await server.stop()


async def test_a_call_without_a_token_is_refused_while_the_service_starts(token_file):
    service = EchoService(FAST)
    service.go.clear()
    server = await serve(service, listen=[ListenConfig(tokens=token_file)], rpc=FAST)
    begun = time.monotonic()
    with pytest.raises(UnauthenticatedError):
        await describe(server.address, None)
    assert time.monotonic() - begun < 15
    await server.stop()


@pytest.mark.parametrize("token", [None, "wrong-token-0123456789", TOKENS["env"]])
async def test_a_refused_stream_leaves_no_trace(token_file, token):
    service = EchoService(FAST)
    called = []
    run = service.handler.on_open
    service.handler.on_open = lambda *args: called.append(args) or run(*args)
    add = service.registry.add
    service.registry.add = lambda stream: called.append(stream) or add(stream)
    server = await serve(service, listen=[ListenConfig(tokens=token_file)], rpc=FAST)
    await server.ready()
    async with connect(server.address, rpc=FAST, auth=ClientAuthConfig(token=token)) as channel:
        client = EchoClient(channel)
        with pytest.raises((UnauthenticatedError, PermissionDeniedError)):
            await client.session.start(5)
        # Without a message: where the refusal ends a write, gRPC's code is INTERNAL.
        call = channel.stream_stream(METHOD)()
        assert await call.code() in (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)
        call.cancel()
    assert called == []
    assert tuple(service.registry.sessions) == ()
    assert service.handler.opened == []
    await server.stop()


async def test_each_listener_has_its_own_tokens(token_file):
    service = EchoService(FAST)
    server = await serve(
        service, listen=[ListenConfig(), ListenConfig(tokens=token_file)], rpc=FAST
    )
    await server.ready()
    await describe(server.addresses[0], None)
    with pytest.raises(UnauthenticatedError):
        await describe(server.addresses[1], None)
    await server.stop()
