"""Caches, plans, where a move runs: records that methods and operations hand each other."""
