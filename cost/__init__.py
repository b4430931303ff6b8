"""What a training run costs: prices, an estimator of speed, whole-run estimates, comparisons of offers and measurements."""
