"""What a model's files say, read without torch: its capabilities, lengths, pooling and prompts.

The HTTP process and `jackfield check` read the same files through here before any weight is loaded. Maximum length and pooling follow
sentence-transformers 6.2 (`base/modules/transformer.py`, `sentence_transformer/modules/pooling.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from jackfield.client import ModelCard, ModelSpec
from jackfield.engine.classes import ClassFiles, read_classes
from jackfield.engine.folder import read_json
from jackfield.engine.generation.files import GenerationFiles, read_generation
from jackfield.errors import ModelError

__all__ = ["POOLING_MODES", "DenseFiles", "ModelFiles", "read_model_files"]

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")

_BOOLEAN_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

# Where sentence-transformers looks for the length and the lower-casing of its Transformer module, first found wins.
_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)

# Learned positions that begin after the padding id: two of the table's rows are never used.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet", "data2vec-text", "roberta-prelayernorm")

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_BASE_HEADS = ("Model", "ForMaskedLM", "ForPreTraining")


class DenseFiles(Struct, frozen=True, kw_only=True):
    """A Dense module: its folder, sizes, and the activation as a dotted torch name."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


class ModelFiles(Struct, frozen=True, kw_only=True):
    """All that the loader needs to know beside the card.

    transformer: the folder of config.json and weights. pooling: modes, concatenated in order. position_offset: the id of a sequence's first
    position. classes: of a classifier's head. rope_switch: the length from which on a sequence has other rotary frequencies (longrope), or
    0. window: tokens that a token attends to in some layers, or 0 for all. end_ids: the tokens that end a generated text.
    """

    card: ModelCard
    config: dict[str, Any]
    transformer: str
    pooling: tuple[str, ...]
    dense: tuple[DenseFiles, ...] = ()
    classes: ClassFiles | None = None
    position_offset: int = 0
    rope_switch: int = 0
    window: int = 0
    end_ids: tuple[int, ...] = ()


def read_model_files(spec: ModelSpec) -> ModelFiles:
    """Read a model folder.

    Raises: ModelError, naming the model, the file and what is wrong with it.
    """
    folder = Path(spec.path)
    modules = _modules(spec, folder)
    transformer = folder / modules.get("Transformer", "")
    config = read_json(spec, transformer / "config.json")
    if config is None:
        raise ModelError(f"model {spec.id!r}: {folder} has no config.json, so it is no transformers or sentence-transformers folder")
    _refuse_remote_code(spec, config, read_json(spec, transformer / "tokenizer_config.json") or {})
    text_config = config.get("text_config", config)
    architecture = (config.get("architectures") or [""])[0]
    sentence = read_json(spec, folder / "config_sentence_transformers.json") or {}
    classes = None if "Pooling" in modules else read_classes(spec, config, sentence, architecture)
    modes, include_prompt, notes = _pooling(spec, folder, modules, architecture.endswith(_CAUSAL), heads=classes is not None)
    dense = tuple(_dense(spec, folder, name) for key, name in modules.items() if key.startswith("Dense"))
    hidden = int(text_config.get("hidden_size") or text_config.get("dim") or text_config.get("n_embd") or 0)
    embedding_size = dense[-1].out_features if dense else hidden * len(modes)
    rope, switch = _rope(text_config)
    max_length, lowercase, length_note = _lengths(spec, transformer, text_config, switch if rope == "dynamic" else 0)
    matryoshka, dimensions = _matryoshka(spec, config)
    operations = _operations(architecture, "Pooling" in modules, classes)
    generation = read_generation(spec, transformer, text_config) if "generate" in operations else GenerationFiles()
    card = ModelCard(
        id=spec.id,
        path=str(transformer),
        architecture=architecture or str(config.get("model_type", "unknown")),
        operations=(*operations, *spec.poolers),
        max_length=max_length,
        vocab_size=int(text_config.get("vocab_size", 0)),
        embedding_size=embedding_size if classes is None else None,
        pooling="+".join(modes) if classes is None else None,
        labels=classes.labels if classes else (),
        activation=classes.activation if classes else "none",
        sampling=generation.sampling,
        score_activation=classes.score_activation if classes else "none",
        matryoshka=matryoshka,
        dimensions=dimensions,
        normalize="Pooling" not in modules or "Normalize" in modules,
        prompts={str(name): str(text) for name, text in (sentence.get("prompts") or {}).items()},
        default_prompt=sentence.get("default_prompt_name"),
        exclude_prompt=not include_prompt,
        lowercase=lowercase,
        notes=(*notes, *length_note),
    )
    return ModelFiles(
        card=card,
        config=config,
        transformer=str(transformer),
        pooling=modes,
        dense=dense,
        classes=classes,
        rope_switch=switch if rope == "longrope" else 0,
        window=int(text_config.get("sliding_window") or text_config.get("local_attention") or 0),
        position_offset=_position_offset(text_config),
        end_ids=generation.end_ids,
    )


