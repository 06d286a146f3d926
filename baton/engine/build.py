"""Builds an engine's parts from settings: model, pool, prefix cache, runner. Called once, by a worker's `app`."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from baton.domain.fingerprint import Fingerprint
from baton.domain.media.span import MediaRules
from baton.engine.masks import MaskFiller
from baton.engine.media.step_inputs import EmbeddingSource
from baton.engine.media.vision import EngineVision, engine_vision, media_rules
from baton.engine.pool.memory import (
    allocate_pool,
    choose_plan,
    empty_cache,
    host_memory,
    raise_if_out_of_memory,
    touch_pool,
)
from baton.engine.pool.touch import TouchThread
from baton.engine.runner import ModelRunner
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.matcher import one_line
from baton.grammar.tokenizer import CAPABILITY, GrammarTokenizer
from baton.kv.eviction import EvictionPolicy
from baton.kv.geometry import KVGeometry
from baton.kv.memory import MemoryKind, PoolMemory
from baton.kv.page_checks import PageChecks
from baton.kv.page_digests import PageHasher
from baton.kv.prefix_cache import PrefixCache
from baton.kv.windows.plan import PoolPlan
from baton.model.cpu import configure_threads
from baton.model.drafts.head_files import is_head
from baton.model.kernels.core_lease import join_core_lease
from baton.model.linears.packing import WeightLayout
from baton.model.loading.bit_check import check_bits
from baton.model.loading.config import DtypeChoice
from baton.model.loading.identity import checkpoint_root, draft_identity, model_fingerprint
from baton.model.loading.kernel_choice import KernelUse
from baton.model.loading.loader import DecoderChoice, LoadedModel, load_model
from baton.model.loading.quantization import Quantization, QuantizationReport
from baton.model.loading.self_check import VerificationBits
from baton.model.sharing.shared_weights import (
    MIN_HUGE_FRACTION,
    SharingPlan,
    WeightSharing,
    load_shared_model,
)
from baton.model.sharing.weight_key import LoadOptions
from baton.model.smaps import WeightMemory
from baton.model.storage import PageStorage
from baton.settings.base import SettingsError
from baton.settings.choices import Device, KVDtypeKind, PageCheckKind
from baton.settings.core_plan import BadCorePlan
from baton.settings.groups import MIB, WorkerSettings
from baton.settings.model_source import ModelFiles, resolve_model, weight_cache_directories
from baton.settings.text_digest import text_digest
from baton.settings.vocabulary import require_same_tokens
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger
from baton.telemetry.progress import loading_progress
from baton.transfer.digest import PoolHasher

log = get_logger()

SAMPLED_PAGES = 16
"""With `page_checks=sampled` one of so many matched pages is checked."""
MIN_WARNED_BYTES = 64 * MIB
"""Less weights fit caches whatever their pages are."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts that a loop runs on. `max_model_len`: tokens that model and pool both allow.

    `fingerprint` covers all that pages depend on. Only workers with equal fingerprints exchange pages. `text_digest`
    is that of the model's tokenizer and template. `masks`: of constrained rows; None where the library cannot use the
    tokenizer. `verification`: bits of a row of several tokens; None where it was not checked. `kernels`: what a
    worker registers, as in `WorkerRecord`. `num_head_layers`: of the head that drafts; 0: none does.
    `num_host_pages`: host pages for preempted rows. `media`: what the model asks of media spans; None: only text is
    served. `vision`: what encodes images, in prefill workers.
    `touch`: what still touches the pool; None: nothing does.
    """

    geometry: KVGeometry
    fingerprint: Fingerprint
    text_digest: str
    memory: PoolMemory
    cache: PrefixCache
    checks: PageChecks
    host_hasher: PageHasher | None
    runner: ModelRunner
    vocab_size: int
    max_model_len: int
    masks: MaskFiller | None
    verification: VerificationBits | None
    kernels: str
    num_head_layers: int = 0
    num_host_pages: int = 0
    media: MediaRules | None = None
    vision: EngineVision | None = None
    touch: TouchThread | None = None

    @property
    def grammars(self) -> str:
        """What a worker registers: library and version that constrain output; "" for none."""
        return "" if self.masks is None else CAPABILITY


def build_engine(
    settings: WorkerSettings,
    num_host_pages: int | None,
    max_graph_rows: int = 0,
    decodes: bool = False,
    media_bytes: int = 0,
    step_tokens: int = 0,
) -> Engine:
    """Loads and checks the model and allocates its pool.

    `num_host_pages` None: as many whole pages as fit into the pool's bytes. `max_graph_rows`: most rows of a GPU step
    that runs as a CUDA graph. `decodes`: checks the bits of rows of several tokens, too, and loads no vision tower.
    `media_bytes`: most bytes of the images that are held. `step_tokens`: see `choose_plan`. Blocks until the model is
    loaded.
    Raises `SettingsError`, `UnreadableModel`, `UnsupportedModel`, or `OSError` without memory for the pool.
    """
    configure_threads(settings.threads)
    directory = resolve_model(settings.model)
    with ThreadPoolExecutor(1, "baton-identity") as beside:
        root = beside.submit(checkpoint_root, directory)
        media = media_rules(settings, directory)
        has_tower = media is not None and not decodes
        model = _load(settings, settings.model, directory, _load_options(settings), root.result, has_tower)
    draft = ""
    if settings.draft_model is not None:
        model, draft = _with_draft(settings, settings.draft_model, directory, model)
    masks = _masks(directory, model.config.vocab_size)
    if settings.kv_dtype is KVDtypeKind.INT8:
        model = model.with_int8_pages()
    verification = _verification(model) if decodes else None
    block_rows = None if media is None or decodes else media.block_rows
    plan = choose_plan(settings, model, step_tokens, block_rows or 0)
    num_host_pages = plan.num_whole_pages(model.geometry) if num_host_pages is None else num_host_pages
    host = host_memory(num_host_pages, model.geometry) if num_host_pages else None
    storage, memory = allocate_pool(model, plan, host)
    touch = touch_pool(memory)
    vision = engine_vision(directory, model, root.result(), media_bytes, settings.vision)
    runner = _runner(model, storage, max_graph_rows, masks, None if vision is None else vision.store)
    max_model_len = min(model.config.max_model_len, (plan.num_pages - 1) * settings.page_size)
    _report(model, plan, max_model_len)
    if settings.core_lease_file is not None:
        _lend_cores(settings.core_lease_file, settings.worker_id or "", model)
    policy = EvictionPolicy(settings.eviction_policy.value)
    cache = empty_cache(memory, model.geometry, policy, digests=settings.digests, least_slots=plan.least_slots)
    checks = PageChecks(cache, _sample(settings.page_checks, memory.kind))
    text, quantization = text_digest(directory, settings.chat_template), Quantization(settings.quantization.value)
    fingerprint = model_fingerprint(directory, root.result(), text, model.geometry, quantization, draft)
    log.info("model_identity", fingerprint=fingerprint.digest, **{part.name: part.digest for part in fingerprint.parts})
    vocab_size = model.config.vocab_size
    host_hasher = PoolHasher(host) if settings.digests and host is not None else None
    return Engine(
        model.geometry, fingerprint, text, memory, cache, checks, host_hasher, runner, vocab_size, max_model_len, masks,
        verification, model.kernel_name, len(model.head), num_host_pages, media, vision, touch,
    )  # fmt: skip


def _verification(model: LoadedModel) -> VerificationBits:
    """Checks and reports the bits of rows of several tokens."""
    began, known = time.monotonic(), model.report.verification
    bits = check_bits(model) if known is None else known
    metrics.VERIFICATION.labels(bits.value).set(1)
    log.info("verification_checked", bits=bits.value, seconds=round(time.monotonic() - began, 2))
    return bits


def _masks(directory: Path, vocab_size: int) -> MaskFiller | None:
    """Masks for the model's tokenizer; None if it has none that the library can use."""
    try:
        tokenizer = GrammarTokenizer.of_directory(directory, vocab_size)
    except (OSError, ValueError) as error:
        log.warning("output_cannot_be_constrained", reason=one_line(str(error)))
        return None
    return MaskFiller(GrammarCompiler(tokenizer))


