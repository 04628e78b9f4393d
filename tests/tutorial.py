"""Runs docs/tutorial.md: `make tutorial` writes what its commands say into the page, half a minute.

A fenced block with a title is a file, written into the package; the commands of a ```console block (`$ …`) are run in a shell, and what
stands under each is replaced by what it says. An answer that differs only in what differs from run to run (durations, ids, the last digits
of a number) is left as it is, so that a second run changes nothing.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
from contextlib import ExitStack
from pathlib import Path

from tests.servers import Served, served

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
ADDRESS = "http://127.0.0.1:8000"
WIDTH = 110
BLOCK = re.compile(r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.DOTALL | re.MULTILINE)
INCLUDE = re.compile(r'--8<-- "([^":]+)(?::([^"]+))?"')
# What differs from run to run: seconds, the end of an id, milliseconds of a stage.
VARIES = re.compile(r"\d+\.\d+ ?s\b|(?<=[a-z]-)[0-9a-f]{16}\b|(?<=[a-z] )\d+\.\d\d(?=[,\n]|$)")
NUMBER = re.compile(r"\d+\.\d+")
TOLERANCE = 1e-3
# Where `pip` finds that all is installed already, and pytest the plugin that comes with jackfield and no other.
QUIET = {
    "COLUMNS": str(WIDTH),
    "NO_COLOR": "1",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_BUILD_ISOLATION": "0",
    "PIP_NO_INDEX": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_PLUGINS": "jackfield.conformance",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def main() -> None:
    """Run the page, and write it."""
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(run_page(PAGE.read_text(encoding="utf-8"), Path(folder)), encoding="utf-8")


def run_page(page: str, folder: Path) -> str:
    """The page with what its commands say now, run in an empty folder.

    Raises: AssertionError when something that it includes is not there, or a server does not start.
    """
    with ExitStack() as stack:
        shell = Shell(folder, stack)

        def replaced(block: re.Match[str]) -> str:
            if block["title"]:
                (shell.folder / block["title"]).write_text(included(block["text"]), encoding="utf-8")
            if block["language"] != "console":
                return block[0]
            made = "".join(_answered(shell, command, said) for command, said in commands(block["text"]))
            return f"```console\n{made}```"

        return BLOCK.sub(replaced, page)


def commands(text: str) -> list[tuple[str, str]]:
    """Each command of a console block with what stands under it. A command goes on while it is no whole one for a shell."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines(keepends=True):
        command, said = found[-1] if found else ("", "")
        if found and not _whole(command):
            found[-1] = (command + line, said)
        elif line.startswith("$ "):
            found.append((line, ""))
        else:
            found[-1] = (command, said + line)
    return found


def included(text: str) -> str:
    """The file, or its section, that a block includes."""
    found = INCLUDE.fullmatch(text.strip())
    assert found is not None, f"a block with a title is a file under examples/, not {text!r}"
    whole = (ROOT / found[1]).read_text(encoding="utf-8")
    if found[2] is None:
        return whole
    part = re.search(rf"^# --8<-- \[start:{found[2]}\]\n(.*?)^# --8<-- \[end:{found[2]}\]$", whole, re.DOTALL | re.MULTILINE)
    assert part is not None, f"{found[1]} has no section {found[2]}"
    return part[1]


def same(one: str, other: str) -> bool:
    """Whether two answers differ in nothing but what differs from run to run."""
    one, other = VARIES.sub("…", one), VARIES.sub("…", other)
    numbers = zip(NUMBER.findall(one), NUMBER.findall(other), strict=False)
    return NUMBER.sub("#", one) == NUMBER.sub("#", other) and all(math.isclose(float(a), float(b), abs_tol=TOLERANCE) for a, b in numbers)


class Shell:
    """Someone's shell: an environment of its own on top of this one, a folder, and the server that was started."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._top = folder
        self._stack = stack
        self._server: Served | None = None
        made = folder / ".venv"
        venv.create(made)
        self._python = made / "bin" / "python"
        seen = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        own = next((made / "lib").glob("python*/site-packages"))
        (own / "below.pth").write_text("import site; " + "; ".join(f"site.addsitedir({path!r})" for path in seen) + "\n")
        for name, module in {"jackfield": "jackfield.cli", "pip": "pip", "pytest": "pytest"}.items():
            command = made / "bin" / name
            command.write_text(f'#!/bin/sh\nexec "{self._python}" -m {module} "$@"\n')
            command.chmod(0o755)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("JACKFIELD_", "PIP_", "PYTEST_"))}
        path = f"{made / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self._environment = kept | QUIET | {"PATH": path, "JACKFIELD_CACHE": str(folder / ".cache")}

    def run(self, command: str) -> str:
        """What a command says, on both of its outputs."""
        words = shlex.split(command)
        if words[0] == "cd":
            self.folder /= words[1]
            return ""
        if words[:2] == ["jackfield", "serve"]:
            return self._serve(*words[2:])
        if self._server is not None:
            command = command.replace(ADDRESS, self._server.url)
        assert shutil.which(words[0], path=self._environment["PATH"]), f"the tutorial needs {words[0]}"
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        return self._plain(done.stdout)

    def _serve(self, *arguments: str) -> str:
        self._server = self._stack.enter_context(served(*arguments, env=self._environment, python=self._python, cwd=self.folder))
        assert self._server.wrote("documentation: "), self._server.log()
        return self._plain(self._server.log() + "\n")

    def _plain(self, text: str) -> str:
        """Without what belongs to this run: addresses, folders."""
        if self._server is not None:
            text = text.replace(self._server.url, ADDRESS)
        text = text.replace(f"{self.folder}/", "").replace(f"{self._top}/", "")
        return text if not text or text.endswith("\n") else text + "\n"


def _whole(command: str) -> bool:
    try:
        shlex.split(command)
    except ValueError:
        return False
    return True


def _answered(shell: Shell, command: str, before: str) -> str:
    now = "".join(wrapped(line) for line in shell.run(command.removeprefix("$ ")).splitlines(keepends=True))
    return command + (before if same(before, now) else now)


def wrapped(line: str) -> str:
    """A long line, broken between words, or between the members of a JSON object."""
    if len(line.rstrip("\n")) <= WIDTH:
        return line
    lines = [""]
    for part in re.split(r'(?<=,)(?=["{])' if line.startswith("{") else r"(?<= )", line):
        if lines[-1] and len(lines[-1]) + len(part) > WIDTH:
            lines.append("")
        lines[-1] += part
    return "\n".join(part.rstrip(" ") for part in lines)


if __name__ == "__main__":
    main()
