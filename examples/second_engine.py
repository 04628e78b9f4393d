"""A second engine: the vector of a text is the mean of its tokens' rows in the model's own table, without a transformer.

It takes the models that ask for it and leaves the others to jackfield's:

[models.quick]
source = "sentence-transformers/all-MiniLM-L6-v2"
engine = "mean"

[plugins.second_engine]
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import load_file

from jackfield import (
    Delta,
    EngineHealth,
    EngineRequest,
    EngineStats,
    EngineUnavailable,
    FloatArray,
    ModelCard,
    ModelError,
    ModelSpec,
    NotSupported,
    PoolingOutputs,
    PoolingParams,
    Progress,
    hookimpl,
)

__all__ = ["MeanEngine", "SecondEngine"]

PLUGIN_API = 1

# What the table is called in the files of BERT and its kin, and of Llama and its kin.
TABLES = ("embeddings.word_embeddings.weight", "embed_tokens.weight")


class SecondEngine:
    """The plugin: one engine for all models that want it."""

    def __init__(self) -> None:
        self._engine = MeanEngine()

    @hookimpl
    def jackfield_engine(self, spec: ModelSpec) -> MeanEngine | None:
        """Called once for each model that an endpoint computes with."""
        if spec.engine != "mean":
            return None
        self._engine.add(spec)
        return self._engine


class MeanEngine:
    """An EngineClient. The server has checked lengths, token ids and operations before anything comes here."""

    def __init__(self) -> None:
        self._specs: dict[str, ModelSpec] = {}
        self._tables: dict[str, FloatArray] = {}
        self._health = EngineHealth(state="loading")
        self._stats = EngineStats()

    def add(self, spec: ModelSpec) -> None:
        """A model to be loaded by `start`."""
        self._specs[spec.id] = spec

    async def start(self, progress: Callable[[Progress], None] | None = None) -> dict[str, ModelCard]:
        """Read the tables. A card says what a model can do; endpoints that need something else are not served with it."""
        cards = {}
        for number, (name, spec) in enumerate(self._specs.items()):
            if progress is not None:
                progress(Progress(model=name, what="models", done=number, total=len(self._specs)))
            self._tables[name] = await asyncio.to_thread(_read_table, spec)
            cards[name] = _card(spec, self._tables[name])
        self._health = EngineHealth(state="ready")
        return cards

    async def stop(self) -> None:
        """Nothing runs on: a request is over when its thread is."""
        self._health = EngineHealth(state="stopped")

    async def submit(self, request: EngineRequest) -> PoolingOutputs:
        """In a thread, so that the event loop goes on. An engine that computes in batches would queue here."""
        if self._health.state != "ready":
            raise EngineUnavailable(f"The engine is {self._health.state}.")
        assert isinstance(request.params, PoolingParams)
        vectors = await asyncio.to_thread(_vectors, self._tables[request.model], request.token_ids, request.params)
        before = self._stats
        self._stats = msgspec.structs.replace(
            before,
            num_sequences=before.num_sequences + len(request.token_ids),
            num_tokens=before.num_tokens + sum(len(ids) for ids in request.token_ids) // 4,
        )
        return PoolingOutputs(values={"embed": vectors})

    def stream(self, request: EngineRequest) -> AsyncIterator[Delta]:
        """No card names `generate`, so nothing asks for it."""
        raise NotSupported("This engine generates nothing.")

    def end_choice(self, request_id: int, index: int) -> None:
        """Nothing to end."""

    def health(self) -> EngineHealth:
        """For `/health` and `/ready`."""
        return self._health

    def stats(self) -> EngineStats:
        """For `/metrics`."""
        return self._stats


def _read_table(spec: ModelSpec) -> FloatArray:
    path = Path(spec.path) / "model.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"model {spec.id!r}: {path} cannot be read: {error}") from error
    found = next((tensors[name] for name in tensors if name.endswith(TABLES)), None)
    if found is None:
        raise ModelError(f"model {spec.id!r}: {path} has no table of tokens; looked for {' and '.join(TABLES)}")
    return np.asarray(found, dtype=np.float32)


def _card(spec: ModelSpec, table: FloatArray) -> ModelCard:
    config = json.loads((Path(spec.path) / "config.json").read_text(encoding="utf-8"))
    return ModelCard(
        id=spec.id,
        path=spec.path,  # where the server finds the tokenizer
        architecture="TokenMean",
        operations=("embed",),
        max_length=spec.max_length or int(config["max_position_embeddings"]),
        vocab_size=len(table),
        embedding_size=table.shape[1],
        dtype="float32",
        device="cpu",
        execution="other",
    )


def _vectors(table: FloatArray, prompts: list[bytes], params: PoolingParams) -> list[FloatArray]:
    """Of length 1 unless the request wants it otherwise."""
    means = [table[np.frombuffer(ids, dtype=np.int32)].mean(axis=0) for ids in prompts]
    return means if params.use_activation is False else [mean / np.linalg.norm(mean) for mean in means]
