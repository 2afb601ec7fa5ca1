"""scripts/evaluate.py: what it measures of a model, alone and beside a reference, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import evaluate
from gpt_fast_sd.loading import BUNDLED

DOCUMENT = BUNDLED / "document.txt"
SMALL = ["--text", str(DOCUMENT), "--contexts", "128", "--lengths", "96", "--depths", "0.5", "--entries", "2"]
SMALL += ["--n", "1", "--compared", "12", "--device", "cpu"]


def measured(tmp_path: Path, *flags: str) -> dict[str, Any]:
    file = tmp_path / "measured.json"
    evaluate.main([*SMALL, *flags, "--json", str(file)])
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def test_fewer_bits_are_compared_with_the_same_model_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = measured(tmp_path, "--kv-dtype", "bf16")
    assert (result["dtype"], result["kv_dtype"], result["quantize"]) == ("fp32", "bf16", None)
    (one,) = result["reference"]["logits"]
    assert (one["book"], one["tokens"]) == ("document", 12)
    assert 0 < one["logit_error"] < 0.05 and one["same_best"] > 0.9 and 0 < one["divergence"] < 0.01
    assert one["perplexity"] == pytest.approx(one["reference_perplexity"], rel=0.05) and one["perplexity"] > 1
    for kind, n in (("needle", 1), ("lookup", 4)):
        for found in (result, result["reference"]):
            assert [r["n"] for r in found[kind]] == [n] and 0 <= found[kind][0]["exact"] <= found[kind][0]["digits"]
    out = capsys.readouterr().out
    assert "Beside bundled, fp32, nothing quantized" in out and "same best token" in out and "Its needles" in out


@pytest.mark.slow
def test_a_model_equals_itself_and_is_compared_with_nothing_unless_asked(tmp_path: Path) -> None:
    (one,) = measured(tmp_path, "--reference", "bundled")["reference"]["logits"]
    assert one["logit_error"] == 0 and one["same_best"] == 1.0 and one["perplexity"] == one["reference_perplexity"]
    assert "reference" not in measured(tmp_path)


def test_default_sizes_are_those_that_fit() -> None:
    assert evaluate.fitting(None, 512, 2, 16384) == [512, 1024, 2048, 4096, 8192, 16384]
    assert evaluate.fitting(None, 1024, 4, 8000) == [1024, 4096] and evaluate.fitting(None, 1024, 4, 300) == [300]
    assert evaluate.fitting([7], 512, 2, 300) == [7]
