"""What tests of programs share: a tiny model in a folder, and the sentence that a refusal is."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpt_fast_sd.model import save_hugging_face
from tests.helpers import Refuses, tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without a tokenizer, in fp32; tests only read it."""
    folder = tmp_path_factory.mktemp("tiny")
    save_hugging_face(tiny_model(), folder, dtype=torch.float32)
    return folder


@pytest.fixture
def refuses(capsys: pytest.CaptureFixture[str]) -> Refuses:
    """Runs a program, which must exit with 2 and print nothing -> its sentence: all of stderr but argparse's usage."""

    def run(main: Callable[[list[str]], object], *argv: object) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([*map(str, argv)])
        out, err = capsys.readouterr()
        lines: list[str] = err.strip().splitlines()
        assert stopped.value.code == 2 and out == ""
        assert len(lines) == 1 or lines[0].startswith("usage: "), err
        return lines[-1]

    return run
