"""One decoder for Llama-architecture checkpoints, and what it needs to run from a file."""
