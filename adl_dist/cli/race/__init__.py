"""`adl-dist race`."""
