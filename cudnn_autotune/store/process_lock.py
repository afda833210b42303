"""The lock that guards what threads of this process share of stores.

``os.fork`` acquires it first, and so waits until no other thread holds it.
"""

from __future__ import annotations

import os
import threading

# Hooks before a fork run in the reverse order of their registration. The hooks of filelock block
# every acquire and release of a file lock until the fork is over. A thread that holds LOCK may be
# waiting for a file lock, so LOCK must be acquired before the hooks of filelock run: filelock is
# imported here only to be registered first.
import filelock as filelock

LOCK = threading.RLock()

# A child process has none of the parent's other threads. Without these hooks, a lock that one of
# them held during the fork would never be released in the child, nor its work be completed.
os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)
