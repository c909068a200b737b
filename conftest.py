"""One thread for the tests: their tensors are tiny, and threads would only wait for one another."""

import importlib.util
import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import torch  # noqa: E402

torch.set_num_threads(1)

collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["src/fmol/flower/*.py"]
