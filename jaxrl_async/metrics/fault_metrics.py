"""Metrics of the faults that a run survives; metrics/fault_counts.py counts them."""

from jaxrl_async.metrics.reductions import Metric, Sum, timed

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
        ("faults/samplers_lost", "samplers", "Samplers given up for good."),
        (
            "faults/redone_requests",
            "requests",
            "Requests restarted in another sampler, from where they were handed to the last.",
        ),
        (
            "faults/moved_requests",
            "requests",
            "Requests that a leaving sampler handed back; another continued them.",
        ),
        (
            "faults/sampler_process_ends",
            "processes",
            "Sampler processes of this machine that ended and were started again.",
        ),
        ("faults/samplers_joined", "samplers", "Samplers that joined while the run went on."),
        ("faults/samplers_left", "samplers", "Samplers that left and handed back their requests."),
        (
            "faults/samplers_cut_off",
            "samplers",
            "Samplers whose connection was lost, by a kill or a network cut.",
        ),
        (
            "faults/refused_answers",
            "messages",
            "Messages of samplers that could not be true; each ended its connection.",
        ),
        (
            "faults/nonfinite_completions",
            "completions",
            "Completions refused because a log-prob is not finite; drawn again once.",
        ),
        (
            "faults/failed_groups",
            "groups",
            "Groups given up: environment, scorer or log-probs failed.",
        ),
        (
            "faults/lost_members",
            "members",
            "Members that failed and whose groups went on without them (algorithm.min_members).",
        ),
        (
            "faults/player_busy",
            "calls",
            "Calls of an endpoint that fills a seat that broke or met an overload.",
        ),
        (
            "faults/lost_forks",
            "continuations",
            "Continuations of a pivot that failed and whose groups went on without them.",
        ),
        (
            "faults/failed_evaluations",
            "evaluations",
            "Evaluations left out: environment or scorer failed.",
        ),
        (
            "faults/restarted_groups",
            "groups",
            "Groups that programs were playing at the checkpoint; begun anew by the resumed run.",
        ),
        ("faults/failed_programs", "programs", "Programs that raised, or exited with an error."),
        ("faults/session_timeouts", "sessions", "Programs that took too long, or fell silent."),
        (
            "faults/exhausted_sessions",
            "sessions",
            "Sessions that reached a limit of calls, tokens or length; their episodes end there.",
        ),
        ("faults/abandoned_sessions", "sessions", "Sessions that agents outside have left."),
        ("faults/cancelled_calls", "calls", "Calls of sessions whose caller went before the end."),
        (
            "faults/overridden_calls",
            "calls",
            "Calls of sessions that asked for another distribution, or a seed; the run's held.",
        ),
        ("faults/late_calls", "calls", "Calls for a session that had ended; refused."),
        (
            "faults/outages",
            "outages",
            "Times that an environment, a tool, a judge or a reward was found to be away.",
        ),
        (
            "faults/outage_retries",
            "calls",
            "Calls made again since a service was away; episodes played again are among them.",
        ),
        ("faults/outage_s", "s", "Time in which a service was away and was waited for."),
        ("faults/scorer_retries", "calls", "Groups scored again after a failure or a timeout."),
        ("faults/scorer_timeouts", "calls", "Calls of a scorer that timed out."),
        ("faults/refused_scores", "calls", "Scores of the wrong number, type or shape, or NaN."),
        ("faults/judge_busy", "calls", "Calls of the judge that broke, timed out or were put off."),
        ("faults/judge_refused_replies", "replies", "Replies of the judge that held no scores."),
        ("faults/judge_failures", "answers", "Answers that could not be judged (on_failure)."),
        (
            "faults/late_process_rewards",
            "groups",
            "Groups that went on without their process rewards: too old.",
        ),
        (
            "faults/failed_process_rewards",
            "groups",
            "Groups that went on without their process rewards: these failed.",
        ),
        ("faults/env_timeouts", "calls", "Replies of environments that timed out."),
        ("faults/refused_replies", "calls", "Replies of environments of the wrong type or shape."),
        (
            "faults/env_retries",
            "calls",
            "Calls of an environment's reset, or of a repeatable step, made again after it raised.",
        ),
        ("faults/eval_retries", "episodes", "Held-out episodes that failed and were played again."),
        (
            "faults/eval_left_out",
            "prompts",
            "Held-out prompts left out of an evaluation: what plays or scores them failed.",
        ),
        ("faults/failed_closes", "calls", "Environments whose close raised or timed out."),
        (
            "faults/turn_limits",
            "episodes",
            "Episodes cut off at env.max_turns; they are in truncated_share, too.",
        ),
        (
            "faults/long_openings",
            "episodes",
            "Episodes whose opening leaves no room for an answer: cut off with nothing drawn.",
        ),
        (
            "faults/long_replies",
            "replies",
            "What environments said that cannot fit into sampler.max_length by its length alone: "
            "cut to head and tail, env.tool_result_chars characters.",
        ),
        (
            "faults/tool_errors",
            "calls",
            "Tool calls that failed: unknown tool, wrong arguments, an exception. The policy was "
            "told.",
        ),
        ("faults/tool_timeouts", "calls", "Tool calls over env.tool_timeout_s; as above."),
        ("faults/cut_tool_results", "calls", "Results of tools cut at env.tool_result_chars."),
        (
            "faults/engine_retries",
            "calls",
            "Calls to a vLLM server that broke or met an overload; made again.",
        ),
        ("faults/transfer_retries", "transfers", "Weights sent again after a failed transfer."),
        (
            "faults/transfer_fallbacks",
            "transfers",
            "Weights that did not arrive the way remote.transfer asks for (from device to device, "
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
            "Samplers let go because the weights did not reach them in several tries.",
        ),
        (
            "faults/tracker_failures",
            "calls",
            "Calls of a tracker (metrics.wandb, mlflow, trackio) that failed since the last line.",
        ),
        (
            "faults/tracker_lost_steps",
            "steps",
            "Steps that a tracker lacks, as it failed or fell behind; metrics.jsonl has them.",
        ),
        (
            "faults/copy_failures",
            "calls",
            "Tries to bring the run to run.copy_to that failed since the last line; made again.",
        ),
        (
            "faults/oom_retries",
            "retries",
            "Updates restarted with half the rows in a micro-batch: out of memory.",
        ),
    ),
)
