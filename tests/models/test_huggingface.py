"""Hugging Face folders: sharded, tied and bfloat16 ones arrive; bad ones leave a clear error."""

import json
import re
import sys

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from kvjax.models.io import convert, fetch
from kvjax.models.io.huggingface import HuggingFace
from kvjax.primitives.rope import Linear, LongRope, Rope, Yarn
from tests import processes, tiny_hf

CONFIG = tiny_hf.CASES["llama3"]


def items(folder):
  reader = HuggingFace(folder)
  return {name: reader.item(name) for name in convert.item_names(reader.config)}


def leaves(checkpoint, **kwargs):
  return jax.tree.leaves(convert.load(checkpoint, **kwargs)[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tiny_hf.write(tmp_path_factory.mktemp("hf") / "model", CONFIG)


def test_shards_and_one_file_are_the_same(folder, tmp_path):
  sharded = tiny_hf.write(tmp_path / "sharded", CONFIG, shards=3)
  jax.tree.map(np.testing.assert_array_equal, items(folder), items(sharded))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_arrays_are_written_as_read_and_restored_to_any_dtype(tmp_path, dtype):
  weights = {name: x.astype(dtype) for name, x in tiny_hf.weights(CONFIG).items()}
  source = tiny_hf.write(tmp_path / "source", CONFIG, weights)
  assert {x.dtype for x in jax.tree.leaves(items(source))} == {np.dtype(dtype)}
  made = convert.convert(source, tmp_path / "made", progress=False)
  wide = leaves(made, dtype=jnp.float32)
  assert {x.dtype for x in wide} == {np.dtype(np.float32)}
  for x, y in zip(wide, leaves(made, precision="bf16"), strict=True):
    assert y.dtype == (jnp.bfloat16 if y.ndim > 1 else np.float32)  # norms stay in float32
    np.testing.assert_array_equal(x.astype(y.dtype), y)
  model, _ = convert.load(made, impl="reference")
  assert model.env.impl == "reference"
  assert model.dtype == (jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_matrices_rounded_to_a_given_dtype(folder, tmp_path, dtype):
  made = convert.convert(folder, tmp_path / "made", dtype=dtype, progress=False)
  found = safetensors.numpy.load_file(made / "items" / "layer_001.safetensors")
  whole = items(folder)["layer_001"]
  for name in ("attention.wqkv", "attention.wo", "mlp.gate_up", "mlp.down", "mlp_norm.scale"):
    part, key = name.split(".")
    want = whole[part][key].astype(dtype if key != "scale" else np.float32)
    assert found[name].dtype == want.dtype
    np.testing.assert_array_equal(found[name], want)


def test_matrices_of_several_dtypes_that_become_one(tmp_path):
  """A layer's projections, each in its own dtype: no number changes."""
  weights = tiny_hf.weights(CONFIG)
  kinds = (np.float16, ml_dtypes.bfloat16, np.float32)
  mixed = {name: x.astype(kinds[i % 3]) for i, (name, x) in enumerate(weights.items())}
  same = {name: x.astype(np.float32) for name, x in mixed.items()}
  found = items(tiny_hf.write(tmp_path / "mixed", CONFIG, mixed))
  whole = items(tiny_hf.write(tmp_path / "same", CONFIG, same))
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
    np.testing.assert_array_equal(x.astype(np.float32), y)


def test_tied_head_and_buffers_in_the_file_are_left_out(tmp_path):
  config = {**CONFIG, "tie_word_embeddings": True}
  weights = tiny_hf.weights(CONFIG)
  refused(tmp_path, ValueError, "'tie_word_embeddings': found True beside other", config, weights)
  weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
  weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
  final = items(tiny_hf.write(tmp_path, config, weights))["final"]
  assert set(final) == {"norm"}


def test_padded_embedding(tmp_path):
  """Rows beyond the tokenizer's: ids of none decode to nothing."""
  source = tiny_hf.write(tmp_path / "source", CONFIG, size=62)
  _, tokenizer = convert.load(convert.convert(source, tmp_path / "made", progress=False))
  assert tokenizer.size == 62
  assert tokenizer.decode([63, 1, 62]) == tokenizer.decode([1])
  with pytest.raises(ValueError, match="found id 64"):
    tokenizer.decode([64])


def test_an_added_token_behind_the_last_row(tmp_path):
  """Gemma 3's <image_soft_token>, a <pad> of Llama 2: refused only where a text has it."""
  source = tiny_hf.write(tmp_path / "source", CONFIG)
  backend = tiny_hf.tokenizer()
  backend.add_special_tokens(["<pad>"])
  backend.save(str(source / "tokenizer.json"))
  (source / "generation_config.json").write_text('{"eos_token_id": [3, 64]}')
  _, tokenizer = convert.load(convert.convert(source, tmp_path / "made", progress=False))
  assert (tokenizer.size, tokenizer.rows, tokenizer.ends) == (65, 64, (3,))
  with pytest.raises(ValueError, match="found token '<pad>' of id 64"):
    tokenizer.encode("!<pad>")


# ---- sliding windows

SLIDES, USED = "sliding_attention", {"sliding_window": 64, "use_sliding_window": True}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
  ("family", "entries", "windows"),
  [
    ("mistral", {"sliding_window": 64}, (64, 64)),
    ("mistral", {"max_position_embeddings": 8192}, (4096, 4096)),
    ("mistral", {"sliding_window": 64, "layer_types": [SLIDES] * 2}, (64, 64)),
    ("phi3", {"sliding_window": 64}, (64, 64)),
    ("qwen2", {**USED, "max_window_layers": 1}, (None, 64)),
    ("qwen3", {"sliding_window": 64, "layer_types": ["full_attention", SLIDES]}, (None, 64)),
    ("qwen3_moe", {**USED, **MOE}, (64, 64)),
    ("gemma2", {"sliding_window": 64, "hidden_act": ...}, (64, None)),
    ("gemma2", {"hidden_act": ...}, ()),  # longer than the context
    ("gemma3_text", {"sliding_window": 64, "sliding_window_pattern": 2}, (64, None)),
    ("gemma3_text", {"sliding_window": 64}, (64, 64)),
    ("gemma3_text", {}, (4096, 4096)),  # longer than the context, and yet of another theta
    ("mistral", {"sliding_window": None}, ()),
    ("mistral", {"sliding_window": 128}, ()),
    ("mistral", {"sliding_window": 64, "layer_types": ["full_attention"] * 2}, ()),
    ("qwen2", {**USED, "use_sliding_window": False}, ()),
    ("qwen2", {**USED, "max_window_layers": 2}, ()),
    ("qwen3", {"sliding_window": 64}, ()),
    ("llama", {"sliding_window": 64}, ()),
    ("glm4", {"sliding_window": 64}, ()),
  ],
)
def test_sliding_window(tmp_path, family, entries, windows):
  """Read for the layers that use it; up to the window the model is the same without."""
  source = tiny_hf.write(tmp_path, tiny_hf.config(family, head_dim=8, **entries))
  config = HuggingFace(source).config
  most = entries.get("max_position_embeddings", 128)
  assert (config.windows, config.max_context) == (windows, most)
  assert type(config).from_json(config.to_json()) == config
  if any(windows):
    short = HuggingFace(source, max_context=64).config
    assert (short.windows, short.max_context) == (windows if config.window_rope else (), 64)
    assert (config.limited, short.limited) == (False, True)  # past it the windows would be missing


def test_max_context_out_of_range(folder, untyped):
  for limit in (0, 129, 64.0, True, "64"):
    with pytest.raises(ValueError, match=rf"max_context: found {limit!r}, expected 1 to 128"):
      HuggingFace(folder, max_context=limit)
  assert type(HuggingFace(folder, max_context=np.int64(64)).config.max_context) is int


# ---- bad folders

_YARN = {"rope_type": "yarn", "factor": 4.0}
_LONG = {"rope_type": "longrope"}
_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_GEMMA2 = {"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh"}
_SLIDING = {"layer_types": ["sliding_attention"] * 2}
_ENTRIES = {"full_attention": {"rope_type": "default"}}
WRONG = [
  ({"rope_scaling": _LONG}, r"short_factor.*expected numbers"),
  ({"rope_scaling": {**_LONG, "short_factor": [1.0] * 3}}, r"rope: found .*expected .* for each"),
  ({"model_type": "phi3", "partial_rotary_factor": 1.5}, r"partial_rotary_factor.*found 1\.5"),
  ({**_GEMMA2, "attn_logit_softcapping": -5.0}, r"soft_cap: found -5\.0, expected .* above 0"),
  ({"model_type": "qwen3_moe", **MOE, "num_experts": 10**9}, r"of 0 experts, expected 1000000000"),
  ({"rope_scaling": {"type": "linear"}}, r"'factor': found None, expected a number"),
  ({"rope_scaling": {**_YARN, "factor": "4"}}, r"'factor': found '4'"),
  ({"rope_scaling": {**_YARN, "factor": True}}, r"'factor': found True"),
  ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, r"'factor': found inf"),
  ({"rope_scaling": {**_YARN, "attention_factor": float("nan")}}, r"config\.json: .*finite"),
  ({"rope_scaling": 3}, r"wrong type"),
  *(
    ({"model_type": family, **_SLIDING, **unused}, r"layer_types.*without a sliding window in use")
    for family, unused in (
      ("qwen2", {"sliding_window": 64, "use_sliding_window": False}),
      ("mistral", {"sliding_window": None}),
    )
  ),
  ({"rope_theta": -1.0}, r"rope_theta.*found -1\.0"),
  ({"hidden_size": None}, r"'hidden_size': not found"),
  ({"hidden_size": "32"}, r"wrong type"),
  ({"num_attention_heads": 0}, r"wrong type"),
  ({"num_key_value_heads": 3}, r"found 4, expected a multiple of kv_heads = 3"),
  ({"num_hidden_layers": 3}, r"found tensors of 2 layers, expected 3"),
  ({"num_hidden_layers": 10**9}, r"found tensors of 2 layers, expected 1000000000"),
  *(  # which are not listed
    (
      {"model_type": family, "sliding_window": 8, "num_hidden_layers": 10**30},
      r"config\.json: 'num_hidden_layers': found 10{30}, ",
    )
    for family in ("mistral", "gemma3_text")
  ),
  ({"intermediate_size": 40}, r"gate_proj.*found shape \(48, 32\), expected \(40"),
  ({"vocab_size": 65}, r"embed_tokens.*found shape \(64, 32\), expected \(65, 32\)"),
]
UNKNOWN = [
  ({"model_type": "gpt_neox"}, r"model_type 'gpt_neox'.*'llama'"),
  ({"model_type": None}, r"model_type 'None'"),
  ({"model_type": "gemma3"}, r"model_type 'gemma3'.*'gemma3_text'"),
  ({"model_type": "mixtral"}, r"model_type 'mixtral'"),
  ({"architectures": ["OtherForCausalLM"]}, r"OtherFor.*expected one of .*LlamaForCausalLM"),
  ({"hidden_act": "gelu"}, r"hidden_act.*found 'gelu', expected 'silu'"),
  ({"attention_bias": True}, r"attention_bias.*found True"),
  ({"mlp_bias": True}, r"mlp_bias.*found True"),
  ({"quantization_config": {"bits": 4}}, r"quantization_config.*bits"),
  ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor.*found 0\.5"),
  ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"'dynamic'"),
  ({"rope_scaling": {"rope_type": "3d"}}, r"'3d', expected one"),
  ({"rope_scaling": {"factor": 4.0}}, r"found \['factor'\] without a 'rope_type'"),
  ({"rope_scaling": {"type": None, "factor": 4.0}}, r"without a 'rope_type'"),
  *(
    ({"model_type": family, "layer_types": [f"{kind}_attention"] * 2}, rf"{kind}.*expected 2 of")
    for family, kind in (("mistral", "chunked"), ("qwen3", "linear"))
  ),
  ({"model_type": "gpt_oss", "quantization_config": {"x": "mxfp4"}}, r"quantiz.*mxfp4"),
  ({"model_type": "gpt_oss", "swiglu_limit": 5.0}, r"swiglu_limit.*found 5\.0, expected 7\.0"),
  ({**_GEMMA2, "hidden_act": "silu"}, r"hidden_act.*found 'silu', expected 'gelu_pytorch_tanh'"),
  (
    {"model_type": "gemma3_text", "final_logit_softcapping": 30.0},
    r"final_logit_softcapping.*found 30\.0, expected None",
  ),
  ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers.*found \[0\]"),
  (
    {"rope_parameters": _PLAIN, "rope_scaling": _YARN},
    r"found 'rope_scaling' .*yarn.* beside 'rope_parameters' .*default.*expected one of them",
  ),
  ({"rope_parameters": {**_YARN, "factor": 2.0}, "rope_scaling": _YARN}, r"beside .*parameters'"),
  (
    {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 8.0}},
    r"'rope_theta': found 7\.0 beside 8\.0 in 'rope_parameters', expected one of them",
  ),
  (
    {"model_type": "gemma3_text", "rope_parameters": _YARN},
    r"'rope_parameters': found the entries \['factor', 'rope_type'\], expected full_attention",
  ),
  (
    {"model_type": "gemma3_text", "rope_scaling": _YARN, "rope_parameters": _ENTRIES},
    r"found 'rope_scaling' .*yarn.* beside 'rope_parameters'",
  ),
]


