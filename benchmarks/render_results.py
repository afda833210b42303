#!/usr/bin/env python
"""Writes docs/results/<gpu>.md from the records under benchmarks/results/<gpu>/, and their plots.

Every benchmarks/results/<gpu>/*.json becomes the tables of a section of docs/results/<gpu>.md, that
of an audit or of models also a plot of the same name beside the record. NAME.part1.json,
NAME.part2.json and so on become one section, as if one run had recorded them all. Tables of
investigations, whose scripts are gone, stay in docs/results/investigations.md. Figures without a
whole environment record (GPU, driver, versions, commit, command) and dry runs on a CPU are
refused: they are named and left out, the others are rendered, and it exits with 1. `--check`
writes nothing: it exits with 1 where a record is refused, a page does not say what the records
say, a page has no records, or a plot is missing. README's chart of whole models
(docs/results/whole_models_light.svg, _dark.svg) and the figures that `cudnn-autotune demo` shows
(cudnn_autotune/cli/measured.json) are made of the same records, and checked likewise. So are
docs/results/timm_<gpu>.md, and a CSV file beside the record for each way, of records of timm's
models.

    python benchmarks/render_results.py
    python benchmarks/render_results.py --check
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from common import audited, investigation
from common.environment import ROOT, missing
from common.record import load
from models import chart, timm_csv

HERE = Path(__file__).resolve().parent
# In the order in which a page shows them; each names a module with tables() and plot().
BENCHMARKS = {
    "audit_layers": "common.audited",
    "online": "online.report",
    "models": "models.report",
    "kernels": "kernels",
    "norms": "norms",
    "auto_against_pytorch": "auto_against_pytorch.report",
    "warm_start": "warm_start.report",
    "ranks": "ranks.report",
    "ddp_norms": "ddp_norms.report",
    "call_overhead": "call_overhead.report",
    "gpu_tests": "gpu_tests",
    "memory_errors": "memory_errors",
    "pytorch_tests": "pytorch_tests.report",
}
# Record -> its page of docs/findings. Nothing here makes their tables: their scripts are gone, or
# shorter now. The page INVESTIGATIONS keeps them.
FINDINGS = {
    "forum_repro": "forum-case",
    "lone_layer": "layer-in-its-model",
    "capped": "power-limit",
    "board_power": "power-limit",
    "workspace_place": "workspace-pages",
    "kernel_cfgs": "kernel-portfolio",
    "fallback_mode": "fallback-mode",
    "neighbours": "neighbours",
    "online_turns": "single-calls",
    "online_first_call": "single-calls",
}
GPU = "h200"
"""The folder of the records that README's chart is drawn from."""
INVESTIGATIONS = "investigations.md"
BY_HAND = (INVESTIGATIONS, "gains.md")


# Records made before this day call `auto` what is `sustained` now.
AUTO_CHANGED = "2026-11-23"


class Refused(Exception):
    """A record that must not be published; the text says why."""


def publishable(path: Path) -> dict[str, Any]:
    """The record in ``path``.

    Raises:
        Refused: the file is no record, is of a CPU or an unknown benchmark, or lacks its origin.
    """
    try:
        data = audited.load(path) if audited.is_audit(path) else load(path)
    except (OSError, ValueError) as error:
        raise Refused(f"{path.name}: {error}") from error
    if report_of(data) is None:
        raise Refused(f"{path.name}: unknown benchmark {data['benchmark']!r}")
    for environment in (data["environment"], *data.get("earlier", [])):
        if environment.get("device") != "cuda":
            raise Refused(f"{path.name}: a dry run on a CPU is not a result")
        if lacking := missing(environment):
            raise Refused(f"{path.name}: its environment record lacks {', '.join(lacking)}")
    if not data.get("telemetry"):
        raise Refused(f"{path.name}: no clock, power and temperature readings")
    return data


def report_of(data: dict[str, Any]) -> Any:
    """What has the record's ``tables``, and maybe ``plot``; None where nothing does."""
    if data["benchmark"] in BENCHMARKS:
        return importlib.import_module(BENCHMARKS[data["benchmark"]])
    return investigation if "rows" in data.get("results", {}) else None


def has_plot(data: dict[str, Any]) -> bool:
    """Whether the record's benchmark draws plots, and this one has something to draw."""
    report = report_of(data)
    return hasattr(report, "plot") and getattr(report, "has_points", lambda data: True)(data)


