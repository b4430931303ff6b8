"""Makes tests/helpers importable and offers what several rooms' tests share."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

from paper import paper  # noqa: F401
from servers import azurite, blob, faulty, moto, nginx, no_credentials, s3  # noqa: F401

# Started in the background, as by `nohup make test &`, this process and all its children would ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# An example may take as long as the machine's other work makes it; what shall be fast is timed on purpose elsewhere.
settings.register_profile("house", deadline=None)
settings.load_profile("house")


@pytest.fixture(scope="session")
def latents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny synthetic latent datasets, one for each family's text layout: family -> root."""
    from training import make_latents

    root = tmp_path_factory.mktemp("latents")
    return {
        family: make_latents(root / family, family) for family in ("dit", "unet", "mmdit", "sana", "flux")
    }
