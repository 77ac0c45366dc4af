"""The parts of `scripts.tools.mutate`: places for faults, and the tests of a file."""
