"""The hash chain that names KV blocks in the prefix cache, the same in frontends and ranks.

The name of a block is a hash of everything its KV values depend on: the name of the block before it and its own
tokens; the first block hangs on the cache salt. 16 bytes of BLAKE2b: nobody can make two prompts share a name, which
would let one client read another's cache.
"""

from hashlib import blake2b

from bus.messages import Ints

HASH_BYTES = 16


def root_hash(cache_salt: str = "") -> bytes:
    """The name that the first block of a prompt hangs on."""
    return blake2b(cache_salt.encode(), digest_size=HASH_BYTES).digest()


def chain_hash(parent: bytes, tokens: bytes) -> bytes:
    """The name of the block with these tokens (raw little-endian int32) after the block named `parent`."""
    return blake2b(parent + tokens, digest_size=HASH_BYTES).digest()


def block_hashes(tokens: Ints, block_size: int, cache_salt: str = "") -> bytes:
    """The names of all full blocks of a prompt, 16 bytes each, one after the other."""
    data = bytes(tokens)
    step = 4 * block_size
    parent = root_hash(cache_salt)
    names = []
    for end in range(step, len(data) + 1, step):
        parent = chain_hash(parent, data[end - step : end])
        names.append(parent)
    return b"".join(names)


def split_hashes(names: bytes | memoryview) -> list[bytes]:
    """The 16-byte names in a field that holds several."""
    data = bytes(names)
    return [data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES)]
