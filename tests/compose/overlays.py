"""Steps with other overlays, profiles and models: each changes the running stack, and asks it for exact answers."""

from __future__ import annotations

import base64
import io
import random
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import plain_client
from tests.compose.engine import DockerFailed

if TYPE_CHECKING:
    from tests.compose.steps import ComposeTest

OVERLAYS = (
    ("compose.secret.yaml",),
    ("compose.cma.yaml",),
    ("compose.gpu.yaml",),
    ("compose.gpu.yaml", "compose.secret.yaml"),
    ("compose.gpu.yaml", "compose.cma.yaml", "compose.secret.yaml"),
)
IMAGE_USER = 10001
QUESTION = "What is in the picture?"
_TRANSPORT = re.compile(r'^baton_link_transport_info\{[^}]*transport="([^"]*)"[^}]*\} 1\.0$', re.MULTILINE)
_EXPORTED = re.compile(r'^baton_media_total\{[^}]*outcome="exported"[^}]*\} (\S+)$', re.MULTILINE)


def merge(test: ComposeTest) -> None:
    """Compose takes every overlay, and those together that may be; workers on GPUs have device and verbs."""
    for names in OVERLAYS:
        services = test.project.merged(*names)["services"]
        if "compose.gpu.yaml" in names:
            for role in ("prefill", "decode"):
                (device,) = services[role]["deploy"]["resources"]["reservations"]["devices"]
                assert device["driver"] == "nvidia", role
                assert services[role]["environment"]["UCX_NET_DEVICES"] == "all", role
                assert services[role]["build"]["args"]["WORKER_LOCK"] == "gpu", role
    test.notes.append(f"{len(OVERLAYS)} combinations")


def images(test: ComposeTest) -> None:
    """With the profile `images` an encode worker encodes a picture, and the answer names what is on it."""
    project = test.project
    with changed(test, environment={"BATON_MODEL": "bundled-vision"}, profiles=(*project.profiles, "images")):
        told = describe(test.url, red_circle())
        assert told == "A red circle on the left.", told
        (encode,) = project.containers("encode")
        test.contained()
        exported = sum(float(value) for value in _EXPORTED.findall(project.metrics(encode, 9103)))
        assert exported > 0, "prefill encoded the picture itself"
        test.scraped("encode")
        project.compose("rm", "--stop", "--force", "encode")
    test.notes.append(f"{told!r}, {exported:.0f} embeddings exported")


def secret(test: ComposeTest) -> None:
    """With docker/compose.secret.yaml answers are exact, and a command without the secret is refused."""
    with (
        secret_file(test) as path,
        changed(test, "compose.secret.yaml", environment={"CLUSTER_SECRET_FILE": str(path)}),
    ):
        test.exact()
        router, decode = (test.project.containers(service)[0] for service in ("router", "decode"))
        worker = f"decode-{decode.rpartition('-')[2]}"
        ask = ("exec", router, "env")
        command = ("sh", "-c", f"exec baton role {worker} --redis-url $BATON_REDIS_URL")
        assert f"{worker}: prefill tokens" in test.project.docker(*ask, *command)
        with pytest.raises(DockerFailed, match="secret"):
            test.project.docker(*ask, "-u", "BATON_CLUSTER_SECRET_FILE", *command)


def cma(test: ComposeTest) -> None:
    """With docker/compose.cma.yaml pages move by CMA, and answers are exact."""
    with changed(test, "compose.cma.yaml"):
        test.exact()
        found = {
            transport
            for name in test.project.containers("decode")
            for transport in _TRANSPORT.findall(test.project.metrics(name, 9102))
        }
        test.notes.append(", ".join(sorted(found)))
        assert found
        assert all("cma" in transport for transport in found), found
        test.bytes_moved()


@contextmanager
def changed(
    test: ComposeTest, *names: str, environment: dict[str, str] | None = None, profiles: tuple[str, ...] = ()
) -> Iterator[None]:
    """The running stack, with overlays, variables and profiles. What differs is replaced now, and by the next step."""
    project = test.project
    before = project.overlays, project.environment, project.profiles
    project.overlays = names
    project.environment = {**project.environment, **(environment or {})}
    project.profiles = profiles or project.profiles
    project.up(recreate=True)
    test.wait_pairs()
    yield
    project.overlays, project.environment, project.profiles = before


@contextmanager
def secret_file(test: ComposeTest) -> Iterator[Path]:
    """A file that only the images' user may read, made by a container, since giving files away needs root."""
    with tempfile.TemporaryDirectory() as folder:
        make = f"umask 277 && head -c 32 /dev/urandom | base64 > /made/cluster.secret && chown {IMAGE_USER} /made/*"
        words = ("run", "--rm", "--user", "0", "--entrypoint", "sh", "--volume", f"{folder}:/made")
        test.project.docker(*words, "baton-router", "-c", make)
        yield Path(folder) / "cluster.secret"


def red_circle() -> str:
    """A picture of a red circle on the left, as the toy was trained on, as a `data:` URL."""
    from scripts.bundled_pictures import PictureSpec, draw  # Pillow, which the other steps need not load

    file = io.BytesIO()
    draw(PictureSpec("red", "circle", "on the left"), random.Random(1), smallest=64).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def describe(url: str, picture: str) -> Any:
    """The model's greedy answer about a picture, a `data:` URL."""
    parts = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": QUESTION}]
    chat = {"model": "bundled-vision", "messages": [{"role": "user", "content": parts}], "temperature": 0}
    with plain_client(timeout=120.0) as client:
        answer = client.post(f"{url}/v1/chat/completions", json=chat)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]
