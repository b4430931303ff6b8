"""A model's folder from the Hugging Face hub, through huggingface_hub's cache.

The commit is named, so what is in the cache is what is on the hub: a folder that is there in full is not asked for. The hub's
address, cache, token and whether it may be asked at all come from huggingface_hub's own variables: HF_ENDPOINT, HF_HOME,
HF_TOKEN, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from isthmus.core.encode.pretrained import quiet
from isthmus.core.recipe.hub import FORM, hub_folder
from isthmus.errors import StorageError, UsageError

_ON = {"1", "on", "yes", "true"}
_INDEX = "model_index.json"


@cache
def fetch(place: str, part: str) -> str:
    """The local folder of a place on the hub, with its configuration and weights.

    Args:
        place: see :mod:`isthmus.core.recipe.hub`.
        part: the denoiser's folder where the place is a whole pipeline; nothing else of a pipeline is fetched.

    Raises:
        UsageError: no such repository, commit or folder, or it may not be read.
        StorageError: it is not in the cache, and the hub cannot or may not be asked.
    """
    found = hub_folder(place)
    if found is None:
        raise UsageError(f"{place} is no folder of a hub", where="model.init_from", hint=FORM)
    inside = f"{found.folder}/" if found.folder else ""
    index = _snapshot(place, [f"{inside}{_INDEX}", f"{inside}config.json"])
    folder = index / found.folder
    if not folder.is_dir():
        raise UsageError(f"has no folder {found.folder} with a model", where=f"model.init_from {place}")
    at = f"{inside}{part}/" if (folder / _INDEX).exists() else inside
    # A pattern's star takes slashes, too; `[!/]` keeps to the folder, the second keeps half-precision copies out.
    files = [f"{at}config.json", f"{at}*.safetensors", f"{at}*.safetensors.index.json"]
    root = _snapshot(place, files, ignore=[f"{at}*/*", f"{at}*.fp16.*", f"{at}*.bf16.*", f"{at}*.non_ema.*"])
    if not any((root / at).glob("*.safetensors")):
        # Only a copy in half precision is there, or nothing.
        root = _snapshot(place, files, ignore=[f"{at}*/*"])
    return str(root / found.folder)


def _snapshot(place: str, files: list[str], ignore: list[str] | None = None) -> Path:
    from huggingface_hub import constants, snapshot_download

    found = hub_folder(place)
    assert found is not None
    offline = constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").lower() in _ON
    options: dict[str, Any] = {
        "revision": found.commit,
        "allow_patterns": files,
        "ignore_patterns": ignore,
        "endpoint": os.environ.get("HF_ENDPOINT"),
    }
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    try:
        with quiet():
            disable_progress_bars()
            try:
                return Path(snapshot_download(found.repository, local_files_only=offline, **options))
            finally:
                enable_progress_bars()
    except Exception as error:
        raise _one_line(error, place, offline=offline) from error


def _one_line(error: Exception, place: str, *, offline: bool) -> Exception:
    from huggingface_hub import errors

    where = f"model.init_from {place}"
    if isinstance(error, errors.GatedRepoError):
        hint = "ask for access on the hub, and give the job a token: HF_TOKEN"
        return UsageError("the hub wants a licence accepted for it", where=where, hint=hint)
    if isinstance(error, errors.RevisionNotFoundError):
        return UsageError("the hub has no such commit of it", where=where)
    if isinstance(error, errors.RepositoryNotFoundError):
        hint = "look at OWNER/NAME; a private one needs a token: HF_TOKEN"
        return UsageError("the hub has no such repository", where=where, hint=hint)
    if isinstance(error, OSError) and error.errno is not None:
        return StorageError(f"cannot fetch: {error.strerror or error}", where=where)
    if offline:
        hint = "fetch it where the hub can be reached (HF_HOME names the cache), or copy it to a store and name that"
        return StorageError(
            "is not in the cache, and HF_HUB_OFFLINE forbids to ask the hub", where=where, hint=hint
        )
    cause = error.__cause__ or error
    text = " ".join(str(cause).split())[:200] or type(cause).__name__
    hint = "a job without a way to the internet: copy it to a store and name that"
    return StorageError(f"cannot be fetched from the hub: {text}", where=where, hint=hint)
