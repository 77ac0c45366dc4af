"""For developers: run what only a GPU can show: kernel tests, timings, evaluations.

    python -m scripts.tools.on_gpu --out run                  everything
    python -m scripts.tools.on_gpu --out run --minutes 9      goes on where the last call ended
    python -m scripts.tools.on_gpu --out run --only kernels sparse
    python -m scripts.tools.on_gpu --out run --checkpoint qwen1.5b --only real_8K_read …

Steps run one after another, each a process with a time limit, so that none takes the others down or
disturbs what they time. What a step prints is in OUT/<step>.log. One that ended well leaves
OUT/<step>.done and is not repeated; one that failed or ran into its limit is, and goes on from what
it wrote. Steps of a real model need its checkpoint. $CUDA_VISIBLE_DEVICES names the GPUs to use.
Afterwards

    kvjax bench --add OUT/<device> --out scripts/results
    kvjax evaluate --only-report --add OUT/evaluation/* --out FOLDER
    kvjax evaluate --only-report --add OUT/real/* --out FOLDER
    kvjax evaluate --only-report --add OUT/published/* --out FOLDER

Steps of published data sets need $KVJAX_DATA, and KVJAX_RUN_CODE=1 where a model's code is run.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Literal

import tyro

from kvjax.models.io import convert
from kvjax.programs import common

REPO = pathlib.Path(__file__).resolve().parents[2]
LIMIT = 150  # seconds that most steps may take
LEAST = 30  # a step that has less before it is not started


@dataclasses.dataclass(frozen=True)
class Step:
  """A module with its arguments, in which {out} and {checkpoint} are folders.

  Attributes:
    arguments: what comes after `python -m`.
    limit: seconds after which it is stopped.
    gpus: how many it needs; without them it is left out.
  """

  arguments: str
  limit: int = LIMIT
  gpus: int = 1

  @property
  def real(self) -> bool:
    """True if it needs the checkpoint of a real model."""
    return "{checkpoint}" in self.arguments

  def command(self, out: pathlib.Path, checkpoint: pathlib.Path | None) -> list[str]:
    folders = {"out": out, "checkpoint": checkpoint}
    parts = shlex.split(self.arguments)
    return [sys.executable, "-m", *(part.format(**folders) for part in parts)]


KERNEL_TESTS = " ".join(
  sorted(f"tests/kernels/{path.name}" for path in (REPO / "tests/kernels").glob("test_*kernel*.py"))
  + [
    f"tests/kernels/test_{name}.py"
    for name in ("art_codes", "art_known", "art_spread", "offload", "speculation")
  ]
  + ["tests/methods/test_art_known.py"]
)

DEVICE_TESTS = "tests/devices/test_sharding.py"
PYTEST = "-q -n 14 -p no:cacheprovider -p no:benchmark"


def bench(suite: str, only: str = "", limit: int = LIMIT, gpus: int = 1, few: bool = True) -> Step:
  """A suite of `kvjax.programs.bench`, or those of its cases whose names contain `only`."""
  how = "--repetitions 5 " * few + f"--only {shlex.quote(only)} " * bool(only)
  return Step(f"kvjax.programs.bench {suite} {how}--out {{out}}", limit, gpus)


def evaluation(part: str, arguments: str) -> Step:
  """A part of SmolLM2's evaluation, in a folder of its own."""
  how = f"--samples 50 --memory 10 --out {{out}}/evaluation/{part}"
  return Step(f"kvjax.programs.evaluate {arguments} {how}", 540)


NEEDLE = "--tasks needle kl --lengths 2048 --budgets 256 512 --methods"
EVERY = "--tasks needle kl --lengths 2048 --budgets 128 256 512 --methods"
RULER = (
  "--tasks niah_single_1 niah_single_2 niah_single_3 niah_multikey_1 niah_multivalue "
  "niah_multiquery --lengths 1024 2048 4096 --budgets 256 512 --methods"
)
EVALUATIONS = {
  "windows": f"{EVERY} streaming_llm lm_infinite random",
  "attended": f"{EVERY} h2o tova vatp",
  "observed": f"{EVERY} snapkv pyramidkv longflow",
  "keys": f"{EVERY} expected_attention knorm keydiff lagkv chunkkv criticalkv",
  "redundant": f"{EVERY} r_kv",
  "by_head": f"{EVERY} adakv",
  "layers": f"{NEEDLE} cpe etf psaw cpe:kv=previous etf:kv=previous",
  "selected": f"{NEEDLE} quest infllm_v2 rocketkv double_sparsity hshare",
  "shared": f"{NEEDLE} prr art topk_oracle cis twilight",
  "streamed": f"{NEEDLE} infllm ltri",
  "ruler_full": "--tasks ruler --lengths 1024 2048 4096 --methods full",
  "ruler_kept": f"{RULER} streaming_llm longflow",
  "ruler_read": f"{RULER} art prr",
  "ruler_cpe": f"{RULER} cpe",
  "ruler_ltri": f"{RULER} ltri",
}

