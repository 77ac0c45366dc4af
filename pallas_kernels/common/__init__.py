"""Parts that kernels share: tiles, split-K, searches, the cuts of each device."""
