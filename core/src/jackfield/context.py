"""What a stage sees of a request: everything that is known by then, nothing that it could block on."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from msgspec import Struct

from jackfield.client import ModelCard
from jackfield.errors import BadRequest
from jackfield.outputs import Choice, PoolingOutputs
from jackfield.parsers import ReasoningParser, ToolParser
from jackfield.prompts import TokenizedPrompt
from jackfield.schema import Usage
from jackfield.settings import EndpointSettings

if TYPE_CHECKING:
    from jackfield.endpoint import Endpoint, Route

__all__ = ["Context", "Model"]

RequestT = TypeVar("RequestT")


class Model(Struct, frozen=True, kw_only=True):
    """A model as an endpoint sees it.

    id is what answers carry, whichever alias the client used. tokenizer_info: the tokenizer's settings, for `/tokenizer_info`.
    has_chat_template: whether a ChatPrompt can be rendered. template_knows_tools: whether its template shows tools to the model;
    template_knows_calls: and calls that it has made; template_takes_system: whether it takes a system message.
    tool_parser, reasoning_parser: how it writes calls and marks reasoning, None where that is not known or not wanted.
    tokens_apart: by name, the tokens that are no text to a grammar.
    """

    id: str
    card: ModelCard
    aliases: tuple[str, ...] = ()
    tokenizer_info: dict[str, Any] = {}
    has_chat_template: bool = False
    template_knows_tools: bool = False
    template_knows_calls: bool = False
    template_takes_system: bool = True
    tool_parser: ToolParser | None = None
    reasoning_parser: ReasoningParser | None = None
    tokens_apart: dict[str, int] = {}

    def literal(self, text: str) -> str:
        """How a grammar's rules write a text: as the token that it is, where this tokenizer has one that is no text, else in quotes."""
        token_id = self.tokens_apart.get(text)
        return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"

    def instruction(self, name: str | None, *, param: str = "prompt_name") -> str:
        """The instruction of that name, which goes before a text; without a name the model's default, or nothing.

        Raises: BadRequest naming `param` for a name that the model has not.
        """
        prompts = self.card.prompts
        if name is None:
            return prompts.get(self.card.default_prompt or "", "")
        if name not in prompts:
            known = ", ".join(map(repr, prompts)) or "none"
            raise BadRequest(f"Model `{self.id}` has no prompt named {name[:100]!r}; it has: {known}.", param=param)
        return prompts[name]

    def check_dimensions(self, dimensions: int, *, param: str = "dimensions") -> None:
        """Whether vectors may be cut to so many numbers: the native size always, others where the model's files or the operator say so.

        Raises: BadRequest naming `param`.
        """
        size = self.card.embedding_size or 0
        if dimensions == size:
            return
        if not self.card.matryoshka:
            raise BadRequest(
                f"Model `{self.id}` gives {size} numbers and is not marked as trained for fewer (Matryoshka); {param} = {dimensions} is "
                f"refused. Leave {param} out, or let the operator set matryoshka = true in [models.{self.id}].",
                param=param,
            )
        allowed = self.card.dimensions
        if not 1 <= dimensions <= size or (allowed and dimensions not in allowed):
            sizes = f"one of {', '.join(map(str, allowed))}" if allowed else f"from 1 to {size}"
            raise BadRequest(f"{param} = {dimensions} is refused: model `{self.id}` gives {sizes} numbers.", param=param)


class Context(Generic[RequestT]):
    """One request on its way through the stages.

    Attributes:
        request: the decoded body (or query of a GET).
        endpoint, route: who answers, and through which of its routes.
        settings: the endpoint's own settings, an instance of `endpoint.settings`.
        id: `<id_prefix>-<base>`; base is the X-Request-Id header, else the body's `request_id`, else random.
        created: Unix seconds. deadline: `time.monotonic()` seconds after which the answer is worth nothing, or None.
        headers: of the request, by name in any case; of a repeated one the first.
        model: the model that the request named, or the endpoint's first.
        operation: the engine operation that the core chose for this endpoint and model; None for a route without an engine.
        prompts: after tokenization: one a prompt of `preprocess`, in its order.
        outputs: after the engine (pooling operations).
        choices: of the operation `generate`, by index: whole when `build_response` runs, as far as they have come when `build_chunk` does.
        response_headers: a stage or a wrapper may add to them.
        timings_s: seconds a stage, for metrics.
        state: for plugins to keep something from one stage to the next, under their own name.
    """

    __slots__ = (
        "choices",
        "created",
        "deadline",
        "endpoint",
        "headers",
        "id",
        "model",
        "operation",
        "outputs",
        "prompts",
        "request",
        "response_headers",
        "route",
        "settings",
        "started",
        "state",
        "timings_s",
    )

    def __init__(
        self,
        *,
        request: RequestT,
        endpoint: Endpoint[Any, Any],
        route: Route,
        settings: EndpointSettings,
        id: str,
        model: Model,
        operation: str | None,
        headers: Mapping[str, str],
        deadline: float | None = None,
    ) -> None:
        self.request = request
        self.endpoint = endpoint
        self.route = route
        self.settings: Any = settings
        self.id = id
        self.created = int(time.time())
        self.started = time.monotonic()
        self.deadline = deadline
        self.headers = headers
        self.model = model
        self.operation = operation
        self.prompts: list[TokenizedPrompt] = []
        self.outputs: PoolingOutputs = PoolingOutputs(values={})
        self.choices: list[Choice] = []
        self.response_headers: dict[str, str] = {}
        self.timings_s: dict[str, float] = {}
        self.state: dict[str, Any] = {}

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, after truncation, special tokens included."""
        return sum([len(prompt.token_ids) for prompt in self.prompts])

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended: no delta comes after this one."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def usage(self) -> Usage:
        """Tokens of the prompts, each counted once, and of the choices as far as they have come."""
        prompt = self.num_prompt_tokens
        generated = sum(len(choice.token_ids) for choice in self.choices)
        details = {"cached_tokens": sum(choice.num_cached_tokens for choice in self._first_choices())} if self.choices else None
        return Usage(prompt_tokens=prompt, completion_tokens=generated, total_tokens=prompt + generated, prompt_tokens_details=details)

    def _first_choices(self) -> list[Choice]:
        return self.choices[:: max(len(self.choices) // max(len(self.prompts), 1), 1)]
