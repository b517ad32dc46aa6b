"""What a request must be like to be served at all."""

from bus.messages import AddRequest, Ints, KvPool
from bus.sampling import fault_of
from bus.wire import unpack_ints
from ranks.scheduler import Refused


class Checks:
    """Refuses, in one sentence, what can never be served with a pool."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self.max_len = min(pool.max_model_len, pool.num_blocks * pool.block_size)
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
        self._check_length(num_prompt + num_output)
        self._check_tokens(request.prompt_token_ids)
        self._check_tokens(request.output_token_ids)
        sampling = request.sampling
        if sampling.max_tokens <= num_output:
            raise Refused(f"max_tokens is {sampling.max_tokens}; it must be at least {num_output + 1}")
        if sampling.min_tokens > sampling.max_tokens:
            raise Refused(f"min_tokens is {sampling.min_tokens}; it must be from 0 to {sampling.max_tokens}")
        if fault := fault_of(sampling, self._pool.vocab_size):
            raise Refused(fault)

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens < self.max_len:
            return
        pool = self._pool
        if self.max_len < pool.max_model_len:
            limit = f"{pool.num_blocks} KV blocks of {pool.block_size} tokens hold {self.max_len}"
        else:
            limit = f"the context holds {self.max_len}"
        raise Refused(f"the request has {num_tokens} tokens; {limit}, one of which must be left for output")

    def _check_tokens(self, tokens: Ints) -> None:
        array = unpack_ints(tokens)
        if array.size and not 0 <= array.min() <= array.max() < self._pool.vocab_size:
            raise Refused(f"there are token ids outside the vocabulary; they must be 0 to {self._pool.vocab_size - 1}")
