"""The lm-eval adapter on local tasks, against log-likelihoods from one plain forward pass."""

import json

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models.generate import pad, prefill
from scripts.examples import tiny

pytest.importorskip("lm_eval")
# What lm-eval and its own dependencies warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = ["the cat sat on the mat", "a dog", "three birds flew away over the long grey wall"]


@pytest.fixture(scope="module")
def loaded():
  return tiny.load()


def adapter(loaded, method=None, **kwargs):
  from scripts.evals.harness import KVCacheLM

  return KVCacheLM(*loaded, method or kvjax.Full(), batch=2, **kwargs)


def expected(loaded, context, continuation):
  """Log-probability of the continuation's bytes, and whether each is the likeliest."""
  model, tokenizer = loaded
  first, rest = (tokenizer.encode(text, bos=False) for text in (context, continuation))
  first = first or [tokenizer.eos]
  tokens, lengths = pad([first + rest])
  caches = kvjax.Full().init_caches(model.spec(1, tokens.shape[1]))
  logits, _ = prefill(model, tokens, lengths, caches, kvjax.Full(), all_logits=True)
  logp = np.asarray(jax.nn.log_softmax(logits))[0, len(first) - 1 : -1]
  greedy = bool((logp.argmax(-1) == rest).all())
  return logp[np.arange(len(rest)), rest].sum(), greedy


def request(*args):
  from lm_eval.api.instance import Instance

  return Instance(request_type="loglikelihood", doc={}, arguments=args, idx=0)


@pytest.mark.slow
def test_log_likelihoods(loaded):
  """Contexts and continuations of many lengths, in batches, an empty context among them."""
  pairs = [(TEXTS[0], " and slept"), ("", TEXTS[1]), (TEXTS[2], "." * 40), (TEXTS[1], " barks")]
  found = adapter(loaded).loglikelihood([request(*pair) for pair in pairs])
  for (value, greedy), pair in zip(found, pairs, strict=True):
    want, best = expected(loaded, *pair)
    np.testing.assert_allclose(value, want, rtol=1e-4)
    assert greedy == best


def test_what_greedy_decoding_says_is_greedy(loaded):
  lm = adapter(loaded)
  (said,) = lm.generate_until([request(TEXTS[0], {"until": [], "max_gen_toks": 4})])
  ids = loaded[1].encode(TEXTS[0], bos=False)
  model, tokenizer = loaded
  tokens, lengths = pad([ids])
  caches = kvjax.Full().init_caches(model.spec(1, 64))
  logits, _ = prefill(model, tokens, lengths, caches, kvjax.Full())
  first = int(np.asarray(logits).argmax())
  ((_, greedy),) = lm._loglikelihood_tokens([(None, ids, [first])])
  ((_, other),) = lm._loglikelihood_tokens([(None, ids, [(first + 1) % 256])])
  assert greedy and not other
  assert said.startswith(tokenizer.decode([first])) or not tokenizer.decode([first]).isprintable()


@pytest.mark.slow
def test_rolling_windows(loaded):
  """Short texts are one window; of a long one every token is predicted once."""
  short, long = TEXTS[1], " ".join(TEXTS)
  values = adapter(loaded).loglikelihood_rolling([request(short), request(long)])
  for value, text in zip(values, (short, long), strict=True):
    np.testing.assert_allclose(value, expected(loaded, "", text)[0], rtol=1e-4)
  (windowed,) = adapter(loaded, max_length=24).loglikelihood_rolling([request(long)])
  assert windowed < 0 and abs(windowed - values[1]) > 1e-3
  assert adapter(loaded).loglikelihood_rolling([request("")]) == [0]


def test_long_contexts_lose_their_beginning(loaded):
  lm = adapter(loaded, max_length=20)
  ((value, _),) = lm.loglikelihood([request("x" * 50 + TEXTS[0], " end")])
  np.testing.assert_allclose(value, expected(loaded, TEXTS[0][-16:], " end")[0], rtol=1e-4)


def test_answers_end_where_they_should(loaded):
  """Stop strings end an answer; a request's own settings hold for it alone."""
  lm = adapter(loaded, max_new_tokens=12)
  whole, short = lm.generate_until(
    [request(TEXTS[0], {"until": []}), request(TEXTS[0], {"until": [], "max_gen_toks": 3})]
  )
  assert whole.startswith(short[:1])
  stop = whole[len(whole) // 2]
  (cut,) = lm.generate_until([request(TEXTS[0], {"until": stop})])
  assert cut == whole[: whole.index(stop)]
  drawn = {"until": [], "do_sample": True, "temperature": 2.0}
  (other,) = lm.generate_until([request(TEXTS[0], drawn)])
  assert other != whole


@pytest.mark.slow
def test_a_bounded_method_scores_its_own_way(loaded):
  pair = " ".join(TEXTS), " and so on and on"
  bounded = adapter(loaded, kvjax.StreamingLLM(budget=16))
  values = [lm.loglikelihood([request(*pair)])[0][0] for lm in (adapter(loaded), bounded)]
  assert abs(values[0] - values[1]) > 1e-3
  neutral = adapter(loaded, kvjax.settings.neutral(kvjax.StreamingLLM, 512))
  np.testing.assert_allclose(neutral.loglikelihood([request(*pair)])[0][0], values[0], rtol=1e-4)


def test_chat_templates(loaded):
  lm, tokenizer = adapter(loaded), loaded[1]
  chat = [{"role": "user", "content": "Who?"}]
  assert lm.apply_chat_template(chat) == tokenizer.render(chat)
  assert lm.chat_template(True) == tokenizer.chat_template and lm.chat_template() is None
  assert lm.tokenizer_name


@pytest.mark.slow
def test_a_local_task_runs(loaded, tmp_path, monkeypatch):
  """lm-eval's own loop over two tasks of a local file: the choices are scored as by hand."""
  monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
  monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
  import lm_eval
  from lm_eval.tasks import TaskManager

  docs = [{"question": f"{text} and", "choices": [" left", " stayed"]} for text in TEXTS]
  file = tmp_path / "docs.jsonl"
  file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
  common = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(file)}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
  }
  tasks = [
    {
      "task": "local_choice",
      "output_type": "multiple_choice",
      **common,
      "doc_to_choice": "{{choices}}",
      "doc_to_target": 0,
      "target_delimiter": "",
      "metric_list": [{"metric": "acc"}],
    },
    {
      "task": "local_answer",
      "output_type": "generate_until",
      **common,
      "doc_to_target": "x",
      "metric_list": [{"metric": "exact_match"}],
      "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
    },
  ]
  results = lm_eval.simple_evaluate(
    model=adapter(loaded), tasks=tasks, task_manager=TaskManager(), bootstrap_iters=0
  )
  scores = results["results"]
  right = [
    expected(loaded, doc["question"], " left")[0] > expected(loaded, doc["question"], " stayed")[0]
    for doc in docs
  ]
  assert scores["local_choice"]["acc,none"] == pytest.approx(np.mean(right))
  assert scores["local_answer"]["exact_match,none"] == 0
