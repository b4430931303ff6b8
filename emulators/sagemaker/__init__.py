"""A SageMaker that really runs training jobs."""
