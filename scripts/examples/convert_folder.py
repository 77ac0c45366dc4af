"""Converts a Hugging Face folder (or a .gguf file, or hf:owner/name), loads and runs the result."""

import pathlib
import tempfile
from typing import Annotated

import jax.numpy as jnp
import tyro

import kvjax
from kvjax.models.decode.generate import generate, pad, prefill
from kvjax.models.io import convert
from scripts.examples.tiny import huggingface_folder


def main(source: Annotated[str | None, tyro.conf.Positional] = None) -> None:
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    if source is None:
      source = str(huggingface_folder(folder / "published"))
    checkpoint = convert.convert(source, folder / "converted", progress=False)
    model, tokenizer = convert.load(checkpoint, dtype=jnp.bfloat16)

  c = model.config
  print(f"{c.layers} layers, {c.heads} query and {c.kv_heads} key/value heads, {c.vocab} tokens")
  method = kvjax.Full()
  tokens, lengths = pad([tokenizer.encode("Once upon a time")])
  caches = method.init_caches(model.spec(batch=1, capacity=64))
  logits, caches = prefill(model, tokens, lengths, caches, method)
  out, _ = generate(model, logits, caches, method, steps=16, tokenizer=tokenizer)
  print(repr(out.texts[0]))


if __name__ == "__main__":
  tyro.cli(main)