def _sample(kind: PageCheckKind, memory: MemoryKind) -> int:
    """The `sample` of `PageChecks`."""
    if kind is PageCheckKind.AUTO:
        kind = PageCheckKind.ALL if memory is MemoryKind.DRAM else PageCheckKind.SAMPLED
    return {PageCheckKind.ALL: 1, PageCheckKind.SAMPLED: SAMPLED_PAGES, PageCheckKind.OFF: 0}[kind]


def _load_options(settings: WorkerSettings) -> LoadOptions:
    return LoadOptions(
        dtype=DtypeChoice(settings.dtype.value),
        page_size=settings.page_size,
        head_groups=settings.kv_head_groups,
        latent_pages=settings.latent_pages,
        device=resolve_device(settings.device),
        layout=WeightLayout.AUTO if settings.pack_linears else WeightLayout.PLAIN,
        decoder=DecoderChoice(settings.decoder.value),
        kernels=KernelUse.AUTO if settings.kernels else KernelUse.NEVER,
        quantization=Quantization(settings.quantization.value),
    )


def _load(
    settings: WorkerSettings,
    name: str,
    directory: Path,
    options: LoadOptions,
    root: Callable[[], str],
    vision: bool = False,
) -> LoadedModel:
    directories = [settings.weight_cache_dir] if settings.weight_cache_dir else weight_cache_directories(directory)
    plan = SharingPlan(WeightSharing(settings.weight_sharing.value), directories, log.info)
    with raise_if_out_of_memory("the weights"), loading_progress(name) as on_progress:
        if vision:  # the tower is not in weight files
            more = {**options.arguments(), "max_model_len": settings.max_model_len}
            return load_model(directory, vision=True, on_progress=on_progress, **more)
        return load_shared_model(directory, root, options, plan, settings.max_model_len, on_progress)


