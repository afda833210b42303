"""The lock that guards what threads of this process share of stores.

``os.fork`` acquires it first, and so waits until no other thread holds it.
"""

from __future__ import annotations

import os
import threading

LOCK = threading.RLock()

# A child process has none of the parent's other threads. Without these hooks, a lock that one of
# them held during the fork would never be released in the child, nor its work be completed.
os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)
