"""The snippets of the READMEs, in order and in one namespace, on tiny models."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = "", "models/decode", "models", "kvjax"
PAGES = [ROOT / folder / "README.md" for folder in FOLDERS]

_TINY = """
import pathlib
from kvjax.models.io import convert
{import_tiny}

folder = pathlib.Path({folder!r})
tiny.huggingface_folder(folder / "Llama-3.2-1B")
convert.default_checkpoint = lambda: None
own = convert.load
convert.load = lambda path, **options: own(path, **options) if path else tiny.load()
"""


def snippets() -> list[str]:
  text = "\n".join(page.read_text("utf-8") for page in PAGES)
  found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  assert len(found) >= 6
  return found


def program(folder: pathlib.Path, import_tiny: str) -> str:
  """One program of all snippets; the default model and that of /models are made in a folder.

  `import_tiny` imports `scripts/examples/tiny.py`, which makes them.
  """
  parts = [_TINY.format(folder=str(folder), import_tiny=import_tiny), *snippets()]
  return "\n".join(parts).replace('"/models/', f'"{folder}/')
