"""Metrics of the machinery: times, sampler, weights, buffer, endpoint, memory and faults."""

from jaxrl_async.metrics.reductions import Last, Metric, Sum, timed

MACHINE_METRICS: tuple[Metric, ...] = (
    *timed(
        Last,
        ("time/step_s", "s", "Wall time of the step: waiting, training, publishing, evaluating."),
        ("time/train_s", "s", "Packing, forward and backward passes, update."),
        ("time/wait_data_s", "s", "Time the trainer waited because too few groups were ready."),
        (
            "time/wait_turn_s",
            "s",
            "Time the trainer waited for steps of the run's other adapters.",
        ),
        (
            "time/wait_eval_s",
            "s",
            "Wait for an evaluation of the previous weights (eval.asynchronous).",
        ),
        ("time/publish_s", "s", "Time the trainer spent sending the new weights."),
        ("time/eval_s", "s", "Evaluation on the held-out prompts."),
        ("eval/<name>/time_s", "s", "Time of an evaluation by name."),
        ("time/save_s", "s", "Time for which a checkpoint paused the trainer."),
        ("time/warm_start_s", "s", "All updates of the supervised warm start."),
        ("time/elapsed_s", "s", "Time since the start of the run or of its resume."),
    ),
    *timed(
        Last,
        ("trainer/idle_share", "share", "Share of the step in which the trainer did not train."),
    ),
    *timed(
        Last,
        ("sampler/idle_share", "share", "Wall time in which the sampler had nothing to decode."),
        ("sampler/busy_share", "share", "Wall time in which the sampler had work on its devices."),
        ("sampler/slot_occupancy", "share", "Share of decode steps x slots with a needed token."),
        (
            "sampler/occupancy_while_waiting",
            "share",
            "The same, over blocks that ended with waiting requests; absent without such blocks.",
        ),
        ("sampler/prefix_hit_share", "share", "Prompt tokens whose KV was reused, not computed."),
        ("sampler/kv_page_share", "share", "KV pages in use, including kept prefixes."),
        ("sampler/in_flight", "requests", "Requests in a slot or in the reserve."),
        (
            "sampler/failed",
            "requests",
            "Requests that raised on the sampler's thread and failed individually.",
        ),
        ("sampler/preempted", "requests", "Requests preempted because KV pages ran out."),
        (
            "sampler/restarted",
            "requests",
            "Requests restarted after a swap (on_new_weights=restart).",
        ),
        ("sampler/discarded_tokens", "tokens", "Tokens generated, then discarded by a restart."),
        (
            "sampler/recomputed_tokens",
            "tokens",
            "Tokens prefilled again after a swap or a preemption.",
        ),
        ("sampler/scored_tokens", "tokens", "Prompt tokens whose log-probs were computed."),
        ("sampler/gate_wait_share", "share", "Wall time for which rollouts waited at the gate."),
        ("sampler/queue_s", "s", "Mean time from submit to prefill."),
        ("sampler/joins", "samplers", "Samplers in separate processes that joined the run."),
        ("sampler/living", "samplers", "Running samplers; fewer while one restarts."),
    ),
    *timed(
        Last,
        (
            "throughput/generated_tokens_per_s",
            "tokens/s",
            "Tokens sampled for training per second of wall time.",
        ),
        (
            "throughput/aside_tokens_per_s",
            "tokens/s",
            "Tokens sampled per second of wall time for evaluations, guests and opponents.",
        ),
        (
            "throughput/trained_tokens_per_s",
            "tokens/s",
            "Tokens trained on per second of wall time, each once for any number of epochs.",
        ),
        (
            "throughput/mfu",
            "share",
            "Model FLOP of the step / (time/train_s x peak FLOP/s). Includes adapters; excludes "
            "padding, savings from shared prefixes, and the head for tokens that are not trained.",
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
            "Copies of the weights that reached a sampler in a separate process in this step; this "
            "and the next five keys exist with mesh.samplers_in=processes or external.",
        ),
        ("weights/sent_bytes", "bytes", "Bytes that those samplers fetched from the trainer."),
        ("weights/passed_bytes", "bytes", "Bytes that those samplers fetched from each other."),
        (
            "weights/base_bytes",
            "bytes",
            "Bytes of the frozen base under an adapter that those samplers fetched as they joined.",
        ),
        ("weights/gb_per_s", "GB/s", "Mean speed of one of these transfers."),
        ("weights/repeats", "transfers", "Transfers restarted after a failure or a timeout."),
        ("weights/live_s", "s", "From publish to the first decode block that uses the weights."),
        (
            "weights/probe_error",
            "nats",
            "Largest |sampler - trainer log-prob| on the probe, at the newest swap so far.",
        ),
        ("weights/swap_pause_s", "s", "Longest pause of decoding caused by a weight swap."),
    ),
    *timed(
        Last,
        ("buffer/active", "groups", "Groups admitted and not yet released: in flight or waiting."),
        ("buffer/ready", "groups", "Groups finished and waiting for the trainer."),
    ),
    *timed(
        Last,
        (
            "endpoint/calls",
            "calls",
            "Calls of the endpoint that began in this step (docs/endpoint.md).",
        ),
        ("endpoint/refused", "calls", "Calls of these that were answered with a client error."),
        ("endpoint/busy", "calls", "Calls rejected because endpoint.max_open_calls were open."),
        ("endpoint/failed", "calls", "Calls answered with a server error."),
        ("endpoint/capped", "calls", "Calls that asked for more tokens than allowed."),
        ("endpoint/disconnected", "calls", "Calls whose client disconnected before the answer."),
        ("endpoint/stalled", "calls", "Calls cut off because the client did not read the answer."),
        ("endpoint/continued", "prompts", "Chats that began with the tokens of an earlier call."),
        ("endpoint/opened", "prompts", "Chats that were tokenized from their start."),
        ("endpoint/ignored", "fields", "Fields of calls that were accepted without effect."),
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
        ("faults/sampler_hangs", "hangs", "Samplers abandoned: no block within sampler_hang_s."),
        (
            "faults/sampler_restarts",
            "restarts",
            "Samplers started to replace one that failed.",
        ),
        ("faults/samplers_lost", "samplers", "Samplers given up permanently."),
        (
            "faults/redone_requests",
            "requests",
            "Requests restarted in another sampler, from the state in which the last one got them.",
        ),
        (
            "faults/moved_requests",
            "requests",
            "Requests that a leaving sampler handed back; another one continued them.",
        ),
        (
            "faults/sampler_process_ends",
            "processes",
            "Sampler processes on this machine that ended and were restarted.",
        ),
        ("faults/samplers_joined", "samplers", "Samplers that joined during the run."),
        ("faults/samplers_left", "samplers", "Samplers that left and handed back their requests."),
        (
            "faults/samplers_cut_off",
            "samplers",
            "Samplers whose connection was lost, after a kill or a network failure.",
        ),
        (
            "faults/refused_answers",
            "messages",
            "Implausible messages from samplers; each ended its connection.",
        ),
        (
            "faults/nonfinite_completions",
            "completions",
            "Completions rejected for a log-prob that is not finite; generated again once.",
        ),
        (
            "faults/failed_groups",
            "groups",
            "Groups given up: environment, scorer or log-probs failed.",
        ),
        (
            "faults/lost_members",
            "members",
            "Failed members whose groups continued without them (algorithm.min_members).",
        ),
        (
            "faults/player_busy",
            "calls",
            "Calls to a seat's endpoint that failed or hit an overload.",
        ),
        (
            "faults/lost_forks",
            "continuations",
            "Failed continuations of a pivot whose groups continued without them.",
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
            "Groups of the checkpoint with a program's or game's episode of which no call was "
            "kept; the resumed run restarted them.",
        ),
        (
            "faults/continued_episodes",
            "episodes",
            "Unfinished episodes of the checkpoint that the resumed run continued from their last "
            "complete turn, or within it.",
        ),
        (
            "faults/restarted_episodes",
            "episodes",
            "Unfinished episodes of the checkpoint with tokens of the policy that the resumed run "
            "restarted: their environment has no state(), or could not restore it.",
        ),
        (
            "faults/unrepeated_calls",
            "calls",
            "Calls of a program before a resume that it did not repeat afterwards, token for "
            "token; their answers were dropped.",
        ),
        ("faults/failed_programs", "programs", "Programs that raised, or exited with an error."),
        ("faults/session_timeouts", "sessions", "Programs that timed out or stopped responding."),
        (
            "faults/exhausted_sessions",
            "sessions",
            "Sessions that reached a limit of calls, tokens or length, which ends their episodes.",
        ),
        ("faults/abandoned_sessions", "sessions", "Sessions that external agents abandoned."),
        ("faults/cancelled_calls", "calls", "Calls of sessions whose caller disconnected early."),
        (
            "faults/overridden_calls",
            "calls",
            "Calls of sessions that asked for another distribution, or a seed, which were ignored.",
        ),
        ("faults/late_calls", "calls", "Calls to a session that had ended; rejected."),
        (
            "faults/outages",
            "outages",
            "Outages of an environment, a tool, a judge, a reward or a teacher.",
        ),
        (
            "faults/outage_retries",
            "calls",
            "Calls retried because a service was unavailable, including replayed episodes.",
        ),
        ("faults/outage_s", "s", "Time for which the run waited for an unavailable service."),
        ("faults/scorer_retries", "calls", "Groups scored again after a failure or a timeout."),
        ("faults/scorer_timeouts", "calls", "Calls of a scorer that timed out."),
        ("faults/refused_scores", "calls", "Scores of the wrong number, type or shape, or NaN."),
        (
            "faults/judge_busy",
            "calls",
            "Judge calls that failed, timed out or were deferred.",
        ),
        ("faults/judge_refused_replies", "replies", "Replies of the judge without scores."),
        ("faults/judge_failures", "answers", "Answers that could not be judged (on_failure)."),
        (
            "faults/late_process_rewards",
            "groups",
            "Groups that continued without their process rewards: too old.",
        ),
        (
            "faults/failed_process_rewards",
            "groups",
            "Groups that continued without their process rewards: these failed.",
        ),
        ("faults/env_timeouts", "calls", "Replies of environments that timed out."),
        ("faults/refused_replies", "calls", "Replies of environments of the wrong type or shape."),
        (
            "faults/env_retries",
            "calls",
            "Calls of an environment's reset, or of a repeatable step, retried after it raised.",
        ),
        ("faults/eval_retries", "episodes", "Held-out episodes that failed and were retried."),
        (
            "faults/eval_left_out",
            "prompts",
            "Held-out prompts left out of an evaluation: their environment or scorer failed.",
        ),
        ("faults/failed_closes", "calls", "Environments whose close raised or timed out."),
        (
            "faults/turn_limits",
            "episodes",
            "Episodes cut off at env.max_turns; truncated_share includes them.",
        ),
        (
            "faults/long_openings",
            "episodes",
            "Episodes whose opening leaves no room for an answer: cut off before any generation.",
        ),
        (
            "faults/long_replies",
            "replies",
            "Environment messages too long for sampler.max_length even alone: cut to head and "
            "tail, env.tool_result_chars characters.",
        ),
        (
            "faults/tool_errors",
            "calls",
            "Tool calls that failed: unknown tool, wrong arguments, an exception. The policy got "
            "the error.",
        ),
        ("faults/tool_timeouts", "calls", "Tool calls over env.tool_timeout_s; as above."),
        ("faults/cut_tool_results", "calls", "Results of tools cut at env.tool_result_chars."),
        (
            "faults/engine_retries",
            "calls",
            "Calls to a vLLM server that failed or hit an overload; retried.",
        ),
        ("faults/transfer_retries", "transfers", "Weights sent again after a failed transfer."),
        (
            "faults/transfer_fallbacks",
            "transfers",
            "Weights that did not arrive as set in remote.transfer (from device to device, "
            "through shared memory), and were fetched over TCP; the sampler's log says why.",
        ),
        (
            "faults/torn_transfers",
            "transfers",
            "Copies of weights that did not match their checksum or did not arrive; not used.",
        ),
        (
            "faults/transfers_given_up",
            "samplers",
            "Samplers released because the weights did not reach them in several tries.",
        ),
        (
            "faults/tracker_failures",
            "calls",
            "Calls of a tracker (metrics.wandb, mlflow, trackio) that failed since the last line.",
        ),
        (
            "faults/tracker_lost_steps",
            "steps",
            "Steps that a tracker lacks, since it failed or fell behind; metrics.jsonl has them.",
        ),
        (
            "faults/copy_failures",
            "calls",
            "Attempts to copy the run to run.copy_to that failed since the last line; retried.",
        ),
        (
            "faults/oom_retries",
            "retries",
            "Updates restarted with half the rows in a micro-batch: out of memory.",
        ),
    ),
)
