#!/usr/bin/env bash
# tpu_scripts/tpu.sh [--dry-run] COMMAND: a run on a Cloud TPU slice, from its creation to its end.
#
#   create                        ask for the slice as a queued resource (spot with SPOT=1), wait for it
#   install                       this checkout and its dependencies, on all hosts
#   start CONFIG [key=value ...]  the run on all hosts; it resumes where an earlier start ended
#   status                        the slice's state, and the run's on each host
#   logs [HOST]                   follow a host's output (default 0: only host 0 reports the run)
#   stop                          SIGTERM: the run saves and ends
#   supervise CONFIG [...]        all of these, again after each preemption, until the run is done
#   delete                        the slice and its request
#
# Settings come from the environment:
#   TPU_NAME ZONE ACCELERATOR RUNTIME   required: a name, and such as us-east5-b, v6e-16, v2-alpha-tpuv6e
#   PROJECT                             default: gcloud's own
#   SPOT=1                              cheaper, but may be preempted
#   RUNS                                gs://BUCKET, mounted with gcsfuse, or a folder that all hosts share
#   POLL_S=30 MAX_FAILURES=3            supervise: seconds between two checks, failures before it gives up
set -euo pipefail

readonly UNIT=jaxrl_async FOLDER=jaxrl_async PREEMPTED=75
here=$(cd "$(dirname "$0")/.." && pwd)

usage() { sed -n '2,/^set -euo/{s/^# \{0,1\}//;/^set -euo/d;p}' "$0"; }
fail() { printf 'tpu.sh: %s\n' "$*" >&2; exit 2; }

dry_run=
if [[ ${1-} == --dry-run ]]; then dry_run=1; shift; fi
command=${1-}
[[ -n $command && $command != --help && $command != -h ]] || { usage; exit 0; }
shift

gc() {  # run a gcloud command with this slice's zone and project
    local where=(--zone "$ZONE")
    [[ -z ${PROJECT-} ]] || where+=(--project "$PROJECT")
    if [[ -n $dry_run ]]; then
        printf '%q ' gcloud compute tpus "$@" "${where[@]}"; echo
    else
        gcloud compute tpus "$@" "${where[@]}"
    fi
}

on_hosts() { gc tpu-vm ssh "$TPU_NAME" --worker "$1" --command "$2"; }

state() {  # print the slice's state: ACTIVE, ...; NONE: there is no slice, UNKNOWN: gcloud failed otherwise
    local output
    if output=$(gc queued-resources describe "$TPU_NAME" --format 'value(state.state)' 2>&1); then
        tail -n 1 <<<"$output"
    elif [[ $output == *NOT_FOUND* ]]; then
        echo NONE
    else
        echo "$output" >&2
        echo UNKNOWN
    fi
}

create() {
    : "${ACCELERATOR:?set it to the slice, such as v6e-16}" "${RUNTIME:?set it to the VM image, such as v2-alpha-tpuv6e}"
    local spot=()
    [[ -z ${SPOT-} ]] || spot=(--spot)
    gc queued-resources create "$TPU_NAME" --node-id "$TPU_NAME" --accelerator-type "$ACCELERATOR" \
        --runtime-version "$RUNTIME" "${spot[@]}"
    [[ -n $dry_run ]] || wait_for_slice
}

wait_for_slice() {
    local now before=
    while now=$(state); [[ $now != ACTIVE ]]; do
        case $now in
            NONE | FAILED | SUSPENDED | SUSPENDING | DELETING)
                echo "the request for $TPU_NAME is $now: run tpu.sh delete, then try again, perhaps in another zone" >&2
                return 1 ;;
        esac
        [[ $now == "$before" ]] || echo "$TPU_NAME: $now"
        before=$now
        sleep "${POLL_S:-30}"
    done
    echo "$TPU_NAME: ACTIVE"
}

packed() {  # write this checkout, without the files that git ignores (environments, runs), to a tar file
    if git -C "$here" rev-parse --is-inside-work-tree >/dev/null 2>&1; then
        git -C "$here" ls-files -z --cached --others --exclude-standard |
            while IFS= read -r -d '' file; do [[ ! -e $here/$file ]] || printf '%s\0' "$file"; done |
            tar -C "$here" --null --files-from - -czf "$1"
    else
        tar -C "$here" -czf "$1" --exclude '.*venv' --exclude ./runs .
    fi
}

