"""Keeps what people wrote, and what the model answered, out of a journal.

Token ids are replaced by a secret permutation of the vocabulary, the same for a whole journal, names of KV blocks and
texts by keyed hashes; the key is never written. So equal stays equal, and a frontend's or a rank's core goes through
the same motions in a replay. The executor's does not: it would need the real tokens.
"""

from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from bus.core import Peer
from bus.journal.blocks import FRAME, frame
from bus.journal.records import ENCODER, TURN_DECODER, EffectRecord, Turn
from bus.messages import GRAMMAR_FAULT, MultimodalFeature
from bus.prefix import HASH_BYTES, block_hashes, split_hashes

TOKENS = frozenset(
    {
        "all_token_ids",
        "allowed_token_ids",
        "bad_words_token_ids",
        "drafts",
        "eos_token_id",
        "eos_token_ids",
        "new_token_ids",
        "output_token_ids",
        "prompt_token_ids",
        "sampled_token_ids",
        "scheduled_spec_decode_tokens",
        "stop_token_ids",
        "token_ids",
        "tokens",
    }
)
TEXTS = frozenset({"bad_words", "cache_salt", "grammar_error", "hash", "messages", "spec", "stop", "text"})
NAMES = frozenset({"block_hashes", "removed", "stored"})
PLAIN = frozenset(
    {
        "block_ids",
        "block_places",
        "block_rows",
        "counts",
        "handles",
        "indices",
        "mask_places",
        "mask_rows",
        "num_blocks",
        "num_drafts",
        "num_tokens",
        "positions",
        "ranks",
        "rows",
        "samples",
        "seed_key",
        "values",
    }
)
"""Fields of bytes that say nothing of any text."""
ZEROS = frozenset({"masks", "vector"})
"""Fields of bytes that become zeros, as bytes in fields not named here do."""
TRUE_NAMES = "true_block_hashes"
"""Field that an `AddRequest` gets: hashes of the names it had, as `KvEvents` has them. Its ``block_hashes`` become the
names for the tokens that stand there now."""


class Redactor:
    """Makes of framed records what may be written instead. One key, one journal."""

    def __init__(self, key: bytes, vocab_size: int, block_size: int) -> None:
        """`key` is from 1 to 64 random bytes."""
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(key, "little")))
        self._codes = generator.permutation(vocab_size).astype("<i4")
        self._key = key
        self._block_size = block_size

    def rework(self, raw: bytes) -> bytes:
        """The records of a batch, redacted."""
        parts: list[bytes] = []
        position = 0
        while position < len(raw):
            size, _ = FRAME.unpack_from(raw, position)
            position += FRAME.size + size
            data = ENCODER.encode(self._turn(TURN_DECODER.decode(raw[position - size : position])))
            parts += (frame(data), data)
        return b"".join(parts)

    def value(self, value: Any, name: str = "") -> Any:
        """A value that stands in field `name`, redacted all the way down."""
        if name in TOKENS:
            return self._tokens(value)
        if name in TEXTS:
            return self._text(value)
        if name == "message" and isinstance(value, str) and value.startswith(GRAMMAR_FAULT):
            return GRAMMAR_FAULT + self._hash(value.removeprefix(GRAMMAR_FAULT).encode()).hex()
        if name == "logit_bias" and value is not None:
            return {self._tokens(token): bias for token, bias in value.items()}
        if name == "stop_reason":
            return self._text(value) if isinstance(value, str) else self._tokens(value)
        if isinstance(value, bytes):
            if name in NAMES:
                return b"".join(map(self._hash, split_hashes(value)))
            return value if name in PLAIN else bytes(len(value))
        if isinstance(value, list):
            return [self.value(one, name) for one in value]
        if isinstance(value, dict):
            fields = {key: self.value(one, key if isinstance(key, str) else "") for key, one in value.items()}
            if "block_hashes" in fields:
                fields[TRUE_NAMES] = fields["block_hashes"]
                salt = fields.get("cache_salt", "")
                features = msgspec.convert(fields.get("mm_features", []), list[MultimodalFeature])
                fields["block_hashes"] = block_hashes(
                    fields["prompt_token_ids"], self._block_size, salt, features, fields.get("adapter", "")
                )
            return fields
        return value

    def _turn(self, turn: Turn) -> Turn:
        data = turn.data
        if turn.kind in ("received", "posted"):
            data = self._raw(turn.subject, data)
        effects = [EffectRecord(effect.subject, self._raw(effect.subject, effect.data)) for effect in turn.effects]
        return msgspec.structs.replace(turn, data=data, effects=effects)

    def _raw(self, subject: Peer | str | None, data: msgspec.Raw) -> msgspec.Raw:
        value = msgspec.msgpack.decode(data)
        if isinstance(subject, Peer):
            value = ENCODER.encode(self.value(msgspec.msgpack.decode(value)))
        else:
            value = self.value(value)
        return msgspec.Raw(ENCODER.encode(value))

    def _tokens(self, value: Any) -> Any:
        """Token ids in any form; what is no token of the vocabulary stays."""
        if isinstance(value, bytes):
            tokens = np.frombuffer(value, "<i4")
            known = (tokens >= 0) & (tokens < self._codes.size)
            return np.where(known, self._codes[np.where(known, tokens, 0)], tokens).astype("<i4").tobytes()
        if isinstance(value, int):
            return int(self._codes[value]) if 0 <= value < self._codes.size else value
        if isinstance(value, list):
            return [self._tokens(one) for one in value]
        if isinstance(value, dict):
            return {key: self._tokens(one) for key, one in value.items()}
        return value

    def _text(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._hash(value.encode()).hex() if value else ""
        if isinstance(value, list):
            return [self._text(one) for one in value]
        if isinstance(value, dict):
            return {key: self._text(one) for key, one in value.items()}
        return value

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, key=self._key, digest_size=HASH_BYTES).digest()
