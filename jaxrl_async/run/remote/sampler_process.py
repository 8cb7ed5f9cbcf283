"""A sampler in a process of its own: it joins a run, draws until it is told to go, and leaves.

dial ──Welcome──> engine ──the first weights──> Sampler ──Live──> requests, weights
  ^                                                        │
  └────────── the trainer is gone: it may come again ──────┘
SIGTERM, Ctrl-C, Leave: what is running is handed back to the trainer, and the process ends
"""

import logging

log = logging.getLogger(__name__)
