"""One small module for each command group; no logic."""
