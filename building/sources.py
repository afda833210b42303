"""Which C++ sources are compiled, and which of them together."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

# A header of CUDA, of cuDNN or of their part of torch, which a CPU-only torch is built without.
CUDA_HEADER = re.compile(r"#include <[^>]*(cuda|cudnn)[^>]*>")
OWN_HEADER = re.compile(r'#include "([^"]+)\.h"')
# Lines that the preprocessor leaves out without CUDA.
CUDA_LINES = re.compile(r"^#ifdef CUDNN_AUTOTUNE_WITH_CUDA$.*?^#endif$", re.DOTALL | re.MULTILINE)
# Sources that are compiled as one file, because most of the time goes into the headers that they
# share. A source that is in none of these groups is compiled by itself.
COMPILED_TOGETHER = {
    "frontend": (
        "core/cudnn/cudnn_library.cpp",
        "core/cudnn/engine_list.cpp",
        "core/cudnn/frontend_find.cpp",
        "core/cudnn/detail/conv_graph.cpp",
    ),
    "core": ("core/*.cpp",),  # the rest of it, without heavy headers
    "bindings": ("bind/*.cpp",),
    "operators": ("call/torch_bridge.cpp", "*.cpp"),  # that one first: it includes Python.h
}
# A group that no call of a tuned convolution runs: it lists engines and builds plans. Optimizing
# cudnn-frontend, which is headers only, took a fourth of the whole build.
HARDLY_OPTIMIZED = ("frontend",)
OPTIMIZES_LESS = '#pragma GCC optimize("O1")\n'  # all files of an extension have the same -O


def sources(with_cuda: bool, folder: Path = Path("csrc")) -> list[str]:
    """The sources of the extension; without CUDA only those that need none."""
    found = sorted(folder.rglob("*.cpp"))
    left_out = set() if with_cuda else need_cuda(folder)
    return [path.as_posix() for path in found if path not in left_out]


def need_cuda(folder: Path) -> set[Path]:
    """The sources and headers that need CUDA.

    They include a header of CUDA, or a header that needs CUDA, or one whose source does and that
    therefore declares what would be missing.
    """
    texts = {
        path: CUDA_LINES.sub("", path.read_text(encoding="utf-8"))
        for path in folder.rglob("*.*")
        if path.suffix in (".cpp", ".h")
    }
    found = {path for path, text in texts.items() if CUDA_HEADER.search(text)}
    while True:
        names = {path.relative_to(folder).with_suffix("").as_posix() for path in found}
        more = {path for path, text in texts.items() if names & set(OWN_HEADER.findall(text))}
        if more <= found:
            return found
        found |= more


def compiled_together(sources: list[str], folder: Path) -> list[str]:
    """The files to compile for these sources.

    The sources of a group are included by one file, which is written to ``folder``.
    """
    alone = list(sources)
    files = []
    for group, patterns in COMPILED_TOGETHER.items():
        paths = [f"csrc/{pattern}" for pattern in patterns]
        found = [source for path in paths for source in fnmatch.filter(alone, path)]
        members = list(dict.fromkeys(found))  # a pattern may find again what one before it did
        if members:
            lines = [f'#include "{source.removeprefix("csrc/")}"\n' for source in members]
            if group in HARDLY_OPTIMIZED:
                lines.insert(0, OPTIMIZES_LESS)
            write_if_changed(folder / f"{group}.cpp", "".join(lines))
            files.append(str(folder / f"{group}.cpp"))
            alone = [source for source in alone if source not in members]
    return files + alone


def write_if_changed(path: Path, text: str) -> None:
    """Writes a file unless it has this text, so that nothing is compiled anew for its time."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
