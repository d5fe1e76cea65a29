"""What a running job is doing: activity, watchdog, diagnosis, trace, memory."""
