"""Small mistakes, one at a time, that the tests beside them must catch.

Each is a text that occurs once in a file of jaxrl_async, and what it is replaced by. Where the code
has changed, take the same mistake in its new words; where it is gone, another one. A group names
the fewest tests that catch its changes, whatever they cost: all of them together run in CI.
"""

from typing import NamedTuple


class Group(NamedTuple):
    """Changes of one file, and the tests that are asked."""

    file: str  # below jaxrl_async, without .py
    tests: tuple[str, ...]  # below tests: files, or tests of a file
    changes: tuple[tuple[str, str], ...]  # old text, new text


GROUPS = (
    Group(
        "algorithms/advantages",
        (
            "algorithms/test_advantages.py",
            "contract/test_advantages.py",
        ),
        (
            ("max(len(r) - 1, 1)", "max(len(r) - 2, 1)"),
            (
                "comb(wrong - 1, k - 1) / comb(size - 1, k - 1)",
                "comb(wrong - 1, k - 1) / comb(size, k)",
            ),
            ("all_wrong - others_wrong)", "all_wrong + others_wrong)"),
            ("np.where(values > 0, passed, 1 - passed)", "np.where(values > 0, passed, passed)"),
            ("steepness * (rates - middle)", "steepness * (rates + middle)"),
            ("np.append(v[1:], end)", "np.append(v[1:], v[-1:])"),
            ("np.full(len(v), gamma * lam)", "np.full(len(v), gamma)"),
            ("np.where(gaps > 1,", "np.where(gaps > 2,"),
            ("np.dot(weights, values) / weights.sum()", "np.dot(weights, values) / len(weights)"),
            ("mean if mean > 0 else", "mean if mean > 1 else"),
            ("np.cumsum(episode.drawn) - 1", "np.cumsum(episode.drawn) - 2"),
            (
                "_cut(_centered(np.concatenate([np.zeros(0), *returns])), returns)",
                "[_centered(r) for r in returns]",
            ),
        ),
    ),
    Group(
        "algorithms/corrections",
        ("algorithms/test_corrections.py",),
        (
            ("excess = logs - math.log(cap)", "excess = logs + math.log(cap)"),
            ("excess > 0, logs", "excess >= 0, logs"),
            ("(logs < _log(low))", "(logs <= _log(low))"),
            ("(logs > _log(high))", "(logs >= _log(high))"),
            ("jnp.exp(clipped - logs)", "jnp.exp(logs - clipped)"),
            ("x.segment_ids) > delta", "x.segment_ids) >= delta"),
            ("(x.advantages < 0), 0.0, 1.0", "(x.advantages <= 0), 0.0, 1.0"),
            ("_ages(x) > max_age", "_ages(x) >= max_age"),
            ("jnp.exp2(-_ages(x) / half_life)", "jnp.exp(-_ages(x) / half_life)"),
            ("jnp.maximum(ages, 0)", "jnp.maximum(ages, 1)"),
            ('cap=cap, level="geometric")', 'cap=cap, level="sequence")'),
            ("logs = mean_over_sequence(logs", "logs = sum_over_sequence(logs"),
        ),
    ),
    Group(
        "algorithms/losses",
        ("algorithms/test_losses.py",),
        (
            (
                "dual_clip * jnp.minimum(advantages, 0.0)",
                "dual_clip * jnp.maximum(advantages, 0.0)",
            ),
            (
                "jnp.clip(ratio, 1 - low, 1 + high) * adv",
                "jnp.clip(ratio, 1 - high, 1 + low) * adv",
            ),
            ("4 / tau * jax.nn.sigmoid", "2 / tau * jax.nn.sigmoid"),
            ("jnp.maximum(logs, -clip_low)", "jnp.maximum(logs, -clip_high)"),
            ("(logs > 0) & (divergence > high)", "(logs < 0) & (divergence > high)"),
            ("(divergence > low)", "(divergence > high)"),
            ("penalty * log_ratio(x) ** 2", "penalty * log_ratio(x) ** 2 / 2"),
            ("rate * (1 - jnp.exp(logs))", "rate * (1 + jnp.exp(logs))"),
            ("jnp.exp(jnp.minimum(logs, 0.0)), 1.0", "jnp.exp(jnp.minimum(logs, 1.0)), 1.0"),
            ("x.covariance_rank < share", "x.covariance_rank > share"),
            ("MAX_LOG_RATIO = 40.0", "MAX_LOG_RATIO = 4.0"),
            ("SMALLEST_REST = 1e-8", "SMALLEST_REST = 1e-2"),
            ("(1 - anchor) * rest - anchor *", "(1 - anchor) * rest + anchor *"),
            ("cut = divergence > delta", "cut = divergence < delta"),
        ),
    ),
    Group(
        "algorithms/aggregate",
        (
            "algorithms/test_aggregate.py",
            "contract/test_aggregates.py",
        ),
        (
            ("1 / max(batch.num_tokens, 1)", "1 / max(batch.num_tokens, 99)"),
            ("counts[batch.sequence_ids], 1) * num", "counts[batch.sequence_ids], 3) * num"),
            ("1 / (num_sequences * divisor)", "1 / (num_sequences + divisor)"),
            ("counts[batch.group_ids], 1) * num", "counts[batch.group_ids], 9) * num"),
        ),
    ),
    Group(
        "algorithms/kl",
        ("algorithms/test_kl.py",),
        (
            ("_from_reference(x) ** 2 / 2", "_from_reference(x) ** 2"),
            ("MAX_LOG_RATIO)) + difference", "MAX_LOG_RATIO)) - difference"),
            ("jnp.minimum(-difference, MAX_LOG_RATIO)", "jnp.minimum(-difference, 2.0)"),
            ("x.policy_logprobs, x.behavior_logprobs", "x.behavior_logprobs, x.policy_logprobs"),
            ("measured / target - 1, -0.2), 0.2)", "measured / target - 1, -0.2), 0.3)"),
            ("coefficient * (1 + error / horizon)", "coefficient * (1 - error / horizon)"),
        ),
    ),
    Group(
        "algorithms/shaping",
        ("algorithms/test_shaping.py",),
        (
            ("cache_tokens - length) / cache_tokens", "cache_tokens - length) / max_tokens"),
            ("e.num_drawn > max_tokens", "e.num_drawn >= max_tokens"),
            ("np.exp(-alpha * np.where", "np.exp(alpha * np.where"),
            ("0.5 - (lengths - shortest)", "1.0 - (lengths - shortest)"),
            ("np.minimum(x, 0.0))", "np.maximum(x, 0.0))"),
            ("() > least", "() >= least"),
        ),
    ),
    Group(
        "algorithms/losses",
        ("algorithms/test_corrections.py::test_by_default_a_token_has_the_weight_of_the_paper",),
        (
            ('OWN_BOUND = DefaultCorrections(behavior="none")', "OWN_BOUND = DefaultCorrections()"),
            (
                'OWN_MEAN_BOUND = DefaultCorrections(behavior="none", proximal',
                "OWN_MEAN_BOUND = DefaultCorrections(proximal",
            ),
        ),
    ),
    Group(
        "algorithms/losses",
        (
            "algorithms/test_corrections.py::test_against_the_proximal_policy_what_lies_before_is_truncated_at_the_losss_own_level",
        ),
        (
            (
                'proximal={"truncate": {"level": "geometric"}}',
                'proximal={"truncate": {"level": "sequence"}}',
            ),
        ),
    ),
    Group(
        "algorithms/peers",
        ("algorithms/test_peers.py",),
        (
            ("if len(of) >= least]", "if len(of) > least]"),
            (
                "0 < (n := int(np.count_nonzero(c))) < least",
                "0 < (n := int(np.count_nonzero(c))) <= least",
            ),
            ("key=lambda pair: pair[0]", "key=lambda pair: -pair[0]"),
        ),
    ),
    Group(
        "algorithms/shaping",
        ("algorithms/test_peers.py",),
        (("m.any() or not e.drawn.any()", "m.any()"),),
    ),
    Group(
        "algorithms/forks",
        ("algorithms/test_forks.py",),
        (("np.arange(len(reference)) >= point.start", "np.arange(len(reference)) > point.start"),),
    ),
    Group(
        "data/records",
        ("data/test_prompts.py::test_a_tenth_of_the_records_is_held_out_unless_a_number_is_set",),
        (
            ("max(records // HELD_OUT_SHARE, 1)", "records // HELD_OUT_SHARE"),
            ("min(HELD_OUT_MOST, max(", "max(HELD_OUT_MOST, max("),
            ("HELD_OUT_SHARE = 10", "HELD_OUT_SHARE = 11"),
            ("HELD_OUT_MOST = 64", "HELD_OUT_MOST = 65"),
        ),
    ),
    Group(
        "trainer/optimizer",
        ("trainer/test_optimizer.py",),
        (
            ("total_steps - section.warmup_steps, 1", "total_steps, 1"),
            ("(step + 1) / max(warmup, 1)", "step / max(warmup, 1)"),
            ("(1.0 + jnp.cos(jnp.pi * progress)) / 2", "jnp.cos(jnp.pi * progress / 2)"),
            ("        mask=mask,\n", ""),
            ("optax.add_decayed_weights(x.weight_decay, decay(True))", "optax.identity()"),
            ("is_decayed if (_sides(w) is not None) == of_matrices", "is_decayed if of_matrices"),
            ("rms * math.sqrt(max(", "rms * math.sqrt(min("),
            ('or "vocab" in weight.axes', ""),
            ("range(stacked, rank) or range(stacked, stacked + 1)", "range(stacked, stacked + 1)"),
            ("if not downhill < 0", "if downhill < 0"),
            ("(path, leaf.shape): sharding", "(path[-1:], leaf.shape): sharding"),
            (
                "optax.clip_by_global_norm(section.max_grad_norm)",
                "optax.clip(section.max_grad_norm)",
            ),
        ),
    ),
    Group(
        "trainer/optimizer",
        ("trainer/test_rounding.py::test_arrays_of_one_shape_are_rounded_by_bits_of_their_own",),
        (("jax.random.fold_in(key, index)", "key"),),
    ),
    Group(
        "trainer/update_programs",
        (
            "trainer/objectives/test_policy_objective.py::test_a_loss_or_a_gradient_alone_that_is_not_finite_changes_nothing",
        ),
        (
            ("jnp.isfinite(grad_norm) & jnp.isfinite(sums.loss)", "jnp.isfinite(grad_norm)"),
            ("jnp.isfinite(grad_norm) & jnp.isfinite(sums.loss)", "jnp.isfinite(sums.loss)"),
            ("GradSum(grads, sums.loss + loss, chosen)", "GradSum(grads, loss, chosen)"),
        ),
    ),
    Group(
        "trainer/update_programs",
        (
            "trainer/test_learner.py::test_the_learning_rate_ends_with_the_run_where_fewer_updates_are_made",
        ),
        (("self._schedule(state.step if at is None else at)", "self._schedule(state.step)"),),
    ),
    Group(
        "trainer/update_programs",
        ("trainer/objectives/test_policy_objective.py::test_learning_rate_zero_moves_nothing",),
        (("lambda p, update: p + rate * update, before", "lambda p, update: p + update, before"),),
    ),
    Group(
        "trainer/learner",
        (
            "trainer/test_minibatches.py::test_a_token_weighs_as_much_for_the_critic_as_in_the_whole_step",
        ),
        (("token_mean(step.batch) * np.float32(times)", "token_mean(step.batch)"),),
    ),
    Group(
        "trainer/learner",
        ("trainer/test_minibatches.py::test_the_mean_of_the_mini_batches_losses_is_the_steps",),
        (
            (
                "self._objective.weights(step.batch, times, columns)",
                "self._objective.weights(step.batch, 1, columns)",
            ),
        ),
    ),
    Group(
        "trainer/learner",
        (
            "trainer/test_learner.py::test_the_learning_rate_ends_with_the_run_where_fewer_updates_are_made",
        ),
        (("index * algorithm.minibatches / made", "index"),),
    ),
    Group(
        "trainer/learner",
        ("trainer/test_learner.py::test_each_epoch_deals_the_sequences_anew",),
        (("(self._settings.seed, version, epoch)", "(self._settings.seed, version)"),),
    ),
    Group(
        "trainer/learner",
        (
            "trainer/test_learner.py::test_two_right_answers_with_a_masked_one_learn_only_from_it_if_it_is_compared",
        ),
        (("            shaped = compare_unmasked(shaped)\n", "            pass\n"),),
    ),
    Group(
        "trainer/learner",
        (
            "trainer/test_learner.py::test_a_critic_learns_the_returns_and_the_policy_waits_for_its_warm_up",
        ),
        (("version < self._settings.critic_warmup", "version < self._settings.critic_warmup - 1"),),
    ),
    Group(
        "trainer/learner",
        (
            "trainer/test_learner.py::test_tokens_are_counted_once_however_many_epochs_and_while_the_critic_warms_up",
        ),
        (("1 if warming else algorithm.epochs", "algorithm.epochs"),),
    ),
    Group(
        "trainer/learner",
        ("trainer/test_learner.py::test_worked_answers_are_counted_once_in_several_epochs",),
        (('"train/sequences", "supervised/tokens", ', '"train/sequences", '),),
    ),
    Group(
        "trainer/step_data",
        (
            "trainer/test_minibatches.py::test_mini_batches_have_as_many_sequences_and_nearly_as_many_tokens",
        ),
        (('np.argsort(-lengths[even], kind="stable")', "np.arange(len(even))"),),
    ),
    Group(
        "trainer/pack",
        ("trainer/test_pack.py",),
        (("group=len(groups) + i", "group=i"),),
    ),
    Group(
        "trainer/pack",
        ("trainer/test_contexts.py::test_what_cannot_be_packed_is_refused_and_what_fits_does",),
        (
            (
                "max(np.diff([*e.starts, len(e.token_ids)])) <= row_length",
                "max(np.diff([*e.starts, len(e.token_ids)])) < row_length",
            ),
        ),
    ),
    Group(
        "trainer/token_columns",
        ("trainer/test_token_columns.py",),
        (
            ("        bits[counts == 0] = ALL_BITS\n", ""),
            ("& listed[distinct]] ^= ALL_BITS", "& listed[distinct]] ^= 0"),
        ),
    ),
    Group(
        "sampler/device/logit_shaping",
        ("sampler/test_shaping.py", "sampler/test_constraints.py"),
        (
            ("(num_sampled < shaping.min_tokens)", "(num_sampled <= shaping.min_tokens)"),
            ("jnp.where(logits > 0, logits / factor", "jnp.where(logits < 0, logits / factor"),
            ("penalties.frequency[:, None] * counts.answer", "penalties.frequency[:, None]"),
            ("(counts.answer > 0) | (counts.prompt > 0)", "counts.answer > 0"),
            ("add(~in_prompt", "add(in_prompt | True"),
            ("jnp.where(forced >= 0, jnp.arange(V) == forced, possible)", "possible"),
        ),
    ),
    Group(
        "sampler/grammar",
        ("sampler/test_constraints.py",),
        (
            ("others = words & self._no_stops", "others = words"),
            ("words & self._no_ends & self._stops", "words & 0"),
            ("< self._least and others.any()", "< self._least"),
            ("else [*masks, self.mask()]", "else [*masks, ~self.mask()]"),
            ('if constraint.kind == "turn" else self._plain', "if False else self._plain"),
            ("max_items_in_row=MAX_ITEMS", "max_items_in_row=2000"),
        ),
    ),
    Group(
        "sampler/batch/slots",
        (
            "sampler/batch/test_host_parts.py::test_masks_are_stored_for_the_requests_that_ask_for_them_alone",
        ),
        (("if extras is not None and slot in masked", "if extras is not None"),),
    ),
    Group(
        "trainer/row_index",
        (
            "trainer/test_shared_prefixes.py::test_mini_batches_share_anew_and_learn_each_token_once",
        ),
        (
            (
                "np.arange(len(self.indices)) >= self.shared",
                "np.arange(len(self.indices)) > self.shared",
            ),
        ),
    ),
    Group(
        "trainer/prefix_plan",
        ("trainer/test_shared_prefixes.py::test_each_token_sees_its_context_and_is_trained_once",),
        (
            (
                "most = min(length - 1, key.first_trained)",
                "most = min(length - 1, key.first_trained + 1)",
            ),
            (
                "np.minimum(group.common[position, :position], most) - 1",
                "np.minimum(group.common[position, :position], most)",
            ),
        ),
    ),
    Group(
        "trainer/distill",
        (
            "trainer/test_distill.py::test_a_teacher_gets_no_gradient",
            "trainer/test_distill.py::test_the_advantage_is_minus_the_log_ratio_and_carries_no_gradient",
            "trainer/test_distill.py::test_all_tokens_known_is_the_whole_divergence",
        ),
        (
            ("jax.lax.stop_gradient(teacher))", "teacher)"),
            (
                "jnp.subtract(student_logprobs, teacher_logprobs), 0.0)",
                "jnp.subtract(teacher_logprobs, student_logprobs), 0.0)",
            ),
            ("others = ids.shape[-1] < student.shape[-1]", "others = True"),
        ),
    ),
    Group(
        "trainer/distill",
        (
            "trainer/test_named_teachers.py::test_the_divergence_is_the_weighted_sum_over_each_teachers_top_k_and_rest",
        ),
        (
            ("sum(w * compared(", "sum(1.0 * compared("),
            ("jnp.split(a, len(of_each), axis=-1)", "jnp.split(a, len(of_each), axis=-1)[::-1]"),
        ),
    ),
    Group(
        "trainer/named_teachers",
        (
            "trainer/test_named_teachers.py::test_the_gap_is_the_weighted_sum_of_log_ratios",
            "trainer/test_named_teachers.py::test_a_local_teacher_computes_its_own_episodes_alone",
            "trainer/test_named_teachers.py::test_tokens_without_a_samplers_log_prob_have_no_gap",
            "trainer/test_named_teachers.py::test_a_masked_episode_has_no_gap_and_no_part_of_the_kl",
        ),
        (
            ("behavior[flat] - teacher.logprobs[used]", "teacher.logprobs[used] - behavior[flat]"),
            ("teacher.weight * of_spans[known]", "of_spans[known]"),
            ("owned[teacher.places] & mask[flat]", "owned[teacher.places]"),
            ("total / count", "total"),
            ("weights[flat, slot] = teacher.weight", "weights[flat, slot] = 1.0"),
            ("for t in of_one if t.teacher == name}", "for t in of_one}"),
            ("known = np.isfinite(difference)", "known = difference == difference"),
        ),
    ),
    Group(
        "trainer/named_teachers",
        (
            "trainer/test_named_teachers.py::test_a_resumed_run_may_compare_another_number_of_tokens",
        ),
        (("if t.top_ids.shape[1] >= top_k", "if True"), ("t.top_ids[:, :top_k]", "t.top_ids")),
    ),
    Group(
        "trainer/named_teachers",
        (
            "trainer/test_named_teachers.py::test_a_token_has_the_gap_of_its_whole_span",
            "trainer/test_named_teachers.py::test_a_span_of_which_a_token_has_no_log_prob_has_no_gap",
            "trainer/test_named_teachers.py::test_spans_are_compared_as_a_whole_where_no_tokens_match",
            "trainer/test_named_teachers.py::test_tokens_that_the_reference_does_not_know_are_logged",
        ),
        (
            ("return known, sums[of_used]", "return known, values"),
            ("known = known & complete[of_used]", "known = known & (of_used >= 0)"),
            ("np.all(teacher.top_ids < 0, axis=-1)", "np.any(teacher.top_ids < 0, axis=-1)"),
            ("= ends[spans][in_one_row] % length", "= ends[spans][in_one_row] % length - 1"),
            ("flat_of_rows[flat] = teacher.logprobs[used]", "flat_of_rows[flat] += 0"),
        ),
    ),
    Group(
        "trainer/named_teachers",
        (
            "trainer/test_named_teachers.py::test_a_local_teacher_reads_other_contexts_than_the_policy",
        ),
        (
            ("start + len(head), teacher.opening", "start, teacher.opening"),
            ("total + len(opening) + np.arange(kept)", "total + np.arange(kept)"),
            ("starts.append(total)", "starts.append(0)"),
            ("if np.array_equal(own[: len(head)], head):", "if True:"),
        ),
    ),
    Group(
        "trainer/frozen_models",
        ("trainer/test_named_teachers.py::test_the_policy_as_a_teacher_follows_the_policy",),
        (
            ("at, how.average)", "at, 1 - how.average)"),
            ("_is_due(version, how.every)", "_is_due(version + 1, how.every)"),
            ('tree.get("teachers", self.teachers)', "self.teachers"),
        ),
    ),
    Group(
        "trainer/distill",
        (
            "trainer/test_named_teachers.py::test_the_gradient_of_a_span_reaches_all_of_its_tokens",
            "trainer/test_named_teachers.py::test_tokens_in_no_span_belong_to_no_span_that_ends_a_row",
            "trainer/test_named_teachers.py::test_spans_are_compared_as_a_whole_where_no_tokens_match",
        ),
        (
            ("index = jnp.where(last < 0, length, last)", "index = last"),
            ("jnp.sum(teacher.weights * of_spans", "jnp.sum(of_spans"),
            ("jnp.log(jnp.maximum(-jnp.expm1(logprobs), MIN_REST))", "jnp.log(MIN_REST)"),
        ),
    ),
    Group(
        "trainer/distill",
        (
            "trainer/test_distill.py::test_tokens_without_a_counterpart_are_compared_by_their_order",
            "trainer/test_distill.py::test_the_slope_of_the_order_is_the_students_alone",
        ),
        (
            ("jnp.where(teacher_ids < 0, probs, 0.0), k)[0]", "probs, k)[0]"),
            ("jnp.where(alone, jnp.exp(student), 0.0), k)[0]", "jnp.exp(student), k)[0]"),
            ("jnp.where(teacher > 0, jnp.abs(own - teacher), 0.0)", "jnp.abs(own - teacher)"),
            (
                "jnp.exp(jax.lax.stop_gradient(teacher_logprobs.astype(jnp.float32)))",
                "jnp.exp(teacher_logprobs.astype(jnp.float32))",
            ),
        ),
    ),
    Group(
        "trainer/distill",
        (
            "trainer/test_named_teachers.py::test_what_only_one_side_has_is_compared_by_its_order_next_to_the_divergence",
        ),
        (
            ("jnp.where(ids < 0, MIN_LOGPROB, logprobs)", "logprobs"),
            ("gap + unmatched.weight * sorted", "gap + sorted"),
        ),
    ),
    Group(
        "trainer/objectives/policy_objective",
        (
            "trainer/test_named_teachers.py::test_an_update_has_the_distance_in_its_loss_with_its_weight",
        ),
        (
            ("np.packbits(unmatched)", "np.packbits(~unmatched)"),
            ("unmatched_weight=section.unmatched_weight,", "unmatched_weight=1.0,"),
        ),
    ),
    Group(
        "teachers/text_spans",
        ("teachers/test_text_spans.py",),
        (
            ("(borders > 0) & (borders <= same)", "(borders > 0)"),
            ("np.searchsorted(ends, borders) + 1", 'np.searchsorted(ends, borders, "right")'),
            ("== 1) & (_widths", "== 1) | (_widths"),
            ("(np.diff(before) == 0) &", "(np.diff(before) >= 0) &"),
            ("& np.isin(begins[:-1], usual_ends)", "& np.isin(begins[:-1], begins)"),
        ),
    ),
    Group(
        "teachers/retokenizer",
        ("teachers/test_retokenizer.py",),
        (
            ("= self._own_ends[0]", "= -1"),
            ("alone[:-1] | (sampled[1:] != sampled[:-1])", "alone[:-1]"),
            ("content[: error.start]", "content[: error.start - 1]"),
            ("pieces[0] = pieces[0][1:]", "pieces[0] = pieces[0][:]"),
            ("of_run.moved(start, length)", "of_run.moved(start, 0)"),
            ("if sampled[start]:", "if len(ids):"),
        ),
    ),
    Group(
        "teachers/episode_teacher",
        ("teachers/test_retokenizer.py",),
        (
            ("moved(start, parts[-1].num_spans if parts else 0)", "moved(start, 0)"),
            ("[scores.logprobs[a:b].sum(", "[scores.logprobs[a : a + 1].sum("),
            ("np.count_nonzero(sampled) - covered", "covered"),
            ("spans.policy[numbers, 0] + inside", "spans.policy[numbers, 0]"),
            ("top_ids[ends[single]] = ids", "top_ids[ends[single]] = likely_ids"),
            ("written.spans.moved(replaced, len(opening))", "written.spans.moved(replaced, 0)"),
        ),
    ),
    Group(
        "teachers/in_process_teacher",
        ("teachers/test_in_process_teacher.py",),
        (
            ("(len(taken) + 1) * longest > self._max_tokens", "len(taken) > self._max_tokens"),
            ("if future.set_running_or_notify_cancel()", "if future is not None"),
            ('self._counts["failures"] += len(requests)', 'self._counts["failures"] += 0'),
        ),
    ),
    Group(
        "scorers/logprob_model",
        ("scorers/test_logprob_model.py",),
        (
            ("temperature=temperature or 1.0", "temperature=1.0"),
            ("of_rows[row, : len(sequence)]", "of_rows[0, : len(sequence)]"),
            ("logprobs[0], top_logprobs[0] = np.nan, np.nan", "top_logprobs[0] = np.nan"),
        ),
    ),
    Group(
        "teachers/prompt_logprobs",
        ("teachers/test_teacher_scorer.py",),
        (
            ("(-pair[1], pair[0])", "(pair[1], pair[0])"),
            ("logprobs[index] = known[own]", "logprobs[index] = max(known.values())"),
            ("if not 0 <= token < vocab", "if not 0 <= token <= 99"),
            ("items[: len(token_ids)]", "items"),
            ("if len(best) < top_k:", "if len(best) < top_k - 1:"),
        ),
    ),
    Group(
        "teachers/episode_teacher",
        ("teachers/test_teacher_scorer.py",),
        (
            ("scores.moved(start, ", "scores.moved(0, "),
            (".at(indices + len(opening))", ".at(indices)"),
            ("_TokenLogprobs(indices + replaced, *scores", "_TokenLogprobs(indices, *scores"),
            (">= self._named_tokens", "> self._named_tokens"),
        ),
    ),
    Group(
        "teachers/teacher_service",
        ("teachers/test_teacher_scorer.py",),
        (("+= tries > 0", "+= tries > 1"),),
    ),
    Group(
        "teachers/teacher_choices",
        ("teachers/test_teacher_scorer.py",),
        (
            ("if weight is not None}", "if weight}"),
            ("or not 0 < weight < math.inf", "or not 0 <= weight < math.inf"),
            ("self.of_task(record_of(prompt))", "self.of_task(prompt.columns)"),
            ("elif len(self.weights) == 1:", "elif self.weights:"),
        ),
    ),
    Group(
        "trainer/credit",
        (
            "trainer/test_learner.py::test_a_penalty_is_taken_off_what_tokens_earn_or_else_off_the_sequences",
        ),
        (("tuple(-p if old is None", "tuple(p if old is None"),),
    ),
    Group(
        "trainer/credit",
        (
            "trainer/test_learner.py::test_a_token_that_the_teacher_finds_likelier_gets_a_larger_advantage",
        ),
        (
            (
                "advantages - self.teacher.coefficient * gap",
                "advantages + self.teacher.coefficient * gap",
            ),
        ),
    ),
    Group(
        "trainer/credit",
        (
            "trainer/test_learner.py::test_the_rank_of_the_covariance_is_by_size_over_the_trained_tokens",
        ),
        (("np.argsort(-covariance", "np.argsort(covariance"),),
    ),
    Group(
        "trainer/credit",
        (
            "trainer/test_learner.py::test_two_right_answers_with_a_masked_one_learn_only_from_it_if_it_is_compared",
        ),
        (("float(num_too_few(data, least))", "float(num_too_few(data, 2))"),),
    ),
    Group(
        "trainer/trainer",
        ("trainer/test_trainer.py",),
        (
            ('self._skipped_in_row = numbers["skipped"]', "self._skipped_in_row = 0"),
            (
                'self._skipped_in_row + 1 if stats["train/skipped"] else 0',
                'self._skipped_in_row + int(stats["train/skipped"])',
            ),
            (
                "self._skipped_in_row >= self._settings.max_skipped_steps",
                "self._skipped_in_row > self._settings.max_skipped_steps",
            ),
            ("            self._source.give_back()\n", ""),
            (
                "self.version % self._settings.save_every == 0",
                "self.version % self._settings.save_every == 1",
            ),
        ),
    ),
    Group(
        "trainer/evaluation",
        ("trainer/test_trainer.py",),
        (
            ("            report({})\n            raise\n", "            raise\n"),
            ("        if not self.last:\n", "        if self.last:\n"),
            ("if not due or self._parts.outlets.should_hurry():", "if not due:"),
            (
                "        if self._times.shares_slice:\n",
                "        if not self._times.shares_slice:\n",
            ),
        ),
    ),
    Group(
        "buffer/contents",
        (
            "buffer/test_contents.py",
            "buffer/test_replay.py",
        ),
        (
            ("max(self.next_untaken, number + 1)", "max(self.next_untaken, number)"),
            ("[v for v in self.taken if v < live]", "[v for v in self.taken if v <= live]"),
            ("len(self.pending) * self._reuse + sum", "len(self.pending) + sum"),
            ("if use == self._reuse:", "if use > self._reuse:"),
            ("self.next_group if active else self.next_untaken", "self.next_group"),
            (
                "self.taken[draw.version] -= len(draw.fresh) + len(draw.again)",
                "self.taken[draw.version] -= len(draw.fresh)",
            ),
            ("dict(sorted((self.pending | tickets).items()))", "self.pending | tickets"),
        ),
    ),
    Group(
        "buffer/replay",
        ("buffer/test_replay.py",),
        (
            (
                "return self._settings.max_staleness if self._settings.waits else self._limit",
                "return self._settings.max_staleness",
            ),
            ("self._free_slots() > 0 and not self._paused", "self._free_slots() > 0"),
            ("self._live = max(self._live, version)", "self._live = version"),
        ),
    ),
    Group(
        "buffer/select",
        ("buffer/test_replay.py",),
        (
            (
                "self._waiting(), ready, self._per_step",
                "sorted(ready), ready, self._per_step",
            ),
            ("number <= self._waits_for", "number < self._waits_for"),
        ),
    ),
    Group(
        "buffer/replay",
        ("buffer/test_tasks.py",),
        (
            ("may_age = not self._settings.waits or bool", "may_age = bool"),
            ("        self._on_dropped(task, number, reason)\n", ""),
        ),
    ),
    Group(
        "buffer/select",
        ("buffer/test_tasks.py",),
        (
            ("for number in pending if number not in self._overtaken]", "for number in pending]"),
            (
                "self._overtaken.add(number)\n        self._waits_for = None",
                "self._overtaken.add(number)",
            ),
            (
                "self._ready_check.unfit(contents.ready, version, max_staleness, bounds)",
                "self._ready_check.unfit(contents.ready, version, max_staleness)",
            ),
        ),
    ),
    Group(
        "data/mixing",
        ("data/test_mixing.py",),
        (
            (
                "key=lambda name: (1 - credits[name]) / weights[name])",
                "key=lambda name: -credits[name])",
            ),
            ("name for name in able if credits[name] > 0]", "name for name in able]"),
            ("w > 0 and credits[n] < most[n]}", "w > 0}"),
            ("credit - before[n] for n, credit", "credit for n, credit"),
            ("        after[name] -= excess\n", ""),
            ("name: credits[name] - 1}", "name: credits[name] - 2}"),
        ),
    ),
    Group(
        "data/mixed_prompts",
        ("data/test_mixing.py",),
        (
            ("max(1.0, share * groups_per_step)", "share * groups_per_step"),
            ("any(self._weights[name] for name in self._able())", "bool(self._able())"),
            ("self._first + self._stride * number)", "self._stride * number)"),
            (
                "            self._running.pop(number, None)\n            if rewards",
                "            if rewards",
            ),
            ("            state.started[name] += 1\n", "            state.started[name] += 2\n"),
            (
                "- state.dropped[name] for name in self._tasks}\n            total",
                "for name in self._tasks}\n            total",
            ),
            ("-RECENT:]", "-1:]"),
            ("stream.state(state.started[name], ended)", "stream.state(state.started[name])"),
        ),
    ),
    Group(
        "data/curriculum",
        ("data/test_mixing.py",),
        (
            ("        if next_draw == self.now.next:\n            self.take_in()\n", ""),
            (
                "            elif ended is not None and not ended(event.group):\n"
                "                break\n",
                "",
            ),
            ("(*self.events, *self._in_order())", "self.events"),
            ("else ended(event.group):", "else True:"),
        ),
    ),
    Group(
        "rollout/rollout_loop",
        ("rollout/test_several_tasks.py",),
        (
            (
                "        return self._by_task[prompt.task]\n",
                "        return self._by_task[self._names[0]]\n",
            ),
            ("always_waits=several", "always_waits=False"),
            ("        limits = settings.limits.of(prompt)\n", "        limits = settings.limits\n"),
            ("while waiting and self._may_begin():", "while waiting:"),
        ),
    ),
    Group(
        "trainer/step_data",
        ("trainer/test_tasks.py",),
        (("(numbers >= 0) & (numbers < len(of_sequence))", "numbers >= 0"),),
    ),
    Group(
        "trainer/credit",
        ("trainer/test_tasks.py",),
        (("np.asarray(self.kl_factors, np.float32)[step.batch.task_ids]", "np.float32(1)"),),
    ),
    Group(
        "trainer/data_metrics",
        ("trainer/test_data_metrics.py",),
        (
            (
                "of_task = [group for group in groups if group.prompt.task == name]",
                "of_task = list(groups)",
            ),
        ),
    ),
    Group(
        "model/logprobs",
        ("model/test_task_temperatures.py",),
        (
            ("logits = logits / _divisors(sampling.temperatures)[:, None]\n", "pass\n"),
            ("logits = logits / _divisors(temperatures)[:, None, None]", "pass"),
            ("return jnp.where(temperatures > 0, temperatures, 1.0)", "return temperatures"),
        ),
    ),
    Group(
        "algorithms/objective",
        ("algorithms/test_task_factors.py",),
        (
            ("_times(weights, factors.policy)", "_times(weights, factors.kl)"),
            (
                "_weighted(x, _times(weights, factors.kl), divergence)",
                "_weighted(x, weights, divergence)",
            ),
        ),
    ),
    Group(
        "buffer/replay",
        ("buffer/test_replay.py",),
        (("            contents.tally.resampled = 0\n", ""),),
    ),
    Group(
        "remote/weights/transfers",
        ("remote/weights/test_transfers.py",),
        (
            ("            del self._unchecked[recipient]\n", ""),
            ("self._fetched[recipient.fetching] -= 1", "pass"),
        ),
    ),
    Group(
        "buffer/select",
        ("buffer/test_select.py",),
        (
            ("waiting[0] + lookahead", "waiting[0] + lookahead + 1"),
            ("2.0 ** (age / HALF_LIFE)", "2.0 ** (-age / HALF_LIFE)"),
            ("-float(np.var(", "float(np.var("),
            ("[: max(count, 0)]", "[: max(count, 1)]"),
        ),
    ),
    Group(
        "buffer/select",
        ("buffer/test_eligibility.py",),
        (
            (
                "self._at, self._fit = (version, max_staleness), set()",
                "self._at = (version, max_staleness)",
            ),
        ),
    ),
    Group(
        "staleness",
        ("test_staleness.py",),
        (
            ("newest > version", "newest > version + 1"),
            ("version - oldest > max_staleness", "version - oldest >= max_staleness"),
        ),
    ),
    Group(
        "weights/channel",
        (
            "weights/test_subscriptions.py",
            "weights/test_channel.py",
        ),
        (
            (
                "end.staged, end.taken = end.staged or end.taken, None",
                "end.staged, end.taken = end.staged, None",
            ),
            ("            end.counts = False\n", ""),
            ("compare(manifest, self._expected)\n", "pass\n"),
        ),
    ),
    Group(
        "weights/channel",
        ("weights/test_transfer_faults.py",),
        (("        if delivery.repeated:\n", "        if False:\n"),),
    ),
    Group(
        "weights/exchange",
        ("weights/test_subscriptions.py",),
        (
            (
                "lowest = min((s.live_version for s in self.entries if s.counts)",
                "lowest = max((s.live_version for s in self.entries if s.counts)",
            ),
            (
                "if version < self.live_version:\n            return False",
                "if version < self.live_version - 1:\n            return False",
            ),
        ),
    ),
    Group(
        "weights/manifest",
        ("weights/test_transfer_faults.py",),
        (
            (
                "return jnp.sum(bits * (2 * position + 1), dtype=jnp.uint32)",
                "return jnp.sum(bits * 2 * position, dtype=jnp.uint32)",
            ),
            ("math.prod(shape[axis + 1 :])", "math.prod(shape[axis:])"),
        ),
    ),
    Group(
        "weights/host_reshard",
        ("weights/test_host_reshard.py",),
        (
            (
                "inside(both, held), inside(both, box)",
                "inside(both, held), inside(both, held)",
            ),
            (
                "source.setdefault(box_of(shard.index, leaf.shape), index)",
                "source.setdefault(box_of(shard.index, leaf.shape), 0)",
            ),
        ),
    ),
    Group(
        "weights/delivery",
        ("weights/test_transfer_faults.py",),
        (
            ("if sent is None or received is None:", "if sent is None and received is None:"),
            ("params=link.move(self.held))", "params=self.update.params)"),
        ),
    ),
    Group(
        "evals/estimates",
        ("evals/test_estimates.py",),
        (
            ("math.comb(samples - passed, k)", "math.comb(samples - passed - 1, k)"),
            ("/ math.comb(samples, k)", "/ math.comb(samples + 1, k)"),
            ("1.959963984540054", "1.644853626951473"),
            ("(most - 1).bit_length()", "most.bit_length()"),
            ("if count == most]", "if count >= 1]"),
            ("/ (most * len(chosen))", "/ most"),
            ("if answer is not None)", ")"),
            ("/ len(after[key]) -", "/ len(after[key]) +"),
            ("if values and before.get(key)]", "if key in before]"),
        ),
    ),
    Group(
        "rollout/evaluate",
        ("evals/test_estimates.py", "rollout/test_evaluate.py"),
        (
            ("squares * len(kept) / (len(kept) - 1)", "squares"),
            ("if len(kept) < 2:", "if not kept:"),
            ("math.fsum(value - mean for value in group) ** 2", "abs(sum(group) - mean)"),
            ("for m in range(samples)", "for m in range(1)"),
        ),
    ),
    Group(
        "evals/eval_answers",
        ("evals/test_eval_answers.py",),
        (
            ("not in answer.parts and answer.left_out:", "not in answer.parts:"),
            ("grade >= pass_reward", "grade > pass_reward"),
            ("if len(p) >= k]", "if p]"),
            ("if any(answer.seat for answer in answers):", "if False:"),
            ("if samples > 1 and any(", "if samples > 1 or any("),
            ("{self.index}\\0{self.prompt}", "{self.index}"),
        ),
    ),
    Group(
        "model/gpu_pages",
        ("model/test_gpu_pages.py",),
        (
            (
                "visible &= positions[None] > at[:, None] -",
                "visible &= positions[None] >= at[:, None] -",
            ),
            ("jnp.maximum(position + 1 - scoring", "jnp.maximum(position + 2 - scoring"),
            ("sums.total * shrunk +", "sums.total +"),
            ("jnp.exp(largest - jnp.max(largest, axis=0))", "jnp.exp(largest - largest)"),
            ("is_first = used & (split == 0)", "is_first = used"),
            ("over(low, jnp.minimum(begin, end)", "over(low, jnp.minimum(end, end)"),
            ("(2 * kv_head, 2 * kv_head + 1)", "(2 * kv_head, 2 * kv_head)"),
        ),
    ),
    Group(
        "model/query_blocks",
        ("model/test_gpu_pages.py::test_each_query_is_in_one_block",),
        (("jnp.where(count > 0, position + count, 0)", "position + count"),),
    ),
    Group(
        "model/tpu_pages",
        (
            "model/test_latent_pages.py::test_each_query_attends_to_the_tokens_up_to_its_own",
            "model/test_latent_pages.py::test_it_waits_for_each_copy_before_it_uses_what_is_copied",
        ),
        (
            ("copy.wait()", "pass"),
            ("@pl.when(page * G < end)", "@pl.when(page * G < end - G)"),
        ),
    ),
    Group(
        "model/latent_pages",
        (
            "model/test_latent_pages.py::test_each_query_attends_to_the_tokens_up_to_its_own",
            "model/test_latent_pages.py::test_it_waits_for_each_copy_before_it_uses_what_is_copied",
        ),
        (
            ("copy_queries(i).wait()", "copy_queries(i)"),
            ("@pl.when(i > 0)", "@pl.when(i > 1)"),
            ("seen = token <= positions[i]", "seen = token < positions[i]"),
            ("(jnp.cumsum(blocks) - blocks) % 2", "jnp.cumsum(blocks) % 2"),
            ("total[...] = total[...] * kept", "total[...] = total[...]"),
            ("-(-plan.end // (count * G))", "plan.end // (count * G)"),
        ),
    ),
    Group(
        "model/cache",
        ("model/test_windows.py::test_the_pages_of_a_window_hold_each_of_its_tokens",),
        (
            ("positions + 1 - window, 0)", "positions + 2 - window, 0)"),
            ("-(-(window - 1) // page_tokens) + 1", "-(-(window - 1) // page_tokens)"),
        ),
    ),
    Group(
        "model/attention",
        (
            "model/test_windows.py::test_what_a_query_sees_is_its_segment_up_to_itself_within_the_window",
        ),
        (
            ("jnp.triu(band, 1 - window)", "jnp.triu(band, -window)"),
            ("keys > positions[:, None] - window", "keys >= positions[:, None] - window"),
            ("return same & real & (jnp.triu", "return same & (jnp.triu"),
        ),
    ),
    Group(
        "model/attention",
        (
            "model/test_sinks.py::test_the_reference_is_a_softmax_with_one_more_logit",
            "model/test_attention.py::test_the_reference_equals_float64_numpy",
        ),
        (
            ("jnp.exp(sinks - largest))", "jnp.exp(sinks))"),
            ("capped(scores * K**-0.5,", "capped(scores * K**-0.25,"),
        ),
    ),
    Group(
        "model/logprobs",
        (
            "model/test_logprobs.py::test_logprobs_and_entropy_equal_float64_numpy",
            "model/test_logprobs.py::test_what_is_not_wanted_costs_nothing_and_changes_nothing",
        ),
        (
            (
                "in_parts=how.in_parts) / how.temperature\n    if sampling.temperatures",
                "in_parts=how.in_parts)\n    if sampling.temperatures",
            ),
            (
                "entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)\n    return jnp.take",
                "entropy = jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)\n    return jnp.take",
            ),
            (
                "of_head = of_head + dhead.astype(jnp.float32)",
                "of_head = dhead.astype(jnp.float32)",
            ),
        ),
    ),
    Group(
        "model/lora",
        ("model/test_new_adapter.py::test_an_adapter_is_scaled_by_its_rank_or_by_the_root_of_it",),
        (
            (
                "section.alpha / (section.rank**0.5 if section.rslora else section.rank)",
                "section.alpha / section.rank",
            ),
        ),
    ),
    Group(
        "model/lora",
        (
            "model/test_lora_gradient.py::test_the_first_step_of_an_adapter_of_full_rank_is_that_of_all_weights_through_its_input_side",
        ),
        (("change = lora.scale * (a.reshape", "change = (a.reshape"),),
    ),
    Group(
        "model/lora",
        (
            "trainer/test_optimizer.py::test_the_value_head_and_lora_b_shrink_although_they_begin_as_zeros",
        ),
        (
            (
                '            init="off",\n            decays=True',
                '            init="off",\n            decays=False',
            ),
        ),
    ),
    Group(
        "model/heads",
        (
            "trainer/test_optimizer.py::test_the_value_head_and_lora_b_shrink_although_they_begin_as_zeros",
        ),
        (("decays=True, fan_in=d + 1", "decays=False, fan_in=d + 1"),),
    ),
    Group(
        "model/heads",
        ("model/test_heads.py::test_a_value_is_of_the_state_before_its_token",),
        (
            (
                "return at_targets(scores.reshape(-1), tokens.segment_ids), after",
                "return scores, after",
            ),
        ),
    ),
    Group(
        "model/gpu_flash",
        (
            "model/test_gpu_flash.py::test_a_segment_ends_where_its_last_token_is_and_padding_sees_itself",
            "model/test_gpu_flash.py::test_blocks_that_see_nothing_of_each_other_are_left_out",
        ),
        (
            ("constant_values=True), indices + 1, T)", "constant_values=True), indices, T)"),
            ("keys + block > earliest - how", "keys > earliest - how"),
        ),
    ),
    Group(
        "model/gpu_packed",
        ("model/test_gpu_packed.py::test_offsets_say_where_each_run_begins_and_how_long_it_is",),
        (
            ("(number < most)", "(number < most - 3)"),
            ("starts[:, 1:] >= 0, starts[:, 1:], T)", "starts[:, 1:] >= 0, starts[:, 1:], T - 1)"),
        ),
    ),
    Group(
        "model/gpu_grouped",
        ("model/test_grouped.py::test_tiles_have_each_row_of_a_group_once",),
        (("(tile - (last - counts)[group])", "(tile - last[group])"),),
    ),
    Group(
        "model/moe",
        (
            "model/test_moe.py::test_a_correction_and_groups_change_who_is_chosen",
            "model/test_moe.py::test_load_counts_real_tokens_alone",
        ),
        (
            (
                "odds + jax.lax.stop_gradient(correction)",
                "odds - jax.lax.stop_gradient(correction)",
            ),
            (
                "jax.lax.top_k(best, router.groups_per_token)[1]",
                "jax.lax.top_k(best, router.groups)[1]",
            ),
            ("grouped.shape[-1]))[0].sum(axis=-1)", "grouped.shape[-1]))[0].max(axis=-1)"),
            ("& real[:, None, None]", "| ~real[:, None, None]"),
        ),
    ),
    Group(
        "model/kv_layout",
        ("sampler/batch/test_host_parts.py",),
        (("max(0, (tokens - 1) // page_tokens - self", "max(0, tokens // page_tokens - self"),),
    ),
    Group(
        "sampler/device/sampling",
        (
            "sampler/test_extras.py::test_a_request_that_truncates_nothing_keeps_every_token_whatever_its_neighbours_ask_for",
            "sampler/test_extras.py::test_each_key_and_each_position_has_a_number_of_its_own",
            "sampler/device/test_sampling.py::test_a_token_is_the_one_whose_interval_holds_the_number",
            "sampler/device/test_sampling.py::test_equals_at_the_edge_are_kept_together",
            "sampler/device/test_sampling.py::test_ranks_have_the_order_of_the_numbers",
            "sampler/test_extras.py::test_masks_and_both_log_probs_are_those_of_the_definition",
            "sampler/test_scores.py::test_the_likeliest_are_those_of_a_whole_sort_also_where_many_are_equal",
            "sampler/test_scores.py::test_generated_tokens_have_log_probs_of_their_own_distribution",
        ),
        (
            ("jnp.where(share < 1, nucleus, floor)", "nucleus"),
            ("top + jnp.log", "top - 1 + jnp.log"),
            ("measure(ranks > middle) < limit", "measure(ranks >= middle) < limit"),
            ("jnp.where(numbers == 0, 0.0, numbers)", "numbers"),
            (
                "jax.random.fold_in(jax.random.wrap_key_data(key), position)",
                "jax.random.wrap_key_data(key)",
            ),
            ("<= (target - before)[:, None]", "<= target[:, None]"),
            ("_at(jax.nn.log_softmax(full, axis=-1), new.tokens)", "new.logprobs"),
            ("found - largest - total", "found - largest"),
            ("id_logits - largest - total", "id_logits - largest"),
            ("logits / tempered[:, None]", "logits"),
            (
                "jnp.sort(jax.lax.top_k(jnp.max(blocks, axis=-1), k)[1], axis=-1)",
                "jax.lax.top_k(jnp.max(blocks, axis=-1), k)[1]",
            ),
            ("jnp.max(blocks, axis=-1), k)[1]", "jnp.max(blocks, axis=-1), k - 1)[1]"),
        ),
    ),
    Group(
        "sampler/device/token_scores",
        ("sampler/test_scores.py::test_the_head_is_applied_to_a_few_tokens_at_a_time",),
        (
            ("scored.count) + size - 1) // size", "scored.count)) // size"),
            ("begin = step * size", "begin = step * (size - 1)"),
            ("x[slice_of(scored.indices, begin)]", "x[slice_of(scored.rows, begin)]"),
            ("jnp.concatenate([targets[:, None], ids]", "jnp.concatenate([ids[:, :1], ids]"),
        ),
    ),
    Group(
        "sampler/batch/prompt_scores",
        (
            "sampler/test_scores.py::test_every_way_of_a_prefill_gives_the_log_probs_of_the_definition",
            "sampler/test_scores.py::test_stored_kv_is_used_before_the_first_scored_position_alone",
            "sampler/test_scores.py::test_a_saved_request_keeps_its_log_probs",
        ),
        (
            ("self.request.start - 1)", "self.request.start)"),
            ("self.tokens - 1)", "self.tokens - 2)"),
            ("saved.prompt_logprobs is not None", "saved.prompt_logprobs is None"),
        ),
    ),
    Group(
        "sampler/batch/prefill",
        (
            "sampler/test_scores.py::test_every_way_of_a_prefill_gives_the_log_probs_of_the_definition",
        ),
        (
            ("token_ids[scored + 1]", "token_ids[scored]"),
            ("scored - prefilling.prefilled + begin", "scored + begin"),
            ("scored.start + 1, rows", "scored.start, rows"),
        ),
    ),
    Group(
        "sampler/batch/kv_cache",
        ("sampler/batch/test_host_parts.py",),
        (
            ("names = page_names(token_ids[:-1], form", "names = page_names(token_ids, form"),
            ("hashlib.blake2b(chained + content", "hashlib.blake2b(content"),
            ("if self._pages.holders(page) == 1:", "if self._pages.holders(page) >= 1:"),
            ("if count > len(self._free):", "if count >= len(self._free):"),
            ("count + spare - self.pages", "count - self.pages"),
            ("self.release(matched)", "pass"),
        ),
    ),
    Group(
        "sampler/batch/admission",
        ("sampler/batch/test_host_parts.py", "sampler/batch/test_waiting.py"),
        (
            ("load.running >= limit.requests", "load.running > limit.requests"),
            ("load.used_share > HIGH", "load.used_share < HIGH"),
            ("self._passed_in_a_row >= self._overtakes", "self._passed_in_a_row > self._overtakes"),
            ("self._passed_in_a_row + 1 if passes else 0", "self._passed_in_a_row + 1"),
            ("reversed([*before, *entries])", "reversed([*entries, *before])"),
        ),
    ),
    Group(
        "sampler/batch/shapes",
        (
            "sampler/batch/test_host_parts.py",
            "sampler/batch/test_shapes.py",
        ),
        (
            ("count = min(total - start, budget)", "count = min(total, budget)"),
            ("power * 3 // 4 if power >= 4 and", "power * 3 // 4 if power > 4 and"),
            ("if 2 * remaining > b)", "if remaining > b)"),
        ),
    ),
    Group(
        "data/token_bytes",
        ("data/test_token_bytes.py",),
        (
            ('== ["ByteLevel"]', '!= ["ByteLevel"]'),
            ("if known else None", "if known else token.encode()[:1]"),
            ("token = token.replace(mark, text)", "token = token.replace(text, mark)"),
        ),
    ),
    Group(
        "endpoint/answer_constraint",
        ("endpoint/test_answer_constraint.py",),
        (
            ("if constraint is None or forced else", "if constraint is None else"),
            ("several = choice.parallel and not bare", "several = choice.parallel"),
            ('key = "parameters" if bare else "arguments"', 'key = "arguments"'),
            ("if not tools and not marks.thinking:", "if not tools:"),
            ('mode = "required" if kind in ("any", "tool") else kind', "mode = kind"),
            ('else r"<+\\/think>', 'else r"<\\/think>'),
            ("{{0,{MAX_CALLS - 1}}}", "{{0,{MAX_CALLS}}}"),
            ('if marks.thinking == "may" else ""', 'if marks.thinking == "open" else ""'),
            ("if text in marks.tokens else json.dumps(text)", "if False else json.dumps(text)"),
            ("if bare and or_json:", "if False:"),
            ('f"#/properties/parameters{ref[1:]}"', "ref"),
        ),
    ),
    Group(
        "data/chat_formats/chat_messages",
        ("data/test_chat.py::test_a_number_beyond_float64_is_read_as_the_nearest_one",),
        (
            ("max(-LARGEST_NUMBER, min(float(text), LARGEST_NUMBER))", "float(text)"),
            ("max(-LARGEST_NUMBER, min(float(text), LARGEST_NUMBER))", "-LARGEST_NUMBER"),
            ("if len(text) <= MAX_DIGITS else", "if len(text) <= 300 else"),
        ),
    ),
    Group(
        "data/chat_formats/written_turn",
        ("data/test_chat.py::test_a_string_of_a_call_may_contain_the_marks_as_text",),
        (
            ("if rest.startswith(CALLED):", "if False:"),
            ("rest.removeprefix(CALLED)", "rest"),
        ),
    ),
    Group(
        "data/chat_formats/template_format",
        ("data/test_chat.py::test_special_tokens_within_a_turn_do_not_reach_its_message",),
        (("if int(i) not in self._dropped", "if True"),),
    ),
    Group(
        "endpoint/chat_turns",
        (
            "endpoint/test_usual_fields.py::test_allowed_tools_are_counted_where_nothing_keeps_the_policy_from_others",
        ),
        (("if call.choice.names:", "if False:"),),
    ),
    Group(
        "endpoint/text_flow",
        ("data/test_token_bytes.py",),
        (
            ("(self._open + new[:1])", "new[:1]"),
            ("        if new:\n            offset +=", "        if True:\n            offset +="),
        ),
    ),
    Group(
        "metrics/trace_file",
        ("metrics/test_spans.py",),
        (("if key in self._named}", "if key not in self._named}"),),
    ),
    Group(
        "host",
        ("test_malloc.py",),
        (
            ("max(1, (os.cpu_count() or 1) //", "max(2, (os.cpu_count() or 1) //"),
            ("CORES_PER_ARENA = 4", "CORES_PER_ARENA = 5"),
        ),
    ),
    Group(
        "metrics/series",
        ("metrics/test_series.py",),
        (("<= n / 1000 for", "<= n for"), ("if u != v), default=inf)", "if u != v), default=0)")),
    ),
    Group(
        "sampler/batch/kv_budget",
        ("sampler/batch/test_host_parts.py",),
        (
            ("budget_bytes - places_bytes - states", "budget_bytes - states"),
            ("token_bytes * layout.arrays * page_tokens", "token_bytes * page_tokens"),
        ),
    ),
    Group(
        "data/curriculum",
        ("data/test_curriculum.py",),
        (
            ("sorted(self.arrived, key=lambda event: event.group)", "list(self.arrived)"),
            (
                "old is None else decay * old + (1 - decay) * share",
                "old is None else (decay * old + share) / 2",
            ),
            ("4 * known * (1 - known)", "4 * known"),
            ("if number - position < MAX_PASSED_OVER * self._pool:", "if True:"),
            ("        if next_draw == self.now.next:\n            self.take_in()\n", ""),
            (
                "            elif ended is not None and not ended(event.group):\n"
                "                break\n",
                "",
            ),
            ("(*self.events, *self._in_order())", "self._in_order()"),
        ),
    ),
    Group(
        "data/prompts",
        ("data/test_prompts.py",),
        (
            ("self._first + self._stride * index", "self._first + index"),
            ("numbers[process_index::process_count]", "numbers[process_index:]"),
            ("EVAL_POSITION + i)", "i)"),
            ("if len(token_ids) <= self._max_length:", "if len(token_ids) < self._max_length:"),
            ('"next": self._next if next_draw is None else next_draw', '"next": self._next'),
        ),
    ),
    Group(
        "data/addition",
        ("data/test_addition.py",),
        (
            ("np.random.default_rng([self._seed, index])", "np.random.default_rng(index)"),
            ("if _unordered(problem) not in self._reserved:", "if problem not in self._reserved:"),
            ("error * 10**column}", "error}"),
        ),
    ),
    Group(
        "scorers/graders",
        (
            "scorers/test_graders.py::test_exact_and_gsm8k_pay_for_what_is_right_alone",
            "scorers/test_graders.py::test_exact_knows_each_reference_alone_and_after_a_mark",
            "scorers/test_answers.py::test_graders_read_the_answer_that_is_meant",
        ),
        (
            ('before.endswith("#")', "True"),
            ("same and not units.differ(answer.line, right.line)", "same"),
            (
                "number is not None and written_numbers.number_of(answer) == number",
                "written_numbers.number_of(answer) == number",
            ),
            ('(after_thinking(completion) or "").strip()', "completion.strip()"),
        ),
    ),
    Group(
        "scorers/written_numbers",
        ("scorers/test_graders.py::test_the_first_number_behind_the_mark_is_the_answer",),
        (('numbers[0 if answer.mark == "####" else -1]', "numbers[-1]"),),
    ),
    Group(
        "judge/judge_cache",
        (
            "judge/test_judge.py::test_a_question_is_the_same_whatever_the_order_of_its_settings",
            "judge/test_judge.py::test_a_cache_forgets_the_oldest",
        ),
        (
            ("sort_keys=True", "sort_keys=False"),
            ("popitem(last=False)", "popitem(last=True)"),
        ),
    ),
    Group(
        "judge/judge_prompt",
        ("judge/test_judge.py::test_replies_are_read_strictly",),
        (
            ("(float(number) - worst) / (best - worst)", "float(number) / best"),
            ("if len({key for key, _ in pairs}) < len(pairs):", "if False:"),
            ("if set(values) != set(names):", "if not set(values) >= set(names):"),
        ),
    ),
    Group(
        "judge/judge_prompt",
        ("judge/test_judge.py::test_each_answer_is_scored_on_the_scale_and_equal_ones_once",),
        (("not worst <= number <= best", "not worst < number <= best"),),
    ),
    Group(
        "judge/process_rewards",
        ("judge/test_process_rewards.py",),
        (
            ("earned[step.end] += number", "earned[step.end] = number"),
            ("end=end - 1)", "end=end - 2)"),
            ("row[0] / len(steps)", "row[0]"),
            (
                "self.version() - oldest >= section.max_age",
                "self.version() - oldest > section.max_age",
            ),
            ("(weight * of_tokens)", "(of_tokens)"),
        ),
    ),
    Group(
        "run/checkpoint/rollout_state",
        ("run/checkpoint/test_resume.py",),
        (
            ("end = min([state.next_group, *unknown])", "end = state.next_group"),
            (
                "self.prompts.state(state.buffer.next_group, ended_for(state.buffer))",
                "self.prompts.state(None, ended_for(state.buffer))",
            ),
            ("number not in again", "True"),
            ("number < buffer.next_group and number", "number"),
            ("number < state.buffer.ledger_lines", "number <= state.buffer.ledger_lines"),
        ),
    ),
    Group(
        "run/checkpoint/bucket",
        ("run/checkpoint/test_bucket.py",),
        (
            ('FACTS = ("size", "crc32c", "md5Hash")', 'FACTS = ("size", "md5Hash")'),
            (
                "            for path in () if run is None else _record_files(run):",
                "            self.system.pipe_file(mark, b'{}')\n"
                "            for path in () if run is None else _record_files(run):",
            ),
            ("self._remove_object(mark)\n            raise", "pass\n            raise"),
            ("if not names & {CHECKSUMS, ASIDE}:", "if not names & {CHECKSUMS}:"),
            ("if CHECKSUMS in names)", "if names)"),
            ("for s in self.steps() if s <= newest]", "for s in self.steps()]"),
            ("writer.sign != self.sign", "writer.sign == self.sign"),
            ("return (*run.records, run.root / TRACKERS_FILE)", "return run.records"),
        ),
    ),
    Group(
        "run/checkpoint/bucket_start",
        ("run/checkpoint/test_bucket.py",),
        (
            ("last >= step and", "last > step and"),
            ("size >= bucket.record_size", "size <= bucket.record_size"),
            ("writer is None or writer.sign in signs", "writer is None or signs"),
            (
                "        add_signs(paths.root / WRITERS, (sign,))  # first: it may be killed in "
                "between\n        bucket.begin(sign)\n",
                "        bucket.begin(sign)\n        add_signs(paths.root / WRITERS, (sign,))\n",
            ),
            ("        if steps:", "        if False:"),
        ),
    ),
    Group(
        "run/update_loop",
        ("run/test_next_examples.py",),
        (("return self._state() if self._next is None else self._after", "return self._state()"),),
    ),
    Group(
        "run/shown_answers",
        ("run/test_shown_answers.py",),
        (
            ('{(line["index"], line["seat"]): line', '{line["seat"]: line'),
            (
                "for version in (versions[0], versions[-1])",
                "for version in (versions[0], versions[0])",
            ),
        ),
    ),
    Group(
        "audit",
        ("test_audit.py",),
        (
            ("if not 0 <= lag <= most:", "if not 0 <= lag <= most + 1:"),
            ("if version < self.newest:", "if version < self.newest - 1:"),
            (
                "if self.steps[version] != rules.groups_per_step:",
                "if self.steps[version] < rules.groups_per_step - 1:",
            ),
            ('if group in self.ended and fate != "returned":', "if False:"),
        ),
    ),
    Group(
        "config/peers/trl_fields",
        ("config/test_peers.py",),
        (
            ("sequences = _rows(f) * max(", "sequences = _rows(f) * min("),
            ('return int(f["num_iterations"]) * _minibatches(f)', "return _minibatches(f)"),
            ('math.ceil(f["max_steps"] / _updates(f))', 'f["max_steps"] // _updates(f)'),
            ('{"cispo": {"clip_high": high - 1}}', '{"cispo": {"clip_high": high}}'),
            ("* _steps(f) * _updates(f))", "* _steps(f) + _updates(f))"),
            ('"unbiased" if f["use_bias_correction_kl"] else', '"k2" if f["beta"] else'),
            ('own = [] if found else ["truncate_token"]', "own: list[Any] = []"),
        ),
    ),
    Group(
        "config/peers/verl_fields",
        ("config/test_peers.py",),
        (
            ("* _minibatches(f))", "* 1)"),
            ("f[RECORDS] // f[", "f[RECORDS] / f["),
            ("return max(prompts // part, 1)", "return prompts"),
        ),
    ),
    Group(
        "rollout/call_log",
        ("rollout/test_call_log.py",),
        (
            ("end + 1 - len(c.token_ids)", "end - len(c.token_ids)"),
            ("self._players.get(saved.voice, None if is_known else player)", "player"),
            ("del left[index]", "pass"),
            ("key=lambda one: one[0]", "key=lambda one: -one[0]"),
            ("saved.begins[k] + len(saved.completions[k].token_ids)", "saved.begins[k]"),
        ),
    ),
    Group(
        "sandbox/harbor_task",
        ("sandbox/test_harbor.py",),
        (
            ("not in (*OUT_OF_TIME, *OUT_OF_CONTEXT)", "not in (*OUT_OF_TIME,)"),
            ("RolloutError if unscored[0]", "Unavailable if unscored[0]"),
            ("rewards = {REWARD: 0.0}", "rewards = {REWARD: 1.0}"),
            ("if 0.0 <= reward <= 1.0 else", "if 0.0 <= reward else"),
            ("bool(kinds & set(OUT_OF_TIME))", "bool(kinds)"),
        ),
    ),
    Group(
        "sandbox/harbor_files",
        ("sandbox/test_harbor.py",),
        (
            ('startswith(("--", "[", "/../"))', 'startswith(("[", "/../"))'),
            ("f.resolve().is_relative_to(inside)", "f.exists()"),
            ('verifier", {}).get("timeout_sec", 600.0)', 'agent", {}).get("timeout_sec", 600.0)'),
        ),
    ),
    Group(
        "sandbox/code_reward",
        ("sandbox/test_code.py",),
        (
            ("outcome.ok and outcome.stdout == word.encode()", "outcome.ok"),
            ("passed / len(cases)", "float(passed > 0)"),
            ("return blocks[-1] if blocks", "return blocks[0] if blocks"),
            ("reason = reason or failed", "reason = failed"),
            ("float(result.passed == 1.0)", "float(result.passed > 0.5)"),
            ("self._pool.close()", "pass"),
        ),
    ),
    Group(
        "algorithms/loss_components",
        (
            "algorithms/test_loss_components.py",
            "trainer/test_learner.py::test_components_are_of_the_tokens_that_they_cover_and_in_the_loss",
        ),
        (
            ("log_ratio(x._replace(anchor_logprobs=None)) ** 2 / 2", "log_ratio(x) ** 2"),
            ("rewards > one.right_reward", "rewards >= one.right_reward"),
            ("covered = weights[..., index] > 0", "covered = x.mask"),
            ("covered, weights[..., index] * values, 0.0", "covered, values, 0.0"),
            ("total += coefficients[index] * term", "total += term"),
            ("token_mean(replace(batch, mask=batch.supervised))", "token_mean(batch)"),
            ('assumed=ComponentFacts(needs=("entropy",))', "assumed=ComponentFacts()"),
            ("np.isin(batch.task_ids, one.tasks)", "~np.isin(batch.task_ids, one.tasks)"),
            ("tuple(map(tasks.index, one.tasks))", "tuple(range(len(one.tasks)))"),
        ),
    ),
    Group(
        "trainer/component_gradients",
        (
            "trainer/test_component_gradients.py",
            "trainer/test_learner.py::test_the_gradient_of_a_component_is_measured_when_due_over_the_whole_step",
        ),
        (
            ("if (version + 1) % every == 0}", "if version % every == 0}"),
            ("total + g.astype(jnp.float32)", "g.astype(jnp.float32)"),
        ),
    ),
    Group(
        "trainer/objectives/policy_objective",
        ("trainer/test_component_gradients.py",),
        (
            ("context.coefficients.losses[one],", "(1.0,),"),
            ("self.recipe.components[one],", "self.recipe.components[:1],"),
        ),
    ),
    Group(
        "algorithms/losses",
        ("algorithms/test_flash_reinforce.py",),
        (("mean_over_sequence(binary_kl(x)", "sum_over_sequence(binary_kl(x)"),),
    ),
    Group(
        "algorithms/losses",
        ("algorithms/test_loss_components.py",),
        (
            ("x.mask & (x.entropy < below)", "x.mask & (x.entropy > below)"),
            ("jnp.where(covered, -x.entropy, 0.0)", "jnp.where(covered, x.entropy, 0.0)"),
        ),
    ),
    Group(
        "config/algorithm_section",
        ("algorithms/test_loss_components.py",),
        (
            ("min(step / self.ramp_steps, 1.0)", "step / self.ramp_steps"),
            ("share * (self.coefficient_end - self.coefficient)", "share * self.coefficient_end"),
        ),
    ),
    Group(
        "config/rules",
        ("config/test_rules.py::test_a_rule_is_broken_alone_and_kept_by_the_defaults",),
        (("value == limit and not below", "value == limit"),),
    ),
    Group(
        "config/section",
        ("config/test_rules.py::test_a_rule_is_broken_alone_and_kept_by_the_defaults",),
        (
            ("if isinstance(value, dict):", "if value is None:"),
            ("elif isinstance(value, list):", "elif value is None:"),
        ),
    ),
    Group(
        "config/settings_reference",
        ("config/test_settings_reference.py",),
        (
            ("about = one.about + _unnamed_choices(one)", "about = one.about"),
            ('path.startswith(f"{one}.")', "path == one"),
        ),
    ),
    Group(
        "config/setting_fields",
        ("config/test_settings_reference.py",),
        (
            (
                "style = '\"' if isinstance(value, str) and",
                "style = None if isinstance(value, str) and",
            ),
        ),
    ),
    Group(
        "trainer/credit",
        (
            "trainer/test_learner.py::test_components_are_of_the_tokens_that_they_cover_and_in_the_loss",
        ),
        (
            (
                "np.full(len(e.token_ids), s.total, np.float32)",
                "np.zeros(len(e.token_ids), np.float32)",
            ),
        ),
    ),
    Group(
        "tasks/turn_match",
        ("tasks/test_turn_match.py",),
        (
            ("if len(calls) != len(expected):", "if len(calls) < len(expected):"),
            (
                "if other not in partner or assigned(partner[other], seen):",
                "if other not in partner:",
            ),
            ("if k not in rules.ignored", "if k in rules.ignored"),
            ("rel_tol=1e-9, abs_tol=CLOSE", "rel_tol=1e-6, abs_tol=CLOSE"),
            ("given.keys() == value.keys()", "given.keys() <= value.keys()"),
            ("len(given) == len(value) and all", "all"),
            ("2 * common >= least", "common >= least"),
            ("if first == second or least >= 1:", "if first == second or least > 1:"),
            ("return given is value", "return given == value"),
            ("CUT_OFF if is_cut else", "'' if is_cut else"),
        ),
    ),
    Group(
        "tasks/pivot_task",
        ("tasks/test_pivot_task.py",),
        (
            ('not at or messages[at - 1]["role"] == "assistant"', "not at"),
            ("messages[:at]]", "messages[: at + 1]]"),
            ("min(of_one) == max(of_one)", "min(of_one) == 0"),
            ("/ len(of_one) >= max_mean", "/ len(of_one) > max_mean"),
            ("if position[0] < first]", "if position[0] <= first]"),
        ),
    ),
    Group(
        "metrics/symptoms",
        ("view/test_alerts.py",),
        (
            ('_at_least("reward/zero_variance_share", 0.9)', '_at_least("reward/mean", 0.9)'),
            ('_at_most("offpolicy/ess_share", 0.5)', '_at_most("offpolicy/ess_share", 0.4)'),
        ),
    ),
    Group(
        "view/queries",
        ("view/test_alerts.py", "view/test_run_table.py"),
        (
            ("end - begin >= in_a_row", "end - begin > in_a_row"),
            ("last = begin, end - 1", "last = last or (begin, end - 1)"),
            ('stronger["lasts"] or', 'not stronger["lasts"] or'),
            ("if step in updates:", "if updates.setdefault(step, {}) is not None:"),
            ('"best": max(', '"best": min('),
        ),
    ),
    Group(
        "view/run_table",
        ("view/test_run_table.py",),
        (
            ("len(names) - len(differ)", "len(names)"),
            ("if isinstance(c, str) and c.startswith(FORMULA)", "if not isinstance(c, str)"),
        ),
    ),
    Group(
        "view/run_list",
        ("view/test_run_list.py",),
        (
            ("(-_changed_at(path), path)", "(_changed_at(path), path)"),
            ("path.name != WARM_START and", "path.name and"),
            ("end not in ambiguous and", ""),
        ),
    ),
    Group(
        "view/watched",
        ("view/test_view.py", "view/test_run_table.py"),
        (
            ("total, before = total + before, 0.0", "before = 0.0"),
            ("totals.append(total + elapsed_s)", "totals.append(elapsed_s)"),
            ("total += max(count, 0.0)", "total = max(count, 0.0)"),
            ("sum(known) / len(known)", "max(known)"),
            ("return sign * inf if advantage is None", "return -sign * inf if advantage is None"),
            ("begin, raw = begin + cut, raw[cut:]", "raw = raw[cut:]"),
            ("end = size if before is None else", "end = size if before else"),
        ),
    ),
    Group(
        "view/watched_files",
        ("view/test_view.py",),
        (("np.where(within, known, -inf).argmax(axis=1)", "known.argmax(axis=1)"),),
    ),
    Group(
        "metrics/recorder",
        ("metrics/test_run_log.py",),
        (
            ("del self._held[0]", "del self._held[-1]"),
            ("last.handle(record)", "pass"),
            ("record.levelno < self._shown_from", "record.levelno <= self._shown_from"),
            ("own.propagate = True", "pass"),
            ("and self._is_unhandled(record.name)", ""),
        ),
    ),
    Group(
        "command/run_differences",
        ("command/test_diff.py",),
        (
            ("math.hypot(a.stderr, b.stderr)", "a.stderr + b.stderr"),
            ("Estimate(b.value - a.value", "Estimate(a.value - b.value"),
            ("not _is_timing(key) and not _same", "not _same"),
            ("(both and math.isnan(a) and math.isnan(b))", "(both and math.isnan(a))"),
            ("sorted(of_a.keys() & of_b.keys())", "sorted(of_a.keys() & of_b.keys())[1:]"),
            ("is_number and math.isfinite(value)", "is_number"),
            ("= line.get(key + STDERR)", "= lines[0].get(key + STDERR)"),
            ("if inner != usual.get(key)", "if inner"),
        ),
    ),
    Group(
        "command/first_config",
        ("command/test_first_config.py",),
        (
            ('{"constant": {"divisor": max_new_tokens}}', '{"constant": {"divisor": 48}}'),
            ("choices.devices - samplers", "choices.devices"),
            ("if key not in SIZES", "if key in SIZES or True"),
            ("holds_mark = column is not None and", "holds_mark = column is None and"),
        ),
    ),
    Group(
        "command/chat_options",
        ("command/test_chat_options.py",),
        (
            ("math.exp(one.logprob)", "math.exp(-one.logprob)"),
            ('or line.startswith("//"):', 'or line.startswith("///"):'),
            ('!= "Cc"', '== "Cc"'),
            ("not 0 < options.top_p <= 1", "not 0 <= options.top_p <= 1"),
        ),
    ),
    Group(
        "api/conversation",
        ("api/test_conversation.py::test_a_turn_continues_the_tokens_that_were_sampled",),
        (
            ("np.concatenate([turns.token_ids, tail])", "chat.opening(messages, ())"),
            ("np.concatenate([turns.token_ids, token_ids])", "token_ids"),
        ),
    ),
    Group(
        "api/conversation",
        ("api/test_conversation.py::test_log_probs_are_those_of_the_answer_at_temperature_one",),
        (("start=len(self._prompt.token_ids)", "start=0"),),
    ),
    Group(
        "endpoint/http_server",
        ("endpoint/test_endpoint.py::test_an_answer_is_sent_without_waiting_for_the_one_before",),
        (("socket.SOCK_STREAM, socket.IPPROTO_TCP)", "socket.SOCK_STREAM)"),),
    ),
    Group(
        "metrics/json_logs",
        ("metrics/test_json_logs.py",),
        (
            ('f"{record.name}.".startswith(f"{info_of}.")', "record.name.startswith(info_of)"),
            ("if root.handlers:", "if not root:"),
            ("        return sys.stderr\n", "        return sys.__stderr__\n"),
        ),
    ),
)
