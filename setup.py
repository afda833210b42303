"""Builds the extension against the torch that will load it; metadata is in pyproject.toml.

pip's build isolation hides that torch, so it is looked for in the environment that pip was called
from. Only where there is none is one asked for (`setup_requires`), and then pip installs that same
release into the environment, since the wheel requires it (`install_requires`). Nothing is asked for
that is already there, so that `pip install --no-build-isolation --no-deps .` works offline.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent))  # pip's build does not have it

from building.command import build_command, extension, refusing_commands
from building.requirements import build_requirements, find_torch, torch_requirement

torch = find_torch()
arguments: dict[str, Any]
if torch is None:
    arguments = {"cmdclass": refusing_commands()}
else:
    arguments = {
        "ext_modules": [extension(torch)],
        "cmdclass": {"build_ext": build_command(torch)},
    }
setup(
    license="Apache-2.0",
    install_requires=[
        torch_requirement(torch),
        "click>=8",
        "jinja2>=3.1",
        "numpy>=1.26",
        "nvidia-ml-py>=12",
        "rich>=13",
    ],
    setup_requires=build_requirements(torch),
    **arguments,
)
