"""Ranks that refuse, as a program does: refuses.py RANK,...; the others wait for them."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from common import refuse


def main() -> None:
    """Refuse, or wait."""
    if os.environ["RANK"] in sys.argv[1].split(","):
        refuse(ValueError("no room"), "refuses.py")
    time.sleep(100)


if __name__ == "__main__":
    main()
