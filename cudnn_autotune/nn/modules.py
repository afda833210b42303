"""PyTorch's convolution layers, as drop-ins that run the engine chosen for each shape.

Each is a subclass of PyTorch's class of the same name, with the same arguments and two more, and
the same parameters and state dict. On a device that is not CUDA it computes the same bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

import cudnn_autotune.functional as functional  # without __getattr__, which enters IMPORTING
from cudnn_autotune.functional import fast_functions, general
from cudnn_autotune.sampling.strategy import SamplingMode
from cudnn_autotune.tuning.settings import check_policy


def check_model(model: object) -> None:
    """Raises TypeError unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def check_inputs(
    model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any], name: str = "inputs"
) -> None:
    """Raises TypeError unless the model's forward takes these arguments, which ``name`` holds."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a forward of C++ has none
        return
    try:
        signature.bind(*inputs, **kwargs)
    except TypeError as error:
        takes = f"{type(model).__name__}.forward{signature}"
        raise TypeError(f"{name} must be the arguments of {takes}: {error}") from None


class _Signature:
    """The signature of PyTorch's class and the two arguments of this package.

    ``inspect.signature``, and so ``help`` and ``torch.nn.utils.skip_init``, read it from the class.
    A subclass with a constructor of its own has that one's signature.
    """

    def __get__(self, instance: object, owner: type[WithPolicy]) -> inspect.Signature:
        if owner.__init__ is not WithPolicy.__init__:
            raise AttributeError("__signature__")
        pytorchs = next(c for c in owner.__mro__ if c.__module__.startswith("torch.nn."))
        theirs = inspect.signature(pytorchs)
        policy = inspect.signature(WithPolicy.__init__).parameters.values()
        ours = [parameter for parameter in policy if parameter.kind is parameter.KEYWORD_ONLY]
        # `**kwargs`, which a class of theirs may end with, stays the last.
        every = sorted([*theirs.parameters.values(), *ours], key=lambda parameter: parameter.kind)
        return theirs.replace(parameters=every)


class Unscriptable(nn.Module):
    """A base of modules that ``torch.jit.script`` cannot compile."""

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuses ``torch.jit.script``, which calls this first."""
        raise NotImplementedError(
            f"torch.jit.script cannot compile {self._get_name()}, whose forward calls into C++: "
            "give it cudnn_autotune.revert(model), or use torch.jit.trace, torch.export or "
            "torch.compile"
        )


