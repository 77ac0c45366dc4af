"""For developers: feed damaged model files to the readers, which must refuse or read them.

    python -m scripts.tools.fuzz --count 25000        the kept run, minutes of a core
    python -m scripts.tools.fuzz --count 300          a look

Files of a tiny model (GGUF, whole and in parts; safetensors in shards, their index, config.json and
tokenizer files of a Hugging Face folder; config, tokenizer and a layer of a checkpoint, as a file
and as a folder of Orbax's; a folder of saved caches) are changed at random: bits, bytes, pieces and
sizes, JSON values and keys, values nested without end. A worker process then opens the source as
`kvjax.models.io.convert` does, reads every tensor, and encodes a text. What counts as a failure:
another error than the documented ones, a message that does not name the file, the end of the
process, more than `SECONDS` of computing, more than `GROWTH` bytes, a shard from outside of the
folder, and caches that are restored with other numbers.
"""

import contextlib
import copy
import dataclasses
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from kvjax.programs import common, console

SECONDS, SILENCE, GROWTH = 10, 600, 2 << 30
MEMORY = pathlib.Path("/dev/shm")  # files in memory, where there are: most of the time was writing
READERS = ("gguf", "jinja2", "numpy", "orbax-checkpoint", "safetensors", "tokenizers")
BINARY = ("gguf", "gguf part", "safetensors", "checkpoint layer")
BINARY += ("orbax manifest", "orbax tree", "orbax arrays")
BINARY += ("saved manifest", "saved tree", "saved arrays")
DOCUMENTED = (ValueError, NotImplementedError, FileNotFoundError)
NUMBERS = (0, 1, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
VALUES: tuple[Any, ...] = (
  *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, 0.5, 1e308, -1e-308, float("nan")),
  *("", "x", "\x00", "../outside/canary.safetensors", "/etc/hostname", "é" * 300, "{{ 1/0 }}"),
  *([], {}, [[]], [0], {"a": 1}, ["model"], "default", "{% for i in range(10**9) %}x{% endfor %}"),
)


@dataclasses.dataclass(frozen=True)
class Args:
  count: int = 1000
  """Damaged inputs, of all kinds in turn."""
  first: int = 0
  """Number of the first one: input n is the same in every run."""
  jobs: int = 1
  """Processes at a time."""
  out: pathlib.Path | None = None
  """Write fuzz.json there."""


class Failure(Exception):
  """A finding that must not happen, in words."""


# ---- inputs


def originals(folder: pathlib.Path) -> None:
  """Whole files of every kind, and one outside of the folder that no reader may open."""
  from kvjax.models.decode import caches
  from kvjax.models.io import convert
  from tests import tiny_gguf, tiny_hf

  (folder / "gguf").mkdir()
  tiny_gguf.write(folder / "gguf" / "tiny.gguf")
  tiny_hf.write(folder / "hf", tiny_hf.config("llama"), shards=2)
  for family, case in FAMILIES.items():
    tiny_hf.write(folder / family, tiny_hf.CASES[case])
  for made, to in (("made", "safetensors"), ("orbax", "orbax")):
    convert.convert(folder / "gguf" / "tiny.gguf", folder / made, to=to, progress=False)
  tiny_gguf.write(folder / "gguf" / "m.gguf", split_max_tensors=12)
  for path in (folder / "made" / "items").iterdir():
    if path.name != "layer_001.safetensors":
      path.unlink()
  shutil.copy(folder / TARGETS["checkpoint layer"], folder / "layer")
  caches.save(folder / SAVED, *some_caches())
  # What JAX allocates once is not the file's doing.
  for kind in ("checkpoint layer", "orbax arrays", "saved arrays"):
    read(kind, folder)
  (folder / "outside").mkdir()
  shutil.copy(next((folder / "hf").glob("*.safetensors")), folder / "outside/canary.safetensors")


