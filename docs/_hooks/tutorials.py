"""mkdocs hook: what mkdocs-jupyter does not do for the scripts `docs/tutorials/NN_name.py`.

mkdocs-jupyter turns a script in percent format into a notebook (by jupytext), executes it and makes
a page of it; an exception in a cell fails the build. This hook adds

- the list of tutorials and their place in the navigation, from the files that exist;
- a start of the kernel that shows a figure when it is assigned to a name, and makes warnings errors;
- links to other pages and to the sources, which notebooks keep as text;
- the notebook to download, and a link that opens it in Colab where WELLPOSED_REPOSITORY names a
  repository on GitHub whose branch `gh-pages` has the site.

With WELLPOSED_DOCS_EXECUTE=false (`make docs-fast`) nothing is executed, and the pages say so.
"""

from __future__ import annotations

import html
import os
import posixpath
import re
import tempfile
from pathlib import Path

from bibliography import entries, source
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

NOT_EXECUTED = "This page was not executed (<code>make docs-fast</code>); <code>make docs</code> adds outputs and figures."
LINK = re.compile(r'href="(?!https?:|#)([^"#]+)\.md((?:#[^"]*)?)"')
_ipython = tempfile.TemporaryDirectory(prefix="wellposed-docs-")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    startup = Path(_ipython.name, "profile_default", "startup")
    startup.mkdir(parents=True, exist_ok=True)
    (startup / "kernel.py").write_text(Path(__file__).with_name("kernel_startup.py").read_text(), encoding="utf-8")
    os.environ["IPYTHONDIR"] = _ipython.name
    for item in config.nav or []:
        if "Tutorials" in item:
            item["Tutorials"] = ["tutorials/index.md", *(f"tutorials/{script.name}" for script in _scripts(config))]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    rows = []
    for script in _scripts(config):
        title, summary = opening(script.read_text(encoding="utf-8"))
        rows.append(f"## [{title}]({script.name})\n\n{summary}\n")
    index = "# Tutorials\n\nEach page is a script; run it yourself, and change it.\n\n" + "\n".join(rows)
    files.append(File.generated(config, "tutorials/index.md", content=index))
    return files


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if not re.fullmatch(r"tutorials/\d\d_\w+\.py", page.file.src_uri):
        return content
    docs = Path(config.docs_dir)
    keys = [entry.key for entry in entries(source(docs).read_text(encoding="utf-8"))]
    name = posixpath.basename(page.file.src_uri)
    executed = config.plugins["mkdocs-jupyter"].config["execute"]
    note = "all of it was executed to make the page." if executed else NOT_EXECUTED
    notebook = html.escape(Path(name).with_suffix(".ipynb").name)
    places = [f'<a href="{notebook}" download>as a notebook</a>', f'<a href="{html.escape(name)}" download>as a script</a>']
    if address := colab(config.extra.get("repository") or "", notebook):
        places.append(f'<a href="{html.escape(address)}">open it in Colab</a>')
    end = f"<hr><p>Download this page {', '.join(places)}; {note}</p>"
    return with_links(content, docs, keys, name) + end


def on_post_build(config: MkDocsConfig) -> None:
    import jupytext  # comes with mkdocs-jupyter

    for script in _scripts(config):
        notebook = jupytext.read(script)
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        for number, cell in enumerate(notebook.cells):
            cell["id"] = f"cell-{number}"  # by default at random: another file in every build
        jupytext.write(notebook, Path(config.site_dir, "tutorials", f"{script.stem}.ipynb"))


def colab(repository: str, notebook: str) -> str | None:
    """The address that opens a notebook of the published site in Colab; None if there is none."""
    if not repository:
        return None
    found = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)/?", repository)
    if found is None:
        raise PluginError(f"WELLPOSED_REPOSITORY is {repository!r}; expected https://github.com/OWNER/NAME.")
    return f"https://colab.research.google.com/github/{found[1]}/blob/gh-pages/tutorials/{notebook}"


def with_links(content: str, docs: Path, keys: list[str], name: str) -> str:
    """The HTML of a tutorial with links to pages of the site and citations that lead to the sources."""

    def page_link(link: re.Match[str]) -> str:
        target = docs / "tutorials" / link[1]
        if not target.with_name(target.name + ".md").exists() and not target.with_name(target.name + ".py").exists():
            raise PluginError(f"tutorials/{name} links to {link[1]}.md, which does not exist.")
        return f'href="{link[1]}.html{link[2]}"'

    citation = re.compile(rf"\[({'|'.join(keys)})(?:, [^\][<]*)?\]")
    texts = re.split(r"(<pre.*?</pre>|<code.*?</code>)", LINK.sub(page_link, content), flags=re.DOTALL)
    linked = [citation.sub(r'<a href="../references.html#\1">\g<0></a>', text) for text in texts[::2]]
    return "".join(part for pair in zip(linked, [*texts[1::2], ""], strict=True) for part in pair)


def opening(script: str) -> tuple[str, str]:
    """The title of a script and its first paragraph: the lines of its first cell of text."""
    cell = re.search(r"^# %% \[markdown\]\n((?:#.*\n)+)", script, flags=re.MULTILINE)
    if cell is None:
        raise PluginError("A tutorial begins with a cell '# %% [markdown]', a title and a paragraph.")
    text = re.sub(r"^# ?", "", cell[1], flags=re.MULTILINE)
    title, _, rest = text.partition("\n")
    return title.removeprefix("# "), rest.strip().partition("\n\n")[0]


def _scripts(config: MkDocsConfig) -> list[Path]:
    return sorted((Path(config.docs_dir) / "tutorials").glob("[0-9][0-9]_*.py"))
