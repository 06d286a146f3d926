"""Content parts of any form with files of any form: answered or refused by path, soon, and never with a 5xx.

Files are whole, cut, changed, joined to others, bombs by their header and no images at all. Routers read headers
only, so what they accept may still fail in a worker, whose decoder has tests of its own.
"""

from __future__ import annotations

import base64
import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from baton.services.router.vision.limits import ImageLimits
from tests.fuzz.http_app import MODEL, FuzzedApp, Reply
from tests.unit.router.vision.pictures import coloured, picture
from tests.unit.router.vision.vision_models import load_vision_model, save_vision_model
from tests.unit.worker.media.test_image_decoder import png_bomb, png_chunk

pytestmark = pytest.mark.timeout(240)

CHATS = "/v1/chat/completions"
MAX_IMAGES = ImageLimits().max_images
GROWTH_KIB = 24 * 1024
"""Most memory that one request may add at its peak. The pixels of `LARGE` are 48 MB, those of bombs more."""
FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


def _archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("run.sh", "true")
    return file.getvalue()


WHOLE = [coloured("red"), picture(9, 7, "JPEG"), picture(7, 9, "WEBP")]
POLYGLOTS = [
    *(file + _archive() for file in WHOLE),
    b"GIF89a" + WHOLE[0],
    b"%PDF-1.7\n" + WHOLE[1],
    WHOLE[0] + WHOLE[1],
    WHOLE[2][:12] + WHOLE[0],
]
OTHERS = [b"", b"<svg/>", picture(4, 4, "GIF"), picture(4, 4, "TIFF"), b"\x89PNG\r\n\x1a\n", b"RIFF" + b"\xff" * 100]


def _all_black(side: int) -> bytes:
    """A square picture in a small PNG file that has all of its pixels."""
    deflate = zlib.compressobj()
    rows = b"".join([*(deflate.compress(bytes(1 + 3 * side)) for _ in range(side)), deflate.flush()])
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")


LARGE = _all_black(4_000)
"""Within the limits. Only a worker may decode it."""
BOMBS = [png_bomb(60_000, 60_000), _all_black(5_000), png_bomb(2**31 - 1, 1)]


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A file, perhaps cut or with other bytes in it."""
    data = bytearray(draw(st.sampled_from([*WHOLE, *POLYGLOTS, *OTHERS, LARGE, *BOMBS])))
    for at, byte in draw(st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=3)):
        if data:
            data[at % len(data)] = byte
    return bytes(data[: draw(st.one_of(st.none(), st.integers(0, 200)))])


@st.composite
def urls(draw: st.DrawFn) -> str:
    """A `data:` URL with any type, sometimes of bad base64, or another URL."""
    kind = draw(st.sampled_from(["image/png", "image/svg+xml", "text/html", "", "image/png;charset=x", "IMAGE/JPEG"]))
    text = base64.b64encode(draw(files())).decode()
    return draw(
        st.sampled_from(
            [
                f"data:{kind};base64,{text}", f"data:{kind};base64,{text}", f"data:{kind},{text}",
                f"data:{kind};base64,{text[:-1]}", f"data:{kind};base64,{text}\u00e9", "file:///etc/passwd",
                "http://169.254.169.254/latest", "https://localhost/x.png", "gopher://x", "", "data:", "//host/x",
            ]
        )
    )  # fmt: skip


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), urls()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
IMAGES = st.fixed_dictionaries(
    {"url": st.one_of(urls(), urls(), urls(), VALUES)},
    optional={"detail": st.one_of(st.sampled_from(["auto", "low", "high"]), VALUES), "more": VALUES},
)
PARTS = st.one_of(
    st.fixed_dictionaries({"type": st.just("image_url"), "image_url": st.one_of(IMAGES, IMAGES, IMAGES, VALUES)}),
    st.fixed_dictionaries(
        {"type": st.just("text"), "text": st.one_of(st.sampled_from(["a", "<image>", "<im"]), VALUES)}
    ),
    st.fixed_dictionaries({"type": VALUES}, optional={"image_url": IMAGES, "input_audio": VALUES, "video_url": VALUES}),
    VALUES,
)
CONTENTS = st.one_of(st.lists(PARTS, max_size=4), st.lists(PARTS, max_size=4), VALUES)
ROLES = st.sampled_from(["user", "user", "tool", "system", "assistant"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": CONTENTS}), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedApp]:
    directory = tmp_path_factory.mktemp("model")
    save_vision_model(directory)
    text, images = load_vision_model(directory)
    app = FuzzedApp(text, 1024, images)
    yield app
    app.close()


def ask(app: FuzzedApp, messages: Any) -> Reply:
    """The reply, whose form is checked, as is the memory that it took."""
    with suppress(OSError):  # where this is not allowed, only a new peak of the whole process counts
        Path("/proc/self/clear_refs").write_text("5")  # makes the present size the peak
    before = peak_kib()
    reply = app.post(CHATS, {"model": MODEL, "messages": messages, "max_tokens": 3})
    assert peak_kib() - before < GROWTH_KIB
    return reply


def peak_kib() -> int:
    """The largest resident size of this process since its start, or since it was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def shown(file: bytes, **more: Any) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
    return {"type": "image_url", "image_url": {"url": url, **more}}


def test_any_parts_are_answered_or_refused_by_path(app: FuzzedApp) -> None:
    seen: dict[int, int] = {}

    @FUZZ
    @given(MESSAGES)
    @example([{"role": "user", "content": [shown(WHOLE[0])]}])
    @example([{"role": "user", "content": [shown(LARGE)]}])
    @example([{"role": "user", "content": [shown(BOMBS[1])]}])
    def play(messages: Any) -> None:
        reply = ask(app, messages)
        assert reply.status in (200, 400), reply
        seen[reply.status] = seen.get(reply.status, 0) + 1

    play()
    assert set(seen) == {200, 400}


def test_each_hostile_file_is_refused_by_its_part(app: FuzzedApp) -> None:
    for file in (*OTHERS, *BOMBS, *(f for f in POLYGLOTS if not f.startswith(b"\xff\xd8"))):
        reply = ask(app, [{"role": "user", "content": [shown(WHOLE[0]), {"type": "text", "text": "a"}, shown(file)]}])
        assert (reply.status, reply.error["param"]) == (400, "messages[0].content[2].image_url.url"), file[:20]


def test_a_hundred_parts_are_refused_at_the_first_beyond_the_limit(app: FuzzedApp) -> None:
    reply = ask(app, [{"role": "user", "content": [shown(WHOLE[0])] * 100}])
    assert (reply.status, reply.error["param"]) == (400, f"messages[0].content[{MAX_IMAGES}].image_url")
    assert ask(app, [{"role": "user", "content": [shown(WHOLE[0])] * MAX_IMAGES}]).status == 200
