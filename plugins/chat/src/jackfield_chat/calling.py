"""Which tools an answer may call, and how: what a request says of it."""

from __future__ import annotations

import re
from typing import Any

from msgspec import Struct, structs

from jackfield import BadRequest, Dialect, Grammar, Model, Tool, ToolParser, compose_grammar, json_grammar
from jackfield_chat.request import ChatRequest, FunctionSpec, ToolChoice
from jackfield_chat.tools.hermes import HermesTools

__all__ = ["GENERIC", "Calling", "plan_calls"]

# For models that have no way of their own to write calls, or none that answers can be kept to.
GENERIC = HermesTools(Dialect(template=""))
MAX_TOOLS = 1000
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
# Keywords by which a schema says more of its properties than their names.
_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf"})


class Offer(Struct, frozen=True, kw_only=True):
    """A tool that the answer may call. shown: as templates take it. grammar: of its arguments."""

    tool: Tool
    shown: dict[str, Any]
    grammar: Grammar


class Calling(Struct, frozen=True, kw_only=True):
    """How an answer may call tools.

    offers: those that it may; none if it may call none. forced: it has to. named: it has to call this one, which the request has named.
    parser: how the model writes calls. native: the model's template shows tools, and past calls, in that way. in_system: what is told in
    words has its place in the system message.
    """

    offers: tuple[Offer, ...] = ()
    forced: bool = False
    named: bool = False
    parallel: bool = True
    parser: ToolParser = GENERIC
    native: bool = True
    in_system: bool = True

    def grammar(self, parser: ToolParser, model: Model, *, required: bool) -> Grammar | None:
        """Of an answer with calls; None if the parser has none. required: nothing but calls."""
        rules = parser.grammar([offer.tool for offer in self.offers], model.literal, required=required, parallel=self.parallel)
        if rules is None:
            return None
        return compose_grammar(rules, param="tools", parts={f"schema_{number}": offer.grammar for number, offer in enumerate(self.offers)})


def plan_calls(request: ChatRequest, model: Model) -> Calling:
    """What `tools`, `tool_choice` and `parallel_tool_calls` come to. Raises: BadRequest naming the field."""
    functions = _functions(request)
    mode, allowed, named = _chosen(request.tool_choice)
    if not functions and (mode == "required" or allowed):
        raise BadRequest("tool_choice asks for tools, and the request has none.", param="tool_choice")
    lacking = next((name for name in allowed if name not in functions), None)
    if lacking is not None:
        known = ", ".join(functions)[:1000]
        raise BadRequest(f"tool_choice names {lacking[:100]!r}, which is none of the tools: {known}.", param="tool_choice")
    own = model.tool_parser
    # A template that the request brings is taken to know tools: the operator has to allow it.
    brought = request.chat_template is not None
    if mode == "none" or not functions:
        return Calling(native=brought or model.template_knows_calls, parser=own or GENERIC)
    native = own is not None and (brought or model.template_knows_tools)
    return Calling(
        offers=tuple(
            _offer(function, f"tools[{position}].function.parameters", forced=mode == "required")
            for position, function in enumerate(functions.values())
            if not allowed or function.name in allowed
        ),
        forced=mode == "required",
        named=named,
        parallel=request.parallel_tool_calls is not False and not named,
        parser=own if native and own is not None else GENERIC,
        native=native,
        in_system=model.template_takes_system,
    )


def _functions(request: ChatRequest) -> dict[str, FunctionSpec]:
    """The functions by their names, in the request's order."""
    tools = request.tools or []
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"The request has {len(tools)} tools; {MAX_TOOLS} are taken.", param="tools")
    functions: dict[str, FunctionSpec] = {}
    for position, tool in enumerate(tools):
        if tool.type != "function" or tool.function is None:
            lacking = " without a function" if tool.type == "function" else ""
            raise BadRequest(f"A tool of type {tool.type[:50]!r}{lacking} is not served; only functions are.", param=f"tools[{position}]")
        name, param = tool.function.name, f"tools[{position}].function.name"
        if not _NAME.fullmatch(name):
            raise BadRequest(f"The function's name is {name[:130]!r}; it takes 1 to 128 letters, digits and _ . -", param=param)
        if name in functions:
            raise BadRequest(f"Two tools are named {name!r}.", param=param)
        functions[name] = tool.function
    return functions


def _chosen(choice: str | ToolChoice | None) -> tuple[str, list[str], bool]:
    """The mode (none, auto or required), the names that are allowed (none: all), and whether one is named."""
    if not isinstance(choice, ToolChoice):
        return choice or "auto", [], False
    if choice.type == "function" and choice.function is not None:
        return "required", [choice.function.name], True
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        allowed: list[str] = []
        for position, tool in enumerate(choice.allowed_tools.tools):
            if tool.type != "function" or tool.function is None:
                param = f"tool_choice.allowed_tools.tools[{position}]"
                raise BadRequest(f"A tool of type {tool.type[:50]!r} is not served; only functions are, by their name.", param=param)
            allowed.append(tool.function.name)
        if not allowed:
            raise BadRequest("tool_choice allows no function at all.", param="tool_choice.allowed_tools.tools")
        return choice.allowed_tools.mode, allowed, False
    raise BadRequest(f"tool_choice is of type {choice.type!r} and lacks `{choice.type}`.", param=f"tool_choice.{choice.type}")


def _offer(function: FunctionSpec, param: str, *, forced: bool) -> Offer:
    described = {} if function.description is None else {"description": function.description}
    given = function.parameters if function.parameters is not None else {"type": "object", "properties": {}}
    kind = given.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise BadRequest(f"The schema of {function.name!r} is of type {str(kind)[:50]!r}; arguments are an object.", param=param)
    return Offer(
        tool=Tool(name=function.name, parameters=given),
        shown={"type": "function", "function": {"name": function.name, **described, "parameters": given}},
        grammar=_arguments(given, param, strict=forced or bool(function.strict)),
    )


def _arguments(schema: dict[str, Any], param: str, *, strict: bool) -> Grammar:
    """What arguments are kept to: an object that has no other properties than those that are named, unless the schema says more of others.

    strict: what cannot be kept to is refused; else the keyword is left out of account, or, in the end, the schema.
    """
    properties, required = schema.get("properties"), schema.get("required", [])
    named = set(properties) if isinstance(properties, dict) and not schema.keys() & _OPEN else None
    if named is not None and isinstance(required, list) and all(isinstance(name, str) and name in named for name in required):
        schema = {**schema, "additionalProperties": False}
    schema = {**schema, "type": "object"}
    if strict:
        return json_grammar(schema, param=param)
    options = schema.get("x-guidance")
    lenient = {**schema, "x-guidance": {**(options if isinstance(options, dict) else {}), "lenient": True}}
    return structs.replace(json_grammar(lenient, param=param), instead=json_grammar({"type": "object"}, param=param))
