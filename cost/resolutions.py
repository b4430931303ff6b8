"""A model's figures at resolutions that its stored profile does not have."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from isthmus.core.models.profiles import Profile
from isthmus.errors import UsageError


def figure_at(profile: Profile, figure: Mapping[int, int], resolution: int) -> int:
    """One of a profile's figures of square images, such as `train_flops`, at any resolution that the model takes.

    What a denoiser computes is a constant (text, timestep), a part linear in the latent's area (convolutions,
    projections) and a part quadratic in it (attention): three stored resolutions give the three. The nearest are used.

    Raises:
        UsageError: no resolution, the model does not take it, or too few are stored.
    """
    if resolution in figure:
        return figure[resolution]
    step = profile.factor * profile.downsampling
    if resolution < step or resolution % step:
        raise UsageError(
            f"resolution {resolution} is no multiple of {step} pixels, which this model needs",
            hint=f"{max(step, round(resolution / step) * step)} is the nearest",
        )
    if len(figure) < 3:
        stored = ", ".join(str(pixels) for pixels in sorted(figure))
        raise UsageError(f"this model's figures are known at {stored} px only, not at {resolution}")
    nearest = sorted(figure, key=lambda pixels: abs(pixels - resolution))[:3]
    areas = {pixels: Fraction(pixels**2) for pixels in nearest}
    wanted, total = Fraction(resolution**2), Fraction(0)
    for pixels in nearest:  # Lagrange's polynomial in the area
        term = Fraction(figure[pixels])
        for other in nearest:
            if other != pixels:
                term *= (wanted - areas[other]) / (areas[pixels] - areas[other])
        total += term
    return round(total)
