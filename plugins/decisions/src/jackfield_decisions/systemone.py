"""The wire of `/v1/systemone`, TypeSafe's shape: questions and answers by name, of the types noul (yes or no), choice and score."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from jackfield import BadRequest, Context, InvalidBody, Request, convert_body
from jackfield_decisions.questions import (
    MAX_LEVELS,
    MAX_OPTIONS,
    Content,
    Question,
    choice_confidence,
    content_text,
    expected,
    score_confidence,
)

__all__ = ["SystemOneRequest", "SystemOneResponse", "systemone_questions", "systemone_response", "systemone_state"]

Instructions = Annotated[Content | None, Meta(description="What is asked: a text, or JSON that is read as text.")]
Level = Annotated[str, Meta(min_length=1)] | dict[str, Any] | list[Any]


class NoulQuestion(Struct, frozen=True, kw_only=True, tag_field="type", tag="noul"):
    """Yes or no. One of `instructions` and `criteria` is needed."""

    instructions: Instructions = None
    criteria: Annotated[
        dict[Literal["true", "false"], Content | None] | None, Meta(description="What yes means (`true`), and what no (`false`).")
    ] = None


class ChoiceQuestion(Struct, frozen=True, kw_only=True, tag_field="type", tag="choice"):
    """One of several."""

    instructions: Instructions = None
    criteria: Annotated[
        dict[Annotated[str, Meta(min_length=1)], Content | None],
        Meta(min_length=2, max_length=MAX_OPTIONS, description="The options by name, each with its description or null."),
    ]


class ScoreQuestion(Struct, frozen=True, kw_only=True, tag_field="type", tag="score"):
    """How much."""

    instructions: Instructions = None
    criteria: Annotated[list[Level], Meta(min_length=2, max_length=MAX_LEVELS, description="The levels, from the lowest.")]


AnyQuestion = NoulQuestion | ChoiceQuestion | ScoreQuestion
_KINDS: dict[str, type[AnyQuestion]] = {"noul": NoulQuestion, "choice": ChoiceQuestion, "score": ScoreQuestion}
# Decoded one by one by `_question`, which can name them: msgspec's errors say `[...]` for a key of an object.
_, _COMPONENTS = msgspec.json.schema_components(_KINDS.values())
Questions = Annotated[
    dict[str, Annotated[Any, Meta(extra_json_schema={"oneOf": [_COMPONENTS[kind.__name__] for kind in _KINDS.values()]})]],
    Meta(description="The questions by name; the answers have the same names.", extra_json_schema={"minProperties": 1}),
]


class SystemOneRequest(Request, frozen=True, kw_only=True):
    """Questions about one state."""

    state: Annotated[Content, Meta(description="What the questions are about: a text, or JSON that is read as text.")]
    questions: Questions
    assets: Annotated[dict[str, Any] | None, Meta(description="Refused unless empty: images are not read.")] = None


class NoulAnswer(Struct, frozen=True, kw_only=True, tag_field="type", tag="noul"):
    """The probability of yes."""

    noul: float


class ChoiceAnswer(Struct, frozen=True, kw_only=True, tag_field="type", tag="choice"):
    """The likeliest option. confidence: 1 when it has all the probability, 0 when all options are alike."""

    choice: str
    confidence: float
    probabilities: dict[str, float]


class ScoreAnswer(Struct, frozen=True, kw_only=True, tag_field="type", tag="score"):
    """score: the expected level, from 0. legend, probabilities: by the level's number as text.

    confidence: 1 when one level has all the probability, less the farther the rest lies from it.
    """

    score: float
    legend: dict[str, Any]
    confidence: float
    probabilities: dict[str, float]


class SystemOneUsage(Struct, frozen=True, kw_only=True):
    """Tokens of the prompts, one a question; nothing is generated. prompt_tokens: input_tokens by its name in other answers."""

    input_tokens: int
    output_tokens: int = 0
    prompt_tokens: int
    total_tokens: int


class SystemOneResponse(Struct, frozen=True, kw_only=True):
    """An answer for each question, by its name, in the order of the request."""

    model: str
    answers: dict[str, NoulAnswer | ChoiceAnswer | ScoreAnswer]
    usage: SystemOneUsage


def systemone_state(request: SystemOneRequest) -> str:
    """The state as text. Raises: BadRequest for images, and for JSON that is nested too deeply."""
    if request.assets:
        raise BadRequest("Images are not served: assets must be left out, or be empty.", param="assets")
    return content_text(request.state, "state")


def systemone_questions(request: SystemOneRequest) -> list[Question]:
    """In the order of the request. Raises: BadRequest naming the question and its field."""
    return [_question(f"questions.{name[:100]}", given) for name, given in request.questions.items()]


def _question(param: str, given: Any) -> Question:
    decoded = _decode(param, given)
    instructions = content_text(decoded.instructions, f"{param}.instructions")
    where = f"{param}.criteria"
    if isinstance(decoded, NoulQuestion):
        criteria = decoded.criteria or {}
        meanings = tuple(content_text(criteria.get(side), where) for side in ("true", "false"))
        if not any(text.strip() for text in (instructions, *meanings)):
            raise BadRequest(f"{param} asks nothing: it has neither instructions nor criteria.", param=f"{param}.instructions")
        return Question(kind="yes_no", instructions=instructions, options=meanings, param=param)
    if isinstance(decoded, ChoiceQuestion):
        described = [(name, content_text(content, where)) for name, content in decoded.criteria.items()]
        options = tuple(f"{name}: {text}" if text else name for name, text in described)
        return Question(kind="choice", instructions=instructions, options=options, param=param)
    levels = tuple(content_text(level, where) for level in decoded.criteria)
    return Question(kind="score", instructions=instructions, options=levels, param=param)


def _decode(param: str, given: Any) -> AnyQuestion:
    if not isinstance(given, dict):
        raise BadRequest(f"{param} must be an object with a type.", param=param)
    kind = _KINDS.get(given["type"]) if isinstance(given.get("type"), str) else None
    if kind is None:
        what = f"is {given['type']!r:.100}" if "type" in given else "is missing"
        raise BadRequest(f"The type of {param} {what}; it must be {', '.join(_KINDS)}.", param=f"{param}.type")
    try:
        decoded: AnyQuestion = convert_body(given, kind)
    except InvalidBody as error:
        field = f"{param}.{error.param or 'criteria'}"  # of a key there is no path, and nothing else has keys
        reason = error.message.partition(": ")[2].partition(" - at ")[0].removesuffix(".")
        raise InvalidBody(f"Invalid value for `{field}`: {reason}.", param=field) from None
    return decoded


def systemone_response(ctx: Context[Any], probabilities: list[list[float]], tokens: int) -> SystemOneResponse:
    """probabilities: of each question's options, in the order of the request. tokens: of the prompts."""
    request: SystemOneRequest = ctx.request
    pairs = zip(request.questions.items(), probabilities, strict=True)
    return SystemOneResponse(
        model=ctx.model.id,
        answers={name: _answer(given, probs) for (name, given), probs in pairs},
        usage=SystemOneUsage(input_tokens=tokens, prompt_tokens=tokens, total_tokens=tokens),
    )


def _answer(given: dict[str, Any], probs: list[float]) -> NoulAnswer | ChoiceAnswer | ScoreAnswer:
    if given["type"] == "noul":
        return NoulAnswer(noul=probs[0])
    if given["type"] == "choice":
        names = list(given["criteria"])
        best = names[probs.index(max(probs))]
        return ChoiceAnswer(choice=best, confidence=choice_confidence(probs), probabilities=dict(zip(names, probs, strict=True)))
    return ScoreAnswer(
        score=expected(probs),
        legend={str(level): content for level, content in enumerate(given["criteria"])},
        confidence=score_confidence(probs),
        probabilities={str(level): prob for level, prob in enumerate(probs)},
    )
