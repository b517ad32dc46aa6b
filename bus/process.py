"""How every process of the engine begins and ends: arguments, configuration, crash loops, exit codes."""

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Never

from bus import backoff, log
from bus import config as configuration
from bus.config import EX_CONFIG, Config, ConfigError
from bus.links import Identity
from bus.messages import Role
from bus.shell import new_incarnation

_PR_SET_PDEATHSIG = 1


def end_at_once(code: int) -> Never:
    """End without what libraries do at exit: JAX waits there for programs, also for those that never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(role: Role, run: Callable[[Config, Identity], None], end: Callable[[int], Never] = sys.exit) -> Never:
    """Be a process of the engine: read ``--index`` and the configuration, then call `run`; end with the right code.

    `run` returns when the process ends in an orderly way, and imports what is slow to import itself: by then a crash
    loop has been slowed down. A configuration or model that cannot be used ends the process with code 78 and one log
    line with the sentence, which has ``exit_code`` on it, by which ``rankbus serve`` finds it. `end` ends the process
    with a code.
    """
    end_with_parent(signal.SIGKILL)
    parser = argparse.ArgumentParser(prog=f"python -m {role}", allow_abbrev=False)
    parser.add_argument("--index", type=int, default=0, help="number of this process among those of its role, from 0")
    arguments, rest = parser.parse_known_args()
    me = Identity(role, arguments.index, new_incarnation())
    log.configure(role, me.index, me.incarnation, "info")
    try:
        flags, unknown = configuration.split_flags(rest)
        if unknown:
            raise ConfigError(f"{unknown[0]} is not a setting; `rankbus config` lists them")
        config = configuration.load(flags)
        log.configure(role, me.index, me.incarnation, config.log_level)
        starts = backoff.wait_if_crashing(config.run_path / "starts", f"{role}-{me.index}")
        run(config, me)
        starts.ended_well()
    except ConfigError as error:
        log.get_logger().error(str(error), exit_code=EX_CONFIG)
        end(EX_CONFIG)
    except Exception:
        log.get_logger().exception("the process ends by an error", exit_code=1)
        end(1)
    end(0)


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process signal `number` when its parent ends, however that comes about.

    Works between a fork and an exec too, and holds on after the exec (prctl(2), PR_SET_PDEATHSIG).
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:  # the parent ended before the kernel knew
        os.kill(os.getpid(), number)
