"""Rank 1 is lost in the middle of a text: lost.py "die" | "raise" | "hang" TIMEOUT; rank 0 must not wait forever."""

import os
import sys
import time

from gpt_fast_sd import Engine, EngineConfig, SamplingParams
from gpt_fast_sd.tp import start
from tests.helpers import tiny_model


def main() -> None:
    """Decode, and lose rank 1 after a few tokens."""
    how, timeout = sys.argv[1], float(sys.argv[2])
    parallel = start(2, "cpu", timeout=timeout)
    with parallel.guard():
        model = parallel.group.shard(tiny_model())
        config = EngineConfig(batch_size=1, max_seq_len=600, device="cpu", compile=False)
        engine = Engine(model, None, config, parallel=parallel)
        for n, _ in enumerate(engine.stream([[1, 2, 3]], SamplingParams(max_tokens=500, ignore_eos=True))):
            if n == 5 and parallel.rank == 1:
                if how == "die":
                    os._exit(7)
                if how == "raise":
                    raise KeyError("something of rank 1's own")
                time.sleep(600)


if __name__ == "__main__":
    main()
