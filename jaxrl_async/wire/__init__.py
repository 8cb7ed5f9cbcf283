"""How a trainer and its samplers talk: sessions over gRPC, and what keeps strangers out."""

import os

# gRPC takes part in fork() unless told not to, and complains whenever it cannot; no forked child of
# this package uses it. It reads this when it is imported first
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
