"""Rules of the code base that a test backs: imports point down only, packages and files form no cycle, torch stays
where it is needed, only renderers encode."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tokentrue"
# Every package may import these.
SHARED = {"ids", "routing_replay", "types", "protocols", "errors", "plain_json", "hub", "tracing"}
SHARED |= {"conversation", "images", "json_types", "pixels", "records", "vision"}
SERVED = {"renderers", "comparison", "sessions", "samples", "turn", "providers", "gateway"}
TENSORS = {"mismatch", "numerics", "engine", "train"}
# Who may import whom, besides SHARED and itself. Imports inside functions and under TYPE_CHECKING count.
ALLOWED: Mapping[str, set[str]] = {
    "errors": set(),
    "json_types": set(),
    "records": set(),
    "tracing": set(),
    "plain_json": {"errors", "json_types"},
    "ids": {"errors"},
    "hub": {"errors"},
    "routing_replay": {"errors", "ids", "records"},
    "pixels": {"errors", "hub", "images", "types", "vision"},
    "types": {"errors", "ids", "json_types", "records", "routing_replay"},
    "protocols": {"types", "ids", "errors", "json_types"},
    "vision": {"protocols", "errors", "json_types", "records"},
    "images": {"types", "errors", "json_types", "records"},
    "conversation": {"images", "types", "errors", "json_types", "plain_json", "records"},
    # `import tokentrue` loads all but types by name, when it is first used; type checkers read imports.
    "__init__": {"types", "client", "comparison", "providers", "renderers", "turn"},
    "renderers": set(),
    "comparison": set(),
    "mismatch": set(),
    "numerics": set(),
    "sessions": {"comparison"},
    "engine": {"numerics"},
    "samples": {"sessions", "comparison"},
    "turn": {"sessions", "samples"},
    "providers": {"engine"},
    "gateway": {"turn", "sessions", "samples", "viewer", "__init__"},
    "viewer": {"samples", "sessions", "comparison", "client"},
    "client": {"samples"},
    "environments": {"client", "samples"},
    "train": {"samples", "mismatch", "numerics"},
    "integrations": {"samples", "environments", "client"},
    "conformance": set(),  # the judge of gateways shares no code with ours
    "doctor": {"renderers", "providers", "samples", "mismatch", "numerics", "engine"},
    "app": {*SERVED, *TENSORS, "environments", "viewer"},
    "cluster": {"app", "environments", "train"},
    "cli": {
        "app",
        "client",
        "cluster",
        "conformance",
        "doctor",
        "viewer",
        "integrations",
        "environments",
        "__init__",
        *SERVED,
        *TENSORS,
    },
    "__main__": {"cli"},
}
MAY_IMPORT_TORCH = {*TENSORS, "pixels", "providers", "doctor", "app", "cli", "cluster"}
# Beside the package in a clone, and not installed: they may import it, it may not import them.
OUTSIDE = ("benchmarks", "experiments", "tests", "scripts")
# Cycles among files that are still to be opened. Take an entry out with the change that opens its cycle; none may be
# added.
KNOWN_CYCLES: list[set[str]] = []
FILES = sorted(PACKAGE.rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    """`gateway.app` for tokentrue/gateway/app.py, `gateway` for its __init__.py, `__init__` for the package's own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_of(path): path for path in FILES}


