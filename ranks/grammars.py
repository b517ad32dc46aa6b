"""Constraints on output text: grammars, and how far a request has come in its own. llguidance, in one place.

Nothing is imported, and the tokenizer not read, before the first request with a grammar comes.
"""

import hashlib
import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bus.config import Config
from bus.journal.reader import JournalError
from bus.messages import Grammar
from bus.model_files import ModelError, outline, resolve

COPIED = 64
"""Compiled grammars that are kept, so that the next request with the same one need not wait."""

MAX_LENGTH = 256 * 1024
"""Characters of a grammar."""

MAX_REPEATS = 50_000
"""Each is a symbol of the grammar, of which llguidance knows 2^16."""

MAX_NESTING = 128
"""Levels of brackets in a grammar. Readers of it call themselves for each, and a stack that overflows ends the rank."""


MAX_SYMBOLS = 100_000
"""Of a grammar, as llguidance counts them: a second's work."""

MAX_FAULT = 300
"""Characters of what is told of a fault."""

FORBIDDEN = "doesn't satisfy the grammar"
"""In what llguidance says of a token that the grammar does not allow; it fails for other reasons, too."""

NOT_ITS_OUTPUT = "the grammar does not allow the output there is already"
NOT_ALLOWED = "the model produced a token that the grammar forbids"


class BadGrammar(Exception):
    """A grammar that cannot be used; the text says what is wrong with it."""


class Vocabulary(msgspec.Struct, frozen=True):
    """Tokens that grammars are compiled for. `digest` is a hash of the tokenizer and of the tokens that end a text."""

    model: str
    size: int
    digest: str

    @classmethod
    def of(cls, folder: Path) -> "Vocabulary":
        """That of the model in `folder`, of which only config.json and tokenizer.json are needed.

        Raises:
            ModelError: one of them is not there, or cannot be read.
        """
        facts = outline(folder)
        try:
            digest = hashlib.sha256((folder / "tokenizer.json").read_bytes())
        except OSError as error:
            raise ModelError(f"{folder / 'tokenizer.json'} cannot be read: {error.strerror}") from None
        digest.update(json.dumps([facts.vocab_size, *facts.eos_token_ids]).encode())
        return cls(folder.name, facts.vocab_size, digest.hexdigest()[:32])


class NoVocabulary(BadGrammar, JournalError):
    """What grammars are compiled with is not there; the text says what it is. It may be a replay that finds so."""

    def __init__(self, known: Vocabulary | None, fault: str) -> None:
        wanted = f"{known.model}'s, of {known.size} tokens, with the hash {known.digest}" if known else "the model's"
        super().__init__(
            f"a grammar needs llguidance, and a vocabulary: {wanted} ({fault}); where a journal is replayed, --model "
            "names a folder with its config.json and tokenizer.json"
        )


