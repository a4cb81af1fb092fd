from rlightning.v1 import space_pb2 as _space_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClientState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLIENT_STATE_UNSPECIFIED: _ClassVar[ClientState]
    CLIENT_STATE_RUNNING: _ClassVar[ClientState]
    CLIENT_STATE_RESETTING: _ClassVar[ClientState]
    CLIENT_STATE_LEAVING: _ClassVar[ClientState]
CLIENT_STATE_UNSPECIFIED: ClientState
CLIENT_STATE_RUNNING: ClientState
CLIENT_STATE_RESETTING: ClientState
CLIENT_STATE_LEAVING: ClientState

class Hello(_message.Message):
    __slots__ = ("protocol_version", "library_version", "client_id", "resume_token", "spec", "boot_id", "shared_memory")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    library_version: str
    client_id: str
    resume_token: str
    spec: _space_pb2.EnvMeta
    boot_id: str
    shared_memory: SharedMemory
    def __init__(self, protocol_version: _Optional[int] = ..., library_version: _Optional[str] = ..., client_id: _Optional[str] = ..., resume_token: _Optional[str] = ..., spec: _Optional[_Union[_space_pb2.EnvMeta, _Mapping]] = ..., boot_id: _Optional[str] = ..., shared_memory: _Optional[_Union[SharedMemory, _Mapping]] = ...) -> None: ...

class SharedMemory(_message.Message):
    __slots__ = ("pid", "fd", "size_bytes", "nonce")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    size_bytes: int
    nonce: bytes
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., size_bytes: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session_id", "resume_token", "epoch", "resumed", "max_message_bytes", "heartbeat_ms", "lease_ms", "resume_window_ms", "library_version", "boot_id", "protocol_version", "spec", "reconnect_initial_ms", "reconnect_max_ms", "shared_memory")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    RESUME_WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    RECONNECT_INITIAL_MS_FIELD_NUMBER: _ClassVar[int]
    RECONNECT_MAX_MS_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    resume_token: str
    epoch: int
    resumed: bool
    max_message_bytes: int
    heartbeat_ms: int
    lease_ms: int
    resume_window_ms: int
    library_version: str
    boot_id: str
    protocol_version: int
    spec: _space_pb2.EnvMeta
    reconnect_initial_ms: int
    reconnect_max_ms: int
    shared_memory: bool
    def __init__(self, session_id: _Optional[str] = ..., resume_token: _Optional[str] = ..., epoch: _Optional[int] = ..., resumed: _Optional[bool] = ..., max_message_bytes: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., resume_window_ms: _Optional[int] = ..., library_version: _Optional[str] = ..., boot_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., spec: _Optional[_Union[_space_pb2.EnvMeta, _Mapping]] = ..., reconnect_initial_ms: _Optional[int] = ..., reconnect_max_ms: _Optional[int] = ..., shared_memory: _Optional[bool] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("state", "busy_since_ns")
    STATE_FIELD_NUMBER: _ClassVar[int]
    BUSY_SINCE_NS_FIELD_NUMBER: _ClassVar[int]
    state: ClientState
    busy_since_ns: int
    def __init__(self, state: _Optional[_Union[ClientState, str]] = ..., busy_since_ns: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("deadline_ms", "reason")
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    reason: str
    def __init__(self, deadline_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ErrorStatus(_message.Message):
    __slots__ = ("code", "message", "reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    reason: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("clock_id", "sent_ns", "echo_sent_ns", "received_ns", "timeout_us")
    CLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    ECHO_SENT_NS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_NS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_US_FIELD_NUMBER: _ClassVar[int]
    clock_id: str
    sent_ns: int
    echo_sent_ns: int
    received_ns: int
    timeout_us: int
    def __init__(self, clock_id: _Optional[str] = ..., sent_ns: _Optional[int] = ..., echo_sent_ns: _Optional[int] = ..., received_ns: _Optional[int] = ..., timeout_us: _Optional[int] = ...) -> None: ...

class Stages(_message.Message):
    __slots__ = ("queue_us", "batch_wait_us", "inference_us", "batch_rows")
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    BATCH_WAIT_US_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_US_FIELD_NUMBER: _ClassVar[int]
    BATCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    queue_us: int
    batch_wait_us: int
    inference_us: int
    batch_rows: int
    def __init__(self, queue_us: _Optional[int] = ..., batch_wait_us: _Optional[int] = ..., inference_us: _Optional[int] = ..., batch_rows: _Optional[int] = ...) -> None: ...