def _refuse_remote_code(spec: ModelSpec, *configs: dict[str, Any]) -> None:
    for config in configs:
        if config.get("auto_map"):
            raise ModelError(
                f"model {spec.id!r}: its files ask for code of their own (auto_map: {sorted(config['auto_map'])}). jackfield never sets "
                "trust_remote_code: take a checkpoint whose architecture transformers carries itself"
            )


def _modules(spec: ModelSpec, folder: Path) -> dict[str, str]:
    """Folder by module kind (`Dense`, `Dense1`, ... in order); empty for a plain transformers folder."""
    path = folder / "modules.json"
    if not path.is_file():
        return {}
    try:
        entries = sorted(json.loads(path.read_text(encoding="utf-8")), key=lambda entry: int(entry["idx"]))
        kinds = [(str(entry["type"]).rsplit(".", 1)[-1], str(entry["path"])) for entry in entries]
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ModelError(f"model {spec.id!r}: {path} cannot be read: {error!r}") from error
    found: dict[str, str] = {}
    for kind, name in kinds:
        if kind not in ("Transformer", "Pooling", "Dense", "Normalize", "Dropout"):
            raise ModelError(
                f"model {spec.id!r}: {path} names the module {kind!r}; this server runs Transformer, Pooling, Dense and Normalize"
            )
        if kind == "Dense" and "Normalize" in found:
            raise ModelError(f"model {spec.id!r}: {path} has a Dense after Normalize, an order that this server does not run")
        found[f"{kind}{len(found)}" if kind == "Dense" and kind in found else kind] = name
    return found


def _pooling(
    spec: ModelSpec, folder: Path, modules: dict[str, str], causal: bool, *, heads: bool
) -> tuple[tuple[str, ...], bool, tuple[str, ...]]:
    """Modes, whether the instruction's tokens count, and what to say in the log. heads: a classifier's, which makes no vectors."""
    if spec.pooling:
        modes = tuple(spec.pooling.split("+"))
        unknown = [mode for mode in modes if mode not in POOLING_MODES]
        if unknown:
            raise ModelError(
                f"model {spec.id!r}: pooling {spec.pooling!r} is not known; one of {', '.join(POOLING_MODES)}, or several with +"
            )
        return modes, True, (f"pooling {spec.pooling} by configuration",)
    if heads:
        return ("mean",), True, ()
    if "Pooling" not in modules:
        mode = "lasttoken" if causal else "mean"
        return (
            (mode,),
            True,
            (f"vectors are made by {mode}, as sentence-transformers would: the files name no pooling (set `pooling` to change it)",),
        )
    path = folder / modules["Pooling"] / "config.json"
    config = read_json(spec, path)
    if config is None:
        raise ModelError(f"model {spec.id!r}: modules.json names a Pooling module, but {path} is missing")
    named = config.get("pooling_mode")
    if named is None:
        modes = tuple(mode for key, mode in _BOOLEAN_MODES.items() if config.get(key)) or ("mean",)
    else:
        modes = (named,) if isinstance(named, str) else tuple(named)
    unknown = [mode for mode in modes if mode not in POOLING_MODES]
    if unknown:
        raise ModelError(f"model {spec.id!r}: {path} asks for the pooling {unknown[0]!r}; known are {', '.join(POOLING_MODES)}")
    return modes, bool(config.get("include_prompt", True)), ()


