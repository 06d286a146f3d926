"""The error tree. `code` is stable: it is the metric label, the gRPC detail and the client's `error.code`.

    BatonError
    |- Refused                the request is not accepted: tell the client
    |  |- InvalidRequest      invalid_request      400
    |  |  `- AnswerLost       answer_lost          404, no router is left that can continue it
    |  |- ContextOverflow     context_length_exceeded  400
    |  |- ConstraintFailed    constraint_failed    400
    |  |- ModelNotFound       model_not_found      404
    |  |- Overloaded          overloaded           429, with Retry-After
    |  |- NoWorkers           no_workers           503, with Retry-After
    |  `- Draining            draining             503, with Retry-After
    |- Interrupted            the attempt is lost, the request is not: the router may retry
    |  |- WorkerLost          worker_lost
    |  |- LinkBroken          link_broken
    |  |- LeaseEnded          lease_ended
    |  |- IntegrityFailure    integrity_failure    bytes did not match their digest
    |  |- Superseded          superseded           a newer attempt exists
    |  |- SentBack            sent_back            preempted and no host memory left
    |  |- NoRoom              no_room              prefill began, and no decode worker had room
    |  |- NeedMedia            need_media           images of the prompt are not held
    |  `- ModelReplaced       model_replaced       503, no worker left with the model that began: send it again
    |- Cancelled              cancelled            the client disconnected
    |- DeadlineExceeded       deadline_exceeded    504
    `- Broken                 broken               our own invariant failed: log and exit

Translation to HTTP is in `baton.services.router.edge.http_errors`, to gRPC in `baton.rpc.codec`, and nowhere else.
"Not now" is a return value, never one of these.
"""

from __future__ import annotations

import enum
from typing import ClassVar

from baton.domain.ids import AttemptId


class BatonError(Exception):
    """Base of the tree. `detail`: the cause in the words of a library, for logs only; "" if there is none."""

    code: ClassVar[str] = "error"
    detail: str = ""

    @property
    def log_text(self) -> str:
        """The message and the detail."""
        return f"{self} ({self.detail})" if self.detail else str(self)


class Refused(BatonError):
    """The request is not accepted. `param` names the offending field; `retry_after_s`: when a retry may succeed."""

    code = "refused"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(Refused):
    """Malformed, of a wrong type or out of range."""

    code = "invalid_request"


class ContextOverflow(Refused):
    """Prompt and output do not fit the model's context or the worker's pool."""

    code = "context_length_exceeded"


class FailedConstraint(enum.Enum):
    """Why a constraint cannot be kept. Values are metric labels.

    COMPILE: its grammar is wrong. TOO_COMPLEX: it is over a limit. DEAD_END: it allows no token. PREFIX: it does not
    allow the tokens that are there.
    """

    COMPILE = "compile"
    TOO_COMPLEX = "too_complex"
    DEAD_END = "dead_end"
    PREFIX = "prefix"


class ConstraintFailed(Refused):
    """The output cannot be constrained as asked. Another attempt would fail the same way."""

    code = "constraint_failed"

    def __init__(
        self,
        message: str,
        reason: FailedConstraint = FailedConstraint.COMPILE,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.reason = reason

    def copy(self) -> ConstraintFailed:
        """A new error of the same cause, to be raised again."""
        return ConstraintFailed(str(self), self.reason, param=self.param)


class ModelNotFound(Refused):
    """This cluster does not serve the model."""

    code = "model_not_found"


class Overloaded(Refused):
    """All capacity is taken."""

    code = "overloaded"


class NoWorkers(Refused):
    """No prefill/decode pair is ready."""

    code = "no_workers"


class Draining(Refused):
    """This process accepts no new requests."""

    code = "draining"


class Interrupted(BatonError):
    """The attempt is lost; another one may succeed."""

    code = "interrupted"


class WorkerLost(Interrupted):
    """A worker died, hung or restarted."""

    code = "worker_lost"


class LinkBroken(Interrupted):
    """Two workers cannot reach each other, or their geometries differ."""

    code = "link_broken"


class LeaseEnded(Interrupted):
    """The source's pins were not held until the commit."""

    code = "lease_ended"


class PageVerdict(enum.Enum):
    """Where a page with wrong bytes was damaged: in the memory of prefill or of decode, or on its way.

    A worker takes a page that is wrong in its memory out of use.
    """

    SOURCE = "source"
    LINK = "link"
    PULLER = "puller"


class IntegrityFailure(Interrupted):
    """A page's bytes did not match its digest. `verdict` None: not known, and the link is suspected."""

    code = "integrity_failure"

    def __init__(self, message: str, verdict: PageVerdict | None = None) -> None:
        super().__init__(message)
        self.verdict = verdict


class Superseded(Interrupted):
    """A newer attempt exists. `seen`: the newest one that the refusing side knows; None if it did not tell."""

    code = "superseded"

    def __init__(self, message: str, seen: AttemptId | None = None) -> None:
        super().__init__(message)
        self.seen = seen


class SentBack(Interrupted):
    """A row was preempted and host memory was full."""

    code = "sent_back"


class NoRoom(Interrupted):
    """Prefill began a prompt before decode had reserved room for it, and no decode worker has any."""

    code = "no_room"


class NeedMedia(Interrupted):
    """The worker does not hold images of the prompt that it needs. `identities`: theirs, each once."""

    code = "need_media"

    def __init__(self, message: str, identities: tuple[bytes, ...] = ()) -> None:
        super().__init__(message)
        self.identities = identities


class ModelReplaced(Interrupted):
    """Tokens were sent, and no worker with the same fingerprint is left to continue."""

    code = "model_replaced"


class Cancelled(BatonError):
    """The client disconnected or cancelled."""

    code = "cancelled"


class AnswerLost(InvalidRequest):
    """The request's answer cannot be had any more: no router and no store has it, or none can continue it."""

    code = "answer_lost"


class DeadlineExceeded(BatonError):
    """The request's deadline has passed."""

    code = "deadline_exceeded"


class Broken(BatonError):
    """An invariant of ours failed. The process exits, its leases end, others take over."""

    code = "broken"


def _tree(root: type[BatonError]) -> list[type[BatonError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


def from_code(code: str, message: str) -> BatonError:
    """The error of a peer's `code`. An unknown code, from a peer of another version, is a `WorkerLost`."""
    return _BY_CODE.get(code, WorkerLost)(message)


_BY_CODE = {error.code: error for error in _tree(BatonError)}
