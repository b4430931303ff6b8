"""Training: loop, parallelism, objective, stages, EMA, checkpoints."""
