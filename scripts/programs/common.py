"""Parts shared by the programs: the model that they load, and files that are whole or not there.

JAX is imported where it is used: the help of a program does without it.
"""

import dataclasses
import functools
import gc
import io
import json
import os
import pathlib
import re
import select
import signal
import sys
import tempfile
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import tyro

from kvjax.models.io import files
from kvjax.models.io.asides import aside
from kvjax.models.io.fetch import cache_dir
from kvjax.programs import console

if TYPE_CHECKING:
  from jax.sharding import Mesh

  from kvjax.models.io.tokenizer import Tokenizer
  from kvjax.models.nn.transformer import Transformer

# Methods compared unless some are named: baselines, and the systems of the five papers.
USUAL = ("streaming_llm", "random", "art", "prr", "ltri", "cpe", "longflow")


def optional(metavar: str, text: str | None = None) -> Any:
  """An argument whose help, by default its docstring, says what it is when it is not given."""
  return tyro.conf.arg(metavar=metavar, help_behavior_hint="", help=text)


def choice() -> Any:
  """As `optional`, of one among several words."""
  return tyro.conf.arg(help_behavior_hint="")


# How every program takes a model: as `convert.checkpoint` does, or None for the default one.
Checkpoint = Annotated[
  pathlib.Path | None,
  optional(
    "MODEL",
    "A checkpoint, a Hugging Face folder, a .gguf file or a model of the hub (owner/name);\n"
    "SmolLM2-135M-Instruct by default.",
  ),
]


