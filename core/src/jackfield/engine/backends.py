"""Another forward pass in jackfield's engine: what a plugin's backend is given, and what it must be.

The engine's process, scheduler, lanes, poolers, heads, checks and isolation stay as they are; the backend makes the last hidden states.
`jackfield.engine.local_engine(..., backend="package.module:factory")` names its factory, which the engine's process alone imports.
"""

from __future__ import annotations

import importlib
import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from jackfield.client import ModelCard, ModelSpec
from jackfield.errors import JackfieldError, ModelError
from jackfield.outputs import FloatArray
from jackfield.settings import EngineSettings

__all__ = ["PADDED", "Backend", "BackendFactory", "BackendModel", "PaddedForward", "load_backend"]

# The attention of a model that is to be converted.
PADDED = "jackfield_padded"
# Added to the score of a key that is not to be seen: float16's least number, which stays finite in every format.
UNSEEN = -65504.0

# Tokens of an example. Any number will do but 1, which a trace is apt to take for a constant, and sizes that models have.
EXAMPLE_LENGTH = 23


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attention with a mask of numbers in place of a boolean one.

    Padding may see no key at all (beyond a sliding window), and what runtimes make of a boolean row that is empty differs: OpenVINO gives
    NaN, and with it in the padding's values also for the tokens of its sequence.
    """
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, UNSEEN)
    attended: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return attended


AttentionInterface.register(PADDED, _attend)
AttentionMaskInterface.register(PADDED, sdpa_mask)


class PaddedForward(torch.nn.Module):
    """A model as a backend converts it: padded ids and their mask to last hidden states, and nothing else in or out.

    inputs: names of what it takes, in order: `input_ids`, `attention_mask` and, of a model that tells the parts of a pair apart,
    `token_type_ids`; int64, `[B, S]`.
    """

    def __init__(self, model: torch.nn.Module, *, has_segments: bool, forward_args: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.inputs: tuple[str, ...] = ("input_ids", "attention_mask", *(("token_type_ids",) if has_segments else ()))
        self._forward_args = forward_args

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None) -> torch.Tensor:
        """`[B, S]` to `[B, S, H]`; of what lies behind a sequence's last token nothing is read."""
        more = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **more, **self._forward_args)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def example(self) -> dict[str, torch.Tensor]:
        """Inputs to trace it with: two sequences of other lengths, the shorter one padded."""
        vocabulary: int = self.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        ids = torch.arange(2 * EXAMPLE_LENGTH).reshape(2, EXAMPLE_LENGTH) % vocabulary
        mask = torch.ones_like(ids)
        mask[1, EXAMPLE_LENGTH // 2 :] = 0
        return dict(zip(self.inputs, (ids, mask, torch.zeros_like(ids)), strict=False))


@dataclass(frozen=True, kw_only=True)
class BackendModel:
    """What the factory of a backend is given.

    spec: as the operator asked for it; its `options` are the backend's. card, config: what its files say, and its config.json. folder: of
    its transformers files. dtype: in which numbers it is to run, "float32", "bfloat16" or "float16". forward: the model in float32 on the
    CPU, which is let go of after the load.
    """

    spec: ModelSpec
    card: ModelCard
    config: dict[str, Any]
    folder: Path
    dtype: str
    forward: PaddedForward


class Backend(Protocol):
    """A loaded model. Several threads call it at once, each with sequences of its own; what one gets must not depend on its neighbours."""

    @property
    def dtype(self) -> str:
        """In which numbers it runs, for the card; results in float32 are held to a relative 1e-4, others to a cosine of 0.999."""
        ...

    @property
    def device(self) -> str:
        """Where it runs, for the card."""
        ...

    def hidden(self, prompts: list[NDArray[np.int32]], segments: list[int] | None) -> FloatArray | torch.Tensor:
        """Last hidden states `[T, H]` of prompts, end to end in their order, in float32.

        prompts: token ids, shortest first. segments: tokens of each one's first part, 0 for all; None where no prompt is a pair, or the
        model does not tell.
        """
        ...


class BackendFactory(Protocol):
    """Loads a model, in the engine's process."""

    def __call__(self, model: BackendModel, settings: EngineSettings) -> Backend:
        """settings: of the engine, `threads` and `lanes` as they are and not 0: so many threads in all, so many callers at once.

        Raises: ModelError for a model that it cannot take; anything else is made one.
        """
        ...


def load_backend(factory: str, model: BackendModel, settings: EngineSettings) -> Backend:
    """Call the factory that stands at `package.module:name`. Raises: ModelError, naming the factory unless it is the factory's own."""
    module, _, name = factory.partition(":")
    try:
        make = cast("BackendFactory", operator.attrgetter(name)(importlib.import_module(module)))
        return make(model, settings)
    except JackfieldError:
        raise
    except Exception as error:  # code of a plugin's, which may raise anything
        raise ModelError(f"model {model.spec.id!r}: the backend {factory} raised {type(error).__name__}: {error}") from error
