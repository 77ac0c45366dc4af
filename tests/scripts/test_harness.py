"""The lm-eval adapter on local tasks, against log-likelihoods from one plain forward pass."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import kvjax
from kvjax.models.decode.generate import generate, pad, prefill
from kvjax.models.decode.sampling import Sampling
from kvjax.models.io import convert
from scripts.examples import tiny
from tests import plain

pytest.importorskip("lm_eval")
# What lm-eval and its own dependencies warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = ["the cat sat on the mat", "a dog", "three birds flew away over the long grey wall"]


def adapter(loaded, method=None, **kwargs):
  from kvjax.programs.evals.harness import KVCacheLM

  return KVCacheLM(*loaded, method or kvjax.Full(), batch=2, **kwargs)


def expected(loaded, context, continuation):
  """Log-probability of the continuation's bytes, and whether each is the likeliest."""
  model, tokenizer = loaded
  first, rest = (tokenizer.encode(text, bos=False) for text in (context, continuation))
  first = first or [tokenizer.eos]
  logits = plain.logits(model, [first + rest])
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


@pytest.mark.core(1)
def test_what_greedy_decoding_says_is_greedy(loaded):
  ids = loaded[1].encode(TEXTS[0], bos=False)
  first = int(plain.logits(loaded[0], [ids])[0, -1].argmax())
  pairs = [(None, ids, [token]) for token in (first, (first + 1) % 256)]
  found = adapter(loaded)._loglikelihood_tokens([*pairs, (None, (2 * ids)[:33], [])])
  assert [greedy for _, greedy in found] == [True, False, True] and found[2][0] == 0


@pytest.mark.slow
def test_one_token_that_greedy_decoding_would_not_say_is_enough(loaded):
  """Though it would say all that follow, which are scored a piece at a time."""
  lm, (model, tokenizer) = adapter(loaded), loaded
  ids = tokenizer.encode(TEXTS[0], bos=False)
  caches = kvjax.Full().init_caches(model.spec(1, 128))
  logits, caches = prefill(model, *pad([ids]), caches, kvjax.Full())
  forced = np.full((1, 40), -1, np.int32)
  forced[0, 0] = np.asarray(logits).argmin()
  generation, _ = generate(model, logits, caches, kvjax.Full(), steps=40, forced=forced)
  first, *rest = generation.tokens[0].tolist()
  ((_, all_of_it),) = lm._loglikelihood_tokens([(None, ids, [first, *rest])])
  ((_, what_follows),) = lm._loglikelihood_tokens([(None, [*ids, first], rest)])
  assert what_follows and not all_of_it


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*max_context")
def test_no_token_is_read_past_the_models_context(loaded, monkeypatch):
  """Contexts of two lengths with as much as fits after them; the last token is predicted alone."""
  model, tokenizer = loaded
  ids = tokenizer.encode(TEXTS[2], bos=False)
  pairs = [(None, ids[:4], ids[4:41]), (None, ids[:30], ids[30:41])]
  wanted = [expected(loaded, *map(tokenizer.decode, pair[1:]))[0] for pair in pairs]
  limited = dataclasses.replace(model.config, limited=True, max_context=40)
  monkeypatch.setattr(model, "config", limited)
  found = adapter(loaded)._loglikelihood_tokens(pairs)
  np.testing.assert_allclose([value for value, _ in found], wanted, rtol=1e-4)


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


@pytest.mark.slow
def test_long_contexts_lose_their_beginning(loaded):
  lm = adapter(loaded, max_length=20)
  ((value, _),) = lm.loglikelihood([request("x" * 50 + TEXTS[0], " end")])
  # 17 and 4 tokens, the last of which is predicted and not read.
  np.testing.assert_allclose(value, expected(loaded, TEXTS[0][-17:], " end")[0], rtol=1e-4)
  found = "continuation: found 21 tokens, expected at most max_length"
  with pytest.raises(ValueError, match=found):
    lm.loglikelihood([request("x", "y" * 21)])


