"""What implementations beside cuDNN's engines compute, on random problems.

``RANDOM_PROBLEMS`` is how many problems of a kind each implementation computes. Each has kernels of
its own, so that nearly all of the time goes into compiling them.
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

import pytest
import torch
from support.conv.references import OPERANDS, expected, relative_error, shapes_of, tolerance
from support.kernels.not_finite import PATTERNS
from support.kernels.random_problems import TAKES, random_problem
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune.engines.implementations import Implementation, Offer
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.kernels.built_in import BUILT_IN
from cudnn_autotune.kernels.depthwise.depthwise_1d import Depthwise1d
from cudnn_autotune.kernels.rewrites.adjoint import Adjoint
from cudnn_autotune.kernels.rewrites.fft import Fft
from cudnn_autotune.kernels.rewrites.filter_depths import FilterDepths
from cudnn_autotune.kernels.rewrites.rewrite import Rewrite
from cudnn_autotune.timers.measuring import ADDED

PAIRS = [
    pytest.param(one, kind, id=f"{one.name}-{kind}") for one in BUILT_IN for kind in TAKES[one.name]
]
# Rewrites leave it to engines of cuDNN, some of which multiply what lies beside an image by zero. A
# transform spreads it to the whole row.
OF_KERNELS = [pair for pair in PAIRS if not isinstance(pair.values[0], (Rewrite, Adjoint, Fft))]
# Beside a huge tensor there is no room for spectra, which PyTorch computes. The layers have
# two dimensions.
HUGE_ONES = [one for one in BUILT_IN if not isinstance(one, (Fft, Depthwise1d, FilterDepths))]
VALUES = (math.nan, math.inf, -math.inf)
LAYERS = {
    "depthwise": (64, 64, 64, 7),
    "grouped": (64, 64, 4, 3),
    "narrow_groups": (64, 64, 8, 3),
    "few_channels": (3, 64, 1, 7),
    "dense": (6, 64, 1, 3),
    "few_filters": (64, 32, 1, 3),
    "pointwise": (512, 64, 1, 1),
    "signals": (64, 64, 2, 7),
    "patches": (3, 64, 1, 16),
}
"""Kind -> input channels, output channels, groups and width of the kernel of a layer whose tensors
are made huge; of what computes long filters, other layers are."""
WIDE = 5
"""Width of the kernel for implementations that compute none of the layers."""
HUGE = {torch.float32: 2**30 * 21 // 20, torch.float16: 2**31 * 49 // 50}
"""Elements of such a tensor: more than 4 GiB, or nearly as many as an implementation takes."""
FREE = 24 << 30
"""Bytes that such a layer needs: two tensors, a copy of each, and room."""
DRAWN, TAKEN = 10_000, int(os.environ.get("RANDOM_PROBLEMS", "50"))
"""How many random problems of a kind are drawn, and up to how many an implementation computes."""


def offered(implementation: Implementation, problem: ca.ConvProblem) -> dict[str, Offer]:
    """Returns the offers by the text of their candidates."""
    gpu = gpu_of(torch.cuda.current_device())
    prefix = f"{implementation.name}@{implementation.version}"
    return {
        f"{prefix}:{offer.settings}" if offer.settings else prefix: offer
        for offer in implementation.offers(problem, gpu)
    }


def taken(
    implementation: Implementation, kind: str
) -> Iterator[tuple[ca.ConvProblem, dict[str, Offer]]]:
    """Yields the random problems that an implementation computes, with its offers. They are the
    same ones each time, so that tests share their kernels."""
    rng = random.Random(f"{implementation.name} {kind}")
    drawn = (random_problem(rng, kind) for _ in range(DRAWN))
    found = ((problem, offered(implementation, problem)) for problem in drawn)
    return islice((pair for pair in found if pair[1]), TAKEN)


def huge(implementation: Implementation) -> Iterator[tuple[ca.ConvProblem, str]]:
    """Yields a problem of each operation that an implementation computes, and the text of an offer
    for it, in float32 if there is one. One tensor at least is huge."""
    for op in ("fprop", "dgrad", "wgrad"):
        for least_width, (dtype, elements), kind, step, layout in product(
            (1, WIDE),
            HUGE.items(),
            TAKES[implementation.name],
            (1, 2),
            (torch.channels_last, torch.contiguous_format),
        ):
            if kind not in LAYERS:
                continue
            channels, kernels, groups, width = LAYERS[kind]
            width = max(width, least_width)
            height = 1 if kind == "signals" else width
            stride, padding = (width, 0) if kind == "patches" else (step, width // 2)
            largest = max(channels * 64**2, kernels * (64 // stride) ** 2)
            problem = ca.ConvProblem(
                op,
                (elements // largest, channels, 64, 64),
                (kernels, channels // groups, height, width),
                stride,
                padding if height == width else (0, padding),
                groups=groups,
                dtype=dtype,
                memory_format=layout,
                allow_tf32=True,
            )
            offers = offered(implementation, problem)
            if offers:
                yield problem, next(iter(offers))
                break


def operands(problem: ca.ConvProblem, seed: int) -> dict[str, Tensor]:
    """Normal random tensors; those that the problem says are hardly aligned are no better."""
    generator = torch.Generator("cuda").manual_seed(seed)
    tensors = {}
    aligned = dict(zip("xwy", problem.alignment, strict=True))
    for name, shape in shapes_of(problem).items():
        format = problem.memory_format if len(shape) > 1 else torch.contiguous_format
        strides = torch.empty(shape, device="meta").contiguous(memory_format=format).stride()
        skipped = aligned.get(name, 32) % 32 // problem.dtype.itemsize
        room = torch.randn(
            torch.Size(shape).numel() + skipped, generator=generator, device="cuda"
        ).to(problem.dtype)
        tensors[name] = room[skipped:].as_strided(shape, strides, skipped)
    return tensors


def right(problem: ca.ConvProblem, tensors: dict[str, Tensor]) -> Tensor:
    """The result in float64, by PyTorch's own kernels on the GPU."""
    with torch.backends.cudnn.flags(enabled=False):
        return expected(problem, tensors, "cuda")


