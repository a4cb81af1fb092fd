from rlightning.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PolicyResponse(_message.Message):
    __slots__ = ("env_id", "data", "policy_version", "ts_policy_sent_ns", "multi_agent")
    ENV_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TS_POLICY_SENT_NS_FIELD_NUMBER: _ClassVar[int]
    MULTI_AGENT_FIELD_NUMBER: _ClassVar[int]
    env_id: str
    data: _tensor_pb2.Value
    policy_version: int
    ts_policy_sent_ns: int
    multi_agent: bool
    def __init__(self, env_id: _Optional[str] = ..., data: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ..., policy_version: _Optional[int] = ..., ts_policy_sent_ns: _Optional[int] = ..., multi_agent: _Optional[bool] = ...) -> None: ...
