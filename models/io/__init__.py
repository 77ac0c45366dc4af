"""Checkpoints and tokenizers: safetensors, GGUF, Orbax, Hugging Face folders."""
