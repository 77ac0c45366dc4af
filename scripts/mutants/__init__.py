"""The parts of `scripts.mutate`: places for faults, and the tests of a file."""
