"""Grammars by themselves: what they allow, on a tokenizer of one token for each byte."""

import json
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
    ],
)
def test_what_is_no_grammar_is_told(grammars: Grammars, grammar: Grammar) -> None:
    with pytest.raises(BadGrammar, match=r"\S"):
        grammars.compile(grammar)
