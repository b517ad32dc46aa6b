"""The command ``rankbus``: finds the subcommand, and imports nothing but what that one needs."""

import importlib
import signal
import sys
from typing import NamedTuple

from bus.config import EX_CONFIG, ConfigError


class Command(NamedTuple):
    """A subcommand: `module` has ``main(arguments: list[str]) -> int``, which returns the exit code."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("frontend.serve", "prepare the model, run the engine, and say when and where it answers"),
    "config": Command("frontend.show_config", "show every setting, its value, and where the value comes from"),
    "generate": Command("frontend.generate", "complete a text; its continuation appears as it comes"),
    "chat": Command("frontend.chat", "talk to the model, line by line"),
    "top": Command("frontend.top", "show live what each process does; pause, resume or drain a rank by a key"),
    "plan": Command("executor.plan", "say what a model needs and can do on a TPU that need not be there"),
    "journal": Command("bus.journal.command", "show what a process recorded, or how two recordings differ"),
    "trace": Command("bus.trace.command", "show where the time of a journaled run went, as a trace for Perfetto"),
    "replay": Command("bus.replay_command", "run a process again from its journal, and tell where it does otherwise"),
}


def main() -> int:
    """Run the subcommand that the command line names; returns the exit code."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if name not in COMMANDS:
        print(f"rankbus: there is no command {name}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(COMMANDS[name].module).main(arguments))
    except ConfigError as error:
        print(f"rankbus: {error}", file=sys.stderr)
        return EX_CONFIG
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: rankbus COMMAND [--SETTING VALUE …]",
            "",
            *lines,
            "",
            "Settings come from defaults, the file that RANKBUS_CONFIG names, RANKBUS_<SETTING> in the environment,",
            "and flags; the last wins.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
