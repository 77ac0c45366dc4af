"""`kvjax serve`, asked by OpenAI's own client and by lm-evaluation-harness over HTTP."""

import contextlib
import http.client
import json
import socket
import threading
import time

import numpy as np
import pytest

from kvjax.methods import labels
from kvjax.models.decode.requests import Answer
from kvjax.models.decode.sampling import Sampling
from kvjax.models.decode.stopping import RowText
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.programs import common, many
from scripts.examples import tiny
from tests.tiny_tokenizers import FAMILIES, write

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
from kvjax.programs import openai_format, serve  # noqa: E402

# What HTTP libraries and lm-eval warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

METHOD = "streaming_llm"
PROMPTS = ["Name three rivers and the towns on them.", "Who?", "the cat sat on the mat"]
CHAT = [{"role": "user", "content": "Who was it?"}]
TINY = tiny.load()


class Served:
  """A server in a thread, with what asks it."""

  def __init__(self, args):
    self.server, self.engine = serve.server(args)
    self.rows = args.rows
    sock = socket.create_server(("127.0.0.1", 0))
    self.port = sock.getsockname()[1]
    self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [sock]}, daemon=True)
    self.thread.start()
    self.url = f"http://127.0.0.1:{self.port}/v1"
    self.client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)
    self.name = self.client.models.list().data[0].id

  def complete(self, prompt, **how):
    how = {"model": self.name, "temperature": 0, "max_tokens": 8, **how}
    return self.client.completions.create(prompt=prompt, **how)

  def chat(self, **how):
    how = {"model": self.name, "messages": CHAT, "max_tokens": 8, **how}
    return self.client.chat.completions.create(**how)

  def close(self):
    self.client.close()
    self.server.should_exit = True
    self.thread.join(30)
    self.engine.close()
    assert not self.thread.is_alive()


@contextlib.contextmanager
def running(**how):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(common, "load_model", lambda *_, **__: TINY)
    how = {"method": METHOD, "budget": 16, "rows": 2, "capacity": 128, "queue": 2, **how}
    how = {"together": 2, **how}
    served = Served(serve.Args(max_body=5000, **how))
  try:
    yield served
  finally:
    served.close()


@pytest.fixture(scope="module")
def served():
  with running() as found:
    yield found


def alone(prompts, sampling=Sampling(), seed=0, steps=8, **how):  # noqa: B008
  """Texts of `kvjax generate --file`."""
  method = labels.instance(METHOD, 16)
  how = {"encode": lambda text: TINY[1].encode(text, bos=False), "chunk": None, **how}
  how = {"rows": 2, "steps": steps, "sampling": sampling, "seed": seed, "stop": (), **how}
  said = many.answers(*TINY, method, dict(enumerate(prompts)), **how)
  return [each["text"] for each in sorted(said, key=lambda each: each["index"])]


def test_answers_are_those_of_generate(served):
  """As text or as tokens, one by one or together, streamed or not."""
  wanted = alone(PROMPTS)
  found = served.complete(PROMPTS)
  assert [choice.text for choice in found.choices] == wanted
  assert [choice.index for choice in found.choices] == [0, 1, 2]
  assert found.usage.completion_tokens == 24 and found.system_fingerprint.endswith(")")
  ids = [TINY[1].encode(text, bos=False) for text in PROMPTS]
  assert [choice.text for choice in served.complete(ids).choices] == wanted
  assert served.complete(ids[1]).choices[0].text == wanted[1]
  texts = ["", "", ""]
  for chunk in served.complete(PROMPTS, stream=True):
    for choice in chunk.choices:
      texts[choice.index] += choice.text
  assert texts == wanted


def test_draws_hang_on_seeds(served):
  """`n` answers have seeds one after another."""
  drawn = {"temperature": 1.5, "top_p": 0.9, "seed": 7}
  texts = [choice.text for choice in served.complete(PROMPTS[0], n=3, **drawn).choices]
  sampling = Sampling(1.5, top_p=0.9)
  assert texts == [alone([PROMPTS[0]], sampling, seed=seed)[0] for seed in (7, 8, 9)]
  assert len(set(texts)) == 3
  assert served.complete(PROMPTS[0], **{**drawn, "seed": 8}).choices[0].text == texts[1]


