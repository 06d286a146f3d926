"""Project rules that a machine can check: sizes, names, imports, and committed files."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ROOT / "baton" / "rpc" / "gen"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# Written in two halves, because this file must pass its own rule.
REGISTRY_HOSTS = tuple(name + end for name, end in (("pypi", ".org"), ("pythonhosted", ".org"), ("npmjs", ".")))


def sources(*folders: str) -> list[Path]:
    """Python files of the project below the folders, without generated code."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in files if GENERATED not in path.parents]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def location(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def repository_files() -> list[Path]:
    """Files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    return [path for path in files if path.is_file()]


def imported_modules(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno


def import_contract(contract_id: str) -> dict[str, list[str]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    return next(contract for contract in contracts if contract["id"] == contract_id)


def test_files_are_short():
    lengths = {
        path: len(path.read_text().splitlines())
        for path in sources("baton", "services", "bench", "chaos", "simulation", "scripts", "tests")
    }
    assert [location(path, lines) for path, lines in lengths.items() if lines > MAX_FILE_LINES] == []


def test_functions_are_short():
    long = [
        f"{location(path, node.lineno)} {node.name}"
        for path in sources("baton", "services", "bench", "chaos", "simulation", "scripts", "tests")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_every_module_has_a_docstring():
    undocumented = [
        location(path, 1)
        for path in sources("baton", "services", "bench", "chaos", "scripts")
        if path.read_text().strip() and not ast.get_docstring(parsed(path))
    ]
    assert undocumented == []


def test_only_the_command_line_prints():
    printing = [
        location(path, node.lineno)
        for path in sources("baton", "services")
        if ROOT / "services" / "cli" not in path.parents
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printing == []


def test_only_settings_read_the_environment():
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    reading = [
        location(path, node.lineno)
        for path in sources("baton", "services")
        if ROOT / "baton" / "settings" not in path.parents
        for node in ast.walk(parsed(path))
        if (isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os")
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names})
    ]
    assert reading == []


def test_no_code_unpickles_data():
    """Access to a worker's port or to the store must not allow running code."""
    banned = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    loading = [
        f"{location(path, line)} {name}"
        for path in sources("baton", "services")
        for name, line in imported_modules(parsed(path))
        if name.split(".")[0] in banned
    ]
    calling = [
        location(path, node.lineno)
        for path in sources("baton", "services")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"torch.load", "eval", "exec", "numpy.load"}
    ]
    assert loading + calling == []


def test_modules_are_named_after_what_they_own():
    vague = {"utils", "util", "common", "managers", "manager", "core", "helpers", "misc"}
    parts = {part for path in sources("baton", "services") for part in path.relative_to(ROOT).with_suffix("").parts}
    assert parts & vague == set()


def test_the_domain_imports_only_the_standard_library():
    foreign = [
        f"{location(path, line)} {name}"
        for path in sources("baton/domain")
        for name, line in imported_modules(parsed(path))
        if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith("baton.domain")
    ]
    assert foreign == []


def test_imports_go_down():
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("contract_id", "extra"),
    [("policy", []), ("router", ["baton.services.router.app"])],
)
def test_importing_loads_nothing_heavy(contract_id: str, extra: list[str]):
    """Covers what import-linter cannot see: importing a module also runs its package's `__init__`."""
    contract = import_contract(contract_id)
    modules = [*contract["source_modules"], *extra]
    heavy = set(contract["forbidden_modules"]) - set(sys.stdlib_module_names)
    program = f"import sys, {', '.join(modules)}\nprint(*set({sorted(heavy)}) & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_no_file_has_marks_of_a_conflict():
    marks = tuple(7 * mark + b" " for mark in (b"<", b">"))
    for path in repository_files():
        if path.is_file() and not path.is_symlink():
            assert not any(line.startswith(marks) for line in path.read_bytes().splitlines()), path


def test_no_registry_is_named():
    naming = []
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        naming += [f"{path.relative_to(ROOT)}: {host}" for host in REGISTRY_HOSTS if host in text]
    assert naming == []


def test_no_lock_names_a_registry():
    assert [path for path in repository_files() if path.name == "uv.lock"] == []
