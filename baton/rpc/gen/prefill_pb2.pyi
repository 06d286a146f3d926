from baton.rpc.gen import common_pb2 as _common_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MediaOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIA_OUTCOME_UNSPECIFIED: _ClassVar[MediaOutcome]
    MEDIA_OUTCOME_HELD: _ClassVar[MediaOutcome]
    MEDIA_OUTCOME_TOO_LARGE: _ClassVar[MediaOutcome]
    MEDIA_OUTCOME_UNREADABLE: _ClassVar[MediaOutcome]
    MEDIA_OUTCOME_COUNT_DIFFERS: _ClassVar[MediaOutcome]
    MEDIA_OUTCOME_OTHER_PROCESSOR: _ClassVar[MediaOutcome]
    MEDIA_OUTCOME_SOURCE_LOST: _ClassVar[MediaOutcome]
    MEDIA_OUTCOME_NO_TOWER: _ClassVar[MediaOutcome]
MEDIA_OUTCOME_UNSPECIFIED: MediaOutcome
MEDIA_OUTCOME_HELD: MediaOutcome
MEDIA_OUTCOME_TOO_LARGE: MediaOutcome
MEDIA_OUTCOME_UNREADABLE: MediaOutcome
MEDIA_OUTCOME_COUNT_DIFFERS: MediaOutcome
MEDIA_OUTCOME_OTHER_PROCESSOR: MediaOutcome
MEDIA_OUTCOME_SOURCE_LOST: MediaOutcome
MEDIA_OUTCOME_NO_TOWER: MediaOutcome

class PrefillRequest(_message.Message):
    __slots__ = ("request", "decode_prefix_len", "deadline_s", "page_source", "num_coming")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DECODE_PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    PAGE_SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_COMING_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.EngineRequest
    decode_prefix_len: int
    deadline_s: float
    page_source: PageSource
    num_coming: int
    def __init__(self, request: _Optional[_Union[_common_pb2.EngineRequest, _Mapping]] = ..., decode_prefix_len: _Optional[int] = ..., deadline_s: _Optional[float] = ..., page_source: _Optional[_Union[PageSource, _Mapping]] = ..., num_coming: _Optional[int] = ...) -> None: ...

class PageSource(_message.Message):
    __slots__ = ("worker_id", "incarnation", "num_pages")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    num_pages: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., num_pages: _Optional[int] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("accepted", "progress", "sealed", "failed", "scores")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    progress: Progress
    sealed: Sealed
    failed: _common_pb2.Failure
    scores: _common_pb2.PromptScores
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., sealed: _Optional[_Union[Sealed, _Mapping]] = ..., failed: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., scores: _Optional[_Union[_common_pb2.PromptScores, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Progress(_message.Message):
    __slots__ = ("num_computed_tokens",)
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_computed_tokens: int
    def __init__(self, num_computed_tokens: _Optional[int] = ...) -> None: ...

class Sealed(_message.Message):
    __slots__ = ("first_token", "finish_reason", "num_cached_tokens", "times", "check")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    first_token: _common_pb2.OutputToken
    finish_reason: _common_pb2.FinishReason
    num_cached_tokens: int
    times: _common_pb2.PrefillTimes
    check: int
    def __init__(self, first_token: _Optional[_Union[_common_pb2.OutputToken, _Mapping]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., num_cached_tokens: _Optional[int] = ..., times: _Optional[_Union[_common_pb2.PrefillTimes, _Mapping]] = ..., check: _Optional[int] = ...) -> None: ...

class PutMediaRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: MediaHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[MediaHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class MediaHeader(_message.Message):
    __slots__ = ("identity", "num_bytes", "salt", "processor", "detail", "num_rows", "grid_height", "grid_width", "deadline_s", "source")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    GRID_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    GRID_WIDTH_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    identity: bytes
    num_bytes: int
    salt: str
    processor: str
    detail: str
    num_rows: int
    grid_height: int
    grid_width: int
    deadline_s: float
    source: EmbeddingSource
    def __init__(self, identity: _Optional[bytes] = ..., num_bytes: _Optional[int] = ..., salt: _Optional[str] = ..., processor: _Optional[str] = ..., detail: _Optional[str] = ..., num_rows: _Optional[int] = ..., grid_height: _Optional[int] = ..., grid_width: _Optional[int] = ..., deadline_s: _Optional[float] = ..., source: _Optional[_Union[EmbeddingSource, _Mapping]] = ...) -> None: ...

class EmbeddingSource(_message.Message):
    __slots__ = ("worker_id", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class PutMediaResponse(_message.Message):
    __slots__ = ("outcome", "message", "num_rows", "grid_height", "grid_width")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    GRID_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    GRID_WIDTH_FIELD_NUMBER: _ClassVar[int]
    outcome: MediaOutcome
    message: str
    num_rows: int
    grid_height: int
    grid_width: int
    def __init__(self, outcome: _Optional[_Union[MediaOutcome, str]] = ..., message: _Optional[str] = ..., num_rows: _Optional[int] = ..., grid_height: _Optional[int] = ..., grid_width: _Optional[int] = ...) -> None: ...
