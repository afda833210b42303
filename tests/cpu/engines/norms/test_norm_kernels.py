"""The kernels of batch norms, on the emulation of CUDA, against PyTorch in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cuda_emulation
import pytest
import torch
from cuda_emulation.checks import H200
from norm_cases import Norm, by_pytorch, norm
from norm_launches import by_kernels
from references import assert_close

from cudnn_autotune.engines.norms.plan import FORMS, Form, NormPlan

pytestmark = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)

SMALL = replace(H200, multiprocessors=5)
"""So small a GPU that a few blocks fill it."""
TOLERANCES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def compare(
    given: Norm, form: Form, *, gpu: Any = SMALL, is_reversed: bool = False, alignment: int = 16
) -> list[NormPlan]:
    """Asserts that the kernels' results are those of PyTorch in float64; returns their plans."""
    plans: list[NormPlan] = []
    found = by_kernels(given, gpu, form, is_reversed=is_reversed, alignment=alignment, plans=plans)
    expected = by_pytorch(given.to(torch.float64))
    for name, wanted in vars(expected).items():
        result = getattr(found, name)
        if wanted is None:
            assert result is None, name
            continue
        assert_close(result, wanted, TOLERANCES[given.input.dtype], name)
    return plans


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("form", FORMS)
def test_layouts_and_dtypes(
    form: Form, dtype: torch.dtype, channels_last: bool, residual: bool, is_reversed: bool
) -> None:
    given = norm((5, 24, 16, 20), dtype, channels_last=channels_last, residual=residual)
    compare(given, form, is_reversed=is_reversed)
