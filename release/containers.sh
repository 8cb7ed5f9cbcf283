#!/usr/bin/env bash
# release/containers.sh [--dry-run] [--push] [TARGET ...]: container images of the main job, from the Dockerfile.
#
#   cpu       with g++, which compiles the kernels for CPUs
#   cuda13    for NVIDIA cards with a driver of 580 or newer
#   tpu       for TPU VMs and GKE
#
# Without a TARGET all are built. Each is tried: the command says its version, and trains two steps on the CPU.
# --dry-run prints the commands. --push sends the images, which needs a login to the registry.
#   ENGINE    docker or podman; default: the one that is there
#   IMAGE     name without a tag, such as ghcr.io/OWNER/jaxrl_async; default: jaxrl_async
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '2,/^set -euo/{s/^# \{0,1\}//;/^set -euo/d;p}' "$0"; }
fail() { printf 'containers.sh: %s\n' "$*" >&2; exit 2; }

dry_run='' push='' targets=()
for word in "$@"; do
    case $word in
        --dry-run) dry_run=1 ;;
        --push) push=1 ;;
        --help | -h) usage; exit 0 ;;
        cpu | cuda13 | tpu) targets+=("$word") ;;
        *) fail "unknown word $word; the targets are cpu, cuda13 and tpu (--help explains)" ;;
    esac
done
[ ${#targets[@]} -gt 0 ] || targets=(cpu cuda13 tpu)

engine=${ENGINE:-}
for known in docker podman; do
    [ -n "$engine" ] || ! command -v "$known" >/dev/null || engine=$known
done
[ -n "$engine" ] || [ -z "$dry_run" ] || engine=docker
[ -n "$engine" ] || fail "neither docker nor podman is installed; install one, or see the commands with --dry-run"

run() {
    if [ -n "$dry_run" ]; then
        printf '%q ' "$@"; echo
    else
        "$@"
    fi
}

image=${IMAGE:-jaxrl_async}
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' jaxrl_async/__init__.py)
source=$(sed -n 's/^Repository = "\(.*\)"$/\1/p' pyproject.toml)
license=$(sed -n 's/^license = "\([^"]*\)".*$/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[ -z "$(git status --porcelain 2>/dev/null)" ] || revision+=-changed
labels=(version="$version" source="$source" revision="$revision" licenses="$license" title=jaxrl_async)

for target in "${targets[@]}"; do
    case $target in
        cpu) arguments=(EXTRA= PYTHON=3.12-bookworm) ;;  # not slim: it has g++
        *) arguments=(EXTRA="$target") ;;
    esac
    tag=$image:$version-$target
    words=("$engine" build --pull --tag "$tag")
    for argument in "${arguments[@]}"; do words+=(--build-arg "$argument"); done
    for label in "${labels[@]}"; do words+=(--label "org.opencontainers.image.$label"); done
    run "${words[@]}" .
    run "$engine" run --rm --entrypoint jaxrl-async "$tag" --version
    run "$engine" run --rm --env JAX_PLATFORMS=cpu "$tag" configs/addition.yaml run.dir=/runs run.steps=2 trainer.warmup_steps=1 \
        warm_start.steps=2 data.addition.eval_size=8 algorithm.groups_per_step=2 sampler.slots=16
    [ -z "$push" ] || run "$engine" push "$tag"
done
