"""`adl-dist bench`."""
