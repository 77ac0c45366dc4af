"""Serve a model under one method by OpenAI's API, for evaluation scripts that speak it.

    kvjax serve --method snapkv:window_size=16 --budget 512
    kvjax serve --checkpoint FOLDER --method quest --rows 16 --capacity 32768

Clients find it at http://127.0.0.1:8000/v1 with any key: /models, /completions, /chat/completions.
An answer is the one that its request gets alone. What would change it and is not there, such as
tools, penalties or a response_format, is refused. Nobody is asked who they are, prompts are read
one by one, and memory for rows × capacity tokens is held, twice while prompts are scored: in
production, take vLLM.

With echo and logprobs a prompt is scored as the method decodes it: the request's "context_tokens"
are read first, and each token after them is predicted from the cache that the method keeps.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal

import tyro
import uvicorn
from starlette import requests, responses
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Route

import kvjax
from kvjax.methods import labels
from kvjax.models.decode.batcher import Answer
from kvjax.models.io.tokenizer import Tokenizer
from kvjax.programs import common, openai_format
from kvjax.programs.engine import Engine, Event, Tell
from kvjax.programs.openai_format import Request

SCORES = -1  # number of the job that scores the prompts
HERE = ["127.0.0.1", "localhost"]  # names of this machine, which others do not reach
REFUSED = ValueError, HTTPException, requests.ClientDisconnect  # errors that are told as JSON
GRACE_SECONDS = 5  # until a server that was stopped waits for no request any more
POLL_SECONDS = 0.2  # between two looks whether a client is still there, and the server


@dataclasses.dataclass(frozen=True)
class Args:
  """The model, the method, and the limits of requests."""

  checkpoint: common.Checkpoint = None
  """A checkpoint, a Hugging Face folder, a .gguf file or a model of the hub (owner/name);
  SmolLM2-135M-Instruct by default."""
  method: Annotated[str, tyro.conf.arg(metavar="NAME")] = "full"
  """A method (`kvjax methods` lists them), with settings: snapkv:window_size=16,
  quantised:bits=4+snapkv, module:Class."""
  budget: Annotated[int, tyro.conf.arg(metavar="TOKENS")] = 1024
  """Tokens that the method keeps or reads per step, where it has such a setting."""
  rows: int = 8
  """Answers that are decoded side by side."""
  capacity: Annotated[int, tyro.conf.arg(metavar="TOKENS")] = 4096
  """Tokens of a prompt and its answer together, at most."""
  queue: int = 64
  """Answers that wait for a row, at most; beyond that requests get status 429."""
  max_body: Annotated[int, tyro.conf.arg(metavar="BYTES")] = 8_000_000
  """Bytes of a request, at most; larger ones get status 413."""
  context_tokens: Annotated[int | None, common.optional("TOKENS")] = None
  """Tokens of a prompt that are read before the others are scored, where requests do not say; 1 by
  default under methods whose cache does not depend on it, and asked for under others."""
  prefill_chunk: Annotated[int | None, common.optional("TOKENS")] = None
  """Read a long prompt so many tokens at a time, with steps between; at once by default."""
  template_args: Annotated[str | None, common.optional("JSON")] = None
  """Further values that the chat template reads: '{"enable_thinking": false}'."""
  host: str = "127.0.0.1"
  """Address to listen on; by default only this machine reaches it."""
  port: int = 8000
  """Port to listen on."""
  impl: Literal["auto", "reference", "pallas", "jax-triton"] = "auto"
  """Implementation of the method's operations."""


