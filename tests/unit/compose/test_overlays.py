"""Steps with overlays: what is changed, what is asked, and that a stack which does not keep its word fails."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.compose import overlays
from tests.compose.engine import DockerFailed
from tests.compose.steps import STEPS
from tests.unit.compose.test_engine import Docker
from tests.unit.compose.test_steps import FakeTest
from tests.unit.docker.stack import DOCKER, GPU

CMA = 'baton_link_transport_info{destination="d",source="p",transport="nixl/ucx (cma)"} 1.0\n'
PULLED = "baton_transfer_bytes_total 64.0\n"
EXPORTED = 'baton_media_total{outcome="exported"} 1.0\n'


class Stack(FakeTest):
    """A fake whose answers are exact, and whose containers are contained and scraped."""

    def exact(self) -> None:
        self.events.append(["exact"])

    def contained(self) -> None:
        self.events.append(["contained"])

    def scraped(self, service: str) -> None:
        self.events.append([f"{service} scraped"])


def ups(test: FakeTest) -> list[str]:
    return [" ".join(event) for event in test.events if "up" in event]


def test_every_overlay_is_merged_by_compose_itself():
    words = {name for names in overlays.OVERLAYS for name in names}
    assert words == {path.name for path in DOCKER.glob("compose.*.yaml")}
    services: Any = {
        role: {
            **{part: GPU["services"][role][part] for part in ("deploy", "environment")},
            "build": GPU["services"][role]["build"],
        }
        for role in ("prefill", "decode")
    }
    test = Stack(Docker(config=json.dumps({"services": services})))
    STEPS["merge"](test)
    assert len(test.events) == len(overlays.OVERLAYS)
    services["decode"]["environment"] = {"UCX_NET_DEVICES": "eth0"}
    with pytest.raises(AssertionError):
        STEPS["merge"](Stack(Docker(config=json.dumps({"services": services}))))


def test_cma_is_what_the_workers_report():
    test = Stack(Docker(ps="a\n", exec=CMA + PULLED))
    STEPS["cma"](test)
    assert str(DOCKER / "compose.cma.yaml") in ups(test)[0]
    assert "--remove-orphans" in ups(test)[0]
    assert test.notes == ["nixl/ucx (cma)", "64 bytes"]
    assert test.project.overlays == ()


@pytest.mark.parametrize(
    "shown", [CMA.replace("cma", "tcp"), CMA.replace("1.0", "0.0"), CMA + CMA.replace("cma", "tcp")]
)
def test_another_path_than_cma_fails(shown: str):
    with pytest.raises(AssertionError):
        STEPS["cma"](Stack(Docker(ps="a\n", exec=shown + PULLED)))


def test_a_caller_without_the_secret_must_be_refused():
    answers = {"exec": "decode-1: prefill tokens 0, rows 1, reservations 1\n", "ps": "mine-decode-1\n"}
    served = Docker(**answers)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        STEPS["secret"](Stack(served))

    class Refusing(Docker):
        def __call__(self, command: Any, timeout_s: float) -> Any:
            done = super().__call__(command, timeout_s)
            return (_ for _ in ()).throw(DockerFailed("its secret differs")) if "-u" in command else done

    test = Stack(Refusing(**answers))
    STEPS["secret"](test)
    assert str(DOCKER / "compose.secret.yaml") in ups(test)[0]
    assert ["exact"] in test.events


@pytest.mark.parametrize(
    ("told", "exported", "passes"), [("right", EXPORTED, True), ("A dog.", EXPORTED, False), ("right", "", False)]
)
def test_a_picture_must_be_named_and_encoded_by_the_encode_worker(told: str, exported: str, passes: bool, monkeypatch):
    answer = "A red circle on the left." if told == "right" else told
    monkeypatch.setattr(overlays, "describe", lambda url, picture: answer)
    test = Stack(Docker(ps="e\n", exec=exported))
    if not passes:
        with pytest.raises(AssertionError):
            STEPS["images"](test)
        return
    STEPS["images"](test)
    assert "--profile images" in ups(test)[0]
    assert [event[0] for event in test.events if len(event) == 1] == ["pairs", "contained", "encode scraped"]
    assert test.events[-1][-4:] == ["rm", "--stop", "--force", "encode"]
    assert test.project.environment == {}
