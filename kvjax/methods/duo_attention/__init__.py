"""DuoAttention: heads that retrieve keep everything, the others sinks and a window."""
