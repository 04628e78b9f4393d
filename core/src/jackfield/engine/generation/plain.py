"""Generation of models whose attention this server does not run itself: by transformers' own `generate`, a choice and a token at a time."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig

from jackfield.engine.generation.blocks import BlockPool
from jackfield.engine.generation.grammars import start_masks
from jackfield.engine.generation.growing import GrowingChoice
from jackfield.engine.generation.rows import Result
from jackfield.engine.generation.sampler import sample
from jackfield.engine.generation.scheduler import Choice, Work
from jackfield.errors import NotSupported

__all__ = ["PlainRunner"]


class PlainRunner:
    """A whole causal model, and the cache of the choice that grows: a Generator of one choice at a time."""

    max_running = 1
    switch = 0

    def __init__(self, model: torch.nn.Module, end_ids: tuple[int, ...], max_length: int) -> None:
        self.pool = BlockPool(1, max_length, share=False)
        self.end_ids = end_ids
        self._model: Any = model
        self._device = next(model.parameters()).device
        self._caches: WeakKeyDictionary[Choice, Any] = WeakKeyDictionary()
        pad = getattr(model.config, "pad_token_id", None) or 0
        self._config = GenerationConfig(max_new_tokens=1, do_sample=False, pad_token_id=pad)

    def clear(self, blocks: list[int]) -> None:
        """A choice's own cache goes with it."""

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        """One result a work, in their order."""
        return [self._run(work) for work in works]

    def _run(self, work: Work) -> Result:
        choice = work.choice
        assert isinstance(choice, GrowingChoice)
        if choice.told_prompt is not None:
            return Result(error=NotSupported("prompt_logprobs are not told of a model whose execution is plain (see /v1/models)."))
        if not work.samples or choice.is_full:  # a prompt is read as a whole, with its last part
            return Result()
        ids = torch.tensor([choice.token_ids.tolist()], device=self._device)
        output = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self._config,
            past_key_values=self._caches.get(choice),
            return_dict_in_generate=True,
            output_logits=True,
        )
        self._caches[choice] = getattr(output, "past_key_values", None)  # of the tokens up to here; the one that it chose is not in it
        masks = start_masks([choice.row])
        return Result(sample(output.logits[0].float(), [choice.row], masks.result() if masks else None)[0])
