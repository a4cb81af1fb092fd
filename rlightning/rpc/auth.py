"""TLS, mTLS, and bearer tokens with scopes."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, NamedTuple

import grpc
import grpc.aio
import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator
from typing_extensions import Self

from rlightning.errors import (
    ConfigError,
    PermissionDeniedError,
    RemoteError,
    UnauthenticatedError,
)
from rlightning.rpc import status
from rlightning.rpc.handlers import Context, Handler, MethodHandler, ServerInterceptor
from rlightning.rpc.options import Option
from rlightning.utils.config.rpc import ClientAuthConfig, ListenConfig

logger = logging.getLogger(__name__)

ADMIN = "admin"
ANY = "any"
"""What a method wants that every valid token may call; no scope of a token."""
Scope = Literal["env", "actor", "learner", "admin"]
_HEALTH = "/grpc.health.v1.Health/"


class TokenEntry(BaseModel):
    """One entry of a token file.

    Attributes:
        name: Whose token it is, for logs.
        token: The token itself; or else `sha256`.
        sha256: SHA-256 of the token, in hexadecimal digits, so that the file holds no secret.
        scopes: What it may call: `env`, `actor`, `learner`, or `admin` for everything.
        expires: When it ceases to be valid; a time without zone is UTC. Absent: never.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    token: str | None = None
    sha256: str | None = None
    scopes: list[Scope]
    expires: datetime | None = None

    @model_validator(mode="after")
    def _check_secret(self) -> Self:
        if (self.token is None) == (self.sha256 is None):
            raise ValueError("give token or sha256")
        if self.token is not None and len(self.token) < 16:
            raise ValueError("a token needs at least 16 characters")
        if self.sha256 is not None:
            try:
                valid = len(bytes.fromhex(self.sha256)) == 32
            except ValueError:
                valid = False
            if not valid:
                raise ValueError("sha256 needs 64 hexadecimal digits")
        return self


class _Known(NamedTuple):
    name: str
    digest: bytes
    scopes: frozenset[str]
    expires: datetime | None


class TokenTable:
    """The tokens of one listener."""

    def __init__(self, entries: list[TokenEntry]) -> None:
        self._known = [
            _Known(
                entry.name,
                hashlib.sha256(entry.token.encode()).digest()
                if entry.token is not None
                else bytes.fromhex(entry.sha256 or ""),
                frozenset(entry.scopes),
                entry.expires,
            )
            for entry in entries
        ]

    @classmethod
    def load(cls, path: str | Path) -> TokenTable:
        """Reads a YAML or JSON file with a list of `TokenEntry`.

        Raises:
            ConfigError: The file cannot be read, or an entry is not valid.
        """
        try:
            data = yaml.safe_load(_read(path))
        except yaml.YAMLError as error:
            raise ConfigError(f"token file {path}: {error}") from error
        try:
            return cls(TypeAdapter(list[TokenEntry]).validate_python(data))
        except ValidationError as error:
            # Only places and messages: the values are secrets.
            lines = (
                f"token file {path}: entry {'.'.join(map(str, e['loc']))}: {e['msg']}"
                for e in error.errors()
            )
            raise ConfigError("\n".join(lines)) from None

    def scopes_of(self, token: str) -> frozenset[str]:
        """Returns what a token may call.

        Takes the same time whichever entry matches, or none.

        Raises:
            UnauthenticatedError: The token is not known, or no longer valid.
        """
        digest = hashlib.sha256(token.encode()).digest()
        found: _Known | None = None
        for known in self._known:
            if hmac.compare_digest(known.digest, digest):
                found = known
        if found is None:
            raise UnauthenticatedError("the token is not known here")
        if found.expires is not None:
            expires = found.expires
            if expires.tzinfo is None:
                expires = expires.replace(tzinfo=timezone.utc)
            if expires <= datetime.now(timezone.utc):
                raise UnauthenticatedError(f"the token of {found.name} expired at {expires}")
        return found.scopes


