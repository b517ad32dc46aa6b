"""The thread that compiles grammars: whatever is asked of it, an answer comes."""

from pathlib import Path
from queue import SimpleQueue
from typing import Any

from bus.config import Config
from bus.messages import Grammar
from ranks.compiling import Compile, Compiled, Compiler
from ranks.grammars import Grammars

DEADLINE_S = 60.0


def compiled(compile: Any, *grammars: Grammar) -> list[Compiled]:
    answers: SimpleQueue[Compiled] = SimpleQueue()
    compiler = Compiler(compile, answers.put)
    for ticket, grammar in enumerate(grammars):
        compiler.submit(Compile(7, ticket, grammar))
    found = [answers.get(timeout=DEADLINE_S) for _ in grammars]
    assert [(answer.scheduler, answer.ticket) for answer in found] == [(7, ticket) for ticket in range(len(grammars))]
    return found


def test_grammars_come_back_in_order_good_ones_and_bad_ones(tiny_model: Path) -> None:
    grammars = Grammars(Config(model=str(tiny_model)))
    good, bad, again = (Grammar(kind="regex", spec=spec) for spec in ("a+", "(", "a+"))
    found = compiled(grammars.compile, good, bad, again)
    assert "unclosed group" in found[1].grammar_error
    assert found[0].matcher.masks([]) == found[2].matcher.masks([])


def test_a_chain_of_rules_does_not_overflow_the_stack(tiny_model: Path) -> None:
    """It would end the process: with the stack that threads have otherwise, it does."""
    count = 4000
    rules = "\n".join(f'r{number}: "x" r{number + 1}' for number in range(count))
    chain = Grammar(kind="grammar", spec=f'start: r0\n{rules}\nr{count}: "a"')
    (found,) = compiled(Grammars(Config(model=str(tiny_model))).compile, chain)
    assert found.grammar_error == ""
    assert found.matcher.masks([])


def test_whatever_goes_wrong_is_told() -> None:
    def fails(grammar: Grammar) -> Any:
        raise MemoryError("no room")

    (found,) = compiled(fails, Grammar(kind="json_object"))
    assert found.grammar_error == "compiling it failed (MemoryError: no room)"


def test_without_a_tokenizer_requests_with_grammars_are_refused(tmp_path: Path) -> None:
    (found,) = compiled(Grammars(Config(model=str(tmp_path))).compile, Grammar(kind="json_object"))
    assert "a grammar needs llguidance, and a vocabulary" in found.grammar_error
