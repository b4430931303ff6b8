"""Batches of pictures through the encoders into a writer, counted and told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from isthmus.core.encode.captions import CaptionEncoder, not_finite
from isthmus.core.encode.filters import FILTER, allot
from isthmus.core.encode.hashes import FIELDS
from isthmus.core.encode.prepare import Prepared, as_tensor
from isthmus.core.encode.sources import Rejected

if TYPE_CHECKING:
    from isthmus.core.encode.autoencoders import Autoencoder
    from isthmus.core.encode.behind import WriteBehind

_AUTOENCODER_PIXELS = 4 * 2**20  # of one call: 64 pictures of 256 px, 4 of 1024 px


@dataclass(slots=True)
class Progress:
    """How far encoding is: of this rank, and at the end of all."""

    written: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    """Reason -> count; the recipe's filters among them, as `filter-...`."""
    captions_left_out: int = 0
    """Captions beyond the number stored for each picture."""
    told: dict[str, int] = field(default_factory=dict)
    """Field that is kept -> written pictures that have it."""
    unfit: dict[str, int] = field(default_factory=dict)
    """Field -> written pictures of which it was there and not of its kind, so that it is null."""
    seconds: float = 0.0
    before: int = 0
    """Of those written or rejected, what was done before this run, or by other ranks."""
    expected: int | None = None
    """Pictures there are for this rank, about."""

    @property
    def rate(self) -> float:
        """Pictures a second of this run, rejected ones among them."""
        return (self._seen - self.before) / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Until all are done, about; None when nobody can tell."""
        if self.expected is None or not self.rate:
            return None
        return max(0, self.expected - self._seen) / self.rate

    def note_fields(self, fields: Mapping[str, float | str | None], unfit: Sequence[str]) -> None:
        """Counts what is kept of a written picture's fields."""
        for name, value in fields.items():
            self.told[name] = self.told.get(name, 0) + (value is not None)
        for name in unfit:
            self.unfit[name] = self.unfit.get(name, 0) + 1

    def fields_in_words(self) -> list[str]:
        """Of how many samples each field is kept, and what was not of its kind, a line each; none where nothing is kept."""
        kept = {name: count for name, count in self.told.items() if name not in FIELDS}
        if not kept:
            return []
        told = ", ".join(
            f"{name} of {count:,} sample{'' if count == 1 else 's'}" if count else f"{name} of none"
            for name, count in kept.items()
        )
        unfit = [
            f"{name}: what {count:,} sample{'' if count == 1 else 's'} had was not of its kind, and is null"
            for name, count in self.unfit.items()
        ]
        return [f"kept {told}", *unfit]

    @property
    def _seen(self) -> int:
        return self.written + sum(self.rejected.values())

    def __str__(self) -> str:
        left = self.seconds_left
        return (
            f"encoded {self.written} pictures"
            + (f" of about {self.expected}" if self.expected else "")
            + f", rejected {sum(self.rejected.values())}, {self.rate:.1f} pictures/s"
            + ("" if not left else f", {left / 60:.0f} min left" if left >= 90 else f", {left:.0f} s left")
        )


class Reporter:
    """Tells the progress at intervals."""

    def __init__(
        self, report: Callable[[Progress], None] | None, interval: float, clock: Callable[[], float]
    ) -> None:
        self._report, self._interval, self._clock = report, interval, clock
        self._started = self._reported = clock()
        self.progress = Progress()

    def report(self, *, final: bool = False) -> None:
        """Tells it, when it is time."""
        now = self._clock()
        self.progress.seconds = now - self._started
        if self._report and (final or now - self._reported >= self._interval):
            self._reported = now
            self._report(self.progress)


class UnitJob:
    """The encoders at work on the batches of one unit."""

    def __init__(
        self,
        writer: WriteBehind,
        autoencoder: Autoencoder,
        captions: CaptionEncoder,
        count: int,
        reporter: Reporter,
    ) -> None:
        self._writer, self._autoencoder, self._captions, self._count = writer, autoencoder, captions, count
        self._reporter, self.own = reporter, Progress()
        self.rejected = list[Rejected]()
        self._keys: set[str] = set()

    def record(self) -> dict[str, Any]:
        """What the ledger keeps of it, beside its shards."""
        return {
            "written": self.own.written,
            "captions_left_out": self.own.captions_left_out,
            "counts": self.own.rejected,
            "rejected": [item.to_json() for item in self.rejected],
            "told": self.own.told,
            "unfit": self.own.unfit,
        }

    def reject(self, item: Rejected) -> None:
        """Counts what is left out, and lists it when that was not the recipe's own wish."""
        if not item.reason.startswith(FILTER):
            self.rejected.append(item)
        for progress in (self.own, self._reporter.progress):
            progress.rejected[item.reason] = progress.rejected.get(item.reason, 0) + 1
        self._reporter.report()

    def write(self, batch: Sequence[Prepared]) -> None:
        """Encodes pictures of one bucket and size class, and hands them to the writer."""
        from isthmus.storage.shards import Sample

        chosen = [allot(item.captions, item.weights, self._count) for item in batch]
        captions = self._captions.encode([text for texts in chosen for text in texts])
        latents = {
            resolution: self._latents([item.pixels[resolution] for item in batch])
            for resolution in batch[0].pixels
        }
        for row, item in enumerate(batch):
            if item.key in self._keys:
                self.reject(Rejected(key=item.key, reason="duplicate", detail="another picture has this key"))
                continue
            self._keys.add(item.key)
            own = {resolution: (mean[row], logvar[row]) for resolution, (mean, logvar) in latents.items()}
            texts = chosen[row]
            encoded = [captions[text] for text in texts]
            problem = not_finite(own, encoded)
            if problem:
                self.reject(Rejected(key=item.key, reason="non-finite", detail=problem))
                continue
            self._writer.add(
                Sample(
                    key=item.key,
                    captions=list(texts),
                    text=encoded,
                    latents=own,
                    bucket=item.bucket,
                    size_class=item.size_class,
                    source=item.source,
                    original_size=(item.original_size.height, item.original_size.width),
                    crop=(item.crop.top, item.crop.left, item.crop.height, item.crop.width),
                    flipped=False,
                    fields=item.fields,
                )
            )
            for progress in (self.own, self._reporter.progress):
                progress.written += 1
                progress.note_fields(item.fields, item.unfit)
                progress.captions_left_out += len(set(item.captions) - set(texts))
        self._reporter.report()

    def _latents(self, pictures: list[Any]) -> tuple[Any, Any]:
        """Unscaled mean and log variance, fp16 [b, C, H, W], of pictures of one shape."""
        height, width = pictures[0].shape[:2]
        at_once = max(1, _AUTOENCODER_PIXELS // (height * width))
        parts = [
            self._autoencoder.encode(as_tensor(pictures[start : start + at_once]))
            for start in range(0, len(pictures), at_once)
        ]
        mean, logvar = (np.concatenate([part[index].numpy() for part in parts]) for index in (0, 1))
        with np.errstate(over="ignore"):
            # What fp16 cannot hold becomes infinite and is rejected.
            return mean.astype(np.float16), logvar.astype(np.float16)
