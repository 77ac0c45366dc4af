"""Studies of the papers' claims and comparisons with other code, run from a checkout."""

STARTS = "1862-Lincoln-1", "1934-Roosevelt-1", "1790-Washington-1", "1987-Reagan-1"