def arguments(problem: ca.ConvProblem, tensors: dict[str, Tensor]) -> list[Tensor]:
    """Returns the operands in the order that ``ca.expert.execute`` takes."""
    added = [name for name in ADDED if name in tensors]
    return [tensors[name] for name in (*OPERANDS[problem.op], *added)]


def run(problem: ca.ConvProblem, text: str, tensors: dict[str, Tensor]) -> Tensor:
    """Returns the result, and says which candidate it was that failed on the GPU."""
    try:
        result = ca.expert.execute(problem, text, *arguments(problem, tensors))
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise AssertionError(f"{problem.text} by {text}") from error
    return result


@pytest.mark.long
@pytest.mark.parametrize(("implementation", "kind"), PAIRS)
def test_every_offer_is_right_and_repeats_to_the_bit_unless_it_says_otherwise(
    implementation: Implementation, kind: str
) -> None:
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    for seed, (problem, offers) in enumerate(taken(implementation, kind)):
        tensors = operands(problem, seed)
        reference = right(problem, tensors)
        allowed = tolerance(problem.dtype, problem.allow_tf32, problem.activation)
        for text, offer in offers.items():
            counts[problem.op] += 1
            first, second = (run(problem, text, tensors) for _ in range(2))
            repeats = "NONDETERMINISTIC" not in offer.numerical_notes
            error = relative_error(first, reference)
            if not error <= allowed:
                wrong.append(f"{problem.text} by {text}: relative error {error:.3g}")
            elif repeats and not torch.equal(first, second):
                wrong.append(f"{problem.text} by {text}: two runs differ")
    print(f"{implementation.name}, {kind}: {dict(counts)}")
    assert not wrong, "\n".join([f"{len(wrong)} of {counts.total()}", *wrong[:20]])
    if not counts and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("it computes no such problem on this GPU")
    assert counts


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("implementation", "kind"), OF_KERNELS)
def test_a_number_that_is_not_finite_goes_where_the_definition_sends_it(
    implementation: Implementation, kind: str, value: float
) -> None:
    """Places of the output are not finite exactly where they are in float64. Each value has a third
    of the problems."""
    rng = random.Random(f"{implementation.name} {kind} {value}")
    wrong = []
    problems = enumerate(taken(implementation, kind))
    for seed, (problem, offers) in islice(problems, VALUES.index(value), None, len(VALUES)):
        if problem.activation:
            continue
        tensors = operands(problem, seed)
        read = {"fprop": "x", "dgrad": "y", "wgrad": "x"}[problem.op]
        place = tuple(rng.randrange(size) for size in tensors[read].shape)
        tensors[read][place] = value
        reference = right(problem, tensors)
        for text in offers:
            found = run(problem, text, tensors)
            if not torch.equal(found.isfinite(), reference.isfinite()):
                wrong.append(f"{problem.text} by {text}, {value} at {place} of {read}")
    assert not wrong, "\n".join([str(len(wrong)), *wrong[:20]])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("implementation", "kind"), OF_KERNELS)
