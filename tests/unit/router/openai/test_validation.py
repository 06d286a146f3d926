"""The rules of every parameter: accepted values, refused values, and error messages."""

from dataclasses import replace

import pytest

from baton.domain.errors import ContextOverflow, InvalidRequest, ModelNotFound
from baton.domain.ids import RequestId
from baton.services.router.openai.valid_request import StreamOptions, ValidRequest
from baton.services.router.openai.validation import RequestMetadata, RequestValidator
from tests.unit.router.text.text_models import bundled

MODEL_LEN = 64
RID = RequestId("call")
HELLO = [{"role": "user", "content": "hello"}]
ORIGIN = RequestMetadata(RID, created_s=7, seed=2**63 - 2)
VALIDATOR = RequestValidator(bundled(), "m", MODEL_LEN, deadline_s=9.0)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def chat(**body) -> ValidRequest:
    return VALIDATOR.chat({"model": "m", "messages": HELLO, **body}, ORIGIN)


def completion(**body) -> ValidRequest:
    return VALIDATOR.completion({"model": "m", "prompt": "hello", **body}, ORIGIN)


def test_defaults():
    call = chat()
    [sequence] = call.sequences
    [prompt] = call.prompts
    assert sequence.prompt_tokens == prompt == bundled().encode(bundled().render_chat(HELLO), add_special_tokens=False)
    assert (sequence.id, sequence.deadline_s, sequence.salt, call.stream_options, call.stop_strings) == (
        RID,
        9.0,
        "",
        None,
        (),
    )
    assert (
        sequence.sampling.temperature,
        sequence.sampling.top_p,
        sequence.sampling.top_k,
        sequence.sampling.logprobs,
    ) == (
        0.2,  # the bundled model's default
        1.0,
        0,
        None,
    )
    assert sequence.stop.max_tokens == MODEL_LEN - len(prompt)
    assert sequence.stop.stop_token_ids == bundled().eos_token_ids
    assert call.created_s == 7


def test_null_is_absent_and_unknown_fields_are_named():
    names = ("temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream_options", "tools", "response_format")
    call = chat(**dict.fromkeys(names), user="me", metadata={}, store=True, service_tier="auto", unheard_of=[1])
    assert call.unknown_fields == ("unheard_of",)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0, 2, 0.5], [10**400, -0.1, 2.1, "1", True, [], float("1e300")]),
        ("top_p", [0.01, 1], [0, 1.01, "x"]),
        ("top_k", [-1, 0, 5, 2**31 - 1], [-2, 1.5, 2**31, True]),
        ("min_p", [0, 1], [-0.01, 1.01]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.1, 2], [0, 2.1]),
        ("seed", [-(2**63), 2**63 - 1], [2**63, -(2**63) - 1, 0.5, 10**400]),
        ("n", [1, 128], [0, 129, "2", 1.0]),
        ("max_tokens", [1, 5], [0, -1, 1.5, "5"]),
        ("max_completion_tokens", [1], [0]),
        ("min_tokens", [0, 1], [-1]),
        ("stop", ["a", [], ["a"] * 16, "x" * 256], ["", [""], ["a"] * 17, "x" * 257, [1], 5, {}]),
        ("stop_token_ids", [[], [0, 2047]], [[2048], [-1], ["1"], [True], 5]),
        (
            "logit_bias",
            [{}, {"5": 1}, {"5": -1e9}, {"5": 10**400}],
            [{"2048": 1}, {"x": 1}, {"-1": 1}, {"5": "1"}, [], {"1" * 30: 1}],
        ),
        ("logprobs", [False], ["yes", 1]),
        ("stream", [True], ["true", 1]),
        ("stream_options", [], [{}, {"include_usage": True}, []]),
        ("ignore_eos", [True], ["x"]),
        ("skip_special_tokens", [False], [0]),
        ("priority", [-3, 4, -(2**31), 2**31 - 1], [2**31, -(2**31) - 1, 1.0, "high"]),
        ("cache_salt", ["tenant"], ["", 5]),
        ("prompt_cache_key", ["k"], ["", 5]),
        ("tools", [], [[], {}, [{"type": "function"}], [*TOOLS, *TOOLS], [{**TOOLS[0], "type": "web"}]]),
        ("tool_choice", ["none", "auto"], ["required", "often", {"type": "function"}, {"name": "add"}]),
        ("prompt_logprobs", [0, 20], [-1, 21, True, "1"]),
        ("best_of", [1], [2, "1", 0]),
        ("allowed_token_ids", [[5]], [[], [-1], [2048], [True], "5", 5, list(range(1025))]),
        ("bad_words", [[], ["a"]], ["a", [""], ["  "], [5], ["x" * 257], ["a"] * 129]),
        ("logprob_token_ids", [], [[5], [], [-1], [2048], "5", list(range(129))]),
        ("truncation_side", ["left", "right"], ["middle", 1]),
        ("verbosity", ["medium"], ["low", "high", "some", 1]),
        ("add_special_tokens", [True, False], [1]),
        ("return_tokens_as_token_ids", [True], [1]),
        (
            "messages",
            [],
            [[], {}, "hi", [5], [{"role": "user"}], [{"role": "king", "content": "x"}], [{"content": "x"}]],
        ),
    ],
)
def test_ranges(field: str, good: list, bad: list):
    for value in good:
        assert chat(**{field: value}).sequences
    for value in bad:
        with pytest.raises(InvalidRequest) as refusal:
            chat(**{field: value})
        assert (refusal.value.param or "").startswith(field)
        assert len(str(refusal.value)) < 600


