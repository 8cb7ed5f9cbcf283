"""python -m jaxrl_async.sample --join ADDRESS: a sampler that joins a run, on its own devices.

    --join ADDRESS   where the trainer listens: HOST:PORT, a run's folder, or file:PATH of its join.json
    --mesh AXES      its slice, such as tensor=4; default: what mesh.sampler of the run says
    --name NAME      for logs; default: the machine's name and the process id
    --wait SECONDS   how long to wait for a trainer, at the start and when it is gone (default 600)
    --once           end when the trainer is gone, instead of waiting for it
    --cores LIST     keep to these cores, such as 2,3 (CPU only)

The trainer's run must have mesh.samplers_in=elsewhere. If it listens on anything but loopback, both
sides need the same secret in the environment variable JAXRL_ASYNC_SECRET.

Exit codes: 0 the run is finished, or one Ctrl-C; 1 a failure, explained on stderr; 2 a bad command
line or configuration; 75 ended by SIGTERM, with what was running handed back to the trainer.
"""
