"""The recipe: one YAML file with everything about a training run. Imports pydantic and YAML only."""
