"""README.md and docs/: links lead somewhere, and the README's figures are those of its records."""

from __future__ import annotations

import json
import re
import statistics
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from support.processes.benchmark_scripts import BENCHMARKS

ROOT = BENCHMARKS.parent
README = ROOT / "README.md"
RECORDS = BENCHMARKS / "results" / "h200"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = [README, CONTRIBUTING, BENCHMARKS / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def record(name: str, gpu: str = "h200") -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RECORDS.parent / gpu / f"{name}.json").read_text())
    return data


def answer(name: str) -> str:
    """Returns the answers of the README's table of figures whose rows name the record."""
    rows = [line.split("|") for line in README.read_text().splitlines() if line.startswith("|")]
    found = [cells[2] for cells in rows if len(cells) == 5 and f"`{name}`" in cells[3]]
    assert found, name
    return " ".join(found)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in _LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_what_a_contributor_is_told_to_open_is_there() -> None:
    named = re.findall(r"(?<![\w/.-])((?:[\w-]+/)+[\w.-]*)", CONTRIBUTING.read_text())
    assert len(named) > 20
    # A command writes what is below build/.
    kept = [name for name in named if not name.startswith("build/")]
    assert [name for name in kept if not (ROOT / name).exists()] == []


def test_the_readme_is_short() -> None:
    assert len(README.read_bytes()) < 10_000


