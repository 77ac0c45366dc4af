"""Studies of the papers' claims and comparisons with other code, run from a checkout."""
