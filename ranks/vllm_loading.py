"""Imports vLLM for a rank, as fast as it goes, and nothing of it before.

vLLM's scheduler needs no model, no tokenizer and no device. The rank says so by the environment variables below, which
vLLM reads when it is imported, and by a stand-in for the model (`ranks.vllm_engine`).
"""

import gc
import logging
import os
from collections.abc import Callable

from bus.config import Config
from bus.counters import Counters
from bus.messages import KvPool
from ranks.scheduler import Scheduler

_ENVIRONMENT = {
    # A configuration for a CPU is all that is asked for, whatever this machine and this build of vLLM have
    "VLLM_TARGET_DEVICE": "cpu",
    # The schedule tells resumed requests from new ones, as vLLM's first model runner wants it
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # Log lines go through the process's own handler, KV block names stay bytes, and nothing is sent anywhere
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def load(config: Config, counters: Counters) -> Callable[[KvPool], Scheduler]:
    """Import vLLM (about five seconds) and return what makes a scheduler for a KV pool (milliseconds).

    Raises:
        ConfigError: a setting that vLLM's scheduler cannot work with.
    """
    os.environ.update(_ENVIRONMENT)
    logging.getLogger("vllm").setLevel(logging.ERROR)  # it warns of what a CPU lacks for running models
    gc.disable()  # the imports make millions of objects and no garbage worth the search
    from ranks.vllm_engine import Engine
    from ranks.vllm_scheduler import VllmScheduler

    engine = Engine(config)
    gc.enable()
    gc.freeze()
    return lambda pool: VllmScheduler(config, pool, engine, counters)
