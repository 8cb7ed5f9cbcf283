"""Metrics of the machinery: times, sampler, weights, buffer, endpoint and memory."""

from jaxrl_async.metrics.reductions import Last, Metric, timed

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
