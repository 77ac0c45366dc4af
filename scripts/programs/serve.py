"""Serve a model under one method through OpenAI's API, for evaluation scripts.

    kvjax serve --method snapkv:window_size=16 --budget 512
    kvjax serve --checkpoint FOLDER --method quest --rows 16 --capacity 32768

The base URL for clients is http://127.0.0.1:8000/v1, with any key: /models, /completions and
/chat/completions. An answer does not depend on other requests. Unsupported fields that would change
an answer, such as tools or penalties, raise an error. The server has no authentication, reads
prompts one at a time, and holds memory for rows × capacity tokens, twice while it scores prompts.
For production, use vLLM.

With echo and logprobs, a prompt is scored as the method decodes it: the request's "context_tokens"
are read as a prompt, and each later token is predicted from the cache that the method keeps.
"""

import dataclasses
import functools
import json
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import tyro
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import kvjax
from kvjax.methods import labels
from kvjax.models.decode.batcher import Batcher
from kvjax.models.decode.requests import Answer
from kvjax.models.decode.sampling import Sampling
from kvjax.programs import common, openai_format
from kvjax.programs.engine import Choice, Engine
from kvjax.programs.evals import continuations
from kvjax.programs.openai_format import Body, Chat, Completion, Text
from kvjax.runtime import arguments

HERE = ["127.0.0.1", "localhost"]  # names of this machine, which others do not reach
# Errors of one request, which leave the others as they are.
FAULTS = ValueError, FloatingPointError, MemoryError, HTTPException, ClientDisconnect
GRACE_SECONDS = 5  # for which a server that is stopped waits for its requests


@dataclasses.dataclass(frozen=True)
class Args(common.Decoding):
  rows: int = 8
  """Number of answers decoded together."""
  capacity: Annotated[int, tyro.conf.arg(metavar="TOKENS")] = 4096
  """Maximum tokens of a prompt and its answer together."""
  queue: int = 64
  """Maximum number of answers that wait for a row; further requests get status 429."""
  max_body: Annotated[int, tyro.conf.arg(metavar="BYTES")] = 8_000_000
  """Maximum bytes of a request; larger ones get status 413."""
  context_tokens: Annotated[int | None, common.optional("TOKENS")] = None
  """Default of the field "context_tokens"; 1 for methods whose cache does not depend on it. Other
  methods require this option or the field."""
  prefill_chunk: Annotated[int | None, common.optional("TOKENS")] = None
  """Tokens of a prompt to read between two decode steps; by default the whole prompt."""
  together: int = 1
  """Number of waiting prompts of similar length that are read at once; one that waits alone takes
  as long as so many."""
  template_args: Annotated[str | None, common.optional("JSON")] = None
  """Further arguments of the chat template: '{"enable_thinking": false}'."""
  host: str = "127.0.0.1"
  """Address to listen on; the default accepts connections from this machine only."""
  port: int = 8000
  """Port to listen on."""


