"""The tiny decoder again, in NumPy float64 and loops: what whole generations are checked against.

Layers and positions count from 1, as in the papers.
"""

import fractions
import functools
import math

import numpy as np

from kvjax.testing.layer import rotate, softmax_average
from kvjax.testing.tiny import CLOSE, CONFIG, LENGTHS, TOKENS, Run, model


def logits(tokens, prompt, *, sees=None, frozen=None, kv="previous", decoder=None):
  """Logits [n, V] after every token of one row: `prompt` tokens are read, the rest decoded.

  Args:
    tokens: n token ids.
    prompt: how many of them are the prompt.
    sees: (layer, head, t, q [G, H], k [t, H]) -> positions that query t of a layer attends to;
      None: all up to t.
    frozen: (layer, i) -> whether token i of the prompt keeps its state in that layer.
    kv: where the key and value of a frozen token come from: "previous" layer or "project"ion.
    decoder: whose; None: the one of four layers.
  """
  decoder = model() if decoder is None else decoder
  tokens = np.asarray(tokens)
  x = _array(decoder.embedding)[tokens]
  k = v = None
  for number, layer in enumerate(decoder.layers, 1):
    still = [
      frozen is not None and i <= prompt and frozen(number, i) for i in range(1, len(tokens) + 1)
    ]
    x, k, v = _layer(layer, number, x, k, v, still, sees, kv)
  return _norm(decoder.norm, x) @ _array(decoder.embedding).T


def check(method, steps, *, sees=None, frozen=None, kv="previous"):
  """A prompt and steps of the tiny decoder's both rows; `frozen` takes a row's length as well."""
  out = Run(method).generate(steps)
  for b, n in enumerate(LENGTHS):
    still = frozen and functools.partial(frozen, total=n)
    want = logits(TOKENS[b, : n + steps], n, sees=sees, frozen=still, kv=kv)
    np.testing.assert_allclose(out[b], want[n - 1 :], atol=CLOSE)


def _layer(layer, number, x, old_k, old_v, still, sees, kv):
  w = _array(layer.attention.wqkv)  # [D, K, G + 2, H]
  heads, groups = w.shape[1], w.shape[2] - 2
  y = np.einsum("td,dkgh->tkgh", _norm(layer.attention_norm, x), w)
  q, k, v = y[:, :, :groups], y[:, :, groups], y[:, :, groups + 1]
  if kv == "previous" and any(still):
    k, v = k.copy(), v.copy()
    k[still], v[still] = old_k[still], old_v[still]
  placed = np.array([rotate(k[i], i) for i in range(len(x))])
  out = x.copy()
  for t in range(1, len(x) + 1):
    if still[t - 1]:
      continue
    attended = np.zeros((heads, groups, w.shape[3]))
    for h in range(heads):
      query, keys = rotate(q[t - 1, h], t - 1), placed[:t, h]
      seen = range(1, t + 1) if sees is None else sees(number, h, t, query, keys)
      at = np.array(sorted(seen)) - 1
      for g in range(groups):
        score = keys[at] @ query[g] / np.sqrt(len(query[g]))
        attended[h, g] = softmax_average(score, v[at, h])
    z = x[t - 1] + np.einsum("kgh,kghd->d", attended, _array(layer.attention.wo))
    a = np.einsum("d,dcf->cf", _norm(layer.mlp_norm, z), _array(layer.mlp.gate_up))
    out[t - 1] = z + (a[0] / (1 + np.exp(-a[0])) * a[1]) @ _array(layer.mlp.down)
  return out, k, v


def _norm(norm, x):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps) * _array(norm.scale)


def _array(param):
  return np.asarray(param[...], np.float64)


def visible(t, layer, layers, sinks, phi, alpha, start=0.75):
  """Positions that query t sees, all counted from 1 (Eq. 15); exact where the power is one."""
  first = math.floor(fractions.Fraction(str(start)) * layers)
  hidden = fractions.Fraction(0)
  if layer >= first and layers > first:
    power = fractions.Fraction(str(alpha)) * (layer - first) / (layers - first)
    base = fractions.Fraction(str(phi))
    whole = power.denominator == 1
    hidden = 1 - (base ** int(power) if whole else fractions.Fraction(float(base) ** float(power)))
  begin = math.floor(hidden * t)  # P
  return [i for i in range(1, t + 1) if not (sinks < i < begin)]


def frozen(layer, i, total, sinks, psi, gamma=1.0, start=0.75, layers=CONFIG.layers):
  """True where token i of `total` is frozen in a layer, both counted from 1 (Eq. 16)."""
  first = math.floor(fractions.Fraction(str(start)) * layers)
  if layer < first:
    return False
  power = gamma * (layer - first) / (layers - first)
  base = fractions.Fraction(str(psi)) if power == 1 else fractions.Fraction(psi**power)
  return sinks < i <= math.floor((1 - base) * total)
