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
            "Outages of an environment, a tool, a judge or a reward.",
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
