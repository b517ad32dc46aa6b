"""Who may import what: see DESIGN's layout. What is imported only for type checkers does not count."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("bus", "executor", "frontend", "ranks")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

ALLOWED = {
    "vllm": ("frontend/*.py", "ranks/vllm_*.py"),
    "jax": ("executor/*.py", "executor/*/*.py"),
    "flax": ("executor/*.py", "executor/*/*.py"),
    "torch": ("frontend/*.py", "ranks/vllm_*.py"),
    "transformers": ("executor/from_gguf.py", "frontend/*.py"),
    "supervisor": ("frontend/supervision.py",),
    "zmq": ("bus/*.py", "frontend/client.py"),
}
"""Libraries that only some files may import."""


def _imports(tree: ast.AST) -> Iterator[str]:
    """Names of all modules imported anywhere under `tree`, but in ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used"
            yield node.module or ""
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        else:
            yield from _imports(node)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_stay_within_the_borders(path: Path) -> None:
    relative = path.relative_to(ROOT)
    for module in _imports(ast.parse(path.read_text())):
        top = module.partition(".")[0]
        assert top not in PACKAGES or top in (relative.parts[0], "bus"), f"{relative} imports {module}"
        assert top not in ("pickle", "cloudpickle", "multiprocessing"), f"{relative} imports {module}"
        if top in ALLOWED:
            assert any(relative.match(pattern) for pattern in ALLOWED[top]), f"{relative} imports {module}"


def test_there_is_something_to_check() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)


@pytest.mark.parametrize(
    "module",
    [
        "bus.process",
        "bus.shell",
        "bus.model_files",
        "frontend.cli",
        "frontend.serve",
        "frontend.show_config",
        "ranks.__main__",
    ],
)
def test_what_must_start_fast_imports_nothing_slow(module: str) -> None:
    code = f"import {module}, sys; print(sorted({{'vllm', 'torch', 'jax', 'transformers'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
