"""What writes the figures of README and RESULTS: for each part between markers, its maker.

A module per section; each maker takes the result files and gives lines of Markdown. Ratios are
written by `cells`, which does not divide by what was not steady; figures are found by the names of
their cases and contenders (`results`), and what is missing is named.
"""

from . import (
  about,
  art,
  cpe,
  decode,
  evaluations,
  generate,
  gpus,
  longflow,
  prompts,
  prr,
  real,
  selection,
  steps,
  streams,
  studies,
  summary,
)
from .results import Maker, Results

__all__ = ["DOCUMENTS", "Maker", "Results"]

DOCUMENTS: dict[str, dict[str, Maker]] = {
  "RESULTS.md": {
    "runs": about.runs,
    "decode": decode.table,
    "steps": steps.table,
    "peers": steps.beside_peers,
    "generate": generate.table,
    "longflow-steps": longflow.steps,
    "longflow-answers": longflow.answers,
    "selection": selection.scores,
    "sparse": selection.attention,
    "flashinfer": selection.against_flashinfer,
    "sparse-steps": selection.whole_steps,
    "cpe": cpe.table,
    "prr": prr.table,
    "prr-parts": prr.parts,
    "prr-steps": prr.steps,
    "prr-calibration": prr.calibration,
    "prompt-layers": prompts.layers,
    "prompt-model": prompts.model,
    "art-endless": art.endless,
    "art-stopping": art.stopping,
    "art-forced": art.forced,
    "art-steps": art.steps,
    "art-cost": art.costs,
    "stream": streams.table,
    "stream-parts": streams.parts,
    "prefetch": streams.prefetch,
    "gpus": gpus.split,
    "all-reduces": gpus.reduces,
    "gpus-70b": gpus.large,
    "real-about": real.about,
    "real-when": real.when,
    "real-picture": real.picture,
    **{f"real-{length}": real.by_length(length) for length in real.LENGTHS},
    "real-modes": real.modes,
    "needle": evaluations.needle,
    "ruler": evaluations.ruler,
    "art-walks": evaluations.walked,
    "needles-short": studies.short_needles,
    "needles-long": studies.long_needles,
    "art-stops": art.stops,
    "art-lengths": art.lengths,
    "art-probe": art.probe,
    "art-theorems": art.theorems,
    "foresight": studies.foresight,
    "shared": studies.shared,
    "sharing": studies.sharing,
    "certified": studies.certified,
    "certificates": studies.certificates,
  },
  "README.md": {"results": summary.table},
}
