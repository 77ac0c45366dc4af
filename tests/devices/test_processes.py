"""A mesh over the devices of several processes: what each of them gets is what one device gives."""

import functools
import json

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models.io import convert
from kvjax.programs import common, evaluate
from kvjax.programs.evals import store
from tests import processes, tiny_gguf
from tests.sharded import SPREAD

LOOP = """
import jax.numpy as jnp
import numpy as np
from flax import nnx
import kvjax
from kvjax.models.nn.config import ModelConfig
from kvjax.models.decode.caches import restore, save, save_async
from kvjax.models.decode.generate import generate, prefill
from kvjax.models.nn.parallel import shard
from kvjax.models.nn.transformer import Transformer
from kvjax.runtime.processes import of_first, together
from tests.meshes import whole

assert len(jax.devices()) == 4 and len(jax.local_devices()) == 4 // int(count)
config = ModelConfig(vocab=64, dim=32, layers=2, heads=8, kv_heads=4, head_dim=8, ffn=64)
model = Transformer(config, dtype=jnp.float32, impl="reference", rngs=nnx.Rngs(0))
method, mesh, out = kvjax.H2O(budget=8), kvjax.make_mesh(heads=4), []
with together():
  prompt = of_first(lambda: list(range(1, 13)))
  for decoder in (model, shard(model, mesh)):
    caches = decoder.init_caches(method, batch=1, capacity=32)
    state = prefill(decoder, np.array([prompt]), np.array([12]), caches, method)
    if decoder.mesh is not None:
      kept = whole(state)
      saving = save_async(arguments[0], *state, method, decoder.spec(1, 32))
    out.append(generate(decoder, *state, method, steps=6, return_logits=True)[0])
  np.testing.assert_array_equal(out[0].tokens, out[1].tokens)
  np.testing.assert_allclose(out[0].logits, out[1].logits, atol=1e-4)
  for to in (mesh, None):  # also the whole of it, by each process
    found = restore(saving.wait(), method, model.spec(1, 32), mesh=to)
    jax.tree.map(np.testing.assert_array_equal, whole(found), kept)
  again = generate(model, *found, method, steps=6)[0]
  np.testing.assert_array_equal(again.tokens, out[0].tokens)
  print("alike")
"""