# A model with a long context, in parts ordered by worth: what is kept of a cache, what is read of a
# whole one, then methods that read a prompt in their own way.
PARTS = {
  "kept": "snapkv tova h2o streaming_llm random pyramidkv",
  "read": "topk_oracle quest infllm_v2 rocketkv double_sparsity hshare",
  "shared": "cis prr twilight art art:tau=0.01 art:tau=0.1",
  "scored": "longflow expected_attention knorm:skip_layers=(0,1) keydiff lagkv chunkkv r_kv vatp",
  "own": "cpe psaw etf lm_infinite criticalkv",
  "streamed": "infllm ltri",
}
LEADING = "snapkv tova longflow expected_attention quest infllm_v2 hshare cis prr cpe"
FIRST, MORE = "needle kl niah_multikey_1", "niah_multivalue vt"
AT = {
  "8K": "--batch 10 --samples 50 --lengths 8192 --budgets 1024 --memory 8",
  "32K": "--batch 5 --samples 30 --lengths 32768 --budgets 4096 1024 --memory 14",
}
TPOT = "full art art:tau=0.01 prr quest cpe longflow"


def _part(program: str, folder: str, part: str, arguments: str, limit: int = 540) -> Step:
  """A part of what a program makes of a real model, in a folder of its own."""
  how = f"--checkpoint {{checkpoint}} --out {{out}}/{folder}/{part}"
  return Step(f"kvjax.programs.{program} {arguments} {how}", limit)


real = functools.partial(_part, "evaluate", "real")
published = functools.partial(_part, "evaluate", "published", limit=300)  # compared with figures
speed = functools.partial(_part, "speed", "speed")


def several(
  prefix: str, make: Callable[[str, str], Step], parts: dict[str, str]
) -> dict[str, Step]:
  """A step of each part, whose name begins so, from the part's arguments."""
  return {f"{prefix}_{part}": make(part, arguments) for part, arguments in parts.items()}


def parts(length: str, tasks: str, more: str = "") -> dict[str, Step]:
  """The evaluation of every part at one length."""
  how = f"--tasks {tasks} {AT[length]} --methods"
  names = {f"{length}_{part}{more}": f"{how} {methods}" for part, methods in PARTS.items()}
  return several("real", real, names)


def speeds(length: str, tokens: int, budgets: str) -> dict[str, Step]:
  """The timings of every part at one length, but for methods that stream a prompt."""
  how = f"--lengths {tokens} --batches 8 --budgets {budgets} --methods"
  names = {f"{length}_{part}": f"{how} {PARTS[part]}" for part in PARTS if part != "streamed"}
  return several("speed", speed, names)


# ART in the order of a prompt's last queries. τ = 0.02 lost too much (`nvidia-h200/real/art_32K`),
# the smallest less, on rows of another seed (`art_32K_seed1`), but takes the full cache's time.
RANKED = "art:relative=True,sinks=4,margin=16,by_mass=inf,tau=0.005"
ARTS = f"{RANKED} {RANKED.replace('0.005', '0.01')} {RANKED.replace('0.005', '0.02')}"
# CIS and CPE as they are without settings; where few groups retrieve, by either rule, with τ of the
# study of sharing on SmolLM2; and where all retrieve in the same steps.
CISES = "cis cis:agree=mean,tau=0.8,radius=0 cis:block=4,tau=-1 cis:block=4,tau=-1,radius=0"
CPES = f"{CISES} cis:block=8,tau=-1,radius=0 cpe cpe:tau=0.5,radius=0 cpe:block=4,tau=-1,radius=0"
# Tab. II of PrHS: CIS, and CIS*, by their block sizes, HShare by its two, and the others.
SHARING = " ".join(
  [f"cis:{more}block={s}" for more in ("", "k=72,sinks=8,local=32,") for s in (8, 16, 20)]
  + ["hshare", "hshare:layers=0.75,heads=0.75", "quest", "double_sparsity", "h2o"]
  + ["double_sparsity:channels=64,dense_layers=2"]  # its authors' settings
)
STUDY = "--checkpoint {checkpoint} --length"
LAYERS = " ".join(map(str, range(28)))


