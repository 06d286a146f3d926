"""Layers in one native call have the bits of layers one kernel at a time, and are left where a step needs more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from baton.model.attention.base import Segment, plan_step
from baton.model.attention.native_backend import NativeAttention
from baton.model.decoders import lean, native_layers
from baton.model.decoders.capture import CaptureSpec, HiddenCapture
from baton.model.decoders.lean import LeanDecoder
from baton.model.decoders.lean_weights import GatedFeedForward, LeanModel
from baton.model.decoders.native_layers import NativeLayers, make_native_layers
from baton.model.kernels.build import IsaLevel
from baton.model.kernels.library import load_kernels
from baton.model.linears.linear import Linear, make_linear
from baton.model.linears.packing import WeightLayout, panel_packer
from baton.model.loading import loader
from baton.model.loading.config import DtypeChoice
from baton.model.loading.kernel_choice import KernelChoice
from baton.model.loading.loader import LoadedModel, load_model
from baton.model.storage import PageStorage
from baton.model.vision.embedding import Embeds
from tests import tiny_models
from tests.exactness.vision.families import FAMILIES as VISION_FAMILIES
from tests.kernels import kernel_levels
from tests.unit.model.loading.test_multimodal import save_random

pytestmark = pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")

NUM_PAGES, PAGE_SIZE = 16, 4
WINDOW = 8
SEGMENTS = (  # two rows, a prompt's first chunk, longer than `WINDOW`, and a row of a drafted token
    Segment(0, 6, 1, [3, 9]),
    Segment(1, 9, 1, [2, 14, 6]),
    Segment(2, 0, 12, [5, 1, 7]),
    Segment(14, 12, 2, [0, 4, 8, 12]),
)
NUM_TOKENS = 16
POSITIONS = torch.cat([torch.arange(s.start, s.start + s.num_tokens) for s in SEGMENTS])
AXES = torch.stack([POSITIONS * factor % 9 for factor in (1, 2, 3)])
KEEP = torch.tensor([0, 1, 13, 14, 15])
TREE = (Segment(0, 6, 1, [3, 9]), Segment(1, 5, 4, [2, 14, 6], parents=(-1, 0, 0, 1)))
TREE_POSITIONS = torch.tensor([6, 5, 6, 6, 7])
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def random_model(
    family: str | transformers.PreTrainedConfig,
    directory: Path,
    dtype: DtypeChoice = DtypeChoice.FLOAT32,
    *,
    head_groups: int = 1,
) -> LoadedModel:
    config = tiny_models.FAMILIES[family]() if isinstance(family, str) else family
    tiny_models.save_random_config(config, directory)
    loaded = load_model(directory, dtype=dtype, page_size=PAGE_SIZE, head_groups=head_groups)
    assert loaded.report.weights.layout is WeightLayout.PANELS, loaded.report.weights.note
    return loaded


def decoder_of(loaded: LoadedModel) -> tuple[LeanDecoder, PageStorage]:
    """A decoder over a pool of random numbers, the same in every call."""
    storage = PageStorage.allocate(loaded.geometry, NUM_PAGES)
    generator = torch.Generator().manual_seed(3)
    for layer in range(len(loaded.geometry.layers)):
        for view in (storage.keys(layer), storage.values(layer)):
            drawn = torch.randn(view.shape, generator=generator)
            view.copy_((drawn * 40).clamp(-127, 127).round() if view.dtype is torch.int8 else drawn)
        for scales in () if storage.scales is None else (storage.scales.keys[layer], storage.scales.values[layer]):
            scales.copy_(torch.rand(scales.shape, generator=generator) * 0.05)
    decoder = loaded.decoder(storage)
    assert isinstance(decoder, LeanDecoder)
    return decoder, storage


def logits_of(
    decoder: LeanDecoder,
    *,
    positions: torch.Tensor = POSITIONS,
    segments: Sequence[Segment] = SEGMENTS,
    embeds: Embeds | None = None,
    capture: HiddenCapture | None = None,
) -> torch.Tensor:
    num_tokens = positions.shape[-1]
    keep = KEEP if num_tokens == NUM_TOKENS else torch.arange(num_tokens)
    step = plan_step(segments, PAGE_SIZE)
    return decoder.forward(torch.arange(4, 4 + num_tokens), positions, step, keep, embeds=embeds, capture=capture)


def lean_model(loaded: LoadedModel) -> LeanModel:
    assert isinstance(loaded.impl, LeanModel)
    return loaded.impl


def down_of(model: LeanModel, layer: int) -> Linear:
    part = model.layers[layer].feed_forward
    assert isinstance(part, GatedFeedForward)
    return part.down


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each native call has computed."""
    found: list[int] = []
    run = NativeLayers.run

    def counted(self: NativeLayers, *arguments: object) -> None:
        found.append(self.num_layers)
        run(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeLayers, "run", counted)
    return found


