"""What every test runs under: two host devices, float32 products, checked annotations."""

import atexit
import builtins
import dataclasses
import functools
import gc
import importlib.metadata
import inspect
import itertools
import os
import pathlib
import typing
from collections.abc import Callable
from typing import Any

# Imports make few cycles and many objects, which the collector would go through again and again.
gc.disable()
# A worker leaves its heap to the system: taking it apart costs seconds. (Handlers of what is
# imported below run before this one.)
_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if _WORKER:
  atexit.register(os._exit, 0)

# Before JAX starts: the sharding laws need devices, and a CPU has one unless told otherwise. Tests
# compile much and compute little: unoptimised code in one module halves their time, fusions by
# XLA's older emitters (gone with jaxlib 0.11) halve it again.
_FLAGS = {
  "--xla_force_host_platform_device_count": 8,
  "--xla_backend_optimization_level": 0,
  "--xla_cpu_parallel_codegen_split_count": 1,
}
if importlib.metadata.version("jaxlib").split(".")[:2] == ["0", "10"]:
  _FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
for _flag, _value in _FLAGS.items():
  if _flag not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}={_value}".strip()

# What tests compile, and the programs that they start, stays in the checkout.
_REPO = pathlib.Path(__file__).resolve().parent.parent
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_REPO / ".cache" / "jax"))
# All of it, also after a test ran a program, which keeps what took longer unless it is told.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import beartype  # noqa: E402
import jaxtyping  # noqa: E402

# Every annotation of the library is checked at run time, from its first import on: by beartype, and
# where there are shapes by jaxtyping, which costs several times as much. Checks are made when a
# function is first called; what has no annotation, and what a call makes anew, has none.
_sizes = jaxtyping.jaxtyped("context")
# A field of another type is a TypeError, as where a method itself says so.
_of_fields = beartype.beartype(conf=beartype.BeartypeConf(violation_type=jaxtyping.TypeCheckError))


def _has_shapes(hint: Any) -> bool:
  parts = hint if isinstance(hint, (list, tuple)) else typing.get_args(hint)
  return "jaxtyping" in type(hint).__module__ or any(map(_has_shapes, parts))


class _Names(dict):
  """Names of a module; one that it imports for type checkers alone may be anything."""

  def __missing__(self, name: str) -> Any:
    return getattr(builtins, name, Any)


def _checked(function: Callable, typechecker: Any) -> Callable:
  names = _Names(function.__globals__)
  hints = typing.get_type_hints(function, localns=names, include_extras=True)
  function.__annotations__ = hints
  checked = typechecker(function)
  return _of_one_call(checked) if any(map(_has_shapes, hints.values())) else checked


def _of_one_call(checked: Callable) -> Callable:
  """A letter is one size throughout a call: jaxtyping's own wrapper would also bind arguments."""

  def call(*args, **kwargs):
    with _sizes:
      return checked(*args, **kwargs)

  return call


def _annotated(made: Any = None, *, typechecker: Any) -> Any:
  if made is None:
    return functools.partial(_annotated, typechecker=typechecker)
  if isinstance(made, (classmethod, staticmethod)):
    return type(made)(_annotated(made.__func__, typechecker=typechecker))
  if isinstance(made, property):
    return made.getter(_annotated(made.fget, typechecker=typechecker))
  if "<locals>" in made.__qualname__:
    return made
  if inspect.isclass(made):  # what a dataclass is made of; what it inherits is checked already
    if dataclasses.is_dataclass(made) and "__init__" in vars(made):
      made.__init__ = _annotated(made.__init__, typechecker=_of_fields)
    return made
  return _checked_when_called(made, typechecker) if made.__annotations__ else made


def _checked_when_called(function: Callable, typechecker: Any) -> Callable:
  checked = None

  @functools.wraps(function)
  def call(*args, **kwargs):
    nonlocal checked
    if jaxtyping.config.jaxtyping_disable:
      return function(*args, **kwargs)
    if checked is None:
      checked = _checked(function, typechecker)
    return checked(*args, **kwargs)

  return call


jaxtyping.jaxtyped = _annotated
_PARTS = {f"kvjax.{path.stem}" for path in (_REPO / "kvjax").iterdir()} - {"kvjax.programs"}
jaxtyping.install_import_hook(sorted(_PARTS), "beartype.beartype")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from tests.cover import mark_rest  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_traceback_in_locations_limit", 0)  # nobody reads where an operation was made

# The same examples on every machine and in every run; no deadline, since a first call compiles.
hypothesis.settings.register_profile(
  "kvjax",
  derandomize=True,
  deadline=None,
  database=None,
  max_examples=25,
  suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("kvjax")


@pytest.fixture
def untyped(monkeypatch):
  """Types are not checked, as with users: what a function says itself is seen."""
  monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def jax_config():
  """JAX's settings, of which those about compiled programs are put back."""
  names = "jax_compilation_cache_dir", "jax_enable_compilation_cache"
  names += ("jax_persistent_cache_min_compile_time_secs",)
  before = {name: getattr(jax.config, name) for name in names}
  yield jax.config
  for name, value in before.items():
    jax.config.update(name, value)


def pytest_collection_modifyitems(items):
  mark_rest(items)


def pytest_collection_finish():
  """What is there stays: tracing makes objects by the million, and few of them are garbage."""
  gc.freeze()
  gc.set_threshold(200_000, 20, 50)
  gc.enable()


def pytest_unconfigure():
  if not _WORKER:  # nanobind calls leaks what is frozen as Python ends
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)  # there may be no xdist: -p no:xdist
def pytest_xdist_make_scheduler(config, log):
  from tests.groups import ByPrograms

  gc.enable()  # this process collects no tests
  return ByPrograms(config, log)


_tests = itertools.count(1)
# The part of the machine's memory that workers may grow by before they drop what they can: what
# tests start takes gigabytes, too.
_SHARE = 0.35


def _resident() -> int:
  """Bytes of memory that this process has; 0 where Linux does not say."""
  path = pathlib.Path("/proc/self/statm")
  return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0


def _room() -> float:
  """Bytes of it for each worker."""
  workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
  return _SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / workers


@dataclasses.dataclass
class _Memory:
  """What a worker had when programs were dropped."""

  held: int = 0

  def has_grown(self) -> bool:
    return _resident() - self.held > _room()


_memory = _Memory()


@pytest.fixture(autouse=True)
def _few_programs(request):
  """Drops compiled programs, which the cache on disk has, before they are too many.

  What is traced under a patch is nobody else's, nor the other way round.
  """
  # Here, so that the process which hands out the tests imports none of it.
  from kvjax.programs.common import drop_programs
  from kvjax.testing import layer

  patched = "monkeypatch" in request.fixturenames
  if patched:
    layer.driver.cache_clear()
  yield
  if patched:
    layer.driver.cache_clear()
  done = next(_tests)
  if done % 16 == 0 and drop_programs():  # Linux takes milliseconds to list a process's maps
    gc.unfreeze()
  elif done % 16 == 0 and _memory.has_grown():
    gc.unfreeze()
    jax.clear_caches()
    gc.collect()
    _memory.held = _resident()
  if done % 128 == 0:  # rarely, but programs in it hold gigabytes
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def loaded():
  """The examples' random decoder and its tokenizer."""
  from scripts.examples import tiny

  return tiny.load()


@pytest.fixture(scope="session")
def smollm2() -> pathlib.Path:
  """The converted SmolLM2-135M-Instruct checkpoint, fetched and converted once per machine."""
  from kvjax.models.io import convert

  checkpoint: Any = convert.default_checkpoint()
  return pathlib.Path(checkpoint)
