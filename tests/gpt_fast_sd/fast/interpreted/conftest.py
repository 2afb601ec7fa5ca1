"""Interpreted kernels: triton reads TRITON_INTERPRET when it is imported, so these tests have a process of their own.

`python -m pytest` comes here by way of tests/gpt_fast_sd/fast/test_interpreted.py; by hand:
`TRITON_INTERPRET=1 python -m pytest tests/gpt_fast_sd/fast/interpreted`.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import tests.gpuless.interpreter  # noqa: F401  before any kernel: it makes bf16 right
else:
    collect_ignore_glob = ["test_*.py"]
