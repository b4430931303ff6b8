"""The local backend passes the suite that every backend passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.backends.conformance import BackendConformance
from isthmus.backends.registry import get_backend
from isthmus.backends.spec import Backend


class TestLocal(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        return get_backend("local")
