"""The page of the hooks is held to the specifications: each with its arguments, and every attribute of a context."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from jackfield.context import Context
from jackfield.endpoint import STAGES
from jackfield.hookspecs import AppHooks, StageHooks

PAGE = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()


def documented(*, app: bool) -> dict[str, list[str]]:
    """Arguments by hook, in the order of the page."""
    found = re.findall(r"^### `(\w+)\((.*?)\)`$", PAGE, re.MULTILINE)
    return {name: [part.strip() for part in arguments.split(",")] for name, arguments in found if name.startswith("jackfield_") == app}


def specified(kind: type) -> dict[str, list[str]]:
    hooks = {name: function for name, function in vars(kind).items() if inspect.isfunction(function)}
    return {name: list(inspect.signature(function).parameters)[1:] for name, function in hooks.items()}


def test_app_hooks() -> None:
    assert documented(app=True) == specified(AppHooks)


def test_stage_hooks_in_the_order_in_which_they_run() -> None:
    assert documented(app=False) == specified(StageHooks)
    assert tuple(documented(app=False)) == STAGES


def test_attributes_of_a_context() -> None:
    table = PAGE[PAGE.index("## What a context has") :]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(Context.__slots__)
