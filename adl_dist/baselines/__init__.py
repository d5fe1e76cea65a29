"""Training written with torch alone, which users would pick instead: measured in turn with our own runs."""
