"""Sampling on the device, as pure functions of logits, parameters and the rows' token history.

All functions work on one data shard: logits are float32 [n, vocabulary], one line per row that draws. `rows` int32 [n]
says which row of the shard's history and parameters each line belongs to, `ends` int32 [n] how many tokens the row
has, which is also the position of the token that is drawn.

The token at position p is argmax(filtered logits + Gumbel(seed, p, token)), the noise from a hash of the three: it does
not depend on batch, row or sharding. Definitions and their order are vLLM's: allowed tokens, bad words, minimum length
and bias; penalties; then, unless greedy: temperature, min-p, top-k, top-p.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bus.messages import Sampling
from executor.shards import Array
from executor.step import Float32, Int32

NAN_TOKEN = -2
"""Drawn where a row's logits are not numbers."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""

TOP_LOGPROBS = 32
"""Most likely tokens whose log-probabilities are found on the device."""

_HISTORY_CHUNK = 256
HISTORY_MULTIPLE = _HISTORY_CHUNK
"""The history's width is a multiple of this."""


class RowParams(NamedTuple):
    """Parameters of all rows of a shard; see `pack`."""

    floats: Array
    """float32 [rows, 6]: temperature, top_p, min_p, presence, frequency and repetition penalty."""
    ints: Array
    """int32 [rows, 4]: top_k, length of the prompt, lower and upper half of the seed."""


def pack(rows: Sequence[tuple[Sampling, int]]) -> tuple[Float32, Int32]:
    """Lines of `RowParams` for parameters and prompt lengths: float32 [n, 6] and int32 [n, 4]."""
    floats = [
        (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
        )
        for sampling, _ in rows
    ]
    ints = [
        (sampling.top_k, prompt_len, sampling.seed % 2**32, (sampling.seed >> 32) % 2**32)
        for sampling, prompt_len in rows
    ]
    return np.array(floats, np.float32), np.array(ints, np.uint32).view(np.int32)


class Adjustments(NamedTuple):
    """What `adjust` does besides penalties; entries of `*_line` [k] that are n or more are padding.

    The bans are tokens that must not follow certain others. A ban is a run of entries of the same `ban_group`: each
    says that `ban_token` stands `ban_back` places before the end, the one with 0 which token is then banned.
    """

    allowed: Array
    """uint32 [n, ceil(vocabulary / 32)]: bit t % 32 of word t // 32 says whether token t is allowed."""
    bias_line: Array
    bias_token: Array
    bias: Array
    ban_line: Array
    ban_group: Array
    ban_back: Array
    ban_token: Array
    use: Array
    """bool [4]: whether there are masks, biases, bans and penalties at all."""


def greedy(logits: Array) -> Array:
    """The most likely tokens, int32 [n]; the smallest of equal ones, `NAN_TOKEN` where a logit is NaN."""
    return lax.platform_dependent(logits, cpu=_greedy_in_passes, default=_greedy_in_one)


def _greedy_in_passes(logits: Array) -> Array:
    """Twenty times as fast on a CPU as argmax, whose reduction of pairs is not vectorised."""
    vocabulary = logits.shape[1]
    top = logits.max(axis=1, keepdims=True)
    tokens = jnp.where(logits == top, jnp.arange(vocabulary, dtype=jnp.int32), vocabulary).min(axis=1)
    return jnp.where(tokens == vocabulary, NAN_TOKEN, tokens)


def _greedy_in_one(logits: Array) -> Array:
    """Reads the logits once; the place of a NaN, if there is one, is argmax's answer."""
    tokens = jnp.argmax(logits, axis=1).astype(jnp.int32)
    is_nan = jnp.isnan(jnp.take_along_axis(logits, tokens[:, None], axis=1))[:, 0]
    return jnp.where(is_nan, NAN_TOKEN, tokens)


def draw(logits: Array, params: RowParams, rows: Array, ends: Array) -> Array:
    """Draw the tokens at positions `ends`, int32 [n]; greedy rows draw nothing, NaN as in `greedy`."""
    temperature, top_p, min_p = (params.floats[rows, column] for column in range(3))
    top_k, _, seed_low, seed_high = (params.ints[rows, column] for column in range(4))
    is_greedy = temperature < GREEDY_BELOW
    scaled = logits / jnp.where(is_greedy, 1, temperature)[:, None]
    likely = jnp.exp(scaled - scaled.max(axis=1, keepdims=True))
    kept = lax.cond(
        jnp.any(~is_greedy & ((min_p > 0) | (top_k > 0) | (top_p < 1))),
        lambda: keep(likely, min_p, top_k, top_p),
        lambda: jnp.ones(likely.shape, bool),
    )
    noisy = jnp.where(kept, scaled, -jnp.inf) + gumbel(logits.shape[1], seed_low, seed_high, ends)
    # Where a logit is NaN, nothing must hide it from `greedy`.
    noisy = jnp.where(jnp.isnan(scaled), jnp.nan, noisy)
    return greedy(jnp.where(is_greedy[:, None], logits, noisy))