Check = Callable[..., None]


@pytest.fixture
def check_bits(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> Check:
    """Compares logits and pages with those of a decoder without native layers. `native`: how many one call computes."""

    def check(loaded: LoadedModel, *, native: int, **step: Any) -> None:
        runs.clear()  # those of the check at load
        decoder, storage = decoder_of(loaded)
        found = logits_of(decoder, **step)
        assert runs == ([native] if native else [])
        runs.clear()
        with monkeypatch.context() as patch:
            patch.setattr(lean, "make_native_layers", lambda *parts: None)
            decoder, other_storage = decoder_of(loaded)
            assert torch.equal(logits_of(decoder, **step), found)
        assert torch.equal(other_storage.page_bytes(), storage.page_bytes())
        assert runs == []

    return check


@pytest.mark.parametrize("dtype", [DtypeChoice.FLOAT32, DtypeChoice.BFLOAT16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_one_call_has_the_bits_of_many(family: str, dtype: DtypeChoice, tmp_path: Path, check_bits: Check):
    loaded = random_model(family, tmp_path, dtype)
    check_bits(loaded, native=len(loaded.geometry.layers) - 1)


CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "biases, GELU, head groups": lambda: transformers.LlamaConfig(
        **tiny_models.small_shape(
            attention_bias=True, mlp_bias=True, hidden_act="gelu_pytorch_tanh", num_attention_heads=8,
            num_key_value_heads=4,
        )
    ),
    "windows": lambda: transformers.Qwen2Config(
        **tiny_models.small_shape(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [DtypeChoice.FLOAT32, DtypeChoice.BFLOAT16], ids=str)
@pytest.mark.parametrize("level", kernel_levels(), ids=lambda level: level.value)
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_at_every_level_over_both_kinds_of_pages(
    name: str, level: IsaLevel, dtype: DtypeChoice, tmp_path: Path, check_bits: Check, monkeypatch: pytest.MonkeyPatch
):
    kernels = load_kernels(level)
    monkeypatch.setattr(loader, "choose_kernels", lambda *_: KernelChoice(kernels, level.value))
    loaded = random_model(CONFIGS[name](), tmp_path, dtype, head_groups=1 if name == "windows" else 2)
    assert loaded.kernels is kernels
    windows = [layer.window for layer in loaded.layers[:-1]]
    assert windows == [None, WINDOW if name == "windows" else None]
    check_bits(loaded, native=2)
    kernels.set_threads(3)
    try:
        check_bits(loaded.with_int8_pages(), native=2)
    finally:
        kernels.set_threads(1)


def test_a_capture_and_unpacked_weights_are_left_to_the_loop(tmp_path: Path, runs: list[int]):
    loaded = random_model("llama", tmp_path)
    runs.clear()
    decoder, _ = decoder_of(loaded)
    packed = logits_of(decoder)
    capture = HiddenCapture(CaptureSpec((0, 1)))
    logits_of(decoder, capture=capture)
    assert capture.read().shape[0] == NUM_TOKENS
    lean_model(loaded).unpack()
    assert torch.allclose(logits_of(decoder), packed, atol=1e-4)
    assert len(runs) == 1


def test_weights_that_are_packed_later_are_taken_up(tmp_path: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch):
    loaded = random_model("llama", tmp_path)
    model = lean_model(loaded)
    decoder, _ = decoder_of(loaded)
    wanted = logits_of(decoder)
    down_of(model, -2).unpack()
    runs.clear()
    built = count_calls("_weight_struct", monkeypatch)
    assert torch.allclose(logits_of(decoder), wanted, atol=1e-4)
    assert runs == built == [], "a matrix of the last native layer is plain"
    assert loaded.kernels is not None
    model.pack(panel_packer(loaded.kernels))
    assert torch.equal(logits_of(decoder), wanted)
    assert runs == [2]


def test_panels_of_another_dtype_are_refused(tmp_path: Path, runs: list[int]):
    """The kernels would read the bits of float32 as bfloat16."""
    loaded = random_model("llama", tmp_path, DtypeChoice.BFLOAT16)
    model = lean_model(loaded)
    part = model.layers[1].feed_forward
    assert isinstance(part, GatedFeedForward)
    assert part.down.panels is not None
    assert loaded.kernels is not None
    wide = make_linear(part.down.panels.weight().float())
    assert wide.pack(panel_packer(loaded.kernels))
    odd = replace(model.layers[1], feed_forward=replace(part, down=wide))
    mixed = replace(model, layers=(model.layers[0], odd, model.layers[2]))
    decoder, _ = decoder_of(replace(loaded, impl=mixed))
    runs.clear()
    with pytest.raises(ValueError, match="does not go with a weight"):
        logits_of(decoder)
    assert runs == []


def test_a_family_with_norms_after_its_parts_is_left_to_the_loop(tmp_path: Path, runs: list[int]):
    decoder, _ = decoder_of(random_model("gemma3_text", tmp_path))
    assert logits_of(decoder).isfinite().all()
    assert runs == []


@pytest.mark.parametrize("num_dense", [2, 3])
def test_plain_layers_before_experts(
    num_dense: int, tmp_path: Path, check_bits: Check, monkeypatch: pytest.MonkeyPatch
):
    """All but the last of four must be plain; where they are not, a step pays for no struct of the first ones."""
    config = transformers.Qwen3MoeConfig(
        **tiny_models.small_shape(num_hidden_layers=4, mlp_only_layers=list(range(num_dense)), **_EXPERTS)
    )
    loaded = random_model(config, tmp_path)
    looked_up, built = (count_calls(name, monkeypatch) for name in ("_matrices_of", "_weight_struct"))
    native = num_dense if num_dense == 3 else 0
    check_bits(loaded, native=native)
    assert (len(looked_up), len(built)) == (native, 4 * native)


def count_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each later call of a function of `native_layers`."""
    calls: list[None] = []
    function = getattr(native_layers, name)

    def counted(*arguments: Any) -> Any:
        calls.append(None)
        return function(*arguments)

    monkeypatch.setattr(native_layers, name, counted)
    return calls


def test_layers_over_window_slots_are_computed_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Layers with a window have a plan of their own there, and one call takes one plan."""
    loaded = random_model("llama", tmp_path)
    decoder, _ = decoder_of(loaded)
    parts = decoder._model, decoder._observed, decoder._storage, decoder._ropes, decoder._backend, decoder._ops
    assert make_native_layers(*parts) is not None
    monkeypatch.setattr(PageStorage, "has_window_slots", True)
    assert make_native_layers(*parts) is None


def test_a_tree_is_computed_in_one_call_without_windows_only(tmp_path: Path, runs: list[int], check_bits: Check):
    step: dict[str, Any] = {"positions": TREE_POSITIONS, "segments": TREE}
    check_bits(random_model("llama", tmp_path / "plain"), native=2, **step)
    decoder, _ = decoder_of(random_model(CONFIGS["windows"](), tmp_path / "windows"))
    runs.clear()
    with pytest.raises(ValueError, match="a tree of drafts in a layer with a window"):
        logits_of(decoder, **step)
    assert runs == []


def test_steps_of_which_torch_computes_a_part_are_left_to_the_loop(tmp_path: Path, runs: list[int]):
    loaded = random_model("llama", tmp_path)
    decoder, storage = decoder_of(loaded)
    wanted = logits_of(decoder)
    assert loaded.kernels is not None
    split = decoder_of(loaded)[0].with_backend(NativeAttention(loaded.kernels, storage, max_segment_tokens=2))
    runs.clear()
    assert torch.allclose(logits_of(split), wanted, atol=1e-4)
    assert runs == []
    logits_of(split, segments=SEGMENTS[:2], positions=POSITIONS[:2])
    assert runs == [2], "a step of short segments alone"


@pytest.fixture(scope="module")
def with_images(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp("qwen3_vl")
    save_random(VISION_FAMILIES["qwen3_vl"].config(), directory)
    loaded = load_model(directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, vision=True)
    assert len(loaded.layers) == 3
    return loaded


def rows_of_images(num_deep: int) -> Embeds:
    generator = torch.Generator().manual_seed(5)
    rows, *deep = (torch.randn(3, 64, generator=generator) for _ in range(1 + num_deep))
    return Embeds(torch.tensor([2, 3, 4]), rows, tuple(deep))


@pytest.mark.parametrize(
    ("step", "native"),
    [
        ({}, 2),
        ({"embeds": rows_of_images(0)}, 2),
        ({"embeds": rows_of_images(1)}, 0),
        ({"positions": AXES}, 0),
        ({"positions": AXES, "embeds": rows_of_images(2)}, 0),
    ],
    ids=["text", "rows", "deep rows", "axes", "axes, deep rows"],
)
def test_axes_and_deep_rows_of_images_are_left_to_the_loop(
    step: dict[str, Any], native: int, with_images: LoadedModel, check_bits: Check
):
    assert with_images.report.weights.layout is WeightLayout.PANELS, with_images.report.weights.note
    check_bits(with_images, native=native, **step)
