"""Double Sparsity against a NumPy float64 oracle: channels, tokens and outputs; its calibration."""

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax import Attended, DoubleSparsity, Quantised, State, settings
from kvjax.families import sight
from kvjax.methods import double_sparsity
from kvjax.models.decode.generate import prefill
from kvjax.models.nn.transformer import Transformer
from kvjax.programs import calibrate_channels, common
from kvjax.programs.evals import fitted
from kvjax.testing.layer import Layer, Stream, capped
from kvjax.testing.tiny import CONFIG, LENGTHS, TOKENS, model
from scripts.examples.tiny import byte_tokenizer
from tests.oracles import begun, keys, queries, softmax
from tests.selection import Watched, check, choose


def label_channels(stream, b, h, tokens, count):
  """Those with the largest Σ_t mean over the group of |q_d·k_d|, over a prompt's tokens."""
  total = np.zeros(stream.k.shape[-1])
  for t in range(tokens):
    k = keys(stream, b, h, [t])[0]
    for q in queries(stream, b, h, t):
      total += np.abs(q * k)
  return sorted(range(len(total)), key=lambda d: (-total[d], d))[:count]


def oracle(stream, m, channels, cap=None):
  """Tokens by approximate probability over `channels[b, h]`; the newest one is always read."""

  def read(b, h, t):
    use = channels[b, h]
    k = keys(stream, b, h, range(t))[:, use]
    heads = queries(stream, b, h, t)
    p = np.mean([softmax(capped(k @ q[use] / np.sqrt(len(q)), cap)) for q in heads], 0)
    return choose([*p, 0.0], m.sinks, m.local, m.budget - m.sinks - m.local)

  return read


def test_worked_example():
  """|q·k| by channel of two tokens and two query heads: (2 + 0)/2 + 3, (4 + 2)/2 + 0, padding."""
  q = jnp.array([[[[[1.0, 2.0], [-1.0, 5.0], [9, 9]], [[0.0, -1.0], [1.0, 7.0], [9, 9]]]]])
  k = jnp.array([[[[2.0, -2.0], [3.0, 0.0], [9, 9]]]])
  found = jax.jit(double_sparsity.channel_importance)(q, k, jnp.array([[True, True, False]]))
  np.testing.assert_allclose(found, [[[4.0, 3.0]]])


@pytest.mark.core(1)
@pytest.mark.parametrize(
  ("m", "cap"),
  [
    (DoubleSparsity(9, 4, 0, 1), None),
    (DoubleSparsity(12, 8, 2, 4), None),
    (DoubleSparsity(7, 1, 0, 3), None),
    (DoubleSparsity(8, 16), None),  # all channels: the exact selection, but of the newest token
    (DoubleSparsity(9, 4), 0.7),  # approximate logits are capped as exact ones are
  ],
)
def test_a_generation(m, cap):
  """Channels from the prompt, per row and head; one row shorter than the budget."""
  stream, lengths, count = Stream.random(1, tokens=60), [21, 4], m.channels
  channels = {
    (b, h): label_channels(stream, b, h, n, count) for b, n in enumerate(lengths) for h in range(3)
  }
  run = check(m, stream, lengths, 38, oracle(stream, m, channels, cap), cap=cap)
  for (b, h), want in channels.items():
    assert run.cache.heads["channels"][b, h].tolist() == want


@pytest.mark.slow
def test_a_generation_with_given_channels():
  """The prompt changes nothing then; of four given channels the first two are used."""
  m, stream = DoubleSparsity(8, 2), Stream.random(2, tokens=50)
  given = np.random.default_rng(0).permuted(np.tile(np.arange(16), (1, 3, 1)), axis=-1)[..., :4]
  channels = {(b, h): given[0, h, :2] for b in range(2) for h in range(3)}

  def prepare(cache):
    return double_sparsity.calibrated([cache], given)[0]

  check(m, stream, [17, 5], 20, oracle(stream, m, channels), prepare=prepare)


@pytest.mark.slow
def test_labels_follow_the_cache():
  """After a prompt, a second turn (which may change the channels), and steps of one row."""
  stream = Stream.random(4, tokens=60)
  layer = Layer(Watched(DoubleSparsity(8, 4)), stream, capacity=60)

  def check_labels(read, seen):
    heads = jax.tree.map(np.asarray, layer.cache.heads)
    for b, n in enumerate(seen):
      for h in range(3):
        use = label_channels(stream, b, h, read[b], 4)
        assert heads["channels"][b, h].tolist() == use
        want = keys(stream, b, h, range(n))[:, use]
        np.testing.assert_allclose(heads["labels"][b, h, :n], want, atol=1e-5)

  layer.prefill([3, 9])
  check_labels([3, 9], [3, 9])
  first = np.asarray(layer.cache.heads["channels"])
  layer.prefill([20, 0], start=[3, 9], past=None)
  check_labels([23, 9], [23, 9])
  assert (np.asarray(layer.cache.heads["channels"])[0] != first[0]).any()
  for step in range(3):
    layer.decode([23 + step, 9], live=[True, False])
    check_labels([23, 9], [24 + step, 9])


