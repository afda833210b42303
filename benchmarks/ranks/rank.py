"""One rank of ranks: it tunes with the others, and reports its times and choices."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any


def digest(tree: Any) -> str:
    """Sixteen hexadecimal digits, equal for equal trees."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def work(request_file: Path) -> None:
    """The process that torchrun starts: joins the group, tunes, leaves ``rank<i>.json`` beside the
    request."""
    import torch.distributed as dist

    result = _measured(json.loads(request_file.read_text()))
    dist.destroy_process_group()
    rank = int(os.environ["RANK"])
    (request_file.parent / f"rank{rank}.json").write_text(json.dumps({"rank": rank, **result}))


def _measured(request: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from common.network import build
    from online.problems import warm_up

    import cudnn_autotune as ca
    from cudnn_autotune.engines.problem_json import problem_text

    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    warm_up()
    model = build(request["model"], "cuda", torch.float16)
    ca.convert(model)
    x = torch.randn(*request["shape"], device="cuda").half()
    x = x.contiguous(memory_format=torch.channels_last)
    mode = request["mode"]
    own: list[ca.Choice] = []
    with ca.flags(mode), ca.on_decision(own.append):
        dist.barrier(device_ids=[local])
        torch.cuda.synchronize()
        begin = time.perf_counter()
        decisions = ca.distributed.tune(model, x, timeout_s=request["timeout_s"])
        seconds = time.perf_counter() - begin
        tuned = [choice for choice in own if choice.origin == "tuned"]
        own.clear()
        # A step of the model: what serves it now?
        model(x).float().sum().backward()
        torch.cuda.synchronize()
    dist.barrier(device_ids=[local])  # all have written their stores
    served = [c for c in ca.choices() if c.sampling == mode]
    return {
        "seconds": seconds,
        "busy_s": sum(choice.tuning_ms for choice in tuned) / 1e3,
        "tuned": len(tuned),
        "tuned_again": sum(c.origin == "tuned" and c.total_samples > 0 for c in own),
        "problems": len(decisions),
        "decisions": digest([decision.to_json() for decision in decisions]),
        "served": digest(sorted((problem_text(c.problem), c.text) for c in served)),
        "from": dict(Counter(choice.origin for choice in served)),
        "stored": len(ca.get_store(local)),
    }
