"""Weights in a shared file give the bits of private ones, and every failure on the way leaves private ones."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from baton.model.attention.base import Segment, plan_step
from baton.model.decoders.lean_spec import FAMILIES, Family
from baton.model.decoders.lean_weights import LeanModel
from baton.model.errors import UnsupportedModel
from baton.model.linears.packing import WeightLayout
from baton.model.loading.bit_check import check_bits
from baton.model.loading.config import DtypeChoice
from baton.model.loading.identity import checkpoint_root
from baton.model.loading.kernel_choice import KernelUse
from baton.model.loading.loader import DecoderChoice, LoadedModel, load_model
from baton.model.loading.quantization import Quantization
from baton.model.sharing import shared_weights, weight_key
from baton.model.sharing.shared_weights import SharingPlan, WeightSharing, load_shared_model
from baton.model.sharing.weight_key import LoadOptions, key_of, key_parts
from baton.model.sharing.weight_manifest import restore
from baton.model.smaps import measure_memory
from baton.model.storage import PageStorage
from baton.model.weight_file import cache as cache_module
from baton.model.weight_file.format import WeightFile
from baton.model.weight_file.lock import FileLock
from tests import tiny_models
from tests.kernels import kernel_levels

pytestmark = pytest.mark.skipif(not kernel_levels(), reason="only weights of native kernels are shared")

FLOAT32 = LoadOptions(dtype=DtypeChoice.FLOAT32)
LEAN_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_random_model("llama", tmp_path_factory.mktemp("llama"))


@dataclass
class Worker:
    """Loads as a worker does, and keeps the events that it logs."""

    cache: Path
    sharing: WeightSharing = WeightSharing.ALWAYS
    max_wait_s: float = 30.0
    events: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def load(
        self, directory: Path, options: LoadOptions = FLOAT32, max_model_len: int | None = None, **more: Path
    ) -> LoadedModel:
        plan = SharingPlan(self.sharing, [self.cache, *more.values()], self._log, self.max_wait_s)
        return load_shared_model(directory, lambda: checkpoint_root(directory), options, plan, max_model_len)

    def _log(self, event: str, **fields: object) -> None:
        if event == "weights_packing":
            return
        self.events.append(event)
        self.reasons.append(str(fields.get("reason", "")))


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path / "cache")


def is_shared(model: LoadedModel) -> bool:
    """What the mapping says of the tensors that a step reads."""
    assert isinstance(model.impl, LeanModel)
    memory = measure_memory(model.impl.tensors())
    assert memory == model.report.memory
    assert memory is not None
    assert memory.shared_bytes in (0, memory.num_bytes)
    return memory.shared_bytes > 0


def logits(model: LoadedModel) -> torch.Tensor:
    """Of a prompt in two chunks and three single tokens: [tokens, vocab_size]."""
    page_size, ids = model.geometry.page_size, torch.arange(1, 45)
    storage = PageStorage.allocate(model.geometry, 8)
    decoder, found = model.decoder(storage), []
    for start, end in ((0, 19), (19, 41), (41, 42), (42, 43), (43, 44)):
        positions = torch.arange(start, end)
        step = plan_step([Segment(0, start, end - start, [5, 2, 7])], page_size)
        found.append(decoder.forward(ids[start:end], positions, step, torch.arange(end - start)).clone())
    return torch.cat(found)


@pytest.mark.parametrize("family", LEAN_FAMILIES)
def test_logits_have_the_bits_of_private_weights(family: str, worker: Worker, tmp_path: Path):
    directory = tiny_models.save_random_model(family, tmp_path / family)
    packer, other = worker.load(directory), worker.load(directory)
    assert is_shared(packer)
    assert is_shared(other)
    assert worker.events == ["weights_packed"]
    wanted = logits(load_model(directory, dtype=DtypeChoice.FLOAT32))
    assert torch.equal(logits(packer), wanted)
    assert torch.equal(logits(other), wanted)


FORMATS = [
    pytest.param(replace(FLOAT32, dtype=DtypeChoice.BFLOAT16), id="bfloat16"),
    pytest.param(replace(FLOAT32, quantization=Quantization.INT8), id="int8"),
]


@pytest.mark.parametrize("options", FORMATS)
def test_every_format_of_weights_is_shared(options: LoadOptions, llama: Path, worker: Worker):
    private = load_model(llama, **options.arguments())
    first, second = worker.load(llama, options), worker.load(llama, options)
    assert is_shared(first)
    assert is_shared(second)
    assert torch.equal(logits(second), logits(private))
    assert second.report.quantization == private.report.quantization
    assert second.report.check == private.report.check
    assert second.report.verification is check_bits(private)
    assert second.with_int8_pages().report.verification is None, "they were checked over other pages"
    assert second.geometry == private.geometry
    assert second.layers == private.layers


def test_the_context_length_is_each_workers_own(llama: Path, worker: Worker):
    assert worker.load(llama, max_model_len=77).config.max_model_len == 77
    assert worker.load(llama).config.max_model_len == tiny_models.MAX_POSITIONS
    with pytest.raises(UnsupportedModel, match="max_model_len 9999 is outside"):
        worker.load(llama, max_model_len=9999)


def test_a_warm_start_imports_no_transformers(llama: Path, worker: Worker):
    """It takes longer to import than the weights to map."""
    worker.load(llama)
    program = f"""
