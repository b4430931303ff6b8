"""The Azure ML backend: a recipe becomes a command job, submitted and followed through azure-ai-ml."""
