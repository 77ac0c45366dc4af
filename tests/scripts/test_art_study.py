"""The studies of ART, on activations small enough to know the numbers of."""

import json

import numpy as np
import pytest

from kvjax.analysis import early_stops
from scripts.studies import art_study
from tests.eval_data import recording


def test_walks_see_whole_tiles_in_order():
  values = np.repeat(np.arange(64.0)[:, None], 40, 1)
  found = {o: list(art_study.walks(recording(values), 4, 6, o)) for o in art_study.ORDERS}
  assert [where for *where, _ in found["newest"]] == [[3, 32], [3, 64]]
  newest, sinks = (found[o][0][-1].u[0, 0, :, 0] for o in ("newest", "sinks"))
  np.testing.assert_allclose(newest, [29.5 - 4 * t for t in range(8)])
  np.testing.assert_allclose(sinks, [1.5, *newest[:-1]])


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


@pytest.fixture
def few(monkeypatch):
  """Steps of 49 to 60 tokens, after four that begin an order."""
  for name, value in {"ENDS": (60,), "STEPS": 12, "WINDOW": 4}.items():
    monkeypatch.setattr(art_study, name, value)


def every_position(values, heat=0.0):
  arrays = recording(values, heat=heat)
  q = np.zeros((1, 2, 64, 40), np.float16)
  q[..., 0] = 40**0.5
  return {**arrays, "layer3/q": q, "positions": np.arange(64, dtype=np.int32)}


def walked(segment, rule, tau):
  """Tiles read at each step, of a segment whose order does not change."""
  steps = [art_study.step_of(segment, i, 4, rule, segment.begun) for i in range(12)]
  found = art_study.Reads()
  return [int(read[0]) for read in art_study.walk_steps(steps, rule, tau, found)], found.summary()


def test_steps_of_constant_values(few):
  """A walk takes p + 1 tiles by itself; a known length falls by a tile a step to that and one."""
  (segment,) = art_study.segments(every_position(np.ones((64, 40))), 4)
  counts = [-(-n // 4) for n in range(49, 61)]
  assert segment.tokens.tolist() == [*range(49, 61)] and counts[0] == 13
  np.testing.assert_allclose(segment.mass[0, 0, 0], [4] * 12 + [1, 0, 0])
  np.testing.assert_allclose(segment.begun[0, :3], np.mean([4 / n for n in range(45, 49)]))
  read, summary = walked(segment, art_study.Rule("sinks", True), 0.01)
  assert read == [6] * 12 and summary["error"] == pytest.approx(0, abs=1e-12)
  assert summary["read"] == pytest.approx(np.mean([6 / n for n in counts]))
  read, summary = walked(segment, art_study.Rule("sinks", True, 1), 0.01)
  assert read == [13, 12, 11, 10, 9, 8, 7, 7, 7, 7, 7, 7] and summary["longer"] == 0
  values = np.ones((64, 40))
  values[56] = 30  # from the ninth step on 7 tiles do not do, nor 10: twice it reads beyond them
  (turned,) = art_study.segments(every_position(values), 4)
  read, summary = walked(turned, art_study.Rule("sinks", True, 1), 0.02)
  assert read == [13, 12, 11, 10, 9, 8, 7, 7, 15, 15, 15, 15] and summary["longer"] == 2 / 12
  read, _ = walked(segment, art_study.Rule("newest", True, 1), 0.0)
  assert read == counts


def test_steps_by_mass_find_a_heavy_tile(few):
  """Key 20 has nearly all mass: read third by mass, after the first tile and the newest."""
  values = np.ones((64, 40))
  values[20] = -1
  arrays = every_position(values)
  arrays["layer3/k"][0, 20, 0] = 9
  (segment,) = art_study.segments(arrays, 4)
  rule = art_study.Rule("mass", True)
  step = art_study.step_of(segment, 0, 4, rule, segment.begun)
  assert step.index[0, :3].tolist() == [0, 12, 5]
  found = art_study.Reads()
  art_study.by_mass(segment, 4, rule, 0.01, found)
  share = np.ravel(found.share)
  assert share[0] == 1 and (share[1:] < 0.7).all() and found.summary()["error"] < 1e-2


@pytest.mark.slow
def test_steps_are_written_with_the_text_of_each_fit(few, tmp_path):
  rng, paths = np.random.default_rng(0), []
  for name in ("one", "two"):
    arrays = every_position(rng.normal(size=(64, 40)))
    paths.append(tmp_path / f"{name}.npz")
    np.savez(paths[-1], about=np.asarray(json.dumps({"model": "tiny", "text": name})), **arrays)
  args = art_study.Args(paths[0], tile=4, fit=(paths[1],), out=tmp_path / "out")
  art_study.main(args)
  found = json.loads((tmp_path / "out" / "steps4_one.json").read_text("utf-8"))
  assert found["fitted_on"] == ["two"] and set(found["rules"]) == set(art_study.RULES)
  assert all(row["fitted"]["error"] <= art_study.ERROR for row in found["rules"].values())
  with pytest.raises(ValueError, match="--fit: found the tested text, one, expected others"):
    art_study.main(art_study.Args(paths[0], tile=4, fit=(paths[0],), out=tmp_path))
  arrays.pop("positions")
  arrays["positions"] = np.arange(0, 64, 2, dtype=np.int32)
  with pytest.raises(ValueError, match="recording: found no query of each of 45 to 60 tokens"):
    next(art_study.segments(arrays, 4))
