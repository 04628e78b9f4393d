"""What requests that generate have in common: their fields, the parameters that are made of them, and the shapes of their answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from jackfield.context import Model
from jackfield.errors import BadRequest
from jackfield.grammar import choice_grammar, json_grammar, lark_grammar, regex_grammar
from jackfield.outputs import TokenLogprob
from jackfield.params import Grammar, SamplingParams
from jackfield.schema import Request

__all__ = [
    "FINGERPRINT",
    "MIN_LOGPROB",
    "PromptLogprob",
    "ResponseFormat",
    "SamplingRequest",
    "StreamOptions",
    "StructuredOutputs",
    "check_generation",
    "make_grammar",
    "make_sampling_params",
    "prompt_limit",
    "prompt_logprobs",
    "refuse_unserved",
    "token_name",
]

# The `system_fingerprint` of answers.
FINGERPRINT = f"jackfield-{version('jackfield')}"
# JSON has no infinity: what stands for the logarithm of no probability at all, as in vLLM.
MIN_LOGPROB = -9999.0
MAX_BIAS = 100.0
_INTEGER = re.compile(r"-?[0-9]{1,18}")

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Ids = list[int]


class StreamOptions(Struct, frozen=True, kw_only=True):
    """What a stream carries beside the text."""

    include_usage: Annotated[bool | None, Meta(description="Whether a last chunk, of no choices, has the usage; default false.")] = None
    continuous_usage_stats: Annotated[bool | None, Meta(description="Whether every chunk has the usage up to there; default false.")] = None


class JsonSchema(Struct, frozen=True, kw_only=True):
    """A schema by OpenAI's name for it."""

    schema: Annotated[dict[str, Any] | None, Meta(description="The JSON schema; any object when left out.")] = None
    name: Annotated[str | None, Meta(description="Accepted; not used.")] = None
    description: Annotated[str | None, Meta(description="Accepted; not used.")] = None
    strict: Annotated[bool | None, Meta(description="Accepted: a schema is always kept to, or refused.")] = None


class ResponseFormat(Struct, frozen=True, kw_only=True):
    """What form the text has."""

    type: Annotated[Literal["text", "json_object", "json_schema"], Meta(description="`json_schema` needs the field of that name.")]
    json_schema: Annotated[JsonSchema | None, Meta(description="Of the type `json_schema`.")] = None


class StructuredOutputs(Struct, frozen=True, kw_only=True):
    """One form of text."""

    json: Annotated[dict[str, Any] | bool | str | None, Meta(description="A JSON schema, or the text of one.")] = None
    json_object: Annotated[bool | None, Meta(description="Any JSON object.")] = None
    regex: Annotated[str | None, Meta(description="A pattern of the whole text, of Rust's regex crate.")] = None
    choice: Annotated[list[str] | None, Meta(description="The texts that it may be.")] = None
    grammar: Annotated[str | None, Meta(description="Rules in llguidance's dialect of Lark, or in GBNF.")] = None
    structural_tag: Annotated[Any, Meta(description="Refused.")] = None
    whitespace_pattern: Annotated[
        str | None, Meta(description="Of JSON: what may be between its parts; by default it is on one line, with a space after , and :.")
    ] = None
    disable_any_whitespace: Annotated[bool | None, Meta(description="Accepted: JSON has no other white space by default.")] = None
    disable_additional_properties: Annotated[bool | None, Meta(description="Refused when true; the schema says it.")] = None


