"""A team's own denoisers: what one must be able to do, and how it is found by the name in `model.family`.

A denoiser is a small class that is announced under a name, by the `isthmus_plugin.py` of the recipe's `code` or by an
installed package (:mod:`isthmus.core.plugins`)::

    @hookimpl
    def isthmus_denoisers():
        return [("my-dit", "my_dit:MyDiT")]

Everything that goes wrong in one is said in one line: where, which class, what was expected.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from isthmus.core.models.presets import CLASSES
from isthmus.core.plugins import DenoiserEntry, installed, one_line
from isthmus.errors import PluginError, UsageError

if TYPE_CHECKING:
    from isthmus.core.models.conditioning import Condition

METHODS = ("build", "blocks", "predict", "resolved_config")
"""What a denoiser must have. It may also have `conditioning` and `train_flops`."""


class Denoiser(Protocol):
    """A family of denoisers. Made without arguments, once a process."""

    conditioning: str = "dit"
    """Optional: the family of isthmus whose way of joining text is used, see :mod:`isthmus.core.models.conditioning`."""

    def build(self, config: dict[str, Any], seed: int) -> nn.Module:
        """A model of the recipe's `model.config`, float32 on the CPU.

        torch's generators are seeded with `seed` around the call, so that weights drawn from them are the same on
        every rank; they must be.
        """
        ...

    def blocks(self, model: nn.Module) -> Collection[type[nn.Module]]:
        """The classes of the model's blocks: the units of sharding, compiling and recomputing."""
        ...

    def predict(self, model: nn.Module, noisy: Tensor, timestep: Tensor, condition: Condition) -> Tensor:
        """The prediction [b, C, H, W] for `noisy` [b, C, H, W], at float32 `timestep` [b] from 0 to 1000.

        Must call `model` itself, not a part of it: DDP may be around it.
        """
        ...

    def resolved_config(self, model: nn.Module) -> dict[str, Any]:
        """The configuration with defaults filled in, JSON-able. A checkpoint of another one is refused.

        `in_channels`, where it is there, is compared with the channels of the latents.
        """
        ...

    # Optional: def train_flops(self, config, height, width, text_tokens) -> float, of forward and backward pass of
    # one image of `height` x `width` latent cells; without it a run has no model FLOPs utilisation.


_CODE: dict[str, tuple[DenoiserEntry, str]] = {}
_LOADED: dict[str, Denoiser] = {}
_OF: dict[type[nn.Module], Denoiser] = {}
OWN_BLOCKS: dict[type[nn.Module], tuple[type[nn.Module], ...]] = {}
"""Class of a team's own model -> the classes of its blocks."""


def announce(entries: Collection[DenoiserEntry], where: str) -> None:
    """Make the denoisers of a recipe's code known; they go before those of installed packages.

    Raises:
        PluginError: an entry is not a pair of texts, or takes the name of a family of isthmus.
    """
    for entry in entries:
        pair = isinstance(entry, tuple) and len(entry) == 2 and all(isinstance(part, str) for part in entry)
        if not pair or ":" not in entry[1]:
            raise PluginError(
                f"isthmus_denoisers gave {entry!r}",
                where=where,
                hint="pairs such as ('my-dit', 'my_dit:MyDiT')",
            )
        if entry[0] in CLASSES:
            raise PluginError(
                f"{entry[0]} is a family of isthmus", where=where, hint="choose another name for your own"
            )
        _CODE[entry[0]] = (entry, where)
        _LOADED.pop(entry[0], None)


def forget_code() -> None:
    """Forget what :func:`announce` made known, and all that was loaded."""
    _CODE.clear()
    _LOADED.clear()


def find(name: str) -> Denoiser:
    """The denoiser of that name, loaded.

    Raises:
        UsageError: nobody announces it.
        PluginError: it cannot be loaded, or lacks a method.
    """
    if name in _LOADED:
        return _LOADED[name]
    known = {**_announced(), **_CODE}
    if name not in known:
        own = ", ".join(sorted(known)) or "none"
        broken = "; ".join(
            f"plugin {plugin} is broken: {cause}" for plugin, cause in installed().broken.items()
        )
        raise UsageError(
            f"no model family {name!r}" + (f"; {broken}" if broken else ""),
            where="model.family",
            hint=f"isthmus has {', '.join(CLASSES)}; the recipe's code and installed plugins announce {own}",
        )
    (_, target), where = known[name]
    module, _, attribute = target.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)()
    except Exception as error:
        raise PluginError(f"{target} cannot be loaded: {cause_of(error)}", where=where) from error
    lacks = [method for method in METHODS if not callable(getattr(found, method, None))]
    if lacks:
        raise PluginError(
            f"{target} lacks {', '.join(lacks)}", where=where, hint=f"a denoiser has {', '.join(METHODS)}"
        )
    way = getattr(found, "conditioning", "dit")
    if way not in CLASSES:
        raise PluginError(
            f"{target}.conditioning is {way!r}", where=where, hint=f"one of {', '.join(CLASSES)}"
        )
    denoiser: Denoiser = found
    _LOADED[name] = denoiser
    return denoiser


