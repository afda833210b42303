"""Which sources a build compiles, with CUDA and without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import checkout
from support.checkout import ROOT


@pytest.fixture(scope="module")
def sources():
    sources = checkout.module("building.sources").sources
    return lambda with_cuda, folder: {
        Path(path).relative_to(folder).as_posix() for path in sources(with_cuda, folder)
    }


def test_a_cpu_only_build_has_the_source_of_each_header_that_it_includes(sources) -> None:
    """Else the extension is linked with an undefined symbol, and fails when it is imported."""
    compiled = sources(False, ROOT / "csrc")
    assert "core/problem/conv_problem.cpp" in compiled
    seen: set[str] = set()
    files = set(compiled)
    while files:
        seen |= files
        texts = [(ROOT / "csrc" / file).read_text() for file in files]
        without_cuda = (re.sub(r"#ifdef.*?#endif", "", text, flags=re.DOTALL) for text in texts)
        included = {name for text in without_cuda for name in re.findall(r'"(\S+\.h)"', text)}
        files = included - seen - {"build_info.h"}
    headers_with_a_source = {
        name.removesuffix(".h") + ".cpp"
        for name in seen
        if name.endswith(".h") and (ROOT / "csrc" / name).with_suffix(".cpp").exists()
    }
    assert headers_with_a_source <= compiled
    texts = [(ROOT / "csrc" / name).read_text() for name in seen]
    assert not any(re.search(r"#include <(c10/cuda|ATen/cud|cud)", text) for text in texts)


def test_a_source_needs_cuda_where_a_header_says_so(sources, tmp_path: Path) -> None:
    files = {
        "core/plain.h": "",
        "core/plain.cpp": '#include "core/plain.h"\n#include <vector>\n',
        "core/driver.h": "#include <cuda_runtime_api.h>\n",
        "core/driver.cpp": '#include "core/driver.h"\n',
        "bridge.h": "",  # needs nothing itself, but what it declares is in a source that does
        "bridge.cpp": '#include "bridge.h"\n#include <ATen/cuda/CUDAContext.h>\n',
        "uses_bridge.cpp": '#include "bridge.h"\n',
        "deep.h": '#include "core/driver.h"\n',
        "uses_deep.cpp": '#include "deep.h"\n',
        "uses_plain.cpp": '#include "core/plain.h"\n',
        "either.cpp": (
            '#include "core/plain.h"\n#ifdef CUDNN_AUTOTUNE_WITH_CUDA\n#include <cudnn.h>\n#endif\n'
        ),
    }
    (tmp_path / "core").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert sources(False, tmp_path) == {"core/plain.cpp", "uses_plain.cpp", "either.cpp"}
    assert sources(True, tmp_path) == {name for name in files if name.endswith(".cpp")}
