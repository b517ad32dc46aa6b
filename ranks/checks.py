"""What a request must be like to be served at all."""

from bus.messages import AddRequest, AppendInput, Ints, KvPool, MultimodalFeature, Sampling
from bus.sampling import fault_of
from bus.wire import all_below, unpack_ints
from ranks.scheduler import Refused


class Checks:
    """Refuses, in one sentence, what can never be served with a pool."""

    def __init__(self, pool: KvPool, usable_blocks: int, most_prompt_logprobs: int) -> None:
        """`usable_blocks` are those of the pool that the scheduler gives out.

        `most_prompt_logprobs` is what messages have room for, see `Config`.
        """
        self._most_prompt_logprobs = most_prompt_logprobs
        self._pool = pool
        self._usable_blocks = usable_blocks
        self.max_len = min(pool.max_model_len, usable_blocks * pool.block_size)
        """The length at which every request ends. One that fits the pool alone can finish: others make room for it."""

    def check(self, request: AddRequest) -> None:
        """Look at a new request.

        Raises:
            Refused: it cannot be served; the text says why.
        """
        num_prompt = request.prompt_token_ids.nbytes // 4
        num_output = request.output_token_ids.nbytes // 4
        if num_prompt == 0 and not (request.resumable and num_output == 0):
            raise Refused("the prompt is empty; at least one token is needed")
        if request.turn < 1:
            raise Refused(f"turn is {request.turn}; turns count from 1")
        self.check_features(request.mm_features, num_prompt)
        self.check_length(num_prompt + num_output, room=1 if request.sampling.pooling is None else 0)
        self.check_tokens(request.prompt_token_ids)
        self.check_tokens(request.output_token_ids)
        self.check_sampling(request.sampling, num_output)
        self.check_prompt_logprobs(request.sampling, in_session=request.resumable)
        self.check_pooling(request.sampling, in_session=request.resumable)

    def check_turn(self, turn: AppendInput, sampling: Sampling, num_held: int) -> None:
        """Look at an input for a session that has `num_held` tokens at least when it comes to it.

        Raises:
            Refused: it cannot be served; the text says why.
        """
        num_new = turn.prompt_token_ids.nbytes // 4
        self.check_room(num_held, num_new)
        self.check_features(turn.mm_features, num_new)
        self.check_tokens(turn.prompt_token_ids)
        self.check_sampling(sampling, 0)
        self.check_prompt_logprobs(sampling, in_session=True)
        self.check_pooling(sampling, in_session=True)

    def check_room(self, num_held: int, num_new: int) -> None:
        """Refuse an input of `num_new` tokens that leaves no room for output in a session that has `num_held`."""
        if num_new and num_held + num_new >= self.max_len:
            raise Refused(
                f"the input has {num_new} tokens and the session {num_held}; {self._limit()}, "
                "one of which must be left for output"
            )

    def check_features(self, features: list[MultimodalFeature], num_tokens: int) -> None:
        """Refuse features that lie outside of the input of `num_tokens` that they come with."""
        for feature in features:
            if feature.length < 1 or not 0 <= feature.offset <= num_tokens - feature.length:
                raise Refused(
                    f"a feature has offset {feature.offset} and length {feature.length}; it must lie in the input, "
                    f"which has {num_tokens} tokens"
                )

    def check_length(self, num_tokens: int, room: int = 1) -> None:
        """Refuse more tokens, prompt and output together, than leave `room` for others."""
        if num_tokens + room > self.max_len:
            output = ", one of which must be left for output" if room else ""
            raise Refused(f"the request has {num_tokens} tokens; {self._limit()}{output}")

    def _limit(self) -> str:
        if self.max_len < self._pool.max_model_len:
            return f"{self._usable_blocks} KV blocks of {self._pool.block_size} tokens hold {self.max_len}"
        return f"the context holds {self.max_len}"

    def check_tokens(self, tokens: Ints) -> None:
        """Refuse tokens that are not in the vocabulary."""
        if tokens.nbytes and not all_below(unpack_ints(tokens), self._pool.vocab_size):
            raise Refused(f"there are token ids outside the vocabulary; they must be 0 to {self._pool.vocab_size - 1}")

    def check_sampling(self, sampling: Sampling, num_output: int) -> None:
        """Refuse parameters that no sequence with so many output tokens already can be sampled with."""
        if sampling.max_tokens <= num_output:
            raise Refused(f"max_tokens is {sampling.max_tokens}; it must be at least {num_output + 1}")
        if sampling.min_tokens > sampling.max_tokens:
            raise Refused(f"min_tokens is {sampling.min_tokens}; it must be from 0 to {sampling.max_tokens}")
        if fault := fault_of(sampling, self._pool.vocab_size):
            raise Refused(fault)

    def check_prompt_logprobs(self, sampling: Sampling, in_session: bool) -> None:
        """Refuse to tell log-probabilities of a session's context, of which most is not computed, or too many."""
        asked = sampling.prompt_logprobs
        if asked is None:
            return
        if in_session:
            raise Refused("prompt_logprobs are not available in a session; leave them out")
        if (self._pool.vocab_size if asked < 0 else asked) > self._most_prompt_logprobs:
            raise Refused(
                f"prompt_logprobs is {asked}; a step of max_num_batched_tokens with more than "
                f"{self._most_prompt_logprobs} for each token would not fit into a message (max_message_bytes)"
            )

    def check_pooling(self, sampling: Sampling, in_session: bool) -> None:
        """Refuse to pool a session's context, of which most is not computed."""
        if sampling.pooling is not None and in_session:
            raise Refused("pooling is not available in a session; leave it out")
