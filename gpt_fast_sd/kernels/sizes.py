"""Sizes that operators and their Triton bodies agree on."""

PAGES = (16, 32, 64, 128)  # block sizes whose attention mass can be summed
FEW_ROWS = 256  # so few rows a kv head are too few tiles for a GPU: in a long chunk, too, their keys are split
PREFILL_SPLIT = 1024  # keys that one program then reads of few rows
ONE_CHUNK = 192  # listed entries that one program reads, so that nothing is merged
