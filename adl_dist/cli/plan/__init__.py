"""`adl-dist plan`."""
