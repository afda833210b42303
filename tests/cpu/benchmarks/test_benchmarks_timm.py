"""models/timm_csv.py: files with the columns of timm's benchmark, and the page about them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import render_results
from models import timm_csv
from models.cases import TIMM, TIMM_PREFIX, model_of, part_of
from support.processes.benchmark_scripts import main, publish, run, whole_record

INFER = "model,infer_samples_per_sec,infer_step_time,infer_batch_size,infer_img_size,param_count"
TRAIN = "model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count"


def measured(model: str, step: str, times: dict[str, float], **more: Any) -> dict[str, Any]:
    """The entries of one process in a record."""
    entry = {
        **{"model": model, "step": step, "layout": "channels_last", "batch": 256},
        **{"pytorch": "pytorch_on_10", "parameters": 25_557_032, "input_shape": [3, 224, 224]},
        "ways": {way: {} for way in times},
        "times_ms": {way: [ms, ms, ms] for way, ms in times.items()},
    }
    return entry | more


def data(*runs: dict[str, Any]) -> dict[str, Any]:
    layouts = {"layouts": "channels_last", "rounds": 3, "block_ms": 1.0, "sampling": "auto"}
    return {"benchmark": "models", "arguments": layouts, "results": {"runs": list(runs)}}


def test_a_file_has_the_columns_and_order_of_timm() -> None:
    found = timm_csv.files(
        data(
            measured("timm:resnet50", "infer", {"eager": 32.0, "backend_compare": 16.0}),
            measured("timm:dla34", "infer", {"eager": 25.6}, parameters=15_742_104),
            measured("timm:resnet50", "optimize", {"eager": 100.0}, batch=128),
        )
    )
    assert found == {
        "infer-eager.csv": f"{INFER}\n"
        "dla34,10000.0,25.6,256,224,15.74\n"
        "resnet50,8000.0,32.0,256,224,25.56\n",
        "infer-backend_compare.csv": f"{INFER}\nresnet50,16000.0,16.0,256,224,25.56\n",
        "train-eager.csv": f"{TRAIN}\nresnet50,1280.0,100.0,128,224,25.56\n",
    }


def test_a_table_compares_with_the_best_of_pytorchs() -> None:
    times = {"eager": 32.0, "compile": 20.0, "backend_compare": 16.0}
    (table,) = timm_csv.tables(data(measured("timm:resnet50", "infer", times)))
    assert table.columns[-4:] == [
        *("eager, limit 10", "compile, limit 10", "backend, comparing"),
        "backend, comparing / best of PyTorch's",
    ]
    first, mean = table.rows
    assert first[-4:] == ("8000", "12800", "16000", "1.250")
    assert mean[-1] == "1.250"
    assert {len(first), len(mean)} == {len(table.columns)}


def test_other_records_have_no_such_page() -> None:
    """Older ones, those of this package's own models, of training without an optimizer, or without
    the rival."""
    times = {"eager": 32.0, "compile": 20.0, "backend_compare": 16.0}
    of_timm = measured("timm:resnet50", "infer", times)
    assert timm_csv.is_of_timm(data(of_timm))
    del of_timm["parameters"]
    for one in (
        data(of_timm),
        data(measured("resnet50", "infer", times)),
        data(measured("timm:resnet50", "train", times)),
        data(measured("timm:resnet50", "infer", times, layout="contiguous")),
        data(measured("timm:resnet50", "infer", {"eager": 32.0, "compile": 20.0})),
        data(measured("timm:resnet50", "infer", {"eager": 32.0, "backend_compare": 16.0})),
        {"benchmark": "kernels", "results": {}},
    ):
        assert not timm_csv.is_of_timm(one)


def test_the_set_is_twenty_models_in_parts() -> None:
    assert len(TIMM) == 20
    parts = [part_of(["timm"], (number, 4)) for number in range(1, 5)]
    assert sorted(name for one in parts for name in one) == sorted(TIMM)
    assert [len(one) for one in parts] == [5, 5, 5, 5]
    assert part_of(["timm:vgg16", "unet"], (1, 1)) == ["timm:vgg16", "unet"]


@pytest.mark.parametrize("name", TIMM)
def test_timm_makes_them_for_images_of_this_size(name: str) -> None:
    timm = pytest.importorskip("timm")
    config = timm.get_pretrained_cfg(name.removeprefix(TIMM_PREFIX))
    assert model_of(name).inputs == (config.input_size,)
    assert timm.is_model(name.removeprefix(TIMM_PREFIX))


@pytest.mark.parametrize("part", ["0/3", "4/3", "2", "a/b", ""])
def test_a_part_that_is_none_is_refused(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("models", "--models", "timm", "--part", part) == 2
    assert f"must be like 2/5, got '{part}'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_becomes_files_and_a_page(tmp_path: Path) -> None:
    """The record is a CPU's, and only the test takes it for a GPU's."""
    arguments = "--models timm --part 20/20 --steps infer,optimize --ways eager,compile,backend"
    short = "--pytorch pytorch_on_10 --batches 2 --rounds 4 --block-ms 1 --settle-s 0 --at-once 2"
    file = tmp_path / "models.json"
    options = ("--device", "cpu", *arguments.split(), *short.split(), "--json", file)
    done = run("models", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = whole_record(tmp_path, "models")
    assert {entry["model"] for entry in record["results"]["runs"]} == {"timm:xception41"}

    publish(tmp_path, ["models"], tmp_path / "results")
    given = ("--results", tmp_path / "results", "--pages", tmp_path / "pages")
    assert main("render_results", *given) == 0
    page = (tmp_path / "pages" / "timm_gpu.md").read_text()
    assert page.startswith("# timm's models on: Test GPU\n")
    for header, step in ((INFER, "infer"), (TRAIN, "train")):
        for way in ("eager", "compile", "backend"):
            name = f"models-{step}-{way}.csv"
            assert f"../results/gpu/{name}" in page
            with (tmp_path / "results" / "gpu" / name).open(newline="") as lines:
                ((row),) = csv.DictReader(lines)
            assert ",".join(row) == header
            assert (row["model"], row[f"{step}_batch_size"]) == ("xception41", "2")
            rate, time_ms = (
                float(row[f"{step}_{name}"]) for name in ("samples_per_sec", "step_time")
            )
            assert rate == pytest.approx(2 / time_ms * 1e3, rel=0.05, abs=0.02)
            assert f"| {rate:.0f} |" in page
    assert main("render_results", *given, "--check") == 0
    (tmp_path / "results" / "gpu" / "models-infer-eager.csv").unlink()
    assert main("render_results", *given, "--check") == 1


def test_no_page_exists_without_a_record() -> None:
    """Each published page about timm's models has a record of a GPU."""
    docs = Path(render_results.ROOT) / "docs" / "results"
    for page in docs.glob("timm_*.md"):
        folder = render_results.HERE / "results" / page.stem.removeprefix("timm_")
        records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
        assert any(timm_csv.is_of_timm(one) for one in records if "results" in one)
