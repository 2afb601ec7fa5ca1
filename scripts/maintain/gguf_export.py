"""Write a Hugging Face style Llama folder as one GGUF file, so that llama.cpp can be timed on the same weights.

    python scripts/maintain/gguf_export.py MODEL_FOLDER OUT.gguf [--dtype f16|bf16|f32|q4_0]

Needs the `gguf` package; gguf_writer.py says what is written how.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the other programs and their helpers lie

from common import refusing, started
from files import check_files
from maintain.gguf_writer import DTYPES, export_gguf


def main() -> None:
    """Export one folder, or exit with one sentence."""
    parser = argparse.ArgumentParser(description="Write a Hugging Face style Llama folder as a GGUF file.")
    parser.add_argument("folder", type=Path, help="folder with config.json and *.safetensors")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="f16", help="dtype of the matrices (default f16)")
    args = parser.parse_args()
    with refusing("gguf_export.py"):
        check_files({"the output": args.out}, {"the folder": args.folder})
        export_gguf(args.folder, args.out, args.dtype)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB, {args.dtype}")


if __name__ == "__main__":
    started(main)
