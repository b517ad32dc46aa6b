"""The kernels' library: compiled at the first start on a CPU of its kind, then taken from the cache."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax

from bus.log import get_logger

log = get_logger()

_SOURCE = Path(__file__).parent / "cpu.cc"
_OPTIONS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-w")
_COMPILE_S = 300
_TARGETS = ("rankbus_products", "rankbus_gated", "rankbus_attention", "rankbus_zeros")


class _Loaded:
    """Whether the kernels are in this process; None before `load` was called."""

    answer: bool | None = None


def load(cache_path: Path) -> bool:
    """Make the kernels known to XLA; whether that could be done. The reason why not is logged, once."""
    if _Loaded.answer is None:
        _Loaded.answer = _load(cache_path / "kernels")
    return _Loaded.answer


def _load(folder: Path) -> bool:
    compiler = _compiler()
    if compiler is None:
        log.warning("no C++ compiler (c++, g++ or clang++) was found: the model runs without kernels, slower")
        return False
    try:
        library = ctypes.CDLL(str(_compiled(compiler, folder)))
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
        detail = said.decode(errors="replace")[-2000:] if said else str(error)
        log.warning("the kernels could not be compiled: the model runs without them, slower", detail=detail)
        return False
    for name in _TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return True


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [named] if named else ["c++", "g++", "clang++"])), None)


def _compiled(compiler: str, folder: Path) -> Path:
    """The library for this source, compiler and CPU; compiled if it is not there."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_S).stdout
    parts = [_SOURCE.read_bytes(), version, " ".join(_OPTIONS).encode(), jax.__version__.encode(), cpu().encode()]
    library = folder / f"cpu-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    if not library.exists():
        log.info("compiling the kernels", compiler=compiler)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            command = [compiler, *_OPTIONS, f"-I{jax.ffi.include_dir()}", str(_SOURCE), "-o", str(made)]
            subprocess.run(command, capture_output=True, check=True, timeout=_COMPILE_S)
            made.replace(library)  # at once: another process may be looking
    return library


def cpu() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
