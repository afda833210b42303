"""A sampling mode of your own: one class, and one line that registers it.

This one times every candidate once, and chooses the one with the least workspace among those within
10 % of the fastest. ``python examples/custom_mode.py`` replays it on a recording of an H200, which
needs no GPU. On a GPU, ``import`` the file, and ``cudnn_autotune.set_sampling("least_memory")``.
"""

from __future__ import annotations

from cudnn_autotune import sampling
from cudnn_autotune.sampling import (
    Batch,
    Candidates,
    Evidence,
    Limits,
    Measurement,
    Selection,
    Timer,
)

WITHIN = 1.1


class LeastMemory:
    """The mode ``least_memory``."""

    name = "least_memory"
    # What a mode declares about itself is in sampling.Traits; a mode that declares nothing has the
    # values there. This one takes about a second for a problem, which tells an audit what to plan.

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        every = [*candidates.all(), *candidates.beyond()]
        runnable = timer.runnable(every, limits.benchmark_limit)
        entries = []
        for candidate in runnable:
            timer.run([Batch(candidate)])  # loads the kernel
            (sample,) = timer.run([Batch(candidate)])
            if not sample.error:
                entries.append(Measurement(candidate, sample.time_ms, samples=1))
        if not entries:
            return None
        limit_ms = WITHIN * min(entry.time_ms or 0.0 for entry in entries)

        def preference(entry: Measurement) -> tuple[bool, int, float]:
            time_ms = entry.time_ms or 0.0
            is_slow = time_ms > limit_ms
            return is_slow, 0 if is_slow else entry.candidate.workspace_bytes, time_ms

        ranking = tuple(sorted(entries, key=preference))
        evidence = Evidence(rule="least workspace", wall_ms=timer.elapsed_ms())
        return Selection(ranking, total_samples=len(ranking), evidence=evidence)


sampling.register(LeastMemory())


if __name__ == "__main__":
    from cudnn_autotune.audit import recordings
    from cudnn_autotune.audit.offline.replay import ReplayTimer

    for name in recordings.names():
        replay = ReplayTimer(recordings.load(name))
        selection = sampling.get("least_memory").select(replay.candidates, replay, Limits())
        assert selection is not None
        winner = selection.winner
        mib = winner.candidate.workspace_bytes / 2**20
        print(f"{name}: {winner.candidate.text}, {winner.time_ms:.4f} ms, {mib:.1f} MiB")
