"""SageMaker training jobs: the recipe as one CreateTrainingJob request, submitted and followed with boto3."""
