"""The wire of `/v1/decisions`, OpenAI's shape: a list of questions of the types predicate (yes or no), choice and score."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, field

from jackfield import BadRequest, Context, EmptyPrompt, Request
from jackfield_decisions.questions import MAX_LEVELS, MAX_OPTIONS, Question, choice_confidence, content_text, expected, score_confidence

__all__ = ["DecisionsRequest", "DecisionsResponse", "decisions_input", "decisions_questions", "decisions_response"]

Text = Annotated[str, Meta(min_length=1)]
# Kinds of parts that are text, and the field that has it.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_ROLES = ("user", "system", "developer", "assistant")


class DecisionsPart(Struct, frozen=True, kw_only=True):
    """A piece of a message or of a question: a text (`input_text`, `output_text`, `refusal`), or JSON that is read as text."""

    type: Annotated[str, Meta(description="`input_text`, `output_text`, `refusal` or `input_json`; images and files are refused.")]
    text: str | None = None
    refusal: str | None = None
    data: Annotated[dict[str, Any] | list[Any] | None, Meta(description="Of an `input_json`.")] = None


class DecisionsMessage(Struct, frozen=True, kw_only=True):
    """A message of a conversation. Calls of functions, and what they gave, are refused."""

    type: str | None = None
    role: Annotated[str | None, Meta(description="user, system, developer or assistant.")] = None
    content: str | list[DecisionsPart] | None = None


Name = Annotated[str | None, Meta(description="Comes back with the answer. No two questions may have the same.")]
Instructions = Annotated[
    Text | Annotated[list[DecisionsPart], Meta(min_length=1)], Meta(description="What is asked: a text, or parts of text and JSON.")
]
Description = Annotated[str | None, Meta(description="What it stands for, for the model to read.")]


class PredicateQuestion(Struct, frozen=True, kw_only=True, tag_field="type", tag="predicate"):
    """How likely it is that something holds."""

    instructions: Instructions
    name: Name = None


class DecisionsOption(Struct, frozen=True, kw_only=True):
    """An option. A text and a boolean are two, be they written alike."""

    value: Text | bool
    description: Description = None


class OptionsQuestion(Struct, frozen=True, kw_only=True, tag_field="type", tag="choice"):
    """One of several."""

    instructions: Instructions
    choices: Annotated[list[DecisionsOption], Meta(min_length=2, max_length=MAX_OPTIONS, description="The options.")]
    name: Name = None


class DecisionsLevel(Struct, frozen=True, kw_only=True):
    """A level of a scale."""

    label: Text
    description: Description = None


class LevelsQuestion(Struct, frozen=True, kw_only=True, tag_field="type", tag="score"):
    """How much."""

    instructions: Instructions
    levels: Annotated[list[DecisionsLevel], Meta(min_length=2, max_length=MAX_LEVELS, description="The levels, from the lowest.")]
    name: Name = None


AnyQuestion = PredicateQuestion | OptionsQuestion | LevelsQuestion


class DecisionsRequest(Request, frozen=True, kw_only=True):
    """Questions about one input."""

    input: Annotated[str | list[DecisionsMessage], Meta(description="What the questions are about: a text, or messages.")]
    questions: Annotated[list[AnyQuestion], Meta(description="The questions; the answers come in their order.")]
    safety_identifier: Annotated[str | None, Meta(description="Accepted for OpenAI's clients; not used.")] = None
    prompt_cache_key: Annotated[str | None, Meta(description="Accepted for OpenAI's clients; not used.")] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, Meta(description="Accepted for OpenAI's clients; not used.")] = None


class PredicateAnswer(Struct, frozen=True, kw_only=True, tag_field="type", tag="predicate"):
    """The probability that it holds."""

    name: str | None
    probability: float


class OptionProbability(Struct, frozen=True, kw_only=True):
    """Of an option, by its value."""

    value: str | bool
    probability: float


class OptionAnswer(Struct, frozen=True, kw_only=True, tag_field="type", tag="choice"):
    """The likeliest option. confidence: 1 when it has all the probability, 0 when all options are alike."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[OptionProbability]


class LevelProbability(Struct, frozen=True, kw_only=True):
    """Of a level, by its number from 0."""

    value: int
    label: str
    probability: float


class LevelAnswer(Struct, frozen=True, kw_only=True, tag_field="type", tag="score"):
    """score: the expected level, from 0.

    confidence: 1 when one level has all the probability, less the farther the rest lies from it.
    """

    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]


