"""The audit: a ledger that adds up is clean, and each kind of fault in one is named."""

from dataclasses import replace

import pytest

from jaxrl_async.audit import Rules, audit, main

RULES = Rules(max_staleness=1, groups_per_step=2, reuse=1)


def admitted(*groups, version=0):
    return [{"fate": "admitted", "group": g, "version": version} for g in groups]


def trained(*groups, version, oldest=None, use=1):
    oldest = version if oldest is None else oldest
    return [
        {"fate": "trained", "group": g, "version": version, "oldest": oldest, "use": use}
        for g in groups
    ]


GOOD = [
    *admitted(0, 1, 2),
    {"fate": "dropped", "group": 1, "reason": "failed"},
    *admitted(3),
    *trained(0, 2, version=0),
    {"fate": "resumed", "version": 1, "next_group": 4},
    *admitted(4, 5, version=1),
    *trained(3, 4, version=1, oldest=0),
]


def test_a_ledger_that_adds_up_is_clean():
    found = audit(GOOD, RULES)
    assert found.problems == ()
    assert (found.steps, found.admitted, found.trained, found.active) == (2, 6, 4, 1)
    assert found.dropped == {"failed": 1} and found.lags == {0: 2, 1: 2} and found.resumed == 1


def test_numbers_given_anew_after_a_checkpoint_count_once():
    again = [
        *admitted(0, 1, 2, 3),
        *trained(0, 1, version=0),
        {"fate": "dropped", "group": 3, "reason": "failed"},
        {"fate": "resumed", "version": 1, "next_group": 2},
        *admitted(2, 3, version=1),
        *trained(2, 3, version=1),
    ]
    found = audit(again, RULES)
    assert found.problems == () and found.dropped == {} and found.admitted == 4


FAULTS = {
    "admitted before": [*GOOD, *admitted(5)],
    "never admitted": [*GOOD, *trained(7, 8, version=2)],
    "after it was dropped": [*GOOD, *trained(1, 5, version=2)],
    "as often as it may be": [*GOOD, *trained(0, 5, version=2)],
    "2 versions old": [*GOOD, *admitted(6), *trained(5, 6, version=2, oldest=0)],
    "had 1 groups": [*GOOD, *trained(5, version=2)],
    "at version 0 after 1": [*GOOD, *admitted(6), *trained(5, 6, version=0)],
    "use 2": [*GOOD, *admitted(6), *trained(5, 6, version=2, use=2)],
    "unknown fate": [*GOOD, {"fate": "eaten", "group": 5}],
    "6 were never admitted": [*GOOD, *admitted(7)],
}


@pytest.mark.parametrize("wrong", FAULTS)
def test_what_does_not_add_up_is_named(wrong):
    assert any(wrong in problem for problem in audit(FAULTS[wrong], RULES).problems)


def test_a_group_may_be_used_as_often_as_the_run_says():
    rules = Rules(max_staleness=1, groups_per_step=1, reuse=2)
    twice = [*admitted(0), *trained(0, version=0), *trained(0, version=1, oldest=0, use=2)]
    assert audit(twice, rules).problems == ()
    assert any(
        "as often" in p for p in audit([*twice, *trained(0, version=1, use=3)], rules).problems
    )


def test_the_command_says_what_it_found(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    (tmp_path / "config.yaml").write_text(
        "{staleness: {max_staleness: 1}, algorithm: {groups_per_step: 2}, buffer: {reuse: 1}}"
    )
    assert main([str(tmp_path)]) == 2 and "rl" in capsys.readouterr().err
    import json

    def write(lines):
        (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in range(3)))

    write(GOOD)
    assert main([str(tmp_path)]) == 0 and "clean" in capsys.readouterr().out
    write(FAULTS["had 1 groups"])
    assert main([str(tmp_path)]) == 1 and "PROBLEMS" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n')
    write(GOOD)
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n')
    assert main([str(tmp_path)]) == 1 and "metrics.jsonl" in capsys.readouterr().out
    assert main([]) == 2


def of_tasks(**tasks):
    """Return lines of groups of tasks, all trained on at version 1 with tokens of version 0."""
    groups = [number for numbers in tasks.values() for number in numbers]
    late = trained(*groups[2:], version=1, oldest=0)
    lines = [*admitted(*groups), *trained(*groups[:2], version=0), *late]
    named = {number: task for task, numbers in tasks.items() for number in numbers}
    return [x | ({"task": named[x["group"]]} if x["fate"] == "trained" else {}) for x in lines]


def test_tasks_are_counted_and_kept_to_their_own_bounds():
    lines = of_tasks(sums=[0, 1, 2], tools=[3])
    found = audit(lines, RULES)
    assert found.problems == () and found.tasks == {"sums": 3, "tools": 1}
    strict = replace(RULES, task_bounds={"tools": 0})
    assert "group 3 had a token 1 versions old; at most 0" in audit(lines, strict).problems[0]
    back = {"fate": "returned", "group": 3, "version": 1, "oldest": 0}
    assert audit([*lines, back], RULES).tasks == {"sums": 3, "tools": 0}