def test_errors_are_bounded():
    messages = [{"role": "x" * 10_000, "content": 5} for _ in range(50)]
    with pytest.raises(InvalidRequest) as refusal:
        chat(messages=messages, temperature="y" * 100_000)
    text = str(refusal.value)
    assert text.count("must be") == 10
    assert "and 91 more" in text
    assert len(text) < 10 * 400


def test_unsupported_fields_are_named():
    with pytest.raises(InvalidRequest, match="not supported yet"):
        chat(return_prompt_text=True)


def test_another_model_is_refused():
    with pytest.raises(ModelNotFound) as refusal:
        chat(model="gpt", temperature=9)
    assert refusal.value.param == "model"
    for wrong in (None, 5, ""):
        with pytest.raises(InvalidRequest):
            chat(model=wrong)


def test_content_parts_are_joined_by_line_breaks():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(messages=[{"role": "user", "content": parts}]).prompts == (
        chat(messages=[{"role": "user", "content": "one\ntwo"}]).prompts
    )
    with pytest.raises(InvalidRequest, match="reads nothing else"):
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_an_assistant_with_tool_calls_needs_no_content():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "5"}]
    with pytest.raises(ContextOverflow):  # accepted by the template
        chat(messages=messages * 5)


def test_an_assistant_without_content_has_said_nothing_or_refused():
    def prompt(**said) -> object:
        return VALIDATOR.chat({"model": "m", "messages": [*HELLO, {"role": "assistant", **said}]}, ORIGIN).prompts

    assert prompt(content=None) == prompt() == prompt(content="")
    no = {"type": "refusal", "refusal": "no"}
    assert prompt(content=None, refusal="no") == prompt(content=[no]) == prompt(content="no") != prompt(content="")
    assert prompt(content=[{"type": "text", "text": "well"}, no]) == prompt(content="well\nno")
    for wrong in ({"refusal": 5}, {"content": [{"type": "refusal", "text": "no"}]}, {"content": 5}):
        with pytest.raises(InvalidRequest, match=r"messages\[1\]"):
            prompt(**wrong)
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content"):  # only an assistant refuses
        chat(messages=[{"role": "user", "content": [no]}])
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content"):
        chat(messages=[{"role": "user", "content": None}])


@pytest.mark.parametrize(
    "calls",
    [
        [None],
        ["f"],
        [{}],
        [{"function": None}],
        [{"function": {"name": "f"}}],
        [{"function": {"name": 5, "arguments": "{}"}}],
        [{"function": {"name": "f", "arguments": 5}}],
        "calls",
        {"function": {"name": "f", "arguments": "{}"}},
        [{"function": {"name": "f", "arguments": "{}"}}] * 129,
    ],
)
def test_malformed_tool_calls_never_reach_the_template(calls):
    with pytest.raises(InvalidRequest, match=r"messages\[0\].tool_calls: must be"):
        chat(messages=[{"role": "assistant", "content": "x", "tool_calls": calls}])


