"""vLLM's platform plugin, each case in a process of its own: what is imported and when is what matters."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engine import ROOT


def run(code: str, **environment: str) -> Any:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=inherited | quiet | environment, cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout.splitlines()[-1])


def test_register_imports_nothing() -> None:
    code = (
        "import json, sys, frontend.platform; name = frontend.platform.register();"
        "print(json.dumps([name, sorted({'vllm', 'torch', 'msgspec'} & set(sys.modules))]))"
    )
    assert run(code) == ["frontend.vllm_platform.BusPlatform", []]


def test_it_wins_and_vllm_inspects_no_model_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    code = f"""
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
config = EngineArgs(model={str(tiny_model)!r}, block_size=8).create_engine_config()
print(json.dumps([
    type(current_platform).__name__,
    current_platform.device_type,
    config.model_config.runner_type,
    config.cache_config.block_size,
    sorted(name for name in sys.modules if name in ("vllm._C", "vllm.model_executor.models.llama")),
]))
"""
    assert run(code, VLLM_CACHE_ROOT=str(tmp_path)) == ["BusPlatform", "cpu", "generate", 8, []]
    assert not (tmp_path / "modelinfos").exists()
