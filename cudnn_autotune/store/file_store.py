"""The store: decisions on disk that threads and processes share."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import astuple, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from cudnn_autotune.core import atomic_file
from cudnn_autotune.core.fork_safe_lock import LOCK
from cudnn_autotune.core.json_node import shown
from cudnn_autotune.engines.problem import ConvProblem, check_problem
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.sampling.strategy import SamplingMode
from cudnn_autotune.store import codec
from cudnn_autotune.store.decision import NONDETERMINISTIC, Decision, Provenance, key_of
from cudnn_autotune.store.environment import Environment, file_in
from cudnn_autotune.store.journal import Changes, Journal
from cudnn_autotune.store.merge import Taken, measured_at, reconciled
from cudnn_autotune.store.neighbours import Neighbours
from cudnn_autotune.store.notices import WarningsPutOff, warn_once

_log = logging.getLogger(__name__)


class Store:
    """The decisions of one environment, in one file.

    Threads and processes may share the file. Every change is on the disk when the call returns, and
    keeps all entries of others. A change that cannot be written stays in the memory of the process
    and is served from there. Reasons are a full disk, a folder without permission, and a file that
    is read-only, of another version, or not a store's. A warning says so once, and the next change
    writes it too if it can. A damaged file is set aside, and its intact entries are kept.

    Args:
        path: A file (``*.json``), or a folder with one file for each environment; None means
            ``environment.default_folder()``.
        environment: The environment of the decisions; None means the current CUDA device's.
        read_only: Whether changes stay in memory and are not written.

    Raises:
        TypeError: ``path`` is not a path, or ``environment`` is not an Environment.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        environment: Environment | None = None,
        *,
        read_only: bool = False,
    ) -> None:
        if not isinstance(environment, Environment | None):
            raise TypeError(f"environment must be an Environment, got {shown(environment)}")
        self.environment = Environment.of() if environment is None else environment
        place = file_in(path, self.environment)
        with suppress(OSError):  # a link that is not followed is only read
            place = atomic_file.followed(place)
        self._file = Journal(place, self.environment, read_only)
        # These changes are not on the disk yet.
        self._unwritten: Changes = {}
        self._parsed: dict[bytes, Decision | None] = {}
        self._neighbours = Neighbours()
        # The entries in the index, and the number of lines that had been read for it.
        self._indexed: tuple[Mapping[bytes, bytes], int] = ({}, 0)
        with WarningsPutOff(), LOCK:
            self._file.refresh()

    @property
    def path(self) -> Path:
        """The path of the file; the file need not exist."""
        return self._file.path

    @property
    def is_writable(self) -> bool:
        """Whether a change will be written to the file, as far as this process knows."""
        return self._file.is_writable

    @property
    def obstacle(self) -> str:
        """The reason why the last change is not on the disk; empty if it is."""
        return self._file.obstacle

    def find(
        self,
        problem: ConvProblem,
        *,
        sampling: SamplingMode | str = "auto",
        workspace_limit: int | None = None,
        benchmark_limit: int = 0,
    ) -> Decision | None:
        """Returns the decision that serves ``problem``, without timing anything.

        A decision measured under looser constraints is ranked again (``Decision.restricted_to``).

        Args:
            problem: The convolution; its ``deterministic`` constrains the candidates.
            sampling: The name of the mode that measured. It need not be registered in this process.
            workspace_limit: The most bytes of workspace; None means no limit.
            benchmark_limit: The most candidates that the mode was allowed to try; 0 means all.

        Returns:
            The decision, or None if the problem must be measured first.

        Raises:
            TypeError, ValueError: An argument is not allowed; the message names it and the allowed
                values.
        """
        check_problem(problem)
        key = key_of(problem, Policy(sampling, workspace_limit, benchmark_limit))

        def known() -> Decision | None:
            fitting = [
                d.restricted_to(problem.deterministic, workspace_limit) for d in self._known(key)
            ]
            return max(filter(None, fitting), key=measured_at, default=None)

        return self._looked_up(known)

    def get(self, problem: ConvProblem, **policy: Any) -> Selection | None:
        """Returns the selection of the decision that :meth:`find` returns, or None.

        Arguments and errors: as of :meth:`find`.
        """
        found = self.find(problem, **policy)
        return None if found is None else found.selection

    def by_key(self, key: str) -> Decision | None:
        """Returns the decision of a ``Decision.key`` as it was measured, or None. Raises TypeError
        if ``key`` is not a str."""
        if not isinstance(key, str):
            raise TypeError(f"key must be a text, got {shown(key)}")
        return self._looked_up(lambda: next(iter(self._known(key)), None))

    def put(
        self,
        problem: ConvProblem,
        selection: Selection,
        *,
        sampling: SamplingMode | str = "auto",
        workspace_limit: int | None = None,
        benchmark_limit: int = 0,
        relative_error: float | None = None,
        rejected: Iterable[tuple[str, float]] = (),
    ) -> None:
        """Adds a decision that was measured just now.

        Arguments and errors: as of ``Decision``.
        """
        decision = Decision(
            problem=problem,
            policy=Policy(sampling, workspace_limit, benchmark_limit),
            selection=selection,
            relative_error=relative_error,
            rejected=rejected,  # type: ignore[arg-type]  # Decision makes a tuple of it
            provenance=Provenance.now(),
        )
        self.add([decision], are_latest=True)

    def add(self, decisions: Iterable[Decision], *, are_latest: bool = False) -> Taken:
        """Adds decisions in one step: all of them are written, or none.

        For each key ``merge.prevailing`` decides which decisions are kept: under equal constraints
        and budgets the later one.

        Args:
            decisions: The decisions to add.
            are_latest: Whether they were measured just now. They then count as later than the
                store's, even if a clock says otherwise.

        Returns:
            The numbers of decisions that are new, and that replaced another one.

        Raises:
            TypeError: ``decisions`` is not an iterable of Decision.
            ValueError: A decision could not be read back, such as one with a negative time. Nothing
                is added then.
        """
        return self._change(self._as_read_back(decisions), {}, are_latest=are_latest)

    def discard(self, decisions: Iterable[Decision]) -> int:
        """Removes decisions, and returns the number of removed ones: a decision that has replaced
        one of them since stays. Raises TypeError for other types."""
        gone = {codec.name_of(decision): decision for decision in _checked(decisions)}
        return self._change([], gone).removed if gone else 0

    def reject(self, answer: Decision, *, varies: bool = False) -> None:
        """Records that the chosen candidate of an answer of :meth:`find` cannot serve: it does not
        build, fails, or has a wrong output. The next best of the same measurement takes its place.

        Args:
            varies: Whether its only fault is an output that differs from run to run. Then it still
                serves problems that need no determinism.

        Raises:
            TypeError: ``answer`` is not a Decision.
        """
        if not isinstance(answer, Decision):
            raise TypeError(f"answer must be a Decision, got {shown(answer)}")
        text = answer.selection.winner.candidate.text
        with LOCK:
            known = [d for d in self._known(answer.key) if _has_answered(d, answer)]
        if known:
            rejected = [
                _varying(d, text)
                if varies and not d.problem.deterministic
                else replace(d, rejected=(*d.rejected, (text, math.inf)))
                for d in known
            ]
            self._change(rejected, {codec.name_of(d): d for d in known})

    def nearest(self, problem: ConvProblem, most: int = 3) -> list[tuple[float, str]]:
        """Returns up to ``most`` keys of decisions for the problems most similar to ``problem``,
        with their distances (see ``neighbours``), the nearest first. Keys of ``problem`` itself are
        left out.

        The first call takes seconds if there are hundreds of thousands of decisions, and later ones
        milliseconds. Raises TypeError if ``problem`` is no ConvProblem.
        """
        check_problem(problem)
        with LOCK:
            self._refresh()
            content, (entries, lines) = self._file.content, self._indexed
            if entries is not content.entries:
                self._neighbours, lines = Neighbours(), 0
            # New entries are among the last ones; their number is at most the number of lines read
            # since.
            new = islice(reversed(content.entries), content.lines - lines)
            self._indexed = (content.entries, content.lines)
            self._neighbours.add(codec.key_of(name) for name in chain(new, self._unwritten))
            return self._neighbours.nearest(problem, most, self._has)

    def _has(self, key: str) -> bool:
        return any(
            self._unwritten.get(name, self._file.content.entries.get(name)) is not None
            for name in codec.names(key)
        )

    def keys(self) -> Iterator[str]:
        """Yields the ``Decision.key`` of each entry, each key once, without parsing decisions."""
        return iter(dict.fromkeys(codec.key_of(name) for name in self._names()))

    def __iter__(self) -> Iterator[Decision]:
        for name in self._names():
            with LOCK:
                decision = self._decision(name)
            if decision is not None:
                yield decision

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def __len__(self) -> int:
        return len(self._names())

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.by_key(key) is not None

    def _refresh(self) -> bool:
        with WarningsPutOff():
            changed = self._file.refresh()
            if changed:
                self._parsed.clear()
        return changed

    def _looked_up(self, look: Callable[[], Decision | None]) -> Decision | None:
        with LOCK:
            found = look()
            if found is None and self._refresh():
                found = look()
            return found

    def _names(self) -> list[bytes]:
        with LOCK:
            self._refresh()
            names = dict.fromkeys([*self._file.content.entries, *self._unwritten])
            return [name for name in names if self._unwritten.get(name, b"") is not None]

    def _known(self, key: str) -> list[Decision]:
        found = (self._decision(name) for name in codec.names(key))
        return [decision for decision in found if decision is not None]

    def _decision(self, name: bytes) -> Decision | None:
        if name not in self._parsed:
            entries = self._unwritten if name in self._unwritten else self._file.content.entries
            self._parsed[name] = self._decoded(entries.get(name))
        return self._parsed[name]

    def _decoded(self, line: bytes | None) -> Decision | None:
        if line is None:
            return None
        try:
            return codec.decode(line, self.environment)
        except ValueError as error:
            message = f"{self.path}: an entry is not served: {error} ({line[:200]!r})"
            _log.debug(message)
            warn_once((self.path, "entry"), message)
            return None

    def _as_read_back(self, decisions: Iterable[Decision]) -> list[Decision]:
        """Returns the decisions as the file will keep them: shortened, with rounded numbers."""
        here = self.environment
        return [
            one if codec.is_as_read(one, here) else codec.decode(codec.encode(one, here), here)
            for one in _checked(decisions)
        ]

    def _change(
        self,
        given: Collection[Decision],
        gone: Mapping[bytes, Decision],
        *,
        are_latest: bool = False,
    ) -> Taken:
        """Adds the decisions of ``given`` that prevail, and removes the entries of ``gone`` that
        are still there.

        Lookups of other threads go on while it waits for the file's lock. A warning turned into an
        error is raised after the change, on the disk or in memory.
        """
        taken = Taken()

        def changes_of(entries: Mapping[bytes, bytes]) -> Changes:
            nonlocal taken
            changes, taken = reconciled(
                entries,
                self._unwritten,
                given,
                gone,
                self.environment,
                self._decoded,
                are_latest=are_latest,
            )
            return changes

        with WarningsPutOff():
            with LOCK:
                is_left_alone = self._file.is_left_alone()
            with nullcontext() if is_left_alone else self._file.locked() as failure, LOCK:
                if not is_left_alone and self._file.update(changes_of, failure):
                    self._unwritten = {}
                else:
                    self._unwritten = dict(changes_of(self._file.content.entries))
                self._parsed.clear()
        return taken


