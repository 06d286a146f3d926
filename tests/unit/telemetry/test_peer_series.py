"""Series of a peer that is gone are removed; those of others stay."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.telemetry.peer_series import PeerSeries


def test_a_departed_peer_leaves_no_series():
    registry = CollectorRegistry()
    state = Gauge("link_state", "X.", ["source", "destination"], registry=registry)
    pulled = Counter("pulled", "X.", ["link"], registry=registry)
    series = PeerSeries()
    for peer in ("prefill-0", "prefill-1"):
        series.labels(peer, state, peer, "decode-0").set(1)
        series.labels(peer, pulled, f"{peer}>decode-0").inc()
    series.labels("prefill-0", state, "prefill-0", "decode-0").set(0)
    series.remove("prefill-0")
    series.remove("prefill-0")
    assert series.peers() == {"prefill-1"}
    assert registry.get_sample_value("link_state", {"source": "prefill-0", "destination": "decode-0"}) is None
    assert registry.get_sample_value("pulled_total", {"link": "prefill-0>decode-0"}) is None
    assert registry.get_sample_value("link_state", {"source": "prefill-1", "destination": "decode-0"}) == 1


def test_a_peer_that_comes_back_starts_anew():
    registry = CollectorRegistry()
    pulled = Counter("pulled", "X.", ["link"], registry=registry)
    series = PeerSeries()
    series.labels("prefill-0", pulled, "a").inc(5)
    series.remove("prefill-0")
    series.labels("prefill-0", pulled, "a").inc()
    assert registry.get_sample_value("pulled_total", {"link": "a"}) == 1