def _announced() -> dict[str, tuple[DenoiserEntry, str]]:
    known: dict[str, tuple[DenoiserEntry, str]] = {}
    for plugin, module in installed().modules.items():
        hook = getattr(module, "isthmus_denoisers", None)
        if plugin == "builtin" or hook is None:
            continue
        try:
            for name, target in hook():
                known.setdefault(name, ((name, target), f"plugin {plugin}"))
        except Exception as error:
            raise PluginError(f"isthmus_denoisers: {cause_of(error)}", where=f"plugin {plugin}") from error
    return known


def build_own(name: str, config: Mapping[str, Any], seed: int) -> nn.Module:
    """A model of a team's own family, checked as far as it can be before it is called.

    Raises:
        UsageError, PluginError: see :func:`find`; or it is no module, or not as :class:`Denoiser` says.
    """
    own = find(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = _asked(own, "build", dict(config), seed)
    if not isinstance(model, nn.Module):
        raise _wrong(own, "build", f"returned {_kind(model)}, expected a torch.nn.Module")
    weights = list(model.parameters())
    if not any(weight.requires_grad for weight in weights):
        raise _wrong(own, "build", "returned a module without trained parameters")
    for weight in weights:
        if weight.dtype != torch.float32 or weight.device.type not in ("cpu", "meta"):
            raise _wrong(
                own, "build", f"returned {weight.dtype} on {weight.device}, expected float32 on the CPU"
            )
    classes: Any = _asked(own, "blocks", model)
    present = {type(module) for module in model.modules()}
    if not isinstance(classes, (list, tuple, set, frozenset)) or not set(classes) <= present:
        raise _wrong(own, "blocks", f"returned {classes!r}, expected classes of modules within the model")
    OWN_BLOCKS[type(model)] = tuple(classes)
    _OF[type(model)] = own
    return model


def own_config(model: nn.Module) -> dict[str, Any] | None:
    """`resolved_config` of a team's own model; None for a model of isthmus."""
    own = _OF.get(type(model))
    if own is None:
        return None
    config: Any = _asked(own, "resolved_config", model)
    if not isinstance(config, dict):
        raise _wrong(own, "resolved_config", f"returned {_kind(config)}, expected a dict")
    return dict(config)


def own_conditioning(name: str) -> str:
    """The family of isthmus whose way of joining text a team's own family uses."""
    return str(getattr(find(name), "conditioning", "dit"))


def own_train_flops(
    name: str, config: Mapping[str, Any], height: int, width: int, tokens: int
) -> float | None:
    """FLOPs of a training pass over one image, where a team's own family counts them; see :class:`Denoiser`."""
    own = find(name)
    if not callable(getattr(own, "train_flops", None)):
        return None
    return float(_asked(own, "train_flops", dict(config), height, width, tokens))


def own_prediction(
    model: nn.Module, name: str, noisy: Tensor, timestep: Tensor, condition: Condition
) -> Tensor:
    """`predict` of a team's own family, held to the shape of `noisy`."""
    own = find(name)
    prediction: Any = _asked(own, "predict", model, noisy, timestep, condition)
    if not isinstance(prediction, Tensor):
        raise _wrong(own, "predict", f"returned {_kind(prediction)}, expected a tensor {list(noisy.shape)}")
    if prediction.shape != noisy.shape:
        raise _wrong(
            own,
            "predict",
            f"returned {list(prediction.shape)}, expected {list(noisy.shape)} as the noisy latents",
        )
    return prediction


def _asked(own: Denoiser, method: str, *arguments: Any) -> Any:
    try:
        return getattr(own, method)(*arguments)
    except Exception as error:
        # What is not the plugin's doing goes through as it is: memory, peers that are gone.
        if isinstance(error, torch.OutOfMemoryError) or not _is_theirs(own, error):
            raise
        raise _wrong(own, method, f"failed: {cause_of(error)}") from error


_NOT_THEIRS = ("Connection closed", "Connection reset", "Timed out", "Broken pipe", "NCCL", "out of memory")


def _is_theirs(own: Denoiser, error: Exception) -> bool:
    ours = isinstance(error, torch.distributed.DistError) or any(sign in str(error) for sign in _NOT_THEIRS)
    # Interrupted and the like are our own control flow.
    return not ours and not type(error).__module__.startswith("isthmus.")


def _wrong(own: Denoiser, method: str, what: str) -> PluginError:
    file = Path(inspect.getsourcefile(type(own)) or "?").name
    error = PluginError(f"{type(own).__name__}.{method} {what}", where=file)
    # Every rank runs the same code: one says it.
    vars(error)["on_all_ranks"] = True
    return error


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def cause_of(error: BaseException) -> str:
    """Kind and message of an error, and the line of the team's own code, or the last one, that it came from."""
    if isinstance(error, SyntaxError):
        return one_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        frame for frame in frames if "site-packages" not in frame.filename and frame.filename != __file__
    ]
    theirs = [
        frame
        for frame in theirs
        if not frame.filename.startswith("<frozen") and "importlib" not in frame.filename
    ]
    if not theirs:
        return one_line(error)
    return f"{one_line(error)} ({Path(theirs[-1].filename).name}:{theirs[-1].lineno})"
