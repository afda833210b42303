"""What a stored decision holds for: a GPU and the libraries that chose and ran its engines."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cudnn_autotune.core import versions
from cudnn_autotune.core.json_node import Node

NO_GPU = "none"
_MIG = re.compile(r"(?P<gpu>.*\S)\s+MIG\s+(?P<profile>\S.*)")


@dataclass(frozen=True)
class Environment:
    """Decisions are exchanged between equal environments only.

    The driver and torch are not part of it: they choose no engine. See ``Provenance``.
    """

    gpu: str
    """Its name, without a MIG profile: ``NVIDIA H200``; ``none`` where there is no GPU."""
    multiprocessors: int
    """As CUDA counts them: fewer on a MIG slice, and on some GPUs of the same name."""
    compute_capability: str
    """``9.0``; empty where there is no GPU."""
    mig_profile: str
    """``1g.18gb``; empty for a whole GPU."""
    cudnn: str
    """Version of the libcudnn that runs: ``9.19.0``; empty without one."""
    cudnn_frontend: str
    """Version of the headers that the extension was compiled with; empty without them."""

    @classmethod
    def of(cls, device: int | None = None) -> Environment:
        """That of a CUDA device (None: the current one), or of this machine without a GPU."""
        return cls.from_versions(versions.environment(device))

    @classmethod
    def from_versions(cls, found: Mapping[str, Any]) -> Environment:
        """Of what :func:`cudnn_autotune.environment` says, here or elsewhere."""
        name = str(found["gpu"] or NO_GPU)
        # torch.cuda names a slice "NVIDIA H200 MIG 1g.18gb".
        mig = _MIG.fullmatch(name)
        return cls(
            gpu=mig["gpu"] if mig else name,
            multiprocessors=int(found["multiprocessors"] or 0),
            compute_capability=str(found["compute_capability"] or ""),
            mig_profile=mig["profile"] if mig else "",
            cudnn=str(found["cudnn"] or ""),
            cudnn_frontend=str(found["cudnn_frontend"] or ""),
        )

    @property
    def file_name(self) -> str:
        """``nvidia-h200_132sm_sm90_cudnn-9.19.0_frontend-1.28.0_0123456789ab.json``: for people,
        and at its end the digest, since two environments may read alike."""
        parts = [_slug(self.gpu)]
        if self.mig_profile:
            parts.append(f"mig-{_slug(self.mig_profile)}")
        parts.append(f"{self.multiprocessors}sm")
        if self.compute_capability:
            parts.append("sm" + _slug(self.compute_capability).replace(".", ""))
        parts.append(f"cudnn-{_slug(self.cudnn)}")
        parts.append(f"frontend-{_slug(self.cudnn_frontend)}")
        return "_".join([*parts, self.digest]) + ".json"

    @cached_property
    def digest(self) -> str:
        """Twelve hexadecimal digits that tell environments apart."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, tree: Any, place: str = "environment") -> Environment:
        """Raises ValueError naming the place and what is allowed there."""
        fields = Node(tree, place).fields(*(field.name for field in dataclasses.fields(cls)))
        gpu = fields["gpu"].text()
        if not gpu:
            raise fields["gpu"].error(f"the name of a GPU, or {NO_GPU!r}")
        return cls(
            gpu=gpu,
            multiprocessors=fields["multiprocessors"].integer(),
            compute_capability=fields["compute_capability"].text(),
            mig_profile=fields["mig_profile"].text(),
            cudnn=fields["cudnn"].text(),
            cudnn_frontend=fields["cudnn_frontend"].text(),
        )


def _slug(text: str) -> str:
    """``text`` as part of a file's name; ``none`` where nothing is left of it."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:60] or "none"
