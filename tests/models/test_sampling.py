"""Drawing tokens against a NumPy oracle, and texts that end at stop strings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.models.decode.sampling import Sampling, draw, filtered
from kvjax.models.decode.stopping import RowText
from kvjax.models.io.tokenizer import TextStream, Tokenizer
from tests.tiny_tokenizers import FAMILIES

FILTER, DRAW = jax.jit(filtered), jax.jit(draw)


def oracle(logits, sampling):
  """Probabilities [V] in float64, filter by filter."""
  x = logits.astype(np.float64) / sampling.temperature
  p = np.exp(x - x.max())
  p /= p.sum()
  if sampling.top_k is not None:
    kth = np.sort(p)[::-1][min(sampling.top_k, len(p)) - 1]
    p = np.where(p >= kth, p, 0)
    p /= p.sum()
  if sampling.top_p < 1:
    order = np.sort(p)[::-1]
    count = np.searchsorted(np.cumsum(order), sampling.top_p) + 1  # the fewest that reach p
    p = np.where(p >= order[min(count, len(p)) - 1], p, 0)
    p /= p.sum()
  p = np.where(p >= sampling.min_p * p.max(), p, 0)
  return p / p.sum()


def probabilities(logits, sampling):
  return np.asarray(jax.nn.softmax(FILTER(logits, sampling.knobs(logits.shape[1])), -1))


def test_worked_example():
  """p = (1/2, 1/4, 1/8, 1/16, 1/16): each filter alone, and all in order."""
  logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.0625, 0.0625]]))

  def kept(**settings):
    return (probabilities(logits, Sampling(1.0, **settings)) > 0).sum()

  assert kept() == 5
  assert kept(top_k=2) == 2
  assert kept(top_k=4) == 5  # the fifth ties with the fourth
  assert kept(top_p=0.5) == 1
  assert kept(top_p=0.51) == 2
  assert kept(min_p=0.25) == 3
  # Of the first three, renormalised to (4/7, 2/7, 1/7), two sum to 6/7.
  assert kept(top_k=3, top_p=0.85) == 2
  assert kept(top_p=0.87) == 3
  two = probabilities(logits, Sampling(1.0, top_k=2))[0]
  np.testing.assert_allclose(two, [2 / 3, 1 / 3, 0, 0, 0], rtol=1e-6)


@given(
  seed=st.integers(0, 1000),
  temperature=st.floats(0.1, 3.0),
  top_k=st.none() | st.integers(1, 40),
  top_p=st.just(1.0) | st.floats(0.05, 0.99),
  min_p=st.just(0.0) | st.floats(0.01, 0.9),
)
def test_filters_equal_the_oracle(seed, temperature, top_k, top_p, min_p):
  """Rows at once, some tokens forbidden (−inf); at float32 no token is near a threshold."""
  rng = np.random.default_rng(seed)
  logits = rng.standard_normal((3, 33)).astype(np.float32) * 3
  logits[1, ::4] = -np.inf
  sampling = Sampling(temperature, top_k, top_p, min_p)
  want = np.stack([oracle(row, sampling) for row in logits])
  np.testing.assert_allclose(probabilities(logits, sampling), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
  "setting",
  [
    *({"temperature": t} for t in (1.2e-38, 1e-38, 1e-39, 1e-45, 1e-46, 5e-324)),
    *({"temperature": 1.0, "top_p": p} for p in (1e-38, 1e-39, 1e-46, 5e-324)),
    {"temperature": 1e-39, "top_k": 3, "top_p": 1e-46, "min_p": 1.0},
    {"temperature": np.float64(1e-40), "top_k": np.int64(3), "top_p": np.float32(0.5)},
  ],
)
def test_numbers_that_float32_does_not_have_leave_the_likeliest(setting, untyped):
  """Beside forbidden tokens, and wherever the logits lie."""
  logits = jnp.array([[1.0, 5.0, 3.0, -np.inf, -2.0], [-9e4, -8e4, -1e5, -np.inf, -np.inf]])
  knobs = Sampling(**setting).knobs(5)
  for seed in range(8):
    drawn = DRAW(logits, knobs, jnp.uint32(seed), jnp.arange(2), jnp.arange(2))
    assert drawn.tolist() == [1, 1]


@pytest.mark.parametrize("temperature", [1e38, 3e38, 1e39, 1e300])
def test_the_greatest_temperatures_draw_all_alike(temperature):
  logits = np.array([[1.0, 5.0, 3.0, -np.inf, -2.0]], np.float32)
  found = probabilities(logits, Sampling(temperature))
  np.testing.assert_allclose(found, [[0.25, 0.25, 0.25, 0, 0.25]], rtol=1e-6)


@pytest.mark.parametrize("least", [0.0, 1e-46, 1e-39])
def test_the_smallest_min_p_drops_nothing(least):
  logits = np.array([[0.0, -95.0, -99.0]], np.float32)
  kept = FILTER(logits, Sampling(1.0, min_p=least).knobs(3))
  assert np.isfinite(kept).all()


def test_draws_follow_the_distribution():
  """Frequencies over many rows lie within 5 standard errors of the oracle's probabilities."""
  n, sampling = 4096, Sampling(0.7, top_k=4, top_p=0.95)
  logits = np.array([0.0, 1.0, 2.0, 1.5, -1.0, 0.5], np.float32)
  rows = jnp.arange(n)
  tokens = DRAW(jnp.tile(logits, (n, 1)), sampling.knobs(6), jnp.uint32(0), rows, 0 * rows)
  p = oracle(logits, sampling)
  found = np.bincount(tokens, minlength=6) / n
  assert (p == 0).any() and (np.abs(found - p) <= 5 * np.sqrt(p * (1 - p) / n)).all()


