"""A cache of what the engine computes, in Redis: prompts that were computed before, by any server, are not computed again.

[plugins.redis_cache]
url = "redis://127.0.0.1:6379/0"
ttl_s = 86400
"""

from __future__ import annotations

import hashlib
import logging
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct
from redis.asyncio import Redis
from redis.exceptions import RedisError

from jackfield import Context, Endpoint, EngineRequest, FloatArray, PoolingOutputs, PoolingParams, Submit, hookimpl

__all__ = ["RedisCache", "RedisCacheSettings"]

PLUGIN_API = 1

log = logging.getLogger("jackfield.redis_cache")


class RedisCacheSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of [plugins.redis_cache]."""

    url: Annotated[str, Meta(description="Where Redis is.")] = "redis://127.0.0.1:6379/0"
    ttl_s: Annotated[int, Meta(ge=1, description="Seconds that an entry is kept.")] = 86400


class Entry(Struct, frozen=True, array_like=True):
    """The outputs of one prompt: by operation the shape of its array and the array."""

    arrays: dict[str, tuple[list[int], bytes]]


class RedisCache:
    """Wraps the engine call of every endpoint. A Redis that is away costs a warning, never a request."""

    settings = RedisCacheSettings

    def __init__(self, settings: RedisCacheSettings) -> None:
        self._redis = Redis.from_url(settings.url)
        self._ttl_s = settings.ttl_s

    @hookimpl
    def jackfield_wrap_submit(self, endpoint: Endpoint[Any, Any], submit: Submit) -> Submit:
        """Once for each endpoint, at the start; what it returns is awaited for each request."""

        async def cached(ctx: Context[Any], request: EngineRequest) -> PoolingOutputs:
            if not isinstance(request.params, PoolingParams):
                return await submit(ctx, request)
            keys = [_key(request, place) for place in range(len(request.token_ids))]
            found = await self._get(keys)
            missing = [place for place, entry in enumerate(found) if entry is None]
            if missing:
                computed = await submit(ctx, _only(request, missing))
                fresh = [_entry(computed, number) for number in range(len(missing))]
                await self._set({keys[place]: entry for place, entry in zip(missing, fresh, strict=True)})
                for place, entry in zip(missing, fresh, strict=True):
                    found[place] = entry
            return _outputs([entry for entry in found if entry is not None])

        return cached

    async def _get(self, keys: list[bytes]) -> list[Entry | None]:
        try:
            values: list[Any] = await self._redis.mget(keys)
        except (RedisError, OSError) as error:
            log.warning("not asked: %s", error)
            return [None] * len(keys)
        return [None if value is None else msgspec.msgpack.decode(value, type=Entry) for value in values]

    async def _set(self, entries: dict[bytes, Entry]) -> None:
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for key, entry in entries.items():
                    pipeline.set(key, msgspec.msgpack.encode(entry), ex=self._ttl_s)
                await pipeline.execute()
        except (RedisError, OSError) as error:
            log.warning("not kept: %s", error)


def _key(request: EngineRequest, place: int) -> bytes:
    """All that the result of a prompt depends on: the model, what is wanted, the tokens and their parts."""
    parts = [values[place] if values else 0 for values in (request.prefix_lengths, request.segments)]
    about = msgspec.msgpack.encode((request.model, request.params, parts))
    return b"jackfield:" + hashlib.blake2b(about + request.token_ids[place], digest_size=20).hexdigest().encode()


def _only(request: EngineRequest, places: list[int]) -> EngineRequest:
    """The same request for some of its prompts."""

    def pick(values: list[int] | None) -> list[int] | None:
        return None if values is None else [values[place] for place in places]

    return msgspec.structs.replace(
        request,
        token_ids=[request.token_ids[place] for place in places],
        prefix_lengths=pick(request.prefix_lengths),
        segments=pick(request.segments),
    )


def _entry(outputs: PoolingOutputs, number: int) -> Entry:
    return Entry({name: (list(arrays[number].shape), arrays[number].tobytes()) for name, arrays in outputs.values.items()})


def _outputs(entries: list[Entry]) -> PoolingOutputs:
    return PoolingOutputs(values={name: [_array(*entry.arrays[name]) for entry in entries] for name in entries[0].arrays})


def _array(shape: list[int], data: bytes) -> FloatArray:
    return np.frombuffer(data, dtype=np.float32).reshape(shape)
