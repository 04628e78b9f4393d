"""Around a generating engine: its parameters checked before, its tokens as text afterwards. A stop text ends a choice here."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing

from msgspec import structs

from jackfield.client import ModelCard
from jackfield.detokenization import TextStream
from jackfield.errors import BadRequest, PromptTooLong, StepFailed, TokenOutOfVocabulary
from jackfield.outputs import Delta, TokenLogprob
from jackfield.params import SamplingParams
from jackfield.prompts import TokenizedPrompt
from jackfield.tokenization import ModelTokenizer

__all__ = ["MAX_LOGPROBS", "check_lengths", "check_sampling", "with_text"]

# Alternatives a token that may be asked for, as in OpenAI's interface.
MAX_LOGPROBS = 20
MAX_STOPS = 64
# name -> least, greatest, and whether the least itself is allowed.
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, math.inf, True),
    "top_p": (0, 1, False),
    "min_p": (0, 1, True),
    "top_k": (0, math.inf, True),
    "repetition_penalty": (0, math.inf, False),
    "presence_penalty": (-2, 2, True),
    "frequency_penalty": (-2, 2, True),
    "min_tokens": (0, math.inf, True),
    "n": (1, math.inf, True),
    "logprobs": (0, MAX_LOGPROBS, True),
    "prompt_logprobs": (0, MAX_LOGPROBS, True),
}


def check_sampling(params: SamplingParams, card: ModelCard, tokenizer: ModelTokenizer) -> SamplingParams:
    """The parameters as the engine takes them: within their bounds, ids within the vocabulary, bad words as ids.

    Raises: BadRequest or TokenOutOfVocabulary naming the field.
    """
    for name, (least, greatest, inclusive) in _RANGES.items():
        value = getattr(params, name)
        if value is not None and not (math.isfinite(value) and (least <= value if inclusive else least < value) and value <= greatest):
            bounds = f"{'at least' if inclusive else 'above'} {least:g}" + ("" if greatest == math.inf else f" and at most {greatest:g}")
            raise BadRequest(f"{name} is {value:g}; it must be {bounds}.", param=name)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise BadRequest(f"min_tokens is {params.min_tokens}, over the max_tokens of {params.max_tokens}.", param="min_tokens")
    if len(params.stop) > MAX_STOPS or not all(params.stop):
        raise BadRequest(f"stop takes up to {MAX_STOPS} texts, none of them empty.", param="stop")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise BadRequest("allowed_token_ids is empty, which allows nothing; leave it out to allow everything.", param="allowed_token_ids")
    if not all(params.bad_words):
        raise BadRequest("bad_words has an empty text.", param="bad_words")
    for token_id, bias in params.logit_bias.items():
        if not math.isfinite(bias):
            raise BadRequest(f"logit_bias[{token_id}] is not finite.", param="logit_bias")
    params = structs.replace(params, bad_words=tokenizer.bad_words(params.bad_words))
    _check_ids(params, card.vocab_size)
    return params


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    given: dict[str, Iterable[int]] = {
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
        "logprob_token_ids": params.logprob_token_ids,
        "bad_words": [token_id for word in params.bad_words for token_id in word if isinstance(token_id, int)],
    }
    for name, ids in given.items():
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise TokenOutOfVocabulary(token_id=token_id, vocab_size=vocab_size, param=name)


def check_lengths(
    params: SamplingParams, card: ModelCard, prompts: list[TokenizedPrompt], *, clamp: bool, param: str = "max_tokens"
) -> None:
    """Whether prompts and what is to follow them fit into the context. clamp: let max_tokens be cut to what is left of it.

    param: the request's name for max_tokens. Raises: BadRequest, PromptTooLong, with the numbers.
    """
    wanted = params.max_tokens
    for prompt in prompts:
        count = len(prompt.token_ids)
        room = card.max_length - count
        if room < 1 and wanted != 0:
            raise PromptTooLong(limit=card.max_length - 1, got=count, param=prompt.param)
        if wanted is not None and wanted > room and not clamp:
            raise BadRequest(
                f"The prompt has {count} tokens and {param} is {wanted}: {count + wanted} together, over the model's context of "
                f"{card.max_length}. Ask for at most {room}, or leave {param} out to get what is left.",
                param=param,
            )


async def with_text(
    deltas: AsyncIterator[Delta],
    tokenizer: ModelTokenizer,
    prompts: list[TokenizedPrompt],
    params: SamplingParams,
    end_choice: Callable[[int], None],
) -> AsyncGenerator[Delta]:
    """The engine's deltas with their texts; ends when every choice has ended. end_choice: told the index of one that met a stop text."""
    growing = {index: _Growing(tokenizer, prompts[index // params.n].token_ids, params) for index in range(len(prompts) * params.n)}
    async with aclosing(deltas):  # type: ignore[type-var]
        async for delta in deltas:
            choice = growing.get(delta.index)
            if choice is None:
                continue  # it has met a stop text, which the engine heard of later
            told = choice.add(delta)
            if told.finish_reason is not None:
                del growing[told.index]
                if choice.stopped:
                    end_choice(told.index)
            yield told
            if not growing:
                return
    raise StepFailed(f"The engine ended with {len(growing)} choices still open.")


class _Growing:
    """One choice."""

    def __init__(self, tokenizer: ModelTokenizer, prompt_ids: list[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._text: TextStream = tokenizer.text_stream(prompt_ids, params)
        self._params = params
        self._num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop text has ended it."""
        return self._text.stopped_by is not None

    def add(self, delta: Delta) -> Delta:
        """The delta with its text, up to the token that completes a stop text."""
        text = ""
        count = 0
        for token_id in delta.token_ids:
            count += 1
            self._num_tokens += 1
            # A token that ends the choice is no part of its text, whatever it would read as.
            is_last = count == len(delta.token_ids) and delta.finish_reason == "stop"
            if not is_last or delta.ends_in_text or self._params.include_stop:
                text += self._text.add([token_id], may_stop=self._num_tokens >= self._params.min_tokens)
            if self.stopped:
                break
        if delta.finish_reason is not None and not self.stopped:
            text += self._text.finish()
        changes = {"finish_reason": "stop", "stop_reason": self._text.stopped_by} if self.stopped else {}
        return structs.replace(
            delta,
            text=text,
            token_ids=delta.token_ids[:count],
            logprobs=tuple(self._named(entry) for entry in delta.logprobs[:count]),
            prompt_logprobs=tuple(entry and self._named(entry) for entry in delta.prompt_logprobs),
            **changes,
        )

    def _named(self, entry: TokenLogprob) -> TokenLogprob:
        text, data = self._tokenizer.token(entry.token_id)
        return structs.replace(entry, text=text, data=data, top=tuple(self._named(other) for other in entry.top))
