"""Checkpoints: their folders and files, the state in them, saving while training continues."""
