"""Headers of the client become ids that may travel; malformed ones are dropped."""

from __future__ import annotations

import pytest

from baton.domain.trace_context import TraceContext, read_trace_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_traceparent_is_read_and_continued():
    context = read_trace_context("req-1", f"00-{TRACE}-{SPAN}-01")
    assert context == TraceContext("req-1", TRACE, SPAN, True)
    assert context.traceparent == f"00-{TRACE}-{SPAN}-01"
    assert read_trace_context("", context.traceparent) == TraceContext("", TRACE, SPAN, True)


@pytest.mark.parametrize(
    "header",
    ["", "garbage", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-01"],
)
def test_a_malformed_traceparent_counts_as_absent(header: str):
    assert read_trace_context("req-1", header) == TraceContext("req-1")


def test_a_request_id_is_cut_and_cleaned():
    assert read_trace_context("a\r\nb\x00é" + "x" * 300, "").http_request_id == "ab" + "x" * 122
    assert TraceContext("only-http").traceparent == ""
