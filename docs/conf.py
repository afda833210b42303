"""The site, by Sphinx: the pages that GitHub shows, and the API from the installed package.

``python -m sphinx -W -c docs . build/site`` builds it. Links, anchors and the pages that docstrings
name are checked.
"""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

project = "cudnn_autotune"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "benchmarks/README.md"]
exclude_patterns = [".*", "build", "tests"]
myst_heading_anchors = 6

autoclass_content = "both"
autodoc_default_options = {"undoc-members": True, "imported-members": True}
autodoc_member_order = "bysource"
autodoc_type_aliases = {"SamplingMode": "cudnn_autotune.sampling.SamplingMode"}
napoleon_numpy_docstring = False
smartquotes_action = "D"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_copy_source = False

NAVIGATION = """
```{toctree}
:hidden:

Start <self>
docs/install
docs/README
```
"""
for caption, pages in {
    "How-to": "docs/how-to/*",
    "Reference": "docs/reference/*",
    "API": "docs/api/cudnn_autotune\ndocs/api/*",
    "Findings": "docs/findings/README\ndocs/findings/*",
    "Results": "docs/results/*\nbenchmarks/README",
    "Development": "docs/architecture\nCONTRIBUTING\nCHANGELOG",
}.items():
    NAVIGATION += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{pages}\n```\n"

# An image for each theme, as GitHub shows them.
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]*)">'
    r'\s*<img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]*)">\s*</picture>'
)
IMAGES = "".join(
    f"```{{image}} \\g<{theme}>\n:alt: \\g<alt>\n:class: only-{theme}\n```\n"
    for theme in ("light", "dark")
)


def from_github(app: Sphinx, page: str, text: list[str]) -> None:
    text[0] = PICTURE.sub(IMAGES, text[0]) + (NAVIGATION if page == root_doc else "")


def docstring(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Makes links of paths of pages, and begins attributes with a comment, or napoleon would take
    what is before their first colon for a type."""
    lines[:] = [re.sub(r"\b(docs/[\w/-]+)\.md\b", r":doc:`/\1`", line) for line in lines]
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


def signature(
    app: Sphinx, what: str, name: str, value: object, options: object, arguments: str, returns: str
) -> tuple[str, str]:
    """Makes Python of what autodoc writes for a factory of a dataclass, and an alias in a union."""
    if arguments:
        arguments = arguments.replace("<factory>", "...")
        arguments = re.sub(r"TypeAliasForwardRef\('([\w.]+)'\)", r"\1", arguments)
    return arguments, returns


def add_start(app: Sphinx, error: Exception | None) -> None:
    start = '<meta http-equiv="refresh" content="0; url=README.html">'
    if error is None:
        Path(app.outdir, "index.html").write_text(start, encoding="utf-8")


def setup(app: Sphinx) -> None:
    try:
        import cudnn_autotune
    except ImportError as error:
        sys.exit(f"The site tells of the installed package (pip install '.[docs]'): {error}")
    app.config.release = cudnn_autotune.__version__
    app.connect("source-read", from_github)
    app.connect("autodoc-process-docstring", docstring, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", signature)
    app.connect("build-finished", add_start)
