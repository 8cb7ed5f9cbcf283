#!/usr/bin/env bash
# tpu_scripts/run_on_host.sh CONFIG [section.key=value ...]: run on this host's accelerators, half for the trainer and
# half for a sampler. On a slice of several hosts, start it on each of them with the same arguments.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
config=${1:?usage: tpu_scripts/run_on_host.sh CONFIG [section.key=value ...]}
shift
hosts=$("$python" -m jaxrl_async.launch.distributed)
# Do not ask JAX on a slice of several hosts: it would wait for the others.
chips=${CHIPS_PER_HOST:-$(find /dev -maxdepth 2 \( -path '/dev/accel[0-9]*' -o -path '/dev/vfio/[0-9]*' \) | wc -l)}
((chips)) || chips=$("$python" -c 'import jax; print(jax.local_device_count())')
if ((chips > 1)); then
    mesh=("mesh.trainer.fsdp=$((hosts * (chips / 2)))" "mesh.sampler.tensor=$((chips / 2))" "mesh.samplers=$hosts")
elif ((hosts == 1)); then
    mesh=(mesh.colocated=true)
else
    echo "$hosts hosts with one chip each: a run needs a chip for the trainer and one for a sampler on each host." >&2
    exit 2
fi
exec "$python" -m jaxrl_async.train "$config" "${mesh[@]}" "$@"
