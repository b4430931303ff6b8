"""What a training run costs. So far the arithmetic; prices, estimator and comparison are a later version."""
