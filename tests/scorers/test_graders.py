"""The built-in graders on answers that look right or wrong and are not."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.errors import RolloutError
from jaxrl_async.scorers import mathprocess
from jaxrl_async.scorers.answers import find_answer
from jaxrl_async.scorers.graders import exact, gsm8k, math
from jaxrl_async.scorers.units import unit_of
from jaxrl_async.scorers.written_numbers import number_of, plain_signs

NOT_ASKED = None
VERDICTS = [  # completion, reference, and what exact, gsm8k and math must say
    ("18", "18", 1, 1, 1),
    ("#18", "18", 1, 1, NOT_ASKED),
    ("7+5=12 #132", "132", 1, 1, NOT_ASKED),
    ("#132 #", "132", 0, 1, NOT_ASKED),
    ("#1320", "132", 0, 0, 0),
    ("1/2", "2", 0, 0, 0),
    ("10-5", "-5", 0, 0, 0),
    ("(1,2)", "12", 0, 0, 0),
    ("sqrt(2)", "2", 0, 0, 0),
    ("\\sqrt{2}", "2", 0, 0, 0),
    ("$\\sqrt{2}$", "2", 0, 0, 0),
    ("#### 10-5", "-5", 0, 0, 0),
    ("#### 1/2", "1", 0, 0, 0),
    ("\\frac{1}{2}", "2", 0, 0, 0),
    ("\\boxed{\\frac{1}{2}}", "2", 0, 0, 0),
    ("2^{10}", "10", 0, 0, 0),
    ("x^2", "2", 0, 0, 0),
    ("3x", "3", 0, 0, 0),
    ("the answer is 3x", "3", 0, 0, 0),
    ("x + 2", "2", 0, 0, 0),
    ("5 million", "5", 0, 0, NOT_ASKED),
    ("1e5", "5", 0, 0, 0),
    ("2.5.3", "3", 0, 0, 0),
    ("x > 5", "5", 0, 0, 0),
    ("x != 5", "5", 0, 0, 0),
    ("1, 2", "12", 0, 0, 0),
    ("(1, 2)", "2", 0, 0, 0),
    ("[0, 5]", "5", 0, 0, 0),
    ("1:2", "2", 0, 0, 0),
    ("F-16", "-16", 0, 0, 0),
    ("−5", "5", 0, 0, 0),
    ("−5", "-5", 0, 1, 1),
    ("x = - 5", "5", 0, 0, 0),
    ("x = - 5", "-5", 0, 1, 1),
    ("10 - 5", "5", 0, 0, 1),
    ("10 - 5", "-5", 0, 0, 0),
    ("2½", "2", 0, 0, 0),
    ("5²", "5", 0, 0, 0),
    ("-18", "18", 0, 0, 0),
    ("18", "-18", 0, 0, 0),
    ("", "18", 0, 0, 0),
    ("C#", "C#", 1, 1, 1),
    ("I say #C#", "C#", 1, 0, NOT_ASKED),
    ("C", "C#", 0, 0, 0),
    ("B#", "C#", 0, 0, 0),
    ("#", "#", 1, 1, NOT_ASKED),
    ("# include", "include", 1, 0, NOT_ASKED),
    ("so $18 a day\n#### 18", "18", 1, 1, 1),
    ("Step 3: 18", "18", 0, 1, NOT_ASKED),
    ("x <= 5", "5", 0, 0, 0),
    ("#### $1,234.50", "1234.5", 0, 1, 1),
    ("1,018", "1018", 0, 1, 1),
    ("18%", "18", 0, 1, 1),
    ("so 18 dollars", "18", 0, 1, 1),
    ("\\boxed{18}", "18", 0, 1, 1),
    ("The answer is 18.", "18", 0, 1, 1),
    ("x=18", "18", 0, 1, 1),
    ("\\boxed{x = 18}", "18", 0, 1, 1),
    ("18.0", "18", 0, 1, 1),
    ("$18/day", "18", 0, 1, NOT_ASKED),
    ("-$3", "-3", 0, 1, NOT_ASKED),
    ("$-3$", "-3", 0, 1, 1),
    ("\\boxed{0.5}", "1/2", 0, 0, 1),
    ("1/2", "0.5", 0, 0, 1),
    ("\\frac12", "1/2", 0, 0, 1),
    ("\\boxed{(1,2)}", "(1,2)", 0, 1, 1),
    ("(1,2)", "(1,2)", 1, 1, 1),
    ("\\boxed{(2,1)}", "(1,2)", 0, 0, 0),
    ("\\boxed{3} no, \\boxed{4}", "4", 0, 1, 1),
    ("\\boxed{3} no, \\boxed{4}", "3", 0, 0, 0),
    ("2\\sqrt{3}", "\\sqrt{12}", 0, 0, 1),
    ("sqrt(2)", "\\sqrt{2}", 0, 0, 1),
    ("The answer is B", "B", 0, 1, 1),
    ("\\boxed{A}", "B", 0, 0, 0),
    ("I think x < 3", "x<3", 0, 0, NOT_ASKED),
    ("[0,1)", "[0,1)", 1, 1, 1),
    ("[0,1]", "[0,1)", 0, 0, 0),
    ("x^2+2x+1", "(x+1)^2", 0, 0, 1),
    ("\\boxed{\\text{blue}}", "blue", 0, 1, 1),
    ("1 or 2", "2", 0, NOT_ASKED, NOT_ASKED),
    ("$x$ is 3 and $y$ is 4, so \\boxed{7}", "7", 0, 1, 1),
]


WRITTEN = r"""
1 1  The answer is **18**.
1 1  #### **18**
1 1  Answer: **18** eggs
1 1  **18 dollars**
1 1  **$18**
1 1  $**18**
1 1  **18**%
1 1  *18*
1 1  _18_
1 1  ***18***
1 1  **_18_**
1 1  `18`
1 1  **Answer: 18**
1 1  **Answer:** 18
1 1  **Answer: 2*9=18**
1 1  **#### 18**
1 ?  (see 1) **18**
1 1  <answer>18</answer>
1 1  5 eggs <answer> **18** </answer>
1 1  Answer: \$18
1 1  it costs \$9 twice: \$18
1 1  \boxed{\$18}
1 1  \boxed{18\text{ dollars}}
1 1  \boxed{18\,\text{kg}}
1 1  **\boxed{18}**
1 1  9*2=<<9*2=18>>18
1 1  9*2=$<<9*2=18>>18 dollars
1 1  18kg
1 1  18 kg
1 1  18cm
1 ?  18km/h
0 ?  18g
0 0  18x
0 0  18xy
0 0  18pi
0 0  18kg^2
0 0  18kg*2
0 0  2*3*18
0 0  2 *3* 18
0 0  2 ** 18
0 0  2**18**
0 0  18*3*2
0 0  2 x 18
0 0  18 x 2
0 0  2 \times 18
0 0  2(18)
0 0  -(18)
0 0  3*(18)
0 0  3 * (18)
0 0  3*(**18**)
0 0  3 * **18**
0 0  **3** * **18**
0 0  #### (18)*3
0 0  #### (18) * 3
0 0  #### (18)(3)
1 1  (18)
1 ?  (18) eggs
0 0  18\pi
0 0  \boxed{18\pi}
0 ?  \boxed{18\text{x}}
0 0  5\$18
0 0  **1**8
0 0  **18**2
0 0  *18
0 0  (1,**18**)
0 0  sqrt(**18**)
0 0  1/**18**
0 0  **1/18**
0 0  **10-18**
0 0  **18x**
0 0  **> 18**
0 0  x \leq 18
0 0  <answer>1/18</answer>
0 0  <<9*2=18>>19
"""
"""What gsm8k and math must say of a text that is not the reference, 18, to the letter."""
VERDICTS += [
    (line[5:], "18", 0, int(line[0]), NOT_ASKED if line[2] == "?" else int(line[2]))
    for line in WRITTEN.strip().splitlines()
]


@pytest.fixture(scope="module", autouse=True)
def no_process_stays():
    yield
    mathprocess._PROCESSES.close()


@pytest.mark.parametrize(("completion", "reference", "same_text", "same_number", "_"), VERDICTS)
def test_exact_and_gsm8k_pay_for_what_is_right_alone(
    completion, reference, same_text, same_number, _
):
    assert exact(completion, reference) == {"correct": same_text}
    if same_number is not NOT_ASKED:
        assert gsm8k(completion, reference) == {"correct": same_number}


@pytest.mark.full
def test_math_pays_for_what_is_right_alone():
    cases = [(c, r, same) for c, r, _, _, same in VERDICTS if same is not NOT_ASKED]
    found = [(c, r, math(c, r)["correct"]) for c, r, _ in cases]
    assert len(cases) > 100 and found == cases


@given(completion=st.text(), reference=st.text().filter(str.strip))
def test_exact_and_gsm8k_judge_any_text(completion, reference):
    assert exact(completion, reference)["correct"] in (0, 1)
    assert gsm8k(completion, reference)["correct"] in (0, 1)


@given(reference=st.text().filter(str.strip), before=st.text())
def test_exact_knows_each_reference_alone_and_after_a_mark(reference, before):
    assert exact(f" {reference}\n", reference) == {"correct": 1}
    assert exact(f"{before}# {reference} ", reference) == {"correct": 1}


@pytest.mark.full
@given(number=st.integers(-(10**9), 10**9))
def test_gsm8k_takes_every_way_to_write_a_whole_number(number):
    for written in (f"{number}", f"{number:,}", f"{number}.0", f"${number}", f"is {number}."):
        assert gsm8k(f"#### {written}", str(number)) == {"correct": 1}
        assert gsm8k(written, str(number)) == {"correct": 1}


@given(first=st.integers(0, 99), second=st.integers(0, 99), sign=st.sampled_from("+-*/^:,"))
def test_gsm8k_never_takes_a_number_out_of_an_expression(first, second, sign):
    for text in (f"{first}{sign}{second}", f"#### {first}{sign}{second}"):
        for part in (first, second, -second, int(f"{first}{second}")):
            assert gsm8k(text, str(part)) == {"correct": 0}


