"""Requests and answers as text-embeddings-inference has them (`router/src/http/types.rs`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from jackfield import Request

__all__ = [
    "DecodeRequest",
    "EmbedAllRequest",
    "EmbedRequest",
    "EmbedSparseRequest",
    "Info",
    "Inputs",
    "PredictRequest",
    "Prediction",
    "Rank",
    "RerankRequest",
    "RootRequest",
    "SimilarityInput",
    "SimilarityParameters",
    "SimilarityRequest",
    "SimpleToken",
    "TokenizeRequest",
]

Direction = Literal["Left", "Right", "left", "right"]
Inputs = Annotated[
    str | list[str | int | list[int]], Meta(description="A text, the token ids of one, or a list of texts and of lists of token ids.")
]
Pairs = Annotated[
    str | list[str | list[str]],
    Meta(description="A text, a pair `[text, text]`, or a batch `[[text], [text, text], …]` of both."),
]
Truncate = Annotated[bool | None, Meta(description="Cut texts that are too long; default: the server's `auto_truncate`.")]
TruncationDirection = Annotated[Direction | None, Meta(description="Which end is cut off; default `right`.")]
PromptName = Annotated[str | None, Meta(description="The model's instruction that goes before each text.")]
Raw = Annotated[bool | None, Meta(description="True gives logits; default false.")]


class EmbedAllRequest(Request, frozen=True, kw_only=True):
    """What every request for vectors has."""

    inputs: Inputs
    truncate: Truncate = None
    truncation_direction: TruncationDirection = None
    prompt_name: PromptName = None


class EmbedRequest(EmbedAllRequest, frozen=True, kw_only=True):
    """Vectors of texts."""

    normalize: Annotated[bool | None, Meta(description="Vectors of length 1; default true.")] = None
    dimensions: Annotated[int | None, Meta(description="Keep so many leading numbers, where the model is trained for it.")] = None


class EmbedSparseRequest(EmbedAllRequest, frozen=True, kw_only=True):
    """Refused: there is no sparse head."""


class PredictRequest(Request, frozen=True, kw_only=True):
    """Labels of texts, or of pairs."""

    inputs: Pairs
    truncate: Truncate = None
    truncation_direction: TruncationDirection = None
    raw_scores: Raw = None


class Prediction(Struct, frozen=True, kw_only=True):
    """A label and its probability."""

    score: float
    label: str


class RerankRequest(Request, frozen=True, kw_only=True):
    """Texts by their relevance for a query."""

    query: str
    texts: list[str]
    truncate: Truncate = None
    truncation_direction: TruncationDirection = None
    raw_scores: Raw = None
    return_text: Annotated[bool | None, Meta(description="True gives the texts back; default false.")] = None


class Rank(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A text's place in the request and its score."""

    index: int
    text: str | None = None
    score: float


class SimilarityInput(Struct, frozen=True, kw_only=True):
    """A sentence, and those that it is compared with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(Struct, frozen=True, kw_only=True):
    """How the sentences are read."""

    truncate: Truncate = None
    truncation_direction: TruncationDirection = None
    prompt_name: PromptName = None


class SimilarityRequest(Request, frozen=True, kw_only=True):
    """Cosines of one sentence with others."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None


class TokenizeRequest(Request, frozen=True, kw_only=True):
    """Tokens of texts."""

    inputs: Annotated[str | list[str], Meta(description="A text, or a list of texts.")]
    add_special_tokens: Annotated[bool | None, Meta(description="Default true.")] = None
    prompt_name: PromptName = None


class SimpleToken(Struct, frozen=True, kw_only=True):
    """A token, and where it stands in its text, in characters; null for a special token."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class DecodeRequest(Request, frozen=True, kw_only=True):
    """Texts of token ids."""

    ids: Annotated[list[int | list[int]], Meta(description="The token ids of one text, or a list of such lists.")]
    skip_special_tokens: Annotated[bool | None, Meta(description="Default true.")] = None


class RootRequest(Request, frozen=True, kw_only=True):
    """What `POST /` takes: the request of `/embed`, `/rerank` or `/predict`, as the model is."""

    inputs: Any = None
    query: str | None = None
    texts: list[str] | None = None
    truncate: Truncate = None
    truncation_direction: TruncationDirection = None
    prompt_name: PromptName = None
    normalize: bool | None = None
    dimensions: int | None = None
    raw_scores: Raw = None
    return_text: bool | None = None


class Info(Struct, frozen=True, kw_only=True):
    """The model, and the limits of the server."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: dict[str, Any]
    max_input_length: int
    max_client_batch_size: int
    auto_truncate: bool
    version: str
