"""`/v1/systemone` and `/v1/decisions`: typed questions about one text, answered by the logits of the answers that are allowed.

Each question is a prompt, rendered by the model's chat template, and the token after it is a label. Which ids the labels have is the
tokenizer's to say, and a stage has none: so the labels go along as prompts of their own, and come out of the request again before it
meets the engine, by `with_labels`, as the ids whose logits are wanted.

A label has two forms: after a line's end, and after a space. Which of them a model says depends on how its template ends and on where its
tokenizer keeps the space (`ĠA` after `Assistant:`, `▁A` after `[/INST]`, but `A` after a line's end), so both are read and count together.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np
from msgspec import Struct, structs

from jackfield import (
    BadRequest,
    ChatPrompt,
    Context,
    Endpoint,
    EngineRequest,
    PoolingOutputs,
    PoolingParams,
    Prompt,
    Route,
    Submit,
    TextPrompt,
    UnsupportedOperation,
)
from jackfield_decisions.decisions import DecisionsRequest, DecisionsResponse, decisions_input, decisions_questions, decisions_response
from jackfield_decisions.questions import Question, shares
from jackfield_decisions.settings import DecisionsSettings
from jackfield_decisions.systemone import (
    SystemOneRequest,
    SystemOneResponse,
    systemone_questions,
    systemone_response,
    systemone_state,
)

__all__ = ["DecisionsEndpoint", "with_labels"]

_KEY = "decisions"
_TOKENS = "decisions.tokens"
# What a form of a label comes after. The first is a prompt without a label too, which tells where the label begins.
_LINE_END = "\n"
_FORMS = (_LINE_END, _LINE_END + " ")
# Of all prompts together, as many as the default body may have bytes: each question repeats the state, and a small body would make
# gigabytes of texts before the first of them is found to be too long.
MAX_CHARACTERS = 64 * 2**20
# A model that thinks before it answers would begin with a thought, and not with a label; templates without this variable ignore it.
_TEMPLATE_KWARGS = {"enable_thinking": False}


class Asked(Struct, frozen=True, kw_only=True):
    """What a request asks. labels: of all its questions, each once."""

    questions: list[Question]
    labels: list[str]


# Of each set of labels that a question has, of each label: the tokens that it may begin with.
Tokens = dict[tuple[str, ...], list[list[int]]]


class DecisionsEndpoint(Endpoint[SystemOneRequest | DecisionsRequest, SystemOneResponse | DecisionsResponse]):
    """Probabilities of the allowed answers to questions."""

    name = "decisions"
    id_prefix = "decision"
    operations = ("logits",)
    settings = DecisionsSettings
    routes = (
        Route(
            method="POST",
            paths=("/v1/systemone", "/systemone"),
            request=SystemOneRequest,
            response=SystemOneResponse,
            summary="Typed questions about a state, answered with probabilities (System One's shape).",
            example={
                "state": "I was charged twice, please refund me today.",
                "questions": {
                    "refund": {"type": "noul", "instructions": "Is a refund wanted?"},
                    "team": {"type": "choice", "criteria": {"billing": "payments", "technical": None}},
                    "anger": {"type": "score", "instructions": "How angry is it?", "criteria": ["calm", "annoyed", "furious"]},
                },
            },
        ),
        Route(
            method="POST",
            paths=("/v1/decisions", "/decisions"),
            request=DecisionsRequest,
            response=DecisionsResponse,
            summary="Typed questions about an input, answered with probabilities (OpenAI's shape).",
            example={
                "input": "I was charged twice, please refund me today.",
                "questions": [
                    {"type": "predicate", "name": "refund", "instructions": "A refund is wanted."},
                    {
                        "type": "choice",
                        "name": "team",
                        "instructions": "Who should answer?",
                        "choices": [{"value": "billing"}, {"value": "technical", "description": "bugs"}],
                    },
                    {
                        "type": "score",
                        "name": "anger",
                        "instructions": "How angry is it?",
                        "levels": [{"label": "calm"}, {"label": "annoyed"}, {"label": "furious"}],
                    },
                ],
            },
        ),
    )

    def preprocess(self, ctx: Context[SystemOneRequest | DecisionsRequest]) -> list[Prompt]:
        request, settings = ctx.request, ctx.settings
        if not ctx.model.has_chat_template:
            raise UnsupportedOperation(f"Model `{ctx.model.id}` has no chat template, by which questions are asked.", param="model")
        count = len(request.questions)
        if not 1 <= count <= settings.max_questions:
            raise BadRequest(f"questions has {count}; from 1 to {settings.max_questions} are answered.", param="questions")
        if isinstance(request, SystemOneRequest):
            state, questions, param = systemone_state(request), systemone_questions(request), "state"
        else:
            state, questions, param = decisions_input(request), decisions_questions(request), "input"
        if len(state) * count > MAX_CHARACTERS:
            raise BadRequest(
                f"{param} has {len(state)} characters and is read once for each of {count} questions; at most {MAX_CHARACTERS} characters "
                "are read in all. Ask fewer questions at once.",
                param=param,
            )
        labels = list(dict.fromkeys(label for question in questions for label in question.labels))
        ctx.state[_KEY] = Asked(questions=questions, labels=labels)
        forms = [_LINE_END, *(before + label for before in _FORMS for label in labels)]
        return [
            *(_prompt(question, state, param) for question in questions),
            *(TextPrompt(text=form, add_special_tokens=False) for form in forms),
        ]

    def pooling_params(self, ctx: Context[SystemOneRequest | DecisionsRequest]) -> PoolingParams:
        # The ids are not known before the tokenizer has run, and none at all is refused: any one stands for them until `with_labels`.
        return PoolingParams(outputs=("logits",), use_activation=False, logit_ids=(0,))

    def build_response(self, ctx: Context[SystemOneRequest | DecisionsRequest]) -> SystemOneResponse | DecisionsResponse:
        asked: Asked = ctx.state[_KEY]
        rows = ctx.outputs["logits"]
        if len(rows) != len(asked.questions):
            raise RuntimeError("endpoint 'decisions' needs its plugin's jackfield_wrap_submit: register the module jackfield_decisions")
        # Where a cache around the engine's call has answered, `with_labels` was not called, and the labels are still among the prompts.
        tokens: Tokens = ctx.state.get(_TOKENS) or _tokens(ctx, asked)
        columns = {token: column for column, token in enumerate(_wanted(tokens))}
        probabilities = []
        for question, row in zip(asked.questions, rows, strict=True):
            # The test kit's engine gives one number whatever is asked: then all labels are alike. Any other number of them is an error.
            logits = np.broadcast_to(row, len(columns))
            probabilities.append(shares([logits[[columns[token] for token in label]] for label in tokens[question.labels]]))
        count = sum(len(prompt.token_ids) for prompt in ctx.prompts[: len(rows)])
        if isinstance(ctx.request, SystemOneRequest):
            return systemone_response(ctx, probabilities, count)
        return decisions_response(ctx, probabilities, count)


def _prompt(question: Question, state: str, param: str) -> ChatPrompt:
    """param: the state's field, for a prompt that is too long because of it."""
    text = question.text(state)
    return ChatPrompt(
        messages=[{"role": "user", "content": text}],
        template_kwargs=_TEMPLATE_KWARGS,
        param=param if 2 * len(state) >= len(text) else question.param,
    )