@pytest.mark.parametrize("grader", [exact, gsm8k, math])
def test_a_record_without_an_answer_cannot_be_graded(grader):
    with pytest.raises(RolloutError, match="no right answer to compare with"):
        grader("18", " ")


@pytest.mark.exhaustive
def test_a_long_answer_is_looked_through_once():
    pieces = [
        "1,",
        "(1, ",
        "x ",
        "$",
        "9",
        "\\boxed{",
        "answer is ",
        "#### ",
        "- ",
        "*",
        "*a ",
        "a*",
    ]
    pieces += [
        "*a*a ",
        " *a*a",
        "**a* ",
        "_a ",
        " _a_",
        "_",
        "`",
        "`a ",
        "<<",
        "<<a",
        "\\text{",
        "\\$",
    ]
    for piece in pieces:
        started = time.process_time()
        for text in (piece * 50_000, f"#### {piece * 50_000}"):
            answer = find_answer(text)
            number_of(answer), answer and answer.line, plain_signs(text), unit_of(text)
        assert time.process_time() - started < 2, piece


@pytest.mark.full
def test_an_answer_that_takes_too_long_is_wrong_and_the_next_is_judged(caplog):
    started = time.monotonic()
    assert math("\\boxed{9^{9^{9^{9}}}}", "2") == {"correct": 0}
    assert "no verdict on an answer within 3 s of CPU" in caplog.text
    assert math("\\boxed{4/2}", "2") == {"correct": 1}
    assert time.monotonic() - started < 60


