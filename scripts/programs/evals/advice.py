"""Choice of a method before anything runs: what fits a device, what it takes, how it scored."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.sharding import AbstractMesh

import kvjax
from kvjax.core.cache import CacheSpec
from kvjax.kernels.common.devices import Device
from kvjax.models.decode.step_bytes import StepBytes, step_bytes, weight_bytes
from kvjax.models.nn import parallel
from kvjax.models.nn.config import ModelConfig
from kvjax.programs import step_time
from kvjax.programs.evals import families, plan
from kvjax.programs.evals.nearest import Kept, Rows
from kvjax.runtime import memory, sharding

SHARES = 0.98, 0.9  # of the full cache's score; the second counts where nothing keeps the first
BETTER = 0.9  # of the seconds or bytes without it, which a recommended method takes at most
SAME = 1.05  # factor up to which two budgets are the same share of their lengths


@dataclasses.dataclass(frozen=True)
class Case:
  """A model, a context and a device, or some that share them; weights and caches are bfloat16.

  Raises:
    ValueError, NotImplementedError: the model cannot be split over the mesh.
  """

  config: ModelConfig
  length: int
  batch: int
  here: Device
  mesh: AbstractMesh | None = None
  hosts: int = 1

  def __post_init__(self):
    if self.mesh is not None:
      parallel.check_sizes(self.config, self.mesh)
      sharding.check_windows(self.config.windows, self.mesh)

  @functools.cached_property
  def part(self) -> ModelConfig:
    """The model that a device has: its heads, its rows of the MLP and of the vocabulary."""
    if self.mesh is None:
      return self.config
    heads, vocab = (sharding.shards(self.mesh, axis) for axis in ("kv_heads", "vocab"))
    sizes = {"heads": heads, "kv_heads": heads, "ffn": sharding.shards(self.mesh, "ffn")}
    sizes |= {"vocab": vocab} if self.config.vocab % vocab == 0 else {}
    each = {name: getattr(self.config, name) // parts for name, parts in sizes.items()}
    return dataclasses.replace(self.config, **each)

  @property
  def spec(self) -> CacheSpec:
    parts = 1 if self.mesh is None else sharding.shards(self.mesh, "slots")
    return self.config.cache_spec(self.batch, -(-self.length // parts) * parts, jnp.bfloat16)

  @property
  def weights(self) -> int:
    """Bytes of a device's weights."""
    return weight_bytes(self.part, jnp.bfloat16)[0]

  @property
  def usable(self) -> int:
    """Bytes of the device that weights and caches may fill."""
    return int(self.here.memory * (1 - memory.SPARE))

  @property
  def fits(self) -> bool:
    """True if the weights leave room for caches."""
    return self.weights < self.usable


@dataclasses.dataclass(frozen=True)
class Advice:
  """A method with a budget, in one case; bytes and seconds are found when they are asked for.

  Attributes:
    name, budget: as the command line names it; no budget where the method has none.
    method: the instance.
    scores: its rows at each of the nearest lengths, the nearest first, with the nearest budget.
  """

  case: Case
  name: str
  budget: int | None
  method: kvjax.Method
  scores: tuple[Kept | None, ...] = ()

  @functools.cached_property
  def caches(self) -> kvjax.MemoryPlan:
    return kvjax.plan_memory(self.case.spec, self.method, self.case.mesh, apart=True)

  @functools.cached_property
  def moved(self) -> StepBytes:
    """Bytes that a step moves on a device: its weights, and its share of the heads and slots."""
    case = self.case
    moved = step_bytes(case.config, self.method, case.batch, case.length)
    if case.mesh is None:
      return moved
    sizes = ("tokens", "scanned", "spared", "others", "host")
    shares = [{name: getattr(x, name) / case.mesh.size for name in sizes} for x in moved.layers]
    layers = [dataclasses.replace(x, **each) for x, each in zip(moved.layers, shares, strict=True)]
    weights = step_bytes(case.part, kvjax.Full(), case.batch, case.length).weights
    return StepBytes(weights, tuple(layers))

  @functools.cached_property
  def refused(self) -> str:
    """The reason for which the method does not run on such devices; empty where it does."""
    try:
      if self.case.mesh is not None and self.caches.host:
        sharding.check_store(self.method, self.case.hosts)
    except (ValueError, NotImplementedError) as error:
      return str(error)
    return ""

  @property
  def device(self) -> int:
    """Bytes of weights and caches on the device, on each of several."""
    return self.case.weights + self.caches.device

  @property
  def over(self) -> int:
    """Bytes that the device lacks; 0 where it fits."""
    return max(0, self.device - self.case.usable)

  @property
  def seconds(self) -> float:
    """Seconds of a step, a token of each row; at most, where data decide."""
    return step_time.expected(self.moved, self.method.traits.stream is not None, self.case.here)

  @property
  def least(self) -> float:
    """Seconds of a step whose retrievals are shared where that is possible, and guesses hit."""
    return step_time.least(self.moved, self.method.traits.stream is not None, self.case.here)

  @property
  def share(self) -> float:
    """The budget as a share of the length; 1 without one."""
    return (self.budget or self.case.length) / self.case.length

  @property
  def quality(self) -> tuple[int, float]:
    """Index of the nearest length with scores, and the least share of the full cache's score.

    The share is 0 where no rows had as small a budget as this.
    """
    held = [(i, x) for i, x in enumerate(self.scores) if x is not None and x.of_full is not None]
    fair = [i for i, x in held if x.share <= SAME * self.share]
    return (fair[0], min(x.of_full or 0.0 for _, x in held)) if fair else (0, 0.0)


