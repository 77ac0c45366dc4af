"""Operands of kernels over lists and codes."""

import numpy as np

from kvjax import Env, Linear, Rope, Yarn
from kvjax.primitives.codes import WORDS, quantise
from kvjax.testing.layer import Layer
from tests.compiled import compiled

_quantise = compiled(quantise)
_YARN = Yarn(8.0, 4096)
# By which a token that enters is turned.
ROPES = [Rope(5e5), Rope(scaling=Linear(4.0)), Rope(partial=0.5)]
ROPES += [Rope(1e4, _YARN), Rope(1e4, _YARN, partial=0.5)]


def codes(words, bits):
  """Codes [..., H] of words, by NumPy's own bytes: each word little end first, channels strided."""
  words = np.asarray(words)
  octets = words.astype(f"<i{words.itemsize}").view(np.uint8).reshape(*words.shape, -1)
  if bits == 8:
    parts = octets.view(np.int8)
  else:
    parts = np.stack([octets & 15, octets // 16], -1).reshape(*words.shape, -1)
  return np.swapaxes(parts, -1, -2).reshape(*words.shape[:-1], -1).astype(np.float64)


def coded(k, v, bits):
  """Words of keys and values, their scales and zero points, and the numbers by NumPy."""
  held, numbers = [_quantise(x, bits, WORDS[n]) for n, x in (("k", k), ("v", v))], []
  for x in held:
    zero = 0 if x.zero is None else np.float64(x.zero)[..., None]
    numbers.append(codes(x.words, bits) * np.float64(x.scale)[..., None] + zero)
  per_slot = [x.scale for x in held] + [x.zero for x in held if x.zero is not None]
  return [x.words for x in held], per_slot, numbers


def plan(seed, batch, heads, slots, unit, width):
  """Tables in random order with holes, ragged counts (none at all for the first), and ranges."""
  rng = np.random.default_rng(seed)
  tiles = -(-slots // unit)
  table = np.stack([rng.permutation(max(tiles, width))[:width] for _ in range(batch * heads)])
  table = np.where((table < tiles) & (rng.random(table.shape) > 0.15), table, -1)
  count = rng.integers(0, width + 1, batch * heads)
  count[0], count[-1] = 0, width
  stop = rng.integers(slots // 2, slots + 1, (batch, 1))
  start = rng.integers(0, slots // 3, (batch, 1))
  table, count = table.reshape(batch, heads, width), count.reshape(batch, heads)
  return tuple(x.astype(np.int32) for x in (table, count, start, stop))


def slots_of(table, count, start, stop, unit, sinks, b, h):
  """The slots of one row, in the order of the table."""
  listed = [
    int(entry) * unit + i for entry in table[b, h, : count[b, h]] if entry >= 0 for i in range(unit)
  ]
  return [s for s in listed if s < stop[b, 0] and (s < sinks or s >= start[b, 0])]


def rings_and_victims(seen, slots):
  """Rings [B, 3, 2] from slots 0, 2 and 6 on, closed at token 890, and the slots they give up."""
  first, since = np.array([[0, 2, 6]] * len(seen), np.int32), 890
  victim = first.copy()
  for b, h in np.ndindex(*first.shape):
    for _ in range(max(0, seen[b] - since) % (7 * 5 * 1)):  # without whole laps of all three
      victim[b, h] = victim[b, h] + 1 if victim[b, h] + 1 < slots else first[b, h]
  return np.stack([first, np.full_like(first, since)], -1), victim


LENGTHS = (22, 9)


def taken(method, stream, impl, layer, steps=5, lengths=LENGTHS):
  """Outputs, reports and the cache after some steps of ragged rows."""
  run = Layer(method, stream, env=Env(4, impl=impl, tile=4), layer=layer)
  run.prefill(lengths)
  made = [run.decode([n + step for n in lengths]) for step in range(steps)]
  return [out for out, _ in made], [aux for _, aux in made], run.cache


def alike(method, stream, layer, *names, atol=2e-5, **how):
  """Steps `taken` by kernels and by the reference, whose outputs and reports are alike."""
  kernels, plain = (taken(method, stream, impl, layer, **how) for impl in ("pallas", "reference"))
  for out, by, want, of in zip(*kernels[:2], *plain[:2], strict=True):
    np.testing.assert_allclose(out, want, atol=atol)
    for name in names:
      np.testing.assert_array_equal(by[name], of[name], err_msg=name)
  return kernels, plain


def tokens_of(table, count):
  """The entries of every list, which may have holes."""
  lists = zip(np.asarray(table), np.asarray(count), strict=True)
  return [[[int(x) for x in r[:n] if x >= 0] for r, n in zip(*x, strict=True)] for x in lists]
