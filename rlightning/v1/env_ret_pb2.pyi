from rlightning.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ActionSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTION_SOURCE_UNSPECIFIED: _ClassVar[ActionSource]
    ACTION_SOURCE_POLICY: _ClassVar[ActionSource]
    ACTION_SOURCE_HUMAN: _ClassVar[ActionSource]
    ACTION_SOURCE_HOLD: _ClassVar[ActionSource]
    ACTION_SOURCE_ZERO: _ClassVar[ActionSource]
    ACTION_SOURCE_CLIPPED: _ClassVar[ActionSource]
ACTION_SOURCE_UNSPECIFIED: ActionSource
ACTION_SOURCE_POLICY: ActionSource
ACTION_SOURCE_HUMAN: ActionSource
ACTION_SOURCE_HOLD: ActionSource
ACTION_SOURCE_ZERO: ActionSource
ACTION_SOURCE_CLIPPED: ActionSource

class EnvRet(_message.Message):
    __slots__ = ("env_id", "observation", "last_reward", "last_terminated", "last_truncated", "info", "extra", "ts_env_sent_ns", "multi_agent", "executed_action", "action_source", "answered_seq", "chunk_index", "ts_observed_ns", "episode_id", "step", "rows", "final_rows", "final_observation", "final_info")
    ENV_ID_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    LAST_REWARD_FIELD_NUMBER: _ClassVar[int]
    LAST_TERMINATED_FIELD_NUMBER: _ClassVar[int]
    LAST_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    TS_ENV_SENT_NS_FIELD_NUMBER: _ClassVar[int]
    MULTI_AGENT_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_ACTION_FIELD_NUMBER: _ClassVar[int]
    ACTION_SOURCE_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_SEQ_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    TS_OBSERVED_NS_FIELD_NUMBER: _ClassVar[int]
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FINAL_ROWS_FIELD_NUMBER: _ClassVar[int]
    FINAL_OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    FINAL_INFO_FIELD_NUMBER: _ClassVar[int]
    env_id: str
    observation: _tensor_pb2.Value
    last_reward: _tensor_pb2.Value
    last_terminated: _tensor_pb2.Value
    last_truncated: _tensor_pb2.Value
    info: _tensor_pb2.Value
    extra: _tensor_pb2.Value
    ts_env_sent_ns: int
    multi_agent: bool
    executed_action: _tensor_pb2.Value
    action_source: _containers.RepeatedScalarFieldContainer[ActionSource]
    answered_seq: int
    chunk_index: int
    ts_observed_ns: int
    episode_id: _containers.RepeatedScalarFieldContainer[int]
    step: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    final_rows: _containers.RepeatedScalarFieldContainer[int]
    final_observation: _tensor_pb2.Value
    final_info: _tensor_pb2.Value
    def __init__(self, env_id: _Optional[str] = ..., observation: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ..., last_reward: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ..., last_terminated: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ..., last_truncated: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ..., info: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ..., extra: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ..., ts_env_sent_ns: _Optional[int] = ..., multi_agent: _Optional[bool] = ..., executed_action: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ..., action_source: _Optional[_Iterable[_Union[ActionSource, str]]] = ..., answered_seq: _Optional[int] = ..., chunk_index: _Optional[int] = ..., ts_observed_ns: _Optional[int] = ..., episode_id: _Optional[_Iterable[int]] = ..., step: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ..., final_rows: _Optional[_Iterable[int]] = ..., final_observation: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ..., final_info: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ...) -> None: ...
