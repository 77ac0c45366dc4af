"""A token's entry into a cache, and blocks on the host."""
