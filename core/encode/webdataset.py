"""WebDataset tars, as img2dataset and others write them: `KEY.jpg`, `KEY.txt`, `KEY.json` one behind the other."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from isthmus.core.encode.pictures import SUFFIXES, Unusable
from isthmus.core.encode.pieces import MAX_BYTES, Pending, Piece, PieceSource, pending
from isthmus.core.encode.sources import Rejected

if TYPE_CHECKING:
    from isthmus.core.encode.places import File, Place
    from isthmus.core.recipe.pictures import Pictures

_MAX_TEXT = 2**20
TEXTS = frozenset({"txt", "text", "caption"})


class TarSource(PieceSource):
    """Pictures of tars, in the order in which they lie there.

    Members of one key lie together: the key is a member's path up to the first dot of its name. A picture's key is the
    tar's name without `.tar`, a slash and its own, so keys of several tars may be alike. Of two pictures with one key in a
    tar the second is rejected. Where a tar ends too soon, what lies before is taken and the rest counts as one rejection.
    """

    def __init__(self, place: Place, files: list[File], pictures: Pictures) -> None:
        self._place, self._pictures = place, pictures
        self.pieces = [Piece(file, size=file.size) for file in files]
        self.description = f"WebDataset tars of {place.name}"

    def read(self, piece: Piece) -> Iterator[Pending | Rejected]:
        """One tar, front to end, a picture at a time."""
        stem = piece.file.name.removesuffix(".tar")
        seen: set[str] = set()
        taken = 0
        with self._place.open(piece.file) as opened:
            try:
                with tarfile.open(fileobj=opened, mode="r|", bufsize=1 << 20) as tar:
                    for key, parts in _groups(tar):
                        if key in seen:
                            yield Rejected(
                                key=f"{stem}/{key}", reason="duplicate", detail="its tar has this key twice"
                            )
                            continue
                        seen.add(key)
                        taken += 1
                        yield self._picture(f"{stem}/{key}", parts)
            except tarfile.TarError as error:
                detail = f"the tar ends or is damaged after {taken} pictures: {error}"
                yield Rejected(key=piece.file.name, reason="truncated", detail=detail)

    def _picture(self, key: str, parts: dict[str, bytes | Unusable]) -> Pending | Rejected:
        wanted = self._pictures.image
        image = next((parts[name] for name in parts if name == wanted or f".{name}" in SUFFIXES), None)
        if image is None:
            held = ", ".join(f".{name}" for name in sorted(parts))[:200]
            return Rejected(key=key, reason="no-picture", detail=f"its tar has only {held}")
        if isinstance(image, Unusable):
            return Rejected(key=key, reason=image.reason, detail=image.detail)
        size = sum(len(part) for part in parts.values() if isinstance(part, bytes))
        data: bytes = image

        def fetch() -> tuple[bytes, Mapping[str, Any]]:
            return data, fields_of(parts)

        return pending(key, size + 512 * (len(parts) + 1), fetch, self._pictures, self._place.name)


def fields_of(parts: Mapping[str, bytes | Unusable]) -> dict[str, Any]:
    """The fields of a `.json` and the text files beside a picture.

    Raises:
        Unusable: `bad-caption`, when one is not JSON or not UTF-8.
    """
    fields: dict[str, Any] = {}
    for name, part in parts.items():
        if name != "json" and name not in TEXTS:
            continue
        if isinstance(part, Unusable):
            raise Unusable("bad-caption", f"{name}: {part.detail}")
        try:
            text = part.decode("utf-8-sig")
            if name == "json":
                loaded = json.loads(text)
                if not isinstance(loaded, dict):
                    raise Unusable("bad-caption", "the .json is no object")
                fields = {**loaded, **fields}
            else:
                fields[name] = text.splitlines()
        except (ValueError, RecursionError) as error:
            raise Unusable("bad-caption", f"{name}: {type(error).__name__}") from None
    return fields


def _groups(tar: tarfile.TarFile) -> Iterator[tuple[str, dict[str, bytes | Unusable]]]:
    """Members of one key together; only what may be a picture, text or JSON is read."""
    key, parts = "", dict[str, bytes | Unusable]()
    for member in tar:
        tar.members = []  # type: ignore[attr-defined]  # it would remember every member
        if not member.isfile():
            continue
        folder, slash, name = member.name.removeprefix("./").rpartition("/")
        stem, dot, kind = name.partition(".")
        if not stem or not dot:
            continue
        own = (folder + slash + stem).encode("utf-8", "replace").decode()
        if own != key and parts:
            yield key, parts
            parts = {}
        key, kind = own, kind.lower()
        text = kind == "json" or kind in TEXTS
        limit = _MAX_TEXT if text else MAX_BYTES
        if member.size > limit:
            parts[kind] = Unusable("too-many-bytes", f".{kind} has {member.size} bytes")
        else:
            opened = tar.extractfile(member)
            parts[kind] = opened.read() if opened and (text or f".{kind}" in SUFFIXES) else b""
    if parts:
        yield key, parts