def test_stop_strings(served):
  whole = served.complete(PROMPTS[0], max_tokens=24)
  text = whole.choices[0].text
  assert whole.choices[0].finish_reason == "length"
  stop = text[len(text) // 2]
  for given in (stop, [stop, "no such text"]):
    choice = served.complete(PROMPTS[0], max_tokens=24, stop=given).choices[0]
    assert choice.text == text[: text.index(stop)] and choice.finish_reason == "stop"


def test_chats(served):
  """They are their template's text, and may be streamed."""
  answer = served.chat(temperature=0)
  message = answer.choices[0].message
  assert message.content == served.complete(TINY[1].render(CHAT)).choices[0].text
  assert message.role == "assistant" and answer.usage.completion_tokens == 8
  assert answer.usage.prompt_tokens == len(TINY[1].chat(CHAT))
  parts = [chunk.choices[0] for chunk in served.chat(temperature=0, stream=True)]
  assert parts[0].delta.role == "assistant"
  assert "".join(part.delta.content for part in parts) == message.content
  assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]
  text = [{"type": "text", "text": CHAT[0]["content"]}]
  again = served.chat(temperature=0, messages=[{"role": "user", "content": text}])
  assert again.choices[0].message.content == message.content


def test_logprobs(served):
  """Of an answer, and with echo of its prompt; likeliest tokens beside them."""
  answer = served.complete(PROMPTS[2], logprobs=1).choices[0]
  echoed = served.complete(PROMPTS[2], logprobs=1, echo=True).choices[0]
  size = len(PROMPTS[2])
  assert echoed.text == PROMPTS[2] + answer.text
  assert echoed.logprobs.tokens == [*PROMPTS[2], *answer.logprobs.tokens]
  assert echoed.logprobs.text_offset == list(range(size + 8))
  assert echoed.logprobs.token_logprobs[0] is None and echoed.logprobs.top_logprobs[0] is None
  assert echoed.logprobs.token_logprobs[size:] == answer.logprobs.token_logprobs
  top = [max(each.values()) for each in echoed.logprobs.top_logprobs[1:]]
  assert top[size - 1 :] == answer.logprobs.token_logprobs  # greedy
  assert all(a >= b for a, b in zip(top, echoed.logprobs.token_logprobs[1:], strict=True))
  assert served.complete(PROMPTS[2], echo=True).choices[0].logprobs is None


@pytest.mark.parametrize("echo", [True, False])
def test_tokens_of_sentencepiece_have_their_spaces(tmp_path, echo):
  """And their places in the text, behind characters of several tokens and behind a prompt."""
  tokenizer = Tokenizer.from_huggingface(write(tmp_path, FAMILIES["llama2"]()))
  prompt, tokens = (tokenizer.encode(text, bos=False) for text in ("hello \u4e2d", "hello 1"))
  fields = openai_format.Completion(prompt=prompt, echo=echo, logprobs=1, temperature=0)
  asked = fields, tokenizer, {}
  (choice,) = openai_format.choices(*asked, capacity=64, most=1, context=1)
  text = RowText(choice.how["tokenizer"].stream())
  said = "".join([*map(text.feed, tokens), text.flush()])
  choice.answer = Answer(0, np.array(tokens), "limit", said, np.full(len(tokens), -1, np.float32))
  choice.scores = [(token, -1.0, token, -1.0) for token in prompt[1:]] * echo
  found = openai_format.whole(fields, choice, tokenizer)
  assert found["text"] == "hello \u4e2d" * echo + " hello 1"
  names = [*["hello", " ", *["\ufffd"] * 3] * echo, " hello", " ", "1"]
  assert found["logprobs"]["tokens"] == names
  told = [*[None] * echo, *({name: -1.0} for name in names[echo:])]
  assert found["logprobs"]["top_logprobs"] == told
  assert found["logprobs"]["text_offset"] == ([0, 5, 6, 7, 7, 7, 13, 14] if echo else [0, 6, 7])


REFUSED = [  # a request, and what is said of it
  ({"max_tokens": 0}, "max_tokens: found 0, expected at least 1"),
  ({"max_tokens": 200}, "max_tokens: found 200, expected at most 128 with the prompt's 4 tokens"),
  ({"prompt": "x" * 128}, "max_tokens: found 8, expected at most 128"),
  ({"prompt": []}, "prompt: found []"),
  ({"prompt": ["a", 3]}, "prompt: found ['a', 3]"),
  ({"prompt": [[1], [999]]}, "prompt: found [[1], [999]], expected a text, or ids in [0, "),
  ({"n": 0}, "n: found 0"),
  ({"n": 10**12}, "n: found 1000000000000, expected at most 4 choices"),
  ({"logprobs": 5}, "logprobs: found 5"),
  ({"logprobs": 1, "temperature": 1}, "logprobs: found 1, expected 0, or temperature 0"),
  ({"temperature": -1}, "Sampling.temperature: found -1"),
  ({"presence_penalty": 0.5}, "presence_penalty: found 0.5, expected 0"),
  ({"seed": "x"}, "seed: found 'x'"),
  ({"stream": "yes"}, "stream: found 'yes'"),
  ({"stream": True, "echo": True}, "stream: found True, expected false with echo or logprobs"),
  ({"echo": True, "logprobs": 0, "context_tokens": 0}, "context_tokens: found 0"),
  ({"extra": 1}, "extra: found 1, expected only until, stop"),
  ({"model": "other"}, "model: found 'other', expected 'SmolLM2"),
  ({"prompt": "x" * 6000}, "body: found more, expected at most 5000 bytes"),
]
REFUSED_CHATS = [
  ({"messages": []}, "messages: found []"),
  ({"messages": [{"role": "user"}]}, "messages: found"),
  ({"prompt": "Who?"}, "prompt: found 'Who?', expected only"),
  ({"tools": [{"type": "function"}]}, "tools: found"),
  ({"logprobs": True}, "logprobs: found True"),
]


