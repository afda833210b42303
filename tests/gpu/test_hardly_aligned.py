"""What cuDNN lists for hardly aligned tensors, such as views into a flat parameter, runs there."""

from __future__ import annotations

import os

import pytest
from support import checkout
from support.processes.subprocesses import PACKAGE_PARENT, python

RUN_ALL = """
import torch
import cudnn_autotune as ca
from cudnn_autotune.timers.measuring import operands
from support.conv.references import reference, relative_error

problem = ca.ConvProblem({arguments})
x, w, y = operands(problem)
a, b = {{"fprop": (x, w), "dgrad": (y, w), "wgrad": (y, x)}}[problem.op]
expected = reference(problem, a, b)
first_of_each = {{c.engine_name: c.text for c in reversed(ca.expert.candidates(problem))}}
for text in first_of_each.values():
    print(text, flush=True)
    error = relative_error(ca.expert.execute(problem, text, a, b), expected)
    assert error <= 1e-2, error
"""
LAST = "memory_format=torch.channels_last"
PROBLEMS = {
    "fprop": f"'fprop', (4, 64, 14, 14), (64, 64, 3, 3), 1, 1, {LAST}, alignment=(2, 2, 32)",
    "fprop contiguous": "'fprop', (4, 64, 14, 14), (64, 64, 3, 3), 1, 1, alignment=(4, 8, 32)",
    "pointwise": f"'fprop', (4, 64, 14, 14), (64, 64, 1, 1), {LAST}, alignment=(8, 4, 32)",
    "dgrad": f"'dgrad', (4, 8, 9, 13), (24, 8, 3, 3), 2, 1, {LAST}, alignment=(32, 4, 4)",
    "dgrad contiguous": "'dgrad', (4, 16, 9, 13), (48, 16, 3, 3), 3, 1, alignment=(32, 8, 8)",
    "wgrad": f"'wgrad', (3, 8, 59, 27), (16, 8, 3, 3), 1, 1, {LAST}, alignment=(8, 32, 4)",
    "wgrad contiguous": "'wgrad', (4, 16, 25, 23), (16, 16, 1, 1), 1, 1, alignment=(8, 32, 16)",
    "groups": f"'wgrad', (2, 64, 17, 17), (64, 16, 3, 3), 2, 1, 1, 4, {LAST}, alignment=(4, 32, 8)",
}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_listed_engines_run(name: str, dtype: str) -> None:
    """In a process of their own, because a fault leaves the GPU in an error."""
    arguments = f"{PROBLEMS[name]}, dtype=torch.{dtype}"
    if dtype == "float32":
        arguments = arguments.replace("(2, 2,", "(4, 4,")
    paths = (PACKAGE_PARENT, str(checkout.TESTS), os.environ.get("PYTHONPATH", ""))
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = python("-c", RUN_ALL.format(arguments=arguments), env=env)
    ran = done.stdout.splitlines()
    assert done.returncode == 0, f"ended in {ran[-1:]}: {done.stderr[-2000:]}"
    assert len(ran) > 2
