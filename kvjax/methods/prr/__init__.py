"""PRR: predict the selection, attend early, repair the misses."""
