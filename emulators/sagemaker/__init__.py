"""A SageMaker that really runs training jobs, for boto3 and everything that is built on it."""

from isthmus.emulators.image import Image
from isthmus.emulators.sagemaker.cloud import SageMakerEmulator
from isthmus.emulators.sagemaker.refusals import REFUSALS, Refusal

__all__ = ["REFUSALS", "Image", "Refusal", "SageMakerEmulator"]
