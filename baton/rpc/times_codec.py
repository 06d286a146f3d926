"""Attempt times <-> protobuf messages. Called by the workers' servicers and by the router's dispatch."""

from __future__ import annotations

from baton.domain.timing.attempt_times import DecodeTimes, ImportTimes, PrefillTimes
from baton.rpc.gen import common_pb2 as pb


def encode_prefill_times(times: PrefillTimes) -> pb.PrefillTimes:
    """To the wire."""
    return pb.PrefillTimes(
        queue_us=times.queue_us,
        compute_us=times.compute_us,
        seal_us=times.seal_us,
        chunks=[pb.ChunkTime(start_us=start_us, tokens=tokens) for start_us, tokens in times.chunks],
        computed_tokens=times.computed_tokens,
        cached_tokens=times.cached_tokens,
        imported_tokens=times.imported_tokens,
        encode_us=times.encode_us,
    )


def decode_prefill_times(message: pb.PrefillTimes) -> PrefillTimes:
    """From the wire."""
    return PrefillTimes(
        message.queue_us,
        message.compute_us,
        message.seal_us,
        tuple((chunk.start_us, chunk.tokens) for chunk in message.chunks),
        message.computed_tokens,
        message.cached_tokens,
        message.imported_tokens,
        message.encode_us,
    )


def encode_import_times(times: ImportTimes) -> pb.ImportTimes:
    """To the wire."""
    return pb.ImportTimes(**{name: getattr(times, name) for name in ImportTimes.__slots__})


def decode_import_times(message: pb.ImportTimes) -> ImportTimes:
    """From the wire."""
    return ImportTimes(
        message.transport, message.path, message.first_chunk_us, message.pull_us, message.exposed_us, message.commit_us,
        message.join_us, message.bytes, message.pages, message.proof, message.re_reads,
    )  # fmt: skip


def encode_decode_times(times: DecodeTimes) -> pb.DecodeTimes:
    """To the wire."""
    return pb.DecodeTimes(**{name: getattr(times, name) for name in DecodeTimes.__slots__})


def decode_decode_times(message: pb.DecodeTimes) -> DecodeTimes:
    """From the wire."""
    return DecodeTimes(message.steps, message.step_us, message.waited_us, message.preempted_us, message.num_preemptions)
