"""Each image is convolved with filters of its own, several side by side."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import TOLERANCES, assert_close
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import cudnn_autotune as ca

each_image = torch.ops.cudnn_autotune.conv_each_image
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
GEOMETRY = {4: ((1, 2), (1, 0), (1, 1)), 5: ((1, 1, 1), (1, 1, 0), (1, 1, 1))}


def operands(
    images: int, channels: int, filters: int, dims: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    x = torch.randn(images, channels, *[17, 12, 6][: dims - 2], device="cuda")
    w = torch.randn(images * filters, channels, *[3, 2, 3][: dims - 2], device="cuda")
    return x.to(dtype), w.to(dtype)


def expected(x: Tensor, w: Tensor) -> Tensor:
    images = len(x)
    conv: Any = F.conv2d if x.dim() == 4 else F.conv3d
    joined = x.double().flatten(0, 1)[None]
    y = conv(joined, w.double(), None, *GEOMETRY[x.dim()], groups=images)
    return y.reshape(images, -1, *y.shape[2:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [4, 5])
@pytest.mark.parametrize(
    ("images", "channels", "filters"), [(1, 64, 64), (2, 64, 3), (5, 17, 32), (9, 64, 48)]
)
def test_the_result_is_that_of_groups(
    images: int, channels: int, filters: int, dims: int, dtype: torch.dtype
) -> None:
    x, w = operands(images, channels, filters, dims, dtype)
    with torch.backends.cudnn.flags(allow_tf32=False):
        for of_x, of_w in ((True, True), (False, True), (False, False)):
            given = x.to(memory_format=LAST[dims]) if of_x else x
            filters_of_all = w.to(memory_format=LAST[dims]) if of_w else w
            found = each_image(given, filters_of_all, *GEOMETRY[dims], "sample_once")
            assert_close(found, expected(x, w), TOLERANCES[dtype])
            is_last = found.is_contiguous(memory_format=LAST[dims])
            assert is_last if of_x or of_w else found.is_contiguous()


def test_it_is_captured_and_waits_for_what_came_before() -> None:
    """Streams of its own run some of the images, in a graph and outside of one."""
    x, w = (one.to(memory_format=LAST[4]) for one in operands(9, 64, 64, 4, torch.float16))
    geometry = GEOMETRY[4]
    first = each_image(x, w, *geometry)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        each_image(x, w, *geometry)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = each_image(2 * x, w, *geometry)
            z = y + 1
    torch.cuda.synchronize()
    for factor in (1.0, -3.0, 0.5):
        torch.cuda._sleep(2_000_000)
        x.mul_(factor)
        first.mul_(factor)
        graph.replay()
        torch.cuda._sleep(2_000_000)
        eager = each_image(2 * x, w, *geometry).add_(1)
        assert_close(z, 2 * first.double() + 1, TOLERANCES[torch.float16])
        assert torch.equal(eager, z)


def test_threads_that_end_leave_their_streams_to_the_next() -> None:
    geometry = GEOMETRY[4]
    x, w = operands(8, 64, 64, 4, torch.float16)
    right = expected(x, w)
    each_image(x, w, *geometry)  # nothing is timed any more
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(2):
                assert_close(each_image(x, w, *geometry), right, TOLERANCES[x.dtype])
        except BaseException as error:
            errors.append(error)

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(20):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        torch.cuda.synchronize()
    assert not errors, errors
    streams = {
        event.device_resource_id
        for event in seen.events()
        if str(event.device_type).endswith("CUDA")
    }
    # A thread has three beside the caller's. It may begin before the last one has quite ended.
    assert 4 <= len(streams) <= 1 + 3 * 3


def test_a_compiled_model_convolves_each_image() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(
                torch.randn(k, c, 3, 3) / 24 for c, k in ((64, 96), (96, 64), (64, 3))
            )

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            for weight in self.weights:
                filters = (weight * scale[:, : weight.shape[1], None, None].unsqueeze(1)).flatten(
                    0, 1
                )
                y = x.reshape(1, -1, *x.shape[2:])
                y = F.conv2d(y, filters, padding=1, groups=len(x))
                x = F.leaky_relu(y.reshape(len(x), -1, *y.shape[2:]), 0.2)
            return x

    model = Model().cuda().half().eval()
    x, scale = torch.randn(4, 64, 24, 20).cuda().half(), torch.rand(4, 96).cuda().half()
    with torch.no_grad():
        found = torch.compile(model, backend="cudnn_autotune", options={"compare": False})(x, scale)
        assert_close(found, model.double()(x.double(), scale.double()), 4 * TOLERANCES[x.dtype])
    assert found.is_contiguous()
    problems = [choice.problem for choice in ca.choices()]
    assert {(1, 64, 24, 20), (1, 96, 24, 20)} <= {problem.input_shape for problem in problems}
