"""How many sampled drafts are accepted: by the keyed draw, by other ways to draw, and by the best that exists.

    python -m bench.speculation.acceptance --answers 64

Contexts are answers that the bundled model has drawn at 0.7. At each of their tokens the target's and the drafter's
distributions are computed, and a token is drawn from both under one key. Rejection sampling would accept the sum of
the smaller probabilities. Counts only, seeded: nothing here depends on the machine. Drafters: the bundled head, at its
first draft and behind right ones, and copies of the model with noise on their matrices, in place of a draft model.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from baton.bundled import HEAD_DIR, MODEL_DIR
from baton.model.drafts.eagle import SHARPNESS
from baton.model.sampling.gumbel import draw_key, sample_by_gumbel
from scripts.train_bundled_head import Head, answers, run_model, unrolled_logits

TEMPERATURES = (0.7, 1.0)
NOISE = (0.3, 0.6)
"""Standard deviation of the noise on a matrix, as a share of its own."""


def noisy(model: Qwen3ForCausalLM, share: float) -> Qwen3ForCausalLM:
    """A copy with noise on every matrix of its layers."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for weight in other.model.layers.parameters():
        if weight.dim() == 2:
            weight.data += share * weight.std() * torch.randn(weight.shape, generator=generator)
    return other


@torch.no_grad()
def pairs(
    model: Qwen3ForCausalLM, text: list[int], num_prompt: int, head: Head, others: Sequence[Qwen3ForCausalLM]
) -> Iterator[tuple[str, int, torch.Tensor, torch.Tensor]]:
    """Name of the drafter, position of the first row, and logits of target and drafter [tokens, vocabulary]."""
    ids = torch.tensor([text])
    captured, logits = run_model(model, ids)
    for depth, drafted in enumerate(unrolled_logits(model, head, ids, captured)):
        first = num_prompt + depth
        yield f"head, draft {depth + 1}", first + 1, logits[0, first:], drafted[0, first - 1 :]
    for share, other in zip(NOISE, others, strict=True):
        yield (
            f"noise {share}",
            num_prompt,
            logits[0, num_prompt - 1 :],
            other(input_ids=ids).logits[0, num_prompt - 1 :],
        )


def counts(target: torch.Tensor, draft: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
    """Sums over rows: rows, best possible, keyed draw, that of the sharpened draft, inverse CDF, the most probable."""
    drawn = sample_by_gumbel(target, keys)
    agreed = [drawn == sample_by_gumbel(weights, keys) for weights in (draft, draft.pow(SHARPNESS))]
    numbers = torch.tensor([(key >> 11) * 2.0**-53 for key in keys], dtype=torch.float64)[:, None]
    inverse = [torch.searchsorted(rows.double().cumsum(-1), numbers) for rows in (target, draft)]
    greedy = target.gather(-1, draft.argmax(-1, keepdim=True))
    columns = (torch.minimum(target, draft).sum(-1), *agreed, (inverse[0] == inverse[1])[:, 0], greedy[:, 0])
    return torch.tensor([float(len(keys)), *(float(column.double().sum()) for column in columns)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--seed", type=int, default=11)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    head = Head(model)
    head.load_state_dict({name: tensor.float() for name, tensor in load_file(HEAD_DIR / "model.safetensors").items()})
    others = [noisy(model, share) for share in NOISE]
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    totals: dict[tuple[float, str], torch.Tensor] = {}
    for number, (text, num_prompt) in enumerate(answers(model, tokenizer, options.seed, options.answers, greedy=False)):
        for name, position, target, draft in pairs(model, text, num_prompt, head, others):
            keys = [draw_key(number, position + offset) for offset in range(len(target))]
            for temperature in TEMPERATURES:
                rows = [(logits / temperature).softmax(-1) for logits in (target, draft)]
                total = totals.setdefault((temperature, name), torch.zeros(6))
                total += counts(rows[0], rows[1], keys)
    print("| temperature | drafter | drafts | best possible | keyed draw | sharpened | inverse CDF | most probable |")
    for (temperature, name), total in sorted(totals.items()):
        shares = " | ".join(f"{share:.3f}" for share in (total[1:] / total[0]).tolist())
        print(f"| {temperature} | {name} | {int(total[0])} | {shares} |")


if __name__ == "__main__":
    main()