def stopping(length: int, stride: int, limit: int) -> dict[str, Step]:
  """Cost of ART's stops on a real model's activations: recorded, then studied, by a CPU alone.

  A recording takes 29 kB a token of a 1.5B, tables and pictures 0.5 MB.
  """
  held = f"{{out}}/recorded_{length}.npz"
  return {
    f"real_record_{length >> 10}K": Step(
      f"scripts.studies.record {held} {STUDY} {length} --stride {stride} --layers {LAYERS}", 240
    ),
    f"real_art_{length >> 10}K": Step(
      f"scripts.studies.art_study {held} --out {{out}}/real_art", limit
    ),
  }


NEEDLES = "--heads {out}/real_heads.json --checkpoint {checkpoint}"
# The paper's budget (Ltri-LLM, §4.1), over a text four times as long as the model's.
LONG = "--length 131072 --init 128 --window 4096 --block 128 --retrieved 16 --chunk 512"
BUDGET = "--init 128 --window 4096 --block 128 --retrieved 16 --chunk 512 --settings last=48"
COPIED = "scripts/results/nvidia-h100-80gb-hbm3/real/heads.json"  # ranked by what heads copy
FITTED = "scripts/results/nvidia-h100-80gb-hbm3/real/heads_16K.json"  # by `ltri_heads`


def ltri(
  part: str,
  length: int,
  limit: int,
  names: str,
  heads: str = "{out}/ltri_heads.json",
  first: int = 0,
):
  """Needles at the paper's 6,272 tokens; parts of one folder answer the same samples."""
  samples = 100 if length < 1 << 17 else 30
  how = f"--length {length} --samples {samples} --first {first} --batch 5 {BUDGET} --heads {heads}"
  where = f"{{out}}/ltri_{part} --checkpoint {{checkpoint}}"
  return Step(f"scripts.studies.needle_recall {where} {how} --methods {names}", limit)


