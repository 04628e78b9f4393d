"""Converts a GGUF file into a transformers folder: `python -m jackfield.engine.gguf FILE FOLDER DTYPE`, one file a process.

Weights, configuration and tokenizer are read by transformers alone (`gguf_file=`), which gives plain dequantised weights. What it cannot
read, or would leave out in silence, is refused. It reports on standard output (`jackfield.engine.conversion`), a line of JSON each.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import gguf
import msgspec
import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig, GgufConfig
from transformers import modeling_gguf_pytorch_utils as reading
from transformers.utils import logging as transformers_logging

from jackfield.cache import made_once
from jackfield.engine.blocks import save_blocks, tensor_names
from jackfield.engine.conversion import Percent, Refused, Reports
from jackfield.engine.gguf_tokenizer import read_tokenizer
from jackfield.errors import ModelError

__all__ = ["convert", "main"]

# safetensors copies a file's tensors before it writes them: this bounds the copy.
SHARD_SIZE = "2GB"
# Percents at which each part is done.
STARTED, OPENED, CONFIGURED, WEIGHTS, SAVED = 5, 10, 20, 80, 90
# Where a file names its end tokens: of a text, of a turn, of a message that calls a tool.
END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Sampling that the author of a file recommends, under transformers' names.
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
# Rotary frequencies of Llama 3.1 and later, which transformers computes from its configuration.
ROPE_FREQUENCIES = "rope_freqs.weight"
# Where transformers puts the file's own name for the model, which is no path.
NAME = "_model_name_or_path"

Report = Callable[[int], None]


def convert(file: Path, folder: Path, dtype: torch.dtype, report: Report) -> None:
    """Write the folder's files. report: is told percents. Raises: ModelError, without the model's name; OSError if it cannot be written."""
    report(STARTED)
    reader = _open(file)
    report(OPENED)
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "local_files_only": True}
    architecture = _text(reader, "general.architecture")
    try:
        config = AutoConfig.from_pretrained(**where)
        _set_rope(reader, config)
        tokenizer = read_tokenizer(file, {name: _value(reader, name) for name in reader.fields if name.startswith("tokenizer.")})
        report(CONFIGURED)
        with _followed(lambda share: report(CONFIGURED + int(share * (WEIGHTS - CONFIGURED)))):
            model, info = _class(config).from_pretrained(
                **where, config=config, dtype=dtype, quantization_config=GgufConfig(dequantize=True), output_loading_info=True
            )
    except (ModelError, BrokenPipeError):
        raise
    except Exception as error:  # transformers raises anything on third parties' files
        raise ModelError(
            f"transformers {transformers.__version__} cannot read it (architecture {architecture!r}): {str(error).strip() or repr(error)}"
        ) from error
    _check_whole(reader, model, info["missing_keys"])
    report(WEIGHTS)
    model.generation_config = GenerationConfig(**_generation(reader, config))
    if hasattr(model.config, NAME):
        delattr(model.config, NAME)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(folder)
    report(SAVED)
    save_blocks(reader, model, folder)


def _open(file: Path) -> Any:
    size = file.stat().st_size
    try:
        reader = gguf.GGUFReader(str(file))  # as transformers calls it
    except Exception as error:  # numpy's and its own, on whatever the bytes say
        raise ModelError(
            f"its {size} bytes are no whole GGUF file, it is damaged or cut off: {str(error).strip() or repr(error)}"
        ) from error
    parts = _value(reader, "split.count") or 1
    if parts > 1:
        raise ModelError(
            f"it is one of {parts} parts of a model, and transformers reads models of one file: join them (llama-gguf-split --merge)"
        )
    return reader


def _value(reader: Any, name: str) -> Any:
    """Of a key of the metadata, or None."""
    field = reader.fields.get(name)
    return None if field is None else field.contents()


def _text(reader: Any, name: str) -> str:
    return str(_value(reader, name) or "")


def _class(config: Any) -> Any:
    """What to load: the class that the configuration names, else a causal model where there is one."""
    named = config.architectures or []
    if named:
        return getattr(transformers, named[0])
    return AutoModelForCausalLM if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel


def _set_rope(reader: Any, config: Any) -> None:
    """Put into the configuration what the file says of scaled rotary positions, which transformers leaves out.

    Raises: ModelError for a scaling that has no such form.
    """
    architecture = _text(reader, "general.architecture")
    scaling = _text(reader, f"{architecture}.rope.scaling.type")
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == ROPE_FREQUENCIES), None)
    rope = getattr(config, "rope_parameters", None) or {}
    if factors is not None and rope.get("rope_type", "default") == "default":
        config.rope_parameters = {**rope, **_llama3_rope(torch.from_numpy(factors.copy()), float(rope["rope_theta"]))}
    elif scaling == "linear" and rope.get("rope_type") == "default":
        factor = float(_value(reader, f"{architecture}.rope.scaling.factor") or 1.0)
        config.rope_parameters = {**rope, "rope_type": "linear", "factor": factor}
    elif scaling not in ("", "none", rope.get("rope_type")):
        raise ModelError(f"it scales rotary positions by {scaling!r}, which transformers {transformers.__version__} does not take over")


def _llama3_rope(factors: torch.Tensor, theta: float) -> dict[str, Any]:
    """Parameters of transformers' `llama3` positions that give the file's divisors of the frequencies.

    The converter of llama.cpp computes them so, from these numbers, which a file does not hold. Raises: ModelError if others were taken.
    """
    factor, trained, low, high = float(factors.max()), 8192, 1.0, 4.0
    half = factors.numel()
    frequencies = 1.0 / theta ** (torch.arange(half, dtype=torch.float32) / half)
    turns = trained * frequencies / (2 * torch.pi)
    smooth = (turns - low) / (high - low)
    middle = 1.0 / ((1 - smooth) / factor + smooth)
    computed = torch.where(turns > high, 1.0, torch.where(turns < low, factor, middle))
    if not torch.allclose(computed, factors.float(), rtol=1e-3):
        raise ModelError(f"its {half} factors of rotary frequencies ({ROPE_FREQUENCIES}) are not those of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }


def _check_whole(reader: Any, model: Any, missing: Iterable[str]) -> None:
    """Raises: ModelError for weights of the model that the file lacks, or of the file that the model has no place for."""
    lacking = sorted(missing)
    if lacking:
        raise ModelError(f"it lacks {len(lacking)} of the weights of {type(model).__name__}, the first {lacking[0]!r}")
    names = tensor_names(reader, model)
    stored = {tensor.name for tensor in reader.tensors}
    if not all(name in stored for name in names.values() if name != "output.weight") or len(names) < len(model.state_dict()):
        return  # names that gguf does not know by themselves, such as joined experts: nothing can be said
    unread = sorted(stored - set(names.values()) - {ROPE_FREQUENCIES})
    if unread:
        raise ModelError(f"{len(unread)} of its {len(stored)} tensors have no place in {type(model).__name__}, the first {unread[0]!r}")


def _generation(reader: Any, config: Any) -> dict[str, Any]:
    """Of generation_config.json: every end token, and the sampling that the file recommends."""
    named = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = dict.fromkeys([*named, *(_value(reader, f"tokenizer.ggml.{name}") for name in END_TOKENS)])
    eos = [int(token) for token in ends if token is not None]
    sampling = {ours: _value(reader, f"general.sampling.{name}") for name, ours in SAMPLING.items()}
    given = {name: value for name, value in sampling.items() if value is not None}
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": config.pad_token_id,
        **({"do_sample": True, **given} if given else {}),
    }


@contextmanager
def _followed(report: Callable[[float], None]) -> Iterator[None]:
    """Lets transformers tell how far it is: it shows its way through the tensors by a bar of tqdm's, and in no other way."""

    def bar(tensors: list[Any], **_: object) -> Iterator[Any]:
        for position, tensor in enumerate(tensors):
            report(position / len(tensors))
            yield tensor

    own, reading.tqdm = reading.tqdm, bar
    try:
        yield
    finally:
        reading.tqdm = own


