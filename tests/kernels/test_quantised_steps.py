"""Decode steps over codes by kernels: what they select, name and give, against the reference's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ART, H2O, METHODS, TOVA, Env, LongFlow, Quantised, Quest, settings
from kvjax.testing.layer import Layer, Stream, rotate
from tests import steps
from tests.coded import kept, own_rounded
from tests.kernels.listed import LENGTHS, alike, taken
from tests.oracles import held, softmax

# Methods whose steps list tiles of what they keep, and leave attention to them as it is.
LISTING = ("quest", "infllm_v2", "rocketkv", "double_sparsity", "topk_oracle", "hshare", "cis")
LISTING += ("cpe", "twilight")


@dataclasses.dataclass(frozen=True)
class Telling(Quantised):
  """Reports what a step listed."""

  def observe(self, at, cache, q, plan, attended):
    after, aux = super().observe(at, cache, q, plan, attended)
    by_kernel = jnp.full(len(cache.seen), attended.logits is None)
    return after, {**aux, "listed": plan.table, "count": plan.count, "by_kernel": by_kernel}


@pytest.mark.rest(4)
@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", LISTING)
def test_what_is_listed_is_attended_to_in_codes(name, bits):
  """The same tiles, the same number of slots, codes to the bit; K = 3 and G = 3."""
  method = Telling(settings.example(METHODS[name], 12), bits=bits)
  stream = Stream.random(11)
  made = alike(method, stream, 3, "count", "visited")
  (_, told, cache), (_, expected, reference) = made
  for by, of in zip(told, expected, strict=True):
    assert by["by_kernel"].all() and not of["by_kernel"].any()
    np.testing.assert_array_equal(np.sort(by["listed"]), np.sort(of["listed"]))
  for leaf in {"pos", "k", "v", "k_scale", "v_scale", "k_zero", "v_zero"} & {*cache.slots}:
    np.testing.assert_array_equal(cache.slots[leaf], reference.slots[leaf], err_msg=leaf)
  for leaf in {"key_min", "key_max"} & {*cache.heads}:  # made of what is stored, after the launch
    np.testing.assert_array_equal(cache.heads[leaf], reference.heads[leaf], err_msg=leaf)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "pallas"])
@pytest.mark.parametrize("bits", [8, 4])
def test_longflow_names_by_what_is_stored(bits, impl):
  """Σ_g α_g · ‖v‖₁ of rounded queries, keys and values, in NumPy's float64 (Alg. 1)."""
  stream, base = Stream.random(12), LongFlow(12, window_size=4, sinks=1)
  layer = Layer(Quantised(base, bits=bits), stream, env=Env(4, impl=impl, tile=4))
  layer.prefill(LENGTHS)
  for step in range(6):
    at = [n + step for n in LENGTHS]
    layer.decode(at)
    named = np.asarray(layer.cache.heads["victim"])
    for b, h in np.ndindex(*named.shape):
      positions = held(layer.cache, b, h)
      keys, values = kept(stream, b, h, LENGTHS[b], positions, bits)
      total = np.zeros(len(positions))
      for query in stream.q[b, h, :, at[b]]:
        total += softmax(keys @ own_rounded(rotate(query, at[b]), 8) / np.sqrt(len(query)))
      size = total * np.abs(values).sum(-1)
      free = [p if 1 <= p < at[b] else -1 for p in positions]
      least = min((s, p) for s, p in zip(size, free, strict=True) if p >= 0)
      assert layer.cache.pos[b, h, named[b, h]] == least[1], (step, b, h)


@pytest.mark.slow
@pytest.mark.parametrize("base", [H2O(12), TOVA(12)], ids=["h2o", "tova"])
@pytest.mark.parametrize("bits", [8, 4])
def test_statistics_of_logits_over_codes(base, bits):
  """By the kernel's logits as by the reference's, and so the same tokens stay."""
  method, stream = Quantised(base, bits=bits), Stream.random(13)
  (_, _, cache), (_, _, reference) = alike(method, stream, 1)
  np.testing.assert_array_equal(cache.pos, reference.pos)
  for name, x in reference.slots.items():
    np.testing.assert_allclose(cache.slots[name], x, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_on_a_gpu_no_launch_takes_keys_made_for_it(monkeypatch):
  """Under "auto": attention reads codes, and no kernel brings their page's summaries up to date.

  Of numbers a page's extremes are, in the launch that enters the token, and a compressed key by one
  of its own.
  """
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(steps, "Env", lambda *args, impl, **how: Env(*args, impl="auto", **how))
  quest, infllm = (settings.example(METHODS[name], 256) for name in ("quest", "infllm_v2"))
  renewing = {"renew_extremes", "renew_mean"}
  for base, scoring, own in (
    (quest, {"page_bounds"}, set()),
    (infllm, {"key_logits", "key_weights"}, {"renew_mean"}),
  ):
    launched = {}
    for method in (base, Quantised(base)):
      counts = steps.operations(method)
      launched[method] = {x.removeprefix("launch ") for x in counts if x.startswith("launch ")}
    assert launched[base] >= {"sparse_attend"} | scoring and launched[base] & renewing == own
    reading = {"top_k", "sparse_int8", "decode_join"}
    assert launched[Quantised(base)] == {"enter_codes"} | reading | scoring


@pytest.mark.slow
def test_tables_over_codes_write_no_logits():
  """A selection whose statistics are made of logits: by name it is refused, not read otherwise."""

  @dataclasses.dataclass(frozen=True)
  class Reading(Quest):
    @property
    def traits(self):
      return super().traits.but(wants_logits=True)

  method = Quantised(Reading(8, page=4, dense_layers=0))
  with pytest.raises(NotImplementedError, match=r"attend_table: Quantised reads logits"):
    taken(method, Stream.random(5), "pallas", layer=1, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("codes", [{"bits": 2}, {"group": 8}])
@pytest.mark.parametrize(
  ("base", "operation"),
  [(Quest(8, page=4, dense_layers=0), "attend_quantised_table"), (ART(splits=1), "art_quantised")],
)
def test_codes_that_no_kernel_takes_are_refused_by_name(base, operation, codes):
  with pytest.raises(NotImplementedError, match=f"{operation}: Quantised has .*the kernel takes 8"):
    taken(Quantised(base, **codes), Stream.random(5), "pallas", layer=1, steps=1)
