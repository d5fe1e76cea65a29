"""Where ranks exist: world, control plane, coordinator, workers, checkpoints, trainer."""
