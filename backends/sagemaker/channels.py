"""Where a job's inputs are in its container: channels, and the recipe that names their paths.

A source of `access: mount` is a FastFile channel and one of `download` a File channel, at /opt/ml/input/data/<channel>; the
recipe in the job then reads plain files there. `stream` needs no channel: the recipe's s3:// URIs stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isthmus.core.recipe.encoding import Encode
from isthmus.core.recipe.schema import Recipe, Source

INPUT = "/opt/ml/input/data"
CHECKPOINTS = "/opt/ml/checkpoints"
_MODES = {"mount": "FastFile", "download": "File"}
OWN = "isthmus"
"""The channel of the recipe, start.py and wheels."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One input."""

    name: str
    uri: str
    """An S3 prefix that ends with a slash: one without would match its siblings, too."""
    mode: str
    """`File` is copied before the job begins, `FastFile` is read when it is asked for."""

    @property
    def path(self) -> str:
        """Where it is in the container."""
        return f"{INPUT}/{self.name}"

    def request(self) -> dict[str, Any]:
        """As CreateTrainingJob takes it."""
        return {
            "ChannelName": self.name,
            "InputMode": self.mode,
            "CompressionType": "None",
            "RecordWrapperType": "None",
            "DataSource": {
                "S3DataSource": {
                    "S3DataType": "S3Prefix",
                    "S3Uri": self.uri,
                    "S3DataDistributionType": "FullyReplicated",
                }
            },
        }


def prefix(uri: str) -> str:
    """The URI with one slash at its end."""
    return uri.rstrip("/") + "/"


def inputs(recipe: Recipe, *, isolated: bool = False) -> tuple[list[Channel], Recipe]:
    """The channels of a resolved recipe, and the recipe as it is within the job.

    Args:
        isolated: whether the job reaches no S3, so that the autoencoder must come by a channel, too.
    """
    if recipe.encode is not None:
        return _pictures(recipe, recipe.encode)
    mode = _MODES.get(recipe.data.access)
    if mode is None:
        return [], recipe
    channels: list[Channel] = []

    def take(name: str, uri: str, how: str) -> str:
        if not uri.startswith("s3://"):
            return uri  # a hub's name, or something that the lint refuses
        channels.append(Channel(name, prefix(uri), how))
        return channels[-1].path

    def sources(listed: list[Source], name: str) -> list[Source]:
        count, found = 0, []
        for source in listed:
            paths = []
            for uri in _roots(source):
                paths.append(take(f"{name}{count}", uri, mode))
                count += 1
            found.append(source.model_copy(update={"uri": paths}))
        return found

    # The data is files on the node from here on, however it came there; a cache of it would be a second copy.
    absent = {"cache_limit", "cache_directory"}
    changed = {"sources": sources(recipe.data.sources, "data"), "access": "mount"}
    data = recipe.data.model_copy(update=changed | dict.fromkeys(absent))
    data.__pydantic_fields_set__.difference_update(absent)
    update: dict[str, Any] = {"data": data}
    if recipe.validation.sources:
        held_out = {"sources": sources(recipe.validation.sources, "val")}
        update["validation"] = recipe.validation.model_copy(update=held_out)
    if isinstance(recipe.model.init_from, str):
        place = take("init", recipe.model.init_from, mode)
        update["model"] = recipe.model.model_copy(update={"init_from": place})
    autoencoder = recipe.encoders.autoencoder
    if isolated and autoencoder.source.startswith("s3://"):
        place = take("autoencoder", autoencoder.source, "File")
        moved = autoencoder.model_copy(update={"source": place})
        update["encoders"] = recipe.encoders.model_copy(update={"autoencoder": moved})
    return channels, recipe.model_copy(update=update)


def _pictures(recipe: Recipe, section: Encode) -> tuple[list[Channel], Recipe]:
    """An encode job's source as a channel, and the recipe that reads it there under the names of where it is from."""
    uri, mode = str(section.source), _MODES.get(section.access)
    if mode is None or not uri.startswith("s3://"):  # or the lint refuses it
        return [], recipe
    channel = Channel("source", prefix(uri), mode)
    moved = section.model_copy(update={"source": channel.path, "origin": uri})
    return [channel], recipe.model_copy(update={"encode": moved})


def _roots(source: Source) -> list[str]:
    assert not isinstance(source.uri, dict), "the recipe is not resolved"
    return [source.uri] if isinstance(source.uri, str) else list(source.uri)
