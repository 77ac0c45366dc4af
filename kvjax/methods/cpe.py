"""CPE: CIS, PSAW and ETF together (PrHS, §IV)."""

import dataclasses
from typing import Any

from kvjax.core import settings
from kvjax.core.traits import Traits
from kvjax.families.method import Method
from kvjax.families.wrapper import Wrapper
from kvjax.methods.cis.method import CIS, split
from kvjax.methods.etf import ETF
from kvjax.methods.psaw import PSAW


@dataclasses.dataclass(frozen=True)
class CPE(Wrapper):
  """Shared retrieval along time, a narrowing window along depth, frozen tokens in prefill.

  The same as PSAW(ETF(CIS())) with one number of first tokens and one first layer for all three,
  and the same in any order of the two wrappers. In layers that the window narrows, heads that
  retrieve rank visible tokens only, and shared tokens that have left the window are not attended
  to.

  >>> import kvjax
  >>> method = kvjax.CPE(k=432, sinks=16, local=64)
  >>> method.base == kvjax.PSAW(kvjax.ETF(kvjax.CIS(k=432, sinks=16, local=64)))
  True

  Attributes:
    base: PSAW(ETF(CIS())) of the values below.
    k, sinks, local, block, tau, radius, m, per, agree: of CIS; `sinks` is that of PSAW and ETF too.
    phi, alpha: of PSAW.
    psi, gamma, kv: of ETF.
    start: of PSAW and ETF.
  """

  base: Method = dataclasses.field(init=False, repr=False)
  k: int = 432
  sinks: int = 16
  local: int = 64
  block: int = 16
  tau: float = 0.8
  radius: int = 1
  m: int | None = None
  per: str = "kv_head"
  phi: float = 0.7
  alpha: float = 1.0
  psi: float = 0.5
  gamma: float = 1.0
  kv: str = "project"
  start: float = 0.75
  agree: str = "all"

  def __post_init__(self):
    try:
      own = {field.name for field in dataclasses.fields(CIS)}
      cis = CIS(**{name: getattr(self, name) for name in own})
      etf = ETF(cis, self.sinks, self.psi, self.gamma, self.start, self.kv)
      base = PSAW(etf, self.sinks, self.phi, self.alpha, self.start)
    except ValueError as error:
      raise ValueError(f"{type(self).__name__}: {error}") from error
    object.__setattr__(self, "base", base)
    super().__post_init__()

  @property
  def traits(self) -> Traits:
    return super().traits.but(spreads=self.base.traits.spreads)

  @classmethod
  def preset(cls, budget: int, matched: bool = False, **changes: Any) -> Method:
    """The paper's split of 128 or 512 tokens, see CIS.preset."""
    return cls(**{**split(budget, matched), **changes})


def _example(cls: type[CPE], budget: int) -> Method:
  cis = settings.example(CIS, budget)
  return cls(k=cis.k, sinks=cis.sinks, local=cis.local)


def _neutral(cls: type[CPE], length: int) -> Method:
  cis = settings.neutral(CIS, length)
  return cls(k=cis.k, sinks=cis.sinks, local=cis.local, phi=1.0, psi=1.0)


settings.register(CPE, example=_example, neutral=_neutral)
