"""Records of compiled graphs in PyTorch's logs: ``TORCH_TRACE``, which tlparse reads, and
``TORCH_LOGS``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.processes.structured_log import artifacts, place, records
from support.processes.subprocesses import python
from support.store.decisions import decision

import cudnn_autotune as ca
from cudnn_autotune.compile.compilation import Compilation
from cudnn_autotune.compile.groups import GroupReport
from cudnn_autotune.compile.traces import as_json, tell
from cudnn_autotune.tuning import choice_log

# Two graphs of one function: the first is decided at its first call, the second has no convolution.
COMPILES = """
import json, torch
import torch.nn.functional as F
import cudnn_autotune as ca

def function(x, w):
    y = F.relu(F.conv2d(x, w))
    torch._dynamo.graph_break()
    return y.sin()

options = {"fuse": "always", "cpp.weight_prepack": False}
run = torch.compile(function, backend="cudnn_autotune", options=options)
x, w = torch.randn(2, 4, 5, 6), torch.randn(8, 4, 3, 3)
with torch.no_grad():
    for _ in range(3):
        run(x, w)
first, second = ca.compilations()
print(json.dumps([first.times_ms, first.chosen, second.note]))
"""


def test_each_graph_has_its_artifact_and_its_lines(tmp_path: Path) -> None:
    variables = {"TORCH_TRACE": str(tmp_path), "TORCH_LOGS": "cudnn_autotune"}
    done = python("-c", COMPILES, env=variables)
    assert done.returncode == 0, done.stderr
    times, chosen, note = json.loads(done.stdout.splitlines()[-1])

    every = records(tmp_path)
    graphs = [place(record) for record, _ in every if "dynamo_output_graph" in record]
    ours = artifacts(tmp_path)
    assert [where for where, _ in ours] == graphs
    (first, second) = (tree for _, tree in ours)
    assert (first["mode"], first["chosen"], first["times_ms"]) == ("inference", chosen, times)
    assert times.keys() == {"cudnn_autotune", "inductor"}
    assert [(one["text"], one["output_shape"]) for one in first["groups"]] == [
        ("conv + relu", [2, 8, 3, 4])
    ]
    assert (second["mode"], second["note"], second["groups"]) == ("plain", note, [])

    lines = [line for line in done.stderr.splitlines() if "traces.py" in line]
    assert sum("a compiled graph: Compilation(" in line for line in lines) == 2
    assert sum("conv + relu -> 2x8x3x4: fused" in line for line in lines) == 1


def test_a_convolution_has_its_choices_whatever_follows_it_or_flags_are() -> None:
    known = decision()
    group = replace(known.problem, bias=True, activation="relu", deterministic=True)
    gradient = decision(problem=replace(known.problem, op="dgrad"))
    other = decision(problem=replace(known.problem, padding=(0, 0)))
    for one in (known, gradient, other):
        choice_log.record(ca.Choice(one, 0, "store"))
    report = GroupReport("conv + bias + relu", (64, 64, 56, 56), True, "for a test", problem=group)
    unknown = replace(report, problem=None)
    tree = json.loads(json.dumps(as_json(Compilation("training", groups=[report, unknown]))))
    found, nothing = tree["groups"]
    assert [one["problem"] for one in found["choices"]] == [
        known.problem.text,
        gradient.problem.text,
    ]
    assert {one["chosen"] for one in found["choices"]} == {"fastest"}
    assert {one["origin"] for one in found["choices"]} == {"store"}
    assert nothing["choices"] == []


def test_a_record_that_is_no_json_fails_no_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch._logging._internal.trace_log, "handlers", [object()])
    record = Compilation("inference", times_ms={object(): 1.0})  # type: ignore[dict-item]
    tell(record, None)
    assert "a compiled graph is not in TORCH_TRACE" in caplog.text
