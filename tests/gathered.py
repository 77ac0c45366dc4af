"""H2O's lists, which VATP changes in what it evicts: kept positions and what each has gathered."""

from tests.oracles import probabilities


class Gathered:
  """One KV head of one row."""

  def __init__(self, stream, b, h, budget, recent, cap=None):
    self.stream, self.b, self.h, self.cap = stream, b, h, cap
    self.budget, self.recent = budget, recent
    self.mass: dict[int, float] = {}

  @classmethod
  def of(cls, stream, lengths, *settings):
    """The lists of every row and head after prompts of these lengths."""
    rows, heads = enumerate(lengths), range(stream.k.shape[1])
    lists = {(b, h): cls(stream, b, h, *settings) for b, _ in rows for h in heads}
    for (b, _), each in lists.items():
      for t in range(lengths[b]):
        each.mass[t] = 0.0
        each.gather(t)
      each.cut(lengths[b] - 1)
    return lists

  def gather(self, t):
    kept = sorted(self.mass)
    p = probabilities(self.stream, self.b, self.h, t, kept, self.cap).mean(0)
    for j, x in zip(kept, p, strict=True):
      self.mass[j] += x

  def cut(self, newest):
    """Evicts down to the budget: least mass first among those that are not recent."""
    while len(self.mass) > self.budget:
      old = [j for j in self.mass if j <= newest - self.recent]
      del self.mass[min(old, key=lambda j: (self.mass[j], j))]

  def step(self, t):
    """Room is made before the new token is attended to."""
    self.mass[t] = float("inf")
    self.cut(t)
    self.mass[t] = 0.0
    self.gather(t)
