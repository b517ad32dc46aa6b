"""Weights of 8 bits: every family gives what it gives with the floats that they stand for."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from executor import tensors
from tests.executor.driving import Driver
from tests.executor.test_llama import ALL, prompt_of
from tests.families import FAMILIES, write_family

ROUTER = "mlp.gate.weight"


def dequantized(weight: np.ndarray) -> np.ndarray:
    scales = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
    scales[scales == 0] = 1
    return np.round(weight / scales).astype(np.int8) * scales


def dequantize(folder: Path) -> None:
    """Replace a folder's matrices by what is left of them in 8 bits."""
    [path] = folder.glob("*.safetensors")
    found = load_file(path)
    rounded = {
        name: dequantized(value) if value.ndim == 2 and not name.endswith(ROUTER) else value
        for name, value in found.items()
    }
    errors = [np.abs(rounded[name] - value).max() / np.abs(value).max() for name, value in found.items()]
    assert 0.001 < max(errors) < 1 / 250
    save_file(rounded, path)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_floats_that_the_bits_stand_for(
    family: str, tmp_path: Path, engine_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "PIECE_BYTES", 4096)  # many pieces
    folder = write_family(tmp_path / family, family)
    ours, floats = Driver(folder, engine_cache, quantization="int8"), Driver(folder, engine_cache)
    dequantize(folder)
    exact = Driver(folder, engine_cache)
    for driver in (ours, floats, exact):
        driver.start((0, 0), prompt_of(40), ALL)
    [got, plain, wanted] = [driver.logits((0, 0)) for driver in (ours, floats, exact)]
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    distance = np.abs(got - plain)
    assert distance.max() > 1e-4
    assert distance.mean() < 0.1
