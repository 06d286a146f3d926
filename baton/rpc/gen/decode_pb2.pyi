from baton.rpc.gen import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReserveRequest(_message.Message):
    __slots__ = ("id", "num_tokens", "page_keys", "deadline_s", "max_new_tokens", "computes_prompt")
    ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_KEYS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_PROMPT_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.AttemptId
    num_tokens: int
    page_keys: _containers.RepeatedScalarFieldContainer[bytes]
    deadline_s: float
    max_new_tokens: int
    computes_prompt: bool
    def __init__(self, id: _Optional[_Union[_common_pb2.AttemptId, _Mapping]] = ..., num_tokens: _Optional[int] = ..., page_keys: _Optional[_Iterable[bytes]] = ..., deadline_s: _Optional[float] = ..., max_new_tokens: _Optional[int] = ..., computes_prompt: bool = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("reserved", "busy", "refused")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    reserved: Reserved
    busy: Busy
    refused: _common_pb2.Failure
    def __init__(self, reserved: _Optional[_Union[Reserved, _Mapping]] = ..., busy: _Optional[_Union[Busy, _Mapping]] = ..., refused: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("reservation_id", "decode_prefix_len")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    decode_prefix_len: int
    def __init__(self, reservation_id: _Optional[str] = ..., decode_prefix_len: _Optional[int] = ...) -> None: ...

class Busy(_message.Message):
    __slots__ = ("retry_after_s", "queued_pages", "no_prompts")
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PAGES_FIELD_NUMBER: _ClassVar[int]
    NO_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    retry_after_s: float
    queued_pages: int
    no_prompts: bool
    def __init__(self, retry_after_s: _Optional[float] = ..., queued_pages: _Optional[int] = ..., no_prompts: bool = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request", "reservation_id", "prefill_id", "prefill_incarnation", "deadline_s")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.EngineRequest
    reservation_id: str
    prefill_id: str
    prefill_incarnation: int
    deadline_s: float
    def __init__(self, request: _Optional[_Union[_common_pb2.EngineRequest, _Mapping]] = ..., reservation_id: _Optional[str] = ..., prefill_id: _Optional[str] = ..., prefill_incarnation: _Optional[int] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("imported", "tokens", "failed", "scores")
    IMPORTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    imported: Imported
    tokens: Tokens
    failed: _common_pb2.Failure
    scores: _common_pb2.PromptScores
    def __init__(self, imported: _Optional[_Union[Imported, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., failed: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., scores: _Optional[_Union[_common_pb2.PromptScores, _Mapping]] = ...) -> None: ...

class Imported(_message.Message):
    __slots__ = ("times", "first_token")
    TIMES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    times: _common_pb2.ImportTimes
    first_token: _common_pb2.OutputToken
    def __init__(self, times: _Optional[_Union[_common_pb2.ImportTimes, _Mapping]] = ..., first_token: _Optional[_Union[_common_pb2.OutputToken, _Mapping]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("tokens", "finish_reason", "times", "check")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.OutputToken]
    finish_reason: _common_pb2.FinishReason
    times: _common_pb2.DecodeTimes
    check: int
    def __init__(self, tokens: _Optional[_Iterable[_Union[_common_pb2.OutputToken, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., times: _Optional[_Union[_common_pb2.DecodeTimes, _Mapping]] = ..., check: _Optional[int] = ...) -> None: ...
