"""A model on the Hugging Face hub, as `model.init_from` names it: `hf://OWNER/NAME@COMMIT` and perhaps a folder in it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from isthmus.core.recipe.problems import Problem
from isthmus.core.recipe.schema import Recipe

SCHEME = "hf://"
_NAME = r"[A-Za-z0-9][\w.-]{0,95}"
_HUB = re.compile(rf"hf://({_NAME}/{_NAME})@([0-9a-f]{{40}})((?:/{_NAME})*)/?")
FORM = "hf://OWNER/NAME@COMMIT, with a commit of 40 hexadecimal digits, and a folder behind it if it is not the root"


@dataclass(frozen=True, slots=True)
class HubFolder:
    """A folder of one commit of a repository."""

    repository: str
    commit: str
    folder: str
    """Without slashes at its ends; empty for the root."""


def is_hub(place: str) -> bool:
    """Whether a place is on the hub rather than a path or in a store."""
    return place.startswith(SCHEME)


def hub_folder(place: str) -> HubFolder | None:
    """What a place on the hub names; None where it is not written so."""
    match = _HUB.fullmatch(place)
    return None if match is None else HubFolder(match[1], match[2], match[3].strip("/"))


def check_hub(recipe: Recipe) -> list[Problem]:
    """Refuses a name that could mean other weights tomorrow: a run's first weights are a commit's."""
    place = recipe.model.init_from
    places = list(place.items()) if isinstance(place, dict) else [] if place is None else [(None, place)]
    problems = []
    for backend, one in places:
        if is_hub(one) and hub_folder(one) is None:
            path = ("model", "init_from") if backend is None else ("model", "init_from", backend)
            pinned = re.match(rf"hf://{_NAME}/{_NAME}", one) and "@" not in one
            message = (
                "names no commit, and a branch moves on" if pinned else f"`{one[:120]}` is no folder of a hub"
            )
            problems.append(Problem(path, message, FORM))
    return problems
