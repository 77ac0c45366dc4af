"""For developers: kill the reading of a long stream again and again; compare with a whole one.

    python -m scripts.tools.soak_streams                           20,000 tokens, a tiny model
    python -m scripts.tools.soak_streams --layers 2 --tokens 500000 --kills 10 --every 40000

A process reads random tokens under a method that streams, in parts of random sizes, and saves the
stream now and then. It is killed (SIGKILL) at random places, some of them while it saves, and a new
process goes on from what was saved. In the end logits, every array of the caches and the tokens
generated from there must have the bits of a stream that one process read without a stop.
"""

import dataclasses
import hashlib
import json
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from kvjax.kernels.common.devices import slug
from kvjax.methods import labels
from kvjax.models.decode.generate import generate
from kvjax.models.decode.streams import PromptStream
from kvjax.models.io import convert, items
from kvjax.models.nn.transformer import Transformer
from kvjax.primitives import host_memory
from kvjax.programs import common, console
from scripts.tools.soak import CONFIG as TINY

# Layers of SmolLM2-135M, with random weights and few words.
LARGE = dataclasses.replace(TINY, dim=576, heads=9, kv_heads=3, head_dim=64, ffn=1536)
STEPS = 16  # tokens that are generated in the end
RESULT, SAVED = "result.json", "stream"


@dataclasses.dataclass(frozen=True)
class Args:
  tokens: int = 20_000
  """Tokens of the stream."""
  kills: int = 4
  """Times that a process is killed."""
  every: int = 2_000
  """Tokens between two saves."""
  method: Annotated[str, tyro.conf.arg(metavar="NAME")] = "ltri"
  """A method that streams, with settings."""
  budget: int = 256
  """Tokens that it keeps on the device, about."""
  layers: int = 0
  """Layers of SmolLM2-135M's shape, with random weights; 0: a tiny model."""
  checkpoint: Annotated[pathlib.Path | None, common.optional("PATH")] = None
  """A converted checkpoint in its place."""
  seed: int = 0
  """Of the places where processes are killed."""
  out: pathlib.Path | None = None
  """Write <device>/soak_streams.json there, scripts/results say."""
  alone: Annotated[pathlib.Path | None, common.optional("FOLDER")] = None
  """Only read the stream, on from what this folder holds of it: what each process does."""


def load(args: Args) -> Transformer:
  if args.checkpoint is not None:
    return convert.load(args.checkpoint)[0]
  config = dataclasses.replace(LARGE, layers=args.layers) if args.layers else TINY
  return Transformer(config, dtype=jnp.float32, rngs=nnx.Rngs(0))


def read(args: Args, folder: pathlib.Path) -> None:
  """Reads the stream to its end, from where the folder has it; lines say how far it is."""
  model, method = load(args), labels.instance(args.method, args.budget, "--method")
  spec = model.spec(1, args.tokens + STEPS)
  if (folder / SAVED).exists():
    stream = PromptStream.restore(folder / SAVED, model, method, spec)
  else:
    stream = PromptStream(model, method, spec)
  tokens = np.random.default_rng(1).integers(0, model.config.vocab, args.tokens, np.int32)
  rng = np.random.default_rng()
  begun = saved = at = int(stream.seen[0])
  print("from", at, flush=True)
  while at < len(tokens):
    end = at + int(rng.integers(1, 1 + max(2, args.every // 4)))
    stream.feed([tokens[at:end]], on_chunk=lambda count, _: print("at", begun + count, flush=True))
    at = min(end, len(tokens))
    if stream.seen[0] - saved >= args.every:
      print("saving", flush=True)
      stream.save(folder / SAVED)
      saved = int(stream.seen[0])
  logits, caches = stream.finish(room=STEPS)
  found = {"logits": bits(logits)}
  found |= {f"layer{name}": bits(x) for name, x in items.named(caches).items()}
  answer, _ = generate(model, logits, caches, method, steps=STEPS)
  made = {"method": repr(method), "seen": int(stream.seen[0]), "tokens": answer.tokens[0].tolist()}
  common.write(folder / RESULT, {**made, "bits": {**found, "last": bits(answer.last)}})


def bits(x: jax.Array) -> str:
  return hashlib.sha256(np.ascontiguousarray(host_memory.view(x))).hexdigest()[:16]


def run(folder: pathlib.Path, places: list[int], rng: random.Random) -> dict[str, Any]:
  """Runs processes in a folder until one has read all, those before killed past the places.

  Returns:
    What the last one found, and for each kill the token after which it came and where the next
    process went on.
  """
  folder.mkdir()
  command = [sys.executable, "-m", "scripts.tools.soak_streams", *sys.argv[1:]]
  kills: list[dict[str, Any]] = []
  for number, place in enumerate([*places, None]):
    with subprocess.Popen(
      [*command, "--alone", str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
      seen, killed = 0, False
      for line in process.stdout:
        word, *rest = line.split()
        if word == "from" and kills:
          kills[-1]["resumed"] = int(rest[0])
        seen = int(rest[0]) if rest else seen
        # Every third one while it saves.
        due = place is not None and seen >= place and (number % 3 != 2 or word == "saving")
        if due and not killed:
          time.sleep(rng.random() * 0.2)
          process.send_signal(signal.SIGKILL)
          kills.append({})
          killed = True
        if killed:  # the last thing that it said before it died
          kills[-1] |= {"at": seen, "saving": word == "saving"}
    if place is None and process.returncode:
      raise RuntimeError(f"the process that read to the end failed with {process.returncode}")
  return {**json.loads((folder / RESULT).read_text()), "kills": kills}


def main(args: Args) -> None:
  common.check_numbers(args, tokens=1, kills=0, every=1, budget=1, layers=0, seed=0)
  if args.alone is not None:
    read(args, args.alone)
    return
  rng = random.Random(args.seed)
  places = sorted(rng.randrange(args.tokens) for _ in range(args.kills))
  found = []
  with tempfile.TemporaryDirectory() as root:
    for name, where in (("whole", []), ("killed", places)):
      began = time.perf_counter()
      with console.step(f"{name}: {args.tokens:,} tokens, {len(where)} kills"):
        found.append(run(pathlib.Path(root) / name, where, rng))
      found[-1]["seconds"] = round(time.perf_counter() - began, 1)
  whole, killed = found
  differ = [name for name, x in whole["bits"].items() if killed["bits"][name] != x]
  differ += ["tokens"] if whole["tokens"] != killed["tokens"] else []
  shown = args.checkpoint.name if args.checkpoint else f"{args.layers or 'tiny'}"
  record = {
    "model": shown if args.checkpoint or not args.layers else f"{shown} layers of SmolLM2's shape",
    "method": whole["method"],
    "tokens": whole["seen"],
    "every": args.every,
    "arrays": len(whole["bits"]),
    "kills": killed["kills"],
    "seconds": {"whole": whole["seconds"], "killed": killed["seconds"]},
    "differ": differ,
  }
  if args.out:
    folder = args.out / slug(jax.devices()[0].device_kind)
    common.write(folder / "soak_streams.json", json.dumps({"jax": jax.__version__, **record}))
  print(f"{whole['seen']:,} tokens, killed {len(killed['kills'])} times:", end=" ")
  print(f"differ: {', '.join(differ)}" if differ else "the same bits")
  sys.exit(1 if differ else 0)


if __name__ == "__main__":
  common.run(main, Args)
