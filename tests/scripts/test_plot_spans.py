"""The pictures of spans: their numbers from a tiny model, and that they are drawn."""

import numpy as np
import pytest

from kvjax import Ltri
from kvjax.testing.tiny import TOKENS, model
from scripts.studies import sheets
from scripts.studies.plot_spans import RATES, draw_spans, draw_vectors, measure


@pytest.mark.slow
def test_numbers_and_pictures(tmp_path):
  method = Ltri(2, 6, 4, 2, chunk=8, held=2, spans=2, vectors=4, last=0, rate=(2.0,))
  ids = TOKENS[0].tolist()
  found = measure(model(), ids, method)
  assert found["tokens"] == 2 + 9 * 4 - 1 and found["blocks"] == (37 - 6 - 2) // 4
  assert len(found["layers"]) == 4
  for layer in found["layers"]:
    assert np.triu(layer["map"], 1).max() == 0 and layer["map"][:3].max() > 0
    assert all(0 <= a < b <= 3 for a, b in layer["spans"])
    counts = [layer["vectors"][rate] for rate in RATES]
    assert counts == sorted(counts, reverse=True) and counts[0] <= 4
  for draw in (draw_spans, draw_vectors):
    sheets.write(tmp_path / "picture.png", draw(found))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
  with pytest.raises(ValueError, match="--length: found 5 tokens, expected 6 or more"):
    measure(model(), ids[:5], method)
