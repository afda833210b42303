"""New sizes, short calls and odd addresses of norms in eager mode, on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.norms import misaligned
from support.processes.subprocesses import python
from torch import Tensor, nn

import cudnn_autotune as ca


@pytest.mark.parametrize("way", ["enable", "convert", "checkpoint"])
def test_odd_addresses(way: str) -> None:
    """cuDNN's kernels end the process there."""
    done = python(misaligned.__file__, way)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 100


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch": lambda x: F.batch_norm(x, None, None, training=True),
    "instance": lambda x: F.instance_norm(x),
    "group": lambda x: F.group_norm(x, 4),
}
SIZES = ((16, 63, 63), (16, 57, 57), (1, 255, 255), (2, 181, 181), (256, 15, 17), (512, 8, 8))


@pytest.mark.parametrize("kind", ["batch", "group"])
def test_sizes_of_another_class_are_pytorch_s(
    kind: str, seems_fastest: Callable[[str], None]
) -> None:
    seems_fastest("ours")
    call = CALLS[kind]

    def images(n: int, height: int, width: int) -> Tensor:
        return torch.randn(n, 64, height, width, device="cuda", dtype=torch.half)

    with ca.enable():
        for side in (64, 48, 32, 56):
            call(images(16, side, side))
        assert [choice.is_served for choice in ca.norm_choices()] == [True] * 4
        for size in SIZES:
            x = images(*size)
            found = call(x)
            with torch.no_grad():
                ca.disable()
                expected = call(x)
                ca.enable()
            # A layer of its own, which is measured; or a group that is divided as a measured one.
            if (kind, size[0]) in (("batch", 1), ("group", 16)):
                torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
            else:
                assert torch.equal(found, expected), size
    ca.disable()


@pytest.mark.parametrize("kind", CALLS)
def test_short_calls_are_timed_with_the_host(kind: str) -> None:
    x = torch.randn(2, 64, 16, 16, device="cuda", requires_grad=True)
    with ca.enable():
        found = CALLS[kind](x)
    torch.testing.assert_close(found, CALLS[kind](x.double()).float(), rtol=1e-4, atol=1e-4)
    (choice,) = ca.norm_choices()
    assert choice.times_ms, choice
    by_gpu = min(choice.times_ms, key=choice.times_ms.__getitem__)
    if by_gpu != "pytorch":
        times = choice.call_times_ms
        assert times.keys() == {"pytorch", by_gpu}
        assert choice.is_served == (times[by_gpu] < times["pytorch"])


def test_short_calls_of_a_pair_are_timed_with_the_host() -> None:
    model = ca.convert(nn.Sequential(nn.BatchNorm2d(64), nn.ReLU()).cuda())
    x = torch.randn(2, 64, 16, 16, device="cuda")
    expected = F.batch_norm(x.double(), None, None, training=True).relu().float()
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    (choice,) = ca.norm_choices()
    assert choice.times_ms
    assert choice.is_served <= bool(choice.call_times_ms)
    assert model[0].num_batches_tracked == 1
