"""Memory of the host: what is there, and what caches that do not fit are told, before they are."""

import jax
import pytest

from kvjax import CacheSpec, Full, InfLLM, plan_memory
from kvjax.models.decode.streams import PromptStream
from kvjax.ops import offload
from kvjax.primitives import host_memory
from kvjax.runtime import memory
from kvjax.testing.tiny import model

SMALL = InfLLM(4, 8, 4, 2)
HUGE = CacheSpec(1, 1 << 34, kv_heads=8, groups=4, head_dim=128, layers=32)
GIB = 1 << 30
# A GPU counts the pool of pinned memory, or its own.
ON_A_CPU = pytest.mark.skipif(jax.default_backend() == "gpu", reason="caches lie elsewhere")


@pytest.fixture
def machine(tmp_path, monkeypatch):
  """Writes files of a machine with 64 GiB available, in a group of its own."""
  monkeypatch.setattr(host_memory, "PROCESS", tmp_path / "proc")
  monkeypatch.setattr(host_memory, "GROUPS", tmp_path / "groups")

  def write(**files):
    for name, text in files.items():
      path = tmp_path / name.replace("__", "/")
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(str(text))

  write(proc__meminfo=f"MemTotal: 9 kB\nMemAvailable: {64 << 20} kB\n")
  return write


def test_the_least_of_what_is_left(machine, tmp_path):
  assert host_memory.available() == 64 * GIB and host_memory.resident() == 0
  machine(proc__self__status=f"Name: python\nVmRSS: {3 << 20} kB\n")
  assert host_memory.resident() == 3 * GIB
  machine(proc__self__cgroup="0::/job/7\n")
  folder = "groups__job__7__memory"
  for limit, left in (("max", 64), (20 * GIB, 17), (4 * GIB, 1), (2 * GIB, 0)):
    for name, text in (("max", limit), ("current", 5 * GIB), ("stat", f"inactive_file {2 * GIB}")):
      machine(**{f"{folder}.{name}": text})
    assert host_memory.available() == left * GIB
  old = "groups__memory__memory"
  machine(**{f"{folder}.max": "max", f"{old}.limit_in_bytes": 9 * GIB})
  machine(**{f"{old}.usage_in_bytes": GIB})
  assert host_memory.available() == 8 * GIB


@ON_A_CPU
def test_caches_that_do_not_fit_are_refused_before_anything_is_laid_out(monkeypatch):
  """By every way to them, with the bytes they take and those that there are."""
  monkeypatch.setattr(host_memory, "available", lambda: 60 * GIB)
  says = r"--length: found 17,179,869,184 tokens, whose caches take [\d.]+ TiB of .* 60\.0 GiB"
  with pytest.raises(MemoryError, match=says):
    memory.check_host(InfLLM(), HUGE, "--length")
  spec = model().spec(1, 1 << 32)
  for made in (
    lambda: PromptStream(model(), SMALL, spec),
    lambda: model().init_caches(SMALL, 1, 1 << 32),
    lambda: offload.empty(1, 8, 1 << 24, 128, 128, "float32"),
  ):
    with pytest.raises(MemoryError, match=r"expected at most the 60\.0 GiB of host memory"):
      made()
  memory.check_host(SMALL, model().spec(1, 100))


@ON_A_CPU
@pytest.mark.parametrize("method", [SMALL, Full()], ids=["infllm", "full"])
def test_what_is_too_long_to_count_is_reckoned(method, monkeypatch):
  spec = model().spec(1, 5 << 10)
  exact = plan_memory(spec, method).device
  monkeypatch.setattr(memory, "COUNTED", 1 << 10)
  monkeypatch.setattr(host_memory, "available", lambda: exact - 1)
  with pytest.raises(MemoryError, match="found 5,120 tokens"):
    memory.check_host(method, spec)
  monkeypatch.setattr(host_memory, "available", lambda: exact)
  memory.check_host(method, spec)
