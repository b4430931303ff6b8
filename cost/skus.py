"""What is in the machines that have prices: public catalogs get GPU counts wrong, so each is written down once."""

from __future__ import annotations

SKUS: dict[str, tuple[str, int]] = {
    "Standard_NC24ads_A100_v4": ("a100-80gb", 1),
    "Standard_NC48ads_A100_v4": ("a100-80gb", 2),
    "Standard_NC96ads_A100_v4": ("a100-80gb", 4),
    "Standard_ND96asr_v4": ("a100-40gb", 8),
    "Standard_ND96amsr_A100_v4": ("a100-80gb", 8),
    "Standard_NC40ads_H100_v5": ("h100-94gb", 1),
    "Standard_NC80adis_H100_v5": ("h100-94gb", 2),
    "Standard_ND96isr_H100_v5": ("h100-80gb", 8),
    "Standard_ND96isr_H200_v5": ("h200-141gb", 8),
    "Standard_ND40rs_v2": ("v100-32gb", 8),
    "Standard_NC6s_v3": ("v100-16gb", 1),
    "Standard_NC4as_T4_v3": ("t4-16gb", 1),
    "ml.g4dn.xlarge": ("t4-16gb", 1),
    "ml.g4dn.2xlarge": ("t4-16gb", 1),
    **{f"ml.g5.{size}xlarge": ("a10g-24gb", n) for size, n in (("", 1), (2, 1), (4, 1), (8, 1), (16, 1))},
    **{f"ml.g5.{size}xlarge": ("a10g-24gb", n) for size, n in ((12, 4), (24, 4), (48, 8))},
    **{f"ml.g6.{size}xlarge": ("l4-24gb", n) for size, n in (("", 1), (2, 1), (4, 1), (8, 1), (16, 1))},
    **{f"ml.g6.{size}xlarge": ("l4-24gb", n) for size, n in ((12, 4), (24, 4), (48, 8))},
    **{f"ml.g6e.{size}xlarge": ("l40s-48gb", n) for size, n in (("", 1), (2, 1), (4, 1), (8, 1), (16, 1))},
    **{f"ml.g6e.{size}xlarge": ("l40s-48gb", n) for size, n in ((12, 4), (24, 4), (48, 8))},
    # Not the count that g6e's sizes have.
    **{
        f"ml.g7e.{size}xlarge": ("rtxpro6000-96gb", n)
        for size, n in ((2, 1), (4, 1), (8, 1), (12, 2), (24, 4), (48, 8))
    },
    "ml.p4d.24xlarge": ("a100-40gb", 8),
    "ml.p4de.24xlarge": ("a100-80gb", 8),
    "ml.p5.4xlarge": ("h100-80gb", 1),
    "ml.p5.48xlarge": ("h100-80gb", 8),
    "ml.p5e.48xlarge": ("h200-141gb", 8),
    "ml.p5en.48xlarge": ("h200-141gb", 8),
    "ml.p6-b200.48xlarge": ("b200-180gb", 8),
}
"""SKU -> GPU and how many. Microsoft's and Amazon's pages of machine sizes."""

GPU_USD_PER_HOUR = {
    "t4-16gb": (0.03, 3),
    "v100-16gb": (0.1, 12),
    "v100-32gb": (0.1, 12),
    "l4-24gb": (0.1, 6),
    "a10g-24gb": (0.1, 8),
    "l40s-48gb": (0.2, 12),
    "rtxpro6000-96gb": (0.3, 20),
    "a100-40gb": (0.2, 16),
    "a100-80gb": (0.2, 16),
    "h100-80gb": (0.5, 35),
    "h100-94gb": (0.5, 35),
    "h200-141gb": (0.6, 40),
    "b200-180gb": (1.0, 60),
}
"""Dollars of one GPU for one hour outside of which a price is a mistake: of a machine twelve times the size, or in cents."""


def gpu_of(sku: str) -> tuple[str, int] | None:
    """The GPU and the number of them; None of a machine nobody wrote down. EC2's are SageMaker's without `ml.`."""
    return SKUS.get(sku) or SKUS.get(f"ml.{sku}")