class Layered:
    """The user's store, to which changes are written, in front of the stores that an application
    ships. The first answer counts. All must be of one environment (ValueError)."""

    def __init__(self, user: Store, shipped: Sequence[Store] = ()) -> None:
        for store in shipped:
            if store.environment != user.environment:
                raise ValueError(
                    f"shipped must be stores of {user.environment.file_name}, got one of "
                    f"{store.environment.file_name}"
                )
        self.user = user
        self.shipped = tuple(shipped)

    def find(
        self,
        problem: ConvProblem,
        policy: Policy | None = None,
        suffices: Callable[[Decision], bool] = lambda decision: True,
    ) -> Decision | None:
        """Returns the first sufficient decision of ``Store.find`` in the stores, or None."""
        mode, workspace, benchmark = astuple(policy or Policy())[:3]
        found = (
            store.find(problem, sampling=mode, workspace_limit=workspace, benchmark_limit=benchmark)
            for store in (self.user, *self.shipped)
        )
        return next((one for one in found if one is not None and suffices(one)), None)

    def by_key(self, key: str) -> Decision | None:
        """Returns the first decision that ``Store.by_key`` finds in the stores, or None."""
        found = (store.by_key(key) for store in (self.user, *self.shipped))
        return next((decision for decision in found if decision is not None), None)

    def nearest(self, problem: ConvProblem, most: int = 3) -> list[str]:
        """Returns up to ``most`` keys of the stores' decisions for the problems most similar to
        ``problem``, the nearest first; see ``Store.nearest``."""
        stores = (self.user, *self.shipped)
        found = {pair for store in stores for pair in store.nearest(problem, most)}
        return [key for _, key in sorted(found)[:most]]

    def keys(self) -> Iterator[str]:
        """Returns the keys of all stores, each key once, the user's store's first."""
        keys = chain.from_iterable(store.keys() for store in (self.user, *self.shipped))
        return iter(dict.fromkeys(keys))

    def reject(self, answer: Decision, *, varies: bool = False) -> None:
        """Calls ``Store.reject`` of every store. Shipped ones, which are read-only, remember the
        rejection in this process only."""
        for store in (self.user, *self.shipped):
            store.reject(answer, varies=varies)

    def add(self, decisions: Iterable[Decision], *, are_latest: bool = False) -> None:
        """Adds decisions to the user's store; see ``Store.add``."""
        self.user.add(decisions, are_latest=are_latest)


