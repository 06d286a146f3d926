"""Lark grammars from GBNF ones, llama.cpp's notation. Called by `sources`.

llguidance's converter parses and prints. It looks for the rules that are terminals again and again, which takes minutes
for a chain of some thousand rules; here they are found in one pass before.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from llguidance import gbnf_to_lark as converter

from baton.domain.errors import ConstraintFailed

MAX_GRAMMAR_CHARS = 64 * 1024
"""Of a grammar before it is read; the compiler has the same bound for what comes out, in bytes."""

_LARK = re.compile(r"%llguidance\b|start\s*:")


def as_lark(source: str) -> str:
    """The same grammar in Lark's notation; one that has it already is left as it is. Raises `ConstraintFailed`.

    GBNF begins with its rule `root`. A line with a rule `start`, or the library's header, tells Lark.
    """
    if len(source) > MAX_GRAMMAR_CHARS:
        raise ConstraintFailed(f"the grammar has {len(source)} characters; {MAX_GRAMMAR_CHARS} are the most")
    if any(_LARK.match(line.lstrip()) for line in source.splitlines()):
        return source
    try:
        return _converted(source)
    except Exception as error:  # the library's errors have several classes, and some are plain exceptions
        raise ConstraintFailed(f"the grammar cannot be read: {str(error)[:300]}") from None


def _converted(source: str) -> str:
    rules = converter.GrammarParser().parse(source)
    _mark_terminals(rules)
    converter.resolve(rules)
    ordered = sorted(rules.values(), key=lambda rule: rule.order)
    return "%llguidance {}\n\n" + "".join(f"{rule}\n\n" for rule in ordered)


def _mark_terminals(rules: Mapping[str, converter.RuleNode]) -> None:
    """Marks the rules that refer to nothing but such rules, `root` apart: in Lark, their names are in capitals."""
    users, num_open = defaultdict[str, list[str]](list), dict[str, int]()
    for name, rule in rules.items():
        names = {node.name for node in _nodes(rule) if isinstance(node, converter.RuleRefNode)}
        num_open[name] = len(names)
        for used in names:
            users[used].append(name)
    ready = [name for name, num in num_open.items() if not num]
    while ready:
        name = ready.pop()
        if name == "root":
            continue
        rules[name].rule_is_terminal = True
        for user in users[name]:
            num_open[user] -= 1
            if not num_open[user]:
                ready.append(user)


def _nodes(rule: converter.RuleNode) -> Iterator[converter.ASTNode]:
    """All parts of a rule."""
    left: list[converter.ASTNode] = [rule]
    while left:
        node = left.pop()
        yield node
        left.extend(node.children())
