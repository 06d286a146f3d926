"""Statements of hand-written pages are true: paths exist, links resolve, commands parse."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from baton.model.loading.allow_list import TOKEN_EXACT
from baton.services.cli.main import build_app

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
TOP_FOLDERS = (
    *("baton", "services", "protos", "tests", "docs", "scripts", "docker", "requirements", "bench", "chaos"),
    *("deploy", ".ci", ".github"),
)

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OF_OTHERS = frozenset(
    """
    CUDA_VISIBLE_DEVICES FLASHINFER_WORKSPACE_BASE PYTORCH_CUDA_ALLOC_CONF UCX_TCP_PORT_RANGE bdp_probe ibv_devinfo
    CUDA_HOME UCX_CUDA_IPC_ENABLE_GET_ZCOPY expandable_segments ptrace_scope qlinear_pointwise shm_size
    """.split()
)
"""Names of other projects that the pages mention."""
PAGES_OF_OLD_NAMES = ("CHANGELOG.md", "newcomers-walk.md", "glossary.md")
SHELLS = ("sh", "bash", "shell", "console")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def named_paths(page: Path) -> Iterator[str]:
    """Inline code that looks like a path of this repository: `baton/kv`, `services/router/app.py`."""
    for text in INLINE.findall(prose(page)):
        if re.fullmatch(r"[\w.\-/]+", text) and text.split("/")[0] in TOP_FOLDERS and "/" in text:
            yield text


@cache
def own_names() -> frozenset[str]:
    """Every identifier of the sources, and the name of every file."""
    kinds = {".py", ".proto", ".lua", ".cpp", ".h", ".toml", ".yml", ".yaml", ".sh", ".json"}
    folders = [ROOT / name for name in TOP_FOLDERS if name not in {"docs", "requirements"}] + [ROOT / "simulation"]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in kinds]
    words = {word for path in files for word in IDENTIFIER.findall(path.read_text(encoding="utf-8"))}
    return frozenset(words | {path.stem for path in files})


def named_identifiers(page: Path) -> Iterator[str]:
    """CamelCase and snake_case names in inline code."""
    for text in INLINE.findall(prose(page)):
        for word in IDENTIFIER.findall(text):
            if "_" in word.strip("_") or re.match(r"[A-Z][a-z]+[A-Z]", word):
                yield word


def is_known(name: str) -> bool:
    """Metrics show `_total`; variables are settings in capitals."""
    forms = (name, name.removesuffix("_total"), name.lower(), name.removeprefix("BATON_").lower())
    return name in OF_OTHERS or any(form in own_names() for form in forms)


def relative_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(prose(page)):
        if not re.match(r"[a-z]+:", target):
            yield target


def headings(page: Path) -> set[str]:
    """Anchors as GitHub makes them."""
    lines = [line.lstrip("#").strip().lower() for line in prose(page).splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", line).replace(" ", "-") for line in lines}


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of every `baton ...` in the shell blocks of `text`."""
    for language, block in FENCE.findall(text):
        if language in SHELLS:
            for line in block.replace("\\\n", " ").splitlines():
                yield from _baton_arguments(shlex.split(line, comments=True))


def _baton_arguments(words: list[str]) -> Iterator[list[str]]:
    if words[:1] == ["helm"]:  # whose releases are called baton
        return
    for at, word in enumerate(words):
        if Path(word).name == "baton":
            rest = words[at + 1 :]
            ends = [i for i, other in enumerate(rest) if other in {"&", "&&", "|", ";", ">", ">>"}]
            yield rest[: ends[0]] if ends else rest
            return


def parses(arguments: list[str]) -> None:
    """Parses a command line; raises its error. `$VARIABLES` count as one word."""
    words = [re.sub(r"\$\([^)]*\)|\$\w+", "x", word) for word in arguments]
    build_app().parse_args(words, exit_on_error=False, print_error=False)


def make_targets() -> set[str]:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    return {found[1] for line in lines if (found := re.match(r"([a-z-]+):(?!=).*##", line))}


@each_page
def test_named_paths_exist(page: Path):
    missing = [path for path in named_paths(page) if not (ROOT / path).exists()]
    assert missing == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in PAGES_OF_OLD_NAMES], ids=lambda p: p.name)
def test_named_identifiers_exist(page: Path):
    assert sorted(name for name in set(named_identifiers(page)) if not is_known(name)) == []


@each_page
def test_links_resolve(page: Path):
    broken = []
    for link in relative_links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    assert broken == []


@each_page
def test_commands_parse(page: Path):
    for arguments in commands(page.read_text(encoding="utf-8")):
        parses(arguments)


@each_page
def test_make_targets_exist(page: Path):
    named = set(re.findall(r"`?\bmake ([a-z][a-z-]*)\b(?=[`\s])", "\n".join(_code(page))))
    assert named - make_targets() == set()


def _code(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    yield from (block + "\n" for language, block in FENCE.findall(text) if language in SHELLS)
    yield from (f"{text}`" for text in INLINE.findall(prose(page)))


def test_the_models_page_names_listed_types():
    page = prose(ROOT / "docs" / "models.md")
    (listed,) = re.findall(r"^Among the types on the list.*?\n\n(.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    named = set(INLINE.findall(listed))
    assert named
    assert named - TOKEN_EXACT == set()


def test_every_decision_is_listed():
    folder = ROOT / "docs" / "adr"
    listed = set(relative_links(folder / "README.md"))
    assert listed == {path.name for path in folder.glob("[0-9]*.md")}


def test_every_result_is_linked_from_the_performance_page():
    folder = ROOT / "docs" / "results"
    linked = set(relative_links(ROOT / "docs" / "performance.md"))
    assert {f"results/{path.name}" for path in folder.glob("*.md")} - linked == set()


def test_the_readme_shows_the_commands():
    """Guards the checks above against a page that they cannot read."""
    found = list(commands((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {tuple(words[:2]) for words in found} >= {("serve", name) for name in ("router", "prefill", "decode")}
    assert len(list(named_paths(ROOT / "README.md"))) > 10


@pytest.mark.parametrize("line", ["baton serv router", "baton serve router --prot 1", "baton up --prefill none"])
def test_a_command_that_does_not_exist_is_found(line: str):
    (arguments,) = commands(f"```sh\n{line}\n```\n")
    with pytest.raises(Exception):  # noqa: B017, PT011 - any error of the command line
        parses(arguments)
