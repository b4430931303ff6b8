"""Finds the folder of a pretrained model, and refuses weights that are pickles."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from isthmus.errors import NotInstalled, UsageError

_Model = TypeVar("_Model")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def require_torch(what: str) -> None:
    """Raises NotInstalled, naming the extra, when torch or the model libraries are missing."""
    import importlib.util

    for module in ("torch", "safetensors", "diffusers", "transformers", "PIL"):
        if importlib.util.find_spec(module) is None:
            raise NotInstalled(what, extra="train", module="pillow" if module == "PIL" else module)


def on_gpu(device: str) -> bool:
    """Whether encoders on a torch device, `auto` among them, run on a GPU."""
    import torch

    return torch.cuda.is_available() if device == "auto" else torch.device(device).type != "cpu"


def locate(source: str) -> tuple[str, dict[str, Any]]:
    """Where a model is: a folder or a hub name, and the options that `from_pretrained` needs with it.

    `source` is a folder, a URI (copied to the temporary directory until the process ends) or a hub name: `owner/name`, or
    `owner/name/subfolder` for one part of a pipeline.

    Raises:
        UsageError: there is no such folder, or it holds no safetensors weights.
    """
    if "://" in source and not source.startswith("file://"):
        source = _copy(source)
    source = source.removeprefix("file://")
    folder = Path(source).expanduser()
    if folder.is_dir():
        _check_weights(folder)
        # A local folder must never make a library ask the network.
        return str(folder), {"local_files_only": True}
    parts = source.split("/")
    if source.startswith((".", "/", "~")) or len(parts) < 2 or "" in parts:
        raise UsageError(
            f"no model folder at {source}", hint="a folder, a URI or a hub name such as owner/name"
        )
    subfolder = "/".join(parts[2:])
    return "/".join(parts[:2]), {"subfolder": subfolder} if subfolder else {}


def load_pretrained(load: Callable[[], _Model], *, source: str) -> _Model:
    """Calls `load` quietly and turns what the model libraries raise into one line."""
    with quiet():
        try:
            return load()
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            text = str(error).strip()
            reason = text.splitlines()[0] if text else type(error).__name__
            if "safetensors" in text and ("no file named" in text or "does not appear to have" in text):
                reason = "it has no safetensors weights (pickled weights can run code and are not loaded)"
            raise UsageError(f"cannot load the model {source}: {reason}") from error


def _check_weights(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise UsageError(
            f"{folder} holds only pickled weights ({pickles[0]}), which can run code when they are loaded",
            hint="convert them to safetensors",
        )
    raise UsageError(f"{folder} holds no safetensors weights")


@cache
def _copy(uri: str) -> str:
    """A copy for this process alone: no other one can swap it, and it cannot go stale."""
    from isthmus.storage.filesystems import filesystem

    files, path = filesystem(uri)
    target = tempfile.mkdtemp(prefix="isthmus-model-")
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    try:
        files.get(path.rstrip("/") + "/", target + "/", recursive=True)
    except FileNotFoundError:
        raise UsageError(f"no model folder at {uri}") from None
    return target


@contextmanager
def quiet() -> Iterator[None]:
    """Silences progress bars and notes of the model libraries, which would drown our own lines."""
    import warnings

    import diffusers
    import transformers

    before = (transformers.utils.logging.get_verbosity(), diffusers.utils.logging.get_verbosity())
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.utils.logging.set_verbosity(before[0])
        diffusers.utils.logging.set_verbosity(before[1])
        if bars:
            transformers.utils.logging.enable_progress_bar()
