"""The studies of ART, on activations small enough to know the numbers of."""

import json

import numpy as np
import pytest

from kvjax.analysis import early_stops
from scripts.studies import art_study
from tests.eval_data import recording


@pytest.mark.parametrize("order", art_study.ORDERS)
def test_walks_are_those_of_each_query_by_itself(order):
  """All queries of a layer are taken together; keys that one does not see have no weight."""
  rng = np.random.default_rng(0)
  arrays = recording(rng.normal(size=(64, 40)))
  for name in "qk":
    arrays[f"layer3/{name}"] = rng.normal(scale=2, size=arrays[f"layer3/{name}"].shape)
  for (_, tokens, walk), i in zip(art_study.walks(arrays, 4, 6, order), (2, 3), strict=True):
    index = np.arange(tokens)[::-1]
    index = np.roll(index, 4) if order == "sinks" else index
    q, k, v = (arrays[f"layer3/{name}"] for name in "qkv")
    alone = early_stops.walk(q[:, :, i], k[:, None, index], v[:, None, index], 4)
    for found, expected in zip(walk, alone, strict=True):
      np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), atol=1e-12)


def test_constant_values_stop_when_patience_ends():
  found = art_study.study(recording(np.ones((64, 40))), 4, 6, "newest")
  costs = found["costs"]
  assert found["walks"] == 4
  assert costs["ART"]["visited"] == pytest.approx((6 / 8 + 6 / 16) / 2)
  assert costs["without patience"]["visited"] == pytest.approx((2 / 8 + 2 / 16) / 2)
  assert costs["ART"]["stopped"] == 1 and costs["ART"]["error"] == pytest.approx(0, abs=1e-12)
  agreed = found["agreement"]["1e-05"]["all"]
  assert agreed["agree"] == agreed["agree_of_ended"] == 1 and agreed["ended"] == 4
  assert found["bounds"]["1e-05"]["assumption"] == 1


def test_a_group_goes_on_until_all_its_heads_are_stable():
  """Key 40, of another value, is all that head 1 looks at; head 0 does not see it.

  Newest first it lies in the 6th tile of 16. Head 0 stops there, head 1 after five calm tiles more.
  """
  arrays = recording(np.ones((64, 40)))
  arrays["layer3/v"][0, 40] = -1
  arrays["layer3/k"][0, 40, :2] = -60, 12
  arrays["layer3/q"][:, 1, :, :2] = 0, 40**0.5
  found = art_study.study(arrays, 4, 6, "newest")
  for tau in ("0.01", "1e-05"):
    lengths = found["lengths"][tau]["64 tokens"]
    ends = {"0.01": (6, 11), "1e-05": (6, 16)}[tau]
    assert lengths == {"query head": sum(ends) / 32, "group": ends[1] / 16}
    # At 32 tokens key 40 is not there yet: both end in the 6th tile of 8.
    shares = [(6 / 8 + end / 16) / 2 for end in ends]
    heads = found["heads"][tau][3]
    assert heads["query head"] == [pytest.approx(shares, abs=1e-4)]
    assert heads["group"] == [[pytest.approx(shares[1], abs=1e-4)]]
    stopped = {"0.01": (4, 4), "1e-05": (3, 2)}[tau]
    counts = [found[name][tau]["stops"] for name in ("bounds", "group_bounds")]
    assert tuple(counts) == stopped
    assert found["agreement"][tau]["all"]["walks"] == 4
    assert found["group_agreement"][tau]["all"]["walks"] == 2
  assert found["groups"]["tau 0.01"]["visited"] > found["costs"]["tau 0.01"]["visited"]
  assert found["groups"]["tau 0.01, 1 splits"] == found["groups"]["tau 0.01"]


def test_short_walks_cannot_stop():
  """Of 16 tiles two splits have 8, more than p + 1 = 6; of 8 tiles they have 4."""
  found = art_study.study(recording(np.ones((64, 40))), 4, 6, "newest")["splits"]
  able = [found[f"tau 1e-05, {count} splits"]["able"] for count in art_study.SPLITS]
  assert able == [1, 0.5, 0, 0]
  assert found["tau 1e-05, 2 splits"]["stopped_of_able"] == 1
  assert np.isnan(found["tau 1e-05, 8 splits"]["stopped_of_able"])


def test_direction_decides_where_the_scale_does_not():
  """Values that turn by as little as they move: φ holds walks back that τ lets go."""
  angle = np.linspace(0, 3, 64)
  values = np.zeros((64, 40))
  values[:, ::2] = 1e-3 * np.cos(angle)[:, None]
  values[:, 1::2] = 1e-3 * np.sin(angle)[:, None]
  found = art_study.study(recording(values), 4, 6, "newest")["without_direction"]
  assert found["1e-05"]["walks"] == found["0.01"]["walks"] == 4
  assert found["0.01"]["same_stop"] < found["1e-05"]["same_stop"] == 4


def test_a_heavy_first_token_is_missed_from_the_end():
  values = np.ones((64, 40))
  values[0] = -1
  missed, read = (
    art_study.study(recording(values, heat=8.0), 4, 6, order)["costs"]["ART"]["error"]
    for order in art_study.ORDERS
  )
  assert missed > 1.5 and read < 0.1


@pytest.mark.slow
def test_what_is_written(tmp_path, capsys):
  rng = np.random.default_rng(0)
  arrays = recording(rng.normal(size=(64, 40)))
  path = tmp_path / "recorded.npz"
  about = json.dumps({"model": "tiny", "text": "noise"})
  np.savez(path, about=np.asarray(about), **arrays)
  art_study.main(art_study.Args(path, tile=4, least=6, out=tmp_path / "out"))
  names = {p.name for p in (tmp_path / "out").iterdir()}
  for order in art_study.ORDERS:
    stem = f"tile4_64_{order}"
    assert {f"{stem}.txt", f"{stem}.json"} <= names
    text = (tmp_path / "out" / f"{stem}.json").read_text("utf-8")
    assert json.loads(text)["walks"] == 4 and "NaN" not in text
  assert "tiny on noise, 64 tokens\n4 walks, newest tile first" in capsys.readouterr().out
  with pytest.raises(ValueError, match="recording: found no query that sees 99 whole tiles of 4"):
    art_study.main(art_study.Args(path, tile=4, least=99, out=tmp_path))
  with pytest.raises(FileNotFoundError, match="recording: found no"):
    art_study.main(art_study.Args(tmp_path / "none.npz"))


def test_what_is_no_recording_is_named(tmp_path):
  for damage in (b"junk", b"PK\3\4 cut off"):
    (path := tmp_path / "x.npz").write_bytes(damage)
    with pytest.raises(ValueError, match=r"x\.npz: found .*, expected a file of kvjax record"):
      art_study.main(art_study.Args(path))