def _checked(decisions: Iterable[Decision]) -> list[Decision]:
    if not isinstance(decisions, Iterable):
        raise TypeError(f"decisions must be an iterable of Decision, got {shown(decisions)}")
    found = list(decisions)
    for one in found:
        if not isinstance(one, Decision):
            raise TypeError(f"decisions must hold nothing but Decision, got {shown(one)}")
    return found


def _varying(known: Decision, text: str) -> Decision:
    """Returns a decision in which the candidate of this text is not deterministic."""

    def noted(entry: Measurement) -> Measurement:
        notes = (*entry.candidate.numerical_notes, NONDETERMINISTIC)
        return replace(entry, candidate=replace(entry.candidate, numerical_notes=notes))

    ranking = tuple(
        noted(entry) if entry.candidate.text == text else entry for entry in known.selection.ranking
    )
    return replace(known, selection=replace(known.selection, ranking=ranking))


def _has_answered(known: Decision, answer: Decision) -> bool:
    """Returns whether ``answer`` was derived from ``known``, by provenance and chosen candidate:
    they may list different numbers of candidates."""
    found = known.restricted_to(answer.problem.deterministic, answer.workspace_limit)
    return (
        found is not None
        and found.provenance == answer.provenance
        and found.selection.winner.candidate.text == answer.selection.winner.candidate.text
    )
