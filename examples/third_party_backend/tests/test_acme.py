"""Acme passes the suite that every backend passes."""

from __future__ import annotations

import pytest

from isthmus.backends.conformance import BackendConformance
from isthmus.backends.registry import get_backend
from isthmus.backends.spec import Backend


class TestAcme(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        return get_backend("acme")
