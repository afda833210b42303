"""Modules that are imported late: registrations after an import, threads, and broken imports."""

from __future__ import annotations

import pytest
from support.processes.subprocesses import evaluate

AWAITED = {
    "cudnn_autotune.engines.compiled_kernels": "module._kept is not None",
    "cudnn_autotune.engines.registry": "len(module.registered()) > 0",
    "cudnn_autotune.tuning.source": "len(module._begins_trials) == 1",
    "torch._dynamo.backends.registry": "'cudnn_autotune' in module.list_backends()",
}
"""Modules that a registration waits for, and an expression that tells that it was made."""

INTERRUPTED = """
class Interrupting:
    is_over = False

    def find_spec(self, name, path, target=None):
        if name != NAME or self.is_over:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self.is_over = True
            raise KeyboardInterrupt

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(1, Interrupting())
try:
    importlib.import_module(NAME)
    raise AssertionError
except KeyboardInterrupt:
    pass
"""

BEFORE = {
    "found, not imported": "importlib.util.find_spec(NAME)",
    "interrupted": INTERRUPTED,
    "reloaded": "importlib.reload(importlib.import_module(NAME))",
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", AWAITED)
def test_a_registration_follows_each_import(name: str, before: str) -> None:
    if before != "found, not imported" and name.startswith("torch."):
        pytest.skip("torch's own modules need not be imported twice")
    code = (
        "import importlib, importlib.util, sys, cudnn_autotune\n"
        f"NAME = {name!r}\n"
        "assert NAME not in sys.modules\n"
        f"{BEFORE[before]}\n"
        "module = importlib.import_module(NAME)\n"
        f"print({AWAITED[name]})"
    )
    assert evaluate(code).strip() == "True"


def test_modes_outlive_a_reload() -> None:
    code = (
        "import importlib, cudnn_autotune as ca\n"
        "before = ca.sampling.names()\n"
        "importlib.reload(ca.sampling); importlib.reload(ca)\n"
        "print(before == ca.sampling.names() and ca.sampling.get('race').name)"
    )
    assert evaluate(code).strip() == "race"


def test_no_import_waits_for_another_thread() -> None:
    """A module's import enters ``IMPORTING`` nowhere. It holds the module's lock, and the thread
    that is in there may wait for that one."""
    code = """
import importlib, pkgutil, sys, traceback
import cudnn_autotune
from cudnn_autotune.core.fork_safe_lock import IMPORTING

def enter(self):
    traceback.print_stack(file=sys.stdout)

type(IMPORTING).__enter__, type(IMPORTING).__exit__ = enter, lambda *_: None
import torch._dynamo, torch._inductor.compile_fx
for found in pkgutil.walk_packages(cudnn_autotune.__path__, "cudnn_autotune."):
    if not found.name.endswith("__main__") and ".audit" not in found.name:
        importlib.import_module(found.name)
"""
    assert evaluate(code).strip() == ""
