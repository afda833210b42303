"""What one rank of ranks.py does: it tunes with the others, and tells of it."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

_CASES = "resnet50_"  # of a dry run
# Of a dry run: real seconds for each simulated one, so that sharing has something to share.
_SECONDS_A_SECOND = 1.5


def digest(tree: Any) -> str:
    """Sixteen hexadecimal digits, equal for equal trees."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def work(request_file: Path) -> None:
    """The process that torchrun starts: joins the group, tunes, leaves ``rank<i>.json`` beside the
    request."""
    import torch.distributed as dist

    request = json.loads(request_file.read_text())
    is_dry_run = request["device"] == "cpu"
    told = _simulated(request) if is_dry_run else _measured(request)
    dist.destroy_process_group()
    rank = int(os.environ["RANK"])
    (request_file.parent / f"rank{rank}.json").write_text(json.dumps({"rank": rank, **told}))


def _measured(request: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from common.converted import convert
    from common.network import build
    from online_mode.problems import warm_up

    import cudnn_autotune as ca

    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    torch.manual_seed(0)
    warm_up("cuda")
    model = build(request["model"], "cuda", torch.float16)
    convert(model)
    x = torch.randn(*request["shape"], device="cuda").half()
    x = x.contiguous(memory_format=torch.channels_last)
    mode = request["mode"]
    own: list[ca.Choice] = []

    def note(choice: ca.Choice) -> None:
        if choice.origin == "tuned":
            own.append(choice)

    with ca.use_sampling(mode), ca.on_decision(note):
        dist.barrier(device_ids=[local])
        torch.cuda.synchronize()
        begin = time.perf_counter()
        decisions = ca.distributed.tune(model, x, timeout_s=request["timeout_s"])
        seconds = time.perf_counter() - begin
        tuned = len(own)
        # A step of the model: what serves it now?
        model(x).float().sum().backward()
        torch.cuda.synchronize()
    dist.barrier(device_ids=[local])  # all have written their stores
    return {
        "seconds": seconds,
        "busy_s": sum(choice.tuning_ms for choice in own[:tuned]) / 1e3,
        "tuned": tuned,
        "tuned_again": sum(choice.total_samples > 0 for choice in own[tuned:]),
        **_told(decisions, mode, local),
    }


def _simulated(request: dict[str, Any]) -> dict[str, Any]:
    """Ranks of gloo share problems by ``distributed.share``; each one's GPU is a simulated one with
    noise of its own, so that alone they would not agree."""
    import torch.distributed as dist
    from common import simulated

    from cudnn_autotune import distributed, sampling
    from cudnn_autotune.audit.layers import load
    from cudnn_autotune.sampling import Limits
    from cudnn_autotune.store import Decision, Environment
    from cudnn_autotune.tuning import remembering

    dist.init_process_group("gloo")
    rank, mode = dist.get_rank(), request["mode"]
    known = load(Path(request["layers"]))
    cases = [c for c in known if c.layer.startswith(_CASES) and c.dtype == "float16"]
    problems = [case.problem() for case in cases[: request["problems"]]]
    own: list[float] = []

    def tune_one(problem: Any) -> Decision:
        begin = time.perf_counter()
        seed = (request["run"] * 64 + rank) * 1009 + sum(problem.input_shape)
        timer = simulated.preset("aa", seed)
        selection = sampling.get(mode).select(timer.candidates, timer, Limits())
        assert selection is not None
        time.sleep(timer.elapsed_ms() / 1e3 * _SECONDS_A_SECOND)
        own.append(time.perf_counter() - begin)
        return Decision(problem, mode, 0, None, selection)

    dist.barrier()
    begin = time.perf_counter()
    decisions = distributed.share(
        problems, tune_one, Environment.of(), timeout_s=request["timeout_s"]
    )
    seconds = time.perf_counter() - begin
    remembering.install(decisions, 0)
    dist.barrier()
    return {
        "seconds": seconds,
        "busy_s": sum(own),
        "tuned": len(own),
        "tuned_again": 0,
        **_told(decisions, mode, 0),
    }


def _told(decisions: list[Any], mode: str, device: int) -> dict[str, Any]:
    """What the ranks' tables are compared by, and the store that they share."""
    import cudnn_autotune as ca
    from cudnn_autotune.engines.problem_json import problem_text

    served = [c for c in ca.choices() if c.sampling == mode]
    table = sorted((problem_text(c.problem), c.text) for c in served)
    return {
        "problems": len(decisions),
        "decisions": digest([decision.to_json() for decision in decisions]),
        "served": digest(table),
        "from": dict(Counter(choice.origin for choice in served)),
        "stored": len(ca.get_store(device)),
    }
