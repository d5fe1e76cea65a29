"""Local processes and signals."""
