"""The hash chain that names KV blocks in the prefix cache, the same in frontends and ranks.

The name of a block is a hash of everything its KV values depend on: the name of the block before it, its own tokens,
and the features of other media in it, with their places; the first block hangs on the cache salt and the adapter. 16
bytes of BLAKE2b: nobody can make two prompts share a name, which would let one client read another's cache.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from bus.messages import Ints, MultimodalFeature

HASH_BYTES = 16

_NAME = np.dtype((np.void, HASH_BYTES))

_BLANK = blake2b(digest_size=HASH_BYTES)
"""Copied for each name, which is cheaper than to make one anew."""


@lru_cache
def root_hash(cache_salt: str = "", adapter: str = "") -> bytes:
    """The name that the first block of a prompt hangs on; `adapter` is the identity of one, or empty."""
    return blake2b(cache_salt.encode(), digest_size=HASH_BYTES, key=adapter.encode()).digest()


def chain_hash(parent: bytes, tokens: bytes, features: bytes = b"") -> bytes:
    """The name of the block with these tokens (raw little-endian int32) after the block named `parent`.

    `features` is what `feature_key` says of the block.
    """
    digest = _BLANK.copy()
    digest.update(parent + tokens + features)
    return digest.digest()


def feature_key(features: Sequence[MultimodalFeature], begin: int, end: int) -> bytes:
    """What the features that reach into positions `begin` to `end` add to a block's name; nothing if there are none."""
    key = b""
    for feature in features:
        if feature.offset < end and begin < feature.offset + feature.length:
            content = feature.hash.encode()
            key += len(content).to_bytes(4, "little") + content
            key += (feature.offset - begin).to_bytes(8, "little", signed=True)
    return key


def block_hashes(
    tokens: Ints,
    block_size: int,
    cache_salt: str = "",
    features: Sequence[MultimodalFeature] = (),
    adapter: str = "",
) -> bytes:
    """The names of all full blocks of a prompt, 16 bytes each, one after the other."""
    data = bytes(tokens)
    step = 4 * block_size
    parent = root_hash(cache_salt, adapter)
    names = []
    if features:
        for end in range(step, len(data) + 1, step):
            key = feature_key(features, end // 4 - block_size, end // 4)
            parent = chain_hash(parent, data[end - step : end], key)
            names.append(parent)
    else:  # the same, with no more than has to be done for each block of a long prompt
        copy = _BLANK.copy
        for begin in range(0, len(data) - step + 1, step):
            digest = copy()
            digest.update(parent + data[begin : begin + step])
            parent = digest.digest()
            names.append(parent)
    return b"".join(names)


def split_hashes(names: bytes | memoryview) -> list[bytes]:
    """The 16-byte names in a field that holds several."""
    whole = len(names) // HASH_BYTES * HASH_BYTES
    split: list[bytes] = np.frombuffer(names[:whole], _NAME).tolist()
    return split
