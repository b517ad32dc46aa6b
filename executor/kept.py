"""Compiled programs of a follower, kept on its own: JAX keeps those of the first process only."""

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from bus.log import get_logger
from executor.kernels.library import cpu

log = get_logger()


class Kept:
    """A folder of compiled programs, each under a hash of its text and of all else that it depends on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        device = jax.local_devices()[0]
        self._place = (
            f"{jax.__version__}|{device.client.platform_version}|{jax.process_index()}|{jax.devices()}|{cpu()}"
        )

    @classmethod
    def instead_of_jax(cls) -> "Kept":
        """Where JAX's own cache is, and in its place: a program that came from there cannot be written once more."""
        folder = Path(jax.config.jax_compilation_cache_dir)
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        return cls(folder)

    def compiled(self, lowered: Any, options: Mapping[str, str] | None) -> tuple[Any, bool]:
        """The compiled program of a lowered one, and whether it had to be compiled, with `options` for the compiler."""
        text = f"{self._place}|{options}|{lowered.as_text()}"
        path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()}.program"
        try:
            tree = jax.tree.structure(lowered.args_info)
            return deserialize_and_load(path.read_bytes(), tree, lowered.out_tree), False
        except FileNotFoundError:
            pass
        except Exception as error:  # whatever a file that is damaged makes of it
            log.warning("a compiled program could not be read again", detail=f"{type(error).__name__}: {error}")
        compiled = lowered.compile(compiler_options=options)
        self._keep(path, serialize(compiled)[0])
        return compiled, True

    def _keep(self, path: Path, program: bytes) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(program)
            os.replace(file.name, path)  # at once: another process may be looking
        except OSError as error:
            log.warning("a compiled program could not be kept", detail=str(error))