WHOLE = 'ltri "ltri, by rank, top\'s blocks" "ltri, by rank, top\'s blocks, beside" infllm'
REPAIRS = "'ltri, votes by rank' \"ltri, top layer's blocks\" 'ltri, static vectors'"
BESIDE = "'ltri, no voting' 'ltri, not persistent' streaming_llm full"
SIZES = "init_tokens=128,local=4096,block=128,retrieved=16,chunk=512,held=32"
VOTES = f"ltri:{SIZES},last=48,heads={FITTED}"
STREAMED = f"infllm:{SIZES} {VOTES}"
REPAIRED = f"{VOTES},ballot=rank,from_top=True,beside=4"
TASKS = {
  16: (
    "niah_single_1 niah_single_2 niah_single_3",
    "niah_multikey_1 niah_multikey_2 niah_multikey_3",
    "niah_multivalue niah_multiquery vt",
    "cwe fwe facts_1 facts_2",
  ),
  64: ("passkey", "number_string", "kv_retrieval", "math_find"),
}
LTRI = {
  "ltri_heads": Step(
    "kvjax.programs.retrieval_heads {out}/ltri_heads.json --checkpoint {checkpoint} "
    f"--samples 16 --length 16384 {BUDGET}",
    200,
  ),
  "ltri_spans": Step(
    "scripts.studies.span_search {out}/ltri_spans.json --checkpoint {checkpoint} "
    f"--samples 20 --length 8192 {BUDGET}",
    200,
  ),
  **{f"ltri_{k}K": ltri(f"{k}K", k << 10, 540, WHOLE) for k in (16, 32, 64, 128)},
  **{f"ltri_{k}K_beside": ltri(f"{k}K", k << 10, 540, BESIDE, first=50) for k in (16, 32, 64)},
  **{f"ltri_{k}K_repairs": ltri(f"{k}K", k << 10, 540, REPAIRS) for k in (32, 16)},
  **{
    f"ltri_tasks_{k}K_{i}": real(
      f"ltri_tasks_{k}K_{i}",
      f"--tasks {tasks} --lengths {k << 10} --batch 5 --samples 30 --budgets 6272 --memory 10 "
      f"--methods streaming_llm {STREAMED} {REPAIRED}",
    )
    for k, parts in TASKS.items()
    for i, tasks in enumerate(parts)
  },
  "ltri_speed": speed(
    "ltri",
    "--called --trace {out}/ltri_profiles --lengths 16384 --batches 8 25 --budgets 6272 "
    f"--methods snapkv {STREAMED}",
  ),
  "ltri_soak": Step(
    "scripts.tools.soak_streams --out {out} --checkpoint {checkpoint} --tokens 500000 --kills 10 "
    "--every 60000 --budget 6272",
    590,
  ),
  **{f"ltri_{k}K_copied": ltri(f"{k}K_copied", k << 10, 300, "ltri", COPIED) for k in (32, 16)},
}
NIAH = "--tasks needle niah_multikey_1 niah_multivalue"
LATE = f"{NIAH} vt --lengths 32768 --batch 5 --samples 60"
MODES = {
  **{
    f"8K_{mode}": f"--modes {mode} --tasks needle niah_multikey_1 {AT['8K']} --methods {LEADING}"
    for mode in ("second", "agnostic")
  },
  "8K_kvzip": f"--modes agnostic {NIAH} --batch 10 --samples 30 --lengths 8192 --memory 12 "
  "--budgets 1280 2304 4352 --methods kvzip adakv:safeguard=0+kvzip "
  "adakv:safeguard=0+kvzip:over_layers=True",
  "32K_art": f"{LATE} --seed 1 --memory 14 --trace 8 --methods {RANKED}",
}
SHARED = {
  "32K_cpe": f"{LATE} --memory 14 --trace 8 --budgets 4096 --methods {CPES}",
  "32K_cpe_seed1": f"{LATE} --seed 1 --memory 14 --trace 8 --budgets 4096 --methods "
  "cis:block=4,tau=-1,radius=0 cpe:block=4,tau=-1,radius=0",
}
GSM8K = {
  "gsm8k": "--tasks gsm8k --lengths 2048 --batch 10 --samples 200 --budgets 256 512 "
  "--methods longflow r_kv h2o tova",
  "gsm8k_chat": "--tasks gsm8k_chat --lengths 4096 --batch 100 --samples 300 --budgets 128 256 "
  "--methods longflow longflow:sinks=4 longflow:per=layer r_kv h2o tova vatp streaming_llm",
  "gsm8k_128": "--tasks gsm8k --lengths 2048 --batch 100 --samples 200 --budgets 128 "
  f"--methods {SHARING}",
}
WHOLE_SETS = ("cruxeval_o", 1536, 800), ("humaneval", 1536, 164), ("gsm8k_chat", 768, 500)
PUBLISHED = {
  task: f"--tasks {task} --lengths {length} --batch 100 --samples {rows} --methods full"
  for task, length, rows in WHOLE_SETS
}
KEYS = {
  f"kv_{n}": f"--tasks lost_in_the_middle_{n} --lengths {length} --batch 10 --samples 50 "
  "--memory 14 --budgets 1024 --methods snapkv quest longflow cis streaming_llm"
  for n, length in ((140, 10240), (75, 5632))
}
REAL = {
  **parts("8K", f"{FIRST} {MORE}"),
  **speeds("8K", 8192, "1024"),
  **parts("32K", FIRST),
  **speeds("32K", 32768, "1024 4096"),
  **several("real", real, MODES),
  "speed_32K_art": speed("32K_art", f"--lengths 32768 --batches 8 --methods {ARTS}"),
  **several("real", real, SHARED),
  "speed_32K_cpe": speed("32K_cpe", f"--lengths 32768 --batches 8 --budgets 4096 --methods {CPES}"),
  "real_heads": Step(
    "kvjax.programs.retrieval_heads {out}/real_heads.json --pattern {out}/real_gates.tsv "
    f"{STUDY} 2048"
  ),
  "real_needles": Step(
    f"scripts.studies.needle_recall {{out}}/real_needles {NEEDLES} --length 8000 --samples 10", 540
  ),
  "real_stream": Step(
    f"scripts.studies.needle_recall {{out}}/real_stream {NEEDLES} {LONG} --samples 4 "
    "--methods infllm ltri streaming_llm 'infllm, injected'",
    400,
  ),
  **stopping(8192, 128, 150),
  **stopping(16384, 256, 240),
  **stopping(32768, 512, 400),
  **several("real", real, GSM8K),
  **several("real_published", published, PUBLISHED),
  **several("real", published, KEYS),
  "speed_tpot": speed(
    "tpot", f"--lengths 32768 16384 --batches 1 4 8 --budgets 1024 --methods {TPOT}"
  ),
  "real_hits": Step(
    f"scripts.studies.hit_rates {{out}}/real_hits.json {STUDY} 8064 --history 512 --page 16 "
    "--budget 1024 --layers 2 8 14 20 26",
    400,
  ),
  "real_sharing": Step(
    f"scripts.studies.sharing_study {{out}}/sharing {STUDY} 8128 --budget 512", 400
  ),
  "real_turnover": Step(
    "scripts.studies.turnover {out}/turnover --checkpoint {checkpoint} --rows 8 --answer 6000 "
    "--budgets 1200 --together 2",
    540,
  ),
  "real_certificates": Step(  # mostly a CPU's work
    f"scripts.studies.certificate_study {{out}}/certificates {STUDY} 4096 --budget 256 "
    "--starts 1862-Lincoln-1 1934-Roosevelt-1",
    540,
  ),
  **parts("32K", MORE, "_more"),
  **LTRI,
}

