"""What a request must be like to be served at all."""

from bus.messages import AddRequest, Ints, KvPool, Sampling
from bus.sampling import fault_of
from bus.wire import unpack_ints
from ranks.scheduler import Refused


class Checks:
    """Refuses, in one sentence, what can never be served with a pool."""

    def __init__(self, pool: KvPool, usable_blocks: int) -> None:
        """`usable_blocks` are those of the pool that the scheduler gives out."""
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
        if num_prompt == 0:
            raise Refused("the prompt is empty; at least one token is needed")
        self.check_length(num_prompt + num_output)
        self.check_tokens(request.prompt_token_ids)
        self.check_tokens(request.output_token_ids)
        self.check_sampling(request.sampling, num_output)

    def check_length(self, num_tokens: int) -> None:
        """Refuse more tokens, prompt and output together, than leave room for another."""
        if num_tokens < self.max_len:
            return
        pool = self._pool
        if self.max_len < pool.max_model_len:
            limit = f"{self._usable_blocks} KV blocks of {pool.block_size} tokens hold {self.max_len}"
        else:
            limit = f"the context holds {self.max_len}"
        raise Refused(f"the request has {num_tokens} tokens; {limit}, one of which must be left for output")

    def check_tokens(self, tokens: Ints) -> None:
        """Refuse tokens that are not in the vocabulary."""
        array = unpack_ints(tokens)
        if array.size and not 0 <= array.min() <= array.max() < self._pool.vocab_size:
            raise Refused(f"there are token ids outside the vocabulary; they must be 0 to {self._pool.vocab_size - 1}")

    def check_sampling(self, sampling: Sampling, num_output: int) -> None:
        """Refuse parameters that no sequence with so many output tokens already can be sampled with."""
        if sampling.max_tokens <= num_output:
            raise Refused(f"max_tokens is {sampling.max_tokens}; it must be at least {num_output + 1}")
        if sampling.min_tokens > sampling.max_tokens:
            raise Refused(f"min_tokens is {sampling.min_tokens}; it must be from 0 to {sampling.max_tokens}")
        if fault := fault_of(sampling, self._pool.vocab_size):
            raise Refused(fault)
