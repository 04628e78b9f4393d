"""What the engine is asked to do with a request's prompts."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["OPERATIONS", "PoolingParams", "SamplingParams"]

# Operations, not endpoints: an endpoint names those it can work with; a model has those that its files allow. Plugins add to them
# (`jackfield_poolers`).
OPERATIONS = ("embed", "token_embed", "hidden_states", "classify", "token_classify", "score", "generate", "logits")


class PoolingParams(Struct, frozen=True, kw_only=True, tag=True):
    """What to compute from one forward pass over each prompt.

    outputs: names of operations, all from the same pass; empty means the one that the core chose for this endpoint and model.
    use_activation: L2-normalise a vector, or turn logits into probabilities; None leaves it to the model's files.
    dimensions: keep this many leading numbers of each vector, then normalise again (Matryoshka); None keeps all.
    """

    outputs: tuple[str, ...] = ()
    use_activation: bool | None = None
    dimensions: int | None = None


class SamplingParams(Struct, frozen=True, kw_only=True, tag=True):
    """How to generate after each prompt.

    max_tokens: at most this many new tokens a choice. temperature: 0 is greedy. top_p in (0, 1], top_k 0 or -1 for all.
    seed: same text for the same seed; None draws one. stop: texts that end the generation; n: choices a prompt.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
