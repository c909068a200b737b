"""One thread for the tests: their tensors are tiny, and threads would only wait for one another."""

import importlib.util
import os
import signal
from pathlib import Path

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import torch  # noqa: E402

torch.set_num_threads(1)

# In the background of a shell interrupts are ignored, also by what tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Kernels that tests compile are kept with what else is kept of tests, and not in somebody's home.
os.environ.setdefault("FMOL_CACHE", str(Path(__file__).parent / ".pytest_cache" / "fmol"))

collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["src/fmol/flower/*.py"]
