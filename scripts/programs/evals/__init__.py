"""Evaluation tasks, one family per file: what builds their rows, and what scores an answer."""
