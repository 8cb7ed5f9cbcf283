"""Metrics of the machinery: times, sampler, weights, buffer, endpoint, memory and faults."""

from jaxrl_async.metrics.reductions import Last, Metric, Sum, timed

MACHINE_METRICS: tuple[Metric, ...] = (
    *timed(
        Last,
        ("time/step_s", "s", "The whole step: waiting, training, publishing, evaluating."),
        ("time/train_s", "s", "Packing, forward and backward passes, update."),
        ("time/wait_data_s", "s", "Wait for enough groups."),
        ("time/wait_turn_s", "s", "Wait for steps of the run's other adapters."),
        (
            "time/wait_eval_s",
            "s",
            "Wait for an evaluation of the previous weights (eval.asynchronous).",
        ),
        ("time/publish_s", "s", "Time the trainer spent sending weights."),
        ("time/eval_s", "s", "Evaluation on the held-out prompts."),
        ("eval/<name>/time_s", "s", "Time of the evaluation."),
        ("time/save_s", "s", "Pause of the trainer for a checkpoint."),
        ("time/warm_start_s", "s", "The whole warm start."),
        ("time/elapsed_s", "s", "Time since the start or resume."),
    ),
    *timed(
        Last,
        ("trainer/idle_share", "share", "Time in which the trainer did not train."),
    ),
    *timed(
        Last,
        ("sampler/idle_share", "share", "Time in which the sampler had nothing to decode."),
        ("sampler/busy_share", "share", "Time in which the sampler had work on its devices."),
        ("sampler/slot_occupancy", "share", "Decode steps x slots with a needed token."),
        (
            "sampler/occupancy_while_waiting",
            "share",
            "As sampler/slot_occupancy, of blocks with waiting requests.",
        ),
        ("sampler/prefix_hit_share", "share", "Prompt tokens whose KV was reused."),
        ("sampler/kv_page_share", "share", "KV pages in use, kept prefixes included."),
        ("sampler/in_flight", "requests", "Requests in a slot or in the reserve."),
        ("sampler/failed", "requests", "Requests that failed individually."),
        ("sampler/preempted", "requests", "Requests preempted: KV pages ran out."),
        (
            "sampler/restarted",
            "requests",
            "Requests restarted after a swap (on_new_weights=restart).",
        ),
        ("sampler/discarded_tokens", "tokens", "Generated tokens that a restart discarded."),
        (
            "sampler/recomputed_tokens",
            "tokens",
            "Tokens prefilled again after a swap or preemption.",
        ),
        ("sampler/scored_tokens", "tokens", "Prompt tokens whose log-probs were computed."),
        ("sampler/gate_wait_share", "share", "Time in which rollouts waited at the gate."),
        ("sampler/queue_s", "s", "Mean time from submit to prefill."),
        ("sampler/joins", "samplers", "Samplers in separate processes that joined."),
        ("sampler/living", "samplers", "Running samplers."),
    ),
    *timed(
        Last,
        ("throughput/generated_tokens_per_s", "tokens/s", "Tokens sampled for training."),
        (
            "throughput/aside_tokens_per_s",
            "tokens/s",
            "Tokens sampled for evaluations, guests and opponents.",
        ),
        (
            "throughput/trained_tokens_per_s",
            "tokens/s",
            "Tokens trained on, each once for any number of epochs.",
        ),
        (
            "throughput/mfu",
            "share",
            "Model FLOP / (time/train_s x peak FLOP/s). Includes adapters; excludes padding, "
            "savings from shared prefixes, and the head for untrained tokens.",
        ),
    ),
    *timed(
        Last,
        (
            "weights/transfer_bytes",
            "bytes",
            "Bytes that one publish moved to the sampler's devices.",
        ),
        (
            "weights/transfer_s",
            "s",
            "From publish until the weights are complete on the sampler's devices.",
        ),
        (
            "weights/transfers",
            "transfers",
            "Copies of the weights that reached a sampler in a separate process.",
        ),
        ("weights/sent_bytes", "bytes", "Bytes that samplers fetched from the trainer."),
        ("weights/passed_bytes", "bytes", "Bytes that samplers fetched from each other."),
        ("weights/base_bytes", "bytes", "Bytes of the frozen base that joining samplers fetched."),
        ("weights/gb_per_s", "GB/s", "Mean speed of a transfer."),
        ("weights/repeats", "transfers", "Transfers restarted after a failure or timeout."),
        ("weights/live_s", "s", "From publish to the first block decoded with the weights."),
        (
            "weights/probe_error",
            "nats",
            "Largest |sampler - trainer log-prob| on the probe, at the newest swap.",
        ),
        ("weights/swap_pause_s", "s", "Longest pause of decoding for a swap."),
    ),
    *timed(
        Last,
        ("buffer/active", "groups", "Groups admitted and not yet released."),
        ("buffer/ready", "groups", "Groups that wait for the trainer."),
    ),
    *timed(
        Last,
        ("endpoint/calls", "calls", "Calls that began in the step."),
        ("endpoint/refused", "calls", "Calls answered with a client error."),
        ("endpoint/busy", "calls", "Calls rejected because endpoint.max_open_calls were open."),
        ("endpoint/failed", "calls", "Calls answered with a server error."),
        ("endpoint/capped", "calls", "Calls that asked for more tokens than allowed."),
        ("endpoint/disconnected", "calls", "Calls whose client left before the answer."),
        ("endpoint/stalled", "calls", "Calls cut off: the client did not read the answer."),
        ("endpoint/continued", "prompts", "Chats that continue the tokens of an earlier call."),
        ("endpoint/opened", "prompts", "Chats tokenized from their start."),
        ("endpoint/ignored", "fields", "Fields of calls without effect."),
    ),
    *timed(
        Last,
        ("checkpoint/failed", "saves", "1 if the previous checkpoint could not be written."),
    ),
    *timed(
        Last,
        ("memory/host_bytes", "bytes", "Resident memory of the process."),
        ("memory/trainer_bytes", "bytes", "Peak memory of one trainer device."),
        ("memory/sampler_bytes", "bytes", "Peak memory of one sampler device."),
    ),
)


