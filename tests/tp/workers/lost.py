"""Ranks that end: lost.py "die" | "raise" | "hang" TIMEOUT, or lost.py "refuse" RANK,...

Of the former rank 1 is lost in the middle of a text, and rank 0 must not wait forever; of the latter these ranks
refuse, as a program does, and the others wait for them.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from common import refuse
from gpt_fast_sd import SamplingParams
from gpt_fast_sd.tp import start
from tests.helpers import tiny_engine, tiny_model


def lose(how: str, timeout: float) -> None:
    """Decode, and lose rank 1 after a few tokens."""
    parallel = start(2, "cpu", timeout=timeout)
    with parallel.guard():
        engine = tiny_engine(model=parallel.group.shard(tiny_model()), parallel=parallel, max_seq_len=600)
        for n, _ in enumerate(engine.stream([[1, 2, 3]], SamplingParams(max_tokens=500, ignore_eos=True))):
            if n == 5 and parallel.rank == 1:
                if how == "die":
                    os._exit(7)
                if how == "raise":
                    raise KeyError("something of rank 1's own")
                time.sleep(600)


if __name__ == "__main__":
    how, what = sys.argv[1:]
    if how != "refuse":
        lose(how, float(what))
    elif os.environ["RANK"] in what.split(","):
        refuse(ValueError("no room"), "refuses.py")
    else:
        time.sleep(100)
