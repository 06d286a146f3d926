"""Attempt times survive the wire."""

from __future__ import annotations

from baton.domain.timing.attempt_times import DecodeTimes, ImportTimes, PrefillTimes, to_us
from baton.rpc import times_codec
from baton.rpc.gen import common_pb2


def test_prefill_times_survive_the_wire():
    times = PrefillTimes(1, 2, 3, ((4, 5), (6, 7)), 8, 9, 10, 11)
    message = common_pb2.PrefillTimes.FromString(times_codec.encode_prefill_times(times).SerializeToString())
    assert times_codec.decode_prefill_times(message) == times


def test_import_times_survive_the_wire():
    times = ImportTimes("nixl", "nixl/ucx (cma)", 1, 2, 3, 4, 5, 6, 7, "v3", 8)
    message = common_pb2.ImportTimes.FromString(times_codec.encode_import_times(times).SerializeToString())
    assert times_codec.decode_import_times(message) == times


def test_decode_times_survive_the_wire():
    times = DecodeTimes(1, 2, 3, 4, 5)
    message = common_pb2.DecodeTimes.FromString(times_codec.encode_decode_times(times).SerializeToString())
    assert times_codec.decode_decode_times(message) == times


def test_durations_are_whole_microseconds_and_never_negative():
    assert [to_us(seconds) for seconds in (0.0, 1.4e-6, 2.6e-6, -1.0)] == [0, 1, 3, 0]