@pytest.mark.parametrize(
  ("path", "given", "message"),
  [("completions", *case) for case in REFUSED] + [("chat/completions", *x) for x in REFUSED_CHATS],
)
def test_what_cannot_be_answered_is_refused(served, path, given, message):
  status = {"model": 404, "body": 413}.get(message.partition(":")[0], 400)
  body = {"prompt": "Who?"} if path == "completions" else {"messages": CHAT}
  body |= {"model": served.name, "max_tokens": 8, "temperature": 0, **given}
  with pytest.raises(openai.APIStatusError) as found:
    served.client.post(f"/{path}", body=body, cast_to=object)
  assert found.value.status_code == status
  assert found.value.body["message"].startswith(message)
  assert served.engine.batcher.free == 2


def test_what_changes_nothing_is_ignored(served):
  given = {"presence_penalty": 0, "user": "me", "suffix": None}
  given["extra_body"] = {"top_k": -1, "repetition_penalty": 1.0, "context_tokens": None}
  given |= {"logit_bias": {}, "best_of": 1, "stream_options": {"include_usage": True}}
  wanted = served.complete(PROMPTS[0]).choices[0].text
  assert served.complete(PROMPTS[0], **given).choices[0].text == wanted


def test_tokens_of_a_stream_are_told_at_its_end(served):
  asked = {"n": 2, "temperature": 0}
  *parts, last = served.chat(**asked, stream=True, stream_options={"include_usage": True})
  assert (last.choices, last.usage) == ([], served.chat(**asked).usage)
  assert all(part.choices and part.usage is None for part in parts)


def test_options_are_refused_before_the_model_is_loaded(monkeypatch):
  monkeypatch.setattr(common, "load_model", None)
  with pytest.raises(NotImplementedError, match="chunk: found 8, expected None for KIVI"):
    serve.Service(serve.Args(method="kivi", prefill_chunk=8))
  with pytest.raises(ValueError, match="--template-args: found '3'"):
    serve.Service(serve.Args(template_args="3"))
  taken, busy = socket.create_server(("127.0.0.1", 0)), r"--port: found \d+ of 127\.0\.0\.1 "
  with taken, pytest.raises(OSError, match=rf"{busy}\(.*in use\), expected one that is free"):
    serve.main(serve.Args(port=taken.getsockname()[1]))

  def unknown(*args, **how):
    raise socket.gaierror(socket.EAI_NONAME, "not known")

  monkeypatch.setattr(socket, "getaddrinfo", unknown)
  with pytest.raises(OSError, match=r"--host: found 'x' \(not known\), expected an address"):
    serve.main(serve.Args(host="x"))


def posted(served, body, headers=None, path="/v1/completions"):
  link = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
  headers = {"content-type": "application/json", **(headers or {})}
  link.request("POST", path, body, headers)
  return link


@pytest.mark.parametrize(
  ("body", "headers", "path", "status"),
  [
    ("{", {}, "/v1/completions", 400),
    ("[" * 4000, {}, "/v1/completions", 400),
    ("[]", {}, "/v1/chat/completions", 400),
    ('{"prompt": "\\ud800"}', {}, "/v1/completions", 400),
    ('{"messages": 3}', {}, "/v1/chat/completions", 400),
    ("{}", {"content-type": "text/plain"}, "/v1/completions", 415),  # of a page of a browser
    ("{}", {"host": "elsewhere.example"}, "/v1/completions", 400),
    ("{}", {}, "/v1/embeddings", 404),
    ("{}", {}, "/v1/models", 405),
  ],
)
def test_what_is_no_request(served, body, headers, path, status):
  assert posted(served, body, headers, path).getresponse().status == status


@pytest.fixture
def slowly(served, monkeypatch):
  """A step takes a while, and is counted."""
  step, steps = served.engine.batcher.step, []

  def slow():
    steps.append(time.sleep(0.05))
    step()

  monkeypatch.setattr(served.engine.batcher, "step", slow)
  return steps