class Service:
  """The API over an engine; `app` is its ASGI application."""

  def __init__(self, args: Args):
    method = self.method = labels.instance(args.method, args.budget, "--method")
    arguments.chunk(method, args.prefill_chunk)
    template = common.template_arguments(args.template_args)
    model, self.tokenizer = common.load_model(args.checkpoint, args.impl, out=sys.stderr)
    capacity = min(args.capacity, model.config.max_context)
    how = {"tokenizer": self.tokenizer, "sampling": Sampling(1.0), "logprobs": True}
    how |= {"rows": args.rows, "capacity": capacity, "chunk": args.prefill_chunk}
    how["together"] = args.together
    score = functools.partial(continuations.score_all, model, method, batch=args.rows)
    self.args, self.engine = args, Engine(Batcher(model, method, **how), score)
    self.name = common.model_name(args.checkpoint)
    context = args.context_tokens or (1 if method.traits.order_independent else None)
    most = args.rows + args.queue
    self.limits = {"capacity": capacity, "most": most, "context": context, "template": template}
    self.open = 0  # choices that are not answered
    self.stopped: Callable[[], bool] = lambda: False
    hosts = HERE if args.host in HERE else ["*"]
    self.app = Starlette(
      routes=[
        Route("/v1/models", self._models),
        Route("/v1/completions", functools.partial(self._answer, Completion), methods=["POST"]),
        Route("/v1/chat/completions", functools.partial(self._answer, Chat), methods=["POST"]),
        Route("/tokenizer_info", self._tokenizer_info),
        Route("/tokenize", self._tokenize, methods=["POST"]),
      ],
      middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
      exception_handlers=dict.fromkeys((*FAULTS, Exception), _refused),
    )

  async def _models(self, request: Request) -> Response:
    model = {"id": self.name, "object": "model", "created": 0, "owned_by": "kvjax"}
    model |= {"method": repr(self.method), "max_model_len": self.limits["capacity"]}
    return JSONResponse({"object": "list", "data": [model]})

  # As vLLM's: lm-evaluation-harness asks these two where it has no tokenizer of the model.
  async def _tokenizer_info(self, request: Request) -> Response:
    special = {"bos_token": None, "eos_token": None, **self.tokenizer.special_tokens}
    return JSONResponse({**special, "chat_template": self.tokenizer.chat_template})

  async def _tokenize(self, request: Request) -> Response:
    text = openai_format.parse(Text, await self._body(request))
    ids = self.tokenizer.encode(text.prompt, bos=None if text.add_special_tokens else False)
    return JSONResponse({"tokens": ids, "count": len(ids)})

  async def _answer(self, kind: type[Body], request: Request) -> Response:
    fields = openai_format.parse(kind, await self._body(request))
    if fields.model not in ("", self.name):
      raise HTTPException(404, f"model: found {fields.model!r}, expected {self.name!r}")
    choices = openai_format.choices(fields, self.tokenizer, **self.limits)
    name = "chat.completion" if kind is Chat else "text_completion"
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": name, "created": int(time.time())}
    head |= {"model": self.name, "system_fingerprint": f"{kvjax.__version__} {self.method}"}
    events = self._events(request, choices)
    if fields.stream:
      first = await anext(events)  # a full queue has a status
      lines = self._lines(fields, head, choices, first, events)
      return StreamingResponse(lines, media_type="text/event-stream")
    async for _ in events:
      pass
    made = [openai_format.whole(fields, choice, self.tokenizer) for choice in choices]
    return JSONResponse({**head, "choices": made, "usage": openai_format.usage(fields, choices)})

  async def _events(
    self, request: Request, choices: list[Choice]
  ) -> AsyncIterator[tuple[Choice, str | Answer]]:
    """Texts and answers as they come, after the prompts have been scored.

    Raises:
      HTTPException: too many choices are open, or the server was stopped.
      ClientDisconnect: nobody waits for them.
      ValueError, FloatingPointError, MemoryError: one failed.
    """
    if self.open + len(choices) > (most := self.limits["most"]):
      found = f"queue: found {self.open} of {most} choices (--queue)"
      raise HTTPException(429, found, {"retry-after": "1"})
    self.open += len(choices)
    try:
      await self.engine.submit(choices)
      inbox, left = choices[0].inbox, len(choices)
      while left:
        await self.engine.step()
        await self._check(request)
        while inbox:
          choice, event = inbox.popleft()
          if isinstance(event, Answer):
            choice.answer, left = event, left - 1
            if event.error is not None:
              raise event.error
          yield choice, event
    finally:
      self.engine.cancel(choices)
      self.open -= len(choices)

  async def _check(self, request: Request) -> None:
    if self.stopped():
      raise HTTPException(503, "the server was stopped before the answer ended")
    if await request.is_disconnected():
      raise ClientDisconnect

  async def _lines(
    self,
    fields: Completion | Chat,
    head: dict[str, Any],
    choices: list[Choice],
    first: Any,
    events: AsyncIterator[Any],
  ) -> AsyncIterator[str]:
    """Server-sent events: the text of each choice as it comes, its end, the usage if asked for."""

    def line(**told: Any) -> str:
      return f"data: {json.dumps({**head, **told})}\n\n"

    if isinstance(fields, Chat):
      head["object"] += ".chunk"
      said = {"role": "assistant", "content": ""}
      yield line(choices=[{"index": i, "delta": said} for i in range(fields.n)])
    yield line(choices=[openai_format.part(fields, *first)])
    try:
      async for event in events:
        yield line(choices=[openai_format.part(fields, *event)])
      if fields.stream_options.get("include_usage"):
        yield line(choices=[], usage=openai_format.usage(fields, choices))
    except FAULTS as error:
      yield line(**_told(error))
    yield "data: [DONE]\n\n"

  async def _body(self, request: Request) -> bytes:
    """The JSON that was sent; browsers do not send this type for other pages."""
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind != "application/json":
      raise HTTPException(415, f"content-type: found {kind!r}, expected 'application/json'")
    body = b""
    async for part in request.stream():
      body += part
      if len(body) > (most := self.args.max_body):
        raise HTTPException(413, f"body: found more, expected at most {most} bytes (--max-body)")
    return body


def _told(error: Exception) -> dict[str, Any]:
  """OpenAI's JSON of an error; the message of a client's begins with the field that it is about."""
  kind = "server_error" if _status(error) >= 500 else "invalid_request_error"
  return {"error": {"message": getattr(error, "detail", str(error)), "type": kind}}


def _status(error: Exception) -> int:
  return getattr(error, "status_code", 400 if isinstance(error, ValueError) else 500)


async def _refused(request: Request, error: Exception) -> Response:
  return JSONResponse(_told(error), _status(error), getattr(error, "headers", None))


def server(args: Args) -> tuple[uvicorn.Server, Engine]:
  """The server, and its engine, to be closed after it."""
  service = Service(args)
  how: dict[str, Any] = {"host": args.host, "port": args.port, "lifespan": "off"}
  how |= {"access_log": False, "timeout_graceful_shutdown": GRACE_SECONDS}
  made = uvicorn.Server(uvicorn.Config(service.app, **how))
  service.stopped = lambda: made.should_exit
  return made, service.engine


def check_address(host: str, port: int) -> None:
  """Raises OSError where nothing can listen: asked before a model is loaded."""
  try:
    places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  except OSError as error:
    raise OSError(f"--host: found {host!r} ({error.strerror}), expected an address") from None
  for family, kind, protocol, _, address in places:
    with socket.socket(family, kind, protocol) as probe:
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will
      try:
        probe.bind(address)
      except OSError as error:
        found = f"--port: found {port} of {host} ({error.strerror})"
        raise OSError(f"{found}, expected one that is free") from None


def main(args: Args) -> None:
  common.check_numbers(args, budget=1, rows=1, capacity=2, queue=0, max_body=1, context_tokens=1)
  common.check_numbers(args, prefill_chunk=1, port=1, together=1)
  check_address(args.host, args.port)
  runs, engine = server(args)
  print(f"answering under {args.method}", file=sys.stderr)
  try:
    runs.run()
  except KeyboardInterrupt:  # raised again once no request is under way
    print("stopped", file=sys.stderr)
  finally:
    engine.close()


if __name__ == "__main__":
  common.run(main, Args)
