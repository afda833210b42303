"""Norms of each kind in eager mode on a GPU: the store, streams, new sizes, short calls, and odd
addresses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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


@pytest.mark.parametrize(
    ("kind", "shape"), [("instance", (2, 32, 64, 64, 64)), ("group", (8, 128, 3999))]
)
def test_it_is_measured_and_stored(kind: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    ca.set_store(tmp_path, mode="read_write")
    x = torch.randn(shape, device="cuda", dtype=torch.half, requires_grad=kind == "instance")
    with ca.enable():
        output = CALLS[kind](x)
        (choice,) = ca.norm_choices()
        ca.forget()
        again = CALLS[kind](x)
        (stored,) = ca.norm_choices()
    assert not choice.rejected
    assert set(choice.times_ms) > {"pytorch"}
    assert choice.chosen == min(choice.times_ms, key=choice.times_ms.__getitem__)
    assert (stored.chosen, stored.source) == (choice.chosen, "store")
    assert torch.equal(output, again)


@pytest.mark.parametrize("kind", ["instance", "group"])
def test_streams_at_once(kind: str, seems_fastest: Callable[[str], None]) -> None:
    seems_fastest("ours")
    x = torch.randn(2, 64, 128, 128, device="cuda", dtype=torch.half)
    streams = [torch.cuda.Stream() for _ in range(4)]
    with ca.enable(), torch.no_grad():
        expected = CALLS[kind](x)
        torch.cuda.synchronize()
        outputs = []
        for i in range(32):
            with torch.cuda.stream(streams[i % 4]):
                outputs.append(CALLS[kind](x))
        torch.cuda.synchronize()
    assert all(torch.equal(output, expected) for output in outputs)


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
