"""What gpu_suite.py runs on a GPU, by subject: tests, kernels, replayed cells, end to end, the page of results."""
