#!/usr/bin/env bash
# tpu_scripts/run_on_host.sh CONFIG [section.key=value ...]: the main job on all local accelerators, half and half.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
config=${1:?usage: tpu_scripts/run_on_host.sh CONFIG [section.key=value ...]}
shift
chips=$("$python" -c 'import jax; print(jax.local_device_count())')
if ((chips == 1)); then
    mesh=(mesh.colocated=true)
else
    mesh=("mesh.trainer.fsdp=$((chips / 2))" "mesh.sampler.tensor=$((chips / 2))")
fi
exec "$python" -m jaxrl_async.train "$config" "${mesh[@]}" "$@"
