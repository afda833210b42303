"""A fixed list of candidates, as of a recording."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_autotune.engines.candidates import Work
from cudnn_autotune.engines.configs import ATEN, HEURISTIC_MODES, Candidate


class StaticCandidates:
    """A given list of candidates (an ``engines.candidates.Candidates``).

    Args:
        candidates: in any order those that a heuristic mode lists; the others in the order in
            which :meth:`beyond` returns them, behind PyTorch's own path.
        aten_uses_cudnn: whether PyTorch's own path calls cuDNN.
        similar: candidates that were chosen for similar problems.

    Raises:
        ValueError: two candidates have the same text, or a heuristic mode is unknown.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        aten_uses_cudnn: bool = True,
        similar: Sequence[Candidate] = (),
    ) -> None:
        texts: set[str] = set()
        for candidate in candidates:
            if candidate.text in texts:
                raise ValueError(f"candidates: {candidate.text!r} is listed twice")
            texts.add(candidate.text)
            if candidate.heuristic_mode not in ("", *HEURISTIC_MODES):
                raise ValueError(
                    f"candidates: heuristic_mode of {candidate.text!r} must be empty or one of "
                    f"{', '.join(HEURISTIC_MODES)}, got {candidate.heuristic_mode!r}"
                )
        self._engines = sorted((c for c in candidates if c.heuristic_mode), key=lambda c: c.place)
        self._beyond = sorted(
            (c for c in candidates if not c.heuristic_mode), key=lambda c: c.text != ATEN.text
        )
        self._aten_uses_cudnn = aten_uses_cudnn
        self._similar = list(similar)

    def of_mode(self, heuristic_mode: str) -> Sequence[Candidate]:
        return [c for c in self._engines if c.heuristic_mode == heuristic_mode]

    def all(self) -> Sequence[Candidate]:
        return list(self._engines)

    def beyond(self) -> Sequence[Candidate]:
        """Returns the candidates that no heuristic mode lists, PyTorch's own path first."""
        return list(self._beyond)

    def similar(self) -> Sequence[Candidate]:
        return list(self._similar)

    @property
    def aten_uses_cudnn(self) -> bool:
        return self._aten_uses_cudnn

    @property
    def work(self) -> Work | None:
        """None, so that ``auto`` does not carry what it observed of the board from one run to the
        next."""
        return None
