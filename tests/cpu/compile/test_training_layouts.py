"""Training by ``torch.compile(model, backend="cudnn_autotune")`` in another layout than the
model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models.made import Made
from support.norms.models import Residual, check_steps, data
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune.compile import entry, training_graph

LAID_OUT = "cudnn_autotune, channels_last"
OPTIONS = {"norms": "always", "compare": False, "cpp.weight_prepack": False}


@pytest.fixture
def favoured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every graph is put into channels_last, whatever its dtype and device."""
    monkeypatch.setattr(entry, "_why_plain", lambda *_: None)
    monkeypatch.setattr(training_graph, "favours_channels_last", lambda *_, **__: True)


pytestmark = pytest.mark.usefixtures("favoured")


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="cudnn_autotune", options={**OPTIONS, **options})


def last() -> ca.Compilation:
    return ca.compilations()[-1]


def chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def grouped() -> nn.Module:
    return chain(
        nn.Conv2d(8, 12, 3, padding=1, groups=4),
        nn.SiLU(),
        nn.Conv2d(12, 12, 3, groups=12, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(12, 8, 2, stride=2),
        nn.Conv2d(8, 8, 1),
    )


def volumes() -> nn.Module:
    """A U-Net's way down and up."""

    def forward(model: Any, x: Tensor) -> Tensor:
        high = F.leaky_relu(model.norm(model.first(x)), 0.01, inplace=True)
        low = F.leaky_relu(model.norm2(model.down(high)), 0.01)
        y = torch.cat([model.up(low), high], 1)
        return model.last(F.group_norm(y, 4))

    return Made(
        forward,
        first=nn.Conv3d(8, 8, 3, padding=1),
        norm=nn.InstanceNorm3d(8, affine=True),
        down=nn.Conv3d(8, 12, 3, stride=2, padding=1),
        norm2=nn.InstanceNorm3d(12, affine=True),
        up=nn.ConvTranspose3d(12, 8, 2, 2),
        last=nn.Conv3d(16, 4, 1),
    )


def waves() -> nn.Module:
    return chain(
        nn.Conv1d(8, 16, 7, padding=3, stride=2),
        nn.GroupNorm(4, 16),
        nn.GELU(),
        nn.Conv1d(16, 16, 3, padding=2, dilation=2, groups=2),
        nn.BatchNorm1d(16),
        nn.Upsample(scale_factor=2),
        nn.ConvTranspose1d(16, 8, 4, 2, 1),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "grouped": (grouped, (2, 8, 10, 12)),
    "volumes": (volumes, (2, 8, 12, 12, 12)),
    "waves": (waves, (2, 8, 1024)),
    "residual": (Residual, (4, 8, 6, 5)),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.basic(4)
def test_a_model_trains_as_it_does(name: str, autocast: bool) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make()
    before = {key: value.stride() for key, value in model.state_dict().items()}
    check_steps(model, data(*shape), compiled, autocast)
    assert last().chosen == LAID_OUT, last().note
    for key, value in model.state_dict().items():
        assert value.stride() == before[key]
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
