"""Makes tests/helpers importable and offers what several rooms' tests share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "helpers"))


@pytest.fixture(scope="session")
def latents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny synthetic latent datasets, one for each family's text layout: family -> root."""
    from training import make_latents

    root = tmp_path_factory.mktemp("latents")
    return {family: make_latents(root / family, family) for family in ("dit", "unet", "mmdit")}
