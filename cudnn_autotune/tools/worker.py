"""One fresh process of an audit: ``python -m cudnn_autotune.tools.worker``.

It exchanges JSON, one message a line, with the process that started it (``processes``). It says
``{"ready": true}`` once everything is imported. The first message that it gets sets it up and may
start a CUDA context. Each further message is a case, which it answers by ``{"result": ...}`` or
``{"error": text}``, with ``"fatal": true`` if the process cannot do any further work. It ends when
its input ends. The first message names the module whose ``open_backend`` makes the backend, such as
``gpu.GpuBackend``.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from typing import Any, TextIO

# Linux's number of it, in prctl.h.
_PR_SET_PDEATHSIG = 1


def serve(requests: TextIO, answers: TextIO, modules: list[str]) -> None:
    """Answers until ``requests`` end.

    It imports ``modules`` before it reports that it is ready, so that no measured time includes
    that.
    """
    for name in modules:
        importlib.import_module(name)
    from cudnn_autotune.core.json_dataclass import encode
    from cudnn_autotune.tools.processes import Poisoned
    from cudnn_autotune.tuning import events

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message, allow_nan=False) + "\n")
        answers.flush()

    say({"ready": True})
    backend = None
    for line in requests:
        request = json.loads(line)
        try:
            if backend is None:
                module = importlib.import_module(request["backend"])
                backend = module.open_backend(request)
                say({"set up": True})
                continue
            with events.SEARCHES.shown_elsewhere():  # the calling process shows progress
                result = backend.work(request["task"], request["case"], request)
        except Poisoned as error:
            say({"error": str(error), "fatal": True})
            return
        except Exception as error:  # the other cases still count; the record names this one
            say({"error": f"{type(error).__name__}: {error}"})
        else:
            say({"result": encode(result)})


def main() -> None:
    _die_with_parent()
    # Libraries print to stdout, too. That goes to stderr now, and answers go where stdout went.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, answers, sys.argv[1:])


def _die_with_parent() -> None:
    """Lets the kernel kill this process when its parent is gone, at any point. During imports, the
    end of the input ends it as well."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
