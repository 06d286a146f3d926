"""Reads the bodies of /tokenize, /detokenize and /v1/chat/completions/render, and answers them. Knows no HTTP.

`routes` calls it, in a thread for large bodies. The fields are vLLM's. Nothing is admitted: no worker is asked.
"""

from __future__ import annotations

from msgspec import UNSET

from baton.services.router.openai.bounds import FLAG, TEXT
from baton.services.router.openai.fields import FieldErrors, Fields, parse_object
from baton.services.router.openai.prompts import read_chat, read_tokens
from baton.services.router.openai.schemas import DetokenizeResult, RenderResult, TokenizeResult, TokenizerInfo
from baton.services.router.openai.validation import RequestMetadata, RequestValidator
from baton.services.router.text.text_model import TextModel

TOKENIZE_FLAGS = ("add_special_tokens", "return_token_strs", "add_generation_prompt", "continue_final_message")


class TokenizationParser:
    """Answers requests about the text of one model. Thread-safe."""

    def __init__(self, validator: RequestValidator, text: TextModel) -> None:
        self._validator = validator
        self._text = text

    def render(self, body: bytes, metadata: RequestMetadata) -> RenderResult:
        """The prompt of a chat that would be accepted. Raises as `RequestValidator.chat`."""
        request, prompt = self._validator.render(parse_object(body), metadata)
        return RenderResult(prompt, list(request.prompts[0]))

    def info(self) -> TokenizerInfo:
        """The chat template and the special tokens."""
        names = self._text.special_tokens
        tokens = (names.get(f"{name}_token") for name in ("bos", "eos", "pad", "unk"))
        return TokenizerInfo(self._text.chat_template, *tokens)

    def tokenize(self, body: bytes, metadata: RequestMetadata, max_model_len: int) -> TokenizeResult:
        """The tokens of a text, or of a chat. Raises `InvalidRequest` or `ModelNotFound`."""
        fields = self._open(parse_object(body))
        scalars = fields.read({**dict.fromkeys(TOKENIZE_FLAGS, FLAG), "enable_thinking": FLAG})
        if "messages" in fields.values:
            images = self._validator.image_parts()
            chat = read_chat(fields, scalars, self._text, metadata.created_s, images)
            fields.errors.raise_if_any()
            prompt, is_chat = self._text.render_chat(chat.messages, chat.options), True
        else:
            text = fields.values.get("prompt")
            if not isinstance(text, str):
                fields.add_mismatch("prompt", "a string; or send messages")
            fields.errors.raise_if_any()
            prompt, is_chat = str(text), False
        tokens = self._text.encode(prompt, add_special_tokens=scalars.get("add_special_tokens", not is_chat))
        if is_chat:
            tokens, _ = images.place(tokens, "messages")
        strings = [self._text.token_text(token) for token in tokens] if scalars.get("return_token_strs") else UNSET
        return TokenizeResult(len(tokens), max_model_len, list(tokens), strings)

    def detokenize(self, body: bytes) -> DetokenizeResult:
        """The text of tokens, special tokens included. Raises `InvalidRequest` or `ModelNotFound`."""
        fields = self._open(parse_object(body))
        value = fields.values.get("tokens")
        tokens: tuple[int, ...] = ()
        if isinstance(value, list):
            tokens = read_tokens(fields, value, self._text.vocab_size, "tokens")
        else:
            fields.add_mismatch("tokens", "a list of token ids")
        fields.errors.raise_if_any()
        return DetokenizeResult(self._text.decode(tokens, skip_special_tokens=False))

    def _open(self, body: dict[str, object]) -> Fields:
        """The fields; a model may be named. Raises `ModelNotFound`."""
        fields = Fields(body, FieldErrors())
        model = fields.read({"model": TEXT}).get("model")
        if model is not None:
            self._validator.check_model(model)
        return fields
