"""What the site has beside docs/: README.md as its first page, the plugins' READMEs, and each file of code that a page links to.

Links are written for the repository's own view, relative to the file that they stand in; here they are turned to the site's pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]+)?\)")
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".toml": "toml"}
# Pages of the site by the file of the repository that they are made of, both as paths from the root of either.
PAGES: dict[str, str] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """A plugin's page stands below "Plugins" without being named in mkdocs.yml: a new plugin is a new folder, and no edit elsewhere."""
    below = next(entry["Plugins"] for entry in config.nav or () if "Plugins" in entry)
    below += [_page(readme) for readme in _readmes()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies beside docs/."""
    texts = ["README.md", "benchmarks/ledger.md", *_readmes()]
    for source in texts:
        files.append(File.generated(config, _page(source), content=_read(source)))
    own = [f"docs/{file.src_uri}" for file in files.documentation_pages() if file.generated_by is None]
    linked = {_target(source, link[1]) for source in (*own, *texts) for link in LINK.finditer(_read(source))}
    code = sorted(source for source in linked if Path(source).suffix in LANGUAGES)
    for source in code:
        content = f'# {source}\n\n```{LANGUAGES[Path(source).suffix]}\n--8<-- "{source}"\n```\n'
        files.append(File.generated(config, _page(source), content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    PAGES.update({source: _page(source) for source in (*own, *texts, *code)})
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page to pages."""
    here = page.file.src_uri
    source = next(source for source, uri in PAGES.items() if uri == here)

    def turned(link: re.Match[str]) -> str:
        goal = PAGES.get(_target(source, link[1]))
        return f"]({posixpath.relpath(goal, posixpath.dirname(here))}{link[2] or ''})" if goal else link[0]

    return "".join(part if part.startswith("```") else LINK.sub(turned, part) for part in FENCE.split(markdown))


def _readmes() -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("plugins/*/README.md"))]


def _page(source: str) -> str:
    path = Path(source)
    if path.name == "README.md":
        return "index.md" if source == "README.md" else f"{path.parent.as_posix()}.md"
    return source.removeprefix("docs/") if path.suffix == ".md" else path.with_suffix(".md").as_posix()


def _target(source: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _read(source: str) -> str:
    return (ROOT / source).read_text(encoding="utf-8")