class Service:
  """The API over an engine; `app` is its ASGI application."""

  def __init__(self, engine: Engine, tokenizer: Tokenizer, capacity: int, args: Args):
    self.engine, self.tokenizer, self.args = engine, tokenizer, args
    self.name = "SmolLM2-135M-Instruct" if args.checkpoint is None else args.checkpoint.name
    self.template = common.template_arguments(args.template_args)
    context = args.context_tokens or int(engine.method.traits.order_independent)
    self.limits = {"capacity": capacity, "most": args.rows + args.queue, "context": context}
    self.open = 0  # jobs that have not ended
    self.stopped: Callable[[], bool] = lambda: False
    routes: dict[str, Callable[..., Any]] = {
      "/v1/completions": functools.partial(self._answer, False),
      "/v1/chat/completions": functools.partial(self._answer, True),
      "/tokenize": self._tokenize,
    }
    self.app = Starlette(
      routes=[
        Route("/v1/models", self._models),
        Route("/tokenizer_info", self._tokenizer_info),
        *(Route(path, answer, methods=["POST"]) for path, answer in routes.items()),
      ],
      middleware=[
        Middleware(TrustedHostMiddleware, allowed_hosts=HERE if args.host in HERE else ["*"])
      ],
      exception_handlers=dict.fromkeys(REFUSED, _refused),
    )

  async def _models(self, request: requests.Request) -> responses.Response:
    model = {"id": self.name, "object": "model", "created": 0, "owned_by": "kvjax"}
    model |= {"method": repr(self.engine.method), "max_model_len": self.limits["capacity"]}
    return responses.JSONResponse({"object": "list", "data": [model]})

  # As vLLM's: lm-evaluation-harness asks these two where it has no tokenizer of the model.
  async def _tokenizer_info(self, request: requests.Request) -> responses.Response:
    special = {"bos_token": None, "eos_token": None, **self.tokenizer.special_tokens}
    return responses.JSONResponse({**special, "chat_template": self.tokenizer.chat_template})

  async def _tokenize(self, request: requests.Request) -> responses.Response:
    body = await self._body(request)
    text, alone = body.get("prompt"), body.get("add_special_tokens") is False
    openai_format.expect("prompt", text, isinstance(text, str), "a text")
    known = self.tokenizer
    ids = known.encode(text, bos=False) if alone else openai_format.text_ids(text, known)
    return responses.JSONResponse({"tokens": ids, "count": len(ids)})

  async def _answer(self, chat: bool, request: requests.Request) -> responses.Response:
    body = await self._body(request)
    if (name := body.get("model", self.name)) != self.name:
      raise HTTPException(404, f"model: found {name!r}, expected {self.name!r}")
    template = self.template if chat else None
    asked = openai_format.read(body, self.tokenizer, template, **self.limits)
    kind = "chat.completion" if chat else "text_completion"
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
    head |= {"model": self.name, "system_fingerprint": f"{kvjax.__version__} {self.engine.method}"}
    events = self._events(request, self._started(asked))
    if asked.stream:
      first = await anext(events)  # what is wrong from the start has a status
      lines = self._lines(asked, head, first, events)
      return responses.StreamingResponse(lines, media_type="text/event-stream")
    ended = {number: event async for number, event in events if not isinstance(event, str)}
    scores = ended.pop(SCORES, [[] for _ in asked.prompts])
    choices = [
      openai_format.choice(asked, i, ended.get(i), scores[i // asked.n], self.tokenizer)
      for i in range(asked.n * len(asked.prompts))
    ]
    usage = openai_format.usage(asked, ended.values())
    return responses.JSONResponse({**head, "choices": choices, "usage": usage})

  def _started(self, asked: Request) -> tuple[list[Tell], asyncio.Queue]:
    """The jobs of a request, and where their events come in; refused if too many are open."""
    jobs, inbox, loop = [], asyncio.Queue(), asyncio.get_running_loop()
    if self.open + len(asked.submits) > self.limits["most"]:
      found = f"queue: found {self.open} of {self.limits['most']} answers (--queue)"
      raise HTTPException(429, found, {"retry-after": "1"})
    self.open += len(asked.submits) + (asked.pairs is not None)

    def told(number: int, event: Event) -> None:
      self.open -= not isinstance(event, str)
      inbox.put_nowait((number, event))

    def tell(number: int, event: Event) -> None:
      with contextlib.suppress(RuntimeError):  # the server was stopped
        loop.call_soon_threadsafe(told, number, event)

    for number, how in enumerate(asked.submits):
      jobs.append(functools.partial(tell, number))
      self.engine.answer(jobs[-1], **how)
    if asked.pairs is not None:
      jobs.append(functools.partial(tell, SCORES))
      self.engine.score(jobs[-1], asked.pairs)
    return jobs, inbox

  async def _events(
    self, request: requests.Request, started: tuple[list[Tell], asyncio.Queue]
  ) -> AsyncIterator[tuple[int, Any]]:
    """Numbers of jobs and their events; all end with the client. Raises what went wrong."""
    jobs, inbox = started
    watch = asyncio.create_task(self._watch(request, jobs))
    left = len(jobs)
    try:
      while left:
        number, event = await inbox.get()
        error = event.error if isinstance(event, Answer) else event
        if isinstance(error, ValueError):
          raise error
        if isinstance(error, InterruptedError) or getattr(event, "end", None) == "cancelled":
          raise HTTPException(503, "the server was stopped before the answer ended")
        if isinstance(error, Exception):
          raise HTTPException(500, f"{type(error).__name__}: {error}")
        left -= not isinstance(event, str)
        yield number, event
    finally:
      watch.cancel()
      self._cancel(jobs)

  async def _watch(self, request: requests.Request, jobs: list[Tell]) -> None:
    while not (self.stopped() or await request.is_disconnected()):
      await asyncio.sleep(POLL_SECONDS)
    self._cancel(jobs)

  def _cancel(self, jobs: list[Tell]) -> None:
    for job in jobs:
      self.engine.cancel(job)

  async def _lines(
    self, asked: Request, head: dict[str, Any], first: Any, events: AsyncIterator[Any]
  ) -> AsyncIterator[str]:
    """Server-sent events: the text of each choice as it comes, and its end."""
    head["object"] += ".chunk" if asked.chat else ""
    answers: list[Answer] = []

    def line(**told: Any) -> str:
      return f"data: {json.dumps({**head, **told})}\n\n"

    def choices(number: int, event: str | Answer) -> str:
      answers.extend([] if isinstance(event, str) else [event])
      return line(choices=[openai_format.part(asked, number, event, self.tokenizer)])

    if asked.chat:
      said = {"role": "assistant", "content": ""}
      yield line(choices=[{"index": i, "delta": said} for i in range(len(asked.submits))])
    yield choices(*first)
    try:
      async for number, event in events:
        yield choices(number, event)
      if asked.usage:
        yield line(choices=[], usage=openai_format.usage(asked, answers))
    except (ValueError, HTTPException) as error:
      yield line(**_told(error))
    yield "data: [DONE]\n\n"

  async def _body(self, request: requests.Request) -> dict[str, Any]:
    """The JSON object that was sent; browsers do not send this type for other pages."""
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind != "application/json":
      raise HTTPException(415, f"content-type: found {kind!r}, expected 'application/json'")
    body = bytearray()
    async for part in request.stream():
      body += part
      if len(body) > (most := self.args.max_body):
        raise HTTPException(413, f"body: found more, expected at most {most} bytes (--max-body)")
    try:
      return {key: x for key, x in json.loads(body).items() if x is not None}
    except (ValueError, AttributeError, RecursionError):
      raise ValueError(f"body: found {bytes(body[:80])!r}, expected a JSON object") from None


def _told(error: Exception) -> dict[str, Any]:
  """OpenAI's JSON of an error, whose message begins with the field that it is about."""
  status, message = getattr(error, "status_code", 400), getattr(error, "detail", str(error))
  field = message.partition(":")[0].rpartition(".")[2]
  kind = "invalid_request_error" if status < 500 else "server_error"
  param = field if field.isidentifier() and status < 500 else None
  return {"error": {"message": message, "type": kind, "param": param, "code": None}}


async def _refused(request: requests.Request, error: Exception) -> responses.Response:
  status, headers = getattr(error, "status_code", 400), getattr(error, "headers", None)
  return responses.JSONResponse(_told(error), status, headers)


def server(args: Args) -> tuple[uvicorn.Server, Engine]:
  """The application that answers, and its engine, to be closed after it."""
  method = labels.instance(args.method, args.budget, "--method")
  model, tokenizer = common.load_model(args.checkpoint, args.impl, out=sys.stderr)
  capacity = min(args.capacity, model.config.max_context)
  sizes = {"rows": args.rows, "capacity": capacity, "chunk": args.prefill_chunk}
  engine = Engine(model, tokenizer, method, **sizes)
  service = Service(engine, tokenizer, capacity, args)
  how: dict[str, Any] = {"host": args.host, "port": args.port, "lifespan": "off"}
  how |= {"access_log": False, "timeout_graceful_shutdown": GRACE_SECONDS}
  made = uvicorn.Server(uvicorn.Config(service.app, **how))
  service.stopped = lambda: made.should_exit
  return made, engine


def main(args: Args) -> None:
  common.check_numbers(args, budget=1, rows=1, capacity=2, queue=0, max_body=1, context_tokens=1)
  common.check_numbers(args, prefill_chunk=1, port=1)
  runs, engine = server(args)
  print(f"answering under {engine.method}", file=sys.stderr)
  if args.host not in HERE:
    print(f"warning: --host {args.host}: anybody who reaches it is answered", file=sys.stderr)
  try:
    runs.run()
  except KeyboardInterrupt:  # raised again once no request is under way
    print("stopped", file=sys.stderr)
  finally:
    engine.close()


if __name__ == "__main__":
  common.run(main, Args)