install() {
    local archive
    archive=$(mktemp --suffix=.tar.gz)
    # shellcheck disable=SC2064  # expand the name now
    trap "rm -f '$archive'" EXIT
    packed "$archive"
    gc tpu-vm scp "$archive" "$TPU_NAME:$FOLDER.tar.gz" --worker all
    on_hosts all "set -eu
        rm -rf $FOLDER && mkdir $FOLDER && tar -C $FOLDER -xzf $FOLDER.tar.gz
        python3 -m pip install --user --quiet uv
        cd $FOLDER && ~/.local/bin/uv venv --quiet --python 3.11 .venv
        ~/.local/bin/uv pip install --quiet --python .venv/bin/python -c constraints.txt -e '.[tpu]'"
    if [[ ${RUNS-} == gs://* ]]; then
        on_hosts all "set -eu
            command -v gcsfuse >/dev/null || {
                echo 'deb https://packages.cloud.google.com/apt gcsfuse-'\$(lsb_release -cs)' main' | sudo tee /etc/apt/sources.list.d/gcsfuse.list
                curl -fsS https://packages.cloud.google.com/apt/doc/apt-key.gpg | sudo tee /etc/apt/trusted.gpg.d/gcsfuse.asc
                sudo apt-get update -qq && sudo apt-get install -qqy gcsfuse; }
            mkdir -p ~/runs && { mountpoint -q ~/runs || gcsfuse --implicit-dirs --rename-dir-limit 100000 ${RUNS#gs://} ~/runs; }"
    fi
}

start() {
    (($#)) || fail "start needs a configuration: tpu.sh start CONFIG [section.key=value ...]"
    local runs="\$HOME/runs" words
    [[ -z ${RUNS-} || $RUNS == gs://* ]] || runs=$(printf %q "$RUNS")
    words=$(printf '%q ' "$@")
    on_hosts all "set -eu
        sudo systemctl stop $UNIT 2>/dev/null || true; sudo systemctl reset-failed $UNIT 2>/dev/null || true
        sudo systemd-run --quiet --unit=$UNIT --uid=\$(id -u) --gid=\$(id -g) --working-directory=\$HOME/$FOLDER \\
            --property=RemainAfterExit=yes --property=KillMode=mixed --property=TimeoutStopSec=60 --setenv=HOME=\$HOME \\
            \$HOME/$FOLDER/tpu_scripts/run_on_host.sh $words run.dir=$runs run.resume_or_start=true"
}

run_states() {  # print one line for each host: active/exited 0, active/running 0, failed/failed 75, ...
    on_hosts all "systemctl show $UNIT --property=ActiveState,SubState,ExecMainStatus --value | paste -sd ' '"
}

verdict() {  # reduce run_states' lines, words in any order, to: running, over, preempted, gone, or failed CODE
    local line code worst=over
    while read -r line; do
        code=$(grep -oE '\b[0-9]+\b' <<<"$line" | head -n 1) || code=
        case $line in
            *running* | *activating*) [[ $worst != over ]] || worst=running ;;
            *dead*) [[ $worst == preempted ]] || worst=gone ;;  # the host has rebooted
            *" $PREEMPTED" | "$PREEMPTED "* | *" $PREEMPTED "*) worst=preempted ;;
            *) [[ $code == 0 || $worst == preempted ]] || worst="failed ${code:-?}" ;;
        esac
    done
    echo "$worst"
}

watch() {  # wait until the run has ended; print its outcome
    local outcome=running silent=0 now lines
    while [[ $outcome == running ]]; do
        sleep "${POLL_S:-30}"
        now=$(state)
        if [[ $now != ACTIVE && $now != UNKNOWN ]]; then
            outcome=preempted
        elif [[ $now == ACTIVE ]] && lines=$(run_states); then
            silent=0
            outcome=$(verdict <<<"$lines")
        elif ((++silent == 10)); then
            outcome=unreachable
        fi
    done
    echo "$outcome"
}

supervise() {
    (($#)) || fail "supervise needs a configuration: tpu.sh supervise CONFIG [section.key=value ...]"
    if [[ -n $dry_run ]]; then create; install; start "$@"; run_states; return; fi
    local failures=0 outcome
    while true; do
        case $(state) in
            ACTIVE) ;;
            NONE) create; install ;;
            SUSPENDED | SUSPENDING | FAILED)
                echo "$TPU_NAME was preempted: asking for another slice"
                delete; create; install ;;
            *) wait_for_slice; install ;;
        esac
        start "$@"
        outcome=$(watch)
        case $outcome in
            over) echo "the run is done"; return 0 ;;
            preempted) echo "preempted: the run resumes from its newest checkpoint" ;;
            *)
                failures=$((failures + 1))
                echo "the run: $outcome (failure $failures of ${MAX_FAILURES:-3}); see tpu.sh logs" >&2
                ((failures < ${MAX_FAILURES:-3})) || return 1 ;;
        esac
    done
}

delete() { gc queued-resources delete "$TPU_NAME" --force --quiet; }

: "${TPU_NAME:?set it to the name of the slice}" "${ZONE:?set it to its zone, such as us-east5-b}"
case $command in
    create | install | delete) (($# == 0)) || fail "$command takes no further arguments: $*"; "$command" ;;
    start | supervise) "$command" "$@" ;;
    status) state; run_states ;;
    logs) on_hosts "${1:-0}" "journalctl --unit $UNIT --output cat --lines 200 --follow" ;;
    stop) on_hosts all "sudo systemctl kill --kill-whom=main --signal=SIGTERM $UNIT" ;;
    *) fail "unknown command $command; tpu.sh --help lists them" ;;
esac
