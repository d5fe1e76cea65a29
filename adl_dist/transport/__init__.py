"""Directed edges between stages: in-process and torch.distributed. Knows no module."""