@pytest.mark.slow
def test_answers_end_where_they_should(loaded):
  """Stop strings end an answer; a request's own settings hold for it alone."""
  lm = adapter(loaded, max_new_tokens=12)
  asked = {"until": []}, {"until": [], "max_gen_toks": 3}
  whole, short = lm.generate_until([request(TEXTS[0], given) for given in asked])
  assert whole.startswith(short[:1])
  stop = whole[len(whole) // 2]
  (cut,) = lm.generate_until([request(TEXTS[0], {"until": stop})])
  assert cut == whole[: whole.index(stop)]
  drawn = {"until": [], "do_sample": True, "temperature": 2.0}
  (other,) = lm.generate_until([request(TEXTS[0], drawn)])
  assert other != whole


def fed(lm, *requests):
  """Prompts that are read, in order, and the settings of their answers."""
  seen = {}

  def answer(pairs, setting):
    seen.update({tuple(prompt): setting for prompt, _ in pairs})
    return [""] * len(pairs)

  lm._answer = answer
  lm.generate_until([request(*one) for one in requests])
  return seen


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens"])
@pytest.mark.parametrize("tokens", [63, 64, 65, 256])
def test_an_answer_leaves_its_prompt_a_token(loaded, name, tokens, capsys):
  """A prompt keeps its end; none is left empty, and nothing runs past `max_length`."""
  lm = adapter(loaded, max_length=64)
  asked = ("x" * 80, {name: tokens}), ("ab", {name: tokens})
  if tokens >= 64:
    found = f"max_gen_toks: found {tokens}, expected less than max_len"
    with pytest.raises(ValueError, match=found):
      fed(lm, ("short", {name: 4}), *asked)
    return
  assert sorted(map(len, fed(lm, *asked))) == [1, 1]
  assert "2 of 2 prompts lose their beginning" in capsys.readouterr().err
  assert max(map(len, fed(lm, ("x" * 80, {name: 16})))) == 48


def test_an_empty_prompt_is_read_as_its_prefix(loaded):
  lm = adapter(loaded)
  assert list(fed(lm, ("", {"until": []}))) == [(lm.prefix_token_id,)]


@pytest.mark.parametrize(
  ("given", "sampling"),
  [
    ({}, {}),
    ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {}),
    ({"temperature": 0.0}, {}),
    ({"temperature": 0.7}, {"temperature": 0.7}),
    (
      {"do_sample": True, "temperature": 1, "top_p": 0.5, "top_k": 7, "min_p": 0.1},
      {"temperature": 1.0, "top_p": 0.5, "top_k": 7, "min_p": 0.1},
    ),
    ({"temperature": 0.7, "top_k": 0}, {"temperature": 0.7}),
    ({"temperature": 0.7, "top_k": -1}, {"temperature": 0.7}),
    ({"temperature": 0.7, "num_beams": 1, "repetition_penalty": 1.0}, {"temperature": 0.7}),
  ],
)
def test_sampling_arguments_are_obeyed(given, sampling):
  from kvjax.programs.evals.harness import Settings

  setting = Settings.of({**given, "until": ["a", "", "b"], "max_tokens": 9, "max_gen_toks": 3}, 5)
  assert setting == Settings(("a", "b"), 3, Sampling(**sampling))
  assert Settings.of({"until": "a"}, 5) == Settings(("a",), 5, Sampling())


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"do_sample": True}, "temperature: found 0.0 with do_sample, expected more than 0"),
    ({"do_sample": "yes"}, "do_sample: found 'yes'"),
    ({"temperature": "0.5"}, "temperature: found '0.5', expected a number"),
    ({"temperature": -1}, "temperature: found -1"),
    ({"temperature": 1, "top_p": 0}, "top_p: found 0"),
    ({"temperature": 1, "top_k": 2.5}, "top_k: found 2.5, expected an integer"),
    ({"max_gen_toks": 0}, "max_gen_toks: found 0, expected at least 1"),
    ({"max_gen_toks": 1.5}, "max_gen_toks: found 1.5, expected an integer"),
    ({"max_gen_toks": True}, "max_gen_toks: found True"),
    ({"num_beams": 4}, "num_beams: found 4, expected 1"),
    ({"repetition_penalty": 1.1}, "repetition_penalty: found 1.1, expected 1"),
    ({"max_length": 99}, "max_length: found 99, expected only until, stop, max_gen_toks"),
    ({"bad_words": []}, "bad_words: found"),
    ({"until": 3}, "until: found 3, expected a string"),
    ({"until": ["a", 3]}, r"until: found \['a', 3\]"),
  ],
)
def test_what_cannot_be_sampled_is_refused_first(loaded, given, message):
  lm = adapter(loaded)
  lm._answer = None  # nothing is answered before the refusal
  with pytest.raises(ValueError, match=message):
    lm.generate_until([request("x", {"until": []}), request("y", given)])


