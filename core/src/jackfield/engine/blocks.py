"""The 4-bit blocks of a GGUF file beside the weights that were made of them: `int4.safetensors` of a converted folder.

For each linear weight `W` [out, in] that the file stores as Q4_0 or Q4_1, in groups of 32 inputs:

- `W.q`: uint8 [out, in / 2], two weights a byte: input 2j in the lower four bits of byte j, input 2j + 1 in the upper four;
- `W.scale`, `W.min`: float16 [out, in / 32], so that a weight is `q * scale + min`, exactly as the file defines it.

Formats: ggml's `block_q4_0` and `block_q4_1` (ggml-common.h). Rows are in the order of transformers' weights. A tensor whose blocks do
not give the weight that transformers has loaded is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS

__all__ = ["GROUP", "INT4_FILE", "Blocks", "dequantized", "save_blocks", "tensor_names"]

log = logging.getLogger("jackfield.engine")

INT4_FILE = "int4.safetensors"
# Weights of a row that share a scale.
GROUP = 32
# Bytes before the sixteen of the weights: a scale, and in Q4_1 a minimum, in half precision.
HEADS = {gguf.GGMLQuantizationType.Q4_0: 2, gguf.GGMLQuantizationType.Q4_1: 4}

# q, scale, min as they are stored.
Blocks = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def save_blocks(reader: Any, model: torch.nn.Module, folder: Path) -> int:
    """Write the file of a model that was loaded from the reader's; returns the number of weights in it, and writes none for none."""
    tensors: dict[str, torch.Tensor] = {}
    architecture = _architecture(reader)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    names = tensor_names(reader, model)
    for weight, module in _linears(model):
        tensor = stored.get(names.get(weight, ""))
        if tensor is None or tensor.tensor_type not in HEADS:
            continue
        blocks = _unpack(tensor, _rows(architecture, model, tensor.name, module.out_features))
        if _gives(blocks, module.weight):
            tensors |= dict(zip((f"{weight}.q", f"{weight}.scale", f"{weight}.min"), blocks, strict=True))
        else:
            log.warning("%s: the blocks of %s do not give the weight that was loaded; it has no 4-bit form", weight, tensor.name)
    if tensors:
        save_file(tensors, folder / INT4_FILE, metadata={"format": "pt", "group": str(GROUP)})
    return len(tensors) // 3


def tensor_names(reader: Any, model: torch.nn.Module) -> dict[str, str]:
    """What the weights and biases of a model are called in the file, as far as gguf knows their names."""
    architecture = _architecture(reader)
    number = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    if number is None:
        return {}
    names = gguf.get_tensor_name_map(number, int(model.config.num_hidden_layers))  # type: ignore[union-attr,arg-type]
    found = {weight: names.get_name(weight, try_suffixes=(".weight", ".bias")) for weight in model.state_dict()}
    return {weight: name for weight, name in found.items() if name is not None}


def dequantized(blocks: Blocks) -> torch.Tensor:
    """The weight in float32, [out, in]."""
    q, scale, least = blocks
    both = torch.stack((q & 15, q >> 4), dim=-1).reshape(q.shape[0], -1, GROUP)
    return (both * scale.float()[..., None] + least.float()[..., None]).reshape(q.shape[0], -1)


def _architecture(reader: Any) -> str:
    return str(reader.fields["general.architecture"].contents())


def _linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and module.in_features % GROUP == 0:
            yield f"{name}.weight", module


def _rows(architecture: str, model: Any, name: str, count: int) -> torch.Tensor:
    """In which order transformers takes the rows of a tensor: its own reordering, done to their numbers."""
    kind = TENSOR_PROCESSORS.get(architecture)
    if kind is None:
        return torch.arange(count)
    numbers = np.arange(count, dtype=np.int64)[:, None]
    order = kind(config=model.config.to_dict()).process(numbers, name, parsed_parameters={"tensors": {}}).weights
    return torch.from_numpy(np.ascontiguousarray(order).reshape(-1))


def _unpack(tensor: Any, rows: torch.Tensor) -> Blocks:
    head = HEADS[tensor.tensor_type]
    data = torch.from_numpy(np.array(tensor.data))  # a copy: the file is mapped for reading alone
    data = data[rows].reshape(len(rows), -1, head + GROUP // 2)
    halves = data[..., :head].contiguous().view(torch.float16)
    scale = halves[..., 0].contiguous()
    least = halves[..., 1].contiguous() if head == 4 else -8 * scale
    # ggml puts the first half of a group into the lower bits of its bytes, and the second into the upper.
    packed = data[..., head:]
    both = torch.cat((packed & 15, packed >> 4), dim=-1)
    return (both[..., 0::2] | both[..., 1::2] << 4).reshape(len(rows), -1), scale, least


def _gives(blocks: Blocks, weight: torch.Tensor) -> bool:
    """Whether they give the weight, in the numbers in which it was loaded."""
    made = dequantized(blocks).to(weight.dtype).float()
    return made.shape == weight.shape and torch.allclose(made, weight.float(), rtol=1e-6, atol=0)
