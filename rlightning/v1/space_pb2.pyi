from rlightning.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Space(_message.Message):
    __slots__ = ("box", "discrete", "multi_binary", "multi_discrete", "text", "dict", "tuple", "sequence", "graph", "one_of", "max_bytes")
    BOX_FIELD_NUMBER: _ClassVar[int]
    DISCRETE_FIELD_NUMBER: _ClassVar[int]
    MULTI_BINARY_FIELD_NUMBER: _ClassVar[int]
    MULTI_DISCRETE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DICT_FIELD_NUMBER: _ClassVar[int]
    TUPLE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    ONE_OF_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    box: BoxSpace
    discrete: DiscreteSpace
    multi_binary: MultiBinarySpace
    multi_discrete: MultiDiscreteSpace
    text: TextSpace
    dict: DictSpace
    tuple: TupleSpace
    sequence: SequenceSpace
    graph: GraphSpace
    one_of: OneOfSpace
    max_bytes: int
    def __init__(self, box: _Optional[_Union[BoxSpace, _Mapping]] = ..., discrete: _Optional[_Union[DiscreteSpace, _Mapping]] = ..., multi_binary: _Optional[_Union[MultiBinarySpace, _Mapping]] = ..., multi_discrete: _Optional[_Union[MultiDiscreteSpace, _Mapping]] = ..., text: _Optional[_Union[TextSpace, _Mapping]] = ..., dict: _Optional[_Union[DictSpace, _Mapping]] = ..., tuple: _Optional[_Union[TupleSpace, _Mapping]] = ..., sequence: _Optional[_Union[SequenceSpace, _Mapping]] = ..., graph: _Optional[_Union[GraphSpace, _Mapping]] = ..., one_of: _Optional[_Union[OneOfSpace, _Mapping]] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class BoxSpace(_message.Message):
    __slots__ = ("low", "high", "shape", "dtype")
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    low: _tensor_pb2.Tensor
    high: _tensor_pb2.Tensor
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: _tensor_pb2.Dtype
    def __init__(self, low: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., high: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ...) -> None: ...

class DiscreteSpace(_message.Message):
    __slots__ = ("n", "start", "dtype")
    N_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    n: int
    start: int
    dtype: _tensor_pb2.Dtype
    def __init__(self, n: _Optional[int] = ..., start: _Optional[int] = ..., dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ...) -> None: ...

class MultiBinarySpace(_message.Message):
    __slots__ = ("shape", "flat")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    FLAT_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    flat: bool
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., flat: _Optional[bool] = ...) -> None: ...

class MultiDiscreteSpace(_message.Message):
    __slots__ = ("nvec", "start", "dtype")
    NVEC_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    nvec: _tensor_pb2.Tensor
    start: _tensor_pb2.Tensor
    dtype: _tensor_pb2.Dtype
    def __init__(self, nvec: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., start: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ...) -> None: ...

class TextSpace(_message.Message):
    __slots__ = ("min_length", "max_length", "charset")
    MIN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CHARSET_FIELD_NUMBER: _ClassVar[int]
    min_length: int
    max_length: int
    charset: str
    def __init__(self, min_length: _Optional[int] = ..., max_length: _Optional[int] = ..., charset: _Optional[str] = ...) -> None: ...

class DictSpaceEntry(_message.Message):
    __slots__ = ("key", "space")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SPACE_FIELD_NUMBER: _ClassVar[int]
    key: str
    space: Space
    def __init__(self, key: _Optional[str] = ..., space: _Optional[_Union[Space, _Mapping]] = ...) -> None: ...

class DictSpace(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[DictSpaceEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[DictSpaceEntry, _Mapping]]] = ...) -> None: ...

class TupleSpace(_message.Message):
    __slots__ = ("spaces",)
    SPACES_FIELD_NUMBER: _ClassVar[int]
    spaces: _containers.RepeatedCompositeFieldContainer[Space]
    def __init__(self, spaces: _Optional[_Iterable[_Union[Space, _Mapping]]] = ...) -> None: ...

class SequenceSpace(_message.Message):
    __slots__ = ("feature_space", "stack")
    FEATURE_SPACE_FIELD_NUMBER: _ClassVar[int]
    STACK_FIELD_NUMBER: _ClassVar[int]
    feature_space: Space
    stack: bool
    def __init__(self, feature_space: _Optional[_Union[Space, _Mapping]] = ..., stack: _Optional[bool] = ...) -> None: ...

class GraphSpace(_message.Message):
    __slots__ = ("node_space", "edge_space")
    NODE_SPACE_FIELD_NUMBER: _ClassVar[int]
    EDGE_SPACE_FIELD_NUMBER: _ClassVar[int]
    node_space: Space
    edge_space: Space
    def __init__(self, node_space: _Optional[_Union[Space, _Mapping]] = ..., edge_space: _Optional[_Union[Space, _Mapping]] = ...) -> None: ...

class OneOfSpace(_message.Message):
    __slots__ = ("spaces",)
    SPACES_FIELD_NUMBER: _ClassVar[int]
    spaces: _containers.RepeatedCompositeFieldContainer[Space]
    def __init__(self, spaces: _Optional[_Iterable[_Union[Space, _Mapping]]] = ...) -> None: ...

class EnvMeta(_message.Message):
    __slots__ = ("env_id", "action_space", "observation_space", "num_envs", "agent_action_spaces", "agent_observation_spaces", "lossy")
    ENV_ID_FIELD_NUMBER: _ClassVar[int]
    ACTION_SPACE_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_SPACE_FIELD_NUMBER: _ClassVar[int]
    NUM_ENVS_FIELD_NUMBER: _ClassVar[int]
    AGENT_ACTION_SPACES_FIELD_NUMBER: _ClassVar[int]
    AGENT_OBSERVATION_SPACES_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    env_id: str
    action_space: Space
    observation_space: Space
    num_envs: int
    agent_action_spaces: DictSpace
    agent_observation_spaces: DictSpace
    lossy: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, env_id: _Optional[str] = ..., action_space: _Optional[_Union[Space, _Mapping]] = ..., observation_space: _Optional[_Union[Space, _Mapping]] = ..., num_envs: _Optional[int] = ..., agent_action_spaces: _Optional[_Union[DictSpace, _Mapping]] = ..., agent_observation_spaces: _Optional[_Union[DictSpace, _Mapping]] = ..., lossy: _Optional[_Iterable[str]] = ...) -> None: ...
