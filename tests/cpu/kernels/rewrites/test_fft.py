"""Long depthwise filters through spectra, which PyTorch computes; here on a CPU."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from support.conv.references import expected, relative_error
from support.covering import covering
from support.cuda_emulation.checks import check, random_tensors
from torch import Tensor

from cudnn_autotune import _C
from cudnn_autotune.engines.offers import gpu_of, offers_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe_plan import recipe_plan
from cudnn_autotune.kernels.rewrites.fft import Fft

pytestmark = pytest.mark.search

FFT = Fft()
H100 = gpu_of("h100")
OPERATIONS = ("fprop", "dgrad", "wgrad")
PADDINGS = {
    "causal": (1023, 0),
    "causal and cut later": (1023, 1023),
    "same": (512, 511),
    "valid": (0, 0),
    "anticausal": (0, 1023),
}

MANY = {"input_shape": (160, 64, 100), "weight_shape": (64, 1, 400)}
"""A layer whose filters are longer than its rows, with rows enough that it is offered."""


def long(op: str, length: int = 1500, taps: int = 1024, **changes: object) -> ConvProblem:
    shape = {"input_shape": (2, 64, length), "weight_shape": (64, 1, taps), "groups": 64}
    shape |= {"padding": (taps - 1, 0), "dtype": torch.float16}
    return ConvProblem(op, **{**shape, **changes})  # type: ignore[arg-type]


def executed(problem: ConvProblem, tensors: dict[str, Tensor]) -> Tensor:
    """The result of the plan that C++ runs, here on a CPU."""
    plan = recipe_plan(problem, f"fft@{FFT.version}", FFT.recipe(problem, "", H100), 0)
    return _C.execute(plan, *(tensors[name] for name in "xwy"))


@covering(dtype=[torch.float16, torch.bfloat16, torch.float32], padding=PADDINGS, op=OPERATIONS)
def test_spectra_give_the_convolution(
    dtype: torch.dtype, padding: tuple[int, int], op: str
) -> None:
    check(FFT, long(op, 2100, padding=padding, dtype=dtype, allow_tf32=False), "", gpu=H100)


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("length", [700, 1023, 1024, 1025, 2049])
def test_rows_shorter_than_filters_and_odd_lengths(length: int, op: str) -> None:
    check(FFT, long(op, length, padding=(1023, 500)), "", gpu=H100)


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("padding", [(199, 199), (250, 150)])
def test_filters_longer_than_a_padded_row(padding: tuple[int, int], op: str) -> None:
    check(FFT, long(op, 100, 400, padding=padding, **MANY), "", gpu=H100)


@pytest.mark.basic(2)
@pytest.mark.parametrize("seed", range(12))
def test_what_is_offered_of_random_layers_is_right(seed: int) -> None:
    """Filters are shorter, as long as, and longer than rows and padded rows."""
    draw = random.Random(seed)
    for op in OPERATIONS:
        offered = []
        while not offered:
            taps, length = draw.randint(64, 500), draw.choice([1, 7, draw.randint(50, 600)])
            before, behind = draw.randint(0, taps - 1), draw.randint(0, taps - 1)
            rows = draw.choice([(64, 32), (1, 2048), (7, 301), (512, 16)])
            out = length + before + behind - taps + 1
            if not 0 < out * taps * math.prod(rows) < 3e8:
                continue
            problem = long(
                op,
                padding=(before, behind),
                input_shape=(*rows, length),
                weight_shape=(rows[1], 1, taps),
                groups=rows[1],
                dtype=draw.choice([torch.float16, torch.bfloat16, torch.float32]),
                bias=op == "fprop" and draw.random() < 0.5,
                allow_tf32=False,
            )
            offered = list(FFT.offers(problem, H100))
        check(FFT, problem, offered[0].settings, gpu=H100, seed=seed)


def test_a_bias_is_added_before_rounding() -> None:
    check(FFT, long("fprop", bias=True), "", gpu=H100)


@pytest.mark.parametrize("op", OPERATIONS)
def test_float32_is_not_rounded_to_tf32(op: str) -> None:
    problem = long(op, dtype=torch.float32, allow_tf32=False)
    assert FFT.offers(problem, H100)[0].numerical_notes == ("FFT",)
    tensors = random_tensors(problem)
    found = executed(problem, tensors)
    assert relative_error(found, expected(problem, tensors)) < 1e-6


def test_large_outputs_hide_no_small_ones_of_other_rows() -> None:
    """An error is relative to the row's largest numbers."""
    problem = long("fprop", dtype=torch.float32)
    tensors = random_tensors(problem)
    tensors["x"][:, ::2] *= 1e6
    found = executed(problem, tensors)
    right = expected(problem, tensors)
    assert relative_error(found[:, 1::2], right[:, 1::2]) < 1e-6


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_spreads_to_its_row_and_no_farther(value: float) -> None:
    problem = long("fprop")
    for name, place in (("x", (1, 5, 700)), ("w", (5, 0, 3))):
        tensors = random_tensors(problem)
        tensors[name][place] = value
        found = executed(problem, tensors).isfinite()
        rows = torch.ones(2, 64, dtype=torch.bool)
        rows[1 if name == "x" else slice(None), 5] = False
        assert torch.equal(found, rows[..., None].expand_as(found))