def test_lengths_that_cannot_be_are_refused(loaded):
  for name, value in [*(("max_length", x) for x in (1, 10**7, 64.0)), ("max_new_tokens", 0)]:
    with pytest.raises(ValueError, match=f"{name}: found"):
      adapter(loaded, **{name: value})


def test_chat_templates(loaded):
  from kvjax.programs.evals.harness import KVCacheLM

  lm, tokenizer = adapter(loaded), loaded[1]
  chat = [{"role": "user", "content": "Who?"}]
  assert lm.apply_chat_template(chat) == tokenizer.render(chat)
  assert lm.chat_template(True) == tokenizer.chat_template and lm.chat_template() is None
  other = tiny.byte_tokenizer()
  assert KVCacheLM(loaded[0], other, kvjax.Full()).tokenizer_name == lm.tokenizer_name
  other.chat_template += " "
  assert KVCacheLM(loaded[0], other, kvjax.Full()).tokenizer_name != lm.tokenizer_name


def test_it_is_a_model_of_the_registry(loaded, monkeypatch):
  """Out of --model_args, as text or as JSON."""
  from lm_eval.api.registry import get_model

  from kvjax.programs import common
  from kvjax.programs.evals import harness

  monkeypatch.setattr(common, "load_model", lambda *_, **__: loaded)
  made = get_model("kvjax")
  assert made is harness.KVCacheLM
  batch = {"batch_size": 2, "device": "cuda:0", "max_batch_size": None}
  lm = made.create_from_arg_string("method=snapkv:window_size=4,budget=16,max_length=64", batch)
  assert (lm.method, lm.batch) == (kvjax.SnapKV(budget=16, window_size=4), 2)
  assert lm.max_length == 64
  label = {"method": "snapkv:window_size=4,pool=3", "budget": 16}
  found = made.create_from_arg_obj(label).method
  assert found == kvjax.SnapKV(budget=16, window_size=4, pool=3)
  for given, message in (
    ({"method": "snapkw"}, r"method: found 'snapkw'.*did you mean 'snapkv'"),
    ({"batch_size": "auto"}, "batch_size: found 'auto', expected an integer"),
  ):
    with pytest.raises(ValueError, match=message):
      made.create_from_arg_obj(given)


@pytest.mark.slow
def test_its_command_is_lm_evals(tmp_path):
  """`--model kvjax` over a task of a file."""
  docs, tasks = tmp_path / "docs.jsonl", tmp_path / "tasks"
  docs.write_text("".join(json.dumps({"question": text}) + "\n" for text in TEXTS))
  tasks.mkdir()
  task = {"task": "local_answer", "dataset_path": "json", "test_split": "test"}
  task |= {"dataset_kwargs": {"data_files": {"test": str(docs)}}, "doc_to_text": "{{question}}"}
  task |= {"output_type": "generate_until", "doc_to_target": "x"}
  task |= {"metric_list": [{"metric": "exact_match"}]}
  task |= {"generation_kwargs": {"until": ["q"], "max_gen_toks": 8}}
  (tasks / "local.yaml").write_text(json.dumps(task))  # YAML, too
  source = tiny.huggingface_folder(tmp_path / "source")
  folder = convert.convert(source, tmp_path / "tiny", progress=False)
  command = [sys.executable, "-m", "kvjax.programs.evals.harness", "run", "--model", "kvjax"]
  command += ["--model_args", f"pretrained={folder},method=streaming_llm,budget=16"]
  command += ["--tasks", "local_answer", "--include_path", str(tasks), "--batch_size", "2"]
  env = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
  done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
  assert done.returncode == 0, done.stderr[-2000:]
  assert re.search(r"\|local_answer\|.*\|exact_match\|.*\| +0\|", done.stdout), done.stdout
