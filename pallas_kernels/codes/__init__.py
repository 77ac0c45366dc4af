"""Attention over codes, and the entry of a token as codes."""
