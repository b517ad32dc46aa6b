"""Compiled programs that a follower keeps: compiled once, and again only when they cannot be read."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from executor.kept import Kept
from tests.engine import ROOT

SETTINGS: dict[str, Any] = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def lowered(factor: int) -> Any:
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    return jax.jit(lambda x, y: {"sum": x + factor * y}, donate_argnums=0).trace(shape, shape).lower()


def compile_for_jax(folder: str) -> None:
    """Have JAX keep the programs, as the first of an executor's processes has it."""
    for name, value in (SETTINGS | {"jax_compilation_cache_dir": folder}).items():
        jax.config.update(name, value)
    for factor in (3, 5):
        lowered(factor).compile()


@pytest.fixture(scope="module")
def of_another_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JAX's cache with the programs in it: one that JAX takes from there could not be kept."""
    folder = tmp_path_factory.mktemp("programs")
    code = f"from tests.executor.test_kept import compile_for_jax; compile_for_jax({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
    assert any(folder.iterdir())
    return folder


@pytest.fixture
def folder(of_another_process: Path) -> Iterator[Path]:
    names = [*SETTINGS, "jax_compilation_cache_dir"]
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in (SETTINGS | {"jax_compilation_cache_dir": str(of_another_process)}).items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield of_another_process
    for file in of_another_process.glob("*.program"):
        file.unlink()
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def run(program: Any) -> list[float]:
    one, two = jnp.ones(4), jnp.full(4, 2.0)
    return np.asarray(program(one, two)["sum"]).tolist()


def test_a_program_is_compiled_once_and_another_is_another(folder: Path) -> None:
    for factor in (3, 5):
        for is_new in (True, False):
            program, compiled = Kept.instead_of_jax().compiled(lowered(factor), None)
            assert compiled == is_new
            assert run(program) == [1 + 2 * factor] * 4
    assert len(list(folder.glob("*.program"))) == 2


def test_a_file_that_is_damaged_is_written_again(folder: Path) -> None:
    kept = Kept.instead_of_jax()
    kept.compiled(lowered(3), None)
    (file,) = folder.glob("*.program")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    program, is_new = kept.compiled(lowered(3), None)
    assert is_new
    assert run(program) == [7] * 4
    assert not kept.compiled(lowered(3), None)[1]


def test_where_nothing_can_be_kept_programs_are_compiled_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    program, is_new = Kept(tmp_path / "file" / "programs").compiled(lowered(3), None)
    assert is_new
    assert run(program) == [7] * 4