NOT_OFFERED = {
    "two dimensions": {"input_shape": (2, 64, 1, 1500), "weight_shape": (64, 1, 1, 1024)},
    "a stride": {"stride": 2},
    "a dilation": {"weight_shape": (64, 1, 512), "dilation": 2},
    "more padding than taps": {"padding": (1024, 0)},
    "an activation": {"activation": "relu"},
    "a residual": {"residual": True},
    "two channels a group": {"weight_shape": (64, 2, 1024), "groups": 32},
    "two filters a channel": {"weight_shape": (128, 1, 1024)},
    "float64": {"dtype": torch.float64},
}


@pytest.mark.parametrize("what", NOT_OFFERED)
def test_what_is_not_computed_is_not_offered(what: str) -> None:
    changes: dict[str, object] = {"padding": 0, **NOT_OFFERED[what]}
    if what == "two dimensions":
        changes["padding"] = (0, 1023, 0, 0)
    assert FFT.offers(long("fprop"), H100)
    assert not FFT.offers(long("fprop", **changes), H100)


def test_it_is_offered_where_direct_kernels_would_take_longer() -> None:
    shape = {"input_shape": (4, 512, 8192), "groups": 512}
    layer = {
        taps: long("fprop", **shape, weight_shape=(512, 1, taps), padding=(taps - 1, 0))
        for taps in (63, 129, 130, 1025, 8192)
    }
    offered = {taps: bool(FFT.offers(problem, H100)) for taps, problem in layer.items()}
    assert offered == {63: False, 129: False, 130: True, 1025: True, 8192: True}
    in_float32 = {t: replace(p, dtype=torch.float32) for t, p in layer.items()}
    offered = {taps: bool(FFT.offers(problem, H100)) for taps, problem in in_float32.items()}
    assert offered == {63: False, 129: True, 130: True, 1025: True, 8192: True}
    small = long("fprop", 300, 256, input_shape=(1, 8, 300), weight_shape=(8, 1, 256), groups=8)
    assert not FFT.offers(small, H100), "launches take longer"


def test_half_types_have_kernels_or_spectra_for_every_length() -> None:
    """A list of candidates has one of both."""
    for taps in (63, 129, 130, 1025, 8192):
        problem = long("fprop", 8192, taps, input_shape=(4, 64, 8192))
        names = {c.id.name for c in offers_of(problem, H100)}
        assert names == {"depthwise_mma" if taps < 130 else "fft"}


def test_a_workspace_limit_leaves_it_out() -> None:
    problem = long("fprop")
    (offer,) = FFT.offers(problem, H100)
    room = offer.workspace_bytes
    rows = 2 * 64 * 4 * 1500
    assert 4 * rows < room < 12 * rows
    assert offers_of(problem, H100, workspace_limit=room)
    assert not offers_of(problem, H100, workspace_limit=room - 1)
    with pytest.raises(ValueError, match="settings"):
        FFT.recipe(problem, "N=2048", H100)
