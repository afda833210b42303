"""The public names, as a user meets them: in help(), signatures and tab completion."""

from __future__ import annotations

import inspect
import pydoc

import pytest
from torch import nn

import cudnn_autotune as ca
from cudnn_autotune.nn.modules import WithPolicy

MODULES = [ca, ca.distributed, ca.functional, ca.recipe, ca.sampling]


@pytest.mark.parametrize("name", ca.__all__)
def test_help(name: str) -> None:
    public = getattr(ca, name)
    text = pydoc.render_doc(public, renderer=pydoc.plaintext)
    assert name in text or not callable(public)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_help_of_a_module(module: object) -> None:
    text = pydoc.render_doc(module, renderer=pydoc.plaintext)
    if module is ca:
        for name in ca.__all__:
            assert name in text


CALLABLE = [
    name
    for name in ca.__all__
    if callable(getattr(ca, name)) and name not in ("CudnnError", "PlanError")  # made in C++
]


@pytest.mark.parametrize("name", CALLABLE)
def test_signature(name: str) -> None:
    public = getattr(ca, name)
    parameters = inspect.signature(public).parameters
    if isinstance(public, type) and issubclass(public, nn.Module):
        assert {"sampling", "workspace_limit"} <= parameters.keys()


def test_a_class_between_may_take_further_arguments() -> None:
    """As torch.nn.Module itself and classes of users, whose signatures end with ``**kwargs``."""

    class Further(nn.Conv2d):
        __module__ = "torch.nn.made_up"

        def __init__(self, *args: int, **kwargs: int) -> None:
            super().__init__(*args, **kwargs)

    class Ours(WithPolicy, Further):
        pass

    for cls in (WithPolicy, Ours):
        parameters = list(inspect.signature(cls).parameters)
        assert parameters[-3:] == ["sampling", "workspace_limit", "kwargs"]


def test_completion_offers_what_is_public() -> None:
    offered = {name for name in dir(ca) if not name.startswith("__")}
    assert offered == set(ca.__all__)
    assert {"__version__", "__doc__", "__file__"} <= set(dir(ca))
