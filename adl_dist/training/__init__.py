"""The Trainer and its parts."""
