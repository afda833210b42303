"""Faster convolutions for PyTorch on NVIDIA GPUs, without a change of a model's code.

For each shape that a model calls, the fastest kernel is found among cuDNN's and this package's own.
Its output is checked, and the choice is remembered on disk. One of these lines is enough::

    import torch, cudnn_autotune

    model = cudnn_autotune.convert(model)  # its convolutions and batch norms; revert() undoes it
    cudnn_autotune.enable()  # every convolution of the process
    model = torch.compile(model.eval(), backend="cudnn_autotune")  # compiled, and fused

    for choice in cudnn_autotune.choices():  # after a call
        print(choice)  # what was chosen, and its gain over PyTorch
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudnn_autotune import distributed as distributed
    from cudnn_autotune import expert as expert
    from cudnn_autotune import functional as functional
    from cudnn_autotune import online as online
    from cudnn_autotune import sampling as sampling
    from cudnn_autotune import tools as tools
    from cudnn_autotune.comparing.compare import compare as compare
    from cudnn_autotune.comparing.result import ModelComparison as ModelComparison
    from cudnn_autotune.compile.compilation import Compilation as Compilation
    from cudnn_autotune.compile.entry import compilations as compilations
    from cudnn_autotune.core.versions import environment as environment
    from cudnn_autotune.engines.problem import ConvProblem as ConvProblem
    from cudnn_autotune.engines.selection import Evidence as Evidence
    from cudnn_autotune.engines.selection import Measurement as Measurement
    from cudnn_autotune.engines.selection import Selection as Selection
    from cudnn_autotune.implementing.registering import (
        register_implementation as register_implementation,
    )
    from cudnn_autotune.implementing.registering import (
        unregister_implementation as unregister_implementation,
    )
    from cudnn_autotune.models.convert import Conversion as Conversion
    from cudnn_autotune.models.convert import conversion as conversion
    from cudnn_autotune.models.convert import convert as convert
    from cudnn_autotune.models.convert import revert as revert
    from cudnn_autotune.models.prefetch import Prefetched as Prefetched
    from cudnn_autotune.models.prefetch import prefetch as prefetch
    from cudnn_autotune.models.process_wide import disable as disable
    from cudnn_autotune.models.process_wide import enable as enable
    from cudnn_autotune.models.tune import tune as tune
    from cudnn_autotune.nn.modules import Conv1d as Conv1d
    from cudnn_autotune.nn.modules import Conv2d as Conv2d
    from cudnn_autotune.nn.modules import Conv3d as Conv3d
    from cudnn_autotune.nn.modules import ConvTranspose1d as ConvTranspose1d
    from cudnn_autotune.nn.modules import ConvTranspose2d as ConvTranspose2d
    from cudnn_autotune.nn.modules import ConvTranspose3d as ConvTranspose3d
    from cudnn_autotune.nn.modules import LazyConv1d as LazyConv1d
    from cudnn_autotune.nn.modules import LazyConv2d as LazyConv2d
    from cudnn_autotune.nn.modules import LazyConv3d as LazyConv3d
    from cudnn_autotune.nn.modules import LazyConvTranspose1d as LazyConvTranspose1d
    from cudnn_autotune.nn.modules import LazyConvTranspose2d as LazyConvTranspose2d
    from cudnn_autotune.nn.modules import LazyConvTranspose3d as LazyConvTranspose3d
    from cudnn_autotune.norms.batch_norms import register_norm_act as register_norm_act
    from cudnn_autotune.norms.choices import norm_choices as norm_choices
    from cudnn_autotune.store.file_store import Store as Store
    from cudnn_autotune.store.settings import get_store as get_store
    from cudnn_autotune.store.settings import set_store as set_store
    from cudnn_autotune.tuning.choice import Choice as Choice
    from cudnn_autotune.tuning.choice_log import choices as choices
    from cudnn_autotune.tuning.choice_log import fallbacks as fallbacks
    from cudnn_autotune.tuning.events import on_decision as on_decision
    from cudnn_autotune.tuning.pins import pin as pin
    from cudnn_autotune.tuning.pins import pins as pins
    from cudnn_autotune.tuning.pins import unpin as unpin
    from cudnn_autotune.tuning.remembering import forget as forget
    from cudnn_autotune.tuning.settings import flags as flags
    from cudnn_autotune.tuning.settings import get_benchmark_limit as get_benchmark_limit
    from cudnn_autotune.tuning.settings import get_budget_ms as get_budget_ms
    from cudnn_autotune.tuning.settings import get_new_shapes as get_new_shapes
    from cudnn_autotune.tuning.settings import get_sampling as get_sampling
    from cudnn_autotune.tuning.settings import get_workspace_limit as get_workspace_limit
    from cudnn_autotune.tuning.settings import set_benchmark_limit as set_benchmark_limit
    from cudnn_autotune.tuning.settings import set_budget_ms as set_budget_ms
    from cudnn_autotune.tuning.settings import set_new_shapes as set_new_shapes
    from cudnn_autotune.tuning.settings import set_sampling as set_sampling
    from cudnn_autotune.tuning.settings import set_workspace_limit as set_workspace_limit


def _built_elsewhere() -> ModuleSpec | None:
    """Returns the next built package of this name on ``sys.path``, if this one was not built.

    Python in a checkout finds the sources in the current folder first. They would hide the package
    installed from them.
    """
    if PathFinder.find_spec("_C", list(__path__)) is not None:
        return None
    for folder in sys.path:
        spec = PathFinder.find_spec(__name__, [folder])
        places = spec and spec.submodule_search_locations
        if places and PathFinder.find_spec("_C", places) is not None:
            return spec
    return None


_PUBLIC = {
    "cudnn_autotune.comparing.compare": ("compare",),
    "cudnn_autotune.comparing.result": ("ModelComparison",),
    "cudnn_autotune.core.versions": ("environment",),
    "cudnn_autotune.engines.problem": ("ConvProblem",),
    "cudnn_autotune.engines.selection": ("Evidence", "Measurement", "Selection"),
    "cudnn_autotune.compile.compilation": ("Compilation",),
    "cudnn_autotune.compile.entry": ("compilations",),
    "cudnn_autotune.norms.batch_norms": ("register_norm_act",),
    "cudnn_autotune.models.convert": ("Conversion", "conversion", "convert", "revert"),
    "cudnn_autotune.models.process_wide": ("disable", "enable"),
    "cudnn_autotune.nn.modules": (
        "Conv1d",
        "Conv2d",
        "Conv3d",
        "ConvTranspose1d",
        "ConvTranspose2d",
        "ConvTranspose3d",
        "LazyConv1d",
        "LazyConv2d",
        "LazyConv3d",
        "LazyConvTranspose1d",
        "LazyConvTranspose2d",
        "LazyConvTranspose3d",
    ),
    "cudnn_autotune.norms.choices": ("norm_choices",),
    "cudnn_autotune.models.prefetch": ("Prefetched", "prefetch"),
    "cudnn_autotune.models.tune": ("tune",),
    "cudnn_autotune.store.file_store": ("Store",),
    "cudnn_autotune.store.settings": ("get_store", "set_store"),
    "cudnn_autotune.tuning.choice": ("Choice",),
    "cudnn_autotune.tuning.choice_log": ("choices", "fallbacks"),
    "cudnn_autotune.tuning.events": ("on_decision",),
    "cudnn_autotune.implementing.registering": (
        "register_implementation",
        "unregister_implementation",
    ),
    "cudnn_autotune.tuning.pins": ("pin", "pins", "unpin"),
    "cudnn_autotune.tuning.remembering": ("forget",),
    "cudnn_autotune.tuning.settings": (
        "flags",
        "get_benchmark_limit",
        "get_budget_ms",
        "get_new_shapes",
        "get_sampling",
        "get_workspace_limit",
        "set_benchmark_limit",
        "set_budget_ms",
        "set_new_shapes",
        "set_sampling",
        "set_workspace_limit",
    ),
}
"""The public names by their modules, which are imported when a name is first used."""
_PLACES = {name: module for module, names in _PUBLIC.items() for name in names}
_MODULES = ("distributed", "expert", "functional", "online", "sampling", "tools")
_MODES = {
    "heuristic": "cudnn_autotune.sampling.heuristic:Heuristic",
    "sample_once": "cudnn_autotune.sampling.frontend_modes:SAMPLE_ONCE",
    "median_of_three": "cudnn_autotune.sampling.frontend_modes:MEDIAN_OF_THREE",
    "till_stable": "cudnn_autotune.sampling.frontend_modes:TILL_STABLE",
    "race": "cudnn_autotune.sampling.race:RACE",
    "sustained": "cudnn_autotune.sustained.mode:SUSTAINED",
    "auto": "cudnn_autotune.sampling.auto:AUTO",
    "online": "cudnn_autotune.online.mode:Online",
}
"""The places of the sampling modes by their names."""

_elsewhere = _built_elsewhere()
if _elsewhere is not None:
    sys.modules[__name__] = importlib.util.module_from_spec(_elsewhere)
    assert _elsewhere.loader is not None
    _elsewhere.loader.exec_module(sys.modules[__name__])
else:
    from cudnn_autotune.compile import fake as fake
    from cudnn_autotune.compile import inductor as inductor
    from cudnn_autotune.compile import naming as naming
    from cudnn_autotune.core.after_import import after_import
    from cudnn_autotune.core.extension import _C as _C  # first: it checks the build
    from cudnn_autotune.core.extension import extension_available
    from cudnn_autotune.core.late import imported, late
    from cudnn_autotune.core.versions import version
    from cudnn_autotune.store import settings as store_settings
    from cudnn_autotune.tuning import settings
    from cudnn_autotune_autoload import is_asked_for, register_artifact

    after_import("cudnn_autotune.sampling", lambda module: module.register_places(_MODES))
    if extension_available():
        PlanError: type[RuntimeError] = _C.PlanError
        CudnnError: type[RuntimeError] = _C.CudnnError
        _kept = "cudnn_autotune.store.kept_plans"
        _C.set_plan_builder(late("cudnn_autotune.implementing.registering:build"))
        _C.set_miss_handler(late("cudnn_autotune.tuning.miss:choose"))
        _C.set_capture_miss_handler(late("cudnn_autotune.tuning.serving:during_capture"))
        _C.set_norm_planner(late("cudnn_autotune.norms.operators:load_plan"))
        _C.set_norm_chooser(late("cudnn_autotune.norms.choices:choose_function"))
        _C.set_weight_kernels(late("cudnn_autotune.compile.weights.operators:kernel_code"))
        _C.keep_plans("RUNTIME_COMPILATION", late(f"{_kept}:find"), late(f"{_kept}:keep"))
        after_import(
            "cudnn_autotune.engines.compiled_kernels",
            lambda module: module.keep_kernels(
                late(f"{_kept}:find_kernel"), late(f"{_kept}:keep_kernel")
            ),
        )
    else:
        PlanError = CudnnError = RuntimeError
    after_import(
        "cudnn_autotune.engines.registry",
        lambda module: module.provide_built_in(late("cudnn_autotune.kernels.built_in:built_in")),
    )
    after_import(
        "cudnn_autotune.tuning.source",
        lambda module: module.begin_trials_by(late("cudnn_autotune.online.trials:begin")),
    )
    __version__ = version()
    register_artifact()
    settings.read_environment()
    store_settings.read_environment()
    if is_asked_for():
        late("cudnn_autotune.models.process_wide:read_environment")()


if not TYPE_CHECKING:  # a checker would believe that any name exists

    def __getattr__(name: str) -> object:
        """Imports the module of a public name, and keeps the name."""
        if name in _MODULES:
            return imported(f"{__name__}.{name}")
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = imported(f"{_PLACES[name]}:{name}")
        return found


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name[:2] == "__")})


__all__ = [
    "Choice",
    "Compilation",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "Conversion",
    "ConvProblem",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "CudnnError",
    "Evidence",
    "Measurement",
    "ModelComparison",
    "LazyConv1d",
    "LazyConv2d",
    "LazyConv3d",
    "LazyConvTranspose1d",
    "LazyConvTranspose2d",
    "LazyConvTranspose3d",
    "PlanError",
    "Prefetched",
    "Selection",
    "Store",
    "choices",
    "compare",
    "compilations",
    "conversion",
    "convert",
    "disable",
    "distributed",
    "enable",
    "environment",
    "expert",
    "fallbacks",
    "flags",
    "forget",
    "functional",
    "get_benchmark_limit",
    "get_budget_ms",
    "get_new_shapes",
    "get_sampling",
    "get_store",
    "get_workspace_limit",
    "norm_choices",
    "on_decision",
    "online",
    "pin",
    "pins",
    "prefetch",
    "register_implementation",
    "register_norm_act",
    "revert",
    "sampling",
    "set_benchmark_limit",
    "set_budget_ms",
    "set_new_shapes",
    "set_sampling",
    "set_store",
    "set_workspace_limit",
    "tools",
    "tune",
    "unpin",
    "unregister_implementation",
]