def test_lists_are_bounded():
    one = {"type": "text", "text": ""}
    assert chat(stop_token_ids=[5] * 1024)
    with pytest.raises(ContextOverflow):  # the number of parts is fine, their total length is not
        chat(messages=[{"role": "user", "content": [one] * 4096}])
    with pytest.raises(InvalidRequest, match="at most 4096 text parts"):
        chat(messages=[{"role": "user", "content": [one] * 4097}])
    with pytest.raises(InvalidRequest, match="1 to 4096 messages"):
        chat(messages=HELLO * 4097)
    with pytest.raises(InvalidRequest, match="at most 1024 token ids"):
        chat(stop_token_ids=[5] * 1025)
    with pytest.raises(InvalidRequest, match="1 to 256 of either"):
        completion(prompt=["x"] * 257)
    assert len(completion(prompt=[[5]] * 16, n=16, max_tokens=1).sequences) == 256
    with pytest.raises(InvalidRequest, match="n: times the number of prompts must not be over 256"):
        completion(prompt=[[5]] * 17, n=16)


def test_a_token_has_one_bias():
    assert chat(logit_bias={"5": 1, "05": 2}).sequences[0].sampling.logit_bias == ((5, 2.0),)


def test_each_choice_has_its_id_and_seed():
    sequences = chat(n=3, seed=2**63 - 2, temperature=0).sequences
    assert [sequence.id for sequence in sequences] == ["call", "call-1", "call-2"]
    assert [sequence.sampling.seed for sequence in sequences] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [sequence.sampling.seed for sequence in chat(n=3).sequences] == [2**63 - 2, 2**63 - 1, -(2**63)]
    unseeded = completion(prompt=["hello", "hello"], n=2)
    assert (
        len({sequence.sampling.seed for sequence in unseeded.sequences}) == 4
    )  # a repeated prompt gets different answers


def test_every_prompt_has_its_choices():
    call = completion(prompt=["hello", "goodbye"], n=2, seed=1)
    assert [sequence.id for sequence in call.sequences] == ["call", "call-1", "call-2", "call-3"]
    assert [sequence.prompt_tokens for sequence in call.sequences] == [p for p in call.prompts for _ in range(2)]
    assert [sequence.sampling.seed for sequence in call.sequences] == [1, 2, 1, 2]
    assert [call.leader(choice) for choice in call.choices] == [0, 0, 2, 2]
    assert call.continues_prompt


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ([5, 6], ((5, 6),)),
        ([[5], [6, 7]], ((5,), (6, 7))),
        (["hello"], (bundled().encode("hello", add_special_tokens=True),)),
    ],
)
def test_prompts_of_every_shape(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [[]],
        [""],
        {},
        None,
        5,
        ["a", [1]],
        [[1], "a"],
        [1, "a"],
        [1, None],
        [None],
        [2048],
        [-1],
        [True, 1],
        [[1.5]],
    ],
)
def test_invalid_prompts_are_refused(prompt):
    with pytest.raises(InvalidRequest) as refusal:
        completion(prompt=prompt)
    assert refusal.value.param == "prompt"


def test_a_token_outside_the_vocabulary_is_named():
    with pytest.raises(InvalidRequest, match=r"token id 99999 is out of the vocabulary \[0, 2048\)"):
        completion(prompt=[1, 99999])


def test_the_context_must_hold_prompt_and_answer():
    assert completion(prompt=[5] * 60, max_tokens=4).sequences[0].stop.max_tokens == 4
    assert completion(prompt=[5] * 63).sequences[0].stop.max_tokens == 1
    for body in ({"max_tokens": 5}, {"min_tokens": 5}):
        with pytest.raises(ContextOverflow, match=r"64 tokens.*60.*5.*65 in all"):
            completion(prompt=[5] * 60, **body)
    with pytest.raises(ContextOverflow, match=r"^this model's maximum context length is 64 tokens"):
        chat(max_tokens=64)
    with pytest.raises(ContextOverflow, match="at least 1: 65 in all") as refusal:
        completion(prompt=[5] * 64)
    assert refusal.value.param == "prompt"