Impl = Literal["auto", "reference", "pallas", "jax-triton"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
  """The model that a program decodes with, and the method that it does so under."""

  checkpoint: Checkpoint = None
  method: Annotated[str, tyro.conf.arg(metavar="NAME")] = "full"
  """A method (`kvjax methods` lists them), with settings: snapkv:window_size=16,
  quantised:bits=4+snapkv, module:Class."""
  budget: Annotated[int, tyro.conf.arg(metavar="TOKENS")] = 1024
  """Tokens that the method keeps or reads per step, where it has such a setting."""
  impl: Impl = "auto"
  """Implementation of the method's operations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answering(Decoding):
  """Settings of how answers are drawn, and the beginning of a chat."""

  temperature: float = 0.0
  """0 takes the likeliest token; higher values draw more freely."""
  top_p: float = 1.0
  """Draw from the fewest likeliest tokens whose probabilities sum to this."""
  seed: int = 0
  """Random seed of the draws."""
  system: Annotated[str | None, optional("TEXT")] = None
  """System message of the chat."""
  template_args: Annotated[str | None, optional("JSON")] = None
  """Further arguments of the chat template: '{"enable_thinking": false}', tools, documents."""


@dataclasses.dataclass(frozen=True)
class Devices:
  """The devices that a model is spread over, and the processes that they belong to."""

  mesh: Annotated[tuple[int, int] | None, optional("HEADS SLOTS")] = None
  """Devices to split key/value heads over, and to split slots over; by default one, or heads over
  all devices of several processes."""
  coordinator: Annotated[str | None, optional("HOST:PORT")] = None
  """Address at which the first of several processes waits for the others, or "auto" under SLURM or
  Open MPI. All run the same command; the first one reads prompts and writes answers."""
  processes: Annotated[int | None, optional("COUNT")] = None
  """Number of processes."""
  process: Annotated[int | None, optional("NUMBER")] = None
  """Number of this process, from 0 on."""

  def made(self) -> "Mesh | None":
    """The mesh; None: one device."""
    import jax

    import kvjax

    if self.mesh is not None:
      return kvjax.make_mesh(*self.mesh)
    return kvjax.make_mesh(heads=jax.device_count()) if jax.process_count() > 1 else None


_OWN = ("coordinator", "processes", "process")  # of each process, its own


@contextmanager
def _connected(args: Any) -> Iterator[None]:
  """Connects with the other processes of `Devices`, if there are some; an error on one ends all."""
  devices = getattr(args, "devices", None)
  if not isinstance(devices, Devices) or devices.coordinator is None:
    yield
    return
  import jax

  from kvjax.runtime import processes

  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  if devices.coordinator == "auto":
    jax.distributed.initialize()
  else:
    jax.distributed.initialize(devices.coordinator, devices.processes, devices.process)
  with processes.together(), _one_line_errors():
    _check_same(args)
    if jax.process_index() == 0:
      yield
      return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
      yield


def _check_same(args: Any) -> None:
  """Raises ValueError where a process has other arguments than the first: both would wait."""
  from kvjax.runtime import processes

  own = {**vars(args), **vars(args.devices)}
  mine = {name: repr(own[name]) for name in own if name not in ("devices", *_OWN)}
  for name, value in processes.of_first(lambda: mine).items():
    if mine[name] != value:
      option = name.replace("_", "-")
      raise ValueError(f"--{option}: found {mine[name]}, expected {value}, as on the first process")


def parse(args: type, name: str, given: Sequence[str] | None = None) -> Any:
  """A program's arguments, an instance of the dataclass `args`; its module's docstring is the help.

  Args:
    name: the program as users type it.
    given: what they typed after it; by default the command line.
  """
  text = (sys.modules[args.__module__].__doc__ or "").strip()
  return tyro.cli(
    args,
    prog=name,
    description=textwrap.indent(text, " "),  # tyro joins lines that begin with a letter
    args=given,
    config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
  )


def run(
  main: Callable[[Any], int | None],
  args: type,
  *,
  command: str | None = None,
  given: Sequence[str] | None = None,
) -> None:
  """Runs a program whose arguments are a dataclass; it ends with the status that `main` returns.

  Args:
    command: the program as users type it; by default `python -m` its module.
    given: what they typed after it; by default the command line.
  """
  with one_line_errors():
    parsed = parse(args, command or f"python -m {main.__globals__['__spec__'].name}", given)
    with _connected(parsed):
      status = main(parsed)
  if status:
    sys.exit(status)


# What arguments, files and weights can be to blame for.
_TOLD = (
  *(ValueError, NotImplementedError, OSError, MemoryError, ModuleNotFoundError),
  FloatingPointError,
)


class Terminated(KeyboardInterrupt):
  """A SIGTERM, which ends a program as Ctrl-C does."""


def _terminated(*_: Any) -> None:
  raise Terminated


@contextmanager
def one_line_errors() -> Iterator[None]:
  """Ends a program in one line where its arguments or files are wrong, and quietly by Ctrl-C.

  Warnings are a line each, and said once. A SIGTERM is taken as Ctrl-C: what is written aside is
  swept up, what is whole stays. What the program compiles is kept for its next run
  (`keep_programs`).
  """
  with warnings.catch_warnings():
    warnings.showwarning = _warned
    keep_programs()
    with _one_line_errors():
      yield


def _warned(message: Warning | str, *where: Any, **more: Any) -> None:
  """A warning in one line; JAX's on its cache of programs name each program: of these, one."""
  _say(re.sub(r"(persistent compilation cache) entry for '[^']*'", r"\1", str(message)))


@functools.cache
def _say(text: str) -> None:
  print(f"warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def _one_line_errors() -> Iterator[None]:
  for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character ends nothing
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(errors="backslashreplace")
  if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGTERM, _terminated)
  try:
    yield
  except KeyboardInterrupt:
    raise SystemExit("\nstopped") from None
  except _TOLD as error:
    if isinstance(error, BrokenPipeError) and _unread():  # its reader has seen enough
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
      raise SystemExit(141) from None  # as a program that SIGPIPE ends
    if os.environ.get("KVJAX_TRACEBACK"):
      raise
    raise SystemExit(f"error: {error}\n(KVJAX_TRACEBACK=1 shows where)") from error


def _unread() -> bool:
  """True where standard output is a pipe that nobody reads any more; others may break, too."""
  watched = select.poll()
  watched.register(sys.stdout.fileno(), 0)
  return any(event & select.POLLERR for _, event in watched.poll(0))


def keep_programs() -> None:
  """Turns on JAX's persistent compilation cache, in the user's cache folder.

  JAX_COMPILATION_CACHE_DIR names another folder, JAX_ENABLE_COMPILATION_CACHE=0 turns it off.
  Programs that took a fifth of a second are kept too, unless
  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS says otherwise; JAX alone keeps them from 1 s on. To be
  called before anything is compiled. A folder that cannot be written only warns.
  """
  import jax

  if jax.config.jax_compilation_cache_dir is None:
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "jax"))
  _check_kept(jax.config.jax_compilation_cache_dir)
  if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _check_kept(folder: str) -> None:
  """Warns once of a cache folder that is full or cannot be written; without it, nothing is kept."""
  if "://" in folder:  # in a cloud's storage
    return
  path = pathlib.Path(folder)
  try:
    with files.written(path):
      path.mkdir(parents=True, exist_ok=True)
      with tempfile.TemporaryFile(dir=path) as file:
        file.write(bytes(1 << 16))
  except OSError as error:
    warnings.warn(f"{error}: what is compiled is not kept", stacklevel=3)
    if path.is_dir():  # what is there can still be read
      warnings.filterwarnings("ignore", "Error writing persistent compilation cache")
    else:
      import jax

      jax.config.update("jax_enable_compilation_cache", False)


# Every compiled program takes memory maps, of which Linux gives a process 65,530.
_MAPS, _MOST_MAPS = pathlib.Path("/proc/self/maps"), 20_000


