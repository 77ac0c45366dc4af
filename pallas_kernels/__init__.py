"""Pallas GPU kernels, one file per operation; `kvjax.dispatch` imports them lazily."""
