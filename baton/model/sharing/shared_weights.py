"""Loads a model so that the workers of a host keep its weights once.

1. The key names all that ready weights depend on (`weight_key`). Its file is looked for in each cache directory.
2. Without a whole file one worker takes the key's lock, loads the model from the checkpoint, checks it, and writes the
   file. Others wait for the lock, not longer than `MAX_WAIT_S`. A dead packer's lock is free, and the next one packs.
3. Every worker, the packer too, maps the file shared and read-only, verifies all of it, and compares the bits of the
   logits of a few tokens with those of the packer's private weights.

Whatever fails on the way leaves this worker with private weights, and a note for the log that says why.
"""

from __future__ import annotations

import enum
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from baton.model.decoders.lean_record import NoRecord
from baton.model.decoders.lean_spec import FAMILIES
from baton.model.huge_pages import huge_empty, huge_fraction
from baton.model.kernels.library import Kernels
from baton.model.linears.packing import WeightLayout
from baton.model.loading.config import bounded_context, read_config, text_model_type
from baton.model.loading.hf_weights import OnProgress
from baton.model.loading.kernel_choice import choose_kernels
from baton.model.loading.loader import DecoderChoice, LoadedModel, load_model
from baton.model.loading.quantization import Quantization
from baton.model.sharing.weight_key import LoadOptions, key_of, key_parts
from baton.model.sharing.weight_manifest import make_manifest, restore
from baton.model.smaps import WeightMemory, measure_memory
from baton.model.weight_file.cache import CachedWeights
from baton.model.weight_file.format import DamagedFile, WeightFile
from baton.model.weight_file.lock import LockTimeout
from baton.model.weight_file.ownership import ForeignFile

MAX_WAIT_S = 600.0
"""Longest wait for another worker that packs the same weights."""
MAX_REREAD_S = 60.0
"""Longest wait for others that open the file, or read it anew. After it the file is used as it is."""
MIN_REREAD_BYTES = 32 * 1024 * 1024
"""Less is not worth it, and the ends of a short file are no huge pages in any case."""
MIN_HUGE_FRACTION = 0.9
"""Of a mapped file. With less, decode steps read the weights up to 40 % slower than from private huge pages."""
_SAMPLE_BYTES = 16 * 1024 * 1024


class WeightSharing(enum.Enum):
    """Use of weight files. `AUTO`: where the file is on huge pages, or private memory would not be either."""

    AUTO = "auto"
    ALWAYS = "always"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class SharingPlan:
    """`directories`: caches in the order of preference. `on_event`: gets an event and its fields, for the log."""

    sharing: WeightSharing
    directories: Sequence[Path]
    on_event: Callable[..., object]
    max_wait_s: float = MAX_WAIT_S


def load_shared_model(
    directory: Path,
    root: Callable[[], str],
    options: LoadOptions,
    plan: SharingPlan,
    max_model_len: int | None = None,
    on_progress: OnProgress | None = None,
) -> LoadedModel:
    """Loads a model as `load_model` does, on shared weights where that is possible. `root`: gives `checkpoint_root`.

    Raises what `load_model` raises.
    """
    began = time.monotonic()
    reason, kernels = _reason_against(directory, options, plan), choose_kernels(options.kernels, options.device).kernels

    def load_private() -> LoadedModel:
        read_config(directory, dtype=options.dtype, max_model_len=max_model_len, device=options.device)
        return load_model(directory, on_progress=on_progress, **options.arguments())

    if reason is not None or kernels is None:
        reason = reason or "without native kernels rounding depends on where weights lie"
        model = _with_note(load_private(), reason)
    else:
        parts = key_parts(directory, root(), options)
        model = _SharedLoader(directory, options, plan, parts, kernels, load_private).load()
    config = replace(model.config, max_model_len=bounded_context(model.config.max_model_len, max_model_len))
    return replace(model, config=config, report=replace(model.report, seconds=time.monotonic() - began))