FAMILIES = {"experts": "gpt-oss", "windows": "gemma3-parameters", "long": "phi-long"}
ORBAX, SAVED = "orbax/items/layer_001.orbax", "saved"
TARGETS = {
  "gguf": "gguf/tiny.gguf",
  "gguf part": "gguf/m-00002-of-00003.gguf",
  "gguf structure": "gguf/tiny.gguf",
  "safetensors": "hf/model-00001-of-00002.safetensors",
  "safetensors header": "hf/model-00001-of-00002.safetensors",
  "index": "hf/model.safetensors.index.json",
  "config": "hf/config.json",
  "tokenizer": "hf/tokenizer.json",
  **{f"config, {family}": f"{family}/config.json" for family in FAMILIES},
  "tokenizer config": "hf/tokenizer_config.json",
  "checkpoint layer": "made/items/layer_001.safetensors",
  "orbax metadata": f"{ORBAX}/_METADATA",
  "orbax manifest": f"{ORBAX}/manifest.ocdbt",
  "orbax tree": f"{ORBAX}/d/*",
  "orbax arrays": f"{ORBAX}/ocdbt.process_0/d/*",
  "checkpoint config": "made/config.json",
  "checkpoint tokenizer": "made/tokenizer.json",
  "checkpoint tokenizer config": "made/tokenizer_config.json",
  "saved header": f"{SAVED}/1/header/metadata",
  "saved metadata": f"{SAVED}/1/arrays/_METADATA",
  "saved manifest": f"{SAVED}/1/arrays/manifest.ocdbt",
  "saved tree": f"{SAVED}/1/arrays/d/*",
  "saved arrays": f"{SAVED}/1/arrays/ocdbt.process_0/d/*",
}
KINDS = tuple(TARGETS)


def target(folder: pathlib.Path, kind: str) -> pathlib.Path:
  """The file of a kind; of several, which Orbax names, the largest."""
  return max(folder.glob(TARGETS[kind]), key=lambda path: path.stat().st_size)


def damaged(kind: str, whole: bytes, rng: random.Random) -> bytes:
  """The file with one to four changes."""
  times = rng.choice((1, 1, 2, 4))
  if kind == "gguf structure":
    return change_numbers(whole, rng, times)
  if kind == "safetensors header":
    (size,) = struct.unpack("<Q", whole[:8])
    header = change_json(json.loads(whole[8 : 8 + size]), rng, times)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + whole[8 + size :]
  if "config" in kind and rng.random() < 0.02:
    depth = rng.choice((60, 900, 100_000))
    return b'{"a":' * depth + b"1" + b"}" * depth
  if kind in BINARY or rng.random() < 0.2:
    for _ in range(times):
      whole = change_bytes(whole, rng)
    return whole
  return json.dumps(change_json(json.loads(whole), rng, times)).encode()


def change_bytes(data: bytes, rng: random.Random) -> bytes:
  """One bit, byte, number or piece changed, mostly near the beginning, or the end cut off."""
  if not data:
    return bytes([rng.randrange(256)])
  reach = len(data) if rng.random() < 0.2 else min(len(data), 6000)
  at = rng.randrange(reach)
  match rng.randrange(7):
    case 0:
      return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    case 1:
      return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    case 2:
      width = rng.choice((4, 8))
      number = (rng.choice(NUMBERS) % 2 ** (8 * width)).to_bytes(width, "little")
      return data[:at] + number + data[at + width :]
    case 3:
      return data[: rng.randrange(len(data))]
    case 4:
      return data[:at] + rng.randbytes(rng.randrange(1, 16)) + data[at:]
    case 5:
      return data[:at] + data[at + rng.randrange(1, 64) :]
    case _:
      piece = data[at : at + rng.randrange(1, 64)]
      to = rng.randrange(reach)
      return data[:to] + piece + data[to:]


def change_numbers(data: bytes, rng: random.Random, times: int) -> bytes:
  """Numbers of a GGUF file's structure replaced: counts, lengths, dimensions, kinds and offsets."""
  import gguf
  import numpy as np

  with tempfile.NamedTemporaryFile() as file:
    file.write(data)
    file.flush()
    reader = gguf.GGUFReader(file.name)
    fields = [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]
  places = []
  for field in fields:
    at = field.offset
    for part in field.parts[:8]:
      if part.dtype in (np.uint32, np.uint64):
        places += [(at + i * part.itemsize, part.itemsize) for i in range(part.size)]
      at += part.nbytes
  for _ in range(times):
    at, width = rng.choice(places)
    number = (rng.choice(NUMBERS) % 2 ** (8 * width)).to_bytes(width, "little")
    data = data[:at] + number + data[at + width :]
  return data