def test_the_recipe_for_uv_names_what_a_build_needs() -> None:
    """uv builds in the user's environment, where it finds their torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["uv"]["no-build-isolation-package"] == [project["project"]["name"]]
    text = (ROOT / "docs" / "install.md").read_text()
    (recipe,) = re.findall(r"uv pip install (setuptools.*?)\nuv pip install \.", text, re.S)
    for requirement in project["build-system"]["requires"]:
        name, pin = re.match(r"([\w-]+)([^;]*)", requirement).groups()  # type: ignore[union-attr]
        if name == "setuptools":  # its lower bound is that of long ago
            assert re.fullmatch(r">=\d+", pin)
            pin = ""
        assert (f"'{name}{pin}'" if pin else name) in recipe
    # torch depends on every other header that the build asks for (building/headers.py).
    assert (
        "cuda-toolkit[crt,cccl]==$(python -c 'import torch; print(torch.version.cuda)').*" in recipe
    )


def test_how_many_plans_a_thread_keeps() -> None:
    source = (ROOT / "csrc" / "core" / "choices" / "plan_cache.cpp").read_text()
    limit = int(re.search(r"entries_per_thread\{(\d+)\}", source)[1])  # type: ignore[index]
    said = {
        "cudnn_autotune/tuning/settings.py": f"``CUDNN_AUTOTUNE_PLAN_CACHE_LIMIT`` ({limit:,})",
        "docs/reference/settings.md": f"plans each thread keeps ({limit}, as PyTorch)",
        "docs/reference/limits.md": f"({limit:,} plans a thread)",
    }
    for file, text in said.items():
        assert text in (ROOT / file).read_text(), file


def test_the_readmes_commands_are_those_of_ci() -> None:
    """What CI runs is what a user is told to run."""
    text = README.read_text()
    assert "\npip install . && cudnn-autotune demo\npip install '.[test]' && pytest -n auto" in text


def test_regrets() -> None:
    """The records call ``auto`` what is ``sustained`` now."""
    text = answer("audit_layers_1of4")
    modes = [record(f"audit_layers_{share}of4")["modes"] for share in (1, 2, 3, 4)]
    for mode, named, digits in (
        ("auto", "`sustained`: ", 4),
        ("pytorch_on_10", "with benchmark: ", 3),
        ("pytorch_off", "without: ", 3),
    ):
        means = [of[mode]["regret"]["mean"] for of in modes]
        assert f"{named}{min(means):.{digits}f} to {max(means):.{digits}f}" in text
    cases = sum(of["auto"]["cases"] for of in modes)
    assert f"in {cases} cases" in README.read_text()


def test_call_overhead() -> None:
    ratios = [
        measured["times"]["ours"]["ratio"]
        for measured in record("call_overhead", "h100")["results"]["calls"]
        if measured["layout"] == "channels_last"
    ]
    assert f"{min(ratios):.2f} to {max(ratios):.2f}" in answer("call_overhead")


def test_warm_start() -> None:
    def medians(name: str) -> dict[str, float]:
        seconds: dict[str, list[float]] = {}
        for process in record(name)["results"]["processes"]:
            seconds.setdefault(process["mode"], []).append(process["both_ms"] / 1e3)
        return {mode: statistics.median(found) for mode, found in seconds.items()}

    text = answer("warm_start")
    cold, warm = medians("warm_start_cold_resnet50"), medians("warm_start")
    assert f"nothing cached after {cold['auto_empty']:.1f} s" in text
    assert f"by PyTorch with benchmark after {cold['pytorch_on_10']:.1f} s" in text
    assert f"compiled kernels after {warm['auto_filled']:.2f} s" in text
    assert f"PyTorch {warm['pytorch_on_10']:.2f} s" in text


def test_power_limit() -> None:
    losses, regrets = [], []
    for entry in record("capped")["results"]["cases"].values():
        burst, sustained = entry["burst"]["truths"], entry["sustained"]["truth"]["times_ms"]
        means = {
            text: burst["burst cold"]["times_ms"][text] * ms
            for text, ms in burst["burst hot"]["times_ms"].items()
            if text in burst["burst cold"]["times_ms"]
        }
        best_ms = min(sustained.values())
        losses.append(round(100 * (sustained[min(means, key=means.__getitem__)] / best_ms - 1), 1))
        regrets += [sustained[pick["text"]] / best_ms for pick in entry["picks"]["auto"]]
    text = answer("capped")
    assert len(losses) == 3
    assert f"three layers the engine that wins in short runs is {min(losses)} to" in text
    assert f"to {max(losses)} % slower in long ones" in text
    assert f"`sustained` is within {100 * (max(regrets) - 1):.1f} %" in text


def test_whole_models() -> None:
    eager: dict[str, float] = {}
    compiled: dict[str, float] = {}
    of_one: dict[str, float] = {}
    for part in ("part1", "part2", "part3", "part4"):
        for run in record(f"whole_models.{part}")["results"]["runs"]:
            times = run["times_ms"]
            if "convert" in times and run["batch"] > 1:
                eager[run["model"]] = in_turns(times["eager"], times["convert"])
            if "backend" in times:
                frozen_or_not = times.keys() & {"compile", "compile_frozen"}
                best = min(frozen_or_not, key=lambda way: statistics.median(times[way]))
                found = compiled if run["batch"] > 1 else of_one
                found[run["model"]] = in_turns(times[best], times["backend"])
    text, readme = answer("whole_models"), " ".join(README.read_text().split())
    least, most = min(compiled.values()), max(compiled.values())
    assert f"with frozen weights {least:.3f} to {most:.2f}" in text
    assert f"(ResNet-50 {compiled['resnet50']:.2f}, at batch 1 {of_one['resnet50']:.2f})" in text
    assert len(compiled) == len(eager) == 10
    least, most = min(eager.values()), max(eager.values())
    assert f"ten models ran {least:.3f} to {most:.2f} times as fast as with" in readme
    mean = statistics.geometric_mean(eager.values())
    assert f"(geometric mean {mean:.2f})" in text
    assert shipped("infer", "channels_last") == in_order(compiled)


def shipped(step: str, layout: str) -> list[float]:
    """Returns the gains that the chart shows, the largest first."""
    file = ROOT / "cudnn_autotune" / "cli" / "measured.json"
    panels = json.loads(file.read_text())["panels"]
    (panel,) = (one for one in panels if (one["step"], one["layout"]) == (step, layout))
    return list(panel["models"].values())


def in_order(ratios: dict[str, float]) -> Any:
    return pytest.approx(sorted(ratios.values(), reverse=True), abs=5e-4)


def test_contiguous_models() -> None:
    ratios: dict[str, float] = {}
    for name in ("models_first_calls", "models_dense"):
        for run in record(name)["results"]["runs"]:
            times = run["times_ms"]
            if run["layout"] == "contiguous" and "backend" in times:
                ratios[run["model"]] = in_turns(times["compile"], times["backend"])
    assert len(ratios) == 10
    assert shipped("infer", "contiguous") == in_order(ratios)
    least, most = min(ratios.values()), max(ratios.values())
    assert f"Ten models each: {least:.2f} to {most:.2f};" in answer("models_first_calls")


def test_trained_models() -> None:
    ratios: dict[str, float] = {}
    for name in ("models_train_layouts", "models_train_layouts_99895807"):
        for part in ("part1", "part2"):
            for run in record(f"{name}.{part}")["results"]["runs"]:
                times = run["times_ms"]
                if "backend" in times:
                    ratios[run["model"]] = in_turns(times["compile"], times["backend"])
    (run,) = record("models_train_layouts_d1d1a680")["results"]["runs"]
    ratios[run["model"]] = in_turns(run["times_ms"]["compile"], run["times_ms"]["backend"])
    added = {name: ratios.pop(name) for name in ("conv_tasnet", "mobilenet_v3_large")}
    assert len(ratios) == 10
    assert shipped("train", "contiguous") == in_order(ratios)
    least, most = min(ratios.values()), max(ratios.values())
    text = answer("models_train_layouts")
    assert f"Ten contiguous models {least:.2f} to {most:.2f};" in text
    assert f"Conv-TasNet {added['conv_tasnet']:.2f}." in text


def test_the_chart_is_shown_in_both_themes() -> None:
    text = README.read_text()
    for theme in ("light", "dark"):
        path = f"docs/results/whole_models_{theme}.svg"
        assert f'"{path}"' in text
        drawn = (ROOT / path).read_text()
        assert ET.fromstring(drawn).tag.endswith("svg")
        assert "<dc:date>" not in drawn


def test_kernels() -> None:
    parts = ("part1", "part2", "part3")
    latest: dict[str, dict[str, Any]] = {}
    for part in parts:
        latest |= {row["case"]: row for row in record(f"kernels.{part}")["results"]["rows"]}
    gains: dict[tuple[str, str], list[float]] = {}
    for row in latest.values():
        gain = max(1.0, row["times as fast"] or 0.0)  # the faster of both serves
        gains.setdefault((row["kind"], row["op"]), []).append(gain)
    text = answer("kernels")
    for kind, named in {"depthwise, 7 and wider": "of 7x7 and wider", "grouped": "ones"}.items():
        means = (statistics.geometric_mean(gains[kind, op]) for op in ("fprop", "dgrad", "wgrad"))
        assert "{} {:.1f}, {:.1f} and {:.1f}".format(named, *means) in text


def gains_on_timm(name: str, parts: int) -> dict[str, float]:
    """Returns the gain over the best of PyTorch's on each model of a record's parts."""
    gains: dict[str, float] = {}
    for part in range(1, parts + 1):
        for run in record(f"{name}.part{part}")["results"]["runs"]:
            measured = run.get("times_ms", {})
            times = {way: statistics.median(each) for way, each in measured.items()}
            if (ours := times.pop("backend_compare", None)) is not None:
                gains[run["model"]] = min(times.values()) / ours
    return gains


def test_timm() -> None:
    inference = gains_on_timm("models_timm", 4)
    training = gains_on_timm("models_timm_training", 12)
    text = " ".join(README.read_text().split())
    assert f"{len(inference)} of timm's models, inference; {len(training)}, training" in text
    least, most, mean = spread(inference)
    expected = f"{least:.3f} to {most:.2f} over the best of PyTorch's, mean {mean:.2f}"
    assert expected in answer("models_timm")
    assert "{:.2f} to {:.2f}, mean {:.2f}".format(*spread(training)) in answer("models_timm")


def test_decoders() -> None:
    text = answer("models_decoders")
    for name, case, named in (
        ("qwen", "qwen_decode", "Qwen-Image"),
        ("images", "flux_decode", "FLUX"),
        ("images", "sd_decode", "Stable Diffusion"),
        ("hunyuan", "hunyuan_decode", "HunyuanVideo"),
        ("video", "cogvideox_decode", "CogVideoX"),
        ("ltx", "ltx_decode", "LTX-Video"),
        ("video", "wan_decode", "Wan"),
    ):
        runs = record(f"models_decoders_{name}")["results"]["runs"]
        (times,) = (run["times_ms"] for run in runs if run["model"] == case)
        rivals = times.keys() & {"compile", "compile_last", "eager_last"}
        best = min(rivals, key=lambda way: statistics.median(times[way]))
        assert f"{named} {in_turns(times[best], times['backend']):.2f}" in text


def spread(gains: dict[str, float]) -> list[float]:
    """Returns the least, the most and the geometric mean."""
    return [f(gains.values()) for f in (min, max, statistics.geometric_mean)]


def test_engines_that_auto_leaves_out_beside_kernels_of_groups() -> None:
    """Engines 5, 6, 16, 70, 71 and 78 are those that cuDNN 9.19 compiles at run time for them."""
    latest: dict[str, dict[str, Any]] = {}
    for part in ("part1", "part2", "part3"):
        latest |= {row["case"]: row for row in record(f"kernels.{part}")["results"]["rows"]}
    ratios = [
        row["beside (us)"] / row["before (us)"]
        for case, row in latest.items()
        if row["kind"].startswith(("depthwise", "grouped"))
        and case.rpartition("/")[2] in ("nhwc", "ndhwc")
        and re.match(r"eng(5|6|16|70|71|78)(:KERNEL|$)", row["before"])
    ]
    text = (ROOT / "docs" / "findings" / "own-kernels.md").read_text()
    text = " ".join(text.split())
    assert f"at most {max(ratios):.2f} of the time of the engines that cuDNN compiles" in text
    assert f"on the {len(ratios)} layers and directions" in text


def in_turns(theirs: list[float], ours: list[float]) -> float:
    """Median ratio of the times of a round."""
    return statistics.median(one / other for one, other in zip(theirs, ours, strict=True))


def test_compiled_models() -> None:
    pages = [
        README.parent / "docs" / name
        for name in ("reference/compile.md", "findings/gradient-layout.md")
    ]
    text = "".join(page.read_text() for page in pages)
    records = [("h100", "models", ("resnet50",)), ("h200", "models", ())]
    records += [("h200", "models_train", ()), ("h200", "models_train_resnet50", ())]
    for gpu, name, models in records:
        for run in record(name, gpu)["results"]["runs"]:
            times = run.get("times_ms", {})
            if len(times) == 2 and (not models or run["model"] in models):
                pairs = zip(times["compile"], times["compile_ours"], strict=True)
                ratio = statistics.median(theirs / ours for theirs, ours in pairs)
                assert f"{ratio:.3f}" in text, (name, run["model"], run["step"], run["layout"])
