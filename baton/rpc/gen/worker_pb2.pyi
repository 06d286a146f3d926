from baton.rpc.gen import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CacheEventsRequest(_message.Message):
    __slots__ = ("incarnation", "from_seq")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    from_seq: int
    def __init__(self, incarnation: _Optional[int] = ..., from_seq: _Optional[int] = ...) -> None: ...

class CacheDelta(_message.Message):
    __slots__ = ("after_seq", "seq", "reset", "stored", "removed", "more")
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    after_seq: int
    seq: int
    reset: bool
    stored: bytes
    removed: bytes
    more: bool
    def __init__(self, after_seq: _Optional[int] = ..., seq: _Optional[int] = ..., reset: bool = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., more: bool = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    def __init__(self, incarnation: _Optional[int] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("num_requests", "ended")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    ended: bool
    def __init__(self, num_requests: _Optional[int] = ..., ended: bool = ...) -> None: ...

class SetBudgetsRequest(_message.Message):
    __slots__ = ("incarnation", "prefill_tokens", "rows", "reservations")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    prefill_tokens: int
    rows: int
    reservations: int
    def __init__(self, incarnation: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., rows: _Optional[int] = ..., reservations: _Optional[int] = ...) -> None: ...

class Budgets(_message.Message):
    __slots__ = ("prefill_tokens", "rows", "reservations")
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    prefill_tokens: int
    rows: int
    reservations: int
    def __init__(self, prefill_tokens: _Optional[int] = ..., rows: _Optional[int] = ..., reservations: _Optional[int] = ...) -> None: ...

class RecentAttemptsRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class RecentAttemptsReply(_message.Message):
    __slots__ = ("attempts",)
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedCompositeFieldContainer[AttemptTimes]
    def __init__(self, attempts: _Optional[_Iterable[_Union[AttemptTimes, _Mapping]]] = ...) -> None: ...

class AttemptTimes(_message.Message):
    __slots__ = ("id", "prefill", "imported", "decode", "end_code", "ended_us_ago")
    ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    IMPORTED_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    END_CODE_FIELD_NUMBER: _ClassVar[int]
    ENDED_US_AGO_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.AttemptId
    prefill: _common_pb2.PrefillTimes
    imported: _common_pb2.ImportTimes
    decode: _common_pb2.DecodeTimes
    end_code: str
    ended_us_ago: int
    def __init__(self, id: _Optional[_Union[_common_pb2.AttemptId, _Mapping]] = ..., prefill: _Optional[_Union[_common_pb2.PrefillTimes, _Mapping]] = ..., imported: _Optional[_Union[_common_pb2.ImportTimes, _Mapping]] = ..., decode: _Optional[_Union[_common_pb2.DecodeTimes, _Mapping]] = ..., end_code: _Optional[str] = ..., ended_us_ago: _Optional[int] = ...) -> None: ...
