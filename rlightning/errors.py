"""Every error this library raises on purpose.

RLightningError
├── ConfigError            a configuration that cannot work
├── CodecError             bytes or values that the wire format cannot carry
│   └── MessageTooLargeError   with what it refers to, it passes a cap
├── EnvError               an env broke its contract
│   └── ResetNeededError   a step before the first reset
├── PolicyError            a policy broke its contract, or raised
│   └── BatcherOverloadedError
├── ReplayError            a buffer cannot do what was asked
│   ├── BufferEmptyError
│   ├── InvalidRowError    a row that does not fit what is stored already, or its declared spec
│   └── StorageFullError
├── ClusterError           a process of the cluster died, or was not ready in time
└── RemoteError            a peer answered with a status, or not at all
    ├── UnavailableError   no connection, or it was lost
    ├── DeadlineExceededError
    ├── UnauthenticatedError
    ├── PermissionDeniedError
    ├── AlreadyExistsError
    ├── NotFoundError
    ├── PreconditionError  a spec, epoch or state that does not match
    ├── InvalidRequestError
    └── ResourceExhaustedError
"""

from __future__ import annotations


class RLightningError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(RLightningError, ValueError):
    """A configuration that cannot work; names the key, what was expected and what came."""


class CodecError(RLightningError, ValueError):
    """A value the wire cannot carry, or bytes that are not a valid message.

    Attributes:
        path: Where in the value or message, such as `observation.camera[0]`; empty for the whole.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class MessageTooLargeError(CodecError):
    """A message is larger than its session allows, with what it refers to in shared memory."""


class EnvError(RLightningError):
    """An env raised, or returned what its spaces do not allow."""


class ObservationError(EnvError):
    """An env returned an observation that is not in the space it declared; a reset is no help."""


class ResetNeededError(EnvError):
    """An env was stepped before its first reset."""


class PolicyError(RLightningError):
    """A policy raised, or returned what its contract does not allow."""


class BatcherOverloadedError(PolicyError):
    """More requests are waiting for inference than the queue may hold."""


class ReplayError(RLightningError):
    """A buffer cannot do what was asked of it."""


class BufferEmptyError(ReplayError, ValueError):
    """A sample was asked of a buffer that holds nothing."""


class ClusterError(RLightningError):
    """A process of the cluster died, or was not ready in time."""


class InvalidRowError(ReplayError, ValueError):
    """A row that cannot be stored; the message names the field, what was expected and what came."""


class StorageFullError(ReplayError, RuntimeError):
    """A storage that does not overwrite has no room left."""


class RemoteError(RLightningError):
    """A peer answered with a status, or did not answer.

    Attributes:
        peer: Address of the peer; empty if not known.
        reason: An upper-case word for programs, such as `STATE_LOST`; empty if the peer gave none.
    """

    def __init__(self, message: str, *, peer: str = "", reason: str = "") -> None:
        super().__init__(f"{peer}: {message}" if peer else message)
        self.peer = peer
        self.reason = reason


class UnavailableError(RemoteError, ConnectionError):
    """No connection to the peer, or it was lost."""


class DeadlineExceededError(RemoteError, TimeoutError):
    """The peer did not answer in time."""


class UnauthenticatedError(RemoteError):
    """The peer wants a token, or does not accept the one that came."""


class PermissionDeniedError(RemoteError):
    """The token is valid but does not allow this call."""


class AlreadyExistsError(RemoteError):
    """Another client holds the session under this client id."""


class NotFoundError(RemoteError):
    """The peer does not have what was asked for."""


class PreconditionError(RemoteError):
    """The peer's state does not allow the call: another spec, an old epoch, a lost state."""


class InvalidRequestError(RemoteError, ValueError):
    """The peer found the request itself invalid."""


class ResourceExhaustedError(RemoteError):
    """A cap was reached: a message too large, a queue full, too many sessions."""
