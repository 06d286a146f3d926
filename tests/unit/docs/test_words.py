"""Rules for names and shapes: unique classes, known nouns, no old words, small folders and constructors."""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("baton", "services", "simulation", "chaos", "bench", "scripts")
GENERATED = ROOT / "baton" / "rpc" / "gen"
MAX_FILES = 15
MAX_PARAMETERS = 6
MAX_TEST_NAME = 70

PLAIN = frozenset(
    """
    access activation activity agent answer app arrived attention auth avoided bar body bound broken buffer builder
    busy bytes cancelled capacity capturer channel checker child choice claim classes client close cluster command
    comparison compiler completion condition config connect connection context contradiction controller copy cursor
    cut dataset deadlock decode defaults delivery delta details detokenizer device direction disconnect dispatcher
    distribution drained dtype end ended endpoint entry envelope environment error estimator event exceeded expired
    fabric fact fail failed family fault fields file filler filter filters flags flight flipper flusher format
    forward found frontend gate group growth handle handler harness health histogram history hook http id identity
    idle imported index info interceptor interrupted interval issuer kind large late latency layer layout length
    lifecycle limits line linear list listener liveness llm load log logits logprob loop loss lost mailbox malformed
    matcher memory message metadata meter metric middleware milestone missing model module muon network node noise
    norm notifier objective operation ops options origin outbox outcome output overflow overloaded pacer packer
    params parser part payload phase piece plan policy position preempted prefill process profile progress protocol
    proxy pulled quantization query range read reader ready receiver recorder redis refused region registry remark
    renewed replaced replayable replied reply report reserve reserved reserver resources response result resumer
    ring role room rope rule run sample scalar scale scheduler search segment selection selector series server servicer
    set settings shape sink slow span spec splitter stage status storage stream submit subscription successor
    summary superseded supervisor sync system target template tensor text thread time timeout timing tokenizer tool
    total trace transcript transfer trust type unavailable unmeasured unreadable unsupported url usage use validator
    variant verifier version violation vocabulary wake watcher weight window writer
    """.split()
)
"""Head nouns of classes that need no entry in the glossary."""

OLD_WORDS = re.compile(
    r"\b(appointment|badge|boarding|canary|census|chooser|custody|door|errand|forecast|forsaken|hearsay|heir|house"
    r"|journey|landing|likeliest|lobb(y|ie)|melt|mend|nursery|obituar(y|ie)|premises|reception|reckoning|scribe"
    r"|stopwatch|tether|ticket|witness)(e?s)?\b",
    re.IGNORECASE,
)
"""Words of earlier versions for which the glossary has the field's word."""


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if GENERATED not in path.parents:
                yield path


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def classes(*folders: str) -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in sources(*folders):
        yield from ((path, node) for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef))


def head_noun(name: str) -> str:
    """`KvImport` -> `import`."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return words[-1].lower() if words else ""


def glossary_words() -> set[str]:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    return set(re.findall(r"[a-z]+", " ".join(cells).lower()))


def test_no_public_class_name_is_used_twice():
    found = defaultdict(list)
    for path in sources(*SOURCES):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(place(path, node))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_class_nouns_are_in_the_glossary_or_plain_english():
    known = {word.removesuffix("s") for word in PLAIN | glossary_words()}
    unknown = {
        f"{node.name} ({place(path, node)})"
        for path, node in classes(*SOURCES)
        if head_noun(node.name).removesuffix("s") not in known
    }
    assert sorted(unknown) == []


def texts() -> Iterator[tuple[str, str]]:
    """Names and contents of our text files, without pages that explain old words."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    skipped = (
        *(
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "docs/newcomers-walk.md",
            "tests/unit/docs/test_words.py",
        ),  # name old words
        *("LICENSE", "requirements/", "baton/rpc/gen/", "baton/bundled/", "scripts/bundled_"),  # not our prose
    )
    kinds = {".py", ".md", ".proto", ".lua", ".toml", ".yml", ".yaml", ".sh", ".cpp", ".h", ".json"}
    for name in filter(None, listing.stdout.decode().split("\0")):
        path = ROOT / name
        if path.suffix in kinds and path.is_file() and not name.startswith(skipped):
            yield name, path.read_text(encoding="utf-8")


def test_old_words_are_gone():
    found = [
        f"{name}:{number}: {match[0]}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        for match in OLD_WORDS.finditer(line)
    ]
    assert found == []


def test_folders_are_small():
    counts: defaultdict[Path, int] = defaultdict(int)
    for path in sources(*SOURCES, "tests"):
        counts[path.parent.relative_to(ROOT)] += 1
    assert {str(folder): count for folder, count in counts.items() if count > MAX_FILES} == {}


def test_constructors_take_few_parameters():
    long = [
        f"{place(path, method)} {node.name}: {count}"
        for path, node in classes(*SOURCES)
        for method in node.body
        if isinstance(method, ast.FunctionDef)
        and method.name == "__init__"
        and (count := len(method.args.posonlyargs + method.args.args + method.args.kwonlyargs) - 1) > MAX_PARAMETERS
    ]
    assert long == []


def test_ceil_division_has_a_name():
    inline = [
        place(path, node)
        for path in sources(*SOURCES)
        if path.name != "arithmetic.py"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.BinOp)
        and isinstance(node.operand.op, ast.FloorDiv)
        and isinstance(node.operand.left, ast.UnaryOp)
    ]
    assert inline == []


def test_test_names_are_short():
    long = [
        f"{place(path, node)} {node.name}"
        for path in sources("tests")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and len(node.name) > MAX_TEST_NAME
    ]
    assert long == []


def test_a_head_noun_is_the_last_word():
    names = {"KvImport": "import", "TCPProxy": "proxy", "_Row": "row", "UsageMeter": "meter"}
    assert {name: head_noun(name) for name in names} == names
