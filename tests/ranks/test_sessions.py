"""Sessions on the native scheduler: every corner of docs/sessions.md that no frontend is needed for."""

from tests.ranks.session_traces import SessionTrace, play


def test_random_sessions() -> None:
    happened = play(SessionTrace, range(25), num_sessions=8, num_turns=25)
    assert min(happened.values()) >= 10, happened