class Matcher:
    """One request's place in its grammar."""

    LEFT_OUT = ("_matcher",)
    """Of a recorded state, see `bus.journal.state`: it is made anew from the grammar and the tokens."""
    _matcher: Any = None

    def __init__(self, grammars: "Grammars", grammar: Grammar) -> None:
        self.fault = ""
        """Why it does not go on, whatever the tokens: it has become too complex, say. Empty if it does."""
        self._grammars = grammars
        self._grammar = grammar
        self._tokens: list[int] = []

    def begin(self) -> Any:
        """llguidance's matcher for it, which is made when it is first needed."""
        if self._matcher is None:
            self._matcher = self._grammars.begin(self._grammar)
            self._matcher.consume_tokens(self._tokens)
        return self._matcher

    def accept(self, tokens: list[int]) -> bool:
        """Go on by `tokens`; False if the grammar does not allow them. At its end it allows anything."""
        matcher = self.begin()
        if matcher.is_error():
            self.fault = sentence_of(matcher.get_error())
            return False
        if matcher.is_stopped():
            return True
        self._tokens += tokens
        if matcher.consume_tokens(tokens):
            return True
        if FORBIDDEN not in matcher.get_error():
            self.fault = sentence_of(matcher.get_error())
        return False

    def allowed_of(self, tokens: list[int]) -> list[int]:
        """How far `tokens` could be accepted one after the other, but for the end of a text; nothing changes."""
        matcher = self.begin()
        if matcher.is_stopped():
            return []
        tokens = tokens[: matcher.validate_tokens(tokens)]
        ends = [place for place, token in enumerate(tokens) if token in self._grammars.ends]
        return tokens[: ends[0]] if ends else tokens

    def masks(self, drafts: list[int]) -> list[bytes]:
        """What may come next, and after each of `drafts`, which are allowed: one bit for each token in packed int32.

        Where nothing can come, it is the tokens that end a text.
        """
        matcher = self.begin()
        masks = [self._mask(matcher)]
        for draft in drafts:
            matcher.consume_token(draft)
            masks.append(self._mask(matcher))
        matcher.rollback(len(drafts))
        return masks

    def _mask(self, matcher: Any) -> bytes:
        mask = np.zeros(self._grammars.num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return mask.tobytes()


class Grammars:
    """Compiles grammars for the tokens of the served model."""

    LEFT_OUT = ("_llguidance", "_tokenizer", "_compiled")
    """Of a recorded state; see `bus.journal.state`."""
    _llguidance: Any = None
    _tokenizer: Any = None
    _compiled: "OrderedDict[Grammar, Any] | None" = None
    """The last ones, by what they were asked for as."""

    def __init__(self, config: Config, vocabulary: Vocabulary | None = None) -> None:
        """`vocabulary` is the model's, if that is known already."""
        self._config = config
        self.vocabulary = vocabulary

    @property
    def num_words(self) -> int:
        """Of a mask, in int32."""
        return -(-int(self._tokenizer.vocab_size) // 32)

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text."""
        found: list[int] = self._tokenizer.eos_tokens
        return found

    def compile(self, grammar: Grammar) -> Matcher:
        """The beginning of a grammar. Takes from milliseconds to seconds.

        Raises:
            BadGrammar: there is something wrong with it.
        """
        matcher = self.matcher(grammar)
        matcher.begin()
        return matcher

    def matcher(self, grammar: Grammar) -> Matcher:
        """The same, but it is compiled only when it is needed."""
        return Matcher(self, grammar)

    def begin(self, grammar: Grammar) -> Any:
        """llguidance's matcher, a new one each time.

        Raises:
            BadGrammar: there is something wrong with the grammar.
        """
        if self._tokenizer is None:
            self._load()
        if self._compiled is None:
            self._compiled = OrderedDict()
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > COPIED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return matcher.deep_copy()

    def _load(self) -> None:
        """Import llguidance and read the tokenizer (0.3 s)."""
        known = self.vocabulary
        try:
            import llguidance

            folder = resolve(self._config).folder
            facts = outline(folder)
            found = Vocabulary.of(folder)
        except (ImportError, ModelError) as error:
            raise NoVocabulary(known, str(error)) from None
        if known is not None and known.digest != found.digest:
            raise NoVocabulary(known, f"there is one of {found.model} with the hash {found.digest}")
        self._llguidance = llguidance
        path = str(folder / "tokenizer.json")
        eos = list(facts.eos_token_ids) or None
        self._tokenizer = llguidance.LLTokenizer(path, n_vocab=facts.vocab_size, eos_token=eos)

    def _compile(self, grammar: Grammar) -> Any:
        check_size(grammar)
        try:
            text = self._text(grammar)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadGrammar(str(error) or type(error).__name__) from None
        limits = self._llguidance.LLParserLimits(max_grammar_size=MAX_SYMBOLS, verbose_errors=False)
        matcher = self._llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        first = matcher.deep_copy()
        if not first.is_error():
            first.compute_bitmask()  # it may turn out that nothing can be
        if first.is_error():
            raise BadGrammar(sentence_of(first.get_error()))
        return matcher

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
        if not isinstance(spec, dict) or not {"structures", "triggers"} <= spec.keys():
            raise ValueError("a structural tag must have `structures` and `triggers`")
        tags = []
        for item in spec["structures"]:
            if missing := {"begin", "schema", "end"} - item.keys():
                raise ValueError(f"a structure has no `{min(missing)}`; it must have `begin`, `schema` and `end`")
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


def sentence_of(error: str) -> str:
    """One line of what llguidance says, which may quote much of a grammar, and of its own inside."""
    said = " ".join(error.partition("<")[0].split()) or "it cannot be followed"
    return said if len(said) <= MAX_FAULT else said[:MAX_FAULT] + " …"


def check_size(grammar: Grammar) -> None:
    """Refuse what would take a compiler of grammars minutes, gigabytes, or more stack than there is.

    Raises:
        BadGrammar: the text says what there is too much of.
    """
    if len(grammar.spec) > MAX_LENGTH:
        raise BadGrammar(f"it has {len(grammar.spec)} characters; at most {MAX_LENGTH} are allowed")
    if _nesting(grammar.spec) > MAX_NESTING:
        raise BadGrammar(f"its brackets nest in more than {MAX_NESTING} levels")
    repeats = sum(int(number[:9]) for found in _REPEATS.findall(grammar.spec) for number in found if number)
    if grammar.kind != "regex" and repeats > MAX_REPEATS:
        raise BadGrammar(f"it asks for {repeats} repetitions, counted together; at most {MAX_REPEATS} are allowed")


_REPEATS = re.compile(r'(?:"(?:min|max)(?:Items|Properties)"\s*:\s*|\{(?=\d+,?\d*\}))(\d+)(?:,(\d+))?')
"""Numbers of repetitions, in a schema and in a grammar. Of regular expressions they are no trouble."""


def _nesting(text: str) -> int:
    """The most brackets that are open at once, whatever they mean."""
    kinds = np.frombuffer(text.encode(errors="replace"), np.uint8)
    steps = np.isin(kinds, np.frombuffer(b"([{", np.uint8)).astype(np.int64)
    steps -= np.isin(kinds, np.frombuffer(b")]}", np.uint8))
    return int(np.cumsum(steps).max(initial=0))