def with_labels(submit: Submit) -> Submit:
    """The engine's call without the prompts of the labels, whose first tokens it asks the logits of instead."""

    async def labelled(ctx: Context[Any], request: EngineRequest) -> PoolingOutputs:
        asked: Asked = ctx.state[_KEY]
        count = len(asked.questions)
        _check_answer_comes(ctx)
        tokens = ctx.state[_TOKENS] = _tokens(ctx, asked)
        assert isinstance(request.params, PoolingParams)
        ctx.prompts = ctx.prompts[:count]  # what the metrics count is what is computed
        params = structs.replace(request.params, logit_ids=tuple(_wanted(tokens)))
        return await submit(ctx, structs.replace(request, token_ids=request.token_ids[:count], params=params))

    return labelled


def _wanted(tokens: Tokens) -> list[int]:
    """The ids of them all, each once: the columns of the logits."""
    return list(dict.fromkeys(token for labels in tokens.values() for label in labels for token in label))


def _tokens(ctx: Context[Any], asked: Asked) -> Tokens:
    """From the prompts of the labels. Raises: UnsupportedOperation for a tokenizer to whom two labels of a question begin alike."""
    line_end, *rest = [prompt.token_ids for prompt in ctx.prompts[len(asked.questions) :]]
    begins = [next((one for one, other in zip_longest(ids, line_end) if one != other), None) for ids in rest]
    number = len(asked.labels)
    forms = [dict(zip(asked.labels, begins[place : place + number], strict=True)) for place in range(0, len(begins), number)]
    found: Tokens = {}
    for question in asked.questions:
        if question.labels in found:
            continue
        columns = [[form[label] for label in question.labels] for form in forms]
        columns = [column for column in columns if None not in column and len(set(column)) == len(column)]
        if not columns:
            raise UnsupportedOperation(
                f"The tokenizer of model `{ctx.model.id}` begins two of the labels {', '.join(question.labels)} with the same token, so "
                f"{question.param} cannot be answered.",
                param="model",
            )
        found[question.labels] = [list(dict.fromkeys(label)) for label in zip(*columns, strict=True)]
    return found


def _check_answer_comes(ctx: Context[Any]) -> None:
    """Raises: UnsupportedOperation for a template that has the model think first, whatever it is told."""
    parser = ctx.model.reasoning_parser
    if parser is not None and parser.begun(ctx.prompts[0].tail):
        raise UnsupportedOperation(f"Model `{ctx.model.id}` thinks before it answers: its chat template begins a thought.", param="model")