# ---- faults that a run survives; metrics/fault_counts.py counts them


FAULT_METRICS: tuple[Metric, ...] = (
    *timed(
        Sum,
        ("faults/sampler_deaths", "deaths", "Samplers whose thread ended with an exception."),
        (
            "faults/sampler_hangs",
            "hangs",
            "Samplers abandoned: no block within faults.sampler_hang_s.",
        ),
        ("faults/sampler_restarts", "restarts", "Samplers started to replace a failed one."),
        ("faults/samplers_lost", "samplers", "Samplers given up permanently."),
        (
            "faults/redone_requests",
            "requests",
            "Requests of a lost sampler that another restarted.",
        ),
        (
            "faults/moved_requests",
            "requests",
            "Requests of a leaving sampler that another continued.",
        ),
        (
            "faults/sampler_process_ends",
            "processes",
            "Sampler processes on this machine that ended; restarted.",
        ),
        ("faults/samplers_joined", "samplers", "Samplers that joined during the run."),
        ("faults/samplers_left", "samplers", "Samplers that left and handed back their requests."),
        ("faults/samplers_cut_off", "samplers", "Samplers whose connection was lost."),
        (
            "faults/refused_answers",
            "messages",
            "Implausible messages from samplers; each ended its connection.",
        ),
        (
            "faults/nonfinite_completions",
            "completions",
            "Completions with a log-prob that is not finite; generated again once.",
        ),
        (
            "faults/failed_groups",
            "groups",
            "Groups given up: environment, scorer or log-probs failed.",
        ),
        (
            "faults/lost_members",
            "members",
            "Members that failed; their groups continued (algorithm.min_members).",
        ),
        (
            "faults/player_busy",
            "calls",
            "Calls to a seat's endpoint that failed or hit an overload.",
        ),
        (
            "faults/lost_forks",
            "continuations",
            "Continuations of a pivot that failed; their groups continued.",
        ),
        (
            "faults/failed_policy_copies",
            "folders",
            "Folders of checkpoint.hugging_face that could not be written.",
        ),
        (
            "faults/failed_evaluations",
            "evaluations",
            "Evaluations skipped: environment or scorer failed.",
        ),
        (
            "faults/restarted_groups",
            "groups",
            "Groups of programs or games that the resumed run restarted: no call was kept.",
        ),
        (
            "faults/continued_episodes",
            "episodes",
            "Unfinished episodes that the resumed run continued.",
        ),
        (
            "faults/restarted_episodes",
            "episodes",
            "Unfinished episodes that the resumed run restarted: their environment's state was not "
            "restored.",
        ),
        (
            "faults/unrepeated_calls",
            "calls",
            "Calls before a resume that the program did not repeat; their answers were dropped.",
        ),
        ("faults/failed_programs", "programs", "Programs that raised, or exited with an error."),
        ("faults/session_timeouts", "sessions", "Programs that timed out or stopped responding."),
        (
            "faults/exhausted_sessions",
            "sessions",
            "Sessions ended by a limit of calls, tokens or length.",
        ),
        ("faults/abandoned_sessions", "sessions", "Sessions that external agents abandoned."),
        ("faults/cancelled_calls", "calls", "Session calls whose caller disconnected early."),
        (
            "faults/overridden_calls",
            "calls",
            "Session calls whose distribution or seed was ignored.",
        ),
        ("faults/late_calls", "calls", "Calls to a session that had ended; rejected."),
        ("faults/outages", "outages", "Outages of an environment, tool, judge, reward or teacher."),
        ("faults/outage_retries", "calls", "Calls retried because a service was unavailable."),
        ("faults/outage_s", "s", "Time waited for an unavailable service."),
        ("faults/scorer_retries", "calls", "Groups scored again after a failure or timeout."),
        ("faults/scorer_timeouts", "calls", "Scorer calls that timed out."),
        ("faults/refused_scores", "calls", "Scores of the wrong number, type or shape, or NaN."),
        ("faults/judge_busy", "calls", "Judge calls that failed, timed out or were deferred."),
        ("faults/judge_refused_replies", "replies", "Judge replies without scores."),
        ("faults/judge_failures", "answers", "Answers that could not be judged (on_failure)."),
        ("faults/late_process_rewards", "groups", "Groups without their process rewards: too old."),
        (
            "faults/failed_process_rewards",
            "groups",
            "Groups without their process rewards: these failed.",
        ),
        ("faults/env_timeouts", "calls", "Environment replies that timed out."),
        ("faults/refused_replies", "calls", "Environment replies of the wrong type or shape."),
        (
            "faults/env_retries",
            "calls",
            "Calls of reset, or of a repeatable step, retried after an exception.",
        ),
        ("faults/eval_retries", "episodes", "Held-out episodes that failed and were retried."),
        (
            "faults/eval_left_out",
            "prompts",
            "Held-out prompts left out: environment or scorer failed.",
        ),
        ("faults/failed_closes", "calls", "Environments whose close raised or timed out."),
        ("faults/turn_limits", "episodes", "Episodes cut off at env.max_turns."),
        (
            "faults/long_openings",
            "episodes",
            "Episodes cut off because their opening leaves no room for an answer.",
        ),
        (
            "faults/long_replies",
            "replies",
            "Environment messages longer than sampler.max_length; cut to env.tool_result_chars.",
        ),
        ("faults/tool_errors", "calls", "Tool calls that failed; the policy got the error."),
        ("faults/tool_timeouts", "calls", "Tool calls over env.tool_timeout_s; as tool_errors."),
        ("faults/cut_tool_results", "calls", "Tool results cut at env.tool_result_chars."),
        (
            "faults/engine_retries",
            "calls",
            "Calls to a vLLM server that failed or hit an overload; retried.",
        ),
        ("faults/transfer_retries", "transfers", "Weights sent again after a failed transfer."),
        (
            "faults/transfer_fallbacks",
            "transfers",
            "Weights fetched over TCP because remote.transfer failed; the sampler's log says why.",
        ),
        (
            "faults/torn_transfers",
            "transfers",
            "Copies of weights that arrived damaged or not at all; not used.",
        ),
        (
            "faults/transfers_given_up",
            "samplers",
            "Samplers released: the weights did not reach them in several tries.",
        ),
        ("faults/tracker_failures", "calls", "Calls of a tracker that failed."),
        (
            "faults/tracker_lost_steps",
            "steps",
            "Steps that a tracker lacks; metrics.jsonl has them.",
        ),
        ("faults/copy_failures", "calls", "Failed copies to run.copy_to; retried."),
        ("faults/oom_retries", "retries", "Updates repeated with half the rows: out of memory."),
    ),
)
