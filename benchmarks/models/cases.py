"""The compared rows (a model, a step, a layout, a batch) and columns (ways to run it)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Model:
    """The shapes of one sample's inputs, and the batches of each step; of no batch, no step."""

    inputs: tuple[tuple[int, ...], ...] = ((3, 224, 224),)
    infer: tuple[int, ...] = (1, 64)
    train: tuple[int, ...] = (64,)
    tiny: tuple[tuple[int, ...], ...] = ()
    """The shapes in a dry run; if there are none, each side is a tenth of the real one."""


# Models of torchvision or timm; the last 23 are those of networks.py.
MODELS = {
    "resnet50": Model(),
    "efficientnet_v2_s": Model(),
    "convnext_tiny": Model(),
    "mobilenet_v3_large": Model(),
    "regnet_y_3_2gf": Model(),
    "densenet121": Model(),
    "sd_unet": Model(((4, 64, 64), (), (77, 768)), (1, 8), (8,)),
    "sd_vae_decoder": Model(((4, 64, 64),), (1, 8), ()),
    "detector": Model(((3, 640, 640),), (1, 64), (16,)),
    "unet": Model(((3, 320, 320),), (1, 16), (16,)),
    "stylegan2": Model(((512,),), (1, 8), ()),
    "esrgan": Model(((3, 256, 256),), (1,), ()),
    "unet3d": Model(((1, 128, 128, 128),), (1, 8), (2,)),
    "video_decoder": Model(((16, 5, 32, 32),), (1,), ()),
    "hifigan": Model(((80, 128),), (1, 8), (8,)),
    "conv_tasnet": Model(((1, 64000),), (1, 8), (4,)),
    "whisper_encoder": Model(((80, 3000),), (1, 32), ()),
    "wav2vec2": Model(((1, 160000),), (1, 8), (4,)),
    "encodec": Model(((1, 48000),), (1, 8), ()),
    "dac_decoder": Model(((1024, 86),), (1, 8), ()),
    "demucs": Model(((2, 176400),), (1, 4), (2,)),
    "melgan": Model(((80, 200),), (1, 8), ()),
    "bigvgan": Model(((80, 100),), (1, 8), ()),
    "parallel_wavegan": Model(((1, 24000), (80, 100)), (1, 8), ()),
    "nnunet3d": Model(((1, 128, 128, 128),), (1, 2), (1,)),
    "vnet": Model(((1, 64, 128, 128),), (1, 2), (2,)),
    "rife": Model(((3, 640, 1280), (3, 640, 1280)), (1, 4), ()),
    "ddpm_unet": Model(((4, 64, 64), ()), (1, 8), (4,)),
    "resnet50_fpn": Model(((3, 800, 800),), (1, 2), (2,)),
}
TIMM_PREFIX = "timm:"
# Models of timm, with the side of the images that it trains them on, for a table with its columns.
_SIDES = {
    "convnext_tiny": 224,
    "darknet53": 256,
    "densenet121": 224,
    "dla34": 224,
    "efficientnet_b0": 224,
    "efficientnetv2_rw_s": 288,
    "ghostnet_100": 224,
    "hrnet_w18": 224,
    "inception_v4": 299,
    "mobilenetv3_large_100": 224,
    "mobilenetv4_conv_medium": 256,
    "nfnet_l0": 224,
    "regnety_032": 224,
    "repvgg_b0": 224,
    "resnet18": 224,
    "resnet50": 224,
    "resnext50_32x4d": 224,
    "rexnet_100": 224,
    "vgg16": 224,
    "xception41": 299,
}
TIMM = {
    TIMM_PREFIX + name: Model(((3, side, side),), (256,), (128,)) for name, side in _SIDES.items()
}
# Autoencoder of decoders.py -> shapes of its latents and of what it decodes, and tiny ones.
_CODED = {
    "sd": ((4, 128, 128), (3, 1024, 1024), (4, 16, 16), (3, 32, 32)),
    "flux": ((16, 128, 128), (3, 1024, 1024), (16, 16, 16), (3, 32, 32)),
    "qwen": ((16, 1, 128, 128), (3, 1, 1024, 1024), (4, 1, 6, 4), (3, 1, 48, 32)),
    "wan": ((16, 6, 60, 104), (3, 21, 480, 832), (4, 3, 6, 4), (3, 9, 48, 32)),
    "ltx": ((128, 4, 16, 22), (3, 25, 512, 704), (8, 2, 2, 2), (3, 9, 64, 64)),
    "cogvideox": ((16, 5, 60, 90), (3, 17, 480, 720), (4, 5, 6, 4), (3, 17, 48, 32)),
    "hunyuan": ((16, 3, 40, 64), (3, 9, 320, 512), (4, 3, 6, 4), (3, 9, 48, 32)),
}
DECODERS = {
    f"{name}_{direction}{tiled}": Model((shape,), (1,), (), (tiny,))
    for name, (latents, sample, tiny_latents, tiny_sample) in _CODED.items()
    for direction, shape, tiny in (
        ("decode", latents, tiny_latents),
        ("encode", sample, tiny_sample),
    )
    for tiled in ("", "_tiled")
}
"""Autoencoders of diffusers, decoding or encoding, whole or in tiles."""
SETS = {"timm": tuple(TIMM), "decoders": tuple(DECODERS)}
"""Names that stand for several models."""
# Step -> what it is called in a table.
STEPS = {"infer": "inference", "train": "training", "optimize": "training with SGD"}
LAYOUTS = ("contiguous", "channels_last")