class WithPolicy(Unscriptable):
    """A base with the two arguments that these modules take in addition to PyTorch's."""

    __signature__ = _Signature()

    # The class has defaults too, for modules converted without __init__ (pickle, __class__).
    sampling: SamplingMode | str | None = None
    workspace_limit: int | None = None

    def __init__(
        self,
        *args: Any,
        sampling: SamplingMode | str | None = None,
        workspace_limit: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes the arguments of PyTorch's class and two more, which are plain attributes.

        They may be changed at any time.

        Args:
            sampling: the sampling mode, one of ``cudnn_autotune.sampling.names()``; None stands for
                ``cudnn_autotune.get_sampling()`` at the time of the call.
            workspace_limit: the most bytes of workspace that an engine may need, or None for
                ``cudnn_autotune.get_workspace_limit()``.

        Raises:
            ValueError: the mode is unknown, or the limit negative; or as PyTorch's class.
        """
        super().__init__(*args, **kwargs)
        check_policy(sampling, workspace_limit)
        self.sampling = sampling
        self.workspace_limit = workspace_limit

    def _get_name(self) -> str:
        return f"cudnn_autotune.{super()._get_name()}"

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        parts += [
            f"{name}={value}"
            for name, value in (
                ("sampling", self.sampling),
                ("workspace_limit", self.workspace_limit),
            )
            if value is not None
        ]
        return ", ".join(filter(None, parts))


class _Calls(WithPolicy):
    """A base that calls PyTorch's function with the policy of the module."""

    _function: ClassVar[str]  # its name in torch.nn.functional
    _fast: ClassVar[Callable[..., Any]]  # a C function (csrc/bind/python_conv.cpp), no method

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_function" in vars(cls):
            cls._fast = fast_functions[cls._function]

    def _call(self, arguments: tuple[Any, ...]) -> Tensor:
        if not torch.compiler.is_compiling():
            output: Tensor = self._fast(*arguments, self.sampling, self.workspace_limit)
            if output is not NotImplemented:
                return output
        if isinstance(arguments[0], torch.fx.Proxy):  # the graph calls the public function
            function = getattr(functional, self._function)
            policy = {"sampling": self.sampling, "workspace_limit": self.workspace_limit}
            output = function(*arguments, **policy)
            return output
        return general(self._function, arguments, self.sampling, self.workspace_limit)


class _Convolution(_Calls, _ConvNd):
    """The forward of Conv1d to Conv3d."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        arguments = (input, weight, bias, self.stride, padding, self.dilation, self.groups)
        return self._call(arguments)


class _TransposedConvolution(_Calls, _ConvTransposeNd):
    """The forward of ConvTranspose1d to ConvTranspose3d."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if self.padding_mode != "zeros":
            return super().forward(input, output_size)  # PyTorch's error
        dims = len(self.kernel_size)
        stride: Any = self.stride  # PyTorch declares some of these as lists, which they never are
        padding: Any = self.padding
        dilation: Any = self.dilation
        kernel_size: Any = self.kernel_size
        output_padding = self.output_padding
        if output_size is not None:
            output_padding = tuple(
                self._output_padding(
                    input, output_size, stride, padding, kernel_size, dims, dilation
                )
            )
        arguments = (
            input,
            self.weight,
            self.bias,
            stride,
            padding,
            output_padding,
            self.groups,
            dilation,
        )
        return self._call(arguments)


class Conv1d(_Convolution, nn.Conv1d):
    """``torch.nn.Conv1d`` that runs the cuDNN engine chosen for each shape by a search."""

    _function = "conv1d"


class Conv2d(_Convolution, nn.Conv2d):
    """``torch.nn.Conv2d`` that runs the cuDNN engine chosen for each shape by a search."""

    _function = "conv2d"


class Conv3d(_Convolution, nn.Conv3d):
    """``torch.nn.Conv3d`` that runs the cuDNN engine chosen for each shape by a search."""

    _function = "conv3d"


class ConvTranspose1d(_TransposedConvolution, nn.ConvTranspose1d):
    """``torch.nn.ConvTranspose1d`` that runs the cuDNN engine chosen for each shape by a search."""

    _function = "conv_transpose1d"


class ConvTranspose2d(_TransposedConvolution, nn.ConvTranspose2d):
    """``torch.nn.ConvTranspose2d`` that runs the cuDNN engine chosen for each shape by a search."""

    _function = "conv_transpose2d"


class ConvTranspose3d(_TransposedConvolution, nn.ConvTranspose3d):
    """``torch.nn.ConvTranspose3d`` that runs the cuDNN engine chosen for each shape by a search."""

    _function = "conv_transpose3d"


class LazyConv1d(WithPolicy, nn.LazyConv1d):  # type: ignore[misc, unused-ignore]
    """``torch.nn.LazyConv1d``. Its first call makes it a :class:`Conv1d`."""

    cls_to_become = Conv1d


class LazyConv2d(WithPolicy, nn.LazyConv2d):  # type: ignore[misc, unused-ignore]
    """``torch.nn.LazyConv2d``. Its first call makes it a :class:`Conv2d`."""

    cls_to_become = Conv2d


class LazyConv3d(WithPolicy, nn.LazyConv3d):  # type: ignore[misc, unused-ignore]
    """``torch.nn.LazyConv3d``. Its first call makes it a :class:`Conv3d`."""

    cls_to_become = Conv3d


class LazyConvTranspose1d(WithPolicy, nn.LazyConvTranspose1d):  # type: ignore[misc, unused-ignore]
    """``torch.nn.LazyConvTranspose1d``. Its first call makes it a :class:`ConvTranspose1d`."""

    cls_to_become = ConvTranspose1d
    forward = _TransposedConvolution.forward  # bound before the first call changes the class


class LazyConvTranspose2d(WithPolicy, nn.LazyConvTranspose2d):  # type: ignore[misc, unused-ignore]
    """``torch.nn.LazyConvTranspose2d``. Its first call makes it a :class:`ConvTranspose2d`."""

    cls_to_become = ConvTranspose2d
    forward = _TransposedConvolution.forward  # bound before the first call changes the class


class LazyConvTranspose3d(WithPolicy, nn.LazyConvTranspose3d):  # type: ignore[misc, unused-ignore]
    """``torch.nn.LazyConvTranspose3d``. Its first call makes it a :class:`ConvTranspose3d`."""

    cls_to_become = ConvTranspose3d
    forward = _TransposedConvolution.forward  # bound before the first call changes the class