@dataclasses.dataclass(frozen=True)
class Aim:
  """An aim: the least `cost` of the methods that it allows.

  Attributes:
    floor: the full cache's cost if its caches took nothing, below which no method comes.
  """

  name: str
  cost: Callable[[Advice], float]
  floor: Callable[[Advice], float]
  allows: Callable[[Advice], bool] = lambda x: True


def _time(x: Advice) -> float:
  return x.seconds


def _time_without(x: Advice) -> float:
  return x.seconds - x.caches.device / x.case.here.read


AIMS = (
  Aim("fastest to keep", _time, _time_without),
  Aim("smallest to keep", lambda x: x.device, lambda x: x.case.weights),
  Aim("fastest to keep all tokens and", _time, _time_without, lambda x: families.of(x.name).safe),
)


def considered(
  case: Case, rows: Rows, methods: Sequence[str] = (), budgets: Sequence[str] = ()
) -> list[Advice]:
  """The full cache, then every method with every budget, those that the devices refuse, too.

  Args:
    case: the model, the context, the device.
    rows: of evaluations.
    methods, budgets: as `kvjax.programs.evaluate` takes them; none: those of the rows at the
      lengths nearest to the case's, without upper bound and control.

  Raises:
    ValueError: a method, a field or a budget is not one.
  """
  lengths = rows.lengths(case.length)
  shares: dict[str, set[float]] = {}
  for at, name, budget in rows.cells:
    if at in lengths:
      shares.setdefault(name, set()).add((budget or at) / at)
  every = set().union(*shares.values()) - {1.0} or {1 / 8}
  found: dict[kvjax.Method, Advice] = {}
  for label in methods or [x for x in shares if x not in families.YARDSTICKS]:
    usual = [str(max(1, round(x * case.length))) for x in sorted(shares.get(label, every))]
    try:
      entries = plan.entries([label], budgets or usual, case.length)
    except ValueError:
      if methods or budgets:
        raise
      continue  # made from a file that is not here
    for x in entries:
      made = Advice(case, x.label, x.budget, x.method)
      scores = tuple(rows.nearest(x.label, at, made.share) for at in lengths)
      found.setdefault(x.method, dataclasses.replace(made, scores=scores))
  return list(found.values())


def recommended(found: Sequence[Advice]) -> dict[str, Advice]:
  """One to three methods by what they are best at, or none.

  Each runs on the devices, fits, keeps a share of the full cache's score, and is a tenth better
  than the full cache, the first of `found`, and those before it. Scores at the nearest length
  decide; methods that have none there count where nothing else serves.
  """
  full, *others = (x for x in found if not x.refused)
  others.sort(key=lambda x: -(x.budget or 0))  # of each method the least budget comes last
  chosen: dict[str, Advice] = {}
  aims = [aim for aim in AIMS if full.over or aim.floor(full) <= BETTER * aim.cost(full)]
  for share in SHARES:
    able = [x for x in others if x.quality[1] >= share]
    for aim in aims:
      for i, kept in enumerate(full.scores):
        least = {x.name: x for x in able if x.quality[0] == i and aim.allows(x)}.values()
        best = min((x for x in least if not x.over), key=aim.cost, default=None)
        before = [x for x in (full, *chosen.values()) if x.quality[0] <= i and aim.allows(x)]
        costs = [aim.cost(x) for x in before if not x.over]
        if best and aim.cost(best) <= BETTER * min(costs, default=math.inf):
          chosen[f"{aim.name} {share:.0%} of the full cache's score at {kept.length:,}"] = best
          break
    if chosen:
      break
  return chosen
