"""Checkpoints: folders on disk, what is in them, saving beside training."""
