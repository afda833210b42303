"""The resources that a search lacked and a later one may have: memory, and unbuilt plans."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Names of errors of cuDNN, CUDA, NVRTC, C++, Python and the system for resources that are short now
# and may not be later. A kernel that a GPU or a version does not support fails by other names.
_PASSING = re.compile(
    r"out.?of.?memory"  # torch, CUDA_ERROR_OUT_OF_MEMORY, NVRTC_ERROR_OUT_OF_MEMORY
    r"|ALLOC(ATION)?_FAILED"  # CUDNN_STATUS_ALLOC_FAILED, ..._HOST_ALLOCATION_FAILED
    r"|bad_alloc|MemoryError|Cannot allocate memory"
    r"|No space left on device|Disk quota exceeded"
    r"|Too many open files|Resource temporarily unavailable|can't start new thread"
    r"|NVRTC_ERROR_PROGRAM_CREATION_FAILURE|NVRTC_ERROR_TIME_FILE_WRITE_FAILED"
    r"|NVRTC_ERROR_PCH_CREATE|NVRTC_ERROR_CANCELLED",
    re.IGNORECASE,
)


def is_passing(error: str) -> bool:
    """Returns whether the message of a failure names a reason that may pass."""
    return _PASSING.search(error) is not None


@dataclass(frozen=True)
class Lacking:
    """The resources that were short when a choice was made. It is true if there are any."""

    memory_bytes: int = 0
    """The least bytes of GPU memory for a more complete search; 0 if memory sufficed."""
    left_out: int = 0
    """Number of candidates left out for lack of memory."""
    not_built: int = 0
    """Number of candidates that failed to build for a reason that may pass."""
    check: bool = False
    """Whether the output could not be compared with a reference."""
    to_build: str = ""
    """The text of one of the candidates that failed to build; empty if it is not known."""

    def __bool__(self) -> bool:
        return self.memory_bytes > 0 or self.not_built > 0 or self.check

    def __str__(self) -> str:
        """Returns the reason why the choice is not final; empty if it is final."""
        reasons = []
        if self.left_out:
            reasons.append(f"{_candidates(self.left_out)} left out because memory was short")
        elif self.memory_bytes:
            reasons.append("the search ran out of memory")
        if self.not_built:
            reasons.append(f"{_candidates(self.not_built)} not built, for a reason that may pass")
        if self.check:
            reasons.append("its output could not be compared with a reference")
        return "; ".join(reasons)

    def and_memory(self, memory_bytes: int) -> Lacking:
        """Returns this with one more left-out candidate, which needs ``memory_bytes``."""
        least = min(self.memory_bytes or memory_bytes, memory_bytes)
        return replace(self, memory_bytes=least, left_out=self.left_out + 1)

    def and_build(self, text: str = "") -> Lacking:
        """Returns this with one more candidate that failed to build for a reason that may pass."""
        return replace(self, not_built=self.not_built + 1, to_build=self.to_build or text)

    def may_be_had(self, device: int, builds: Callable[[str], bool]) -> bool:
        """Returns whether another search could do more now. It allocates the memory once, if that
        seems to be there, and builds one of the candidates that failed to build.

        Args:
            builds: builds a candidate, and returns False if it fails for a reason that may pass.
        """
        if self.not_built and (not self.to_build or builds(self.to_build)):
            return True
        return self.memory_bytes > 0 and _has_room(self.memory_bytes, device)


NOTHING = Lacking()


def _candidates(count: int) -> str:
    return "1 candidate was" if count == 1 else f"{count} candidates were"


def available_bytes(device: torch.device | int) -> int:
    """Returns the bytes, maybe in pieces, that PyTorch's allocator can give on a CUDA device: free
    ones and cached unused ones, up to the process's share of the memory."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    share = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free + unused, share - allocated))


def _has_room(size: int, device: int) -> bool:
    if size > available_bytes(device):
        return False
    try:
        torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))
    except torch.OutOfMemoryError:  # the memory is in pieces
        return False
    return True


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Returns the size of tensors in bytes."""
    return sum(int(tensor.nbytes) for tensor in tensors)
