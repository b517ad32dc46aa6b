"""The frontend process without HTTP and vLLM: its core and its buses. ``python -m bench.bus_frontend``."""

import signal

from bench.stub_executor import VOCABULARY
from bus import process
from bus.config import Config
from bus.journal import recorder as journal
from bus.links import Identity
from bus.shell import Shell
from frontend.params import ModelLimits
from frontend.replay import Construction, build


def run(config: Config, me: Identity) -> None:
    """Serve clients' token requests until SIGTERM."""
    assert config.max_model_len is not None
    limits = ModelLimits(VOCABULARY, config.max_model_len, eos_token_ids=(2,))
    construction = Construction(limits=limits, seed_key=bytes(32))
    core = build(me.index, config, construction)
    shell = Shell(me, config, core, lambda effect: None, journal.start(config, me, construction))
    shell.bind("client", config.client_endpoint(me.index))
    shell.bind("command", config.command_endpoint(me.index))
    signal.signal(signal.SIGTERM, lambda *_: shell.stop("the measurement is over"))
    shell.run()


if __name__ == "__main__":
    process.main("frontend", run)
