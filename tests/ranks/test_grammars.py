"""Grammars by themselves: what they allow, on a tokenizer of one token for each byte."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from bus.config import Config
from bus.messages import Grammar
from ranks.grammars import BadGrammar, Grammars, Matcher
from tests.tiny_model import EOS

VOCAB = 259


@pytest.fixture(scope="module")
def grammars(tiny_model: Path) -> Grammars:
    return Grammars(Config(model=str(tiny_model)))


@pytest.fixture(scope="module")
def letters(tiny_model: Path) -> dict[int, str]:
    """The tokens that stand for a printable character other than white space."""
    vocab = json.loads((tiny_model / "tokenizer.json").read_text())["model"]["vocab"]
    return {token: text for text, token in vocab.items() if len(text) == 1 and text.isascii()}


def allowed(mask: bytes) -> list[int]:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    assert not bits[VOCAB:].any()
    return np.flatnonzero(bits).tolist()


def spelled(matcher: Matcher, letters: dict[int, str]) -> str:
    """What comes out when the greatest allowed token but white space is taken each time, up to the earliest end."""
    text = ""
    while EOS not in (tokens := allowed(matcher.masks([])[0])):
        token = max(token for token in tokens if token in letters)
        assert matcher.accept([token])
        text += letters[token]
        assert len(text) < 100
    return text


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (Grammar(kind="choice", spec='["yes", "no"]'), {"yes", "no"}),
        (Grammar(kind="regex", spec="a{3}b"), {"aaab"}),
        (Grammar(kind="grammar", spec='start: "x" "y"'), {"xy"}),
        (Grammar(kind="json_object"), {"{}"}),
        (Grammar(kind="json", spec='{"type": "array", "items": {"const": null}, "minItems": 2}'), {"[null,null]"}),
    ],
)
def test_only_what_the_grammar_means_comes_out(
    grammars: Grammars, letters: dict[int, str], grammar: Grammar, texts: set[str]
) -> None:
    assert spelled(grammars.compile(grammar), letters) in texts


def test_structural_tags_bind_after_their_trigger(grammars: Grammars, letters: dict[int, str]) -> None:
    tag = {"begin": "<f>", "schema": {"const": True}, "end": "</f>"}
    matcher = grammars.compile(
        Grammar(kind="structural_tag", spec=json.dumps({"structures": [tag], "triggers": ["<f"]}))
    )
    tokens = {letter: token for token, letter in letters.items()}
    assert len(allowed(matcher.masks([])[0])) > 100
    assert matcher.accept([tokens[letter] for letter in "<f>true"])
    assert allowed(matcher.masks([])[0]) == [tokens["<"]]


def test_masks_with_drafts_change_nothing(grammars: Grammars, letters: dict[int, str]) -> None:
    tokens = {letter: token for token, letter in letters.items()}
    matcher = grammars.compile(Grammar(kind="choice", spec='["yes"]'))
    y, e, s = (tokens[letter] for letter in "yes")
    assert matcher.allowed_of([y, e, e]) == [y, e]
    assert [allowed(mask) for mask in matcher.masks([y, e])] == [[y], [e], [s]]
    assert [allowed(mask) for mask in matcher.masks([])] == [[y]]
    assert not matcher.accept([s])
    assert matcher.fault == ""


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="regex", spec="("),
        Grammar(kind="json", spec="{"),
        Grammar(kind="choice", spec="yes"),
        Grammar(kind="grammar", spec="start: nothing"),
        Grammar(kind="structural_tag", spec='{"structures": [], "triggers": []}'),
        Grammar(kind="structural_tag", spec='{"structures": [{"begin": "<g>"}], "triggers": ["<f"]}'),
        Grammar(kind="structural_tag", spec="[]"),
        Grammar(kind="structural_tag", spec='{"type": "structural_tag", "format": {"type": "any_text"}}'),
        Grammar(kind="structural_tag", spec='{"structures": [{"begin": "<f>"}], "triggers": ["<f"]}'),
        Grammar(kind="json", spec='{"$ref": "#"}'),
        Grammar(kind="json", spec='{"oneOf": [{"minimum": 1}, {"maximum": 5}]}'),
        Grammar(kind="json", spec='{"type": "array", "maxItems": 1000000}'),
        Grammar(kind="json", spec='{"items": ' * 200 + "{}" + "}" * 200),
        Grammar(kind="grammar", spec='start: "a"{1,1000000}'),
        Grammar(kind="grammar", spec="start: " + "(" * 200 + '"a"' + ")" * 200),
        Grammar(kind="regex", spec="a" * 300_000),
    ],
)
def test_what_is_no_grammar_is_told(grammars: Grammars, grammar: Grammar) -> None:
    with pytest.raises(BadGrammar, match=r"\S") as bad:
        grammars.compile(grammar)
    assert len(str(bad.value)) <= 310
    assert "\n" not in str(bad.value)


RULES = "\n".join(f'r{number}: "a" r{number} | "ab{number}"' for number in range(2500))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="regex", spec="((a|aa|aaa){1,300}b?){1,300}"),
        Grammar(kind="grammar", spec=f"start: {' | '.join(f'r{number}' for number in range(2500))}\n{RULES}"),
    ],
)
def test_a_grammar_that_gets_too_complex_on_the_way_says_so(
    grammars: Grammars, letters: dict[int, str], grammar: Grammar
) -> None:
    tokens = {letter: token for token, letter in letters.items()}
    matcher = grammars.compile(grammar)
    assert any(matcher.masks([]) and not matcher.accept([tokens["a"]]) for _ in range(100))
    assert re.search("too many|max is", matcher.fault)


def test_the_last_ones_are_kept_and_each_request_has_its_own_place(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ranks.grammars.COPIED", 2)
    compiled = []
    right = Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda self, grammar: compiled.append(grammar) or right(self, grammar))
    own = Grammars(Config(model=str(tiny_model)))
    a, b, c = (Grammar(kind="regex", spec=spec) for spec in ("a+", "b+", "c+"))
    first, second = own.compile(a), own.compile(a)
    tokens = allowed(first.masks([])[0])
    assert first.accept(tokens)
    assert allowed(second.masks([])[0]) == tokens != allowed(first.masks([])[0])
    for grammar in (b, a, c, a, b):
        own.compile(grammar)
    assert compiled == [a, b, c, b]
