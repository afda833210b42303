"""The chart of whole models in README.md, and the same figures for the package's ``demo``.

Both are drawn from records alone: each bar is the time of the best torch.compile over that of the
backend, as in the tables of the results.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common import numbers

from .report import rows

WAY = "backend"
NAMES = {
    "conv_tasnet": "Conv-TasNet",
    "convnext_tiny": "ConvNeXt-T",
    "ddpm_unet": "DDPM U-Net",
    "demucs": "Demucs",
    "densenet121": "DenseNet-121",
    "detector": "detector",
    "efficientnet_v2_s": "EfficientNetV2-S",
    "hifigan": "HiFi-GAN",
    "mobilenet_v3_large": "MobileNetV3-L",
    "nnunet3d": "nnU-Net, 3-d",
    "regnet_y_3_2gf": "RegNetY-3.2GF",
    "resnet50": "ResNet-50",
    "resnet50_fpn": "ResNet-50 FPN",
    "sd_unet": "Stable Diffusion U-Net",
    "sd_vae_decoder": "Stable Diffusion decoder",
    "stylegan2": "StyleGAN2",
    "unet": "U-Net",
    "unet3d": "U-Net, 3-d",
    "video_decoder": "decoder of videos",
    "vnet": "V-Net",
    "wav2vec2": "wav2vec 2.0",
}
LAYER = ("kernels", "convnext_tiny_96/fprop/float16/nhwc")
"""The section and the case of the layer that ``demo`` shows."""


@dataclass(frozen=True)
class Panel:
    """A part of the chart: the cases of a step and a layout."""

    title: str
    step: str
    layout: str
    sections: tuple[str, ...]
    """Sections of one GPU's results. Models are the first one's; a later one's case replaces it."""


PANELS = (
    Panel(
        "Inference, float16",
        "infer",
        "contiguous",
        ("models_first_calls", "models_dense"),
    ),
    Panel(
        "Inference, float16, channels_last, frozen weights",
        "infer",
        "channels_last",
        ("whole_models",),
    ),
    Panel(
        "Training, bfloat16 by autocast",
        "train",
        "contiguous",
        ("models_train_layouts", "models_train_layouts_99895807"),
    ),
)
NEEDED = {*(section for panel in PANELS for section in panel.sections), LAYER[0]}
"""The sections that the figures come from."""
_COLOURS = {"light": ("#1f2328", "#0969da", "#d0d7de"), "dark": ("#e6edf3", "#4493f8", "#3d444d")}
"""Text, bars and lines of each theme of GitHub."""
THEMES = tuple(_COLOURS)


def figures(sections: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns what the chart shows, as JSON values.

    Args:
        sections: the records of one GPU, by their section's name.
    """
    panels = []
    for panel in PANELS:
        found: dict[str, float] = {}
        used: list[str] = []
        for section in panel.sections:
            ratios = _ratios(sections[section], panel)
            known = {model: ratio for model, ratio in ratios.items() if model in found or not used}
            found |= known
            used += [section] * bool(known)
        ratios_of = sorted(found.items(), key=lambda one: -one[1])
        panels.append(
            {
                "title": panel.title,
                "step": panel.step,
                "layout": panel.layout,
                "records": used,
                "mean": round(numbers.geometric_mean(found.values()), 3),
                "models": {NAMES[model]: round(ratio, 3) for model, ratio in ratios_of},
            }
        )
    environment = sections[PANELS[0].sections[0]]["environment"]
    section, case = LAYER
    (layer,) = (row for row in sections[section]["results"]["rows"] if row["case"] == case)
    return {
        "gpu": environment["gpu"],
        "torch": environment["torch"].partition("+")[0],
        "panels": panels,
        "layer": {
            "case": case,
            "record": section,
            "cudnn_us": round(layer["before (us)"], 1),
            "ours_us": round(layer["beside (us)"], 1),
        },
    }


def _ratios(data: dict[str, Any], panel: Panel) -> dict[str, float]:
    """Returns the time of the best torch.compile over the backend's, by model. Of several batches
    of a model the largest counts."""
    found = {}
    for row in sorted(rows(data), key=lambda row: row.batch):
        ratio = row.against(WAY)
        if ratio is not None and (row.step, row.layout) == (panel.step, panel.layout):
            found[row.case[0]] = ratio.median
    return found


def text_of(shown: dict[str, Any]) -> str:
    """Returns the figures as the text of a file."""
    return json.dumps(shown, indent=1) + "\n"


def svg(shown: dict[str, Any], theme: str) -> str:
    """Draws the figures for a theme, ``"light"`` or ``"dark"``: the same text each time, by one
    version of matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ink, bar, line = _COLOURS[theme]
    style = {
        "svg.hashsalt": "cudnn_autotune",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": ink,
        "axes.labelcolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.edgecolor": line,
    }
    panels = shown["panels"]
    most = max(ratio for panel in panels for ratio in panel["models"].values())
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 3.1), layout="constrained")
        for axis, panel in zip(axes, panels, strict=True):
            models, ratios = list(panel["models"]), list(panel["models"].values())
            axis.barh(range(len(models)), ratios, height=0.65, color=bar)
            for place, ratio in enumerate(ratios):
                axis.text(ratio + 0.03, place, f"{ratio:.2f}", va="center", fontsize=8)
            axis.axvline(1, color=ink, linewidth=1)
            axis.set_yticks(range(len(models)), models)
            axis.tick_params(length=0)
            axis.invert_yaxis()
            axis.set_xlim(0, most + 0.35)
            axis.set_title(f"{panel['title']}: mean {panel['mean']:.2f}", fontsize=9, color=ink)
            for side in ("top", "right", "bottom"):
                axis.spines[side].set_visible(False)
            axis.set_xticks([0, 1, 2, 3])
        figure.supxlabel(f"times as fast as torch.compile, {shown['gpu']}", fontsize=9, color=ink)
        made = io.StringIO()
        metadata = {"Date": None, "Description": json.dumps(shown, separators=(",", ":"))}
        figure.savefig(made, format="svg", transparent=True, metadata=metadata)
        pyplot.close(figure)
    return "\n".join(each.rstrip() for each in made.getvalue().splitlines()) + "\n"


def is_of(text: str, shown: dict[str, Any], theme: str) -> bool:
    """Returns whether a file is the drawing of these figures; one by another version of matplotlib
    is judged by the figures in its description."""
    import matplotlib

    if f"Matplotlib v{matplotlib.__version__}," in text:
        return text == svg(shown, theme)
    described = json.dumps(shown, separators=(",", ":")).replace('"', "&quot;")
    return described in text.replace('"', "&quot;")
