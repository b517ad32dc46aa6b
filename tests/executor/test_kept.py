"""Compiled programs that a follower keeps: compiled once, and again only when they cannot be read."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from executor.kept import Kept


def lowered(factor: int) -> Any:
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    return jax.jit(lambda x, y: {"sum": x + factor * y}, donate_argnums=0).trace(shape, shape).lower()


def run(program: Any) -> list[float]:
    one, two = jnp.ones(4), jnp.full(4, 2.0)
    return np.asarray(program(one, two)["sum"]).tolist()


def test_a_program_is_compiled_once_and_another_is_another(tmp_path: Path) -> None:
    for factor in (3, 5):
        for is_new in (True, False):
            program, compiled = Kept(tmp_path / "programs").compiled(lowered(factor), None)
            assert compiled == is_new
            assert run(program) == [1 + 2 * factor] * 4
    assert len(list((tmp_path / "programs").iterdir())) == 2


def test_a_file_that_is_damaged_is_written_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.compiled(lowered(3), None)
    (file,) = tmp_path.iterdir()
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
