"""What every test runs under: two host devices, float32 products, checked annotations."""

import functools
import gc
import importlib.metadata
import inspect
import itertools
import os
import pathlib
from typing import Any

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

import jaxtyping  # noqa: E402

# Every jaxtyping annotation of the library is checked at run time, from its first import on. What
# has none, and what a call makes anew, goes unwrapped: that took a tenth of the time.
_checked = jaxtyping.jaxtyped


def _annotated(made: Any = None, **how):
  if made is None:
    return functools.partial(_annotated, **how)
  function = getattr(made, "__func__", getattr(made, "fget", made))
  plain = inspect.isfunction(function) and not function.__annotations__
  return made if plain or "<locals>" in function.__qualname__ else _checked(made, **how)


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


def pytest_addoption(parser):
  parser.addoption("--programs", metavar="FILE", help="append what each test compiles and takes")


def pytest_configure(config):
  if path := config.getoption("--programs"):
    from tests.programs import Recorder

    config.pluginmanager.register(Recorder(pathlib.Path(path)))


def pytest_collection_modifyitems(items):
  mark_rest(items)


def pytest_collection_finish():
  """What is there stays: tracing makes objects by the million, and few of them are garbage."""
  gc.collect()
  gc.freeze()
  gc.set_threshold(200_000, 20, 50)


def pytest_unconfigure():
  gc.unfreeze()


def pytest_xdist_make_scheduler(config, log):
  from tests.groups import ByPrograms

  return ByPrograms(config, log)


_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def _few_programs(request):
  """Drops compiled programs, which the cache on disk has, before they are too many.

  What is traced under a patch is nobody else's, nor the other way round.
  """
  # Here, so that the process which hands out the tests imports none of it.
  from kvjax.testing import layer
  from scripts.common import drop_programs

  patched = "monkeypatch" in request.fixturenames
  if patched:
    layer.driver.cache_clear()
  yield
  if patched:
    layer.driver.cache_clear()
  done = next(_tests)
  if done % 16 == 0 and drop_programs():  # Linux takes milliseconds to list a process's maps
    gc.unfreeze()
  if done % 64 == 0:  # rarely, but programs in it hold gigabytes
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2() -> pathlib.Path:
  """The converted SmolLM2-135M-Instruct checkpoint, fetched and converted once per machine."""
  from kvjax.models import convert

  checkpoint: Any = convert.default_checkpoint()
  return pathlib.Path(checkpoint)
