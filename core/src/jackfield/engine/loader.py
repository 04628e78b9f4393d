"""Loads a model, and checks before it serves that batching does not change its results."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch.nn.functional import cosine_similarity
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.utils import logging as transformers_logging

from jackfield.client import Execution, ModelCard, ModelSpec
from jackfield.engine.attention import PACKED, calls_so_far
from jackfield.engine.backends import PADDED, BackendModel, PaddedForward, load_backend
from jackfield.engine.cpu import has_fast_bfloat16
from jackfield.engine.decoders import quantize_decoders, replace_decoders
from jackfield.engine.files import ModelFiles, read_model_files
from jackfield.engine.generation.head import LogitsHead, logits_head
from jackfield.engine.generation.load import cached_shapes, cut_to_cache, paged_runner, paged_states
from jackfield.engine.generation.paged import PAGED
from jackfield.engine.generation.plain import PlainRunner
from jackfield.engine.generation.runner import PagedRunner
from jackfield.engine.layers import replace_layers
from jackfield.engine.linear import replace_linears
from jackfield.engine.memory import trim
from jackfield.engine.poolers import LoadedModel, Pooler, Span
from jackfield.engine.poolers.labels import Head, detach_head
from jackfield.engine.poolers.load import FLOAT32_TOLERANCE, label_poolers, plugin_poolers, vector_poolers
from jackfield.engine.poolers.logits import LogitsPooler
from jackfield.engine.runner import BackendRunner, ModelRunner, Runner
from jackfield.errors import ModelError
from jackfield.params import PoolingParams
from jackfield.settings import EngineSettings

__all__ = ["load_model", "load_on_backend"]

log = logging.getLogger("jackfield.engine")

# Lengths of the trial: neighbours of equal and of different length, a single token, and one longer than all others together; with it, one
# beyond the model's window and one beyond the switch of its rotary positions, where that takes no more tokens than these.
TRIAL_LENGTHS = (1, 3, 3, 5, 8, 40)
MAX_TRIAL_LENGTH = 520
# Packed against alone in half precision, of the token that is furthest off and of the one in the middle; in float32 by size. Over thirty
# layers a token's rounding adds up to 0.0026 (SmolLM2-135M), and what reads a wrong neighbour or position is off by far more in many.
HALF_COSINE = 0.98
HALF_MEDIAN_COSINE = 0.998


def load_model(spec: ModelSpec, settings: EngineSettings) -> ModelRunner:
    """Load, check and describe a model; one that generates has a `generator`.

    Raises: ModelError when its files cannot be read, lack weights, or fail the check in every way of running them.
    """
    _quiet()
    files = read_model_files(spec)
    device = _device(spec)
    trial = _trial(files)
    parts = _Parts(_load_weights(spec, files, device), files)
    logits = _logits(parts.whole, trial) if files.classes else []
    parts.take_apart()
    poolers = vector_poolers(spec, files, device)
    runner = _runner(files, parts.model, poolers, packed=False)
    alone, half = _alone(runner, trial), runner.dtype != torch.float32
    if parts.following is not None:
        _check_head(spec, parts.whole, parts.following, trial, alone, half=half)
    why = _why_not_packed(parts.model)
    if not why:
        runner, why = _packed(spec, files, parts, poolers, settings, trial, alone, fast=True)
        if why:
            log.warning("model %s: faster layers than transformers' own change its results (%s), so those are taken", spec.id, why)
            parts = _Parts(_load_weights(spec, files, device), files)
            parts.take_apart()
            runner, why = _packed(spec, files, parts, poolers, settings, trial, alone, fast=False)
    if why:
        log.info("model %s: runs in length buckets: %s", spec.id, why)
        runner = _runner(files, parts.model, poolers, packed=False)
        problem = _check(runner, trial, alone, half=half)
        if problem:
            raise ModelError(f"model {spec.id!r}: results depend on the batch even in length buckets: {problem}")
    if parts.following is not None:
        poolers["logits"] = LogitsPooler(parts.following)
        if runner.generator is None:
            runner.generator = PlainRunner(parts.whole, files.end_ids, runner.card.max_length)
            runner.card = msgspec.structs.replace(runner.card, execution="plain")
    if spec.quantization:
        _quantize(spec, files, runner, parts, trial, alone)
    states = runner.hidden(trial)
    spans = _spans(trial)
    if parts.head is not None:
        poolers |= label_poolers(spec, files, parts.head, states, spans, logits)
    loaded = LoadedModel(
        card=runner.card, config=files.config, folder=Path(files.transformer), model=parts.model, device=runner.device, dtype=runner.dtype
    )
    poolers |= plugin_poolers(spec, loaded, states, spans)
    trim()
    return runner


class _Parts:
    """A model as it was loaded, and apart: the base that makes hidden states, a classifier's head, a causal model's."""

    def __init__(self, whole: torch.nn.Module, files: ModelFiles) -> None:
        self.whole: Any = whole
        self._files = files
        self.model: torch.nn.Module = whole
        self.head: Head | None = None
        self.following: LogitsHead | None = None

    def take_apart(self) -> None:
        """A classifier is not whole any more afterwards."""
        if self._files.classes:
            self.model, self.head = detach_head(self.whole)
        elif _generates(self._files):
            self.model, self.following = self.whole.base_model, logits_head(self.whole)


def _packed(
    spec: ModelSpec,
    files: ModelFiles,
    parts: _Parts,
    poolers: dict[str, Pooler],
    settings: EngineSettings,
    trial: list[bytes],
    alone: torch.Tensor,
    *,
    fast: bool,
) -> tuple[ModelRunner, str]:
    """The runner of sequences end to end, and why it gives other results than each alone, or nothing. fast: with our own layers."""
    base: Any = parts.model
    generator: PagedRunner | None = None
    try:
        shapes = cached_shapes(base) if parts.following is not None else None
        if fast:
            _speed_up(base, parts.head)
        runner = _runner(files, base, poolers, packed=True)
        if parts.following is not None:
            if shapes is None:
                return runner, f"{type(base).__name__} is not made of attention layers alone"
            generator = paged_runner(
                spec,
                base,
                parts.following,
                shapes,
                settings,
                end_ids=files.end_ids,
                position_offset=files.position_offset,
                switch=files.rope_switch,
                rope_lock=runner.rope_lock,
                forward_args=runner.forward_args,
            )
            _set_attention(base, PAGED)
        why = _check(runner, trial, alone, half=runner.dtype != torch.float32)
        if not why and generator is not None:
            why = _paged_problem(generator, files, trial, alone, half=runner.dtype != torch.float32)
    except ModelError:
        raise
    except Exception as error:  # modelling code of many hands, called in a way of ours
        return _runner(files, base, poolers, packed=False), f"{type(error).__name__}: {error}"
    if not why and generator is not None:
        runner.generator = generator
        runner.card = cut_to_cache(runner.card, generator.cache)
    return runner, why


def _quantize(spec: ModelSpec, files: ModelFiles, runner: ModelRunner, parts: _Parts, trial: list[bytes], alone: torch.Tensor) -> None:
    """Let steps that generate take 4-bit products. Raises: ModelError where the model has none, or they change its results."""
    if not isinstance(runner.generator, PagedRunner):
        raise ModelError(f'model {spec.id!r}: quantization = "int4" is of models that generate, packed')
    base: Any = parts.model
    try:
        limit = quantize_decoders(base, Path(files.transformer), f"{parts.whole.base_model_prefix}.")
    except ModelError as error:
        raise ModelError(f'model {spec.id!r}: quantization = "int4": {error}') from error
    if problem := _paged_problem(runner.generator, files, trial, alone, half=True):
        raise ModelError(f"model {spec.id!r}: its 4-bit weights do not give what its weights give: {problem}")
    if limit:
        note = f"steps of up to {limit} tokens of generation by the file's 4-bit weights"
    else:
        note = f"its 4-bit weights are slower here than its {runner.card.dtype} ones, and are not used"
        log.warning("model %s: %s", spec.id, note)
    runner.card = msgspec.structs.replace(runner.card, notes=(*runner.card.notes, note))


def _paged_problem(generator: PagedRunner, files: ModelFiles, trial: list[bytes], alone: torch.Tensor, *, half: bool) -> str:
    """How the trial differs when it is read in pieces, as prompts of a generation are."""
    states = paged_states(generator, [np.frombuffer(prompt, dtype=np.int32).tolist() for prompt in trial], files.rope_switch)
    return _difference(states.float(), alone, half=half)


def _without_generation(card: ModelCard) -> ModelCard:
    """What a backend of hidden states can do of it."""
    return msgspec.structs.replace(card, operations=tuple(name for name in card.operations if name not in ("generate", "logits")))


def _generates(files: ModelFiles) -> bool:
    return "generate" in files.card.operations


def load_on_backend(spec: ModelSpec, factory: str, settings: EngineSettings) -> BackendRunner:
    """Load a model and let a plugin's backend make its hidden states; torch says in float32, prompt by prompt, what is right.

    Raises: ModelError when its files cannot be read or lack weights, or the backend refuses it, fails, or gives other results.
    """
    _quiet()
    runner = _on_backend(spec, read_model_files(spec), factory, settings)
    trim()  # by now nothing holds the torch model any more
    return runner


def _on_backend(spec: ModelSpec, files: ModelFiles, factory: str, settings: EngineSettings) -> BackendRunner:
    if spec.quantization:
        raise ModelError(f"model {spec.id!r}: quantization = {spec.quantization!r} is of the torch engine, and {factory} is to run it")
    device, folder = torch.device("cpu"), Path(files.transformer)
    files = msgspec.structs.replace(files, card=_without_generation(files.card))
    whole = _read_weights(spec, files, "auto")
    dtype = _auto_dtype(next(whole.parameters()).dtype, device) if spec.dtype == "auto" else getattr(torch, spec.dtype)
    whole.float()
    trial = _trial(files, MAX_TRIAL_LENGTH)
    logits = _logits(whole, trial) if files.classes else []
    model, head = detach_head(whole) if files.classes else (whole, None)
    poolers = vector_poolers(spec, files, device)
    right = _runner(files, model, poolers, packed=False)
    alone, states, spans = _alone(right, trial), right.hidden(trial), _spans(trial)
    _set_attention(model, PADDED)
    forward = PaddedForward(model, has_segments=right.has_segments, forward_args=right.forward_args)
    wanted = BackendModel(
        spec=spec, card=right.card, config=files.config, folder=folder, dtype=str(dtype).removeprefix("torch."), forward=forward
    )
    backend = load_backend(factory, wanted, settings)
    card = msgspec.structs.replace(files.card, dtype=backend.dtype, device=backend.device, execution="other")
    runner = BackendRunner(card, backend, poolers, has_segments=right.has_segments)
    try:
        problem = _check(runner, trial, alone, half=backend.dtype != "float32")
    except Exception as error:  # code of a plugin's, which may raise anything
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise ModelError(f'model {spec.id!r}: the backend {factory} does not give what torch gives ({problem}); engine = "torch" runs it')
    if head is not None:
        poolers |= label_poolers(spec, files, head, states, spans, logits)
        _unmap(head.parameters())
    loaded = LoadedModel(card=card, config=files.config, folder=folder, model=model, device=device, dtype=torch.float32)
    poolers |= plugin_poolers(spec, loaded, states, spans)
    return runner


def _quiet() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _speed_up(model: torch.nn.Module, head: Head | None) -> None:
    """Put faster layers in place of the model's own, and let go of what they have copied."""
    layers, linears = replace_decoders(model) or replace_layers(model), replace_linears(model)
    log.debug("%s: %d layers replaced, and %d linear layers beside them", type(model).__name__, layers, linears)
    if linears or layers:
        _unmap([*model.parameters(), *(head.parameters() if head is not None else ())])


