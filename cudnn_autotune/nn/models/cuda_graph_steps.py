"""CUDA graphs: whether one is captured, and the steps of Inductor's, each of which may overwrite
what the one before gave."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TREES = "torch._inductor.cudagraph_trees"  # importing it takes seconds


def begin_step() -> None:
    """Lets Inductor's CUDA graphs, if there are any, overwrite the outputs of the last call."""
    if _TREES in sys.modules:
        torch.compiler.cudagraph_mark_step_begin()


@contextmanager
def own_steps() -> Iterator[None]:
    """Takes back that steps were marked as begun. After the first mark Inductor's CUDA graphs begin
    no step of their own accord any more: a program without marks would be recorded at each call."""
    before = sys.modules[_TREES].MarkStepBox.mark_step_counter if _TREES in sys.modules else 0
    try:
        yield
    finally:
        if _TREES in sys.modules:
            sys.modules[_TREES].MarkStepBox.mark_step_counter = before


def is_within_step() -> bool:
    """Whether Inductor's CUDA graphs of the current device hold results of the current step, such
    as those of the graph before a graph break. Other steps would overwrite them."""
    trees = sys.modules.get(_TREES)
    if trees is None or not torch.cuda.is_initialized():
        return False
    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    if manager is None or manager.current_node is None or manager.can_start_new_generation():
        return False
    return not manager.current_node.all_outputs_are_dead()


def is_capturing() -> bool:
    """Whether the current stream is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
