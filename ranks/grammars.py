"""Constraints on output text: grammars, and how far a request has come in its own. llguidance, in one place.

Nothing is imported, and the tokenizer not read, before the first request with a grammar comes.
"""

import json
from typing import Any

import numpy as np

from bus.config import Config
from bus.messages import Grammar
from bus.model_files import read, resolve


class BadGrammar(Exception):
    """A grammar that cannot be used; the text says what is wrong with it."""


class Matcher:
    """One request's place in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // 32)

    def accept(self, tokens: list[int]) -> bool:
        """Go on by `tokens`; False if the grammar does not allow them. At its end it allows anything."""
        return bool(self._matcher.is_stopped() or self._matcher.consume_tokens(tokens))

    def allowed_of(self, tokens: list[int]) -> list[int]:
        """How far `tokens` could be accepted one after the other; nothing changes."""
        if self._matcher.is_stopped():
            return []
        return tokens[: self._matcher.validate_tokens(tokens)]

    def masks(self, drafts: list[int]) -> list[bytes]:
        """What may come next, and after each of `drafts`, which are allowed: one bit for each token in packed int32."""
        masks = [self._mask()]
        for draft in drafts:
            self._matcher.consume_token(draft)
            masks.append(self._mask())
        self._matcher.rollback(len(drafts))
        return masks

    def _mask(self) -> bytes:
        mask = np.zeros(self._words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return mask.tobytes()


class Grammars:
    """Compiles grammars for the tokens of the served model."""

    LEFT_OUT = ("_llguidance", "_tokenizer")
    """Of a recorded state; see `bus.journal.state`."""
    _llguidance: Any = None
    _tokenizer: Any = None

    def __init__(self, config: Config) -> None:
        self._config = config

    def _load(self) -> None:
        """Import llguidance and read the tokenizer (0.3 s)."""
        import llguidance

        facts = read(resolve(self._config).folder)
        self._llguidance = llguidance
        path = str(facts.folder / "tokenizer.json")
        eos = list(facts.eos_token_ids) or None
        self._tokenizer = llguidance.LLTokenizer(path, n_vocab=facts.vocab_size, eos_token=eos)

    def compile(self, grammar: Grammar) -> Matcher:
        """The beginning of a grammar. Takes from milliseconds to seconds.

        Raises:
            BadGrammar: there is something wrong with it.
        """
        if self._tokenizer is None:
            self._load()
        try:
            text = self._text(grammar)
        except (ValueError, KeyError, TypeError) as error:
            raise BadGrammar(str(error) or type(error).__name__) from None
        matcher = self._llguidance.LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise BadGrammar(matcher.get_error())
        return Matcher(matcher, self._tokenizer.vocab_size)

    def _text(self, grammar: Grammar) -> str:
        """The grammar as llguidance takes it."""
        match grammar.kind:
            case "json":
                return self._json(grammar.spec)
            case "json_object":
                return self._json('{"type": "object"}')
            case "structural_tag":
                return self._tags(json.loads(grammar.spec))
            case kind:
                text: str = self._llguidance.grammar_from(kind, grammar.spec)
                return text

    def _json(self, schema: str) -> str:
        text: str = self._llguidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": True})
        return text

    def _tags(self, spec: dict[str, Any]) -> str:
        tags = []
        for item in spec["structures"]:
            begin = item["begin"]
            trigger = next((trigger for trigger in spec["triggers"] if begin.startswith(trigger)), None)
            if trigger is None:
                raise ValueError(f"no trigger begins {begin!r}; each structure's begin must start with one")
            schema = item["schema"] if isinstance(item["schema"], str) else json.dumps(item["schema"])
            tags.append(
                self._llguidance.StructTag(trigger=trigger, begin=begin, grammar=self._json(schema), end=item["end"])
            )
        if not tags:
            raise ValueError("there are no structures; at least one is needed")
        text: str = self._llguidance.StructTag.to_grammar(tags)
        return text
