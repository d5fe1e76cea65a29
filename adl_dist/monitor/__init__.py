"""The activity of a running job: watchdog, diagnosis, trace, memory."""
