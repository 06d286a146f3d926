from baton.rpc.gen import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "protocol_version", "fingerprint", "model", "transports", "parts")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    protocol_version: int
    fingerprint: str
    model: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    parts: _containers.RepeatedCompositeFieldContainer[FingerprintPart]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., protocol_version: _Optional[int] = ..., fingerprint: _Optional[str] = ..., model: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., parts: _Optional[_Iterable[_Union[FingerprintPart, _Mapping]]] = ...) -> None: ...

class FingerprintPart(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("source", "refused")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    source: SourceInfo
    refused: _common_pb2.Failure
    def __init__(self, source: _Optional[_Union[SourceInfo, _Mapping]] = ..., refused: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class SourceInfo(_message.Message):
    __slots__ = ("worker_id", "incarnation", "transport", "metadata", "base_address", "num_pages", "page_bytes", "window_base_address", "num_window_slots", "window_bytes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_WINDOW_SLOTS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    transport: str
    metadata: bytes
    base_address: int
    num_pages: int
    page_bytes: int
    window_base_address: int
    num_window_slots: int
    window_bytes: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., transport: _Optional[str] = ..., metadata: _Optional[bytes] = ..., base_address: _Optional[int] = ..., num_pages: _Optional[int] = ..., page_bytes: _Optional[int] = ..., window_base_address: _Optional[int] = ..., num_window_slots: _Optional[int] = ..., window_bytes: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("id", "incarnation")
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.AttemptId
    incarnation: int
    def __init__(self, id: _Optional[_Union[_common_pb2.AttemptId, _Mapping]] = ..., incarnation: _Optional[int] = ...) -> None: ...

class OpenExportRequest(_message.Message):
    __slots__ = ("id", "incarnation", "page_keys", "first_page")
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PAGE_KEYS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.AttemptId
    incarnation: int
    page_keys: _containers.RepeatedScalarFieldContainer[bytes]
    first_page: int
    def __init__(self, id: _Optional[_Union[_common_pb2.AttemptId, _Mapping]] = ..., incarnation: _Optional[int] = ..., page_keys: _Optional[_Iterable[bytes]] = ..., first_page: _Optional[int] = ...) -> None: ...

class OpenExportReply(_message.Message):
    __slots__ = ("chunk", "refused")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    chunk: ChunkReady
    refused: _common_pb2.Failure
    def __init__(self, chunk: _Optional[_Union[ChunkReady, _Mapping]] = ..., refused: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class HandoffEvent(_message.Message):
    __slots__ = ("chunk", "seal", "failed")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    chunk: ChunkReady
    seal: Seal
    failed: _common_pb2.Failure
    def __init__(self, chunk: _Optional[_Union[ChunkReady, _Mapping]] = ..., seal: _Optional[_Union[Seal, _Mapping]] = ..., failed: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class ChunkReady(_message.Message):
    __slots__ = ("first_page", "pages", "digests", "tags", "window_slots")
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_SLOTS_FIELD_NUMBER: _ClassVar[int]
    first_page: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    tags: _containers.RepeatedScalarFieldContainer[bytes]
    window_slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_page: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[int]] = ..., tags: _Optional[_Iterable[bytes]] = ..., window_slots: _Optional[_Iterable[int]] = ...) -> None: ...

class Seal(_message.Message):
    __slots__ = ("first_token", "finish_reason", "num_cached_tokens", "num_pages", "check")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    first_token: _common_pb2.OutputToken
    finish_reason: _common_pb2.FinishReason
    num_cached_tokens: int
    num_pages: int
    check: int
    def __init__(self, first_token: _Optional[_Union[_common_pb2.OutputToken, _Mapping]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., num_cached_tokens: _Optional[int] = ..., num_pages: _Optional[int] = ..., check: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("id", "incarnation")
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    id: _common_pb2.AttemptId
    incarnation: int
    def __init__(self, id: _Optional[_Union[_common_pb2.AttemptId, _Mapping]] = ..., incarnation: _Optional[int] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("valid", "reason")
    VALID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    valid: bool
    reason: str
    def __init__(self, valid: bool = ..., reason: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "ids", "quarantine_seen")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_SEEN_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    ids: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptId]
    quarantine_seen: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., ids: _Optional[_Iterable[_Union[_common_pb2.AttemptId, _Mapping]]] = ..., quarantine_seen: _Optional[int] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("ended", "lease_s", "quarantined", "quarantine_number")
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ended: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptId]
    lease_s: float
    quarantined: _containers.RepeatedScalarFieldContainer[bytes]
    quarantine_number: int
    def __init__(self, ended: _Optional[_Iterable[_Union[_common_pb2.AttemptId, _Mapping]]] = ..., lease_s: _Optional[float] = ..., quarantined: _Optional[_Iterable[bytes]] = ..., quarantine_number: _Optional[int] = ...) -> None: ...

class ReadPagesRequest(_message.Message):
    __slots__ = ("incarnation", "pages", "leading_bytes")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    LEADING_BYTES_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    leading_bytes: int
    def __init__(self, incarnation: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., leading_bytes: _Optional[int] = ...) -> None: ...

class PageBytes(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
