"""What must be true of every CUDA kernel's source, seen without a GPU: a kernel that forgets to wait reads what is not
yet written."""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "tokentrue" / "numerics" / "triton"


def kernels() -> dict[str, ast.FunctionDef]:
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found[f"{path.stem}.{node.name}"] = node
    return found


def calls(node: ast.AST) -> list[str]:
    return [n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]


def test_every_kernel_waits_for_its_inputs_before_anything_else() -> None:
    assert len(kernels()) > 15
    for name, node in kernels().items():
        body = node.body[1:] if ast.get_docstring(node) else node.body
        assert calls(body[0]) == ["wait_for_inputs"], f"{name} does something before it waits for what it reads"
        assert calls(node).count("let_next_start") == 1, f"{name} must let the next kernel start, once"


def test_a_kernel_that_runs_beside_the_one_ahead_waits_before_it_writes_or_ends() -> None:
    """Else the kernel after it would start before the one ahead has ended."""
    beside = {name: node for name, node in kernels().items() if "BESIDE" in [arg.arg for arg in node.args.args]}
    assert list(beside) == ["experts._group_kernel"]
    for name, node in beside.items():
        text = "wait_for_inputs(not BESIDE)"
        waits = [n.lineno for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n) == text]
        always = [n.lineno for n in node.body if ast.unparse(n) == text]
        stores = [i.lineno for i in ast.walk(node) if isinstance(i, ast.Call) and ast.unparse(i.func) == "tl.store"]
        returns = [i.lineno for i in ast.walk(node) if isinstance(i, ast.Return)]
        assert always and stores and max(always) < min(stores), f"{name} writes before it waits"
        assert all(line - 1 in waits for line in returns), f"{name} ends without waiting"


def test_every_kernel_is_launched_by_launch() -> None:
    """Anything else would leave out the compiler's options that bits depend on."""
    names = {name.split(".")[1] for name in kernels()}
    launched = set()
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                assert node.value.id not in names, f"{path.name}: {node.value.id} is launched past launch()"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "launch":
                launched.add(ast.unparse(node.args[0]))
    assert launched == names
