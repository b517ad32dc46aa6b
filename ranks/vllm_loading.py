"""Imports vLLM for a rank, as fast as it goes, and nothing of it before.

vLLM's scheduler needs no model, no tokenizer and no device. The rank says so by the environment variables below, which
vLLM reads when it is imported, and by a stand-in for the model (`ranks.vllm_engine`).
"""

import gc
import logging
import os
import time

from bus.config import Config
from bus.counters import Counters
from bus.log import get_logger
from ranks.scheduler import Schedulers

log = get_logger()

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


def load(config: Config, counters: Counters) -> Schedulers:
    """Import vLLM (about five seconds) and return what makes a scheduler for a KV pool (milliseconds).

    Raises:
        ConfigError: a setting that vLLM's scheduler cannot work with.
    """
    os.environ.update(_ENVIRONMENT)
    logging.getLogger("vllm").setLevel(logging.ERROR)  # it warns of what a CPU lacks for running models
    begin = time.monotonic()
    gc.disable()  # the imports make millions of objects and no garbage worth the search
    from ranks.vllm_engine import Engine
    from ranks.vllm_scheduler import VllmScheduler

    imported = time.monotonic()
    engine = Engine(config)
    configured = time.monotonic()
    gc.enable()
    gc.freeze()
    log.info("vllm loaded", import_s=round(imported - begin, 2), configure_s=round(configured - imported, 2))
    return Schedulers(lambda pool: VllmScheduler(config, pool, engine, counters), engine.compile)