class SamplingRequest(Request, frozen=True, kw_only=True):
    """Fields of a request that generates. What is left out is the model's own default, else neutral; so is an explicit null."""

    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None, Meta(description="Logits are divided by it; 0 takes the likeliest token. 1 by default.")
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None, Meta(description="Sample from the likeliest tokens that have this probability together.")
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None, Meta(description="Sample from so many of the likeliest tokens; 0 or -1: all.")
    ] = None
    min_p: Annotated[Share | None, Meta(description="Leave out tokens with less than this share of the likeliest one's probability.")] = (
        None
    )
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="Above 1, tokens of prompt and text become rarer; 1 by default.")
    ] = None
    presence_penalty: Annotated[Penalty | None, Meta(description="Taken off the logits of tokens that are in the text.")] = None
    frequency_penalty: Annotated[Penalty | None, Meta(description="The same, as often as they are in it.")] = None
    logit_bias: Annotated[
        dict[str, float] | None, Meta(description="By token id, as a string: added to its logit; cut to -100 and 100.")
    ] = None
    allowed_token_ids: Annotated[Ids | None, Meta(description="The tokens that may be generated; all by default.")] = None
    bad_words: Annotated[list[str] | None, Meta(description="Texts that may not be generated.")] = None
    n: Annotated[Positive | None, Meta(description="Choices for each prompt; 1 by default.")] = None
    seed: Annotated[
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None, Meta(description="The same text for the same seed; -1 is none.")
    ] = None
    max_tokens: Annotated[Positive | None, Meta(description="Tokens that each choice may have.")] = None
    min_tokens: Annotated[Count | None, Meta(description="Tokens before which nothing ends a choice; 0 by default.")] = None
    stop: Annotated[
        str | list[str] | None, Meta(description="A text, or up to 64, that end a choice and are left out of it. None may be empty.")
    ] = None
    include_stop_str_in_output: Annotated[bool | None, Meta(description="Keep what has ended a choice in its text.")] = None
    stop_token_ids: Annotated[Ids | None, Meta(description="Tokens that end a choice, beside the model's own.")] = None
    ignore_eos: Annotated[bool | None, Meta(description="The model's own end tokens end nothing.")] = None
    skip_special_tokens: Annotated[bool | None, Meta(description="Leave special tokens out of the text; true by default.")] = None
    spaces_between_special_tokens: Annotated[
        bool | None, Meta(description="Accepted for vLLM's clients; tokenizers of this server put none there.")
    ] = None
    echo: Annotated[bool | None, Meta(description="Whether the answer's text begins with that of the request.")] = None
    prompt_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None, Meta(description="Tell the prompt's log-probabilities, with so many others each.")
    ] = None
    logprob_token_ids: Annotated[Ids | None, Meta(description="Tokens to tell at each place, beside the likeliest.")] = None
    stream: Annotated[bool | None, Meta(description="Answer by server-sent events, piece by piece.")] = None
    stream_options: Annotated[StreamOptions | None, Meta(description="Of a stream; without one they are refused.")] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        Meta(description="Cut the prompt to so many tokens; -1: so that what may be generated fits in. None refuses what is too long."),
    ] = None
    truncation_side: Annotated[Literal["left", "right"] | None, Meta(description="Which end is cut off; left by default.")] = None
    add_special_tokens: Annotated[bool | None, Meta(description="Whether the tokenizer frames the text by its special tokens.")] = None
    return_tokens_as_token_ids: Annotated[bool | None, Meta(description="Name tokens `token_id:N` in log-probabilities.")] = None
    return_token_ids: Annotated[bool | None, Meta(description="Also give the ids of the prompt and of the text.")] = None
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=128)] | None,
        Meta(description="Requests of another salt share no computed part of a prompt with this one."),
    ] = None
    metadata: Annotated[dict[str, Any] | None, Meta(description="Accepted for OpenAI's clients; not used.")] = None
    store: Annotated[bool | None, Meta(description="Accepted for OpenAI's clients; nothing is stored.")] = None
    service_tier: Annotated[str | None, Meta(description="Accepted for OpenAI's clients; not used.")] = None

    best_of: Annotated[int | None, Meta(description="Refused above `n`: what is sampled is given.")] = None
    use_beam_search: Annotated[bool | None, Meta(description="Refused when true.")] = None
    length_penalty: Annotated[float | None, Meta(description="Of beam search; refused but for 1.")] = None
    response_format: Annotated[ResponseFormat | None, Meta(description="What form the text has: any, JSON, or JSON of a schema.")] = None
    structured_outputs: Annotated[StructuredOutputs | None, Meta(description="vLLM's way to ask for it: exactly one of its forms.")] = None
    guided_json: Annotated[Any, Meta(description="Refused; `structured_outputs.json` is its name now.")] = None
    guided_regex: Annotated[Any, Meta(description="Refused; `structured_outputs.regex` is its name now.")] = None
    guided_choice: Annotated[Any, Meta(description="Refused; `structured_outputs.choice` is its name now.")] = None
    guided_grammar: Annotated[Any, Meta(description="Refused; `structured_outputs.grammar` is its name now.")] = None
    guided_decoding_backend: Annotated[Any, Meta(description="Refused.")] = None
    guided_whitespace_pattern: Annotated[Any, Meta(description="Refused; `structured_outputs.whitespace_pattern` is its name now.")] = None
    logits_processors: Annotated[Any, Meta(description="Refused.")] = None
    prompt_embeds: Annotated[Any, Meta(description="Refused.")] = None
    repetition_detection: Annotated[Any, Meta(description="Refused.")] = None
    thinking_token_budget: Annotated[Any, Meta(description="Refused.")] = None
    kv_transfer_params: Annotated[Any, Meta(description="Refused.")] = None


