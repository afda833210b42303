"""For tests of permissions, which do not hold for root: without its capabilities they do."""

from __future__ import annotations

import ctypes

_VERSION_3 = 0x20080522  # linux/capability.h


def drop_capabilities() -> None:
    """This process has no more rights than the owner of a file has by its mode; root stays the
    owner of what is root's, libraries among them.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    if libc.capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capset")
