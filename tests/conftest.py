"""Settings for all tests, before anything imports torch."""

import os

# Threads that wait must not spin: tests, engines and trainers share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
