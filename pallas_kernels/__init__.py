"""Pallas GPU kernels, by operation; `kvjax.ops` imports them lazily."""

if __name__ != "kvjax.kernels":
  raise ImportError(f"found {__name__}, expected kvjax.kernels: the folder is a link there")
