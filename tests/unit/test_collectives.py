"""What exchanges gradients between GPUs: NCCL, or a library that a cloud's image brings and registers with torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.backends.sagemaker.environment import SMDDP
from isthmus.core.train.parallel import collectives
from isthmus.errors import UsageError

LIBRARY = """
import torch.distributed as dist
dist.Backend.register_backend("fastlane", lambda *words: None, devices=["cuda"])
"""


def test_nccl_unless_told() -> None:
    assert collectives({}) == "nccl"


def test_a_library_that_registers_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fastlane_for_torch.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    assert collectives({"ISTHMUS_COLLECTIVES": "fastlane_for_torch:fastlane"}) == "fastlane"
    with pytest.raises(UsageError, match="does not register 'slowlane'"):
        collectives({"ISTHMUS_COLLECTIVES": "fastlane_for_torch:slowlane"})


def test_an_image_without_the_library_is_one_line() -> None:
    with pytest.raises(UsageError, match="the image does not have smdistributed"):
        collectives({"ISTHMUS_COLLECTIVES": SMDDP})
