"""The trial at the start: the model is tried out on real samples, and its cut compared with the uncut model."""
