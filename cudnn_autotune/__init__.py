"""cudnn_autotune: search, choose, remember and run cuDNN's convolution engines."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder


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
    from cudnn_autotune.core.extension import _C as _C  # first: it checks the build
    from cudnn_autotune.core.extension import extension_available as _extension_available
    from cudnn_autotune.core.versions import environment, version
    from cudnn_autotune.engines import compiled_kernels, implementations, recipe, registry
    from cudnn_autotune.engines.configs import (
        Candidate,
        build_plan,
        engine_text,
        parse_engine_text,
    )
    from cudnn_autotune.engines.listing import candidates
    from cudnn_autotune.engines.problem import ConvProblem
    from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
    from cudnn_autotune.nn import fake as fake
    from cudnn_autotune.nn import flops as flops
    from cudnn_autotune.nn import functional
    from cudnn_autotune.nn import inductor as inductor
    from cudnn_autotune.nn.backend.compiled_graph import Compilation
    from cudnn_autotune.nn.backend.entry import compilations
    from cudnn_autotune.nn.models.convert import Conversion, conversion, convert, revert
    from cudnn_autotune.nn.models.process_wide import disable, enable
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
    from cudnn_autotune.nn.prefetch import Prefetched, prefetch
    from cudnn_autotune.nn.tune import tune
    from cudnn_autotune.store import Store, kept_kernels, kept_plans
    from cudnn_autotune.store import settings as store_settings
    from cudnn_autotune.store.settings import get_store, set_store
    from cudnn_autotune.timers.by_name import execute, measure
    from cudnn_autotune.tuning import settings
    from cudnn_autotune.tuning.choice import Choice
    from cudnn_autotune.tuning.choice_log import choices, fallbacks
    from cudnn_autotune.tuning.events import on_decision
    from cudnn_autotune.tuning.pins import pin, pins, unpin
    from cudnn_autotune.tuning.registering import register_implementation, unregister_implementation
    from cudnn_autotune.tuning.remembering import forget
    from cudnn_autotune.tuning.settings import (
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
        use_sampling,
    )

    def _built_in() -> tuple[implementations.Implementation, ...]:
        from cudnn_autotune.engines.built_in import BUILT_IN

        return BUILT_IN

    registry.load_first(_built_in)
    if _extension_available():
        from cudnn_autotune.tuning import building, miss, serving

        PlanError: type[RuntimeError] = _C.PlanError
        CudnnError: type[RuntimeError] = _C.CudnnError
        _C.set_plan_builder(building.build)
        _C.set_miss_handler(miss.choose)
        _C.set_capture_miss_handler(serving.during_capture)
        _C.keep_plans("RUNTIME_COMPILATION", kept_plans.find, kept_plans.keep)
        compiled_kernels.keep_kernels(kept_kernels.find, kept_kernels.keep)
    else:
        PlanError = CudnnError = RuntimeError

    settings.read_environment()
    store_settings.read_environment()
    __version__ = version()


def __dir__() -> list[str]:
    """Completion offers what is public, not the modules of this package that are imported above."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


__all__ = [
    "Candidate",
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
    "build_plan",
    "candidates",
    "choices",
    "compilations",
    "conversion",
    "convert",
    "disable",
    "distributed",
    "enable",
    "engine_text",
    "environment",
    "execute",
    "fallbacks",
    "forget",
    "functional",
    "get_benchmark_limit",
    "get_budget_ms",
    "get_new_shapes",
    "get_sampling",
    "get_store",
    "get_workspace_limit",
    "measure",
    "on_decision",
    "parse_engine_text",
    "pin",
    "pins",
    "prefetch",
    "recipe",
    "register_implementation",
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
    "use_sampling",
]
