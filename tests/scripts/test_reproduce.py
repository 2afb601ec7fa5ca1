"""Every recipe is a command that benchmark.py takes, and a forecast of every cell that was published."""

import json
from pathlib import Path
from typing import Any

import pytest

import benchmark
import reproduce
from measuring.roofline import omega
from tests.helpers import Patch, Printed

GROUPS = [(name, i) for name, of in reproduce.RECIPES.items() for i in range(len(of["groups"]))]


@pytest.mark.parametrize(("name", "i"), GROUPS)
def test_a_group_is_a_command_and_its_cells_are_forecast(name: str, i: int) -> None:
    group = reproduce.Group(name, reproduce.RECIPES[name]["groups"][i])
    argv = group.command([Path("pg19.json")], "out.json")
    args = benchmark.parse(argv[argv.index("scripts/benchmark.py") + 1 :])
    assert {cell.batch for cell in group.cells} == {*args.batch} and {c.context for c in group.cells} == {*args.context}
    (draft,), own = args.draft, group.draft
    assert (draft.partition("/")[0], draft.endswith("standalone")) == (own.policy, own.draft_model is not None)
    for cell in group.cells:
        found = reproduce.row(group, cell, [])
        assert found["ours"] > 0.5 and found["forecast_plain_ms"] > 0
        assert (found["forecast"] is None) == (not cell.gamma)
        assert cell.gamma is None or 0.5 < found["forecast"] <= found["ours"] + 0.2
        if cell.tokens and cell.gamma:
            assert omega(cell.gamma, (found["acceptance"],)) == pytest.approx(cell.tokens, abs=1e-3)
        if cell.plain_ms:  # theirs, of other kernels
            assert 0.4 < found["forecast_plain_ms"] / cell.plain_ms < 1.6


def test_what_was_measured_stands_beside_and_all_is_written(
    tmp_path: Path, capsys: Printed, monkeypatch: Patch
) -> None:
    pytest.importorskip("matplotlib")
    speed: dict[str, Any] = {"speedup": {"steady": None, "completion": {"median": 1.77}}, "status": "measured"}
    point = {"batch": 32, "context": 8000, "policy": "standalone", "gamma": 3, "budget": 512} | speed
    (tmp_path / "m.json").write_text(json.dumps({
        "benchmark": "batch", "environment": {"device": "NVIDIA A100-SXM4-80GB"},
        "settings": {"model": "togethercomputer/LLaMA-2-7B-32K", "draft_model": "TinyLlama/TinyLlama_v1.1", "tp": 8,
                     "kv_dtype": None},
        "points": [point, point | {"status": "failed"}],
    }))  # fmt: skip
    out = tmp_path / "o.json"
    reproduce.main(["magicdec:table3a", "--measured", str(tmp_path / "m.json"), "--json", str(out),
                    "--plot", str(tmp_path / "o.png")])  # fmt: skip
    said = capsys.readouterr().out
    assert "TinyLlama_v1.1" in said and "1.77x" in said and "torchrun" in said and "arXiv 2408.11049" in said
    assert [one["measured"] for one in json.loads(out.read_text())].count(1.77) == 1  # not of the H100s, too
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")
    reproduce.main(["--list"])
    said = capsys.readouterr().out
    assert all(name in said for name in reproduce.RECIPES)
    monkeypatch.setattr(reproduce.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="2"):
        reproduce.main(["magicdec:table2"])
    assert "needs 8 GPUs, and torch sees" in capsys.readouterr().err
