"""By which policy the convolutions that a thread calls would be served."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from cudnn_autotune import _C

FORWARD = "aten.convolution.default"
BACKWARD = "aten.convolution_backward.default"


class Watched(TorchDispatchMode):
    """Collects the operator and the policy of each convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[str, int] | None]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if str(func) == FORWARD:
            self.calls.append((FORWARD, _C.policy_of_call(args[0])))
        if str(func) == BACKWARD:
            self.calls.append((BACKWARD, _C.policy_of_call(args[1])))
        return func(*args, **(kwargs or {}))

    @property
    def policies(self) -> list[tuple[str, int] | None]:
        return [policy for _, policy in self.calls]