def test_many_numbers_that_are_not_finite_go_where_the_definition_sends_them(
    implementation: Implementation, kind: str, pattern: str
) -> None:
    """Each pattern has a fifth of the problems, and all patterns have one in common."""
    wrong = []
    own = list(PATTERNS).index(pattern)
    problems = enumerate(taken(implementation, kind))
    chosen = (one for one in problems if one[0] == 0 or one[0] % len(PATTERNS) == own)
    for seed, (problem, offers) in islice(chosen, 6):
        if problem.activation:
            continue
        for name in {"fprop": "x", "dgrad": "y", "wgrad": "xy"}[problem.op]:
            tensors = operands(problem, seed)
            PATTERNS[pattern](tensors[name], torch.Generator().manual_seed(seed))
            reference = right(problem, tensors).isfinite()
            for text in offers:
                found = run(problem, text, tensors).isfinite()
                if problem.op == "wgrad" and name == "y":
                    # PyTorch's kernels differ in whether dy is multiplied by padding.
                    filters = tensors["y"].isfinite().transpose(0, 1).flatten(1).all(1)
                    is_right = bool(found[filters].all()) and not bool((found & ~reference).any())
                else:
                    is_right = torch.equal(found, reference)
                if not is_right:
                    wrong.append(f"{problem.text} by {text}, {name}: {pattern}")
    assert not wrong, "\n".join([str(len(wrong)), *wrong[:20]])


def test_huge_tensors_are_read_and_written_to_their_end() -> None:
    """The last two images of a large batch are compared. All but them are zero where an operation
    sums over the images."""
    if torch.cuda.mem_get_info()[0] < FREE:
        pytest.skip(f"needs {FREE >> 30} GiB of free GPU memory")
    wrong: list[str] = []
    computed: set[str] = set()
    for implementation in HUGE_ONES:
        for problem, text in huge(implementation):
            shapes = shapes_of(problem)
            tensors = {
                name: torch.empty(
                    shapes[name],
                    device="cuda",
                    dtype=problem.dtype,
                    memory_format=problem.memory_format,
                ).normal_()
                for name in OPERANDS[problem.op]
            }
            if problem.op == "wgrad":
                tensors["x"][:-2] = 0
            found = run(problem, text, tensors)
            last = replace(problem, input_shape=(2, *problem.input_shape[1:]))
            few = {name: t if name == "w" else t[-2:] for name, t in tensors.items()}
            found = found if problem.op == "wgrad" else found[-2:]
            error = relative_error(found, right(last, few))
            if not error <= tolerance(problem.dtype, allow_tf32=True):
                wrong.append(f"{problem.text} by {text}: relative error {error:.3g}")
            computed.add(implementation.name)
            del tensors, few, found
            torch.cuda.empty_cache()
    assert not wrong, "\n".join(wrong)
    assert computed == {implementation.name for implementation in HUGE_ONES}