def test_only_tokens_with_a_label_are_scored():
  """Not the newest one; and a row that does not count keeps its labels."""
  stream = Stream.random(5, tokens=20)
  method = DoubleSparsity(8, channels=4)
  layer = begun(method, stream, [12, 7], capacity=20)
  cache, q = layer.cache, stream.q[..., 12, :]

  @jax.jit
  def score(cache, q):
    return method.score(layer.at, cache, q, sight.visible(layer.at, cache))

  @jax.jit
  def observed(cache, q, counted):
    attended = Attended(State(q, q[..., 0], q[..., 0]), None, None, cache.used, counted=counted)
    return method.observe(layer.at, cache, q, sight.visible(layer.at, cache), attended)[0]

  scores = np.asarray(score(cache, q))
  for b, seen in enumerate((12, 7)):
    assert ((scores[b] > 0) == (np.arange(20) < seen - 1)).all()
  low = cache.put(heads={"labels": cache.heads["labels"].astype(jnp.bfloat16)})
  flag = "xla_cpu_use_fusion_emitters"  # tests turn it off where there is a choice
  how = {flag: True} if flag in os.environ["XLA_FLAGS"] else {}
  # Queries and labels of 8 bits; logits here are about 1.
  run = score.lower(low, jnp.bfloat16(q)).compile(how)
  np.testing.assert_allclose(run(low, jnp.bfloat16(q)), scores, atol=0.01)
  changed = cache.put(slots={"k": cache.slots["k"] + 1.0})
  after = observed(changed, q, np.array([True, False]))
  new, old = (np.asarray(x.heads["labels"]) for x in (after, cache))
  np.testing.assert_array_equal(new[1], old[1])
  assert (new[0] != old[0]).any()


@pytest.mark.parametrize("over", [lambda m: m, Quantised], ids=["alone", "codes"])
def test_live_caches_are_labelled_anew(over):
  """Channels that come late give what channels that were there from the start give."""
  m = over(DoubleSparsity(budget=12, channels=4))
  given = np.random.default_rng(1).permuted(np.tile(np.arange(16), (4, 2, 1)), axis=-1)

  def start():
    return m.init_caches(model().spec(2, 64, jnp.bfloat16))

  early = double_sparsity.calibrated(start(), given)
  _, early = prefill(model(), TOKENS[:, :23], LENGTHS, early, m)
  _, late = prefill(model(), TOKENS[:, :23], LENGTHS, start(), m)
  late = double_sparsity.calibrated(late, given)
  assert jax.tree.map(jax.typeof, early) == jax.tree.map(jax.typeof, start())
  for a, b in zip(early, late, strict=True):
    used = (np.asarray(a.pos) >= 0)[..., None]
    np.testing.assert_array_equal(a.heads["channels"], b.heads["channels"])
    np.testing.assert_array_equal(a.heads["labels"] * used, b.heads["labels"] * used)


@pytest.mark.parametrize(("head_dim", "kept", "authors"), [(64, 16, 64), (128, 16, 64), (8, 8, 8)])
def test_channels_are_counted(head_dim, kept, authors):
  """As many of large heads as of small ones; the authors halve those of 128."""
  spec = Stream.random(0, head_dim=head_dim).spec(20)
  for m, dense, count in (
    (DoubleSparsity(), 0, kept),
    (settings.repo(DoubleSparsity, 12), 2, authors),
  ):
    held = [cache.heads for cache in m.init_caches(spec)]
    assert all("labels" not in heads for heads in held[:dense])
    for heads in held[dense:]:
      assert heads["labels"].shape == (2, 3, 20, count)
      assert len(set(heads["channels"][0, 0].tolist())) == count


# ---- calibration over text


