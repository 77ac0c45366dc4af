"""Memory against context: bytes of a row's cache on the device, without a model or a device."""

import pathlib

import jax.numpy as jnp
import tyro
from matplotlib.figure import Figure

import kvjax
from kvjax.models.io.asides import aside
from kvjax.models.io.presets import PRESETS
from kvjax.programs.evals.pictures.look import thousands

# Method -> its marker: equal ones are seen inside each other.
METHODS = {
  "full": ("o", 4),
  "quest": ("s", 11),
  "double_sparsity": ("D", 5),
  "snapkv": ("s", 11),
  "longflow": ("D", 5),
  "ltri": ("o", 4),
}


def main(
  model: str = "Llama-3.1-8B",
  out: pathlib.Path = pathlib.Path("memory.png"),
  lengths: tuple[int, ...] = tuple(2**n for n in range(12, 21)),
  budget: int = 2048,
) -> None:
  figure = Figure(figsize=(7, 4.5), layout="constrained")
  axes = figure.subplots()
  for name, (marker, size) in METHODS.items():
    method = kvjax.settings.usual(kvjax.METHODS[name], budget)
    specs = [PRESETS[model].cache_spec(1, length, jnp.bfloat16) for length in lengths]
    plans = [kvjax.plan_memory(spec, method, apart=True) for spec in specs]
    points = [plan.device / 1e9 for plan in plans]
    axes.loglog(lengths, points, marker=marker, markersize=size, fillstyle="none", label=name)
    last = f"{plans[-1].device / 1e9:.2f} GB" + f" + {plans[-1].host / 1e9:.0f} on the host"
    print(f"{name:16} {last if plans[-1].host else last.split(' +')[0]} at {lengths[-1]:,} tokens")
  axes.set_xticks(lengths, [*map(thousands, lengths)], minor=False)
  axes.minorticks_off()
  axes.set(xlabel="tokens of context (logarithmic)", ylabel="GB on the device, a row (logarithmic)")
  axes.set_title(f"Caches of {model}, bfloat16, budget {budget:,}")
  axes.legend()
  with aside(out, replace=True) as path:
    figure.savefig(path)


if __name__ == "__main__":
  tyro.cli(main)
