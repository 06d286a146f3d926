"""Finds the model types that may be served and writes them to `baton/model/loading/allow_list.py`.

Builds a tiny random model of every causal language model type in transformers, saves it and loads it through
`load_model`, whose self-check compares logits. The model then answers prompts in chunks over shared, scattered pages. A
type is listed if every greedy token equals `generate()`'s. Each type runs in a process of its own with a deadline: some
crash, some hang. Takes about twenty minutes; run it again for another version of transformers.

    python scripts/probe_model_families.py [--only llama,mistral] [--write]

With `--only`, `--write` changes the named types and keeps the others.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from baton.domain.request import SamplingParams  # noqa: E402
from baton.engine.runner import ModelRunner  # noqa: E402
from baton.kv.memory import PageMemory  # noqa: E402
from baton.model.linears.packing import WeightLayout  # noqa: E402
from baton.model.loading.allow_list import TOKEN_EXACT  # noqa: E402
from baton.model.loading.loader import DecoderChoice, load_model  # noqa: E402
from baton.model.storage import PageStorage  # noqa: E402
from tests.exactness.random_scheduler import RandomScheduler  # noqa: E402
from tests.exactness.test_runner_exactness import make_prompts, stock_tokens  # noqa: E402

ALLOW_LIST = ROOT / "baton/model/loading/allow_list.py"
DEADLINE_S = 180.0
MAX_PARAMETERS = 40_000_000

SMALL: Mapping[str, Any] = {
    "vocab_size": 500,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "qk_head_dim", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 1024),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "mlp_hidden_size"), 96),
    **dict.fromkeys(("shared_intermediate_size", "ffn_hidden_size", "dense_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "laurel_rank"), 8),
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 500,
    "altup_num_inputs": 2,
    "num_kv_shared_layers": 0,
    "multi_query": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPTIONAL = frozenset(
    {"q_lora_rank", "num_experts", "num_local_experts", "n_shared_experts", "n_inner", "num_global_key_value_heads"}
)
"""Settings that stay off where a family has them off by default."""


def main() -> int:
    """Probes all types (or `--only` some), prints a line for each, and rewrites the list with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated model types")
    parser.add_argument("--write", action="store_true", help="rewrite baton/model/loading/allow_list.py")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    candidates = arguments.only.split(",") if arguments.only else _all_types()
    passed = [name for name in candidates if _probe_in_child(name)]
    print(f"{len(passed)} model types are token-exact")
    if arguments.write:
        write_allow_list({*(TOKEN_EXACT - {*candidates}), *passed})
    return 0


def _all_types() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _probe_in_child(model_type: str) -> bool:
    """Forks, so that imports are paid once, and gives the child a deadline."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_report, args=(model_type, sender))
    child.start()
    sender.close()
    try:
        verdict = receiver.recv() if receiver.poll(DEADLINE_S) else f"no end within {DEADLINE_S:.0f} s"
    except EOFError:
        verdict = "crashed"
    child.kill()
    child.join()
    print(f"{model_type:24s} {verdict}", flush=True)
    return bool(verdict == "exact")


def _report(model_type: str, sender: Connection) -> None:
    try:
        verdict = probe(model_type)
    except Exception as error:
        verdict = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    sender.send(verdict)


def probe(model_type: str) -> str:
    """`exact`, or the difference. Raises any error of the type's own code."""
    config = _small_config(transformers.CONFIG_MAPPING[model_type])
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    if (num_parameters := sum(p.numel() for p in skeleton.parameters())) > MAX_PARAMETERS:
        return f"not shrunk: {num_parameters} parameters"
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model.save_pretrained(directory)
        prompts = [[token % 490 + 5 for token in prompt] for prompt in make_prompts(8)]
        expected = stock_tokens(directory, prompts)
        loaded = load_model(
            directory,
            page_size=8,
            layout=WeightLayout.PLAIN,
            decoder=DecoderChoice.STOCK,
            allowed=frozenset({model_type}),
        )
        memory, host = (PageMemory(n, loaded.geometry.page_bytes) for n in (600, 16))
        runner = ModelRunner(loaded, PageStorage.on_memory(loaded.geometry, memory, host))
        ours = RandomScheduler(runner, 600, 8, 16, seed=11).generate(
            prompts, len(expected[0]), SamplingParams(temperature=0.0)
        )
    if len({token for output in expected for token in output}) < 8:
        return "degenerate: its tokens prove nothing"
    same = sum(a == b for x, y in zip(ours, expected, strict=True) for a, b in zip(x, y, strict=True))
    total = sum(map(len, expected))
    return "exact" if same == total else f"{same} of {total} tokens"


def _small_config(config_class: Any) -> Any:
    """The smallest config of a family with all of its layer types."""
    default = config_class()
    aliases = getattr(default, "attribute_map", {})
    small = {
        key: value
        for key, value in SMALL.items()
        if hasattr(default, key)
        and aliases.get(key) not in SMALL
        and not (key in (*OPTIONAL, "sliding_window") and getattr(default, key) is None)
    }
    if kinds := list(dict.fromkeys(getattr(default, "layer_types", None) or ())):
        num_layers = max(2, len(kinds))
        small |= {
            "num_hidden_layers": num_layers,
            "layer_types": [kinds[index % len(kinds)] for index in range(num_layers)],
        }
    if getattr(default, "num_key_value_heads", None) == getattr(default, "num_attention_heads", 0):
        small["num_key_value_heads"] = 4
    if hasattr(default, "kv_lora_rank"):
        small.pop("head_dim", None)
        small["num_key_value_heads"] = 4
    return config_class(**small)


def write_allow_list(model_types: set[str]) -> None:
    """Rewrites the module with `model_types`."""
    names = "".join(f'        "{name}",\n' for name in sorted(model_types))
    ALLOW_LIST.write_text(
        '"""Model types whose tiny random float32 models gave, on pages, exactly the stock model\'s tokens.\n'
        f"\nWritten by `scripts/probe_model_families.py` with transformers {transformers.__version__}; do not edit.\n"
        '"""\n\nfrom __future__ import annotations\n\n'
        f"TOKEN_EXACT: frozenset[str] = frozenset(\n    {{\n{names}    }}\n)\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    sys.exit(main())