STEPS = {
  **{
    f"scale_70B_{method}": bench("scale", method, 200, 4)
    for method in ("pyramidkv", "full", "snapkv", "streaming_llm")
  },
  **{
    f"scale_{name}_{n}": bench("scale", f"{case} over {n}", 200, n)
    for name, case in {
      "8B": "8B B8 T32768, heads",
      "8B_long": "8B B1 T262144, slots",
      "prompt_heads": "prompt of 32768, heads",
      "prompt_slots": "prompt of 32768, slots",
      "attention": "attention B1 T524288, slots",
    }.items()
    for n in (2, 4)
  },
  **{f"devices_{n}": Step(f"pytest {DEVICE_TESTS} {PYTEST}", 300, n) for n in (2, 4)},
  "kernels": Step(f"pytest {KERNEL_TESTS} {PYTEST}", 240),
  "ltri_equal": Step(
    f"pytest tests/kernels/test_offload.py tests/methods/test_ltri.py {PYTEST}", 200
  ),
  "gate": bench("gate", limit=300, few=False),
  "generate": bench("generate", limit=300),
  **{f"generate_{k}K": bench("generate", f"T{k << 10}") for k in (4, 32)},
  "cold": Step("kvjax.programs.cold --out {out}", 590),
  "launches": Step("scripts.tools.launches --out {out}"),
  "select": bench("select", few=False),
  "sparse": bench("sparse"),
  "cpe": bench("cpe"),
  "art": bench("art", limit=240, few=False),
  "art_known": bench("art", "known"),
  "art_e2e_known": bench("art_e2e", "known", 300),
  **{f"art_e2e_B{n}": bench("art_e2e", f"B{n}", 540) for n in (8, 1, 4, 2)},
  "speculation": Step("kvjax.programs.tune prr", 420),
  **{f"prr_{n}K": bench("prr", f"T{n}K 1024x16") for n in (16, 32, 64, 128, 256, 512)},
  "prr_calibration": bench("prr", "calibration"),
  "prefill": bench("prefill", "32K", 240),
  "offload": bench("offload", limit=200),
  "stream": bench("offload", "whole", 590),
  "heads": Step(
    "kvjax.programs.retrieval_heads {out}/heads.json --pattern {out}/heads.tsv --length 4096"
  ),
  "needles": Step("scripts.studies.needle_recall {out}/needles --heads {out}/heads.json", 540),
  "spans": Step("scripts.studies.plot_spans {out}/spans --length 8000 --local 512"),
  **{
    f"e2e_{method}": bench("e2e_sparse", f"{method} Llama", 240)
    for method in ("Quest", "InfLLM-v2", "CPE", "PRR", "DuoAttention")
  },
  "per_head": bench("per_head", limit=400),
  "forked": bench("forked", limit=400),
  "longflow": bench("longflow", few=False, limit=300),
  "longflow_answer": bench("longflow", "512 in", few=False),
  **{
    f"peers_B{batch}": bench("e2e", f"Llama-3.1-8B B{batch} T4096", 240, few=False)
    for batch in (1, 8)
  },
  "prefill_model": bench("prefill", "model 32K"),
  "prefill_128K": bench("prefill", "model 128K", 200),
  "decode": bench("decode", few=False),
  "quantised": bench("quantised", "8x4", few=False),
  "quantised_lists": bench("quantised", "listed", few=False),
  **{f"quantised_steps_int{bits}": bench("quantised", f"int{bits} Llama", 400) for bits in (8, 4)},
  **{f"quantised_quest_int{bits}": bench("quantised", f"int{bits} Quest", 400) for bits in (8, 4)},
  **{f"quantised_cuts_int{bits}": bench("quantised", f"sweep int{bits}", 240) for bits in (8, 4)},
  **several("evaluation", evaluation, EVALUATIONS),
  **REAL,
}


