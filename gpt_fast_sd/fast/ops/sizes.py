"""Sizes that operators and their bodies agree on."""

FEW_ROWS = 256  # up to so many rows per kv head are too few tiles for a GPU: even in a long chunk, keys are split
PREFILL_SPLIT = 1024  # keys that one program then reads for few rows
ONE_CHUNK = 192  # listed entries that one program reads, so that nothing is merged
PROGRAMS = 396  # three on each SM of an H200, so many of which read lists at the same time
LARGEST_SPLIT = 2048  # keys that a program reads for few rows, at most; twice as many in tiles of 64 rows and more
BUSY = 512  # programs that keep a large GPU busy: some four for each of its SMs