def refused(tmp_path, error, message, config, *args, **how):
  """Nothing but the bad folder is there when its conversion has failed."""
  source = tiny_hf.write(tmp_path / "bad", config, *args, **how)
  with pytest.raises(error, match=rf"(?s)bad.*{message}"):
    convert.convert(source, tmp_path / "made", progress=False)
  assert [path.name for path in tmp_path.iterdir()] == ["bad"]


@pytest.mark.parametrize(
  ("error", "entries", "message"),
  [
    *((ValueError, *row) for row in WRONG),
    *((NotImplementedError, *row) for row in UNKNOWN),
  ],
)
def test_bad_config(tmp_path, error, entries, message):
  family = {"architectures": None} if "model_type" in entries else {}
  refused(tmp_path, error, message, {**CONFIG, **family, **entries}, tiny_hf.weights(CONFIG))


LINEAR = {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
  ("family", "entries", "scaling"),
  [
    ("llama", {"rope_scaling": {"rope_type": None, **LINEAR}}, Linear(2.0)),
    ("llama", {"rope_scaling": {"rope_type": None, "type": None}}, None),
    ("llama", {"rope_scaling": {}, "rope_parameters": {"rope_theta": 1e4}}, None),
    ("llama", dict.fromkeys(("rope_scaling", "rope_parameters"), LINEAR), Linear(2.0)),
    (
      "gpt_oss",
      {"attention_bias": True, "num_local_experts": 2, "num_experts_per_tok": 1},
      Yarn(32.0, 4096, truncate=False),
    ),
    (  # Phi-3's first files
      "phi3",
      {
        "rope_scaling": {"type": "yarn", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        "original_max_position_embeddings": 128,
      },
      LongRope((1.0,) * 4, 1.0),
    ),
  ],
)
def test_rope_as_old_and_new_files_say_it(tmp_path, family, entries, scaling):
  config = tiny_hf.config(family, head_dim=8, rope_theta=1e4, **entries)
  assert HuggingFace(tiny_hf.write(tmp_path, config)).config.rope == Rope(1e4, scaling)


JUNK = st.sampled_from([None, "x", -1, 0, 1.5, True, [], {}, ["x"], {"x": 1}, 10**12])


@given(st.sampled_from(sorted({**CONFIG, "head_dim": 8, "rope_scaling": {}})), JUNK)
def test_junk_in_the_config_is_refused_or_harmless(folder, key, value):
  text = (folder / "config.json").read_text()
  try:
    (folder / "config.json").write_text(json.dumps({**CONFIG, key: value}))
    HuggingFace(folder).config.to_json()
  except (ValueError, NotImplementedError) as error:
    assert str(folder) in str(error)
  finally:
    (folder / "config.json").write_text(text)


BAD = [
  ("model.layers.1.mlp.up_proj", None, r"1 of 21 tensors not found.*{}"),
  ("lm_head", None, r"tensors not found, expected {}"),
  ("model.norm", np.ones(31, np.float32), r"{}.*found shape \(31,\), expected \(32,\)"),
  ("model.norm", np.full(32, np.nan, np.float32), r"{}.*found NaN"),
]
UNUSED = [
  ("model.norm", np.ones(32, np.int32), r"{}.*found dtype I32, expected F32"),
  ("model.layers.0.self_attn.q_norm", np.ones(8, np.float32), r"does not use: {}"),
]


@pytest.mark.parametrize(
  ("error", "name", "tensor", "message"),
  [*((ValueError, *row) for row in BAD), *((NotImplementedError, *row) for row in UNUSED)],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_bad_tensors(tmp_path, error, name, tensor, message, shards):
  """One that is missing, changed, or too many."""
  weights = {**tiny_hf.weights(CONFIG), f"{name}.weight": tensor}
  message = message.format(re.escape(f"{name}.weight"))
  weights = {name: x for name, x in weights.items() if x is not None}
  refused(tmp_path, error, message, CONFIG, weights, shards=shards)


def test_missing_shard(tmp_path):
  source = tiny_hf.write(tmp_path, CONFIG, shards=3)
  (source / "model-00002-of-00003.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match=r"model-00002-of-00003.*expected this shard of 3"):
    HuggingFace(source)


def test_index_that_does_not_match(tmp_path):
  source = tiny_hf.write(tmp_path, CONFIG, shards=2)
  file = source / "model.safetensors.index.json"
  index = json.loads(file.read_text())
  places = index["weight_map"]
  one, other = sorted(set(places.values()))
  places["model.norm.weight"] = other if places["model.norm.weight"] == one else one
  file.write_text(json.dumps(index))
  with pytest.raises(ValueError, match=r"safetensors: tensor 'model\.norm\.weight': not found"):
    HuggingFace(source)
  outside = ("../x.safetensors", "/etc/passwd", "a/b.safetensors")
  named = [{"weight_map": {"model.norm.weight": name}} for name in outside]
  for bad in ({}, {"weight_map": 3}, *named):
    file.write_text(json.dumps(bad))
    with pytest.raises(ValueError, match=r"index\.json: expected a 'weight_map'"):
      HuggingFace(source)
  file.write_text(json.dumps({"weight_map": {"model.norm.weight": ".."}}))
  with pytest.raises(FileNotFoundError, match=r"\.\.: not found, expected this shard of 1"):
    HuggingFace(source)


def test_truncated_weights(folder, tmp_path):
  whole = (folder / "model.safetensors").read_bytes()
  source = tiny_hf.write(tmp_path, CONFIG)
  for cut in (0, 4, 100, len(whole) // 2, len(whole) - 1):
    (source / "model.safetensors").write_bytes(whole[:cut])
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged"):
      HuggingFace(source)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused(tmp_path, name):
  source = tiny_hf.write(tmp_path, CONFIG)
  (source / "model.safetensors").rename(source / name)
  with pytest.raises(ValueError, match=rf"only pickled weights \({name}\), expected model\.safe"):
    convert.convert(source, tmp_path / "made")
  with pytest.raises(ValueError, match="found a single file of weights, expected its folder"):
    convert.convert(source / name, tmp_path / "made")


def test_no_weights_no_config_no_folder(tmp_path):
  source = tiny_hf.write(tmp_path / "x", CONFIG)
  (source / "model.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match=r"no model\.safetensors and no"):
    HuggingFace(source)
  for text in ("{", "[]"):
    (source / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: .*expected an object"):
      HuggingFace(source)
  (source / "config.json").unlink()
  with pytest.raises(FileNotFoundError, match=r"config\.json: not found"):
    HuggingFace(source)
  with pytest.raises(FileNotFoundError, match=r"no such file or folder.*hf:owner/name"):
    convert.convert("owner/name", tmp_path / "made")


def test_converted_checkpoint_is_not_a_source(folder, tmp_path):
  made = convert.convert(folder, tmp_path / "made", progress=False)
  with pytest.raises(ValueError, match="found a converted checkpoint"):
    convert.convert(made, tmp_path / "again")


@pytest.mark.parametrize("size", [80, 65, 32])
def test_tokenizer_of_another_model(tmp_path, size):
  source = tiny_hf.write(tmp_path, CONFIG, size=size)
  found = rf"found {size} tokens .*expected the 64 rows of model\.embed"
  with pytest.raises(ValueError, match=found):
    convert.convert(source, tmp_path / "made")


# ---- download


def test_download_takes_no_pickles(folder, tmp_path, monkeypatch):
  asked = {}

  def snapshot(repo, **kwargs):
    asked.update(repo=repo, **kwargs)
    return str(folder)

  monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
  convert.convert("hf:owner/name", tmp_path / "made", progress=False)
  assert asked["repo"] == "owner/name"
  files = ["config.json", "tokenizer.json", "chat_template.jinja", "pytorch_model.bin", "model.pt"]
  files += ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "original/x.json"]
  files += ["additional_chat_templates/tool_use.jinja", "onnx/model.safetensors"]
  files += ["pytorch_model.bin.index.json", "consolidated.safetensors"]
  patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
  taken = huggingface_hub.utils.filter_repo_objects(files, **patterns)
  assert sorted(taken) == sorted([*files[:3], *files[5:7], files[8]])


def test_download_that_fails(monkeypatch):
  def snapshot(repo, **kwargs):
    raise RuntimeError("401 gated")

  for name in ("a/b/c", "qwen"):
    with pytest.raises(ValueError, match=rf"repo: found '{name}'.*expected 'owner/name'"):
      fetch.fetch_huggingface(name)
  monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
  with pytest.raises(OSError, match=r"owner/name: download failed.*401 gated"):
    fetch.fetch_huggingface("owner/name")


# ---- measured, in a process of its own

MEASURED = """
import pathlib, sys
import numpy as np
from kvjax.models.io import convert
from kvjax.models.io.source import tensor_shapes
from tests import tiny_gguf, tiny_hf
from tests.processes import peak

small, root, kind, to = sys.argv[1], pathlib.Path(sys.argv[2]), *sys.argv[3:]
convert.convert(small, root / "small", to=to, progress=False)  # what the libraries take once
sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 24}
config = {**tiny_hf.CASES["llama3"], **sizes}
if kind == "gguf":
  source = tiny_gguf.as_gguf(root / "x.gguf", config)
else:
  source = tiny_hf.write(root / "x", config, shards=3)
made, took = peak(lambda: convert.convert(source, root / "made", to=to, progress=False))
shapes = tensor_shapes(convert.read_config(made))
convert.load(root / "small")
_, loading = peak(lambda: convert.load(made))
print(took, 4 * sum(int(np.prod(shape)) for _, _, shape in shapes), loading)
"""


@pytest.mark.rest
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
@pytest.mark.parametrize(
  ("kind", "to"),
  [("gguf", "safetensors"), ("safetensors", "orbax"), ("safetensors", "safetensors")],
)
def test_memory_is_bounded_by_layers_not_by_the_model(folder, tmp_path, monkeypatch, kind, to):
  """A checkpoint of 24 layers of 17 MB: the peak is two layers, the embedding, and some slack.

  Loading takes the model, the file of an item, which is mapped, and some slack.
  """
  monkeypatch.setenv(*processes.FREED_AT_ONCE)
  command = ["-c", MEASURED, folder, tmp_path, kind, to]
  ((status, said, error),) = processes.ended(processes.started([command]))
  assert status == 0, error
  peak, total, loading = map(int, said.split())
  assert total > 5e8
  bound = 2 * total // 24 + (64 << 20)
  assert peak < bound < total / 2, f"found a peak of {peak >> 20} MB"
  assert total < loading < total + bound, f"found {loading >> 20} MB in loading"
