"""Labels of methods: settings, files, methods over others, classes from outside."""

import json
import math

import pytest

import kvjax
from kvjax.methods import labels
from kvjax.methods.labels import instance


def test_a_label_is_a_method():
  assert instance("full", 64) == kvjax.Full()
  assert instance("snapkv:window_size=4,reduce=max", 64) == kvjax.SnapKV(64, 4, reduce="max")
  assert instance("snapkv:budget=9,window_size=4", 64).budget == 9
  over = instance("quantised:bits=4+snapkv:window_size=4", 64)
  assert over == kvjax.Quantised(kvjax.SnapKV(64, 4), bits=4)
  assert instance("knorm:skip_layers=(0,1)", 64).skip_layers == (0, 1)
  heads = "ltri:heads=((1, 3, 0.5), (2, 0, 0.25)),voting=False"
  assert instance(heads, 4096).heads == ((1, 3, 0.5), (2, 0, 0.25))
  assert instance("kvjax:Quest:page=4", 64).page == 4
  assert instance("art:patience=inf", 64).patience == math.inf
  assert labels.split("adakv:safeguard=0+kvzip") == ["adakv:safeguard=0", "kvzip"]


def test_values_that_stand_in_files(tmp_path):
  path = tmp_path / "heads.json"
  path.write_text(json.dumps({"heads": [[0, 1, 0.5]]}))
  assert instance(f"ltri:heads={path}", 4096).heads == ((0, 1, 0.5),)
  for text in ("[]", '{"heads": 3}', '{"heads": [[0.7, 1, 0.5]]}', '{"heads": {"012": 3}}'):
    path.write_text(text)
    with pytest.raises(
      ValueError, match=r"heads\.json: found .*expected a file of retrieval heads"
    ):
      instance(f"ltri:heads={path}", 4096)
  with pytest.raises(ValueError, match=r"--it: .*none\.json: not found, expected a file"):
    instance(f"ltri:heads={tmp_path}/none.json", 4096, "--it")


@pytest.mark.parametrize(
  ("label", "message"),
  [
    ("snapkw", r"--it: found 'snapkw', .*\(did you mean 'snapkv'\?\)"),
    ("snapkv:4", "--it: found 'snapkv:4', expected name:field=value"),
    ("snapkv:windows=4", "--it: snapkv has no windows, it has: budget, window_size"),
    ("snapkv:window_size=4,pool", "--it: found 'snapkv:window_size=4,pool', expected name:field="),
    ("lm_infinite:rope=1", "--it: lm_infinite has no rope, it has: "),
    ("snapkv:pool=3,pool=5", "--it: found pool twice in 'snapkv:pool=3,pool=5', expected each"),
    ("quantised:base=full+snapkv", "--it: found base twice in 'quantised:base=full"),
    ("snapkv+full", r"--it: found 'snapkv\+full', expected a method over others before"),
  ],
)
def test_what_is_no_label_is_refused(label, message):
  with pytest.raises(ValueError, match=message):
    instance(label, 64, "--it")


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
  "heads", ["(1,2)", "((1,2),)", '((1,"a",0.5),)', "((-1,2,0.5),)", "((0,1,1e999),)"]
)
def test_what_is_no_list_of_heads_is_refused(heads):
  with pytest.raises(ValueError, match=r"Ltri\.heads: found .*, expected one or more, one per"):
    instance(f"ltri:heads={heads}", 64)
