"""Front door, devices, memory, forks, shared prompts: callers of methods."""
