"""The cold start: a fresh process for each row, and what it counts there."""

import json

import pytest

from kvjax.programs import cold


@pytest.mark.slow
def test_a_warm_cache_compiles_nothing(tmp_path, capsys, monkeypatch):
  """The second process finds what the first one kept, and both count one program of all layers."""
  monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
  cold.main(cold.Args(("full",), "tiny", 64, 16, tmp_path))
  (path,) = tmp_path.glob("*/cold.json")
  empty, warm = json.loads(path.read_text())["rows"]
  assert (empty["cache"], warm["cache"]) == ("empty", "warm")
  assert empty["programs"] == warm["programs"] <= 6
  assert (empty["found"], warm["found"]) == (0, warm["programs"])
  assert empty["again"] < empty["first_token"]
  assert "first token" in capsys.readouterr().out


def test_unknown_methods_are_refused():
  with pytest.raises(ValueError, match="--methods: found 'fulll', expected one of: full"):
    cold.main(cold.Args(("fulll",)))
