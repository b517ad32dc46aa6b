"""What memory loading takes; see bench/loading.py, which does it for 2 GB."""

from pathlib import Path

from bench import loading


def test_loading_holds_little_more_than_the_weights(tmp_path: Path, engine_cache: Path) -> None:
    size = loading.write_model(tmp_path / "model", 300_000_000, "float32")
    found = loading.measure(tmp_path / "model", size, "float32", f"--cache-dir={engine_cache}")
    assert 0.9 * size <= found.peak <= 1.2 * size