def test_a_completion_has_16_tokens_unless_the_context_ends():
    assert completion().sequences[0].stop.max_tokens == 16
    assert completion(max_completion_tokens=20).sequences[0].stop.max_tokens == 20
    assert completion(max_tokens=20).sequences[0].stop.max_tokens == 20
    assert completion(prompt=[5] * 60).sequences[0].stop.max_tokens == 4
    with pytest.raises(InvalidRequest, match=r"min_tokens: must not be over max_tokens \(16\)"):
        completion(min_tokens=17)


def test_a_model_has_several_names():
    named = RequestValidator(bundled(), "m", MODEL_LEN, 9.0, ("other",))
    body = {"model": "other", "prompt": "hello"}
    assert named.completion(body, ORIGIN).model == "other"
    assert named.completion({**body, "model": "m"}, ORIGIN).model == "m"
    with pytest.raises(ModelNotFound):
        named.completion({**body, "model": "third"}, ORIGIN)


def test_max_completion_tokens_overrides_max_tokens():
    assert chat(max_tokens=3, max_completion_tokens=5).sequences[0].stop.max_tokens == 5
    with pytest.raises(InvalidRequest, match="min_tokens"):
        chat(max_tokens=3, min_tokens=4)


def test_zero_tokens_require_an_echo():
    call = completion(max_tokens=0, echo=True, prompt=["hello", "you"], n=2)
    assert call.sequences == ()
    assert call.echoes == ("hello", "hello", "you", "you")
    with pytest.raises(InvalidRequest):
        completion(max_tokens=0)
    ids = list(bundled().encode("hello", add_special_tokens=False))
    assert completion(prompt=ids, echo=True).echoes == ("hello",)


def test_sampling_parameters_are_passed_on():
    body = {"logit_bias": {"7": 500, "3": -0.5}, "top_k": 10**6, "temperature": 0, "logprobs": True, "top_logprobs": 20}
    sampling = chat(**body).sequences[0].sampling
    assert sampling.logit_bias == ((3, -0.5), (7, 100.0))
    assert (sampling.top_k, sampling.greedy, sampling.logprobs) == (2048, True, 20)
    assert chat(logprobs=True).sequences[0].sampling.logprobs == 0
    assert completion(logprobs=5).sequences[0].sampling.logprobs == 5
    for wrong in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(InvalidRequest):
            chat(**wrong)


def test_stop_parameters_are_passed_on():
    call = chat(stop=["a", "b"], stop_token_ids=[9], ignore_eos=True, min_tokens=2)
    assert call.stop_strings == ("a", "b")
    assert call.sequences[0].stop.stop_token_ids == {9}
    assert call.sequences[0].stop.min_tokens == 2
    assert chat(stop="a", stop_token_ids=[9]).sequences[0].stop.stop_token_ids == {9, *bundled().eos_token_ids}


def test_stream_options_are_passed_on():
    assert chat(stream=True).stream_options == StreamOptions()
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=options).stream_options == StreamOptions(True, True)
    assert chat(stream=False).stream_options is None


def test_tenants_have_different_salts():
    def salt(tenant: str, **body) -> str:
        origin = replace(ORIGIN, tenant=tenant)
        return VALIDATOR.chat({"model": "m", "messages": HELLO, **body}, origin).sequences[0].salt

    wishes: list[dict[str, str]] = [{}, {"cache_salt": "s"}, {"cache_salt": "red"}, {"cache_salt": salt("red")}]
    salts = [salt(tenant, **wish) for tenant in ("", "red", "blue", "reds") for wish in wishes]
    assert len(set(salts)) == len(salts)
    assert salt("") == ""
    assert salt("red", cache_salt="s") == salt("red", cache_salt="s")


def test_a_cache_key_is_a_tenants_own():
    def affinity(tenant: str, **body) -> str:
        origin = replace(ORIGIN, tenant=tenant)
        return VALIDATOR.chat({"model": "m", "messages": HELLO, **body}, origin).sequences[0].affinity

    keys = [affinity(tenant, prompt_cache_key=key) for tenant in ("", "red", "reds") for key in ("k", "sk")]
    assert len(set(keys)) == len(keys)
    assert affinity("red", prompt_cache_key="k") == affinity("red", prompt_cache_key="k", cache_salt="s")
    assert affinity("red") == affinity("red", prompt_cache_key=None) == ""
