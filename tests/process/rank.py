"""A rank process with everything around it played by the test."""

from typing import Any

from bus.folds import fold
from bus.messages import AnyCommand, Error, KvPool, Load, Outputs, RequestEnded
from bus.wire import unpack_ints
from tests.engine import Engine
from tests.process.peers import FrontendSide, ToyExecutorSide
from tests.ranks.toy import request


class RankUnderTest:
    """A rank process, two frontends and an executor around it. Each test leaves it idle, unpaused and empty."""

    def __init__(self, engine: Engine, pool: KvPool) -> None:
        self.engine = engine
        self.executor = ToyExecutorSide(engine.config, pool)
        self.frontends = [FrontendSide(index, engine.config) for index in range(2)]
        self.handle = 0
        self.asked: set[type] = set()
        engine.start("rank-0")
        self.wait_for_pool()

    def wait_for_pool(self, there: bool = True) -> None:
        """Until every frontend's last word from the rank is that it can run requests, or cannot."""
        for frontend in self.frontends:
            frontend.wait(lambda frontend=frontend: self._has_pool(frontend) is there, "the rank's word of its pool")

    @staticmethod
    def _has_pool(frontend: FrontendSide) -> bool:
        core = frontend.core
        loads = [message for message in core.messages[core.began :] if isinstance(message, Load)]
        return 0 in core.peers and bool(loads) and loads[-1].num_blocks > 0

    def value(self, body: AnyCommand, frontend: int = 0) -> Any:
        """A command's value, through the fold that the frontend's core applies to it."""
        self.asked.add(type(body))
        return fold(type(body), [(0, self.frontends[frontend].value(body))])

    def error(self, body: AnyCommand) -> Error:
        self.asked.add(type(body))
        answer = self.frontends[0].answer(self.frontends[0].ask(body))
        assert isinstance(answer, Error), answer
        return answer

    def ask(self, body: AnyCommand, deadline_s: float | None = None) -> int:
        self.asked.add(type(body))
        return self.frontends[0].ask(body, deadline_s)

    def add(self, prompt: list[int], max_tokens: int = 8, frontend: int = 0, **options: Any) -> int:
        self.handle += 1
        self.frontends[frontend].send(request(self.handle, prompt, max_tokens, **options))
        return self.handle

    def tokens(self, handle: int, frontend: int = 0) -> list[int]:
        """Output of a request so far."""
        tokens = []
        for outputs in self.frontends[frontend].received(Outputs):
            handles, given = unpack_ints(outputs.handles).tolist(), unpack_ints(outputs.tokens).tolist()
            counts = unpack_ints(outputs.counts).tolist() or [1] * len(handles)
            owners = [owner for owner, count in zip(handles, counts, strict=True) for _ in range(count)]
            tokens += [token for owner, token in zip(owners, given, strict=True) if owner == handle]
        return tokens

    def ended(self, handle: int, frontend: int = 0) -> RequestEnded:
        """A request's end, when it has come."""
        side = self.frontends[frontend]

        def found() -> RequestEnded | None:
            for message in side.core.messages:
                for ended in message.ended if isinstance(message, Outputs) else ():
                    if ended.handle == handle:
                        return ended
            return None

        return side.wait(found, f"the end of request {handle}")  # type: ignore[no-any-return]

    def close(self) -> None:
        for side in (*self.frontends, self.executor):
            side.close()
