"""Why tests of PyTorch's do not pass under ``enable()`` that pass without it."""

from __future__ import annotations

import fnmatch

# "Class::test", in which * stands for any text -> the reason.
REASONS: dict[str, str] = {}


def reason(test: str) -> str | None:
    """That of the first pattern that ``test`` matches, or None."""
    return next((REASONS[p] for p in REASONS if fnmatch.fnmatchcase(test, p)), None)
