"""A model's files become ids, text and bounds as Hugging Face reads them."""

import json
from pathlib import Path

import pytest
from jinja2 import TemplateSyntaxError

from baton.bundled import MODEL_DIR
from baton.domain.errors import InvalidRequest
from baton.services.router.text.chat_template import ChatTemplate, RenderOptions
from baton.services.router.text.text_model import TextModel
from tests.unit.router.text.text_models import TEMPLATE, bundled, sentencepiece, sentencepiece_tokenizer

HELLO = [{"role": "user", "content": "hello"}]


def write_model(directory: Path, tokenizer_config: dict, config: dict, generation: dict | None = None) -> Path:
    sentencepiece_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_the_bundled_model():
    model = bundled()
    assert (model.vocab_size, model.max_position_tokens, model.has_chat_template) == (2048, 4096, True)
    assert model.eos_token_ids == {0, 2}
    assert model.render_chat(HELLO) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_text_config_and_generation_config_are_read(tmp_path):
    config = {"eos_token_id": 5, "text_config": {"vocab_size": 300, "max_position_embeddings": 77}}
    model = TextModel.load(write_model(tmp_path, {"eos_token": "</s>"}, config, {"eos_token_id": [6, 7]}))
    assert (model.vocab_size, model.max_position_tokens) == (300, 77)
    assert model.eos_token_ids == {2, 6, 7}


def test_a_model_without_a_template_cannot_chat(tmp_path):
    model = TextModel.load(write_model(tmp_path, {}, {"vocab_size": 300}))
    assert not model.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        model.render_chat(HELLO)


def test_a_template_file_comes_before_the_config_and_names_before_order(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    model = TextModel.load(write_model(tmp_path, {"chat_template": named}, {}))
    assert model.render_chat(HELLO) == "default"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert TextModel.load(tmp_path).render_chat(HELLO) == "file"
    (tmp_path / "given.jinja").write_text("given")
    assert TextModel.load(tmp_path, tmp_path / "given.jinja").render_chat(HELLO) == "given"


def test_a_missing_tokenizer_is_an_os_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OSError, match=r"tokenizer\.json"):
        TextModel.load(tmp_path)


def test_one_bos_token_is_added():
    model = sentencepiece()
    assert model.encode("hello", add_special_tokens=True)[0] == 1
    assert 1 not in model.encode("hello", add_special_tokens=False)
    chat = model.encode(model.render_chat(HELLO), add_special_tokens=False)
    assert chat.count(1) == 1


def test_truncation_and_padding_of_the_file_are_off():
    tokenizer = sentencepiece_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    model = TextModel(tokenizer, {}, {}, None)
    assert model.decode(model.encode("hello world and more", add_special_tokens=True), skip_special_tokens=True) == (
        "hello world and more"
    )


@pytest.mark.parametrize("text", ["hello world", "  two  spaces ", "", "naïve 🦊"])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
def test_encoding_equals_transformers(tmp_path, text: str, flags: dict):
    transformers = pytest.importorskip("transformers")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    directory = write_model(tmp_path, {"tokenizer_class": "TokenizersBackend", **names, **flags}, {})
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    ours = TextModel.load(directory)
    assert list(ours.encode(text, add_special_tokens=True)) == theirs(text)["input_ids"]
    chat = [{"role": "user", "content": text}]
    assert ours.render_chat(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_bundled_chat_equals_transformers():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)
    chat = [{"role": "system", "content": "Be kind."}, *HELLO, {"role": "assistant", "content": "Hi, é 狐!"}, *HELLO]
    ours = bundled().encode(bundled().render_chat(chat), add_special_tokens=False)
    assert list(ours) == theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


def test_bytes_of_a_token():
    model = bundled()
    fox = model.encode("🦊", add_special_tokens=False)
    assert b"".join(model.token_bytes(token) for token in fox) == "🦊".encode()
    assert model.token_text(fox[0]) == "\ufffd" * len(model.token_text(fox[0]))
    assert model.token_bytes(10_000_000) == b""
    assert sentencepiece().token_bytes(sentencepiece().encode("he", add_special_tokens=False)[0]) == b"he"


def test_templates_get_the_helpers_they_expect():
    source = (
        "{% generation %}{{ {'b': '<é>', 'a': 1} | tojson }}{% endgeneration %}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ strftime_now('%Y')|length }}{% endfor %}"
    )
    assert ChatTemplate(source, {}).render([*HELLO, *HELLO], RenderOptions()) == '{"b": "<é>", "a": 1}4'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[7].content.strip() }}", "undefined|no element"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_failing_template_is_an_invalid_request(source: str, message: str):
    with pytest.raises(InvalidRequest, match=message) as refusal:
        ChatTemplate(source, {}).render(HELLO, RenderOptions())
    assert refusal.value.param == "messages"
    assert len(str(refusal.value)) < 300


def test_a_broken_template_fails_at_load():
    with pytest.raises(TemplateSyntaxError):
        ChatTemplate("{% if %}", {})