def cudnn_text(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def origin(data: dict[str, Any]) -> str:
    """One line: which GPU, in what state, with which versions, from which code and command."""
    e, t = data["environment"], data["telemetry"]
    limits = e.get("clocks_and_limits", {})
    parts = [
        f"{e['gpu']}, driver {e['driver']}, CUDA {e['cuda']}, cuDNN {cudnn_text(int(e['cudnn']))}, "
        f"frontend {e['cudnn_frontend']}, torch {e['torch']}, Python {e['python']}, "
        f"commit {e['commit'][:10]}{' with local changes' if e['dirty'] else ''}, {e['date'][:10]}"
    ]
    if clock := t["sm_clock_mhz"]:
        top = limits.get("max_sm_clock_mhz")
        parts.append(f"SM clock {clock['min']:.0f} to {clock['max']:.0f} MHz (highest {top})")
    if power := t["power_w"]:
        limit = limits.get("power_limit_w")
        parts.append(f"power up to {power['max']:.0f} W" + (f" of {limit:.0f}" if limit else ""))
    if heat := t["temperature_c"]:
        parts.append(f"{heat['min']:.0f} to {heat['max']:.0f} °C")
    slowed = {k: v for k, v in t["throttle_reasons"].items() if k != "gpu_idle"}
    if slowed:
        shares = ", ".join(f"{name} {share * 100:.0f} %" for name, share in slowed.items())
        parts.append(f"throttle reasons, share of readings: {shares}")
    if not data["complete"]:
        parts.append("**incomplete run**")
    return "; ".join(parts) + f". `{e['command']}`"


def section(record: Path) -> Path:
    """The record's path, without the part's number."""
    return record.with_name(record.stem.partition(".part")[0])


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The first of the records, with the results of all. What several have, such as a case of
    ``rows``, is that of the last."""
    results = dict(parts[0]["results"]) if "results" in parts[0] else None
    if results is None or len(parts) == 1:
        return parts[0]
    for part in parts[1:]:
        for name, found in part["results"].items():
            if isinstance(found, dict):
                results[name] = {**results.get(name, {}), **found}
                continue
            if not isinstance(found, list):
                results[name] = found
                continue
            anew = {row["case"] for row in found} if name == "rows" else ()
            known = [e for e in results.get(name, []) if not anew or e["case"] not in anew]
            results[name] = [*known, *found]
    return {**parts[0], "results": results}


def sections(records: dict[Path, dict[str, Any]]) -> dict[Path, dict[str, Any]]:
    """Section -> the record, or the merged records, that it shows."""
    parts: dict[Path, list[dict[str, Any]]] = {}
    for path in sorted(records):
        parts.setdefault(section(path), []).append(records[path])
    return {name: merged(found) for name, found in parts.items()}


def plot_path(name: Path) -> Path:
    return name.with_name(f"{name.name}.png")


def page(place: Path, records: dict[Path, dict[str, Any]]) -> str:
    """The page at ``place`` about the records of one GPU, a section for each of them."""
    order, shown = list(BENCHMARKS), sections(records)

    def position(path: Path) -> tuple[int, str]:
        name = shown[path]["benchmark"]
        return order.index(name) if name in order else len(order), path.name

    paths = sorted(shown, key=position)
    lines = [
        f"# Measured on: {shown[paths[0]]['environment']['gpu']}",
        "",
        "`benchmarks/render_results.py` writes this page from the records that it links;",
        "`benchmarks/README.md` says how to repeat each of them.",
        "",
        *(f"- [{path.name}](#{path.name})" for path in paths),
        "",
    ]
    for path in paths:
        data = shown[path]
        report = report_of(data)
        lines += [f"## {path.name}", ""]
        tables = [table.markdown() for table in report.tables(data)]
        lines += [line for table in tables for line in (table, "")]
        if data["environment"]["date"] < AUTO_CHANGED and re.search(r"\bauto\b", "".join(tables)):
            lines += ["The mode that is called `auto` here is `sustained` now.", ""]
        if has_plot(data):
            picture = Path(os.path.relpath(plot_path(path), place.parent)).as_posix()
            lines += [f"![{path.name}]({picture})", ""]
        for record in (record for record in sorted(records) if section(record) == path):
            link = Path(os.path.relpath(record, place.parent)).as_posix()
            lines += [f"[Record]({link}): {origin(records[record])}", ""]
    return "\n".join(lines)


def timm_page(place: Path, shown: dict[Path, dict[str, Any]]) -> str:
    """The page at ``place`` about steps of timm's models on one GPU."""
    first = next(iter(shown.values()))
    lines = [
        f"# timm's models on: {first['environment']['gpu']}",
        "",
        "`benchmarks/render_results.py` writes this page, and the CSV files with the columns of",
        "timm's own benchmark, from records of the same name. Inference is in float16. Training",
        "is in bfloat16 by autocast, with the optimizer's step. Unlike timm's, steps are replayed",
        "from CUDA graphs in turns: the time of the host does not count.",
        "",
    ]
    for path, data in shown.items():
        lines += [line for table in timm_csv.tables(data) for line in (table.markdown(), "")]
        beside = Path(os.path.relpath(path.parent, place.parent)).as_posix()
        links = (f"[{name}]({beside}/{path.name}-{name})" for name in timm_csv.files(data))
        lines += [f"Files: {', '.join(links)}. {origin(data)}", ""]
    return "\n".join(lines)


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--check", action="store_true", help="write nothing; exit 1 where out of date")
    p.add_argument("--results", type=Path, default=HERE / "results")
    p.add_argument("--pages", type=Path, default=ROOT / "docs" / "results")
    p.add_argument(
        "--shipped", type=Path, default=ROOT / "cudnn_autotune" / "cli" / "measured.json"
    )
    options = p.parse_args()
    records: dict[Path, dict[str, Any]] = {}
    refused = 0
    for path in sorted(options.results.glob("*/*.json")):
        if path.stem in FINDINGS and "rows" not in json.loads(path.read_text()).get("results", {}):
            continue
        try:
            records[path] = publishable(path)
        except Refused as error:
            print(f"left out: {error}", file=sys.stderr)
            refused += 1
    pages: dict[Path, str] = {}
    for folder in {path.parent for path in records}:
        place = options.pages / f"{folder.name}.md"
        pages[place] = page(place, {p: data for p, data in records.items() if p.parent == folder})
    of_timm = {p: data for p, data in sections(records).items() if timm_csv.is_of_timm(data)}
    for folder in {path.parent for path in of_timm}:
        place = options.pages / f"timm_{folder.name}.md"
        shown = {p: data for p, data in of_timm.items() if p.parent == folder}
        pages[place] = timm_page(place, shown)
        for path, data in shown.items():
            for name, text in timm_csv.files(data).items():
                pages[path.with_name(f"{path.name}-{name}")] = text
    stale = [
        f"{place.name} has no records: delete it"
        for place in options.pages.glob("*.md")
        if place not in pages and place.name not in BY_HAND
    ]
    named = {path.name: data for path, data in sections(records).items() if path.parent.name == GPU}
    charted = chart.figures(named) if named.keys() >= chart.NEEDED else None
    pictures = {theme: options.pages / f"whole_models_{theme}.svg" for theme in chart.THEMES}
    if options.check:
        stale += [
            f"{place.name} is not what the records say: run benchmarks/render_results.py"
            for place, text in pages.items()
            if not place.exists() or place.read_text() != text
        ]
        stale += [
            f"{plot_path(path).name} is missing: run benchmarks/render_results.py"
            for path, data in sections(records).items()
            if has_plot(data) and not plot_path(path).exists()
        ]
        if charted is not None:
            stale += [
                f"{place.name} is not what the records say: run benchmarks/render_results.py"
                for place, is_right in (
                    (options.shipped, lambda text: text == chart.text_of(charted)),
                    *(
                        (place, lambda text, theme=theme: chart.is_of(text, charted, theme))
                        for theme, place in pictures.items()
                    ),
                )
                if not place.exists() or not is_right(place.read_text())
            ]
    else:
        options.pages.mkdir(parents=True, exist_ok=True)
        for place, text in pages.items():
            place.write_text(text)
        for path, data in sections(records).items():
            if has_plot(data):
                report_of(data).plot(data, plot_path(path))
        if charted is not None:
            options.shipped.write_text(chart.text_of(charted))
            for theme, place in pictures.items():
                place.write_text(chart.svg(charted, theme))
        print(f"{len(records)} records in {len(pages)} pages")
    for line in stale:
        print(line, file=sys.stderr)
    return 1 if stale or refused else 0


if __name__ == "__main__":
    sys.exit(main())
