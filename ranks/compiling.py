"""Grammars are compiled beside the rank's loop: what the core asks for, what comes back, and the thread in between."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import msgspec

from bus.messages import Grammar
from ranks.grammars import BadGrammar

STACK_BYTES = 512 << 20
"""Of the thread: llguidance calls itself for each rule of a chain of rules, and has up to 2^16. Only what is used of it
takes memory."""


class Compile(msgspec.Struct, frozen=True):
    """Effect: compile a grammar; answered by a `Compiled` with the same numbers.

    `scheduler` counts the rank's schedulers, and `ticket` the grammars of one.
    """

    scheduler: int
    ticket: int
    grammar: Grammar


class Compiled(msgspec.Struct, frozen=True, omit_defaults=True):
    """Posted: a grammar's beginning, or what is wrong with it.

    `matcher` is what the scheduler's own kind of grammar is made of; a journal leaves it out.
    """

    scheduler: int
    ticket: int
    grammar_error: str = ""
    matcher: Any = None


def plain(value: Any) -> Any:
    """What a rank's journal holds of a posted value, or of an effect."""
    return msgspec.structs.replace(value, matcher=None) if isinstance(value, Compiled) else value


class Compiler:
    """Compiles one grammar after the other in a thread of its own, which begins with the first."""

    def __init__(self, compile: Callable[[Grammar], Any], post: Callable[[Compiled], None]) -> None:
        """`compile` raises `BadGrammar` if there is something wrong with a grammar."""
        self._compile = compile
        self._post = post
        self._asked: SimpleQueue[Compile] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)

    def submit(self, asked: Compile) -> None:
        """Have a grammar compiled. All calls come from one thread."""
        self._asked.put(asked)
        if not self._thread.is_alive():
            before = threading.stack_size(STACK_BYTES)
            self._thread.start()
            threading.stack_size(before)

    def _work(self) -> None:
        while True:
            asked = self._asked.get()
            try:
                done = Compiled(asked.scheduler, asked.ticket, matcher=self._compile(asked.grammar))
            except BadGrammar as bad:
                done = Compiled(asked.scheduler, asked.ticket, str(bad))
            except Exception as error:  # whoever waits for it must hear of it
                fault = f"compiling it failed ({type(error).__name__}: {error})"
                done = Compiled(asked.scheduler, asked.ticket, fault)
            self._post(done)
