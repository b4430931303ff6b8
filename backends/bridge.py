"""Jobs as steps of the clouds' own pipelines: `to_model_trainer` (SageMaker SDK) and `to_command` (azure-ai-ml)."""

from __future__ import annotations

from isthmus.backends.azure.bridge import to_command
from isthmus.backends.sagemaker.bridge import to_model_trainer

__all__ = ["to_command", "to_model_trainer"]
