"""The work of one rank of ddp_norms: each way is built, and all take turns."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common.network import create
from models.turns import time_block
from torch import Tensor, nn

import cudnn_autotune as ca
from ddp_norms.ways import CHOSEN, PYTORCH, TWO_PASSES, parts

Step = Callable[[], Any]


def work(request_file: Path) -> None:
    """The process that torchrun starts; it leaves ``rank<i>.json`` beside the request."""
    result = _measured(json.loads(request_file.read_text()))
    dist.barrier()
    dist.destroy_process_group()
    rank = int(os.environ["RANK"])
    (request_file.parent / f"rank{rank}.json").write_text(json.dumps({"rank": rank, **result}))


def _measured(request: dict[str, Any]) -> dict[str, Any]:
    device = request["device"]
    if device == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    else:
        dist.init_process_group("gloo")
    torch.backends.cudnn.benchmark = True
    steps: dict[str, tuple[Step, Callable[[], Any]]] = {}
    times: dict[str, list[float]] = {}
    skipped: dict[str, str] = {}
    for way in request["ways"]:
        try:
            step = _step(way, request)
            around = _around(way)
            with around():
                for _ in range(4):
                    step()
        except Exception as error:  # all ranks fail alike, before they communicate
            skipped[way] = f"{type(error).__name__}: {error}".partition("\n")[0]
            continue
        steps[way], times[way] = (step, around), []
    names = list(steps)
    for index in range(request["rounds"]):
        for way in names if index % 2 == 0 else names[::-1]:
            step, around = steps[way]
            with around():
                step()
                dist.barrier()
                times[way].append(time_block(step, request["steps"], device))
    soaked = 0
    chosen = next((way for way in names if parts(way)[1] == CHOSEN), None)
    if request["soak"] and chosen:
        step, around = steps[chosen]
        with around():
            for _ in range(request["soak"]):
                step()
            soaked = request["soak"]
            if device == "cuda":
                torch.cuda.synchronize()
    served = sum(choice.is_served for choice in ca.norm_choices())
    forms = sorted({choice.chosen for choice in ca.norm_choices()})
    return {
        "times_ms": times,
        "skipped": skipped,
        "soaked": {chosen: soaked} if soaked else {},
        "served": served,
        "forms": forms,
    }


@contextlib.contextmanager
def _enabled(norms: str) -> Iterator[None]:
    from cudnn_autotune.core.extension import _C
    from cudnn_autotune.norms import choices as norm_choices

    chooser: Any = norm_choices.choose_function
    if norms == PYTORCH:
        chooser = lambda *given: (False, 0)  # noqa: E731
    _C.set_norm_chooser(chooser)
    _C.forget_aten_norms()
    try:
        with ca.enable():
            yield
    finally:
        _C.set_norm_chooser(norm_choices.choose_function)
        _C.forget_aten_norms()


@contextlib.contextmanager
def _in_form(norms: str) -> Iterator[None]:
    from cudnn_autotune.core.extension import _C
    from cudnn_autotune.norms.plan import FORMS

    _C.set_norm_form(FORMS.index("two passes") + 1 if norms == TWO_PASSES else 0)
    try:
        yield
    finally:
        _C.set_norm_form(0)


def _around(way: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Returns the context of the steps of a way."""
    kind, norms = parts(way)

    @contextlib.contextmanager
    def found() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if kind != "eager":
                stack.enter_context(_in_form(norms))
            if kind == "enable":
                stack.enter_context(_enabled(norms))
            yield

    return found


def _step(way: str, request: dict[str, Any]) -> Step:
    """Returns a step of training of the model, wrapped and prepared as asked."""
    kind, norms = parts(way)
    device = request["device"]
    torch.manual_seed(0)
    model = create(request["model"], device)
    if request["synchronised"]:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if request["wrapper"] != "fsdp2":  # it takes contiguous parameters only
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if kind == "convert":
        ca.convert(model, norms=norms != PYTORCH)
    size = (request["batch"], 3, request["size"], request["size"])
    x = torch.randn(size, device=device).contiguous(memory_format=torch.channels_last)
    if request["wrapper"] == "pipeline":
        return _pipeline(model, x, kind, norms)
    is_compiled = kind in ("compile", "backend")
    is_split = is_compiled and request["wrapper"] == "ddp_compiled"
    if is_compiled and not is_split:
        model = _compiled(model, kind, norms)
    if request["wrapper"] == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for child in model.children():
            if any(True for _ in child.parameters()):
                fully_shard(child)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=request["bucket_mb"])
    if is_split:
        model = _compiled(model, kind, norms)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def _compiled(model: nn.Module, kind: str, norms: str) -> Any:
    if kind == "compile":
        return torch.compile(model)
    choice = "never" if norms == PYTORCH else "measure"
    return torch.compile(model, backend="cudnn_autotune", options={"norms": choice})


def _pipeline(model: nn.Module, x: Tensor, kind: str, norms: str) -> Step:
    """Returns a step of two stages with four parts of the batch, one forward and one backward."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks = dist.get_rank(), dist.get_world_size()
    layers = list(model.children())
    if hasattr(model, "fc"):
        layers.insert(-1, nn.Flatten())
    half = len(layers) // 2 + 1
    part = nn.Sequential(*(layers[:half] if rank == 0 else layers[half:]))
    if rank > 1 or ranks != 2:
        raise ValueError("a pipeline has two stages")
    if kind in ("compile", "backend"):
        part = _compiled(part, kind, norms)

    class InHalf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = part

        def forward(self, given: Tensor) -> Any:
            if given.dim() == 4:  # what stages send is contiguous
                if given.requires_grad:
                    given.register_hook(Tensor.contiguous)
                given = given.contiguous(memory_format=torch.channels_last)
            with torch.autocast(x.device.type, torch.bfloat16):
                return self.part(given).float().contiguous()

    stage = PipelineStage(InHalf(), rank, ranks, x.device)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: output.square().mean())
    target = torch.zeros(len(x), 1, device=x.device)

    def step() -> None:
        if rank == 0:
            schedule.step(x.contiguous())
        else:
            schedule.step(target=target)
        for parameter in part.parameters():
            parameter.grad = None

    return step
