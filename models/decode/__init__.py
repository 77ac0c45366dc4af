"""Prompts and generation over any method's caches."""
