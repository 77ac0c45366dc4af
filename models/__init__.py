"""One decoder for Llama-architecture checkpoints, and what it needs to run from a file."""

if __name__ != "kvjax.models":
  raise ImportError(f"found {__name__}, expected kvjax.models: the folder is a link there")
