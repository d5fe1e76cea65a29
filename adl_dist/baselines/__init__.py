"""Training with only torch, as the alternative to our methods."""
