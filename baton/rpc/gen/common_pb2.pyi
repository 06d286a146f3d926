from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class PageVerdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAGE_VERDICT_UNSPECIFIED: _ClassVar[PageVerdict]
    PAGE_VERDICT_SOURCE: _ClassVar[PageVerdict]
    PAGE_VERDICT_LINK: _ClassVar[PageVerdict]
    PAGE_VERDICT_PULLER: _ClassVar[PageVerdict]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
PAGE_VERDICT_UNSPECIFIED: PageVerdict
PAGE_VERDICT_SOURCE: PageVerdict
PAGE_VERDICT_LINK: PageVerdict
PAGE_VERDICT_PULLER: PageVerdict

class AttemptId(_message.Message):
    __slots__ = ("request_id", "attempt", "owner_tag")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OWNER_TAG_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    owner_tag: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., owner_tag: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "logit_bias", "logprobs", "allowed_token_ids", "bad_words", "logprob_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StopParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop_token_ids")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class EngineRequest(_message.Message):
    __slots__ = ("id", "tokens", "num_prompt_tokens", "sampling", "stop", "salt", "constraint", "prompt_logprobs", "priority", "media")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    id: AttemptId
    tokens: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop: StopParams
    salt: str
    constraint: Constraint
    prompt_logprobs: int
    priority: int
    media: _containers.RepeatedCompositeFieldContainer[MediaSpan]
    def __init__(self, id: _Optional[_Union[AttemptId, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[StopParams, _Mapping]] = ..., salt: _Optional[str] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., media: _Optional[_Iterable[_Union[MediaSpan, _Mapping]]] = ...) -> None: ...

class MediaSpan(_message.Message):
    __slots__ = ("first", "num_tokens", "identity", "first_row", "grid_height", "grid_width")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    GRID_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    GRID_WIDTH_FIELD_NUMBER: _ClassVar[int]
    first: int
    num_tokens: int
    identity: bytes
    first_row: int
    grid_height: int
    grid_width: int
    def __init__(self, first: _Optional[int] = ..., num_tokens: _Optional[int] = ..., identity: _Optional[bytes] = ..., first_row: _Optional[int] = ..., grid_height: _Optional[int] = ..., grid_width: _Optional[int] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("phases", "loop_to", "eos", "ignore_eos", "min_tokens")
    PHASES_FIELD_NUMBER: _ClassVar[int]
    LOOP_TO_FIELD_NUMBER: _ClassVar[int]
    EOS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    phases: _containers.RepeatedCompositeFieldContainer[Phase]
    loop_to: int
    eos: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_tokens: int
    def __init__(self, phases: _Optional[_Iterable[_Union[Phase, _Mapping]]] = ..., loop_to: _Optional[int] = ..., eos: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., min_tokens: _Optional[int] = ...) -> None: ...

class Phase(_message.Message):
    __slots__ = ("free", "grammar")
    FREE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    free: FreePhase
    grammar: GrammarPhase
    def __init__(self, free: _Optional[_Union[FreePhase, _Mapping]] = ..., grammar: _Optional[_Union[GrammarPhase, _Mapping]] = ...) -> None: ...

class FreePhase(_message.Message):
    __slots__ = ("ends", "budget", "on_budget", "may_stop", "banned")
    ENDS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    ON_BUDGET_FIELD_NUMBER: _ClassVar[int]
    MAY_STOP_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    ends: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    budget: int
    on_budget: _containers.RepeatedScalarFieldContainer[int]
    may_stop: bool
    banned: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ends: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., budget: _Optional[int] = ..., on_budget: _Optional[_Iterable[int]] = ..., may_stop: bool = ..., banned: _Optional[_Iterable[int]] = ...) -> None: ...

class GrammarPhase(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token", "logprob")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class OutputToken(_message.Message):
    __slots__ = ("index", "token", "logprob", "top")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    index: int
    token: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, index: _Optional[int] = ..., token: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class PromptScores(_message.Message):
    __slots__ = ("first", "k", "logprobs", "ranks", "top_ids", "top_logprobs", "check")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    first: int
    k: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
    check: int
    def __init__(self, first: _Optional[int] = ..., k: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ..., check: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message", "decode", "seen", "verdict", "need_media")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    NEED_MEDIA_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    decode: DecodeTimes
    seen: AttemptId
    verdict: PageVerdict
    need_media: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., decode: _Optional[_Union[DecodeTimes, _Mapping]] = ..., seen: _Optional[_Union[AttemptId, _Mapping]] = ..., verdict: _Optional[_Union[PageVerdict, str]] = ..., need_media: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PrefillTimes(_message.Message):
    __slots__ = ("queue_us", "compute_us", "seal_us", "chunks", "computed_tokens", "cached_tokens", "imported_tokens", "encode_us")
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    SEAL_US_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMPORTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_US_FIELD_NUMBER: _ClassVar[int]
    queue_us: int
    compute_us: int
    seal_us: int
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkTime]
    computed_tokens: int
    cached_tokens: int
    imported_tokens: int
    encode_us: int
    def __init__(self, queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., seal_us: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[ChunkTime, _Mapping]]] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., imported_tokens: _Optional[int] = ..., encode_us: _Optional[int] = ...) -> None: ...

class ChunkTime(_message.Message):
    __slots__ = ("start_us", "tokens")
    START_US_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    start_us: int
    tokens: int
    def __init__(self, start_us: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class ImportTimes(_message.Message):
    __slots__ = ("transport", "path", "first_chunk_us", "pull_us", "exposed_us", "commit_us", "join_us", "bytes", "pages", "proof", "re_reads")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_US_FIELD_NUMBER: _ClassVar[int]
    PULL_US_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_US_FIELD_NUMBER: _ClassVar[int]
    COMMIT_US_FIELD_NUMBER: _ClassVar[int]
    JOIN_US_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    RE_READS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    path: str
    first_chunk_us: int
    pull_us: int
    exposed_us: int
    commit_us: int
    join_us: int
    bytes: int
    pages: int
    proof: str
    re_reads: int
    def __init__(self, transport: _Optional[str] = ..., path: _Optional[str] = ..., first_chunk_us: _Optional[int] = ..., pull_us: _Optional[int] = ..., exposed_us: _Optional[int] = ..., commit_us: _Optional[int] = ..., join_us: _Optional[int] = ..., bytes: _Optional[int] = ..., pages: _Optional[int] = ..., proof: _Optional[str] = ..., re_reads: _Optional[int] = ...) -> None: ...

class DecodeTimes(_message.Message):
    __slots__ = ("steps", "step_us", "waited_us", "preempted_us", "num_preemptions")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    WAITED_US_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_US_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    step_us: int
    waited_us: int
    preempted_us: int
    num_preemptions: int
    def __init__(self, steps: _Optional[int] = ..., step_us: _Optional[int] = ..., waited_us: _Optional[int] = ..., preempted_us: _Optional[int] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("id", "reason", "suspects")
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SUSPECTS_FIELD_NUMBER: _ClassVar[int]
    id: AttemptId
    reason: str
    suspects: _containers.RepeatedCompositeFieldContainer[SuspectPage]
    def __init__(self, id: _Optional[_Union[AttemptId, _Mapping]] = ..., reason: _Optional[str] = ..., suspects: _Optional[_Iterable[_Union[SuspectPage, _Mapping]]] = ...) -> None: ...

class SuspectPage(_message.Message):
    __slots__ = ("index", "page", "digests")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    page: int
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., page: _Optional[int] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("verdict",)
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    verdict: PageVerdict
    def __init__(self, verdict: _Optional[_Union[PageVerdict, str]] = ...) -> None: ...
