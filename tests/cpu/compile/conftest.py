"""No test finds what another one, or an older state of the checkout, has compiled."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Inductor lowers every graph anew. Compiled C++, which is found by its content, is that of all
    tests."""
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()
