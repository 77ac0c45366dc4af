"""Models of other code bases give the logits of their own full cache under methods of ours."""

import functools
import importlib
import importlib.metadata
import importlib.util
import pathlib
import re
import runpy
import sys

import flax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from scripts.examples.integrations import beside
from scripts.tools import support_table

FOLDER = pathlib.Path(beside.__file__).parent
# tunix 0.1.7 takes names that jax and flax will drop.
OLD = pytest.mark.filterwarnings("ignore::DeprecationWarning")
NAMES = ("jax_llm_examples", "bonsai", pytest.param("tunix_gemma", marks=OLD))
# Float32 sums in another order, through up to six layers: a share of the largest logit.
CLOSE = 5e-6


@pytest.fixture(autouse=True, scope="module")
def flags_of_flax():
  """tunix turns a flag of flax off where it is imported."""
  before = flax.config.flax_always_shard_variable
  yield
  flax.config.update("flax_always_shard_variable", before)


def integration(name):
  if name == "tunix_gemma" and importlib.util.find_spec("tunix") is None:
    pytest.skip("google-tunix is not installed: `make test` installs tests/integrations.txt")
  return importlib.import_module(f"scripts.examples.integrations.{name}")


@functools.cache
def theirs(name):
  """The model and the logits of its own full cache."""
  module = integration(name)
  model = module.tiny()
  return model, np.asarray(module.own(model, *beside.tokens()))


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.parametrize("method", beside.METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_integration(name, method):
  """Logits of ragged prompts and of steps after them: equal where all is kept, others if not."""
  model, want = theirs(name)
  neutral, tight = (
    integration(name).kept(model, beside.method(method, neutral=x), *beside.tokens())
    for x in (True, False)
  )
  assert np.isfinite(want).all() and beside.apart(neutral, want) < CLOSE
  assert np.isfinite(tight).all() and beside.apart(tight, want) > 0.02


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_their_own_logits_by_hand(name):
  """The models' own caches: a prompt and steps give what a longer prompt without padding gives."""
  model, want = theirs(name)
  prompt, steps = beside.tokens()
  for row, size in enumerate(beside.LENGTHS):
    whole = jnp.concatenate([prompt[row, -size:], steps[row]])[None]
    alone = np.asarray(integration(name).own(model, whole[:, :-1], whole[:, -1:]))
    scale = abs(want).max()
    np.testing.assert_allclose(want[row, -alone.shape[1] :], alone[0], rtol=0, atol=CLOSE * scale)


@pytest.mark.slow
@OLD
@pytest.mark.parametrize("kv_heads", [1, 6])
def test_other_heads_of_tunix(kv_heads):
  """One key/value head, and one for each query head, which tunix projects together; windows."""
  module = integration("tunix_gemma")
  model, inputs = module.tiny(kv_heads, layers=2), beside.tokens()
  method = beside.method("snapkv", neutral=True)
  assert beside.apart(module.kept(model, method, *inputs), module.own(model, *inputs)) < CLOSE
  with pytest.raises(TypeError, match="images"):
    module.Kept(model, method)(*inputs, None, None, images=None)


class Numbers:
  """A tokenizer whose text is numbers."""

  def encode(self, text, **_):
    return [int(x) for x in text.split()]

  def decode(self, ids, **_):
    return " ".join(map(str, ids))

  def bos_id(self):
    return 1

  def eos_id(self):
    return beside.VOCAB

  def pad_id(self):
    return 0


@pytest.mark.slow
@OLD
def test_the_sampler_of_tunix_says_the_same():
  """tunix's own loop, which pads prompts on the left and donates caches, over ours."""
  module = integration("tunix_gemma")
  sampler = importlib.import_module("tunix.generate.sampler")
  model, _ = theirs("tunix_gemma")
  prompt, _ = beside.tokens()
  texts = [" ".join(map(str, row[row != 0].tolist())) for row in prompt]

  def said(transformer):
    sizes = sampler.CacheConfig(cache_size=48, num_layers=6, num_kv_heads=2, head_dim=16)
    made = sampler.Sampler(transformer, Numbers(), sizes)
    done = made(texts, beside.STEPS, max_prompt_length=32, return_logits=True)
    return done.text, np.stack(done.logits)

  text, want = said(model)
  scale = CLOSE * np.abs(want).max()
  assert want.shape == (2, beside.STEPS, beside.VOCAB)
  again, neutral = said(module.Kept(model, beside.method("snapkv", neutral=True)))
  assert again == text and np.abs(neutral - want).max() < scale
  _, tight = said(module.Kept(model, beside.method("snapkv", neutral=False)))
  assert np.abs(tight - want).max() > 1000 * scale


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_as_a_program(name, monkeypatch, capsys):
  monkeypatch.delitem(sys.modules, integration(name).__name__)
  monkeypatch.setattr(beside, "METHODS", {"quest": kvjax.Quest})
  for arguments, printed in (
    ([], r"^quest: \de-0[678] of the largest logit apart; at a tight setting [01]\.\d\d\n$"),
    (["--help"], "under SnapKV, Quest and ART, beside its own cache"),
  ):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    try:
      runpy.run_module(f"scripts.examples.integrations.{name}", run_name="__main__")
    except SystemExit as done:
      assert not done.code
    assert re.search(printed, capsys.readouterr().out)


def test_the_table_says_what_ran():
  table = support_table.integration_table({"bonsai-snapkv": True, "bonsai-quest": False})
  assert table[0].endswith("| `snapkv` | `quest` |")
  told = {line.split(" | ")[0]: line.split(" | ")[2:] for line in table[2:]}
  assert told["| bonsai"] == ["yes", "no |"] and told["| jax-llm-examples"] == ["–", "– |"]
  version = importlib.metadata.version("google-tunix") if importlib.util.find_spec("tunix") else ""
  assert f"| google-tunix {version}" in "".join(told)


def test_every_integration_is_short_and_run():
  lines = {path.stem: len(path.read_text("utf-8").splitlines()) for path in FOLDER.glob("*.py")}
  names = ["bonsai", "jax_llm_examples", "tunix_gemma", "after_bonsai", "after_jax_llm_examples"]
  assert set(lines) == {*names, "beside", "__init__"}
  assert max(lines.values()) <= 125