@pytest.mark.slow
def test_calibration_sums_over_pieces():
  """Two pieces in one batch, then one alone, against the caches of the three prompts."""
  args = calibrate_channels.Args(pathlib.Path("x.npz"), samples=3, length=10, batch=2)
  ids = TOKENS.reshape(-1)[:30].tolist()
  total = 0.0
  for piece in np.reshape(ids, (3, 10)):
    m = DoubleSparsity()
    caches = m.init_caches(model().spec(1, 10))
    _, caches = prefill(model(), piece[None], [10], caches, m)
    total = total + double_sparsity.importance(caches)
  assert total.shape == (4, 2, 16)
  found = calibrate_channels.calibrate(model(), ids, args)
  np.testing.assert_array_equal(found, np.argsort(-total, -1))


@pytest.mark.slow
def test_script_writes_what_caches_take(tmp_path, monkeypatch, capsys):
  text = tmp_path / "text.txt"
  text.write_text("A river runs to the sea. " * 10, "utf-8")
  config = CONFIG.__class__(**{**vars(CONFIG), "vocab": 256})
  tiny = Transformer(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
  monkeypatch.setattr(common, "load_model", lambda checkpoint: (tiny, byte_tokenizer()))
  out = tmp_path / "channels.npz"
  args = calibrate_channels.Args(out, text=text, samples=2, length=64, batch=2)
  calibrate_channels.main(args)
  assert "16 channels of 2 heads in 4 layers" in capsys.readouterr().out
  with np.load(out, allow_pickle=False) as file:
    assert json.loads(str(file["about"]))["computed_in"] == "float32"
  held = fitted.of(out)
  assert held["text"] == "text.txt" and (held["samples"], held["length"]) == (2, 64)
  assert held["fingerprints"].split() == sorted(fitted.fingerprints(text.read_text()[:128]))
  channels = double_sparsity.load_channels(out)
  assert channels.shape == (4, 2, 16) and channels.dtype == np.int32
  m = DoubleSparsity(channels=4)
  caches = double_sparsity.calibrated(m.init_caches(tiny.spec(3, 20)), channels)
  for cache, want in zip(caches, channels, strict=True):
    np.testing.assert_array_equal(cache.heads["channels"], [want[:, :4]] * 3)
  with pytest.raises(ValueError, match="--text: found 250 tokens, expected 640"):
    calibrate_channels.main(calibrate_channels.Args(out, text=text, samples=10, length=64))
  with pytest.raises(ValueError, match="expected a name that ends in"):
    calibrate_channels.main(calibrate_channels.Args(tmp_path / "x"))


def test_refuses_what_does_not_fit(tmp_path):
  m = DoubleSparsity(channels=4)
  caches = m.init_caches(Stream.random(0).spec(20, layers=2))
  fits = np.tile(np.arange(16), (2, 3, 1))
  with pytest.raises(ValueError, match=r"found shape \(1, 3, 16\), expected \(2, 3, 4 or more\)"):
    double_sparsity.calibrated(caches, fits[:1])
  with pytest.raises(ValueError, match="found 1 to 16, expected 0 to 15"):
    double_sparsity.calibrated(caches, fits + 1)
  with pytest.raises(ValueError, match="expected 0 to 15, integers"):  # importance is no order
    double_sparsity.calibrated(caches, fits / 2)
  with pytest.raises(ValueError, match="channels: found one twice among the first"):
    double_sparsity.calibrated(caches, 0 * fits)
  bare = Stream.random(0).spec(20, layers=2)
  with pytest.raises(ValueError, match="found no labels"):
    double_sparsity.calibrated(DoubleSparsity(dense_layers=2).init_caches(bare), fits)
  with pytest.raises(ValueError, match="found no labels"):
    double_sparsity.calibrated((), fits)
  for made, where in ((DoubleSparsity(dense_layers=1).init_caches(bare), r"\[0\]"), ((), "at all")):
    with pytest.raises(ValueError, match=f"no importance of channels in layers {where}"):
      double_sparsity.importance(made)
  np.savez(tmp_path / "other.npz", x=fits)
  with pytest.raises(ValueError, match=r"found arrays \['x'\]"):
    double_sparsity.load_channels(tmp_path / "other.npz")
  whole = (tmp_path / "other.npz").read_bytes()
  np.save(tmp_path / "one.npy", fits)
  for data in (b"", b"text", whole[:-9], (tmp_path / "one.npy").read_bytes()):
    (tmp_path / "damaged.npz").write_bytes(data)
    with pytest.raises(ValueError, match=r"damaged\.npz: found .*expected a whole \.npz file"):
      double_sparsity.load_channels(tmp_path / "damaged.npz")
  np.savez(tmp_path / "part.npz", channels=fits[..., :4] + 1)
  with pytest.raises(ValueError, match="expected every channel once"):
    double_sparsity.load_channels(tmp_path / "part.npz")