def _prepare() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_grad_enabled(False)
    # transformers opens the file anew for each part, and asks for the table of names once a module. For SmolLM2 that is 4 s a time for
    # its 49,000 words, and 6 s for the table, of 27 s in all (2 cores, December 2026); a reader and a table serve as often as wanted.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # type: ignore[misc,assignment]
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)


def main() -> int:
    """Convert into the cache. What cannot be done is said, not raised: exit code 2."""
    out, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no report
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C goes to the server as well, which ends this process

    def report(said: Reports) -> None:
        out.buffer.write(msgspec.json.encode(said) + b"\n")
        out.buffer.flush()  # fails when nobody listens any more: the server has ended, and the work with it

    said = -1

    def tell(percent: int) -> None:
        nonlocal said
        if percent != said:
            said = percent
            report(Percent(percent))

    file, folder, dtype = Path(sys.argv[1]), Path(sys.argv[2]), getattr(torch, sys.argv[3])
    _prepare()
    try:
        made_once(folder, lambda made: convert(file, made, dtype, tell))
    except BrokenPipeError:
        os._exit(1)  # Python would flush the broken pipe again
    except ModelError as error:
        report(Refused(str(error)))
        return 2
    except (OSError, SafetensorError) as error:
        report(Refused(f"{folder.parent} cannot be written: {str(error).strip() or repr(error)}"))
        return 2
    return 0


def _end(_: int, __: FrameType | None) -> None:
    raise SystemExit(1)  # so that what was begun is removed


if __name__ == "__main__":
    sys.exit(main())
