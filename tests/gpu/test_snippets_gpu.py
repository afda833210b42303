"""The snippets of README.md and docs/ on a GPU, as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.documents import YOURS, programs
from support.processes.subprocesses import python

# These have tests of their own there: docs/how-to/recipes.md in test_recipes.py, whose packages may
# be lacking, and docs/how-to/own-implementation.md in test_implementations_gpu.py.
ELSEWHERE = ("docs/how-to/recipes.md", "docs/how-to/own-implementation.md")
# What is tuned ahead is a model that is served already.
SERVED = YOURS + "import cudnn_autotune\ncudnn_autotune.convert(model)\ndel cudnn_autotune\n"


@pytest.mark.parametrize(
    ("name", "program"), programs(ELSEWHERE), ids=[name for name, _ in programs(ELSEWHERE)]
)
def test_a_snippet(name: str, program: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(program if "__main__" in program else SERVED + program)
    done = python("program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