def _dense(spec: ModelSpec, folder: Path, name: str) -> DenseFiles:
    path = folder / name / "config.json"
    config = read_json(spec, path) or {}
    try:
        dense = DenseFiles(
            folder=str(folder / name),
            in_features=int(config["in_features"]),
            out_features=int(config["out_features"]),
            bias=bool(config.get("bias", True)),
            activation=str(config.get("activation_function", "torch.nn.modules.activation.Tanh")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"model {spec.id!r}: {path} does not describe a Dense module: {error!r}") from error
    if not dense.activation.startswith("torch.nn.modules."):
        raise ModelError(f"model {spec.id!r}: {path} wants the activation {dense.activation!r}; only torch.nn.modules.* are run")
    if config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise ModelError(f"model {spec.id!r}: {path} wants a Dense with a residual or of token embeddings, which this server does not run")
    return dense


def _rope(config: dict[str, Any]) -> tuple[str, int]:
    """The kind of rotary positions, and the length up to which the model was trained with them."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    trained = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return kind, int(trained or config.get("max_position_embeddings") or 0)


def _lengths(spec: ModelSpec, transformer: Path, config: dict[str, Any], stable: int) -> tuple[int, bool, tuple[str, ...]]:
    """Maximum length in tokens, whether texts are lower-cased, and notes. stable: a length from which on results would depend on what was
    computed before (dynamic rotary positions), or 0."""
    sentence: dict[str, Any] = next(filter(None, (read_json(spec, transformer / name) for name in _TRANSFORMER_CONFIGS)), {})
    tokenizer = read_json(spec, transformer / "tokenizer_config.json") or {}
    positions = config.get("max_position_embeddings") or config.get("n_positions") or config.get("seq_length")
    capacity = int(positions) - _position_offset(config) if positions and int(positions) > 0 else None
    bound = "positions that the model has"
    if stable and (capacity is None or stable < capacity):
        capacity, bound = stable, "tokens that it was trained with: beyond, dynamic rotary positions depend on what was computed before"
    asked = sentence.get("max_seq_length")
    if asked is None:
        limits = [int(n) for n in (tokenizer.get("model_max_length"), positions) if isinstance(n, (int, float)) and 0 < n < 2**40]
        asked = min(limits) if limits else None
    if asked is None and capacity is None:
        raise ModelError(f"model {spec.id!r}: its files give no maximum length; set max_length in [models.{spec.id}]")
    length = int(asked) if asked is not None else int(capacity or 0)
    notes: tuple[str, ...] = ()
    if capacity is not None and length > capacity:
        notes = (f"maximum length {length} of its files cut to the {capacity} {bound}",)
        length = capacity
    if spec.max_length:
        if capacity is not None and spec.max_length > capacity:
            raise ModelError(f"model {spec.id!r}: max_length = {spec.max_length} in its table is over the {capacity} {bound}")
        length = spec.max_length
    return length, bool(sentence.get("do_lower_case", False)), notes


def _position_offset(config: dict[str, Any]) -> int:
    if config.get("model_type") in _OFFSET_POSITIONS:
        return int(config.get("pad_token_id", 1)) + 1
    return 0


def _matryoshka(spec: ModelSpec, config: dict[str, Any]) -> tuple[bool, tuple[int, ...]]:
    """Whether `dimensions` is allowed, and which sizes; the operator's word counts before the files'."""
    if spec.matryoshka is not None:
        return (spec.matryoshka, ()) if isinstance(spec.matryoshka, bool) else (True, spec.matryoshka)
    sizes = config.get("matryoshka_dimensions") or ()
    return bool(config.get("is_matryoshka") or sizes), tuple(int(size) for size in sizes)


def _operations(architecture: str, has_pooling: bool, classes: ClassFiles | None) -> tuple[str, ...]:
    if classes is not None:
        return (*classes.operations, "hidden_states")
    if architecture.endswith(_CAUSAL) and not has_pooling:
        return ("embed", "token_embed", "hidden_states", "generate", "logits")
    embeds = has_pooling or not architecture or architecture.endswith(_BASE_HEADS) or architecture.endswith(_CAUSAL)
    return ("embed", "token_embed", "hidden_states") if embeds else ()