def _unmap(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Copy them: a file of weights stays mapped as a whole as long as one tensor lies in it."""
    for parameter in parameters:
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def _runner(files: ModelFiles, model: torch.nn.Module, poolers: dict[str, Pooler], *, packed: bool) -> ModelRunner:
    _set_attention(model, PACKED if packed else "sdpa" if getattr(model, "_supports_sdpa", False) else "eager")
    names = inspect.signature(model.forward).parameters
    parameter = next(model.parameters())
    dtype = str(parameter.dtype).removeprefix("torch.")
    execution: Execution = "packed" if packed else "buckets"
    return ModelRunner(
        msgspec.structs.replace(files.card, dtype=dtype, device=str(parameter.device), execution=execution),
        model,
        poolers,
        packed=packed,
        position_offset=files.position_offset,
        has_segments="token_type_ids" in names and int(files.config.get("type_vocab_size") or 0) > 1,
        rope_switch=files.rope_switch,
        forward_args={"use_cache": False} if "use_cache" in names else {},
    )


def _device(spec: ModelSpec) -> torch.device:
    if spec.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(spec.device)
    except RuntimeError as error:
        raise ModelError(f"model {spec.id!r}: device {spec.device!r} is not known to torch: auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"model {spec.id!r}: device {spec.device!r} was asked for, and torch {torch.__version__} sees no GPU")
    return device


def _load_weights(spec: ModelSpec, files: ModelFiles, device: torch.device) -> torch.nn.Module:
    model = _read_weights(spec, files, "auto" if spec.dtype == "auto" else getattr(torch, spec.dtype))
    if spec.dtype == "auto":
        model.to(_auto_dtype(next(model.parameters()).dtype, device))
    return model.to(device)


def _read_weights(spec: ModelSpec, files: ModelFiles, dtype: torch.dtype | Literal["auto"]) -> torch.nn.Module:
    folder = files.transformer
    try:
        named = {"num_labels": len(files.classes.labels)} if files.classes else {}
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **named)
        model, info = _auto_class(files).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises anything here: OSError, ValueError, KeyError, safetensors' own
        raise ModelError(f"model {spec.id!r}: {folder} cannot be loaded: {str(error).strip() or repr(error)}") from error
    # A head that AutoModel adds and nothing here uses (BERT's pooler) may lack weights; anything else would be random numbers.
    missing = sorted(key for key in info["missing_keys"] if files.classes or not key.startswith("pooler."))
    if missing:
        raise ModelError(
            f"model {spec.id!r}: {folder} lacks {len(missing)} of the weights of {type(model).__name__}, the first {missing[0]!r}"
        )
    if files.classes is None and getattr(model, "pooler", None) is not None:
        model.pooler = None
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    loaded: torch.nn.Module = model
    return loaded


def _auto_class(files: ModelFiles) -> Any:
    if files.classes is None:
        return AutoModelForCausalLM if _generates(files) else AutoModel
    return AutoModelForTokenClassification if files.classes.per_token else AutoModelForSequenceClassification


def _auto_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """float32 stays; half precision runs in bfloat16 where the device is good at it, else in float32."""
    if stored == torch.float32:
        return stored
    return torch.bfloat16 if device.type != "cpu" or has_fast_bfloat16() else torch.float32


def _set_attention(model: torch.nn.Module, implementation: str) -> None:
    # Models outside the attention interface have one way of attending, and refuse to be told.
    if getattr(model, "_supports_attention_backend", False):
        model.set_attn_implementation(implementation)  # type: ignore[operator]


def _why_not_packed(model: torch.nn.Module) -> str:
    if not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} does not use transformers' attention interface"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} takes no position ids"
    return ""


def _trial(files: ModelFiles, longest: int = 0) -> list[bytes]:
    """Prompts for the check, shortest first. longest: one of so many tokens as well, or of as many as the model takes."""
    card = files.card
    beyond = [edge + 8 for edge in (files.window, files.rope_switch) if edge and edge + 8 <= MAX_TRIAL_LENGTH]
    lengths = [min(length, card.max_length) for length in (*TRIAL_LENGTHS, *beyond, *([longest] if longest else ()))]
    return sorted((_trial_ids(card, length, seed) for seed, length in enumerate(lengths)), key=len)


def _segments(prompts: list[bytes]) -> list[int]:
    """Where the second parts of the trial's prompts begin, for models that tell the parts of a pair apart."""
    return [len(prompt) // 8 for prompt in prompts]


def _spans(prompts: list[bytes]) -> list[Span]:
    """Where the states of the trial lie."""
    lengths = [len(prompt) // 4 for prompt in prompts]
    ends = itertools.accumulate(lengths)
    return [Span(end - length, length, 0, PoolingParams()) for length, end in zip(lengths, ends, strict=True)]


@torch.inference_mode()
def _logits(whole: Any, prompts: list[bytes]) -> list[torch.Tensor]:
    """What a classifier says of each prompt alone, by transformers' own modules: what is right."""
    device = next(whole.parameters()).device
    ids = [torch.from_numpy(np.frombuffer(prompt, dtype=np.int32).astype(np.int64))[None].to(device) for prompt in prompts]
    return [whole(input_ids=one, attention_mask=torch.ones_like(one)).logits[0].float() for one in ids]


@torch.inference_mode()
def _check_head(spec: ModelSpec, whole: Any, head: LogitsHead, trial: list[bytes], alone: torch.Tensor, *, half: bool) -> None:
    """Whether states to logits is what the whole model does. Raises: ModelError."""
    right = torch.cat(_logits(whole, trial[:2]))
    got = head(alone[: len(right)].to(next(whole.parameters()).dtype))
    if problem := _difference(got, right, half=half):
        raise ModelError(f"model {spec.id!r}: its logits are made in a way that this server does not run: {problem}")


@torch.inference_mode()
def _alone(runner: ModelRunner, prompts: list[bytes]) -> torch.Tensor:
    """Hidden states of the trial one by one, by transformers' own modules and attention: what is right."""
    return torch.cat([runner.hidden([prompt], [part]) for prompt, part in zip(prompts, _segments(prompts), strict=True)]).float()


@torch.inference_mode()
def _check(runner: Runner, prompts: list[bytes], alone: torch.Tensor, *, half: bool) -> str:
    """Run the trial as one batch; say how it differs from what is right, or nothing."""
    before = calls_so_far()
    together = runner.hidden(prompts, _segments(prompts)).float()
    if isinstance(runner, ModelRunner) and runner.packed:
        calls, layers = calls_so_far() - before, int(getattr(runner.model.config, "num_hidden_layers", 1))
        if not calls or calls % layers:  # two passes where the trial's lengths may not be mixed
            return f"{calls} attention calls in a pass of {layers} layers went through the interface"
    return _difference(together, alone, half=half)


def _difference(together: torch.Tensor, alone: torch.Tensor, *, half: bool) -> str:
    if not torch.isfinite(alone).all():
        return ""  # a broken checkpoint is told per request; batching is not to blame
    if half:
        cosines = cosine_similarity(together, alone, dim=1)
        least, median = float(cosines.min()), float(cosines.median())
        good = least >= HALF_COSINE and median >= HALF_MEDIAN_COSINE
        return "" if good else f"cosines of {least:.5f} at least and {median:.5f} in the middle between tokens batched and alone"
    scale = max(float(alone.abs().max()), 1e-6)
    difference = float((together - alone).abs().max()) / scale
    return "" if difference <= FLOAT32_TOLERANCE else f"relative difference {difference:.1e} between a token batched and alone"


def _trial_ids(card: ModelCard, length: int, seed: int) -> bytes:
    """Deterministic ids from the middle of the vocabulary, where no padding id is."""
    size = max(card.vocab_size, 2)
    ids = size // 2 + (np.arange(length) * 7919 + seed * 104729) % max(size // 2, 1)
    return np.minimum(ids, size - 1).astype(np.int32).tobytes()