def drop_programs() -> bool:
  """Drops compiled programs where they are many: long before the compiler gets no more memory.

  Past the last map a compilation on a CPU ends with "Cannot allocate memory", a write to the
  compilation cache in a segmentation fault. To be called where no program is in use soon, such as
  between two methods. What is needed again comes from the cache on disk, if there is one.

  Returns:
    Whether they were dropped.
  """
  if not _MAPS.exists() or _MAPS.read_bytes().count(b"\n") <= _MOST_MAPS:
    return False
  import jax

  jax.clear_caches()
  gc.collect()
  return True


def check_numbers(args: Any, **least: int) -> None:
  """Raises ValueError for a number, or one of several, below the least of its name; None passes.

  And for an option of several values that was given without any.
  """
  for field in dataclasses.fields(args):
    if isinstance(field.default, tuple) and field.default and not getattr(args, field.name):
      raise ValueError(f"--{field.name.replace('_', '-')}: found none, expected at least one")
  for name, bound in least.items():
    given = getattr(args, name)
    for value in given if isinstance(given, tuple) else (given,):
      if value is not None and not value >= bound:  # nor NaN
        option = name.replace("_", "-")
        raise ValueError(f"--{option}: found {value}, expected at least {bound}")


def load_model(
  checkpoint: pathlib.Path | None,
  impl: str = "auto",
  *,
  out: TextIO | None = None,
  mesh: "Mesh | None" = None,
) -> tuple["Transformer", "Tokenizer"]:
  """A model that `convert.load` takes; by default SmolLM2-135M-Instruct. Converted once."""
  import jax

  from kvjax.models.io import convert
  from kvjax.runtime import processes

  def converted() -> str:
    if checkpoint is not None:
      return str(convert.checkpoint(checkpoint))
    with console.step("SmolLM2-135M-Instruct: fetched and converted the first time", out):
      return str(convert.default_checkpoint(progress=False))

  path = processes.of_first(converted)
  if jax.process_index() > 0:  # there by now, unless its host keeps a cache folder of its own
    path = converted()
  with console.step(f"loading {model_name(checkpoint)}", out) as step:
    model, tokenizer = convert.load(path, impl=impl, mesh=mesh)
    step.note(model.dtype.name)
  return model, tokenizer


def model_name(checkpoint: pathlib.Path | None) -> str:
  """The name of a model: its folder's or file's, also where that was given as "." or ".."."""
  return os.path.basename(os.path.abspath(checkpoint or "SmolLM2-135M-Instruct"))


def read_text(path: pathlib.Path, option: str) -> str:
  """A file's text; messages name the option that the file was given by.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no text in UTF-8.
  """
  if not path.is_file():
    raise FileNotFoundError(f"{option}: found no file {path}, expected a text in UTF-8")
  return _text(path.read_bytes(), f"{option}: {path}")


def template_arguments(given: str | None) -> dict[str, Any]:
  """The values in --template-args, for `Tokenizer.render`.

  Raises:
    ValueError: it is no JSON object, or names what the program itself gives.
  """
  try:
    found = {} if given is None else json.loads(given)
  except ValueError:
    found = given
  if not isinstance(found, dict) or {"messages", "add_generation_prompt"} & set(found):
    raise ValueError(
      f"--template-args: found {given!r}, expected a JSON object of further arguments of the chat "
      'template, such as {"enable_thinking": false}'
    )
  return found


def read_stdin() -> str:
  """All of standard input; raises ValueError where it is no text in UTF-8."""
  piped = getattr(sys.stdin, "buffer", None)
  return sys.stdin.read() if piped is None else _text(piped.read(), "standard input")


def _text(data: bytes, what: str) -> str:
  try:
    return data.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{what}: found a byte 0x{data[error.start]:02X} at {error.start:,} that is no UTF-8, "
      "expected a text in UTF-8"
    ) from error


def bytes_of(caches: Any) -> tuple[int, int]:
  """Bytes of all arrays in their device's own memory, and of those offloaded to the host."""
  import jax

  sizes = [0, 0]
  for x in jax.tree.leaves(caches):
    own = all(x.sharding.memory_kind == d.default_memory().kind for d in x.devices())
    sizes[not own] += x.nbytes
  return sizes[0], sizes[1]


def written_aside(path: pathlib.Path) -> AbstractContextManager[pathlib.Path]:
  """A path to write a file to; it takes the name `path` when the block ends well."""
  return aside(path, replace=True)


def write(path: pathlib.Path, content: Any) -> None:
  """Writes a text, a figure, or anything else as JSON, into a file that is whole or not there."""
  with written_aside(path) as aside:
    if hasattr(content, "savefig"):
      content.savefig(aside, format="png")
      return
    if not isinstance(content, str):
      content = json.dumps(content, indent=1, ensure_ascii=False)
    aside.write_text(content.rstrip("\n") + "\n", "utf-8")