@dataclass(frozen=True)
class Case:
    """What one process measures, with several batches: a row for each of them."""

    model: str
    step: str
    layout: str

    @property
    def id(self) -> str:
        return f"{self.model}/{self.step}/{self.layout}"

    @property
    def is_training(self) -> bool:
        return self.step != "infer"

    def batches(self, asked: Sequence[int] | str | None) -> Sequence[int]:
        """Those that were asked for, or the model's own: all, the largest or the smallest."""
        if asked and not isinstance(asked, str):
            return asked
        model = model_of(self.model)
        own = model.train if self.is_training else model.infer
        if not own or asked is None:
            return own
        return [max(own) if asked == "largest" else min(own)]


def model_of(name: str) -> Model:
    """Returns the shapes and batches of a model; of one that is not listed those of a ResNet."""
    return MODELS.get(name) or TIMM.get(name) or DECODERS.get(name) or Model()


def part_of(models: Sequence[str], part: tuple[int, int]) -> list[str]:
    """Returns the first, second, ... of several parts of models, whose names of sets stand for all
    of them.

    Args:
        part: the part's number, from 1, and how many there are.
    """
    every = [one for name in models for one in SETS.get(name, (name,))]
    number, count = part
    return every[number - 1 :: count]


def cases(models: Sequence[str], steps: Sequence[str], layouts: Sequence[str]) -> Iterator[Case]:
    """Step by step, so that a time limit cuts off no model before all have had a step.

    PyTorch has no channels_last for what 1-d models and those of styles take: these are contiguous
    whatever is asked for.
    """
    found = {
        Case(model, step, layout if takes_images(model) else "contiguous"): None
        for layout in layouts
        for step in steps
        for model in models
    }
    yield from found


def takes_images(model: str) -> bool:
    """Whether the model's first input has channels and at least two dimensions more."""
    return len(model_of(model).inputs[0]) > 2


