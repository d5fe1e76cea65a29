"""The trial at the start: real samples, and a comparison with the model."""