# Fields that are known and not served, with the values by which they ask for nothing. What comes to be served loses its line.
UNSERVED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "kv_transfer_params": ({},),
}
# vLLM's older names, and where it has what they ask for now.
_NOW = {f"guided_{name}": f"structured_outputs.{name}" for name in ("json", "regex", "choice", "grammar", "whitespace_pattern")}


def refuse_unserved(request: Request, unserved: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse what is known and cannot be honoured. unserved: by field, the values besides null that ask for nothing.

    Raises: BadRequest naming the field.
    """
    for name, harmless in unserved.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            besides = f" but for {' and '.join(map(repr, harmless))}" if harmless else ""
            what_to_do = f"send {_NOW[name]}" if name in _NOW else "leave it out"
            raise BadRequest(f"{name} is not served{besides}; {what_to_do}.", param=name)


def check_generation(request: SamplingRequest) -> None:
    """What no field's own bounds say. To be called before anything is made of the request.

    Raises: BadRequest naming the field.
    """
    refuse_unserved(request, UNSERVED)
    if request.best_of is not None and not 1 <= request.best_of <= (request.n or 1):
        raise BadRequest(
            f"best_of is {request.best_of}; all choices are given here, so it may be 1 to n = {request.n or 1}.", param="best_of"
        )
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options are for a stream; set stream to true, or leave them out.", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise BadRequest("prompt_logprobs are not given in a stream.", param="prompt_logprobs")


def make_sampling_params(
    request: SamplingRequest,
    model: Model,
    *,
    max_tokens: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The engine's parameters: the request's, else the model's own (`ModelCard.sampling`), else neutral ones.

    max_tokens: where neither says it; None for what is left of the context. logprobs, prompt_logprobs: how many alternatives a token, None
    for no log-probabilities.

    Raises: BadRequest naming the field.
    """
    defaults = model.card.sampling

    def chosen(name: str, neutral: float) -> float:
        value = getattr(request, name)
        return float(defaults.get(name, neutral) if value is None else value)

    return SamplingParams(
        temperature=chosen("temperature", 1.0),
        top_p=chosen("top_p", 1.0),
        top_k=max(int(chosen("top_k", 0)), 0),
        min_p=chosen("min_p", 0.0),
        repetition_penalty=chosen("repetition_penalty", 1.0),
        presence_penalty=chosen("presence_penalty", 0.0),
        frequency_penalty=chosen("frequency_penalty", 0.0),
        logit_bias=_bias(request.logit_bias or {}),
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        bad_words=tuple(request.bad_words or ()),
        n=request.n or 1,
        seed=None if request.seed == -1 else request.seed,
        max_tokens=_max_tokens(request, model, max_tokens),
        min_tokens=int(chosen("min_tokens", 0)),
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        include_stop=bool(request.include_stop_str_in_output),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        skip_special_tokens=request.skip_special_tokens is not False,
        logprobs=logprobs,
        logprob_token_ids=tuple(request.logprob_token_ids or ()),
        prompt_logprobs=prompt_logprobs,
        grammar=make_grammar(request),
    )


def make_grammar(request: SamplingRequest) -> Grammar | None:
    """What the request's text has to match: of `response_format` or `structured_outputs`. Raises: BadRequest naming the field."""
    form, other = request.response_format, request.structured_outputs
    if form is not None and form.type != "text":
        if other is not None:
            raise BadRequest(
                "response_format and structured_outputs both say what form the text has; send one.", param="structured_outputs"
            )
        if form.type == "json_object":
            return json_grammar({"type": "object"}, param="response_format")
        if form.json_schema is None:
            raise BadRequest("response_format has the type json_schema and no json_schema.", param="response_format.json_schema")
        schema = {"type": "object"} if form.json_schema.schema is None else form.json_schema.schema
        return json_grammar(schema, param="response_format.json_schema.schema")
    return None if other is None else _structured(other)


def _structured(outputs: StructuredOutputs) -> Grammar:
    forms = ("json", "json_object", "regex", "choice", "grammar")
    given = [name for name in forms if getattr(outputs, name) not in (None, False) or (name == "json" and outputs.json is False)]
    for name in ("structural_tag", "disable_additional_properties"):
        if getattr(outputs, name):
            raise BadRequest(f"structured_outputs.{name} is not served; leave it out.", param=f"structured_outputs.{name}")
    if len(given) != 1:
        raise BadRequest(f"structured_outputs has {len(given)} of {', '.join(forms)}; it takes one.", param="structured_outputs")
    param = f"structured_outputs.{given[0]}"
    if outputs.whitespace_pattern is not None and outputs.json is None and not outputs.json_object:
        raise BadRequest(
            f"structured_outputs.whitespace_pattern is of JSON, and the form is {given[0]}.", param="structured_outputs.whitespace_pattern"
        )
    if outputs.json is not None or outputs.json_object:
        schema = {"type": "object"} if outputs.json_object else _schema(outputs.json, param)
        return json_grammar(schema, param=param, whitespace=outputs.whitespace_pattern)
    if outputs.regex is not None:
        return regex_grammar(outputs.regex, param=param)
    if outputs.choice is not None:
        return choice_grammar(outputs.choice, param=param)
    return lark_grammar(outputs.grammar or "", param=param)


def _schema(given: dict[str, Any] | bool | str | None, param: str) -> dict[str, Any] | bool:
    if not isinstance(given, str):
        return {} if given is None else given
    try:
        return msgspec.json.decode(given, type=dict[str, Any] | bool)
    except msgspec.DecodeError as error:
        raise BadRequest(f"{param} is text, and no JSON schema: {error}", param=param) from None
    except RecursionError:
        raise BadRequest(f"{param} is nested too deeply.", param=param) from None


def prompt_limit(request: SamplingRequest, model: Model, *, max_tokens: int | None = None) -> int | None:
    """`truncate` of the request's prompts: -1 leaves room for what may be generated, a token at least.

    max_tokens: as of `make_sampling_params`.
    """
    if request.truncate_prompt_tokens != -1:
        return request.truncate_prompt_tokens
    return max(model.card.max_length - max(_max_tokens(request, model, max_tokens) or 0, 1), 1)


def _max_tokens(request: SamplingRequest, model: Model, default: int | None) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        asked: int | None = getattr(request, name, None)
        if asked is not None:
            return asked
    own = model.card.sampling.get("max_tokens", default)
    return None if own is None else int(own)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not _INTEGER.fullmatch(key):
            raise BadRequest(f"logit_bias has the key {key[:50]!r}; its keys are token ids.", param="logit_bias")
        biases[int(key)] = min(max(bias, -MAX_BIAS), MAX_BIAS)
    return biases


class PromptLogprob(Struct, frozen=True, kw_only=True):
    """What a token at a place of the prompt has for it. rank: 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


def token_name(entry: TokenLogprob, *, as_id: bool) -> str:
    """A token as answers name it: by its text, or as `token_id:N`, which tells tokens of one text apart."""
    return f"token_id:{entry.token_id}" if as_id else entry.text


def prompt_logprobs(entries: tuple[TokenLogprob | None, ...], *, as_ids: bool = False) -> list[dict[int, PromptLogprob] | None] | None:
    """`Choice.prompt_logprobs` as answers have them: for each token of the prompt itself and the likeliest in its place, by id."""
    if not entries:
        return None
    return [None if entry is None else {told.token_id: _prompt_logprob(told, as_ids) for told in (entry, *entry.top)} for entry in entries]


def _prompt_logprob(entry: TokenLogprob, as_id: bool) -> PromptLogprob:
    return PromptLogprob(logprob=max(entry.logprob, MIN_LOGPROB), rank=entry.rank, decoded_token=token_name(entry, as_id=as_id))