def until(what):
  end = time.monotonic() + 20
  while not what() and time.monotonic() < end:
    time.sleep(0.02)
  assert what()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_is_gone_frees_its_rows(served, slowly, stream):
  """Also that of an answer which waits for a row."""
  asked = {"prompt": "Who?", "max_tokens": 120, "n": 3, "stream": stream, "stop": "no such text"}
  link = posted(served, json.dumps(asked))
  until(lambda: served.engine.batcher.free == 0)
  if stream:
    assert link.getresponse().read(5) == b"data:"
  link.close()
  until(lambda: served.engine.batcher.free == 2)
  assert len(slowly) < 60
  served.complete("Who?", n=4)  # all are counted as gone


def test_a_full_queue_is_said(served, slowly):
  link = posted(served, json.dumps({"prompt": "Who?", "max_tokens": 120, "n": 4}))
  until(lambda: served.engine.batcher.free == 0)
  with pytest.raises(openai.RateLimitError, match="queue: found 4 of 4 choices") as found:
    served.complete("Who?")
  assert found.value.response.headers["retry-after"] == "1"
  link.close()
  until(lambda: served.engine.batcher.free == 2)


def test_a_server_that_is_stopped_says_so(monkeypatch):
  with running() as served:
    step, begun = served.engine.batcher.step, threading.Event()

    def slow():
      begun.set()
      time.sleep(0.3)
      step()

    monkeypatch.setattr(served.engine.batcher, "step", slow)
    link = posted(served, json.dumps({"prompt": "Who?", "max_tokens": 20}))
    assert begun.wait(20)
    served.server.should_exit = True
    answer = link.getresponse()
    assert answer.status == 503 and b"the server was stopped" in answer.read()


def test_a_device_that_fails_is_said(served, monkeypatch):
  def fail():
    raise RuntimeError("the device is gone")

  monkeypatch.setattr(served.engine.batcher, "step", fail)
  with pytest.raises(openai.InternalServerError, match="the device is gone"):
    served.complete("Who?")


def of_harness(served, method, budget):
  from kvjax.programs.evals.harness import KVCacheLM

  return KVCacheLM(*TINY, labels.instance(method, budget), batch=served.rows)


def over_http(served):
  from lm_eval.models.openai_completions import LocalCompletionsAPI

  url = f"{served.url}/completions"
  return LocalCompletionsAPI(url, model=served.name, batch_size=2, max_length=128, max_retries=1)


def asked_of(*arguments):
  from lm_eval.api.instance import Instance

  return Instance(request_type="loglikelihood", doc={}, arguments=arguments, idx=0)


@pytest.mark.slow
def test_harness_over_http(served):
  """Equals the harness in this process; log-likelihoods up to how the context was read."""
  pytest.importorskip("lm_eval")
  pytest.importorskip("tenacity")
  here, there = of_harness(served, METHOD, 16), over_http(served)
  pairs = [(PROMPTS[0], " Rhine, and"), (PROMPTS[1], "me"), (PROMPTS[2], " and slept")]
  requests = [asked_of(*pair) for pair in pairs]
  found, wanted = there.loglikelihood(requests), here.loglikelihood(requests)
  np.testing.assert_allclose([x for x, _ in found], [x for x, _ in wanted], rtol=1e-4)
  assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
  asked = [asked_of(text, {"until": ["q"], "max_gen_toks": 12}) for text in PROMPTS]
  assert there.generate_until(asked) == here.generate_until(asked)


@pytest.mark.slow
def test_scores_of_a_method_that_cuts_prompts():
  """They hang on where the context ends, which a request has to say."""
  pytest.importorskip("lm_eval")
  pytest.importorskip("tenacity")
  with running(method="snapkv:window_size=4", budget=8) as served:
    here = of_harness(served, "snapkv:window_size=4", 8)
    ids = [TINY[1].encode(text, bos=False) for text in PROMPTS]
    how = {"max_tokens": 1, "echo": True, "logprobs": 1}
    with pytest.raises(openai.BadRequestError, match="context_tokens: found None, expected"):
      served.complete(ids, **how)
    for cut in (20, 5):
      found = served.complete(ids, **how, extra_body={"context_tokens": cut})
      wanted = here._loglikelihood_tokens([(None, x[:cut], x[cut:]) for x in ids])
      for choice, (total, _) in zip(found.choices, wanted, strict=True):
        told = choice.logprobs.token_logprobs[:-1]
        np.testing.assert_allclose(sum(told[cut:]), total, rtol=1e-6)
        assert set(told[:cut]) == {None}
  with running(method="snapkv:window_size=4", budget=8, context_tokens=1) as served:
    texts = [asked_of(text) for text in PROMPTS]
    rolled = over_http(served).loglikelihood_rolling(texts)
    np.testing.assert_allclose(rolled, here.loglikelihood_rolling(texts), rtol=1e-6)
