from baton.rpc.gen import common_pb2 as _common_pb2
from baton.rpc.gen import decode_pb2 as _decode_pb2
from baton.rpc.gen import handoff_pb2 as _handoff_pb2
from baton.rpc.gen import prefill_pb2 as _prefill_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_ROLE_UNSPECIFIED: _ClassVar[SessionRole]
    SESSION_ROLE_ROUTER: _ClassVar[SessionRole]
    SESSION_ROLE_WORKER: _ClassVar[SessionRole]
SESSION_ROLE_UNSPECIFIED: SessionRole
SESSION_ROLE_ROUTER: SessionRole
SESSION_ROLE_WORKER: SessionRole

class SessionMessage(_message.Message):
    __slots__ = ("body", "tag")
    BODY_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    tag: bytes
    def __init__(self, body: _Optional[bytes] = ..., tag: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "role", "id", "incarnation", "listener_incarnation", "session_id", "connection", "last_applied_seq", "established", "nonce")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LISTENER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    LAST_APPLIED_SEQ_FIELD_NUMBER: _ClassVar[int]
    ESTABLISHED_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    role: SessionRole
    id: str
    incarnation: int
    listener_incarnation: int
    session_id: int
    connection: int
    last_applied_seq: int
    established: bool
    nonce: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., role: _Optional[_Union[SessionRole, str]] = ..., id: _Optional[str] = ..., incarnation: _Optional[int] = ..., listener_incarnation: _Optional[int] = ..., session_id: _Optional[int] = ..., connection: _Optional[int] = ..., last_applied_seq: _Optional[int] = ..., established: bool = ..., nonce: _Optional[bytes] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("protocol_version", "incarnation", "last_applied_seq", "nonce", "refused")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAST_APPLIED_SEQ_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    incarnation: int
    last_applied_seq: int
    nonce: bytes
    refused: _common_pb2.Failure
    def __init__(self, protocol_version: _Optional[int] = ..., incarnation: _Optional[int] = ..., last_applied_seq: _Optional[int] = ..., nonce: _Optional[bytes] = ..., refused: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Frame(_message.Message):
    __slots__ = ("seq", "ack", "messages", "ping", "pong")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    seq: int
    ack: int
    messages: _containers.RepeatedCompositeFieldContainer[StreamMessage]
    ping: int
    pong: int
    def __init__(self, seq: _Optional[int] = ..., ack: _Optional[int] = ..., messages: _Optional[_Iterable[_Union[StreamMessage, _Mapping]]] = ..., ping: _Optional[int] = ..., pong: _Optional[int] = ...) -> None: ...

class StreamMessage(_message.Message):
    __slots__ = ("stream", "open", "prompt", "abort", "reconcile", "reserve", "prefill", "abort_attempt", "link_request", "joined", "scores", "step", "ended", "reserve_reply", "prefill_event", "link_reply", "goodbye")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RECONCILE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    ABORT_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LINK_REQUEST_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    RESERVE_REPLY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_EVENT_FIELD_NUMBER: _ClassVar[int]
    LINK_REPLY_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    stream: int
    open: Open
    prompt: PromptPart
    abort: Abort
    reconcile: Reconcile
    reserve: OpenReserve
    prefill: OpenPrefill
    abort_attempt: _common_pb2.AbortRequest
    link_request: LinkRequest
    joined: Joined
    scores: _common_pb2.PromptScores
    step: StepTokens
    ended: Ended
    reserve_reply: _decode_pb2.ReserveReply
    prefill_event: _prefill_pb2.PrefillEvent
    link_reply: LinkReply
    goodbye: Goodbye
    def __init__(self, stream: _Optional[int] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., prompt: _Optional[_Union[PromptPart, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., reconcile: _Optional[_Union[Reconcile, _Mapping]] = ..., reserve: _Optional[_Union[OpenReserve, _Mapping]] = ..., prefill: _Optional[_Union[OpenPrefill, _Mapping]] = ..., abort_attempt: _Optional[_Union[_common_pb2.AbortRequest, _Mapping]] = ..., link_request: _Optional[_Union[LinkRequest, _Mapping]] = ..., joined: _Optional[_Union[Joined, _Mapping]] = ..., scores: _Optional[_Union[_common_pb2.PromptScores, _Mapping]] = ..., step: _Optional[_Union[StepTokens, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., reserve_reply: _Optional[_Union[_decode_pb2.ReserveReply, _Mapping]] = ..., prefill_event: _Optional[_Union[_prefill_pb2.PrefillEvent, _Mapping]] = ..., link_reply: _Optional[_Union[LinkReply, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("request", "reservation_id", "prefill_id", "prefill_incarnation", "deadline_s", "traceparent", "http_request_id")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    HTTP_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.EngineRequest
    reservation_id: str
    prefill_id: str
    prefill_incarnation: int
    deadline_s: float
    traceparent: str
    http_request_id: str
    def __init__(self, request: _Optional[_Union[_common_pb2.EngineRequest, _Mapping]] = ..., reservation_id: _Optional[str] = ..., prefill_id: _Optional[str] = ..., prefill_incarnation: _Optional[int] = ..., deadline_s: _Optional[float] = ..., traceparent: _Optional[str] = ..., http_request_id: _Optional[str] = ...) -> None: ...

class OpenReserve(_message.Message):
    __slots__ = ("request", "traceparent", "http_request_id")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    HTTP_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request: _decode_pb2.ReserveRequest
    traceparent: str
    http_request_id: str
    def __init__(self, request: _Optional[_Union[_decode_pb2.ReserveRequest, _Mapping]] = ..., traceparent: _Optional[str] = ..., http_request_id: _Optional[str] = ...) -> None: ...

class OpenPrefill(_message.Message):
    __slots__ = ("request", "traceparent", "http_request_id")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    HTTP_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request: _prefill_pb2.PrefillRequest
    traceparent: str
    http_request_id: str
    def __init__(self, request: _Optional[_Union[_prefill_pb2.PrefillRequest, _Mapping]] = ..., traceparent: _Optional[str] = ..., http_request_id: _Optional[str] = ...) -> None: ...

class LinkRequest(_message.Message):
    __slots__ = ("hello", "watch", "open_export", "commit", "renew", "abort", "traceparent", "http_request_id")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_EXPORT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    HTTP_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    hello: _handoff_pb2.HelloRequest
    watch: _handoff_pb2.WatchRequest
    open_export: _handoff_pb2.OpenExportRequest
    commit: _handoff_pb2.CommitRequest
    renew: _handoff_pb2.RenewRequest
    abort: _common_pb2.AbortRequest
    traceparent: str
    http_request_id: str
    def __init__(self, hello: _Optional[_Union[_handoff_pb2.HelloRequest, _Mapping]] = ..., watch: _Optional[_Union[_handoff_pb2.WatchRequest, _Mapping]] = ..., open_export: _Optional[_Union[_handoff_pb2.OpenExportRequest, _Mapping]] = ..., commit: _Optional[_Union[_handoff_pb2.CommitRequest, _Mapping]] = ..., renew: _Optional[_Union[_handoff_pb2.RenewRequest, _Mapping]] = ..., abort: _Optional[_Union[_common_pb2.AbortRequest, _Mapping]] = ..., traceparent: _Optional[str] = ..., http_request_id: _Optional[str] = ...) -> None: ...

class LinkReply(_message.Message):
    __slots__ = ("hello", "event", "open_export", "commit", "renew", "abort")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    OPEN_EXPORT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    hello: _handoff_pb2.HelloReply
    event: _handoff_pb2.HandoffEvent
    open_export: _handoff_pb2.OpenExportReply
    commit: _handoff_pb2.CommitReply
    renew: _handoff_pb2.RenewReply
    abort: _common_pb2.AbortReply
    def __init__(self, hello: _Optional[_Union[_handoff_pb2.HelloReply, _Mapping]] = ..., event: _Optional[_Union[_handoff_pb2.HandoffEvent, _Mapping]] = ..., open_export: _Optional[_Union[_handoff_pb2.OpenExportReply, _Mapping]] = ..., commit: _Optional[_Union[_handoff_pb2.CommitReply, _Mapping]] = ..., renew: _Optional[_Union[_handoff_pb2.RenewReply, _Mapping]] = ..., abort: _Optional[_Union[_common_pb2.AbortReply, _Mapping]] = ...) -> None: ...

class PromptPart(_message.Message):
    __slots__ = ("tokens", "last")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    last: bool
    def __init__(self, tokens: _Optional[bytes] = ..., last: bool = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Reconcile(_message.Message):
    __slots__ = ("streams",)
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    streams: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, streams: _Optional[_Iterable[int]] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("times", "first_token")
    TIMES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    times: _common_pb2.ImportTimes
    first_token: _common_pb2.OutputToken
    def __init__(self, times: _Optional[_Union[_common_pb2.ImportTimes, _Mapping]] = ..., first_token: _Optional[_Union[_common_pb2.OutputToken, _Mapping]] = ...) -> None: ...

class StepTokens(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[TokenRow]
    def __init__(self, rows: _Optional[_Iterable[_Union[TokenRow, _Mapping]]] = ...) -> None: ...

class TokenRow(_message.Message):
    __slots__ = ("stream", "first_index", "tokens", "finish_reason", "times", "scores")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    stream: int
    first_index: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _common_pb2.FinishReason
    times: _common_pb2.DecodeTimes
    scores: _containers.RepeatedCompositeFieldContainer[TokenScores]
    def __init__(self, stream: _Optional[int] = ..., first_index: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., times: _Optional[_Union[_common_pb2.DecodeTimes, _Mapping]] = ..., scores: _Optional[_Iterable[_Union[TokenScores, _Mapping]]] = ...) -> None: ...

class TokenScores(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: _common_pb2.Failure
    def __init__(self, failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
