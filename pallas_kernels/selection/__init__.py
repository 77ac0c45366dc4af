"""Scores of keys and pages, and the best of them."""
