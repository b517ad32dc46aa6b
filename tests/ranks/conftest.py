from collections.abc import Callable
from typing import Any

import pytest

from bus.config import Config
from bus.counters import Counters
from bus.messages import KvPool
from ranks.scheduler import Scheduler


@pytest.fixture(scope="session")
def vllm_loaded() -> Any:
    """vLLM's imports, once per test process."""
    from ranks.vllm_loading import load

    return load


@pytest.fixture
def make_vllm(vllm_loaded: Any) -> Callable[..., Scheduler]:
    """Makes a scheduler on vLLM's for some settings and a pool."""

    def make(config: Config, pool: KvPool, counters: Counters | None = None) -> Scheduler:
        return vllm_loaded(config, counters or Counters())(pool)  # type: ignore[no-any-return]

    return make
