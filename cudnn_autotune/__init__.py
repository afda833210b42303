"""cudnn_autotune: search, choose, remember and run cuDNN's convolution engines."""

import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING


def _built_elsewhere() -> ModuleSpec | None:
    """The next package of this name on ``sys.path`` that was built, if this one was not.

    Python in a checkout finds the sources in the current folder first, and they would hide the
    package that was installed from them.
    """
    if PathFinder.find_spec("_C", list(__path__)) is not None:
        return None
    for folder in sys.path:
        spec = PathFinder.find_spec(__name__, [folder])
        places = spec and spec.submodule_search_locations
        if places and PathFinder.find_spec("_C", places) is not None:
            return spec
    return None


_elsewhere = _built_elsewhere()
if _elsewhere is not None:
    sys.modules[__name__] = importlib.util.module_from_spec(_elsewhere)
    assert _elsewhere.loader is not None
    _elsewhere.loader.exec_module(sys.modules[__name__])
else:
    from cudnn_autotune import distributed, sampling
    from cudnn_autotune.audit.compare import ModelComparison, compare
    from cudnn_autotune.core.extension import _C as _C  # first: it checks the build
    from cudnn_autotune.core.extension import extension_available as _extension_available
    from cudnn_autotune.core.versions import environment, version
    from cudnn_autotune.engines import compiled_kernels
    from cudnn_autotune.engines.norms import operators as norm_operators
    from cudnn_autotune.engines.problem import ConvProblem
    from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
    from cudnn_autotune.engines.weights import operators as weight_operators
    from cudnn_autotune.nn import expert, functional
    from cudnn_autotune.nn import fake as fake
    from cudnn_autotune.nn import inductor as inductor
    from cudnn_autotune.nn.backend.compiled_graph import Compilation
    from cudnn_autotune.nn.backend.entry import compilations
    from cudnn_autotune.nn.batch_norms import register_norm_act
    from cudnn_autotune.nn.models.convert import Conversion, conversion, convert, revert
    from cudnn_autotune.nn.models.process_wide import disable, enable
    from cudnn_autotune.nn.models.process_wide import read_environment as _enable_if_asked
    from cudnn_autotune.nn.modules import (
        Conv1d,
        Conv2d,
        Conv3d,
        ConvTranspose1d,
        ConvTranspose2d,
        ConvTranspose3d,
        LazyConv1d,
        LazyConv2d,
        LazyConv3d,
        LazyConvTranspose1d,
        LazyConvTranspose2d,
        LazyConvTranspose3d,
    )
    from cudnn_autotune.nn.norm_choices import choose_function as _choose_norm
    from cudnn_autotune.nn.norm_choices import norm_choices
    from cudnn_autotune.nn.prefetch import Prefetched, prefetch
    from cudnn_autotune.nn.tune import tune
    from cudnn_autotune.store import Store, kept_plans
    from cudnn_autotune.store import settings as store_settings
    from cudnn_autotune.store.settings import get_store, set_store
    from cudnn_autotune.tuning import settings
    from cudnn_autotune.tuning.choice import Choice
    from cudnn_autotune.tuning.choice_log import choices, fallbacks
    from cudnn_autotune.tuning.events import on_decision
    from cudnn_autotune.tuning.implementing import (
        register_implementation,
        unregister_implementation,
    )
    from cudnn_autotune.tuning.pins import pin, pins, unpin
    from cudnn_autotune.tuning.remembering import forget
    from cudnn_autotune.tuning.settings import (
        flags,
        get_benchmark_limit,
        get_budget_ms,
        get_new_shapes,
        get_sampling,
        get_workspace_limit,
        set_benchmark_limit,
        set_budget_ms,
        set_new_shapes,
        set_sampling,
        set_workspace_limit,
    )
    from cudnn_autotune.tuning.settings import use_sampling as use_sampling  # a former name

    if _extension_available():
        from cudnn_autotune.tuning import implementing, miss, serving

        PlanError: type[RuntimeError] = _C.PlanError
        CudnnError: type[RuntimeError] = _C.CudnnError
        _C.set_plan_builder(implementing.build)
        _C.set_miss_handler(miss.choose)
        _C.set_norm_planner(norm_operators.load_plan)
        _C.set_norm_fallback(norm_operators.forward, norm_operators.backward)
        _C.set_norm_chooser(_choose_norm)
        _C.set_weight_kernels(weight_operators.kernel_code)
        _C.set_capture_miss_handler(serving.during_capture)
        _C.keep_plans("RUNTIME_COMPILATION", kept_plans.find, kept_plans.keep)
        compiled_kernels.keep_kernels(kept_plans.find_kernel, kept_plans.keep_kernel)
    else:
        PlanError = CudnnError = RuntimeError

    settings.read_environment()
    store_settings.read_environment()
    _enable_if_asked()
    __version__ = version()

    def _publish(name: str, module: ModuleType, public: list[str]) -> None:
        """Makes a module that lies in a room importable as ``cudnn_autotune.<name>``, and makes
        completion offer what is public in it."""
        sys.modules[f"{__name__}.{name}"] = module
        vars(module)["__dir__"] = lambda: _offered(vars(module), public)

    _publish("expert", expert, expert.__all__)
    _recipe = vars(expert.recipe).items()
    _own = [name for name, of in _recipe if getattr(of, "__module__", "") == expert.recipe.__name__]
    _publish("expert.recipe", expert.recipe, _own)
    _publish("functional", functional, [f for f in vars(functional) if f.startswith("conv")])
    for _room in (distributed, sampling):
        _publish(_room.__name__.rpartition(".")[2], _room, _room.__all__)


if not TYPE_CHECKING:  # a checker would take any name for one that exists

    def __getattr__(name: str) -> object:
        """Finds the names that ``expert`` has now where users of earlier versions look for them."""
        if name not in expert.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        new = f"cudnn_autotune.expert.{name}"
        warnings.warn(f"cudnn_autotune.{name} is now {new}", DeprecationWarning, stacklevel=2)
        return getattr(expert, name)


def _offered(module: dict[str, object], public: list[str]) -> list[str]:
    """Returns what completion offers: public names, not the modules that are imported beside."""
    return sorted({*public, *(name for name in module if name.startswith("__"))})


def __dir__() -> list[str]:
    return _offered(globals(), __all__)


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
    "tune",
    "unpin",
    "unregister_implementation",
]
