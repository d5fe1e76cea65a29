"""Directed edges between stages, within and between processes."""
