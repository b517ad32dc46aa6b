from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bus.config import Config
from bus.counters import Counters
from bus.messages import KvPool
from ranks.native import NativeScheduler
from ranks.scheduler import Scheduler
from tests.ranks.toy import write_vocabulary

MakeScheduler = Callable[..., Scheduler]


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's vocabulary in a model folder."""
    return write_vocabulary(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture(scope="session")
def vllm_loaded() -> Any:
    """vLLM's imports, once per test process."""
    from ranks.vllm_loading import load

    return load


@pytest.fixture
def make_vllm(vllm_loaded: Any) -> MakeScheduler:
    """Makes a scheduler on vLLM's for some settings and a pool."""

    def make(config: Config, pool: KvPool, counters: Counters | None = None) -> Scheduler:
        return vllm_loaded(config, counters or Counters())(pool)  # type: ignore[no-any-return]

    return make


@pytest.fixture(params=["vllm", "native"])
def make_scheduler(request: pytest.FixtureRequest) -> MakeScheduler:
    """Makes a scheduler for some settings and a pool, of which one block is not used: vLLM never uses its first."""
    if request.param == "vllm":
        return request.getfixturevalue("make_vllm")  # type: ignore[no-any-return]

    def make(config: Config, pool: KvPool, counters: Counters | None = None) -> Scheduler:
        pool = msgspec.structs.replace(pool, num_blocks=pool.num_blocks - 1)
        return NativeScheduler(config, pool, counters or Counters())

    return make