class TokenInterceptor(ServerInterceptor):
    """Refuses calls without a fitting token before their handler exists; health needs none.

    Args:
        tokens: Who may call.
        scopes: By full method name, the scope that a token needs, or several of which it needs one,
            between blanks, or `ANY`; others need `admin`.
    """

    def __init__(self, tokens: TokenTable, scopes: Mapping[str, str]) -> None:
        self._tokens = tokens
        self._scopes = scopes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Returns the handler of the call, or one that ends it."""
        method: str = handler_call_details.method
        if not method.startswith(_HEALTH):
            try:
                self._check(method, handler_call_details.invocation_metadata)
            except RemoteError as error:
                logger.warning("refused a call of %s: %s", method, error)
                return refusal(error)
        return await continuation(handler_call_details)

    def _check(self, method: str, metadata: Any) -> None:
        for key, value in metadata or ():
            if key == "authorization":
                kind, _, token = value.partition(" ")
                if kind.lower() != "bearer":
                    raise UnauthenticatedError("authorization must be `Bearer TOKEN`")
                scopes = self._tokens.scopes_of(token.strip())
                needed = self._scopes.get(method, ADMIN).split()
                if ANY not in needed and scopes.isdisjoint((*needed, ADMIN)):
                    one_of = " or ".join(needed)
                    raise PermissionDeniedError(f"this call needs a token with scope {one_of}")
                return
        raise UnauthenticatedError(
            "this server wants a token: metadata `authorization: Bearer TOKEN`"
        )


def refusal(error: Exception) -> Handler:
    """Returns a handler that ends any call with the status of `error`, without reading from it."""

    async def refuse(requests: object, context: Context) -> None:
        await status.abort(context, error)

    return MethodHandler("stream_stream", refuse)


def check_listener(listen: ListenConfig) -> None:
    """Checks that a listener does not offer plaintext to other machines unasked.

    Raises:
        ConfigError: It listens beyond loopback, with neither TLS nor `plaintext: true`.
    """
    if listen.tls is not None or is_loopback(listen.address):
        return
    if not listen.plaintext:
        raise ConfigError(
            f"listener {listen.address} is reachable from other machines and has no TLS: give it "
            "`tls`, or say `plaintext: true` on it (--insecure)"
        )
    logger.warning(
        "%s accepts connections from other machines in plaintext: all that is sent can be read and "
        "changed on the way",
        listen.address,
    )


def is_loopback(address: str) -> bool:
    """Tells whether an address can only be reached from this machine."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or nothing: who knows where that leads
        return False


def server_credentials(listen: ListenConfig) -> grpc.ServerCredentials | None:
    """Returns the credentials of a listener; None for plaintext.

    Raises:
        ConfigError: A file cannot be read.
    """
    tls = listen.tls
    if tls is None:
        return None
    authorities = None if tls.client_ca_file is None else _read(tls.client_ca_file)
    return grpc.ssl_server_credentials(
        [(_read(tls.key_file), _read(tls.cert_file))],
        root_certificates=authorities,
        require_client_auth=authorities is not None,
    )


def channel_credentials(
    auth: ClientAuthConfig | None, options: list[Option]
) -> grpc.ChannelCredentials | None:
    """Returns the credentials of a channel; None for plaintext.

    Args:
        auth: What the client shows and expects.
        options: Options of the channel; an expected server name is added.

    Raises:
        ConfigError: A file cannot be read.
    """
    if auth is None or not auth.wants_tls:
        return None
    if auth.server_name is not None:
        options.append(("grpc.ssl_target_name_override", auth.server_name))
    return grpc.ssl_channel_credentials(
        None if auth.ca_file is None else _read(auth.ca_file),
        None if auth.key_file is None else _read(auth.key_file),
        None if auth.cert_file is None else _read(auth.cert_file),
    )


def call_metadata(auth: ClientAuthConfig | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata that shows the client's token.

    Not gRPC's call credentials: those are refused on connections without TLS, loopback included.

    Raises:
        ConfigError: The token file cannot be read.
    """
    if auth is None:
        return ()
    token = auth.token
    if auth.token_file is not None:
        token = _read(auth.token_file).decode("utf-8", "replace").strip()
    return () if token is None else (("authorization", f"Bearer {token}"),)


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