def gumbel(vocabulary: int, seed_low: Array, seed_high: Array, positions: Array) -> Array:
    """Gumbel noise of every token at `positions` of sequences with those seeds; float32 [n, vocabulary]."""
    low, high, at = (lax.bitcast_convert_type(x, jnp.uint32) for x in (seed_low, seed_high, positions))
    first = _mix(_mix(low + jnp.uint32(0x9E3779B9)) ^ at)
    second = _mix(_mix(high ^ jnp.uint32(0x85EBCA6B)) + first)
    hashed = _mix(_mix(jnp.arange(vocabulary, dtype=jnp.uint32) ^ first[:, None]) + second[:, None])
    # The largest noise comes from the smallest values, where a float32 is finest. 31 bits: a CPU converts int32 faster.
    uniform = jnp.minimum(((hashed >> 1).astype(jnp.int32).astype(jnp.float32) + 0.5) * 2.0**-31, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _mix(x: Array) -> Array:
    """A bijection of 32 bits in which every bit of the input sways every bit of the output.

    Constants: github.com/skeeto/hash-prospector ("lowbias32", improved).
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)


def keep(likely: Array, min_p: Array, top_k: Array, top_p: Array) -> Array:
    """Which tokens the filters keep, bool [n, vocabulary]: min-p, then top-k of what that leaves, then top-p of that.

    `likely` is each token's probability divided by the largest one's, so it lies between 0 and 1, where the bits of a
    float are in the order of its value: the threshold is found bit by bit, by counting, without sorting. Tokens as
    likely as the last one kept are kept, too. Each filter is [n]; `top_k` 0 is off.
    """
    lines = likely.shape[0]
    floor = _bits(min_p)
    count = jnp.where(top_k > 0, top_k, likely.shape[1])

    def enough_tokens(at_least: Array) -> Array:
        return _sum(jnp.where(at_least, 1, 0)) >= count

    kth = lax.cond(jnp.any(top_k > 0), lambda: _search(likely, enough_tokens), lambda: jnp.zeros(lines, jnp.int32))
    floor = jnp.maximum(floor, kth)
    wanted = top_p * _sum(jnp.where(_bits(likely) >= floor[:, None], likely, 0))

    def enough_mass(at_least: Array) -> Array:
        return _sum(jnp.where(at_least, likely, 0)) >= wanted

    nucleus = lax.cond(jnp.any(top_p < 1), lambda: _search(likely, enough_mass), lambda: jnp.zeros(lines, jnp.int32))
    threshold = jnp.maximum(floor, jnp.where(top_p < 1, nucleus, 0))
    return _bits(likely) >= threshold[:, None]


def _search(likely: Array, enough: Callable[[Array], Array]) -> Array:
    """The bits of the largest threshold for which the tokens at or above it are `enough`; int32 [n]."""
    bits = _bits(likely)

    def one_bit(step: Array, found: Array) -> Array:
        tried = found | (1 << (29 - step))
        return jnp.where(enough(bits >= tried[:, None]), tried, found)

    return lax.fori_loop(0, 30, one_bit, jnp.zeros(likely.shape[0], jnp.int32))


def _bits(x: Array) -> Array:
    """Of float32 that are not negative: int32 in the same order."""
    return lax.bitcast_convert_type(x, jnp.int32)


def _sum(x: Array) -> Array:
    """Sum over the last axis; in two stages, of which a CPU can vectorise the longer."""
    lines, width = x.shape
    folded = jnp.pad(x, ((0, 0), (0, -width % 128))).reshape(lines, -1, 128)
    return folded.sum(axis=1).sum(axis=1)


def adjust(
    logits: Array, history: Array, params: RowParams, rows: Array, ends: Array, adjustments: Adjustments
) -> Array:
    """Logits after masks, biases, bans and penalties.

    `history` is int32 [rows, width], the tokens of all rows of the shard. Presence and frequency penalties count the
    output, the repetition penalty prompt and output.
    """
    use = adjustments.use
    logits = lax.cond(use[0], lambda: _mask(logits, adjustments.allowed), lambda: logits)
    logits = lax.cond(use[1], lambda x: _bias(x, adjustments), lambda x: x, logits)
    logits = lax.cond(use[2], lambda x: _ban(x, history, params, rows, ends, adjustments), lambda x: x, logits)
    return lax.cond(use[3], lambda x: _penalize(x, history, params, rows, ends), lambda x: x, logits)


def _mask(logits: Array, allowed: Array) -> Array:
    bits = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    bits = bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]]
    return jnp.where(bits == 1, logits, -jnp.inf)


def _bias(logits: Array, adjustments: Adjustments) -> Array:
    return logits.at[adjustments.bias_line, adjustments.bias_token].add(adjustments.bias, mode="drop")


def _ban(logits: Array, history: Array, params: RowParams, rows: Array, ends: Array, adjustments: Adjustments) -> Array:
    line = jnp.minimum(adjustments.ban_line, rows.shape[0] - 1)
    place = ends[line] - adjustments.ban_back
    stands = (history[rows[line], place] == adjustments.ban_token) & (place >= params.ints[rows[line], 1])
    banned = adjustments.ban_back == 0
    holds = jax.ops.segment_min(
        jnp.where(banned | stands, 1, 0), adjustments.ban_group, num_segments=adjustments.ban_group.shape[0]
    )
    value = jnp.where(banned & (holds[adjustments.ban_group] == 1), -jnp.inf, jnp.inf)
    return logits.at[adjustments.ban_line, adjustments.ban_token].min(value, mode="drop")


def _penalize(logits: Array, history: Array, params: RowParams, rows: Array, ends: Array) -> Array:
    presence, frequency, repetition = (params.floats[rows, column][:, None] for column in (3, 4, 5))
    prompt_len = params.ints[rows, 1]
    used = (params.floats[rows, 3:6] != jnp.array([0, 0, 1], jnp.float32)).any(axis=1)
    lines, vocabulary = logits.shape
    tokens = history[rows]

    def count(chunk: Array, counts: tuple[Array, Array]) -> tuple[Array, Array]:
        seen, output = counts
        at = chunk * _HISTORY_CHUNK + jnp.arange(_HISTORY_CHUNK)
        token = lax.dynamic_slice_in_dim(tokens, chunk * _HISTORY_CHUNK, _HISTORY_CHUNK, axis=1)
        exists = (at < ends[:, None]) & used[:, None]
        place = (jnp.arange(lines)[:, None], jnp.where(exists, token, vocabulary))
        is_output = jnp.where(at >= prompt_len[:, None], 1, 0)
        return seen.at[place].max(1, mode="drop"), output.at[place].add(is_output, mode="drop")

    zeros = jnp.zeros(logits.shape, jnp.int32)
    chunks = -(-jnp.where(used, ends, 0).max() // _HISTORY_CHUNK)
    seen, output = lax.fori_loop(0, chunks, count, (zeros, zeros))
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen > 0, repeated, logits)
    return logits - frequency * output - presence * (output > 0)


class Logprobs(NamedTuple):
    """Log-probabilities at the lines of a step, from the logits as the model gave them."""

    sampled: Array
    """float32 [n]: of the drawn token."""
    rank: Array
    """int32 [n]: how many tokens are at least as likely as the drawn one."""
    values: Array
    """float32 [n, TOP_LOGPROBS]: of the most likely tokens, falling."""
    tokens: Array
    """int32 [n, TOP_LOGPROBS]: which tokens those are."""
    norm: Array
    """float32 [n]: what to subtract from a logit to get its log-probability."""


def logprobs(logits: Array, drawn: Array) -> Logprobs:
    """Log-probabilities of the `drawn` tokens [n] and of the most likely ones."""
    norm = jax.nn.logsumexp(logits, axis=1)
    of_drawn = jnp.take_along_axis(logits, jnp.maximum(drawn, 0)[:, None], axis=1)
    rank = jnp.where(logits >= of_drawn, 1, 0).sum(axis=1)
    values, tokens = lax.top_k(logits, min(TOP_LOGPROBS, logits.shape[1]))
    return Logprobs(of_drawn[:, 0] - norm, rank, values - norm[:, None], tokens.astype(jnp.int32), norm)


def most_likely(logits: Float32, norm: Float32) -> tuple[Int32, Float32]:
    """On the host: all tokens of each line [n, vocabulary], the most likely first, and their log-probabilities.

    `norm` [n] is as in `Logprobs`.
    """
    values = logits - norm[:, None]
    tokens = np.argsort(-values, axis=1, kind="stable").astype(np.int32)
    return tokens, np.take_along_axis(values, tokens, axis=1)