class _SharedLoader:
    """Loads the model of one key."""

    def __init__(
        self,
        directory: Path,
        options: LoadOptions,
        plan: SharingPlan,
        parts: dict[str, str],
        kernels: Kernels,
        load_private: Callable[[], LoadedModel],
    ) -> None:
        self._directory = directory
        self._kernels = kernels
        self._options = options
        self._plan = plan
        self._parts = parts
        self._load_private = functools.cache(load_private)  # with its own context length

    def load(self) -> LoadedModel:
        """The model on the first cache directory that serves, else on private weights."""
        problems = []
        for cache in self._plan.directories:
            try:
                return self._load_from(CachedWeights(cache, key_of(self._parts)))
            except (ForeignFile, OSError) as error:  # of this directory, or of its disk: the next one may do
                problems.append(str(error))
            except (LockTimeout, NoRecord) as error:
                problems.append(str(error))
                break
        return _with_note(self._load_private(), "; ".join(problems) or "there is no directory for the file")

    def _load_from(self, cached: CachedWeights) -> LoadedModel:
        """The model on the file of `cached`, which is packed first if need be."""
        model = self._open(cached)
        if model is None:
            with self._locked(cached):
                model = self._open(cached) or self._pack(cached)
        return model

    @contextmanager
    def _locked(self, cached: CachedWeights) -> Iterator[None]:
        """Holds the lock of whoever packs. Raises `LockTimeout`."""
        lock = cached.lock()
        try:
            if not lock.try_acquire():
                self._plan.on_event("weights_wait", path=str(cached.path), max_wait_s=self._plan.max_wait_s)
                lock.acquire(self._plan.max_wait_s)
            yield
        finally:
            lock.close()

    def _open(self, cached: CachedWeights) -> LoadedModel | None:
        """The model on the file; None without a file that may be used."""
        try:
            found = self._open_on_huge_pages(cached)
            if found is None:
                return None
            file, note = self._on_best_pages(*found)
            return _with_note(restore(self._directory, file, self._parts, self._options, self._kernels), note)
        except DamagedFile as error:
            self._plan.on_event("weight_file_refused", path=str(cached.path), reason=str(error))
            return None

    def _open_on_huge_pages(self, cached: CachedWeights) -> tuple[WeightFile, WeightMemory | None] | None:
        """The file, read anew if it lay on small pages and nobody else has it open, and its pages; None without one.

        The kernel keeps a file on the pages on which it was read. For a mapping that wants huge ones it reads those.
        """
        num_threads = len(os.sched_getaffinity(0))  # a short read, before this worker has other work
        with cached.reading(MAX_REREAD_S):
            file = cached.open(num_threads)
            if file is None:
                return None
            memory = measure_memory(file.tensors)
            if not self._is_on_small_pages(memory) or not cached.may_drop_pages():
                return file, memory
            del file  # the kernel drops no page that is mapped: not after others may be alone
        with cached.reading(MAX_REREAD_S, alone=True) as is_alone:
            is_dropped = is_alone and cached.drop_pages()  # False if another worker has just done it
            file = cached.open(num_threads)
        if file is None:
            return None
        memory = measure_memory(file.tensors)
        if is_dropped:
            is_small = self._is_on_small_pages(memory)  # a process without the lock maps it: an older worker, or a copy
            self._plan.on_event(
                "weights_still_on_small_pages" if is_small else "weights_read_anew", path=str(cached.path)
            )
        return file, memory

    def _is_on_small_pages(self, memory: WeightMemory | None) -> bool:
        if memory is None or memory.num_bytes < MIN_REREAD_BYTES or memory.huge_fraction >= MIN_HUGE_FRACTION:
            return False
        return _has_huge_pages()

    def _on_best_pages(self, file: WeightFile, memory: WeightMemory | None) -> tuple[WeightFile, str]:
        """The file's tensors as they are, or with `AUTO` as private copies where only these are on huge pages."""
        if self._plan.sharing is WeightSharing.ALWAYS:
            return file, ""
        if memory is None or memory.huge_fraction >= MIN_HUGE_FRACTION or not _has_huge_pages():
            return file, ""
        copies = tuple(huge_empty(tensor.shape, tensor.dtype).copy_(tensor) for tensor in file.tensors)
        return replace(file, tensors=copies), f"only {memory.huge_fraction:.0%} of the file is on huge pages"

    def _pack(self, cached: CachedWeights) -> LoadedModel:
        """Loads the checkpoint and writes its file. Returns the model on the file. The caller holds the lock."""
        began = time.monotonic()
        self._plan.on_event("weights_packing", path=str(cached.path))
        model = self._load_private()
        manifest, tensors = make_manifest(model, self._parts)
        cached.publish(tensors, manifest)
        seconds, num_bytes = round(time.monotonic() - began, 2), sum(tensor.nbytes for tensor in tensors)
        self._plan.on_event("weights_packed", path=str(cached.path), bytes=num_bytes, seconds=seconds)
        return self._open(cached) or _with_note(model, f"{cached.path} cannot be used as it was written")


def _has_huge_pages() -> bool:
    """True if private memory is on huge pages here."""
    return (huge_fraction([huge_empty((_SAMPLE_BYTES,), torch.uint8).zero_()]) or 0.0) >= MIN_HUGE_FRACTION


def _reason_against(directory: Path, options: LoadOptions, plan: SharingPlan) -> str | None:
    """Why no file is looked for; None if one is."""
    if plan.sharing is WeightSharing.OFF:
        return "switched off"
    if options.device != "cpu":
        return f"they are on {options.device}"
    if options.decoder is DecoderChoice.STOCK:
        return "the stock decoder was asked for"
    if options.layout is WeightLayout.PLAIN and options.quantization is Quantization.NONE:
        return "plain weights were asked for"
    model_type = text_model_type(directory)
    family = FAMILIES.get(model_type)
    if family is None or family.experts:
        return "the model has experts" if family else f"there is no lean decoder for {model_type}"
    return None


def _with_note(model: LoadedModel, note: str) -> LoadedModel:
    return replace(model, report=replace(model.report, sharing_note=note))
