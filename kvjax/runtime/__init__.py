"""Callers of methods: the front door, devices, memory, forks, shared prompts."""