def _with_draft(settings: WorkerSettings, name: str, directory: Path, model: LoadedModel) -> tuple[LoadedModel, str]:
    """`model`, from `directory`, with the draft model or head called `name`, and what identifies that one.

    Raises `SettingsError` for one with other tokens, `UnsupportedModel` for one that does not fit the model's pages.
    """
    draft_directory = resolve_model(name, ModelFiles.DRAFT)
    root = checkpoint_root(draft_directory)
    if is_head(draft_directory, directory):
        return _with_head(model, draft_directory), draft_identity(draft_directory, root)
    draft_directory = resolve_model(name)
    require_same_tokens(directory, draft_directory)
    options = replace(
        _load_options(settings),
        dtype=DtypeChoice(model.config.dtype),
        head_groups=1,
        latent_pages=False,
        quantization=Quantization.NONE,
    )
    draft = _load(settings, name, draft_directory, options, lambda: root)
    with_draft = model.with_draft(draft)
    log.info(
        "draft_model_loaded",
        model_type=draft.config.model_type,
        parameters=draft.report.num_parameters,
        layers=len(draft.layers),
        page_bytes=with_draft.geometry.page_bytes - model.geometry.page_bytes,
        decoder="stock" if draft.report.stock_note else "lean",
        seconds=round(draft.report.seconds, 2),
    )
    return with_draft, draft_identity(draft_directory, root)


def _with_head(model: LoadedModel, directory: Path) -> LoadedModel:
    with_head = model.with_head(directory)
    log.info(
        "draft_head_loaded",
        kind=with_head.head[0].name,
        layers=len(with_head.head),
        parameters=sum(layer.num_parameters for layer in with_head.head),
        page_bytes=with_head.geometry.page_bytes - model.geometry.page_bytes,
        tail_elements=with_head.geometry.group.tail_elements,
    )
    return with_head


def _runner(
    model: LoadedModel,
    storage: PageStorage,
    max_graph_rows: int,
    masks: MaskFiller | None = None,
    embeddings: EmbeddingSource | None = None,
) -> ModelRunner:
    """Raises `SettingsError` if steps cannot be captured. The GPU's state is not usable after that."""
    if model.device == "cpu":
        return ModelRunner(model, storage, masks=masks, embeddings=embeddings)
    began = time.monotonic()
    try:
        runner = ModelRunner(model, storage, max_graph_rows, masks, embeddings)
    except RuntimeError as error:
        if not max_graph_rows:
            raise
        why = f"a step could not be captured: {error}"
        raise SettingsError("cuda_graphs", why=why, hint="Use --no-cuda-graphs.") from error
    log.info("cuda_graphs", sizes=list(runner.graph_sizes), seconds=round(time.monotonic() - began, 2))
    return runner


