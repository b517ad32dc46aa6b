"""Structured output on the embedded model at temperature 1: whatever is asked for, every answer fits it."""

import json
import re
from typing import Any

import httpx2 as httpx
import jsonschema
import pytest

from bench.structured import fault_of, schema_of
from bus.messages import Grammar
from frontend.client import Client, EngineError
from tests.engine import Engine

pytestmark = pytest.mark.timeout(500)  # the first test starts the engine, perhaps with nothing compiled

HOT = {"temperature": 1.0, "max_tokens": 300}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def ask(engine: Engine, **options: Any) -> httpx.Response:
    url = f"http://{engine.config.host}:{engine.port()}/v1"
    model = httpx.get(f"{url}/models").json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "Say something."}]} | HOT | options
    return httpx.post(f"{url}/chat/completions", json=body, timeout=300)


def said(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("number", [3, 60, 110, 170, 199])
def test_json_by_schemas_of_growing_nastiness(engine: Engine, number: int) -> None:
    schema = schema_of(number)
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    response = ask(engine, response_format=wanted, seed=number, n=3)
    assert response.status_code == 200, response.text
    for choice in response.json()["choices"]:
        assert fault_of(choice["message"]["content"], schema) == ""


def test_regex_choice_grammar_and_tool_calls(engine: Engine) -> None:
    pattern = r"[A-Z][a-z]{1,8}( [a-z]{1,8}){0,4}\."
    assert re.fullmatch(pattern, said(ask(engine, structured_outputs={"regex": pattern})))
    assert said(ask(engine, structured_outputs={"choice": ["red", "green", "blau"]})) in ("red", "green", "blau")
    lark = 'start: sum\nsum: NUMBER (" + " NUMBER){1,3}\nNUMBER: /[0-9]{1,3}/'
    assert re.fullmatch(r"[0-9]{1,3}( \+ [0-9]{1,3}){1,3}", said(ask(engine, structured_outputs={"grammar": lark})))
    tags = {"structures": [{"begin": "<p>", "schema": PERSON, "end": "</p>"}], "triggers": ["<p"]}
    biased = ask(engine, response_format={"type": "structural_tag", **tags}, max_tokens=40)
    for found in re.findall("<p>(.*?)</p>", said(biased)):
        jsonschema.validate(json.loads(found), PERSON)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_grammar_is_answered_with_400(engine: Engine, stream: bool) -> None:
    for asked, words in (
        ({"structured_outputs": {"regex": "("}}, "unclosed group"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "nothing"),
        ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "NoExtension"),
        ({"structured_outputs": {"regex": "(" * 2000 + ")" * 2000}}, "nest in more than"),
    ):
        response = ask(engine, stream=stream, **asked)
        message = response.json()["error"]["message"]
        assert response.status_code == 400, response.text
        assert message.startswith("the grammar cannot be used: ")
        assert words in message


def test_the_same_over_the_client_bus_and_in_a_session(client: Client) -> None:
    person = Grammar(kind="json", spec=json.dumps(PERSON))
    for options in ({"text_output": True}, {"text_output": True, "min_tokens": 200}):
        (answer,) = client.complete("Somebody:", grammar=person, **options | HOT)
        jsonschema.validate(json.loads(answer.text), PERSON)
        assert answer.finished.reason == "stop"
    (tokens,) = client.complete([1, 2, 3], grammar=person, text_output=False, **HOT)
    assert tokens.finished.reason == "stop"
    with pytest.raises(EngineError, match="the grammar cannot be used"):
        client.complete([1, 2, 3], grammar=Grammar(kind="regex", spec="("), text_output=False)
    with client.session("Somebody:", grammar=person, **HOT) as session:
        text = "".join(piece.text for piece in session.first)
        jsonschema.validate(json.loads(text), PERSON)
        colour = Grammar(kind="choice", spec='["red", "green"]')
        turn = session.append(" Their colour:", grammar=colour, **HOT)
        assert "".join(piece.text for piece in turn) in ("red", "green")
        refused = session.append(" Bad:", grammar=Grammar(kind="json", spec="{"), **HOT)
        with pytest.raises(EngineError, match="the grammar cannot be used"):
            refused.end()
        free = session.append(" And:", temperature=1.0, max_tokens=8, ignore_eos=True)
        assert free.end().output_tokens == 8


def test_many_at_once_with_the_same_schema(client: Client) -> None:
    person = Grammar(kind="json", spec=json.dumps(PERSON))
    answers = client.complete("Somebody:", grammar=person, n=16, **HOT)
    for answer in answers:
        jsonschema.validate(json.loads(answer.text), PERSON)
    assert len({answer.text for answer in answers}) > 8
