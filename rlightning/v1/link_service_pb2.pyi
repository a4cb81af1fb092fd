from rlightning.v1 import session_pb2 as _session_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProbeRequest(_message.Message):
    __slots__ = ("payload", "answer_bytes", "timing")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ANSWER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    answer_bytes: int
    timing: _session_pb2.Timing
    def __init__(self, payload: _Optional[bytes] = ..., answer_bytes: _Optional[int] = ..., timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("payload", "timing", "ts_sent_ns", "boot_id", "protocol_version", "library_version")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    TS_SENT_NS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_VERSION_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    timing: _session_pb2.Timing
    ts_sent_ns: int
    boot_id: str
    protocol_version: int
    library_version: str
    def __init__(self, payload: _Optional[bytes] = ..., timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ..., ts_sent_ns: _Optional[int] = ..., boot_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., library_version: _Optional[str] = ...) -> None: ...
