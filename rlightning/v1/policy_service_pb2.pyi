from rlightning.v1 import env_ret_pb2 as _env_ret_pb2
from rlightning.v1 import policy_response_pb2 as _policy_response_pb2
from rlightning.v1 import session_pb2 as _session_pb2
from rlightning.v1 import space_pb2 as _space_pb2
from rlightning.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_EXPLORE: _ClassVar[Mode]
    MODE_EXPLOIT: _ClassVar[Mode]

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_UNSPECIFIED: _ClassVar[Purpose]
    PURPOSE_TRAIN: _ClassVar[Purpose]
    PURPOSE_EVAL: _ClassVar[Purpose]
    PURPOSE_RECORD: _ClassVar[Purpose]
MODE_UNSPECIFIED: Mode
MODE_EXPLORE: Mode
MODE_EXPLOIT: Mode
PURPOSE_UNSPECIFIED: Purpose
PURPOSE_TRAIN: Purpose
PURPOSE_EVAL: Purpose
PURPOSE_RECORD: Purpose

class ActRequest(_message.Message):
    __slots__ = ("hello", "heartbeat", "step", "timing")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    hello: ActHello
    heartbeat: _session_pb2.Heartbeat
    step: ActStep
    timing: _session_pb2.Timing
    def __init__(self, hello: _Optional[_Union[ActHello, _Mapping]] = ..., heartbeat: _Optional[_Union[_session_pb2.Heartbeat, _Mapping]] = ..., step: _Optional[_Union[ActStep, _Mapping]] = ..., timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ...) -> None: ...

class ActHello(_message.Message):
    __slots__ = ("session", "min_policy_version", "policy")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MIN_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    session: _session_pb2.Hello
    min_policy_version: int
    policy: str
    def __init__(self, session: _Optional[_Union[_session_pb2.Hello, _Mapping]] = ..., min_policy_version: _Optional[int] = ..., policy: _Optional[str] = ...) -> None: ...

class ActStep(_message.Message):
    __slots__ = ("seq", "epoch", "env_ret", "mode", "purpose", "reset_state", "state")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENV_RET_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    RESET_STATE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    epoch: int
    env_ret: _env_ret_pb2.EnvRet
    mode: Mode
    purpose: Purpose
    reset_state: bool
    state: _tensor_pb2.Value
    def __init__(self, seq: _Optional[int] = ..., epoch: _Optional[int] = ..., env_ret: _Optional[_Union[_env_ret_pb2.EnvRet, _Mapping]] = ..., mode: _Optional[_Union[Mode, str]] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., reset_state: _Optional[bool] = ..., state: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ...) -> None: ...

class ActResponse(_message.Message):
    __slots__ = ("welcome", "heartbeat", "answer", "drain", "timing")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    welcome: ActWelcome
    heartbeat: _session_pb2.Heartbeat
    answer: ActAnswer
    drain: _session_pb2.Drain
    timing: _session_pb2.Timing
    def __init__(self, welcome: _Optional[_Union[ActWelcome, _Mapping]] = ..., heartbeat: _Optional[_Union[_session_pb2.Heartbeat, _Mapping]] = ..., answer: _Optional[_Union[ActAnswer, _Mapping]] = ..., drain: _Optional[_Union[_session_pb2.Drain, _Mapping]] = ..., timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ...) -> None: ...

class ActWelcome(_message.Message):
    __slots__ = ("session", "policy_version", "recurrent", "initial_state")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    RECURRENT_FIELD_NUMBER: _ClassVar[int]
    INITIAL_STATE_FIELD_NUMBER: _ClassVar[int]
    session: _session_pb2.Welcome
    policy_version: int
    recurrent: bool
    initial_state: _tensor_pb2.Value
    def __init__(self, session: _Optional[_Union[_session_pb2.Welcome, _Mapping]] = ..., policy_version: _Optional[int] = ..., recurrent: _Optional[bool] = ..., initial_state: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ...) -> None: ...

class ActAnswer(_message.Message):
    __slots__ = ("seq", "response", "error", "stages", "state")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    response: _policy_response_pb2.PolicyResponse
    error: _session_pb2.ErrorStatus
    stages: _session_pb2.Stages
    state: _tensor_pb2.Value
    def __init__(self, seq: _Optional[int] = ..., response: _Optional[_Union[_policy_response_pb2.PolicyResponse, _Mapping]] = ..., error: _Optional[_Union[_session_pb2.ErrorStatus, _Mapping]] = ..., stages: _Optional[_Union[_session_pb2.Stages, _Mapping]] = ..., state: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ...) -> None: ...

class WeightsHeader(_message.Message):
    __slots__ = ("policy_version", "total_bytes", "sha256", "learner_id", "policy")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    total_bytes: int
    sha256: bytes
    learner_id: str
    policy: str
    def __init__(self, policy_version: _Optional[int] = ..., total_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., learner_id: _Optional[str] = ..., policy: _Optional[str] = ...) -> None: ...

class PublishWeightsRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: WeightsHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[WeightsHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class PublishWeightsResponse(_message.Message):
    __slots__ = ("policy_version",)
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    def __init__(self, policy_version: _Optional[int] = ...) -> None: ...

class PullWeightsRequest(_message.Message):
    __slots__ = ("min_policy_version", "policy")
    MIN_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    min_policy_version: int
    policy: str
    def __init__(self, min_policy_version: _Optional[int] = ..., policy: _Optional[str] = ...) -> None: ...

class PullWeightsResponse(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: WeightsHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[WeightsHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class KeepLeaseRequest(_message.Message):
    __slots__ = ("learner_id", "policy", "leaving")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    policy: str
    leaving: bool
    def __init__(self, learner_id: _Optional[str] = ..., policy: _Optional[str] = ..., leaving: _Optional[bool] = ...) -> None: ...

class KeepLeaseResponse(_message.Message):
    __slots__ = ("policy_version", "lease_ms")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    lease_ms: int
    def __init__(self, policy_version: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class PolicyServiceDescribeRequest(_message.Message):
    __slots__ = ("timing",)
    TIMING_FIELD_NUMBER: _ClassVar[int]
    timing: _session_pb2.Timing
    def __init__(self, timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ...) -> None: ...

class PolicyServiceDescribeResponse(_message.Message):
    __slots__ = ("library_version", "policy_version", "sessions", "stats", "timing", "spec", "serving")
    LIBRARY_VERSION_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    library_version: str
    policy_version: int
    sessions: int
    stats: _tensor_pb2.Value
    timing: _session_pb2.Timing
    spec: _space_pb2.EnvMeta
    serving: bool
    def __init__(self, library_version: _Optional[str] = ..., policy_version: _Optional[int] = ..., sessions: _Optional[int] = ..., stats: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ..., timing: _Optional[_Union[_session_pb2.Timing, _Mapping]] = ..., spec: _Optional[_Union[_space_pb2.EnvMeta, _Mapping]] = ..., serving: _Optional[bool] = ...) -> None: ...
