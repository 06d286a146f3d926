"""Checks of the registered workers: they hold the same model, and every decode worker can get pages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from baton.domain.worker import EMBEDDINGS, NO_TOWER, LinkRecord, WorkerRecord, WorkerRole
from baton.services.cli.doctor.results import DoctorResult, fail, ok, warn
from baton.services.router.dispatch.media.encoder_mismatch import describe_mismatch, find_mismatches

_GIB = 1024**3
_SAME_START = "start all workers from the same model directory with the same version of Baton"
_PROPERTIES: tuple[tuple[str, Callable[[WorkerRecord], object], str], ...] = (
    ("model", lambda worker: worker.model, "give all workers the same --model"),
    ("page size", lambda worker: worker.page_size, "give all workers the same --page-size"),
    ("vocabulary", lambda worker: worker.vocab_size, _SAME_START),
    ("tokenizer and template", lambda worker: worker.text_digest, _SAME_START),
    (
        "fingerprint",
        lambda worker: worker.fingerprint,
        f"{_SAME_START}, --dtype, --kv-dtype, --quantization and --kv-head-groups; "
        "the decode worker's log names the part",
    ),
)


def worker_results(
    workers: Sequence[WorkerRecord], unsigned: Sequence[WorkerRecord], text_digest: str | None
) -> Iterator[DoctorResult]:
    """`unsigned`: records without a valid signature. `text_digest`: of the model given here, if one is."""
    if unsigned:
        names = ", ".join(sorted(worker.id for worker in unsigned))
        fix = "give them, and this command, the same --cluster-secret-file"
        yield fail("workers", f"routers ignore {names}: not signed with this secret", fix)
    if not workers:
        fix = "start some: baton serve prefill, baton serve decode, with the same --redis-url"
        yield warn("workers", "none are registered", fix)
        return
    yield _roles(workers)
    with_pages = [worker for worker in workers if worker.role is not WorkerRole.ENCODE] or workers
    for name, read, fix in _PROPERTIES:
        yield _same(name, read, fix, with_pages)
    if text_digest is not None:
        yield _text(workers, text_digest)
    yield from _embeddings(workers)
    yield from _links(workers)


def _roles(workers: Sequence[WorkerRecord]) -> DoctorResult:
    counts = {role: sum(worker.role is role for worker in workers) for role in WorkerRole}
    found = ", ".join(f"{count} {role.value}" for role, count in counts.items())
    if counts[WorkerRole.DECODE] == 0:
        return fail("workers", found, "start a decode worker: baton serve decode")
    if counts[WorkerRole.PREFILL] == 0 and not any(worker.budgets.takes_prompts for worker in workers):
        fix = "start a prefill worker (baton serve prefill), or decode workers with --token-budget 64"
        return fail("workers", f"{found}, and no decode worker prefills for itself", fix)
    return ok("workers", found)


def _same(name: str, read: Callable[[WorkerRecord], object], fix: str, workers: Sequence[WorkerRecord]) -> DoctorResult:
    holders: defaultdict[object, list[str]] = defaultdict(list)
    for worker in workers:
        holders[read(worker)].append(worker.id)
    title = f"same {name}"
    if len(holders) > 1:
        groups = "; ".join(f"{value} on {', '.join(sorted(ids))}" for value, ids in holders.items())
        return fail(title, groups, fix)
    return ok(title, str(next(iter(holders))))


def _text(workers: Sequence[WorkerRecord], text_digest: str) -> DoctorResult:
    others = sorted(worker.id for worker in workers if worker.text_digest != text_digest)
    if others:
        fix = "give routers and workers the same files: tokenizer, chat template, generation_config.json"
        return fail("this model's tokenizer", f"differs from that of {', '.join(others)}", fix)
    return ok("this model's tokenizer", "equal to that of all workers")


def _embeddings(workers: Sequence[WorkerRecord]) -> Iterator[DoctorResult]:
    """Encode workers make what prefill workers take; prefill workers without a tower have one."""
    encoders = [worker.id for worker in workers if worker.role is WorkerRole.ENCODE]
    lacking = sorted(worker.id for worker in workers if NO_TOWER in worker.capabilities)
    if not encoders:
        if lacking:
            fix = "start one (baton serve encode), or give these workers --vision auto"
            yield fail("encode workers", f"there are none, and {', '.join(lacking)} have no vision tower", fix)
        return
    mismatches = find_mismatches(workers)
    for mismatch in mismatches:
        yield fail("same embeddings", describe_mismatch(mismatch), f"{_SAME_START} and --dtype")
    if not mismatches:
        pulling = any(worker.role is WorkerRole.PREFILL and EMBEDDINGS in worker.capabilities for worker in workers)
        found = f"{', '.join(encoders)} make what prefill workers take"
        fix = "give prefill workers --vision auto or remote"
        yield ok("same embeddings", found) if pulling else warn("same embeddings", "no prefill worker pulls", fix)


def _links(workers: Sequence[WorkerRecord]) -> Iterator[DoctorResult]:
    has_prefill = any(worker.role is WorkerRole.PREFILL for worker in workers)
    for worker in workers:
        if worker.role is not WorkerRole.DECODE:
            continue
        links = [f"{link.prefill_id} by {link.transport}, {_speed(link)}" for link in worker.links]
        if links:
            yield ok(f"links of {worker.id}", "; ".join(links))
        elif has_prefill:
            fix = f"read why in the log of {worker.id} (link_down), and let it reach the prefill workers' addresses"
            yield fail(f"links of {worker.id}", "it has no link to a prefill worker", fix)


def _speed(link: LinkRecord) -> str:
    return f"{link.bandwidth_bytes_per_s / _GIB:.1f} GiB/s"
