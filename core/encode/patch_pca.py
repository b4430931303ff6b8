"""A linear autoencoder in closed form: the principal components of picture patches.

There are no weights to download and nothing is trained: one eigenvalue problem over the patches' covariance gives
the best linear code of its width (Eckart and Young, 1936). It serves the quickstart's flat 32-pixel shapes; it
is no substitute for a learned autoencoder on photographs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from isthmus.core.encode.fingerprints import fingerprint
from isthmus.errors import DataError, DatasetNotFound, UsageError

if TYPE_CHECKING:
    from torch import Tensor

LOG_VARIANCE = -14.0
"""Every latent's log variance: a linear code has none, and e^-7 is below what fp16 keeps of a latent."""
WEIGHTS, CONFIG = "autoencoder.safetensors", "config.json"


class PatchPCA:
    """Encodes each `factor` x `factor` patch as its `latent_channels` leading principal components.

    Args:
        centre: the mean patch, [3 * factor * factor], pixels in [-1, 1].
        components: orthonormal rows, [latent_channels, 3 * factor * factor].
        factor: pixels of a patch's side.
        scaling_factor: brings the largest component's standard deviation to 2 for training.
        psnr_db: peak signal-to-noise ratio of the pictures it was fitted to, reconstructed.
    """

    kind = "patch_pca"
    shift_factor = 0.0

    def __init__(
        self, centre: Tensor, components: Tensor, *, factor: int, scaling_factor: float, psnr_db: float
    ) -> None:
        self.centre, self.components = centre.float(), components.float()
        self.factor, self.latent_channels = factor, components.shape[0]
        self.scaling_factor, self.psnr_db = scaling_factor, psnr_db

    @classmethod
    def fit(cls, pictures: Iterable[Tensor], *, factor: int, latent_channels: int) -> PatchPCA:
        """The principal components of the patches of some pictures.

        Args:
            pictures: batches [b, 3, H, W] in [-1, 1]; H and W multiples of `factor`, and free to differ
                between batches. Taken one at a time, so memory does not grow with their number.

        Raises:
            UsageError: there is no picture, or a patch has fewer values than `latent_channels`.
        """
        width = 3 * factor * factor
        if latent_channels > width:
            raise UsageError(
                f"encoders.autoencoder.latent_channels {latent_channels} is more than the {width} values of a patch"
                f" of encoders.autoencoder.factor {factor}"
            )
        count, total = 0, torch.zeros(width, dtype=torch.float64)
        products = torch.zeros(width, width, dtype=torch.float64)
        for batch in pictures:
            rows = _patches(batch.double(), factor).reshape(-1, width)
            count += len(rows)
            total += rows.sum(0)
            products += rows.T @ rows
        if not count:
            raise UsageError("there is no picture to fit the autoencoder to")
        centre = total / count
        variances, vectors = torch.linalg.eigh(products / count - torch.outer(centre, centre))
        components = vectors.flip(1)[:, :latent_channels].T
        # An eigenvector's sign is arbitrary; this makes it the same wherever it is computed.
        largest = components.gather(1, components.abs().argmax(1, keepdim=True))
        components = components * largest.sign()
        # What a linear code loses is the variance it leaves out; of a range of 2 the peak power is 4.
        error = max(variances.flip(0)[latent_channels:].clamp_min(0).sum().item() / width, 1e-12)
        deviation = max(variances[-1].item(), 1e-6) ** 0.5
        return cls(
            centre,
            components,
            factor=factor,
            scaling_factor=float(f"{2.0 / deviation:.6g}"),
            psnr_db=round(10 * math.log10(4 / error), 2),
        )

    @property
    def fingerprint(self) -> str:
        """Of weights and settings."""
        settings = {name: value for name, value in self._config().items() if name != "psnr_db"}
        return fingerprint(settings, self._weights())

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """[b, 3, H, W] in [-1, 1] -> mean and log variance, each fp32 [b, C, H / factor, W / factor]."""
        rows, columns = images.shape[2] // self.factor, images.shape[3] // self.factor
        values = (_patches(images.float().cpu(), self.factor) - self.centre) @ self.components.T
        mean = values.transpose(1, 2).reshape(len(images), self.latent_channels, rows, columns)
        return mean, torch.full_like(mean, LOG_VARIANCE)

    def decode(self, latents: Tensor) -> Tensor:
        """Unscaled latents [b, C, h, w] -> pictures [b, 3, h * factor, w * factor]; may leave [-1, 1] a little."""
        count, _, rows, columns = latents.shape
        factor = self.factor
        values = latents.float().cpu().flatten(2).transpose(1, 2) @ self.components + self.centre
        cells = values.reshape(count, rows, columns, 3, factor, factor).permute(0, 3, 1, 4, 2, 5)
        return cells.reshape(count, 3, rows * factor, columns * factor)

    def save(self, folder: str) -> None:
        """Writes weights and settings into a folder or URI. Raises StorageError, PlaceNotFound."""
        from safetensors.torch import save

        from isthmus.storage.filesystems import filesystem, join, make_folder, storage_errors

        files, path = filesystem(folder)
        with storage_errors("write", folder):
            make_folder(files, path, folder)
        for name, content in (
            (WEIGHTS, save(self._weights())),
            (CONFIG, json.dumps(self._config(), indent=2, sort_keys=True).encode() + b"\n"),
        ):
            target, file = filesystem(join(folder, name))
            with storage_errors("write", folder):
                target.pipe_file(file, content)

    @classmethod
    def load(cls, folder: str) -> PatchPCA:
        """What :meth:`save` wrote.

        Raises:
            DatasetNotFound: there is nothing.
            DataError: it is something else, or damaged.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        from isthmus.storage.filesystems import filesystem, join

        try:
            content = {}
            for name in (WEIGHTS, CONFIG):
                files, path = filesystem(join(folder, name))
                content[name] = bytes(files.cat_file(path))
        except FileNotFoundError:
            raise DatasetNotFound(f"no patch_pca autoencoder at {folder}") from None
        try:
            config, weights = json.loads(content[CONFIG]), load(content[WEIGHTS])
            centre, components, factor = weights["centre"], weights["components"], int(config["factor"])
            if centre.shape != (3 * factor * factor,) or components.shape[1:] != centre.shape:
                raise ValueError(f"weights of shape {list(components.shape)} for patches of {factor} pixels")
            return cls(
                centre,
                components,
                factor=factor,
                scaling_factor=config["scaling_factor"],
                psnr_db=config["psnr_db"],
            )
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise DataError(f"the autoencoder cannot be read: {error}", where=folder) from None

    def _weights(self) -> dict[str, Tensor]:
        return {"centre": self.centre.contiguous(), "components": self.components.contiguous()}

    def _config(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "factor": self.factor,
            "latent_channels": self.latent_channels,
            "scaling_factor": self.scaling_factor,
            "shift_factor": self.shift_factor,
            "log_variance": LOG_VARIANCE,
            "psnr_db": self.psnr_db,
        }


def _patches(images: Tensor, factor: int) -> Tensor:
    """[b, 3, H, W] -> [b, number of patches, 3 * factor * factor]: rows of patches, each [3, factor, factor]."""
    count, channels, height, width = images.shape
    cells = images.reshape(count, channels, height // factor, factor, width // factor, factor)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(count, -1, channels * factor * factor)
