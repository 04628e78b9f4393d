"""What the engine's process imports of the plugin `sparse`, and wrong poolers for the tests."""

from __future__ import annotations

import torch
from transformers import AutoModelForMaskedLM

from jackfield.engine.poolers import LoadedModel, Span


# --8<-- [start:pooler]
class SparsePooler:
    """The maximum over a text's tokens of log(1 + relu(logit)), for each word of the vocabulary (SPLADE, arXiv 2109.10086)."""

    outputs = ("sparse",)

    def __init__(self, loaded: LoadedModel) -> None:
        whole = AutoModelForMaskedLM.from_pretrained(loaded.folder, dtype=loaded.dtype).to(loaded.device).eval()
        self._head = whole.cls

    def __call__(self, output: str, hidden: torch.Tensor, spans: list[Span]) -> list[torch.Tensor]:
        """`[vocabulary]` a span."""
        return [self._head(hidden[span.start : span.end]).relu().log1p().amax(0).float() for span in spans]


# --8<-- [end:pooler]
class _Wrong:
    outputs = ("sparse",)

    def __init__(self, loaded: LoadedModel) -> None:
        pass


class OfAll(_Wrong):
    """Depends on the batch."""

    def __call__(self, output: str, hidden: torch.Tensor, spans: list[Span]) -> list[torch.Tensor]:
        return [hidden.mean(0).float() for _ in spans]


class TooFew(_Wrong):
    """Forgets one."""

    def __call__(self, output: str, hidden: torch.Tensor, spans: list[Span]) -> list[torch.Tensor]:
        return [hidden[span.start].float() for span in spans[1:]]


class Double(_Wrong):
    """float64."""

    def __call__(self, output: str, hidden: torch.Tensor, spans: list[Span]) -> list[torch.Tensor]:
        return [hidden[span.start].double() for span in spans]


class Broken(_Wrong):
    """Cannot be made."""

    def __init__(self, loaded: LoadedModel) -> None:
        raise FileNotFoundError(f"no sparse_linear.pt in {loaded.folder.name}")