@pytest.mark.full
def test_mathematics_is_compared_from_any_thread_in_a_few_processes():
    verdicts = {}
    threads = [
        threading.Thread(
            target=lambda n=n: verdicts.update({n: math(f"\\boxed{{{n}/2}}", f"{n / 2}")})
        )
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert verdicts == {n: {"correct": 1} for n in range(8)}


@pytest.mark.full
def test_a_process_that_is_killed_is_an_error_and_not_a_verdict():
    assert math("\\boxed{4/2}", "2") == {"correct": 1}
    process = mathprocess._PROCESSES.free[-1]._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(RolloutError, match="lost the process that compares mathematics"):
        math("\\boxed{4/2}", "2")
    assert math("\\boxed{4/2}", "2") == {"correct": 1}


@pytest.mark.full
def test_the_process_ends_with_the_run():
    code = (
        "from jaxrl_async.scorers import mathprocess as m; "
        "print(m.same_mathematics('1/2', '0.5'), m._PROCESSES.free[-1]._process.pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    verdict, pid = done.stdout.split()
    assert verdict == "True"
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().split()[2] == "Z":  # no process collects it here
                break
        time.sleep(0.05)
    assert time.monotonic() < deadline


@pytest.mark.full
def test_the_first_number_behind_the_mark_is_the_answer():
    assert gsm8k("#### 18 of 20", "18") == {"correct": 1}
    assert gsm8k("#### 18 of 20", "20") == {"correct": 0}
    assert gsm8k("it takes 2 of 18", "18") == {"correct": 1}, "without the mark the last"