def change_json(value: Any, rng: random.Random, times: int) -> Any:
  """Some values, keys or entries replaced."""
  for _ in range(times):
    places = list(walk(value))
    if not places:
      return any_value(rng)
    holder, key = rng.choice(places)
    match rng.randrange(5):
      case 0 if isinstance(holder, dict):
        del holder[key]
      case 1 if isinstance(holder, dict):
        holder[str(any_value(rng))] = holder.pop(key)
      case 2:
        other, name = rng.choice(places)
        with contextlib.suppress(KeyError, IndexError):
          holder[key] = json.loads(json.dumps(other[name]))
      case _:
        holder[key] = any_value(rng)
  return value


def any_value(rng: random.Random) -> Any:
  """A value of its own: later changes of this input must not reach the next ones."""
  return copy.deepcopy(rng.choice(VALUES))


def walk(value: Any) -> Iterator[tuple[Any, Any]]:
  """Every place of a JSON value, as what holds it and the key there; of long lists the first 50."""
  if isinstance(value, (dict, list)):
    keys = list(value)[:50] if isinstance(value, dict) else range(min(len(value), 50))
    for key in keys:
      yield value, key
      yield from walk(value[key])


# ---- one input


def read(kind: str, folder: pathlib.Path) -> None:
  """Opens what the kind belongs to, all of it."""
  from kvjax.models.io import convert
  from kvjax.models.io.tokenizer import Tokenizer

  if kind == "checkpoint layer" or kind.startswith("orbax"):
    load_layer(folder, kind)
    return
  if kind.startswith("saved"):
    restore_caches(folder / SAVED)
    return
  if kind.startswith("checkpoint"):
    convert.read_config(folder / "made")
    use(Tokenizer.load(folder / "made"))
    return
  path = folder / TARGETS.get(kind, "hf/config.json")
  source = convert.open_source(path if kind.startswith("gguf") else path.parent)
  use(source.tokenizer())
  for name in convert.item_names(source.config):
    source.item(name)
  if kind == "index":
    index = json.loads((folder / TARGETS[kind]).read_text())
    for file in index["weight_map"].values():
      if not (folder / "hf" / str(file)).resolve().is_relative_to((folder / "hf").resolve()):
        raise Failure(f"read a shard from {file!r}")


def load_layer(folder: pathlib.Path, kind: str) -> None:
  """Reads a checkpoint's layer, whose arrays are known from a copy."""
  import jax
  import safetensors.numpy

  from kvjax.models.io import items

  whole = safetensors.numpy.load_file(folder / "layer")
  wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in whole.items()}
  items.load(folder / (ORBAX if kind.startswith("orbax") else TARGETS[kind]), wanted)


def some_caches() -> tuple[Any, Any, Any, Any]:
  """Logits, caches of drawn numbers, their method and their sizes."""
  import jax
  import numpy as np

  import kvjax

  method, rng = kvjax.SnapKV(64, window_size=8), np.random.default_rng(0)
  spec = kvjax.CacheSpec(batch=2, capacity=64, kv_heads=2, groups=2, head_dim=16, layers=2)
  empty = np.zeros((2, 16), np.float32), method.init_caches(spec)
  drawn = jax.tree.map(lambda x: jax.numpy.asarray(rng.integers(0, 2**15, x.shape), x.dtype), empty)
  return *drawn, method, spec


def restore_caches(path: pathlib.Path) -> None:
  """Restores them; what is read has to be what was saved."""
  import jax
  import numpy as np

  from kvjax.models.decode import caches

  *saved, method, spec = some_caches()
  for x, y in zip(*map(jax.tree.leaves, (caches.restore(path, method, spec), saved)), strict=True):
    if not np.array_equal(x, y):
      raise Failure("restored other numbers")


def use(tokenizer: Any) -> None:
  ids = tokenizer.encode("hello 123")
  tokenizer.decode(ids)
  if tokenizer.chat_template:
    tokenizer.chat([{"role": "user", "content": "hello"}])


def outcome(kind: str, folder: pathlib.Path) -> str:
  """ "read", or the kind of documented error; raises Failure for anything else."""
  began = _resident()
  try:
    read(kind, folder)
    result = "read"
  except Failure:
    raise
  except DOCUMENTED as error:
    if not any(
      name in str(error) for name in (str(folder), "chat_template", "tokenizer", "text: ")
    ):
      raise Failure(f"{type(error).__name__} that names no file: {error}") from error
    result = type(error).__name__
  except BaseException as error:  # Rust panics are no Exceptions
    raise Failure(f"{type(error).__name__}: {error}") from error
  if _resident() - began > GROWTH:
    raise Failure(f"took {(_resident() - began) / 1e9:.1f} GB")
  return result