def run(step: Step, log: pathlib.Path, checkpoint: pathlib.Path | None, limit: float) -> str:
  """Runs a step, and says what became of it: "done", or why not."""
  # Torch beside JAX needs memory, too.
  env = os.environ | {"PYTHONUNBUFFERED": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
  with log.open("w") as file:
    how = {"cwd": REPO, "env": env, "stdout": file, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(step.command(log.parent, checkpoint), start_new_session=True, **how)
    try:
      code = process.wait(limit)
    except subprocess.TimeoutExpired:
      return f"stopped at its limit of {limit:.0f} s"
    finally:  # with all that it started
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()
  return "done" if code == 0 else f"exit status {code}"


def left_out(step: Step, gpus: int, checkpoint: pathlib.Path | None, left: float) -> str:
  """Why a step cannot be run; empty where it can."""
  if step.real and checkpoint is None:
    return "needs --checkpoint: left out"
  if step.gpus > gpus:
    return f"needs {step.gpus} GPUs, found {gpus}: left out"
  if left < min(LEAST, step.limit):
    return f"{max(left, 0):.0f} s left, expected {step.limit}: not started"
  return ""


def present() -> int:
  """The number of GPUs that this process may use; one where none can be counted."""
  named = os.environ.get("CUDA_VISIBLE_DEVICES")
  if named:
    return len(named.split(","))
  return max(len(list(pathlib.Path("/dev").glob("nvidia[0-9]*"))), 1)


@dataclasses.dataclass(frozen=True)
class Args:
  out: Annotated[pathlib.Path, tyro.conf.arg(metavar="FOLDER")]
  """Logs and results."""
  only: Annotated[tuple[Literal[tuple(STEPS)], ...], tyro.conf.arg(metavar="STEP ...")] = ()  # type: ignore[valid-type]
  """These steps, in this order."""
  minutes: float = 60
  """All has to have ended by then."""
  checkpoint: Annotated[pathlib.Path | None, common.optional("FOLDER")] = None
  """A converted model with a long context, for the steps real_* and speed_*."""


def main(args: Args) -> int:
  if args.checkpoint is not None and not convert.is_checkpoint(args.checkpoint):
    raise ValueError(f"--checkpoint: found no checkpoint in {args.checkpoint}")
  out = args.out.resolve()
  out.mkdir(parents=True, exist_ok=True)
  checkpoint = args.checkpoint and args.checkpoint.resolve()
  end, left = time.monotonic() + 60 * args.minutes, 0
  for name in args.only or STEPS:
    step, mark = STEPS[name], out / f"{name}.done"
    if mark.exists():
      continue
    began = time.monotonic()
    became = left_out(step, present(), checkpoint, end - began)
    if not became:
      became = run(step, out / f"{name}.log", checkpoint, min(step.limit, end - began))
    if became == "done":
      mark.touch()
    else:
      left += 1
    print(f"{name}: {became} ({time.monotonic() - began:.0f} s)", flush=True)
  return int(left > 0)


_SAID = (
  f"    {name:22} {step.limit:4} s at most" + f", {step.gpus} GPUs" * (step.gpus > 1)
  for name, step in STEPS.items()
)
__doc__ = "\n".join([str(__doc__), "Steps:\n", *_SAID])

if __name__ == "__main__":
  common.run(main, Args)
