"""For developers: make the golden logits of tiny models of every family, families.npz.

Every case of tests/tiny_hf.py is written as a Hugging Face folder, with weights from a NumPy seed,
and read back by transformers on the CPU in float32; of the logits a few positions per case are
kept. Run it from the checkout, in an environment that needs neither JAX nor this library:

    pip install torch transformers safetensors tokenizers
    python -m scripts.tools.make_family_goldens
"""

import argparse
import pathlib
import tempfile

import numpy as np
import torch
import transformers

from tests import tiny_hf

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "tests" / "goldens"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--out", type=pathlib.Path, default=GOLDENS)
  args = parser.parse_args()
  row, at = tiny_hf.positions().T
  stored = {"made_by": np.array(f"transformers {transformers.__version__}")}
  for name, config in tiny_hf.CASES.items():
    with tempfile.TemporaryDirectory() as folder:
      logits = reference(tiny_hf.write(pathlib.Path(folder), config))
    stored[f"{name}/logits"] = logits[row, at]
    stored[f"{name}/digest"] = np.array(tiny_hf.digest(config))
    print(f"{name}: logits from {logits.min():.2f} to {logits.max():.2f}")
  args.out.mkdir(parents=True, exist_ok=True)
  np.savez_compressed(args.out / "families.npz", **stored)


def reference(folder: pathlib.Path) -> np.ndarray:
  """Logits of `tiny_hf.tokens()`, float32 [B, T, V]."""
  model, report = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
  )
  problems = {key: names for key, names in report.items() if names}
  if problems:
    raise SystemExit(f"{folder}: transformers did not read every tensor: {problems}")
  tokens = tiny_hf.tokens()
  mask = np.arange(tokens.shape[1]) < np.array(tiny_hf.LENGTHS)[:, None]
  with torch.no_grad():
    out = model.eval()(
      torch.tensor(tokens, dtype=torch.long), attention_mask=torch.tensor(mask.astype(np.int64))
    )
  return out.logits.numpy()


if __name__ == "__main__":
  main()