class InputDetails(Struct, frozen=True, kw_only=True):
    """What came from a cache, and went into it."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True, kw_only=True):
    """What was thought."""

    reasoning_tokens: int = 0


class DecisionsUsage(Struct, frozen=True, kw_only=True):
    """Tokens of the prompts, one a question; nothing is generated. prompt_tokens: input_tokens by its name in other answers."""

    input_tokens: int
    input_tokens_details: InputDetails = field(default_factory=InputDetails)
    output_tokens: int = 0
    output_tokens_details: OutputDetails = field(default_factory=OutputDetails)
    prompt_tokens: int
    total_tokens: int


class DecisionsResponse(Struct, frozen=True, kw_only=True):
    """Answers in the order of the questions."""

    model: str
    answers: list[PredicateAnswer | OptionAnswer | LevelAnswer]
    usage: DecisionsUsage


def decisions_input(request: DecisionsRequest) -> str:
    """The input as one text; where others than the user speak, with who says what. Raises: BadRequest naming the message or its part."""
    if isinstance(request.input, str):
        return request.input
    if not request.input:
        raise EmptyPrompt("input is empty; at least one message is needed.", param="input")
    said = [_message(message, f"input[{place}]") for place, message in enumerate(request.input)]
    if all(role == "user" for role, _ in said):
        return "\n\n".join(text for _, text in said)
    return "\n\n".join(f"{role}: {text}" for role, text in said)


def _message(message: DecisionsMessage, param: str) -> tuple[str, str]:
    """Who speaks, and what."""
    if message.type not in (None, "message"):
        raise BadRequest(f"An item of type {message.type[:50]!r} is not served; only messages are.", param=f"{param}.type")
    if message.role not in _ROLES:
        raise BadRequest(f"A message's role must be {', '.join(_ROLES)}.", param=f"{param}.role")
    if message.content is None:
        raise BadRequest("A message needs its content.", param=f"{param}.content")
    return message.role, _text(message.content, f"{param}.content")


def _text(content: str | list[DecisionsPart], param: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{param}[{place}]") for place, part in enumerate(content))


def _part(part: DecisionsPart, param: str) -> str:
    if part.type == "input_json" and part.data is not None:
        return content_text(part.data, param)
    text: str | None = getattr(part, _TEXTS[part.type]) if part.type in _TEXTS else None
    if text is None:
        known = {**_TEXTS, "input_json": "data"}
        lacking = f" without its {known[part.type]}" if part.type in known else ""
        raise BadRequest(f"A content part of type {part.type[:50]!r}{lacking} is not served; only text is.", param=param)
    return text


def decisions_questions(request: DecisionsRequest) -> list[Question]:
    """In the order of the request. Raises: BadRequest naming the question's field, for a name or a value that is there twice too."""
    names: set[str] = set()
    for place, given in enumerate(request.questions):
        if given.name is None:
            continue
        if given.name in names:
            raise BadRequest(f"Two questions have the name {given.name[:100]!r}.", param=f"questions[{place}].name")
        names.add(given.name)
    return [_question(given, f"questions[{place}]") for place, given in enumerate(request.questions)]


def _question(given: AnyQuestion, param: str) -> Question:
    instructions = _text(given.instructions, f"{param}.instructions")
    if not instructions.strip():
        raise BadRequest(f"{param} asks nothing: its instructions are empty.", param=f"{param}.instructions")
    if isinstance(given, PredicateQuestion):
        return Question(kind="yes_no", instructions=instructions, options=("", ""), param=param)
    if isinstance(given, OptionsQuestion):
        values = [(type(option.value), option.value) for option in given.choices]
        for place, value in enumerate(values):
            if value in values[:place]:
                raise BadRequest(f"Two choices have the value {value[1]!r:.100}.", param=f"{param}.choices[{place}].value")
        options = tuple(_option(_shown(option.value), option.description) for option in given.choices)
        return Question(kind="choice", instructions=instructions, options=options, param=param)
    levels = tuple(_option(level.label, level.description) for level in given.levels)
    return Question(kind="score", instructions=instructions, options=levels, param=param)


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _option(name: str, description: str | None) -> str:
    return f"{name}: {description}" if description else name


def decisions_response(ctx: Context[Any], probabilities: list[list[float]], tokens: int) -> DecisionsResponse:
    """probabilities: of each question's options, in the order of the request. tokens: of the prompts."""
    request: DecisionsRequest = ctx.request
    return DecisionsResponse(
        model=ctx.model.id,
        answers=[_answer(given, probs) for given, probs in zip(request.questions, probabilities, strict=True)],
        usage=DecisionsUsage(input_tokens=tokens, prompt_tokens=tokens, total_tokens=tokens),
    )


def _answer(given: AnyQuestion, probs: list[float]) -> PredicateAnswer | OptionAnswer | LevelAnswer:
    if isinstance(given, PredicateQuestion):
        return PredicateAnswer(name=given.name, probability=probs[0])
    if isinstance(given, OptionsQuestion):
        values = [option.value for option in given.choices]
        return OptionAnswer(
            name=given.name,
            choice=values[probs.index(max(probs))],
            confidence=choice_confidence(probs),
            probabilities=[OptionProbability(value=value, probability=prob) for value, prob in zip(values, probs, strict=True)],
        )
    return LevelAnswer(
        name=given.name,
        score=expected(probs),
        confidence=score_confidence(probs),
        probabilities=[
            LevelProbability(value=number, label=level.label, probability=prob)
            for number, (level, prob) in enumerate(zip(given.levels, probs, strict=True))
        ],
    )