@cache
def read_syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_names(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names that a file imports, with the line: at the top, in functions and under TYPE_CHECKING alike."""
    for node in ast.walk(read_syntax(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    """Modules of this package that a file imports, with the line."""
    for name, line in imported_names(path):
        if name == "tokentrue" or name.startswith("tokentrue."):
            yield nearest_module(name.removeprefix("tokentrue").removeprefix(".")), line


def nearest_module(dotted: str) -> str:
    """The module that holds a dotted name: `gateway.app` for `gateway.app.Gateway`."""
    while dotted and dotted not in MODULES:
        dotted = dotted.rpartition(".")[0]
    return dotted or "__init__"


def cycles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of more than one node (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            component = set(stack[at:])
            del stack[at:]
            if len(component) > 1:
                found.append(component)

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def test_the_table_of_packages_has_no_cycle() -> None:
    try:
        TopologicalSorter({name: allowed - {name} for name, allowed in ALLOWED.items()}).prepare()
    except CycleError as error:
        pytest.fail(f"ALLOWED has a cycle: {error.args[1]}")


def test_imports_point_down_only() -> None:
    wrong: list[str] = []
    for path in FILES:
        package = package_of(path)
        assert package in ALLOWED, f"{package} is not in the table of packages"
        allowed = ALLOWED[package] | {package} | (set() if package in SHARED else SHARED)
        targets = [(module.split(".")[0], line) for module, line in imported_modules(path)]
        wrong += [f"{path}:{line}: {package} may not import {name}" for name, line in targets if name not in allowed]
        wrong += [f"{path}:{line}: {name}" for name, line in imported_names(path) if name.split(".")[0] in OUTSIDE]
    assert not wrong, "\n".join(wrong)


def test_only_two_providers_import_the_engine() -> None:
    files = [path for path in FILES if package_of(path) == "providers" and path.name not in {"exact.py", "verified.py"}]
    for path in files:
        lines = [line for module, line in imported_modules(path) if module.split(".")[0] == "engine"]
        assert not lines, f"{path}:{lines}: only exact.py and verified.py may import the engine"


MOST_FILES = 12
BROAD = {"cli", "integrations", "providers", "renderers/families"}  # a file per command, framework, engine, family


def test_a_folder_holds_at_most_a_dozen_files() -> None:
    folders = Counter(
        path.parent.relative_to(PACKAGE).as_posix() for path in FILES if path.stem not in {"__init__", "__main__"}
    )
    assert not {name: count for name, count in folders.items() if count > MOST_FILES and name not in BROAD}


def test_files_form_no_cycle() -> None:
    edges = {name: {module for module, _ in imported_modules(path)} - {name} for name, path in MODULES.items()}
    found = cycles(edges)
    new = [sorted(cycle) for cycle in found if cycle not in KNOWN_CYCLES]
    assert not new, f"files import each other in a circle: {new}"
    gone = [sorted(cycle) for cycle in KNOWN_CYCLES if cycle not in found]
    assert not gone, f"these cycles are gone; take them out of KNOWN_CYCLES: {gone}"


def test_a_cycle_is_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set[str]()}
    assert cycles(edges) == [{"a", "b", "c"}]


def test_torch_stays_where_it_is_needed() -> None:
    files = [path for path in FILES if package_of(path) not in MAY_IMPORT_TORCH]
    wrong = [
        f"{path}:{line}: torch in a torch-free package"
        for path in files
        for name, line in imported_names(path)
        if name.split(".")[0] == "torch"
    ]
    assert not wrong, "\n".join(wrong)


def test_only_renderers_encode_or_decode() -> None:
    """Other packages hold ids; a tokenizer's encode or decode there can change them. The suite for gateways has a
    vocabulary of its own, from the `tokenizers` library: a judge must not share the renderers' mistakes."""
    wrong = [
        f"{path}:{node.lineno}: {ast.unparse(node.func)}"
        for path in FILES
        if package_of(path) not in {"renderers", "conformance"}
        for node in ast.walk(read_syntax(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"encode", "decode"}
        and "tokenizer" in ast.unparse(node.func.value).lower()
    ]
    assert not wrong, "\n".join(wrong)


def test_starts_without_torch() -> None:
    """One process each: an import must not find what another one loaded."""
    modules = ("gateway", "turn", "samples", "cli.main", "app.training")
    for module in modules:
        code = f"import sys, tokentrue.{module}; print('torch' in sys.modules)"
        assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False", module


def test_import_is_light() -> None:
    code = "import sys, tokentrue; print(sorted({'torch', 'transformers', 'aiohttp', 'numpy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@cache
def bound_names(path: Path) -> set[str]:
    """Names that a module's top level binds."""
    found: set[str] = set()
    for node in ast.walk(read_syntax(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def test_every_file_that_a_packages_page_names_exists() -> None:
    for page in PACKAGE.rglob("README.md"):
        names = re.findall(r"`([\w./]+(?:\.py|/))`", page.read_text())
        bases = page.parent, PACKAGE, PACKAGE.parent
        missing = [name for name in names if not any((base / name).exists() for base in bases)]
        assert not missing, f"{page.relative_to(PACKAGE)} names {missing}"


def test_every_imported_name_exists() -> None:
    """Also where an import runs only with a library that is not installed here."""
    missing: list[str] = []
    for path in FILES:
        for name, line in imported_names(path):
            dotted = name.removeprefix("tokentrue.")
            if name.startswith("tokentrue.") and dotted not in MODULES:
                module, _, attribute = dotted.rpartition(".")
                owner = MODULES.get(module or "__init__")
                if owner is None or (attribute not in bound_names(owner) and "__getattr__" not in bound_names(owner)):
                    missing.append(f"{path}:{line}: {name}")
    assert not missing, missing
