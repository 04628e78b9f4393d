"""What the engine is asked to do with a request's prompts."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

__all__ = ["GRAMMAR_FUEL", "OPERATIONS", "Grammar", "PoolingParams", "SamplingParams"]

# Operations, not endpoints: an endpoint names those it can work with; a model has those that its files allow. Plugins add to them
# (`jackfield_poolers`).
OPERATIONS = ("embed", "token_embed", "hidden_states", "classify", "token_classify", "score", "generate", "logits")


class PoolingParams(Struct, frozen=True, kw_only=True, tag=True):
    """What to compute from one forward pass over each prompt.

    outputs: names of operations, all from the same pass; empty means the one that the core chose for this endpoint and model.
    logit_ids: of the output `logits`: tokens whose logits, after the last token of each prompt, are wanted.
    use_activation: L2-normalise a vector, or turn logits into probabilities; None leaves it to the model's files.
    dimensions: keep this many leading numbers of each vector, then normalise again (Matryoshka); None keeps all.
    """

    outputs: tuple[str, ...] = ()
    use_activation: bool | None = None
    dimensions: int | None = None
    logit_ids: tuple[int, ...] = ()


# Of a lexer that llguidance makes: its own default is a million, with which some grammars of 60 characters take minutes.
GRAMMAR_FUEL = 30_000


class Grammar(Struct, frozen=True, kw_only=True):
    """What a text has to match; `jackfield.json_grammar` and its kin make one. param: the request's field that asks for it.

    rule: one of llguidance's grammars, `{"json_schema": ...}` or `{"lark_grammar": ...}` (or `{"gbnf": ...}`). parts: what `@name` stands
    for in it. instead: what holds if this one cannot be honoured, which is a 400 otherwise. source: all of it as text, in the end; the core
    fills it when it has tried the grammar.
    """

    param: str
    rule: dict[str, Any] = {}
    parts: dict[str, Grammar] = {}
    instead: Grammar | None = None
    source: str = ""


class SamplingParams(Struct, frozen=True, kw_only=True, tag=True):
    """How to generate after each prompt. Ids are token ids of the model's vocabulary; the core checks them, and every bound.

    max_tokens, min_tokens: new tokens a choice; None: as many as the context has room for. n: choices a prompt. seed: the same text for the
    same seed; None draws one.

    grammar: what the text matches when it ends; cut by max_tokens it is the beginning of such a text. It goes before min_tokens: a text
    that is whole, and cannot go on, ends.

    Logits are changed in this order: grammar, allowed_token_ids, logit_bias, bad_words (no token that would complete one of these
    sequences; the core turns texts into ids), no end before min_tokens, repetition_penalty (of tokens in prompt and text; above 1 they
    become rarer), frequency_penalty and presence_penalty (of tokens in the text). Then temperature (0 is greedy), min_p (what has less than
    this share of the likeliest one's probability is left out), top_k (0 for all), top_p in (0, 1].

    stop: texts that end a choice, with include_stop the last of its text; stop_token_ids: tokens that do, beside the model's own unless
    ignore_eos. skip_special_tokens: leave special tokens out of the text, but for visible_tokens, which are named.
    logprobs: how many of the likeliest tokens to tell at each place beside the chosen one, by the model's own logits; None for none of it.
    logprob_token_ids: also tell these. prompt_logprobs: the same for each token of the prompt.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    visible_tokens: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
