"""Training written with only torch, which users would pick instead of our methods."""
