"""Which torch the extension is built against, and what has to be fetched to build it."""

from __future__ import annotations

import importlib
import site
import sys
import sysconfig
from types import ModuleType

from setuptools.errors import SetupError

from building.headers import missing_cuda_headers, packages_for

OLDEST_TORCH = (2, 11)


def find_torch() -> ModuleType | None:
    """The torch that can be imported here, or else that of the environment pip was called from."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError:
        # In pip's isolated build sys.prefix is still the environment's; only sys.path is not.
        paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        paths += site.getsitepackages()
        if sys.prefix == sys.base_prefix:
            paths.append(site.getusersitepackages())
    sys.path += [path for path in dict.fromkeys(paths) if path not in sys.path]
    importlib.invalidate_caches()
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None


def torch_requirement(torch: ModuleType | None) -> str:
    """The torch that the wheel requires: torch keeps its C++ ABI within a minor release."""
    if torch is None:
        return "torch>={}.{}".format(*OLDEST_TORCH)
    major, minor = map(int, torch.__version__.split(".")[:2])
    if (major, minor) < OLDEST_TORCH:
        raise SetupError(
            f"cudnn_autotune needs {torch_requirement(None)}, but this environment has torch "
            f"{torch.__version__}. Upgrade it (`pip install --upgrade torch`) and try again."
        )
    return f"torch=={major}.{minor}.*"


def build_requirements(torch: ModuleType | None) -> list[str]:
    """The packages that a build needs and that are not installed."""
    if torch is None:
        # `==2.*` bounds torch from above, which makes pip settle torch first and then the
        # cuda-toolkit that it pins; the other way round it would go back to an older torch.
        return [
            torch_requirement(None) + ",==2.*",
            "cuda-toolkit[crt,cccl]; sys_platform == 'linux'",
        ]
    return packages_for(missing_cuda_headers(torch), torch)
