"""Limits, times, listeners and credentials of gRPC connections."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from rlightning.utils.config.base import Config

MIB = 2**20
_HIGHEST_PORT = 65535


def check_address(address: str) -> str:
    """Returns an address that names a port or a socket file, as it is.

    Raises:
        ValueError: It is none; says what was expected and what came.
    """
    _, colon, port = address.rpartition(":")
    socket_file = address.startswith(("unix:", "unix-abstract:"))
    if not socket_file and not (colon and port.isdecimal() and int(port) <= _HIGHEST_PORT):
        raise ValueError(
            "expected HOST:PORT, [IPv6]:PORT or unix:PATH, with a port of at most "
            f"{_HIGHEST_PORT}, got {address!r}"
        )
    return address


class RpcConfig(Config):
    """Limits and times of the connections of one service, on both of its sides.

    Attributes:
        max_message_bytes: Largest gRPC message, in bytes, that either side sends or takes. The
            default has room for two observations of 64 MB, as there are where an episode ends.
        heartbeat_s: How often a client tells that it is alive, in seconds.
        lease_s: After how much silence, in seconds, either side takes the other for dead.
        resume_window_s: How long after a cut a session can still be taken over, in seconds.
        reconnect_initial_ms: Pause before the first new connection attempt, in milliseconds.
        reconnect_max_ms: The pause doubles up to this, in milliseconds.
        connect_timeout_ms: How long one connection attempt may take, in milliseconds.
        keepalive_time_s: Pause between transport pings, in seconds.
        keepalive_timeout_s: How long a ping may stay unanswered, in seconds. It waits behind what
            is under way, such as a batch on a slow line.
        max_sessions: Open sessions per method.
        info_budget_bytes: What a message may hold besides the observations and actions that its
            session's spec declares, in bytes.
        shared_memory_bytes: What a session may have of memory that both sides share if they are
            processes of one user on one Linux host, in bytes; large tensors of requests then do not
            pass through the connection. 0: none.
    """

    max_message_bytes: int = Field(default=160 * MIB, ge=64 * 2**10, le=2**31 - 1)
    heartbeat_s: float = Field(default=2.0, gt=0)
    lease_s: float = Field(default=10.0, gt=0)
    resume_window_s: float = Field(default=30.0, ge=0)
    reconnect_initial_ms: int = Field(default=100, ge=1)
    reconnect_max_ms: int = Field(default=1000, ge=1)
    connect_timeout_ms: int = Field(default=5000, ge=100)
    keepalive_time_s: float = Field(default=10.0, gt=0)
    keepalive_timeout_s: float = Field(default=5.0, gt=0)
    max_sessions: int = Field(default=1024, ge=1)
    info_budget_bytes: int = Field(default=MIB, ge=4096)
    shared_memory_bytes: int = Field(default=64 * MIB, ge=0, le=2**40)

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"lease_s ({self.lease_s:g}) must be at least twice heartbeat_s "
                f"({self.heartbeat_s:g}), or one late heartbeat ends a session"
            )
        if self.reconnect_max_ms < self.reconnect_initial_ms:
            raise ValueError(
                f"reconnect_max_ms ({self.reconnect_max_ms}) is below reconnect_initial_ms "
                f"({self.reconnect_initial_ms})"
            )
        return self


class TlsConfig(Config):
    """Certificate of a listener.

    Attributes:
        cert_file: PEM file with the certificate chain.
        key_file: PEM file with its private key.
        client_ca_file: PEM file with the authorities whose clients may connect; a client without a
            certificate of theirs is refused (mTLS). Absent: any client.
    """

    cert_file: str
    key_file: str
    client_ca_file: str | None = None


class ListenConfig(Config):
    """One listener.

    Attributes:
        address: `HOST:PORT`, `[IPv6]:PORT` or `unix:PATH`; port 0 lets the system choose.
        plaintext: Allow connections without TLS from other machines. A listener beyond loopback
            needs this or `tls`.
        tls: Certificate; absent: plaintext.
        tokens: YAML or JSON file with the tokens that may call; absent: no token is asked for.
    """

    address: str = "127.0.0.1:0"
    plaintext: bool = False
    tls: TlsConfig | None = None
    tokens: str | None = None

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        return check_address(address)


class ClientAuthConfig(Config):
    """What a client shows and expects.

    Attributes:
        token: Bearer token.
        token_file: File that holds the token, instead of `token`.
        tls: Use TLS, with the system's authorities unless `ca_file` names others.
        ca_file: PEM file with the authorities that may have signed the server's certificate;
            implies TLS.
        cert_file: PEM file with the client's own certificate chain; implies TLS.
        key_file: PEM file with its private key.
        server_name: Name that the server's certificate must hold, if not that of the address.
    """

    token: str | None = Field(default=None, repr=False)
    token_file: str | None = None
    tls: bool = False
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.token is not None and self.token_file is not None:
            raise ValueError("give token or token_file, not both")
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file belong together")
        return self

    @property
    def with_tls(self) -> bool:
        """Whether the client speaks TLS."""
        return self.tls or self.ca_file is not None or self.cert_file is not None
