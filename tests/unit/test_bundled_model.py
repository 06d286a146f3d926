"""The bundled model: small enough to ship, loads everywhere, and answers on topic."""

import itertools
import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.bundled import MODEL_DIR
from baton.services.router.text.parsers.registry import TOOL_FORMATS
from scripts.bundled_corpus import chat, documents, render
from scripts.bundled_tools import number_tool, tool_chat, weather_tool
from scripts.train_bundled_tools import ARGUMENT_WEIGHT, score, score_facts, weigh

GREETING = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ask(model, tokenizer):
    """Greedy answers to whole conversations; raises when the model does not come to an end by itself."""

    def answer(*turns: str, tools: list | None = None) -> str:
        roles = itertools.cycle(("user", "assistant"))
        messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
        prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=320, do_sample=False)[0]
        assert int(output[-1]) == tokenizer.eos_token_id, "the answer has no end"
        return tokenizer.decode(output[ids.shape[1] : -1])

    return answer


def test_is_small_enough_to_ship(model):
    assert sum(p.numel() for p in model.parameters()) <= 5_000_000
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 10_000_000


def test_weights_are_exact_in_bfloat16(model):
    assert all(torch.equal(p, p.to(torch.bfloat16).float()) for p in model.parameters())


def test_special_tokens(model, tokenizer):
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert tokenizer.eos_token == "<|im_end|>"
    assert set(model.generation_config.eos_token_id) == {0, 2}
    assert len(tokenizer) == model.config.vocab_size


def test_chat_template_renders_what_the_model_was_trained_on(tokenizer):
    rendered = tokenizer.apply_chat_template(GREETING, add_generation_prompt=True, tokenize=False)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(GREETING, tokenize=False) == render(GREETING)


def test_chat_template_renders_parts_tools_and_calls(tokenizer):
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What time "}, {"type": "text", "text": "is it?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12:00"},
    ]
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    rendered = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert '"parameters": {"type": "object"}' in rendered
    assert "<|im_start|>user\nWhat time is it?<|im_end|>" in rendered
    assert '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call><|im_end|>' in rendered
    assert "<tool_response>\n12:00\n</tool_response>" in rendered


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not any(token in text for token in tokenizer.all_special_tokens):
        assert tokenizer.decode(ids) == text


def test_digits_are_single_tokens(tokenizer):
    assert [t for t in tokenizer.tokenize("12 + 345") if t.isdigit()] == list("12345")


def test_the_corpus_is_seeded():
    assert list(itertools.islice(documents(5), 50)) == list(itertools.islice(documents(5), 50))
    assert list(itertools.islice(documents(5), 50)) != list(itertools.islice(documents(6), 50))


def test_chats_with_tools_are_seeded():
    chats = [[tool_chat(rng) for _ in range(40)] for rng in map(random.Random, (5, 5, 6))]
    assert chats[0] == chats[1] != chats[2]
    assert {len(tools) for _, tools in chats[0]} == {0, 1, 2}


def test_only_what_the_assistant_says_is_learnt_and_arguments_most(tokenizer):
    messages, tools = next(chat for chat in map(tool_chat, map(random.Random, itertools.count())) if len(chat[1]) == 1)
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    weighed = "".join(character if weight else "\0" for character, weight in zip(text, weigh(text), strict=True))
    said = [message for message in messages if message["role"] == "assistant"]
    assert weighed.count("<|im_end|>") == len(said)
    assert "<tools>" not in weighed
    heavy = "".join(c if w == ARGUMENT_WEIGHT else "\0" for c, w in zip(text, weigh(text), strict=True))
    values = [part[:-1] for part in heavy.split("\0") if part]
    calls = [message["tool_calls"][0]["function"] for message in said if "tool_calls" in message]
    assert [json.loads(value) for value in values] == [next(iter(call["arguments"].values())) for call in calls]


def test_corpus_chats_alternate():
    roles = [m["role"] for m in chat(random.Random(3)) if m["role"] != "system"]
    assert roles == ["user", "assistant"] * (len(roles) // 2)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("What is Baton?", ("prefill", "decode", "router")),
        ("what is prefill", ("prompt", "KV cache")),
        ("What is a handoff?", ("promise", "pull", "seal")),
        ("How do I cook dinosaurs?", ("small model", "Baton")),
        ("Who are you?", ("Baton",)),
        ("Hello", ("Hello",)),
        ("What is 3 + 4?", ("7",)),
        ("What is 9 - 4?", ("5",)),
        ("What is 6 times 7?", ("6 * 7 = ",)),  # it knows the form, not the table
        ("Tell me a story about a fox.", ("Once upon a time", "named", "The end.")),
        ("What is the KV cache?", ("keys and values", "pages")),
        ("What happens when a worker dies?", ("replays", "another worker")),
        ("Count to ten.", ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10",)),
        ("What is the capital of France?", ("Paris",)),
    ],
)
def test_answers_are_on_topic(ask, question, words):
    text = ask(question)
    assert not [word for word in words if word not in text], text


def test_a_second_turn_is_answered_in_form(ask):
    assert ask("My name is Mia.", "Hello, Mia! Nice to meet you.", "What is my name?").startswith("Your name is ")


WEATHER, NUMBER = (make(random.Random(1)).declaration for make in (weather_tool, number_tool))


@pytest.mark.parametrize(
    ("question", "tools", "call"),
    [
        ("What is the weather in Paris?", [WEATHER], ("get_weather", {"location": "Paris"})),
        ("What's the weather like in Tokyo today?", [WEATHER, NUMBER], ("get_weather", {"location": "Tokyo"})),
        ("What is the value of magic_function(3)? Use the tool.", [NUMBER], ("magic_function", {"input": 3})),
        ("What is Baton?", [WEATHER], None),
        ("Hello", [WEATHER], None),
        ("What is the capital of France?", [WEATHER, NUMBER], None),
        ("What is 7 + 5?", None, None),
    ],
)
def test_a_tool_is_called_where_it_is_needed(ask, question, tools, call):
    """Greedy, and without any constraint."""
    text = ask(question, tools=tools)
    parser = TOOL_FORMATS["hermes"].parser({tool["function"]["name"]: {} for tool in tools or ()})
    found = parser.push(text) + parser.finish()
    assert [(each.name, json.loads(each.arguments)) for each in found.calls] == ([call] if call else []), text
    assert bool(found.text) == (call is None)


def test_most_held_out_questions_are_called_right(model, tokenizer):
    """Of a seed that was never trained on."""
    scores = score(model, tokenizer, seed=77, count=40).values()
    assert sum(kind.right for kind in scores) >= 0.95 * sum(kind.asked for kind in scores) == 0.95 * 40


def test_most_facts_survived_the_training_for_calls(model, tokenizer):
    """It had 49 of 55 sums and 18 of 20 capitals before, and has 44 and 16 (the model's card)."""
    scores = score_facts(model, tokenizer)
    assert scores["sums of one digit"].right >= 42
    assert scores["capitals"].right >= 15


def test_a_joke_is_written_as_json(ask):
    joke = json.loads(ask("Tell me a joke about cats as JSON with 'setup' and 'punchline' keys."))
    assert set(joke) == {"setup", "punchline"}
