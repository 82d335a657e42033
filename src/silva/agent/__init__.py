"""Agent processes: their files, their environment, and the runner that owns and ends them."""
