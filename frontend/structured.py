"""Structured output: from what vLLM's API calls it to the grammars of the bus, and back.

Nothing is compiled here: the ranks say what is wrong with a grammar.
"""

import json
from typing import Any

import msgspec
from vllm.sampling_params import StructuredOutputsParams

from bus.messages import GRAMMAR_FAULT, Grammar
from frontend.errors import RequestError


def to_grammar(asked: StructuredOutputsParams) -> Grammar:
    """The grammar that is asked for.

    Raises:
        RequestError: it is not of its kind at all, or asks for what this engine does not do.
    """
    if asked.disable_additional_properties:
        raise _refused("disable_additional_properties is not supported; write additionalProperties into the schema")
    spacing = {"whitespace_pattern": asked.whitespace_pattern} if asked.whitespace_pattern else {}
    if asked.disable_any_whitespace:
        spacing["whitespace_flexible"] = False
    if asked.json is not None:
        return _schema(asked.json, spacing)
    if asked.json_object is not None:
        if not asked.json_object:
            raise _refused("json_object is false; it must be true, or left out")
        return _schema({"type": "object"}, spacing) if spacing else Grammar(kind="json_object")
    if spacing:
        raise _refused("whitespace_pattern and disable_any_whitespace are for JSON")
    if asked.choice is not None:
        if not asked.choice:
            raise _refused("choice is empty; there must be at least one")
        return Grammar(kind="choice", spec=json.dumps(asked.choice))
    if asked.regex is not None:
        return Grammar(kind="regex", spec=asked.regex)
    if asked.structural_tag is not None:
        return Grammar(kind="structural_tag", spec=asked.structural_tag)
    return Grammar(kind="grammar", spec=asked.grammar)


def from_grammar(grammar: Grammar) -> StructuredOutputsParams:
    """The same as vLLM calls it.

    Raises:
        RequestError: it is not of its kind at all.
    """
    if grammar.kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    spec: Any = grammar.spec
    if grammar.kind == "choice":
        try:
            spec = msgspec.json.decode(spec, type=list[str])
        except msgspec.DecodeError:
            raise _refused("choice must be a JSON list of texts") from None
    return StructuredOutputsParams(**{grammar.kind: spec})


def _schema(schema: str | dict[str, Any], spacing: dict[str, Any]) -> Grammar:
    """A schema, with what white space there may be as llguidance reads it from one."""
    if spacing:
        try:
            fields = json.loads(schema) if isinstance(schema, str) else schema
        except (ValueError, RecursionError) as error:
            raise _refused(f"the schema is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise _refused("the schema is no JSON object")
        schema = fields | {"x-guidance": spacing | fields.get("x-guidance", {})}
    return Grammar(kind="json", spec=schema if isinstance(schema, str) else json.dumps(schema))


def _refused(fault: str) -> RequestError:
    return RequestError("invalid", GRAMMAR_FAULT + fault)
