"""Random traces of clients that open, append, stop, close, abort, get lost and come back: all comes, and only once."""

from collections import Counter

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from bus import messages as m
from frontend.pieces import EngineError
from tests.frontend.session_world import STOP, UNWANTED, Client, Mine, World

INPUT = st.lists(st.integers(40, 60), max_size=4)


def append(world: World, client: Client, choice: int, text: bool, tokens: list[int]) -> None:
    def do(one: Mine) -> list[m.Message]:
        name = one.stream.request.request_id
        as_text = text and UNWANTED not in tokens
        asked = m.Append(
            request_id=name,
            text="".join(map(chr, tokens)) if as_text else None,
            prompt_token_ids=None if as_text else tokens,
        )
        try:
            turn, messages = one.stream.append(asked)
        except EngineError:
            return []  # it is being closed
        one.turns.append(turn)
        return messages

    world.act(client, choice, do)


def stop(one: Mine, kept: int) -> list[m.Message]:
    return one.stream.stop(one.stream.turns[0], kept) if one.stream.turns else []


EVENTS = ["open", "append", "append", "bad", "bad text", "refused", "stop", "close", "abort", "lose", "back"]
TIME = ["core hears", "rank takes", "rank steps", "core takes", "all read", "http takes", "http answers"]
EVENT = st.tuples(st.sampled_from(EVENTS + TIME * 3), st.integers(0, 1), st.integers(0, 5), st.booleans(), INPUT)


@settings(max_examples=80, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(EVENT, min_size=20, max_size=80))
def test_every_input_has_its_turn_or_its_refusal_whatever_happens(
    events: list[tuple[str, int, int, bool, list[int]]],
) -> None:
    world = World()
    for kind, index, choice, flag, tokens in events:
        happen(world, kind, world.clients[index], choice, flag, tokens)
    world.settle()
    check(world)


def happen(world: World, kind: str, client: Client, choice: int, flag: bool, tokens: list[int]) -> None:
    match kind:
        case "open":
            world.open(client, flag, tokens)
        case "append":
            append(world, client, choice, flag, tokens)
        case "bad":
            append(world, client, choice, False, [1000])
        case "bad text":
            append(world, client, choice, True, list(b"bad"))
        case "refused":
            append(world, client, choice, False, [UNWANTED])
        case "stop":
            world.act(client, choice, lambda one: stop(one, len(tokens)))
        case "close":
            world.act(client, choice, lambda one: one.stream.close())
        case "abort":
            world.act(client, choice, lambda one: one.stream.abort())
        case "lose":
            world.lose(client)
        case "back":
            world.come_back(client)
        case "core hears":
            world.core_hears()
        case "rank takes":
            world.rank_takes()
        case "rank steps":
            world.rank_steps(choice)
        case "core takes":
            world.core_takes()
        case "all read":
            world.core_has_read_all()
        case "http takes":
            world.http_takes()
        case "http answers":
            world.http_answers()


def check(world: World) -> None:
    said = Counter((tuple(tokens), kept) for _, _, tokens, kept in world.rank.said)
    heard: Counter[tuple[tuple[int, ...], int]] = Counter()
    for client in world.clients:
        for one in client.sessions:
            assert one.stream.over
            ends = [turn.finished for turn in one.turns if turn.finished is not None]
            assert [end.turn for end in ends] == list(range(1, len(ends) + 1))
            for turn in one.turns:
                assert turn.over
                unread = [token for piece in turn.inbox for token in piece.token_ids]
                if turn.finished is None:
                    continue
                assert unread == turn.token_ids
                assert len(turn.token_ids) == turn.finished.output_tokens
                if turn.finished.reason == "stop":
                    asked = turn.asked
                    wanted = (
                        list(map(ord, asked.text)) if asked.text is not None else list(asked.prompt_token_ids or [])
                    )
                    assert turn.token_ids == [*wanted, STOP]
                heard[tuple(turn.token_ids), turn.finished.kept_tokens] += 1
    assert heard <= said
    world.engine.tick(1.0)
    counters = world.engine.up[-1].counters
    assert (counters["sessions"], counters["unfinished_requests"]) == (0, 0)
    assert "invalid_outputs" not in counters
    assert not world.turns