def resolve_device(device: Device) -> str:
    """`cpu`, or `cuda` for the first GPU of this process. Raises `SettingsError` if CUDA is required and missing."""
    found = torch.cuda.is_available()
    if device is Device.CUDA and not found:
        why = "this torch was built for CPUs" if torch.version.cuda is None else "torch finds no GPU that it can use"
        hint = "Install a CUDA build of torch and see that nvidia-smi lists a GPU, or use --device cpu."
        raise SettingsError("device=cuda", why=why, hint=hint)
    return "cuda" if found and device is not Device.CPU else "cpu"


def _report(model: LoadedModel, plan: PoolPlan, max_model_len: int) -> None:
    report = model.report
    metrics.KERNELS.labels(model.kernel_name).set(1)
    memory = report.memory
    if memory is not None:
        _report_memory(memory, report.weights.layout)
    log.info(
        "model_loaded",
        model_type=model.config.model_type,
        parameters=report.num_parameters,
        dtype=model.config.dtype,
        device=model.device,
        seconds=round(report.seconds, 2),
        checkpoint=report.checkpoint_note or "plain",
        decoder="stock" if report.stock_note else "lean",
        stock_note=report.stock_note or "none",
        kernels=report.kernel_note,
        layout=report.weights.layout.value,
        matrices=report.weights.num_matrices,
        layout_note=report.weights.note or "none",
        weights_huge_fraction=None if memory is None else round(memory.huge_fraction, 3),
        weights_bytes=None if memory is None else memory.num_bytes,
        weights_shared_bytes=None if memory is None else memory.shared_bytes,
        sharing_note=report.sharing_note or "none",
        **_quantization(report.quantization),
        self_check_gap=f"{report.check.gap:.1e}",
        torch=torch.__version__,
    )
    log.info(
        "pool_ready",
        pages=plan.num_pages,
        page_tokens=model.geometry.page_size,
        page_bytes=model.geometry.page_bytes,
        window_slots=plan.num_slots or "none",
        pool_bytes=plan.num_bytes(model.geometry),
        kv_dtype=model.geometry.kv_dtype or model.geometry.dtype,
        max_model_len=max_model_len,
    )


def _report_memory(memory: WeightMemory, layout: WeightLayout) -> None:
    """Exports what was measured, and warns where decode steps will be slower for it."""
    metrics.WEIGHTS_HUGE_FRACTION.labels(layout.value).set(memory.huge_fraction)
    metrics.WEIGHTS_BYTES.labels("shared").set(memory.shared_bytes)
    metrics.WEIGHTS_BYTES.labels("private").set(memory.num_bytes - memory.shared_bytes)
    if memory.num_bytes >= MIN_WARNED_BYTES and memory.huge_fraction < MIN_HUGE_FRACTION:
        log.warning(
            "weights_on_small_pages",
            huge_fraction=round(memory.huge_fraction, 3),
            hint="Set /sys/kernel/mm/transparent_hugepage/enabled to madvise, and see `baton doctor`.",
        )


def _lend_cores(path: Path, worker: str, model: LoadedModel) -> None:
    """Joins the lease in `path`. Warns where this worker keeps to its own cores: its steps run in torch, say."""
    why = _why_not_native(model)
    if model.kernels is not None and not why:
        try:
            lease = join_core_lease(path, worker, model.kernels)
        except (BadCorePlan, OSError) as error:
            why = str(error)
        else:
            metrics.BORROWED_CORE_SECONDS.set_function(lease.borrowed_s)
            metrics.BORROWED_CORE_WAIT_SECONDS.set_function(lease.wait_s)
            log.info("cores_lent", borrowable=list(lease.borrowable))
            return
    log.warning("cores_not_lent", why=why)


def _why_not_native(model: LoadedModel) -> str:
    """Why steps of `model` compute outside of the native kernels; empty if they do not."""
    if model.kernels is None:
        return model.report.kernel_note
    if model.report.stock_note:
        return f"stock decoder: {model.report.stock_note}"
    return "" if model.report.weights.layout is WeightLayout.PANELS else "torch multiplies plain weights"


def _quantization(report: QuantizationReport | None) -> dict[str, str | int]:
    if report is None:
        return {"quantization": Quantization.NONE.value}
    return {
        "quantization": Quantization.INT8.value,
        "quantized_linears": report.num_linears,
        "quantization_error": f"{report.error:.1e}",
        "quantization_divergence": f"{report.divergence:.1e}",
    }
