"""The Trainer and what it puts together."""
