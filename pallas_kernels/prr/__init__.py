"""PRR: speculation and repair."""
