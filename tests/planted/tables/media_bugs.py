"""Planted bugs in what keeps images apart, bounded and counted; a part of the table in `bugs`."""

from __future__ import annotations

from tests.planted.runner import PlantedBug as bug

MEDIA = "images"
KEYS = "baton/kv/keys.py"
POSITIONS = "baton/domain/media/positions.py"
STORE = "baton/engine/media/store.py"
GATE = "services/prefill/media_gate.py"
CHILD = "baton/worker/media/decode_child.py"
PULLER = "baton/worker/media/embedding_puller.py"
RECEIVER = "baton/worker/media/media_receiver.py"

MEDIA_BUGS = (
    bug(
        MEDIA, "images of one size share pages", KEYS,
        "row, height, width) + span.identity)", "row, height, width))",
        "tests/unit/kv/test_media_pages.py tests/unit/kv/test_keys.py",
    ),
    bug(
        MEDIA, "one row of an image is as good as another", KEYS,
        "row = span.first_row + first - span.first", "row = first - span.first",
        "tests/unit/kv/test_media_pages.py tests/unit/kv/test_keys.py",
    ),
    bug(
        MEDIA, "a placeholder in the text takes a row", "baton/domain/media/span.py",
        "return self._find_uncovered(prompt, at, len(prompt))", "return None",
        "tests/unit/domain/test_request.py tests/unit/worker",
    ),
    bug(
        MEDIA, "text goes on behind an image as if it had one axis", POSITIONS,
        "return max(grid.height, grid.width) - grid.height * grid.width", "return 0",
        "tests/unit/domain/test_positions.py",
    ),
    bug(
        MEDIA, "rows and columns are exchanged", POSITIONS,
        "axes[1].extend(base + row // grid.width for row in rows)",
        "axes[1].extend(base + row % grid.width for row in rows)",
        "tests/unit/domain/test_positions.py",
    ),
    bug(
        MEDIA, "the processor is not a part of the identity", "baton/domain/media/identity.py",
        'for text in (processor, detail if detail == LOW_DETAIL else ""):',
        'for text in (detail if detail == LOW_DETAIL else "",):',
        "tests/unit/domain/test_media_identity.py",
    ),
    bug(
        MEDIA, "pinned images are evicted", STORE,
        "if not one.pins and one.kept_until <= now]", "if one.kept_until <= now]",
        "tests/unit/engine/media/test_store.py",
    ),
    bug(
        MEDIA, "an image whose prompt is still to come is evicted", STORE,
        "if not one.pins and one.kept_until <= now]", "if not one.pins]",
        "tests/unit/engine/media/test_store.py",
    ),
    bug(
        MEDIA, "bytes of an encoded image's inputs stay counted", STORE,
        "        self.num_bytes -= item.num_bytes\n        item.rows, item.inputs = rows, None",
        "        self.num_bytes -= item.row_bytes\n        item.rows, item.inputs = rows, None",
        "tests/unit/engine/media/test_store.py",
    ),
    bug(
        MEDIA, "other tenants' images are found", GATE,
        "return ((request.salt, span.identity) for span in request.media if span.end > num_known)",
        'return (("", span.identity) for span in request.media if span.end > num_known)',
        "tests/unit/prefill/test_media_gate.py",
    ),
    bug(
        MEDIA, "a step encodes all images that wait", STORE,
        "if batch and num_rows + item.num_rows > budget_rows:", "if False:",
        "tests/unit/prefill/test_media_gate.py tests/unit/encode/test_scheduler.py",
    ),
    bug(
        MEDIA, "an image of which the tower made nothing stays", GATE,
        "            self._failed.update(dict.fromkeys(item.pins, error))\n            self.store.drop(key)",
        "            self._failed.update(dict.fromkeys(item.pins, error))",
        "tests/unit/prefill",
    ),
    bug(
        MEDIA, "a bomb is decoded", CHILD,
        "Image.MAX_IMAGE_PIXELS = max_pixels", "Image.MAX_IMAGE_PIXELS = None",
        "tests/unit/worker/media/test_image_decoder.py",
    ),
    bug(
        MEDIA, "the decoder's memory has no bound", CHILD,
        "        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),\n", "",
        "tests/unit/worker/media/test_image_decoder.py",
    ),
    bug(
        MEDIA, "a decoder that dies is not started again", "baton/worker/media/image_decoder.py",
        "        if spent_s < RETRY_WITHIN_S and not self._closed:\n", "        if False:\n",
        "tests/unit/worker/media/test_image_decoder.py",
    ),
    bug(
        MEDIA, "a read that failed counts as exported", "services/encode/server.py",
        "            if read.is_set():\n", "            if opened is not None:\n",
        "tests/unit/encode/test_nixl_pull.py",
    ),
    bug(
        MEDIA, "another file than the announced one is taken", RECEIVER,
        "if len(data) != header.num_bytes or hasher.identity() != header.identity:",
        "if len(data) != header.num_bytes:",
        "tests/unit/worker/media/test_media_receiver.py",
    ),
    bug(
        MEDIA, "another count than the router's is taken", RECEIVER,
        "    _check_count(header, num_rows, grid)\n", "",
        "tests/unit/worker/media/test_media_receiver.py",
    ),
    bug(
        MEDIA, "files of all calls together are not bounded", RECEIVER,
        "if self._open_bytes + header.num_bytes > self._limits.max_open_bytes:", "if False:",
        "tests/unit/worker/media/test_media_receiver.py",
    ),
    bug(
        MEDIA, "a photo is counted as it lies in the camera", "services/router/vision/headers/image_header.py",
        "TURNED = frozenset({5, 6, 7, 8})", "TURNED: frozenset[int] = frozenset()",
        "tests/unit/router/vision tests/contract/vision",
    ),
    bug(
        MEDIA, "more images than the limit are read", "services/router/openai/images/parts.py",
        "elif len(self._images) >= limits.max_images:", "elif False:",
        "tests/unit/router/openai tests/service/dispatch/media tests/unit/router/vision",
    ),
    bug(
        MEDIA, "choices that share their files count them each", "services/router/dispatch/media/budget.py",
        "if key not in self._num_holders)", ")",
        "tests/service/dispatch/media tests/unit/router/dispatch/media",
    ),
    bug(
        MEDIA, "expired files stay counted", "baton/store/redis/scripts/put_media.lua",
        "add_bytes(-(whole(redis.call('HGET', KEYS[3], old)) or 0))", "",
        "tests/contract/vision/test_media_file_store.py",
    ),
    bug(
        MEDIA, "each claimed call reads its images again", "services/router/takeover/call_media.py",
        "if name not in self._files:", "if True:",
        "tests/unit/router/takeover/test_call_media.py",
    ),
    bug(
        MEDIA, "an embedding that NIXL read is not compared", PULLER,
        "if part_digests(data) != tuple(found.digests):", "if False:",
        "tests/unit/encode/test_nixl_pull.py",
    ),
    bug(
        MEDIA, "an embedding that changes in memory is used", GATE,
        "if rows.is_intact(first, end):", "if True:",
        "tests/unit/prefill/test_damaged_embeddings.py",
    ),
    bug(
        MEDIA, "a row is computed from an image that another one has lost", GATE,
        "while num_damaged != self.num_damaged:", "while num_damaged < 0:",
        "tests/unit/prefill/test_damaged_embeddings.py",
    ),
    bug(
        MEDIA, "DeepStack rows are not compared", "baton/engine/media/settled_embedding.py",
        "for layer in range(len(self.layers)):", "for layer in range(1):",
        "tests/unit/engine/media/test_settled_embedding.py",
    ),
    bug(
        MEDIA, "pages of a late read are taken for another embedding", "baton/worker/media/embedding_reader.py",
        "if event.outcome is not PullOutcome.LATE:", "if event.outcome is PullOutcome.LATE:",
        "tests/unit/encode/test_nixl_pull.py",
    ),
    bug(
        MEDIA, "a plan for a window drops keys of an image behind it", "baton/model/attention/flashinfer_backend.py",
        "options = self._options(None, softcap)", "options = self._options(window, softcap)",
        "tests/unit/model/attention/test_blocks.py",
    ),
    bug(
        MEDIA, "a mask's tables have pages before the window", "baton/model/attention/flashinfer_backend.py",
        "first, end = segment.first_seen_page(step.page_size, window),", "first, end = 0,",
        "tests/unit/model/attention/test_blocks.py",
    ),
    bug(
        MEDIA, "the way over an encode worker is no stage", "services/router/dispatch/media/uploader.py",
        "begun_at = clock() if self._workers.encode_workers(worker) else None", "begun_at = None",
        "tests/service/dispatch/media/test_encoders.py",
    ),
)  # fmt: skip