@dataclass(frozen=True)
class Way:
    """One way to run a step."""

    label: str
    prepare: str = ""
    """``"convert"``: ``cudnn_autotune.convert`` is called on the model first. ``"fuse"`` was a
    function of earlier versions."""
    memory_format: Literal["", "auto", "channels_last"] = ""
    """Argument of ``convert``, or the layout of the weights without it; empty: the case's."""
    sampling: str = ""
    """What ``convert`` gets; else the run's."""
    norms: bool = False
    """Whether ``convert`` gives the model norms of this package too."""
    compile: dict[str, Any] | None = None
    """The arguments of ``torch.compile``; None: eager."""
    freezing: bool = False
    """Inductor's setting, which takes the weights as constants; Dynamo reads it too."""
    trains: bool = True
    mends: bool = False
    """Whether a fault of Inductor in training is corrected, which some versions have."""
    times_while_compiling: bool = False
    settles: bool = False
    """Whether steps are run until no choice is open, SETTLING at most, before it is captured."""

    @property
    def is_ours(self) -> bool:
        is_compiled = (self.compile or {}).get("backend") == "cudnn_autotune"
        return is_compiled or self.prepare in ("convert", "fuse")


SETTLING = 500
_BACKEND = {"backend": "cudnn_autotune"}
WAYS = {
    "eager": Way("eager"),
    "eager_last": Way("eager, channels_last", memory_format="channels_last"),
    "compile": Way("compile", compile={}),
    "compile_last": Way("compile, channels_last", memory_format="channels_last", compile={}),
    # The option makes it another backend for Dynamo, which would run the code of compile else.
    "compile_frozen": Way(
        "compile, frozen", compile={"options": {"freezing": True}}, freezing=True, trains=False
    ),
    # Modes of torch.compile that capture graphs of their own would do so inside ours.
    "compile_max": Way(
        "compile, max-autotune",
        compile={"mode": "max-autotune-no-cudagraphs"},
        times_while_compiling=True,
    ),
    # Without its cache: the programs of compile have the same key, but not the same layout.
    "compile_mended": Way(
        "compile, mended", compile={"options": {"fx_graph_cache": False}}, mends=True
    ),
    "convert": Way("convert", "convert"),
    "convert_race": Way("convert, race", "convert", sampling="race"),
    "convert_online": Way("convert, online", "convert", sampling="online", settles=True),
    "convert_sustained": Way("convert, sustained", "convert", sampling="sustained"),
    "convert_engines": Way("convert, engines alone", "convert", sampling="engines_alone"),
    "convert_norms": Way("convert, norms", "convert", norms=True),
    # For a contiguous case: the layout is a part of what is chosen.
    "convert_last": Way("convert, channels_last", "convert", "channels_last"),
    "convert_last_norms": Way(
        "convert, norms, channels_last", "convert", "channels_last", norms=True
    ),
    "convert_auto": Way("convert, layout auto", "convert", "auto", norms=True),
    "fuse": Way("fuse", "fuse", trains=False),  # in older records
    "backend": Way("backend", compile=_BACKEND | {"options": {"compare": False}}),
    "backend_last": Way(
        "backend, channels_last",
        memory_format="channels_last",
        compile=_BACKEND | {"options": {"compare": False}},
    ),
    "backend_no_norms": Way(
        "backend, PyTorch's norms",
        compile=_BACKEND | {"options": {"compare": False, "norms": "never"}},
    ),
    "backend_frozen": Way(
        "backend, frozen",
        compile=_BACKEND | {"options": {"compare": False, "freezing": True}},
        trains=False,
    ),
    "backend_compare": Way("backend, comparing", compile=_BACKEND),
    "backend_auto": Way(
        "backend, layout auto",
        compile=_BACKEND | {"options": {"memory_format": "auto"}},
        trains=False,
    ),
    "compile_ours": Way("compile of convert", "convert", compile={}),
}
CAN_RUN = tuple(name for name, way in WAYS.items() if way.prepare != "fuse")
DEFAULT = ("eager", "compile", "compile_frozen", "convert", "backend")
# Run in every process, so that what PyTorch's modes take can be compared.
EVERYWHERE = ("eager", "convert")

# PyTorch keeps what cudnn.benchmark found for as long as a process lives, so each of its modes has
# processes of its own. The first one that is asked for has all ways, the others EVERYWHERE's.
PYTORCH = {
    "pytorch_on_10": "limit 10",
    "pytorch_off": "benchmark off",
    "pytorch_on_0": "no limit",
}
