"""The few rules of the house that a test backs: imports point down only, torch stays in its rooms, only renderers encode."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tokentrue"
SHARED = {"types", "protocols", "errors"}
ALLOWED: dict[str, set[str]] = {
    "types": {"errors"},
    "protocols": {"types"},
    "errors": set(),
    "renderers": set(),
    "compare": set(),
    "mismatch": set(),
    "numerics": set(),
    "sessions": {"compare"},
    "engine": {"numerics"},
    "turn": {"sessions", "samples"},
    "samples": {"sessions", "compare"},
    "providers": {"engine"},
    "gateway": {"turn", "sessions", "samples"},
    "train": {"samples", "mismatch", "numerics"},
    "viewer": {"samples"},
    "environments": set(),
    "lab": {"train", "engine", "mismatch", "samples", "providers", "numerics", "environments", "renderers", "turn"},
}
TOP_FLOOR = {"__init__", "__main__", "cli", "bench", "cluster"}  # may import everything, lazily
TORCH_ROOMS = {"mismatch", "numerics", "engine", "train", "lab", "providers", "cli", "bench", "cluster"}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def imports_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import at line {node.lineno}"
            yield node.module or "", node.lineno
            if node.module == "tokentrue":
                yield from ((f"tokentrue.{alias.name}", node.lineno) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down_only(path: Path) -> None:
    room = room_of(path)
    if room in TOP_FLOOR:
        return
    assert room in ALLOWED, f"{room} is not a room of the house"
    for module, line in imports_of(ast.parse(path.read_text())):
        if not module.startswith("tokentrue.") or module == "tokentrue.__version__":
            continue
        target = module.split(".")[1]
        allowed = ALLOWED[room] if room in SHARED else ALLOWED[room] | SHARED | {room}
        assert target in allowed, f"{path}:{line}: {room} may not import {target}"
        if room == "providers" and target == "engine":
            assert path.name in {"exact.py", "verified.py"}, f"{path}:{line}: only exact.py and verified.py may import the engine"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torch_stays_in_its_rooms(path: Path) -> None:
    if room_of(path) in TORCH_ROOMS:
        return
    for module, line in imports_of(ast.parse(path.read_text())):
        assert module.split(".")[0] != "torch", f"{path}:{line}: torch in a torch-free room"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_renderers_encode_or_decode(path: Path) -> None:
    """Other rooms hold ids; a call of a tokenizer's encode or decode there is a drift waiting to happen."""
    if room_of(path) == "renderers":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"encode", "decode"}:
            owner = ast.unparse(node.func.value).lower()
            assert "tokenizer" not in owner, f"{path}:{node.lineno}: {ast.unparse(node.func)}"


@pytest.mark.parametrize("module", ["tokentrue", "tokentrue.gateway", "tokentrue.turn", "tokentrue.samples", "tokentrue.cli.main"])
def test_starts_without_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_import_is_light() -> None:
    code = "import sys, tokentrue; print(sorted({'torch', 'transformers', 'aiohttp', 'numpy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
