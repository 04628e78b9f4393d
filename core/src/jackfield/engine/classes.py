"""What a classifier's files say of its classes: how many, their names, and what makes probabilities of logits. Read without torch.

Activations follow vLLM for classify (`problem_type`, then the cross-encoder's own, then the number of classes) and sentence-transformers
6.2 for score (`cross_encoder/model.py`: the model's own, else a sigmoid).
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from jackfield.client import ModelSpec
from jackfield.errors import ModelError

__all__ = ["ClassFiles", "read_classes"]

_BY_PROBLEM = {"regression": "none", "single_label_classification": "softmax", "multi_label_classification": "sigmoid"}
_KNOWN = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}


class ClassFiles(Struct, frozen=True, kw_only=True):
    """Of `ForSequenceClassification` (`per_token` false) and `ForTokenClassification` models."""

    per_token: bool
    labels: tuple[str | None, ...]
    activation: str
    score_activation: str

    @property
    def operations(self) -> tuple[str, ...]:
        """What the head can do. A score is one number, so only a head of one class gives it."""
        if self.per_token:
            return ("token_classify",)
        return ("score", "classify") if len(self.labels) == 1 else ("classify",)


def read_classes(spec: ModelSpec, config: dict[str, Any], sentence: dict[str, Any], architecture: str) -> ClassFiles | None:
    """None for a model without a head of classes. sentence: its config_sentence_transformers.json, or nothing.

    Raises: ModelError for labels that are none, or an activation that is not torch's own.
    """
    per_token = architecture.endswith("ForTokenClassification")
    if not per_token and not architecture.endswith("ForSequenceClassification"):
        return None
    labels = _labels(spec, config)
    own = _own_activation(spec, config, sentence)
    default = "softmax" if per_token or len(labels) > 1 else "sigmoid"
    problem = config.get("problem_type")
    return ClassFiles(
        per_token=per_token,
        labels=labels,
        activation=_BY_PROBLEM.get(problem or "") or own or default,
        score_activation=own or "sigmoid",
    )


def _labels(spec: ModelSpec, config: dict[str, Any]) -> tuple[str | None, ...]:
    """By class number. transformers' default is two classes, `LABEL_0` and `LABEL_1`."""
    nested = config.get("text_config") or {}
    named = config.get("id2label") or nested.get("id2label") or {}
    try:
        names = {int(number): str(name) for number, name in named.items()}
        count = int(config.get("num_labels") or nested.get("num_labels") or (max(names) + 1 if names else 2))
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"model {spec.id!r}: id2label or num_labels of its config.json is no list of labels: {error}") from error
    if not names:
        return tuple(f"LABEL_{number}" for number in range(count))
    return tuple(names.get(number) for number in range(count))


def _own_activation(spec: ModelSpec, config: dict[str, Any], sentence: dict[str, Any]) -> str | None:
    """The activation that sentence-transformers has written: since release 6 into a file of its own, before into config.json."""
    newer = config.get("sentence_transformers")
    path = (
        sentence.get("activation_fn")
        or (newer.get("activation_fn") if isinstance(newer, dict) else None)
        or config.get("sbert_ce_default_activation_function")
    )
    if path is None:
        return None
    if not isinstance(path, str) or not path.startswith("torch.nn.modules."):
        raise ModelError(f"model {spec.id!r}: its files want the activation {path!r}; only torch.nn.modules.* are run")
    return _KNOWN.get(path.rpartition(".")[2], path)
