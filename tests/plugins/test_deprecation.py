"""What docs/compatibility.md promises of hooks and arguments that are to go."""

from __future__ import annotations

import logging
from typing import Any

import pluggy
import pytest

from jackfield import hookimpl
from jackfield.hookspecs import APP_PROJECT
from jackfield.plugins import register

spec = pluggy.HookspecMarker(APP_PROJECT)


class Specs:
    @spec(warn_on_impl=DeprecationWarning("jackfield_old goes away in 0.3; implement jackfield_new"))
    def jackfield_old(self) -> None: ...

    @spec(warn_on_impl_args={"uri": DeprecationWarning("the argument uri of jackfield_new goes away in 0.3; take source")})
    def jackfield_new(self, uri: str, source: str) -> None: ...


class Old:
    @hookimpl
    def jackfield_old(self) -> None: ...


class OldArgument:
    @hookimpl
    def jackfield_new(self, uri: str) -> None: ...


class New:
    @hookimpl
    def jackfield_new(self, source: str) -> None: ...


@pytest.mark.parametrize(
    ("plugin", "words"),
    [(Old(), "jackfield_old goes away in 0.3; implement jackfield_new"), (OldArgument(), "take source"), (New(), "")],
    ids=["hook", "argument", "neither"],
)
def test_what_goes_away_is_told_with_plugin_and_place(plugin: Any, words: str, caplog: pytest.LogCaptureFixture) -> None:
    manager = pluggy.PluginManager(APP_PROJECT)
    manager.add_hookspecs(Specs)
    with caplog.at_level(logging.WARNING):
        register(manager, plugin, "mine")
    if words:
        (line,) = caplog.messages
        assert line.startswith("mine: ")
        assert words in line
        assert "test_deprecation.py:" in line
    else:
        assert not caplog.messages
