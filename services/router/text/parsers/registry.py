"""The formats of model output that are known, by name, and those of a chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from baton.grammar.arguments.python import PythonWriter
from baton.grammar.arguments.tagged import TagWriter
from baton.grammar.tool_calls import CallMarkup
from baton.services.router.text.parsers import harmony
from baton.services.router.text.parsers.argument_stream import ConstrainedCalls
from baton.services.router.text.parsers.base import OutputParser
from baton.services.router.text.parsers.blocks import BlockParser, BlockReader, BlockSyntax
from baton.services.router.text.parsers.json_calls import ListReader, NamedReader, ObjectReader
from baton.services.router.text.parsers.reasoning import ReasoningFormat
from baton.services.router.text.parsers.written_calls import PythonReader, Schemas, TagReader, TagSyntax

AUTO, NONE = "auto", "none"
REASONING_FIELDS = ("reasoning_content", "reasoning")
"""DeepSeek's name, which most clients read, and vLLM's."""

REASONING_FORMATS = {
    each.name: each
    for each in (
        ReasoningFormat("think", "<think>", "</think>", ("<think>", "</think>")),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]", ("[THINK]",)),
        ReasoningFormat("harmony", harmony.CHANNEL, harmony.END, (harmony.CHANNEL,)),
    )
}
"""`think`: Qwen 3, QwQ, DeepSeek R1 and V3.1, GLM 4.5. `mistral`: Magistral. `harmony`: gpt-oss, with a parser of its
own."""

HARMONY = "harmony"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model calls tools. `signatures`: a chat template that has all texts of one of them is of this format.

    `markup`: how a grammar writes calls. `trigger`: the marker after which calls are
    constrained where it is one token; "" for none. `other_markers`: those within blocks. `has_short_ids`: the template
    accepts no other ids.
    """

    name: str
    signatures: tuple[tuple[str, ...], ...]
    syntax: BlockSyntax
    reader: Callable[[Schemas], BlockReader]
    markup: CallMarkup
    trigger: str = ""
    other_markers: tuple[str, ...] = ()
    has_short_ids: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must not be hidden, if they are special tokens."""
        return (*self.syntax.openings, *self.syntax.closings, *self.other_markers)

    def parser(
        self,
        schemas: Schemas,
        *,
        single: bool = False,
        calls_only: bool = False,
        constrained: ConstrainedCalls = ConstrainedCalls.NONE,
        strict: Collection[str] = (),
    ) -> OutputParser:
        """A new parser of an answer that may call the tools of `schemas`. See `BlockParser`.

        `strict`: tools whose calls are text where no constraint has kept them to their schema.
        """
        loose = {name: schema for name, schema in schemas.items() if name not in strict}
        return BlockParser(
            self.syntax,
            lambda is_certain: self.reader(schemas if is_certain else loose),
            single=single,
            calls_only=calls_only,
            constrained=constrained,
        )


CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK = BlockSyntax((CALLS_BEGIN, CALL_BEGIN), ("```", CALL_END, CALLS_END))
_DEEPSEEK_HEAD = re.compile(
    rf"\s*(?:{CALL_BEGIN})?\s*(?:function\s*{CALL_SEP})?(?P<name>[A-Za-z0-9_.-]+)(?:{CALL_SEP})?\s*(?:```json)?\s*(?=\{{)"
)
_KIMI_HEAD = re.compile(
    r"\s*(?:<\|tool_call_begin\|>)?\s*(?:functions\.)?(?P<name>[A-Za-z0-9_.-]+):[0-9]+\s*"
    r"<\|tool_call_argument_begin\|>\s*(?=\{)"
)


def _deepseek(schemas: Schemas) -> BlockReader:
    return NamedReader(schemas, _DEEPSEEK_HEAD)


_QWEN3_CODER = TagSyntax(
    re.compile(r"\s*(?:<function=)?(?P<name>[A-Za-z0-9_.-]+)>"),
    re.compile(r"[ \t\r\n]*<parameter=(?P<key>[^>\n]+)>"),
    "<parameter=", "</parameter>", "</function>",
)  # fmt: skip
_GLM = TagSyntax(
    re.compile(r"\s*(?P<name>[A-Za-z0-9_.-]+)\s*(?=<arg_key>|</tool_call>)"),
    re.compile(r"[ \t\r\n]*<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>"),
    "<arg_key>", "</arg_value>", "</tool_call>",
)  # fmt: skip


TOOL_FORMATS = {
    each.name: each
    for each in (
        ToolFormat(
            HARMONY, ((harmony.CHANNEL,),), BlockSyntax(()), ObjectReader,
            CallMarkup(
                "<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "", most=1
            ),
            other_markers=harmony.MARKERS,
        ),
        ToolFormat(
            "kimi", (("<|tool_call_argument_begin|>",),),
            BlockSyntax(
                ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
                ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
            ),
            lambda schemas: NamedReader(schemas, _KIMI_HEAD),
            CallMarkup(
                "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>", "<|tool_call_end|>",
                begin="<|tool_calls_section_begin|>", end="<|tool_calls_section_end|>",
            ),
            "<|tool_calls_section_begin|>", ("<|tool_call_argument_begin|>",),
        ),
        ToolFormat(
            "deepseek_v3", ((CALLS_BEGIN, "```json"),), _DEEPSEEK, _deepseek,
            CallMarkup(
                f"{CALL_BEGIN}function{CALL_SEP}{{name}}\n```json\n", f"\n```{CALL_END}",
                begin=CALLS_BEGIN, between="\n", end=CALLS_END,
            ),
            CALLS_BEGIN, (CALL_SEP,),
        ),
        ToolFormat(
            "deepseek_v31", ((CALLS_BEGIN,),), _DEEPSEEK, _deepseek,
            CallMarkup(f"{CALL_BEGIN}{{name}}{CALL_SEP}", CALL_END, begin=CALLS_BEGIN, end=CALLS_END),
            CALLS_BEGIN, (CALL_SEP,),
        ),
        ToolFormat(
            "mistral", (("[TOOL_CALLS]", "[ARGS]"),), BlockSyntax(("[TOOL_CALLS]",)), ListReader,
            CallMarkup("[TOOL_CALLS]{name}[ARGS]", ""), "[TOOL_CALLS]", ("[ARGS]", "[CALL_ID]"), has_short_ids=True,
        ),
        ToolFormat(
            "mistral_list", (("[TOOL_CALLS]",),), BlockSyntax(("[TOOL_CALLS]",)), ListReader,
            CallMarkup('{"name": "{name}", "arguments": ', "}", begin="[TOOL_CALLS] [", between=", ", end="]"),
            "[TOOL_CALLS]", ("[ARGS]", "[CALL_ID]"), has_short_ids=True,
        ),
        ToolFormat(
            "glm", (("<arg_key>",),), BlockSyntax(("<tool_call>",)), lambda schemas: TagReader(schemas, _GLM),
            CallMarkup(
                "<tool_call>{name}{newline}", "</tool_call>", between="\n",
                arguments=TagWriter(
                    "<arg_key>{key}</arg_key>{newline}<arg_value>", "</arg_value>{newline}", "</arg_value>", strips=True
                ),
            ),
            "<tool_call>", ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        ToolFormat(
            "qwen3_coder", (("<function=",),),
            BlockSyntax(("<tool_call>", "<function="), ("</tool_call>",)),
            lambda schemas: TagReader(schemas, _QWEN3_CODER),
            CallMarkup(
                "<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", between="\n",
                arguments=TagWriter("<parameter={key}>\n", "\n</parameter>\n", "</parameter>"),
            ),
            "<tool_call>",
        ),
        ToolFormat(
            "hermes", (("<tool_call>",),), BlockSyntax(("<tool_call>",), ("</tool_call>",)), ObjectReader,
            CallMarkup(
                '<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", between="\n"
            ),
            "<tool_call>",
        ),
        ToolFormat(
            "pythonic", (("<|python_start|>",), ("[func_name1(params_name1=",)),
            BlockSyntax(("<|python_start|>",), ("<|python_end|>",), head="["), PythonReader,
            CallMarkup("{name}(", ")", "[", ", ", "]", arguments=PythonWriter()),
        ),
        ToolFormat(
            "llama3_json", (("<|python_tag|>",), ('"parameters": dictionary',)),
            BlockSyntax(("<|python_tag|>",), (";",), head="{"),
            lambda schemas: ObjectReader(schemas, ("name", "type", "function")),
            CallMarkup('{"name": "{name}", "parameters": ', "}", between="; "),
        ),
    )
}  # fmt: skip
"""In the order in which a template is asked: the more specific ones first."""


def reasoning_format(name: str, template: str | None) -> ReasoningFormat | None:
    """The format of this name; `auto`: by the text of the chat template. Raises `KeyError`."""
    if name == NONE or template is None:
        return None
    if name != AUTO:
        return REASONING_FORMATS[name]
    known = REASONING_FORMATS.values()
    return next((each for each in known if any(signature in template for signature in each.signatures)), None)


def tool_format(name: str, template: str | None) -> ToolFormat | None:
    """The format of this name; `auto`: by the text of the chat template. Raises `KeyError`."""
    if name == NONE or template is None:
        return None
    if name != AUTO:
        return TOOL_FORMATS[name]
    for each in TOOL_FORMATS.values():
        if any(all(text in template for text in signature) for signature in each.signatures):
            return each
    return None


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """What a model writes beside text; None: text only. `reasoning_fields`: of a message, that hold its reasoning."""

    reasoning: ReasoningFormat | None
    tools: ToolFormat | None = None
    reasoning_fields: tuple[str, ...] = REASONING_FIELDS

    @property
    def is_harmony(self) -> bool:
        """True if one parser reads reasoning, text and calls."""
        return HARMONY in (self.reasoning and self.reasoning.name, self.tools and self.tools.name)