@pytest.mark.rest(1)
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_own_loops(tmp_path, count):
  """The same text everywhere; caches saved by all meanwhile, and restored in parts and whole."""
  for said in processes.output(LOOP, count, tmp_path / "x", devices=4 // count):
    assert said.endswith("alike\n")
  assert [path.name for path in (tmp_path / "x").iterdir()] == ["1"]


LAWS = """
import pytest
from kvjax import METHODS
from tests import sharded

for name in arguments[2:]:
  try:
    sharded.check(name, (int(arguments[0]), int(arguments[1])))
  except pytest.skip.Exception:  # refused, as it says
    pass
print("held")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "names"),
  [
    ((2, 1), ["h2o", "kivi"]),
    pytest.param((2, 2), ["quest"], marks=pytest.mark.sweep),
    pytest.param((2, 1), list(kvjax.METHODS), marks=pytest.mark.sweep),
    pytest.param((1, 2), SPREAD, marks=pytest.mark.sweep),
  ],
)
def test_laws_of_sharding(mesh, names):
  """Logits of one device, no collective of a cache, caches in place: a device to a process."""
  for said in processes.output(LAWS, mesh[0] * mesh[1], *mesh, *names, timeout=1200):
    assert said.endswith("held\n")


def begun(count, *arguments, last=()):
  """Processes of a command of kvjax; the last one has further arguments."""
  at = processes.port()
  there = ["--coordinator", f"localhost:{at}", "--processes", count, "--process"]
  each = [[*there, i] for i in range(count)] if count > 1 else [[]]
  each[-1] += last
  return processes.started([["-m", "kvjax", *arguments, *own] for own in each])


def ran(*given, **how):
  """Status, lines of standard output, and standard error of each process of a command."""
  results = processes.ended(begun(*given, **how))
  quiet = [[x for x in out.splitlines() if "[Gloo]" not in x] for _, out, _ in results]
  return [(status, out, said) for (status, _, said), out in zip(results, quiet, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  root = tmp_path_factory.mktemp("model")
  tiny_gguf.write(root / "x.gguf")
  return convert.convert(root / "x.gguf", root / "x", to="orbax", progress=False)


@pytest.mark.rest(1)
@pytest.mark.slow
@pytest.mark.parametrize("form", ["prompt", "file"])
def test_generate(folder, tmp_path, form):
  """Text of the first process alone, and the same from one and four."""
  (tmp_path / "asked.txt").write_text("hello\nhello 12\nthe hello\n")
  asked = ["hello 12"] if form == "prompt" else ["--file", tmp_path / "asked.txt", "--rows", 2]
  asked += ["--checkpoint", folder, "--steps", 6, "--method", "quest:page=8", "--budget", 32]
  asked += ["--temperature", 9.0]
  (wanted,) = ran(1, "generate", *asked)
  (status, text, said), *others = ran(4, "generate", *asked, "--mesh", 2, 2)
  assert wanted[0] == 0 and "".join(wanted[1])
  assert status == 0 and text == wanted[1], said
  assert all(x == (0, [], "") for x in others), others


@pytest.mark.slow
def test_an_error_of_one_program_ends_all(folder):
  """Only the first process reads the prompt, and finds it empty."""
  for status, text, said in ran(2, "generate", " ", "--checkpoint", folder):
    assert (status, text) == (1, []) and "error: PROMPT: found ' ', expected a text\n" in said


@pytest.mark.slow
def test_other_arguments_of_one_end_all():
  for status, text, said in ran(2, "generate", "hello", "--seed", 1, last=["--seed", 2]):
    assert (status, text) == (1, [])
    assert "error: --seed: found 2, expected 1, as on the first process" in said


def evaluated(out, folder):
  """Arguments of an evaluation of answers, and of given text."""
  what = ("--tasks", "needle", "kl", "--methods", "snapkv", "--lengths", 480, "--budgets", 64)
  how = ("--samples", 2, "--batch", 2, "--checkpoint", folder, "--out", out)
  return [str(x) for x in (*what, *how)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*max_context = 128")  # a prompt of bytes is longer
def test_evaluate(folder, tmp_path):
  """A killed run is resumed: the other rows, and all scores, are those of one process."""
  out, one = tmp_path / "out", tmp_path / "one"
  alone = common.parse(evaluate.Args, "evaluate", evaluated(one, folder))
  wanted = {store.key(x): x for x in evaluate.evaluate(alone, *common.load_model(folder))}
  out.mkdir()
  settings = store.settings_of(one) | {"mesh": [2, 1]}
  (out / store.SETTINGS).write_text(json.dumps(settings))
  first, second = (one / store.ROWS).read_text().splitlines(keepends=True)[:2]
  (out / store.ROWS).write_text(first + second[:-9])
  (status, text, said), other = ran(2, "evaluate", *evaluated(out, folder))
  assert status == 0 and text[-1] == f"  8 rows in {out / store.ROWS}", said
  assert other == (0, [], "") and store.settings_of(out) == settings
  found = {store.key(x): x for x in store.read(out)}
  assert next(iter(found.values())) == json.loads(first)
  for row, want in ((found[key], wanted.pop(key)) for key in found):
    for facts in (row, want):
      del facts["seconds"]
    numbers = [(x.pop("also"), x.pop("positions", {})) for x in (row, want)]
    assert row == want
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), *numbers)
  assert not wanted


ERROR = """
import numpy as np
import kvjax
from jax.sharding import NamedSharding, PartitionSpec
from kvjax.runtime.processes import together
failing, how = arguments
split = NamedSharding(kvjax.make_mesh(heads=int(count)), PartitionSpec("heads"))
x, total = jax.device_put(np.arange(8.0), split), jax.jit(lambda x: x.sum())
with together():
  for i in range(10_000_000):  # until it ends
    total(x).block_until_ready()
    if i == 3 and rank == failing:
      sys.exit("error: because") if how == "exit" else 1 / 0
"""


@pytest.mark.rest(2)
@pytest.mark.slow
@pytest.mark.parametrize(
  ("count", "failing", "how"), [(2, 1, "exit"), (4, 0, "raise"), (2, 0, "exit"), (4, 2, "raise")]
)
def test_an_error_of_one_ends_all(count, failing, how):
  """Within seconds, while the others wait for it in a collective, and all print it."""
  text = "error: because" if how == "exit" else "ZeroDivisionError: division by zero"
  results = processes.ended(processes.start(ERROR, count, failing, how), timeout=100)
  for rank, (status, _, said) in enumerate(results):
    assert status == 1 and "\n".join(said.splitlines()[-1:]) == (
      text if rank == failing else f"process {failing}: {text}"
    )
