"""From the command line to typed settings and the objects they name."""
