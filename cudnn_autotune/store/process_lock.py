"""The lock of whatever threads share of stores; a fork waits until no other thread holds it."""

from __future__ import annotations

import os
import threading

# The hooks before a fork run in reverse order. Those of filelock let no lock of a file be taken or
# given back until the fork is over, which whoever holds ours may be waiting for: ours come first.
import filelock as filelock

LOCK = threading.RLock()

# A child has none of the other threads: what one of them held at that moment, or had half done,
# would stay so in it for ever.
os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)
