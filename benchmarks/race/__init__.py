"""Time to a target metric over slow links, next to what users would pick instead."""
