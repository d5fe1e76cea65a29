"""Checkpoints: their folders, files and state, and background saves."""