def _resident() -> int:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def work(first: int, stop: int, pipe: Any) -> None:
  """Inputs [first, stop): sends (number, kind, result or failure) of each, the number before it."""
  os.environ["JAX_PLATFORMS"] = "cpu"
  with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
    folder = pathlib.Path(name).resolve()
    originals(folder)
    paths = {kind: target(folder, kind) for kind in TARGETS}
    whole = {kind: path.read_bytes() for kind, path in paths.items()}
    held = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + GROWTH, resource.RLIM_INFINITY))
    signal.signal(signal.SIGPROF, _too_long)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # panics are printed before they are raised
    for number in range(first, stop):
      kind = KINDS[number % len(KINDS)]
      path = paths[kind]
      pipe.send((number, kind, None))
      path.write_bytes(damaged(kind, whole[kind], random.Random(number)))
      signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of this process: others may be busy
      try:
        result = outcome(kind, folder)
      except Failure as failure:
        result = f"FAILED {str(failure).splitlines()[0][:300] if str(failure) else failure!r}"
      finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        path.write_bytes(whole[kind])
      pipe.send((number, kind, result))
  pipe.send(None)


def _too_long(number: int, frame: Any) -> None:
  raise Failure(f"took more than {SECONDS} s")


# ---- all of them


def supervise(first: int, stop: int, note: Callable[[int, str, str], None]) -> None:
  """Runs inputs [first, stop) in a process, and in another one after the input that ended it."""
  context = multiprocessing.get_context("spawn")
  while first < stop:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(first, stop, theirs))
    process.start()
    theirs.close()
    kind = "none"
    try:
      while ours.poll(SILENCE):  # native code that hangs hears no alarm
        message = ours.recv()
        if message is None:
          first = stop
          break
        number, kind, result = message
        first = number
        if result is not None:
          note(number, kind, result)
          first = number + 1
      else:
        note(first, kind, f"FAILED hung for {SILENCE} s")
        first += 1
    except EOFError:
      process.join()
      if kind == "none":
        raise RuntimeError("a worker ended before its first input") from None
      note(first, kind, f"FAILED ended the process with status {process.exitcode}")
      first += 1
    finally:
      process.kill()
      process.join()


def main(args: Args) -> None:
  common.check_numbers(args, count=1, jobs=1)
  from concurrent.futures import ThreadPoolExecutor

  results: dict[str, Counter] = {kind: Counter() for kind in KINDS}
  failures: list[dict[str, Any]] = []
  began, lock, ended = time.perf_counter(), threading.Lock(), threading.Event()

  def save() -> None:
    """Saves what there is so far, a whole file at any time."""
    if args.out:
      summary = {
        "inputs": sum(map(Counter.total, results.values())),
        "of": args.count,
        "first": args.first,
        "versions": {name: importlib.metadata.version(name) for name in READERS},
        "seconds": round(time.perf_counter() - began),
        "results": {kind: dict(count) for kind, count in results.items()},
        "failures": failures,
      }
      common.write(args.out / "fuzz.json", summary)

  with console.bar(args.count, "reading damaged files", "input") as bar:

    def note(number: int, kind: str, result: str) -> None:
      if ended.is_set():
        raise InterruptedError
      with lock:
        results[kind]["failed" if result.startswith("FAILED") else result] += 1
        if result.startswith("FAILED"):
          failures.append({"input": number, "kind": kind, "what": result.removeprefix("FAILED ")})
        bar.update()
        if bar.n % 1000 == 0:
          save()

    cuts = [args.first + args.count * i // args.jobs for i in range(args.jobs + 1)]
    with ThreadPoolExecutor(args.jobs) as pool:
      try:
        list(pool.map(lambda pair: supervise(*pair, note), itertools.pairwise(cuts)))
      finally:
        ended.set()  # an interrupt is the main thread's alone
  rows = [
    (kind, *(str(count[name]) for name in ("read", *(e.__name__ for e in DOCUMENTED), "failed")))
    for kind, count in results.items()
  ]
  head = ("kind", "read", *(e.__name__ for e in DOCUMENTED), "failed")
  print(console.table(head, rows))
  for failure in failures[:20]:
    print(f"input {failure['input']} ({failure['kind']}): {failure['what']}")
  save()
  if failures:
    sys.exit(1)


if __name__ == "__main__":
  common.run(main, Args)
