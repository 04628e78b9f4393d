"""A model's instructions (sentence-transformers' prompts), chosen by name or by kind of text."""

from __future__ import annotations

from jackfield import BadRequest, Model

__all__ = ["INPUT_TYPES", "instruction"]

# Kinds of text as Cohere, Voyage and others name them, and the names of prompts that models give the same kind, likeliest first.
INPUT_TYPES: dict[str, tuple[str, ...]] = {
    "search_query": ("search_query", "query", "web_search_query", "s2p_query"),
    "search_document": ("search_document", "document", "passage"),
    "query": ("query", "search_query", "web_search_query", "s2p_query"),
    "document": ("document", "passage", "search_document"),
    "passage": ("passage", "document", "search_document"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
    "image": (),
}


def instruction(model: Model, *, prompt_name: str | None, input_type: str | None) -> str:
    """What to put before each text: the named prompt, else the one for the kind, else the model's default, else nothing.

    A known kind for which the model has no prompt passes, since clients send one whatever the model.

    Raises: BadRequest for a name or kind that neither the model nor `INPUT_TYPES` knows.
    """
    prompts = model.card.prompts
    if prompt_name is None and input_type is not None:
        if input_type in prompts:
            return prompts[input_type]
        if input_type not in INPUT_TYPES:
            known = ", ".join(map(repr, [*INPUT_TYPES, *prompts]))
            raise BadRequest(f"input_type {input_type[:100]!r} is not known; known are {known}.", param="input_type")
        for name in INPUT_TYPES[input_type]:
            if name in prompts:
                return prompts[name]
    return model.instruction(prompt_name)