def test_a_draw_depends_on_seed_row_and_position():
  logits = jnp.zeros((1, 1000))

  def token(seed, row, at):
    knobs = Sampling(1.0).knobs(1000)
    return int(DRAW(logits, knobs, jnp.uint32(seed), jnp.array([row]), jnp.array([at]))[0])

  tokens = [token(*x) for x in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0))]
  assert len(set(tokens)) == len(tokens)
  assert token(0, 1, 1) == tokens[4]


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"temperature": -1.0}, "Sampling.temperature: found -1.0"),
    ({"temperature": float("nan")}, "Sampling.temperature: found nan"),
    ({"temperature": float("inf")}, "Sampling.temperature: found inf"),
    ({"top_k": 0}, "Sampling.top_k: found 0, expected an integer ≥ 1, or None"),
    ({"top_p": 0.0}, r"Sampling.top_p: found 0.0, expected a number in \(0, 1\]"),
    ({"top_p": 1.1}, "Sampling.top_p: found 1.1"),
    ({"min_p": -0.1}, "Sampling.min_p: found -0.1"),
    ({"min_p": float("nan")}, "Sampling.min_p: found nan"),
    ({"top_p": float("nan")}, "Sampling.top_p: found nan"),
    ({"temperature": None}, "Sampling.temperature: found None, expected float"),
    ({"temperature": "1"}, "Sampling.temperature: found '1', expected float"),
    ({"temperature": True}, "Sampling.temperature: found True, expected float"),
    ({"temperature": 1j}, "Sampling.temperature: found 1j, expected float"),
    ({"top_k": 2.0}, "Sampling.top_k: found 2.0, expected int or None"),
    ({"top_k": True}, "Sampling.top_k: found True, expected int or None"),
    ({"top_p": None}, "Sampling.top_p: found None, expected float"),
    ({"min_p": True}, "Sampling.min_p: found True, expected float"),
  ],
)
def test_bad_settings_are_refused(settings, message, untyped):
  with pytest.raises((ValueError, TypeError), match=message):
    Sampling(**settings)


# ---- stop strings


class Characters(TextStream):
  """A stream whose tokens are code points."""

  def __init__(self):
    pass

  def feed(self, token):
    return chr(token)

  def flush(self):
    return ""


def released(text, stop):
  row = RowText(Characters(), stop)
  return [row.feed(ord(c)) for c in text] + [row.flush()], row


def test_what_may_become_a_stop_string_is_held_back():
  parts, row = released("xab.abc!", ["abc"])
  assert parts == ["x", "", "", "ab.", "", "", "", "", ""]
  assert row.text == "xab." and row.ended
  parts, row = released("xab", ["abc"])
  assert parts == ["x", "", "", "ab"] and not row.ended
  parts, row = released("xab.abc!", ["z", "abc", "?!"])  # as many as the longest may need
  assert parts == ["x", "", "", "ab.", "", "", "", "", ""] and row.ended


@given(text=st.text("ab", max_size=12), stop=st.lists(st.text("ab", min_size=1, max_size=3)))
def test_text_ends_where_a_plain_search_finds_the_first_string(text, stop):
  parts, row = released(text, stop)
  ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stop)]
  if ends:
    head = text[: ends[0]]
    want = head[: len(head) - max(len(s) for s in stop if head.endswith(s))]
  else:
    want = text
  assert "".join(parts) == row.text == want
  assert row.ended == bool(ends)


class Marked(Characters):
  """As `Characters`; capitals are special tokens, which the text leaves out."""

  def left_out(self, token):
    return f"<{chr(token)}>" if chr(token).isupper() else ""

  def feed(self, token):
    return "" if self.left_out(token) else chr(token)


@pytest.mark.parametrize(
  ("stop", "parts"),
  [
    (["<B>"], ["a", "", "b"]),
    (["b<B>"], ["a", "", "", ""]),
    (["<A>b<B>"], ["a", "", "", ""]),
    (["a<A>c"], ["", "", "ab", "", "c", ""]),
    ([], ["a", "", "b", "", "c", ""]),
  ],
)
def test_stop_strings_may_have_special_tokens(stop, parts):
  row, text = RowText(Marked(), stop), "aAbBc"
  found = [row.feed(ord(c)) for c in text] + [row.flush()]
  assert found == parts + [""] * (len(found) - len(parts))
  assert row.text == "".join(parts)
  assert row.ended == any(s in "a<A>b<B>c" for s in stop)


@pytest.mark.parametrize(("stop", "text"), [("</s>", "hello \u4e2d"), ("\u4e2d</s>", "hello ")])
def test_bytes_before_a_special_token_are_text(stop, text):
  """Which a stream holds back until another token follows."""
  tokenizer = Tokenizer(FAMILIES["llama2"]().backend)
  row = RowText(tokenizer.stream(), [stop])
  told = "".join(map(row.feed, tokenizer.encode("hello \u4e2d</s> in", bos=False)))
  assert (told, row.text, row.ended) == (text, text, True)
