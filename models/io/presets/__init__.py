"""Full-size shapes by name, each from what its publisher's config.json says: a folder each.

For throughput and memory studies with random weights, and to check that the decoder builds them:
the weights themselves come from `kvjax.models.io.convert`. A config.json in a new folder adds one.
"""

import pathlib

from kvjax.models.io.huggingface import HuggingFace
from kvjax.models.nn.config import ModelConfig

# Of Mistral-7B it is v0.3: in v0.1 all layers have a sliding window, which leaves nothing for a
# method to do.
PRESETS: dict[str, ModelConfig] = {
  file.parent.name: HuggingFace(file.parent, weights=False).config
  for file in sorted(pathlib.Path(__file__).parent.glob("*/config.json"))
}
