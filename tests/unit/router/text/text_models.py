"""Small tokenizers for tests: byte-level ones, and one with SentencePiece's spaces and bytes."""

from collections.abc import Sequence
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from baton.bundled import MODEL_DIR
from baton.services.router.text.text_model import TextModel

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@cache
def bundled() -> TextModel:
    return TextModel.load(MODEL_DIR)


def marked(template: str, markers: Sequence[str], *, special: bool = False) -> TextModel:
    """The bundled vocabulary, with `markers` as further tokens."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(marker, special=special, normalized=False) for marker in markers])
    config = {"vocab_size": tokenizer.get_vocab_size(with_added_tokens=True), "eos_token_id": 2}
    return TextModel(tokenizer, {}, config, template)


def sentencepiece_tokenizer() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁h", "▁he", "▁w", "ll", "lo"]
    merges = [("▁", "h"), ("▁h", "e"), ("▁", "w"), ("l", "l"), ("l", "o")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@cache
def sentencepiece() -> TextModel:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    return TextModel(sentencepiece_tokenizer(), config, {"max_position_embeddings": 64, "eos_token_id": 2}, TEMPLATE)


def byte_level_tokenizer(markers: Sequence[str] = ()) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers])
    return tokenizer
