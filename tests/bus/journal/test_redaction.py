"""What a redacted journal must not say, and what it still says."""

import re
import secrets
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bus import messages as m
from bus.buses import BUSES
from bus.config import Config, ConfigError
from bus.core import Peer, Posted, Received, Send
from bus.journal import redaction
from bus.journal.items import items
from bus.journal.reader import Record
from bus.journal.recorder import start
from bus.journal.redaction import Redactor
from bus.links import Identity
from bus.prefix import block_hashes
from bus.wire import pack_floats, pack_ints
from tests.journals import INCARNATION, Nothing, Recording, model

VOCAB = 50_000
OPEN = frozenset({"bus", "code", "command", "error", "kind", "message", "model", "name", "pause_state", "reason"}) | {
    *("adapter", "fault", "identities", "identity", "path"),
    *("host", "programs", "request_id", "request_ids", "role", "schema", "stop_reason", "type"),
}
"""Fields of text that a redacted journal may have: names, codes, and sentences of the engine itself."""


def fields(kind: Any, name: str, seen: set[Any]) -> Iterator[tuple[str, type]]:
    """Names and types of all fields of bytes or text below a type; elements have their list's name."""
    if kind in (str, memoryview, bytes):
        yield name, kind
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
        seen.add(kind)
        for field in msgspec.structs.fields(kind):
            yield from fields(field.type, field.name, seen)
    elif typing.get_origin(kind) is dict:
        yield from fields(typing.get_args(kind)[1], name, seen)
    else:
        for arm in typing.get_args(kind):
            yield from fields(arm, name, seen) if not isinstance(arm, str) else ()


ALL = sorted(
    {found for bus in BUSES.values() for way in (bus.up, bus.down) for found in fields(way, "", set())}, key=str
)


BYTES = redaction.TOKENS | redaction.NAMES | redaction.PLAIN | redaction.ZEROS


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_every_field_is_thought_of(name: str, kind: type) -> None:
    allowed = redaction.TEXTS | OPEN if kind is str else BYTES
    assert name in allowed, f"say in bus/journal/redaction.py, or here, what the {kind.__name__} in {name} may tell"


def test_nothing_is_left_of_tokens_and_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A drawn key would now and then code one of these tokens as another of them, which says nothing.
    monkeypatch.setattr(secrets, "token_bytes", bytes)
    secret, text = [40_000 + 7 * number for number in range(32)], "a secret nobody may read"
    config, me = Config(journal_redact=True), Identity("frontend", 0, INCARNATION)
    client, rank = Peer("client", "client", 0, 1), Peer("command", "rank", 0, 2)
    sampling = m.Sampling(
        seed=5,
        max_tokens=9,
        eos_token_id=secret[0],
        stop_token_ids=secret[1:3],
        logit_bias={secret[3]: 1.5},
        bad_words_token_ids=[secret[4:6]],
        grammar=m.Grammar(kind="regex", spec=text),
    )
    add = m.AddRequest(
        handle=1,
        sequence=1,
        request_id="r",
        prompt_token_ids=pack_ints(secret),
        sampling=sampling,
        cache_salt=text,
        block_hashes=memoryview(block_hashes(pack_ints(secret), 16, text)),
    )
    logprobs = m.Logprobs(
        owner=1, positions=1, token_ids=pack_ints(secret[:2]), values=pack_floats([-1, -2]), ranks=pack_ints([1])
    )

    class Core:
        def handle(self, event: Any) -> list[Any]:
            finished = m.Finished(request_id="r", reason="stop", stop_reason=text)
            return [
                Send(rank, add),
                Send(rank, m.AddRequests(requests=[add])),
                finished,
                m.Error(code="invalid", message=m.GRAMMAR_FAULT + text),
            ]

    recording = Recording(tmp_path, me, Core(), Nothing(), config, model=model(VOCAB))
    params = m.GenerateParams(stop=[text], bad_words=[text])
    messages = [{"role": "user", "content": text}]
    recording.handle(Received(client, m.Generate(request_id="r", messages=messages, params=params)))
    recording.handle(Received(client, m.Generate(request_id="r", text=text)))
    recording.handle(
        Received(rank, m.Outputs(handles=pack_ints([1]), tokens=pack_ints(secret[:1]), logprobs=[logprobs]))
    )
    recording.handle(Received(rank, m.Reply(command_id=1, value={"r": {"new_token_ids": secret}})))
    recording.handle(Posted(m.Delta(request_id="r", token_ids=pack_ints(secret), text=text)))
    said = [item for record in recording.end().records() if isinstance(record, Record) for item in items(record.turn)]
    written = " ".join(map(str, said))
    assert text not in written
    assert m.GRAMMAR_FAULT in written
    words = set(re.findall(r"(?<![\w.])\d+(?![\w.])", written))  # digits within hashes and times say nothing
    assert not [number for number in secret if str(number) in words]
    assert str(block_hashes(pack_ints(secret), 16, text)[:16].hex()) not in written
    fields = next(item.fields for item in said if item.type == "Outputs")
    assert fields["handles"] == [1]
    assert fields["logprobs"][0]["values"] == [-1, -2]


def test_equal_stays_equal() -> None:
    redactor = Redactor(b"a key", VOCAB, 16)
    tokens = np.arange(-2, VOCAB + 2, dtype="<i4")
    coded = np.frombuffer(redactor.value(tokens.tobytes(), "tokens"), "<i4")
    assert sorted(coded) == sorted(tokens)
    assert coded[:2].tolist() == [-2, -1]
    assert coded[-2:].tolist() == [VOCAB, VOCAB + 1]
    assert redactor.value([3, 4], "stop_token_ids") == coded[5:7].tolist()
    assert redactor.value(3, "eos_token_id") == coded[5]
    other = Redactor(b"another key", VOCAB, 16)
    assert other.value([3, 4, 5, 6], "token_ids") != redactor.value([3, 4, 5, 6], "token_ids")


def test_unknown_bytes_are_not_written() -> None:
    assert Redactor(b"a key", VOCAB, 16).value({"new": b"abc", "rows": b"abcd"}) == {"new": bytes(3), "rows": b"abcd"}


def test_needs_to_know_the_vocabulary(tmp_path: Path) -> None:
    config = Config(journal="on", journal_redact=True, journal_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="needs a model"):
        start(config, Identity("rank", 0, 1), Nothing())