import sys
from pathlib import Path
from baton.model.loading.config import DtypeChoice
from baton.model.sharing import shared_weights as shared
from baton.model.sharing.weight_key import LoadOptions
events = []
plan = shared.SharingPlan(shared.WeightSharing.ALWAYS, [Path({str(worker.cache)!r})], lambda *_, **__: events.append(1))
options = LoadOptions(dtype=DtypeChoice.FLOAT32)
model = shared.load_shared_model(Path({str(llama)!r}), lambda: {checkpoint_root(llama)!r}, options, plan)
assert not events and not model.report.sharing_note, model.report
sys.exit("transformers" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60.0)


def the_file(worker: Worker) -> Path:
    (path,) = worker.cache.glob("*.weights")
    return path


def flip(content: bytes) -> bytes:
    return content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped": flip,
    "cut": lambda content: content[:-8192],
    "empty": lambda _: b"",
    "torn": lambda content: content[:4096] + bytes(4096) + content[8192:],
    "another version": lambda content: content.replace(b'"version":1', b'"version":9'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_packed_anew(damage: str, llama: Path, worker: Worker):
    wanted = logits(worker.load(llama))
    path = the_file(worker)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    again = worker.load(llama)
    assert is_shared(again)
    assert torch.equal(logits(again), wanted)
    assert worker.events == ["weights_packed", "weight_file_refused", "weight_file_refused", "weights_packed"]
    worker.load(llama)
    assert worker.events.count("weights_packed") == 2, "the new file is whole"


def test_a_whole_file_of_another_model_is_packed_anew(llama: Path, worker: Worker, tmp_path: Path):
    """Right by every digest, but under this key's name."""
    other = tiny_models.save_random_model("llama", tmp_path / "other", seed=1)
    worker.load(other)
    parts = key_parts(llama, checkpoint_root(llama), FLOAT32)
    the_file(worker).rename(worker.cache / f"{key_of(parts)}.weights")
    model = worker.load(llama)
    assert worker.reasons[1] == "it was made with other weights"
    assert torch.equal(logits(model), logits(load_model(llama, dtype=DtypeChoice.FLOAT32)))


def test_a_file_whose_weights_compute_something_else_is_refused(
    llama: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
):
    """As if the kernels of this machine were not those that the key names."""
    worker.load(llama)
    restored = restore

    def with_a_swapped_norm(*arguments: object) -> LoadedModel:
        file = arguments[1]
        assert isinstance(file, WeightFile)
        tensors = list(file.tensors)
        norm = next(number for number, tensor in enumerate(tensors) if tensor.dim() == 1)
        tensors[norm] = tensors[norm] * 1.001
        return restored(arguments[0], replace(file, tensors=tuple(tensors)), *arguments[2:])  # type: ignore[arg-type]

    monkeypatch.setattr(shared_weights, "restore", with_a_swapped_norm)
    model = worker.load(llama)
    assert "other logits than the packer's" in worker.reasons[1]
    assert not is_shared(model)
    assert "cannot be used as it was written" in model.report.sharing_note


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_disk_leaves_private_weights_and_a_note(
    number: int, llama: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    model = worker.load(llama)
    assert not is_shared(model)
    assert os.strerror(number) in model.report.sharing_note
    assert list(worker.cache.glob("*.weights")) + list(worker.cache.glob("*.tmp")) == []


def test_the_next_directory_serves_where_the_first_cannot(llama: Path, worker: Worker, tmp_path: Path):
    worker.cache.write_text("a file where the directory should be")
    model = worker.load(llama, then=tmp_path / "second")
    assert is_shared(model)
    assert len(list((tmp_path / "second").glob("*.weights"))) == 1


def test_a_foreign_directory_is_not_used(llama: Path, worker: Worker):
    worker.cache.mkdir()
    worker.cache.chmod(0o777)
    model = worker.load(llama)
    assert not is_shared(model)
    assert "other users may write" in model.report.sharing_note


def test_a_foreign_file_is_not_mapped(llama: Path, worker: Worker):
    worker.load(llama)
    the_file(worker).chmod(0o666)
    model = worker.load(llama)
    assert not is_shared(model)
    assert "other users may write" in model.report.sharing_note


def key_lock(worker: Worker, llama: Path) -> FileLock:
    worker.cache.mkdir(mode=0o700)
    return FileLock(worker.cache / f"{key_of(key_parts(llama, checkpoint_root(llama), FLOAT32))}.lock")


def test_a_packer_that_hangs_costs_a_wait_at_most(llama: Path, worker: Worker):
    lock = key_lock(worker, llama)
    assert lock.try_acquire()
    worker.max_wait_s = 0.05
    model = worker.load(llama)
    lock.close()
    assert not is_shared(model)
    assert "another worker has packed them for more than 0.05 s" in model.report.sharing_note
    assert worker.events == ["weights_wait"]


def test_of_two_that_start_at_once_one_packs(llama: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch):
    waiting = threading.Event()
    packing = cache_module.CachedWeights.publish

    def publish_when_the_other_waits(self: cache_module.CachedWeights, *arguments: object) -> None:
        assert waiting.wait(60.0)
        packing(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cache_module.CachedWeights, "publish", publish_when_the_other_waits)
    models: list[LoadedModel] = []
    first = threading.Thread(target=lambda: models.append(worker.load(llama)))
    second = Worker(worker.cache)
    lock_taken = threading.Event()
    trying = FileLock.try_acquire

    def note_who_waits(lock: FileLock) -> bool:
        took = trying(lock)
        (lock_taken if took else waiting).set()
        return took

    monkeypatch.setattr(FileLock, "try_acquire", note_who_waits)
    first.start()
    assert lock_taken.wait(60.0)
    models.append(second.load(llama))
    first.join(60.0)
    assert worker.events == ["weights_packed"]
    assert second.events == ["weights_wait"]
    assert all(is_shared(model) for model in models)


def on_small_pages(memory_of: Callable[..., object]) -> Callable[..., object]:
    """`measure_memory` as the kernel would make it where files have small pages only."""

    def measured(tensors: object) -> object:
        memory = memory_of(tensors)
        return replace(memory, huge_bytes=0) if memory.shared_bytes else memory  # type: ignore[attr-defined, type-var]

    return measured


@pytest.mark.parametrize("private_is_huge", [True, False])
def test_auto_shares_unless_private_memory_has_larger_pages(
    private_is_huge: bool, llama: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
):
    worker.sharing = WeightSharing.AUTO
    monkeypatch.setattr(shared_weights, "measure_memory", on_small_pages(measure_memory))
    monkeypatch.setattr(shared_weights, "huge_fraction", lambda _: 1.0 if private_is_huge else 0.0)
    first, second = worker.load(llama), worker.load(llama)
    assert worker.events == ["weights_packed"], "the file serves the start, whatever becomes of the memory"
    for model in (first, second):
        assert is_shared(model) is not private_is_huge
        assert model.report.sharing_note == ("only 0% of the file is on huge pages" if private_is_huge else "")


def test_what_needs_no_file_says_why(llama: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    off = replace(worker, sharing=WeightSharing.OFF)
    assert off.load(llama).report.sharing_note == "switched off"
    stock = replace(FLOAT32, decoder=DecoderChoice.STOCK)
    assert worker.load(llama, stock).report.sharing_note == "the stock decoder was asked for"
    experts = tiny_models.save_random_model("qwen3_moe", tmp_path / "experts")
    assert worker.load(experts).report.sharing_note == "the model has experts"
    other_family = tiny_models.save_random_model("gpt_oss", tmp_path / "gpt_oss")
    assert worker.load(other_family).report.sharing_note == "there is no lean decoder for gpt_oss"
    plain, torch_only = replace(FLOAT32, layout=WeightLayout.PLAIN), replace(FLOAT32, kernels=KernelUse.NEVER)
    assert worker.load(llama, plain).report.sharing_note == "plain weights were asked for"
    assert worker.load(llama, torch_only).report.sharing_note.startswith("without native kernels")
    monkeypatch.setattr(shared_weights, "FAMILIES", {"gpt_oss": Family()})
    assert "the stock decoder serves the model" in worker.load(other_family).report.sharing_note
    monkeypatch.setattr(shared_weights, "FAMILIES", FAMILIES)
    assert list(worker.cache.glob("*.weights")) == []


CHANGES: list[Callable[[pytest.MonkeyPatch], LoadOptions]] = [
    lambda _: replace(FLOAT32, dtype=DtypeChoice.BFLOAT16),
    lambda _: replace(FLOAT32, page_size=32),
    lambda _: replace(FLOAT32, head_groups=2),
    lambda _: replace(FLOAT32, quantization=Quantization.INT8),
    lambda _: replace(FLOAT32, kernels=KernelUse.NEVER),
    lambda patch: patch.setattr(weight_key, "cpu_identity", lambda: "another CPU") or FLOAT32,
    lambda patch: patch.setattr(weight_key, "__version__", "0.0.9") or FLOAT32,
    lambda patch: patch.setattr(weight_key, "FORMAT_VERSION", 2) or FLOAT32,
    lambda patch: patch.setattr(weight_key, "source_digest", lambda _: "new panels") or FLOAT32,
    lambda patch: patch.setattr(weight_key, "loader_sources", lambda: "edited") or FLOAT32,
    lambda patch: patch.setattr(torch, "__version__", "2.99") or FLOAT32,
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_the_key_changes_with_all_that_weights_depend_on(number: int, llama: Path, monkeypatch: pytest.MonkeyPatch):
    before = key_of(key_parts(llama, "root", FLOAT32))
    assert key_of(key_parts(llama, "root", FLOAT32)) == before
    options = CHANGES[number](monkeypatch)
    assert key_of(key_parts(llama, "root", options)) != before


def test_an_edited_source_changes_the_digest_of_the_loader(tmp_path: Path):
    source = tmp_path / "model" / "packing.py"
    source.parent.mkdir()
    source.write_text("TILE = 16")
    before = weight_key.loader_sources(tmp_path)
    source.write_text("TILE = 32")
    weight_key.loader_sources.cache_clear()
    assert weight_key.loader_sources(tmp_path) != before


def test_the_key_changes_with_checkpoint_and_config(llama: Path, tmp_path: Path):
    before = key_of(key_parts(llama, "root", FLOAT32))
    assert key_of(key_parts(llama, "another root", FLOAT32)) != before
    config = (llama / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert key_of(key_parts(tmp_path, "root", FLOAT32)) != before
