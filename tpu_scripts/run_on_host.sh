#!/usr/bin/env bash
# tpu_scripts/run_on_host.sh CONFIG [section.key=value ...]: run on this host's accelerators, half for the trainer and
# half for a sampler. On a slice of several hosts, start it on each of them with the same arguments.
#   --trainer PORT CONFIG [...]     all chips for the trainer; samplers join it at that port of the first host
#   --sampler HOST:PORT [option ..] all chips for a sampler that joins there (options of jaxrl_async.sample)
set -euo pipefail
cd "$(dirname "$0")/.."

usage='usage: tpu_scripts/run_on_host.sh [--trainer PORT] CONFIG [section.key=value ...], or --sampler HOST:PORT'
python=${PYTHON:-.venv/bin/python}
role=halves
case ${1-} in
    --trainer | --sampler) role=${1#--} at=${2:?$usage}; shift 2 ;;
esac
hosts=$("$python" -m jaxrl_async.run.distributed)
# Do not ask JAX on a slice of several hosts: it would wait for the others.
chips=${CHIPS_PER_HOST:-$(find /dev -maxdepth 2 \( -path '/dev/accel[0-9]*' -o -path '/dev/vfio/[0-9]*' \) | wc -l)}
((chips)) || chips=$("$python" -c 'import jax; print(jax.local_device_count())')
if [[ $role == sampler ]]; then
    exec "$python" -m jaxrl_async.sample --join "$at" --mesh "tensor=$((hosts * chips))" "$@"
fi
config=${1:?$usage}
shift
if [[ $role == trainer ]]; then
    mesh=("mesh.trainer.fsdp=$((hosts * chips))" mesh.samplers_in=external "remote.listen=0.0.0.0:$at")
elif ((chips > 1)); then
    mesh=("mesh.trainer.fsdp=$((hosts * (chips / 2)))" "mesh.sampler.tensor=$((chips / 2))" "mesh.samplers=$hosts")
elif ((hosts == 1)); then
    mesh=(mesh.colocated=true)
else
    echo "$hosts hosts with one chip each: a run needs a chip for the trainer and one for a sampler on each host." >&2
    exit 2
fi
exec "$python" -m jaxrl_async.train "$config" "${mesh[@]}" "$@"
