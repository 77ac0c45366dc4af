"""Meshes of the machine that the tests run on."""

import jax
import pytest

import kvjax


def mesh_of(heads=1, slots=1):
  """A mesh of heads × slots devices; skips where there are fewer."""
  if heads * slots > jax.device_count():
    pytest.skip(f"needs {heads * slots} devices, found {jax.device_count()}")
  return kvjax.make_mesh(heads, slots)
