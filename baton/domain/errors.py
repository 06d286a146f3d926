"""The one tree of errors. `code` is stable: it is the metric label, the gRPC detail and the client's `error.code`.

    BatonError
    |- Refused                the request cannot be taken: tell the client, nothing was spent
    |  |- InvalidRequest      invalid_request      400
    |  |- ContextOverflow     context_length_exceeded  400
    |  |- ModelNotFound       model_not_found      404
    |  |- Overloaded          overloaded           429, says when to come back
    |  |- NoWorkers           no_workers           503, says when to come back
    |  `- Draining            draining             503, says when to come back
    |- Interrupted            this attempt is lost, the request is not: the router may try again
    |  |- WorkerLost          worker_lost
    |  |- LinkBroken          link_broken
    |  |- LeaseEnded          lease_ended
    |  |- IntegrityFailure    integrity_failure    bytes did not match their digest
    |  |- Superseded          superseded           a newer attempt exists
    |  |- SentBack            sent_back            preempted and no host memory left
    |  `- ModelReplaced       model_replaced       503, who could go on as it began is gone: ask anew
    |- Cancelled              cancelled            the client went away
    |- DeadlineExceeded       deadline_exceeded    504
    `- Broken                 broken               our own invariant failed: log and exit

Translation to HTTP is in `services.router.edge.http_errors`, to gRPC in `baton.rpc.codec`, and nowhere else.
"Not now" is a return value, never one of these.
"""

from __future__ import annotations

from typing import ClassVar


class BatonError(Exception):
    """Base of the tree."""

    code: ClassVar[str] = "error"


class Refused(BatonError):
    """The request cannot be taken. `param` names the offending field; `retry_after_s` when to try again, if ever."""

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


class ModelNotFound(Refused):
    """No such model here."""

    code = "model_not_found"


class Overloaded(Refused):
    """Alive but full."""

    code = "overloaded"


class NoWorkers(Refused):
    """No prefill/decode pair can serve."""

    code = "no_workers"


class Draining(Refused):
    """This process takes nothing new."""

    code = "draining"


class Interrupted(BatonError):
    """This attempt is lost; another may succeed."""

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


class IntegrityFailure(Interrupted):
    """A page's bytes did not match the digest that was announced."""

    code = "integrity_failure"


class Superseded(Interrupted):
    """A message of an attempt older than one already seen."""

    code = "superseded"


class SentBack(Interrupted):
    """A row was preempted and there was no host memory to keep it."""

    code = "sent_back"


class ModelReplaced(Interrupted):
    """Tokens were given, and no worker is left that would go on like those that made them."""

    code = "model_replaced"


class Cancelled(BatonError):
    """The client went away, or asked for an end."""

    code = "cancelled"


class DeadlineExceeded(BatonError):
    """The request's deadline passed."""

    code = "deadline_exceeded"


class Broken(BatonError):
    """Our own invariant failed; the process that sees it exits, leases end and others take over."""

    code = "broken"


def _tree(root: type[BatonError]) -> list[type[BatonError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


def from_code(code: str, message: str) -> BatonError:
    """The error that a peer named by `code`; an unknown code is a `WorkerLost` (the peer is of another version)."""
    return _BY_CODE.get(code, WorkerLost)(message)


_BY_CODE = {error.code: error for error in _tree(BatonError)}
