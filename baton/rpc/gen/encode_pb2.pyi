from baton.rpc.gen import handoff_pb2 as _handoff_pb2
from baton.rpc.gen import prefill_pb2 as _prefill_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PullEmbeddingRequest(_message.Message):
    __slots__ = ("incarnation", "identity", "salt", "fingerprint", "deadline_s", "wants_source", "is_linked")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    WANTS_SOURCE_FIELD_NUMBER: _ClassVar[int]
    IS_LINKED_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    identity: bytes
    salt: str
    fingerprint: str
    deadline_s: float
    wants_source: bool
    is_linked: bool
    def __init__(self, incarnation: _Optional[int] = ..., identity: _Optional[bytes] = ..., salt: _Optional[str] = ..., fingerprint: _Optional[str] = ..., deadline_s: _Optional[float] = ..., wants_source: bool = ..., is_linked: bool = ...) -> None: ...

class EmbeddingPart(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: EmbeddingHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[EmbeddingHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class EmbeddingHeader(_message.Message):
    __slots__ = ("num_bytes", "num_rows", "grid_height", "grid_width", "digests", "source", "pages", "tags", "pull")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    GRID_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    GRID_WIDTH_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    num_rows: int
    grid_height: int
    grid_width: int
    digests: _containers.RepeatedScalarFieldContainer[int]
    source: _handoff_pb2.SourceInfo
    pages: _containers.RepeatedScalarFieldContainer[int]
    tags: _containers.RepeatedScalarFieldContainer[bytes]
    pull: int
    def __init__(self, num_bytes: _Optional[int] = ..., num_rows: _Optional[int] = ..., grid_height: _Optional[int] = ..., grid_width: _Optional[int] = ..., digests: _Optional[_Iterable[int]] = ..., source: _Optional[_Union[_handoff_pb2.SourceInfo, _Mapping]] = ..., pages: _Optional[_Iterable[int]] = ..., tags: _Optional[_Iterable[bytes]] = ..., pull: _Optional[int] = ...) -> None: ...

class CommitPullRequest(_message.Message):
    __slots__ = ("incarnation", "pull")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    pull: int
    def __init__(self, incarnation: _Optional[int] = ..., pull: _Optional[int] = ...) -> None: ...

class CommitPullReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
