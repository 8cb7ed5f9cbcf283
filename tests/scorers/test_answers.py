"""Where the graders look for an answer, and how they read it."""

import asyncio

import numpy as np
import pytest

from jaxrl_async.scorers import mathprocess
from jaxrl_async.scorers.answers import find_answer, opened_thinking
from jaxrl_async.scorers.graders import exact, gsm8k, math, unreadable
from jaxrl_async.scorers.rewards import Judge, RewardScorer
from jaxrl_async.scorers.units import differ, unit_of
from jaxrl_async.scorers.written_numbers import plain_float
from jaxrl_async.types import Episode, Prompt, StopReason

VERDICTS = [  # grader, completion, reference, right verdict
    # --- reported
    # prose that ends with the answer, behind a formula or amounts of money
    (math, "With $x=5$ we get a total of 73.", "73", 1),
    (math, "With $x=5$ we get a total of 73.", "5", 0),
    (math, "Let $x$ be the number of apples.\n\nThe answer is 18", "18", 1),
    (math, "It costs $18 and the change is $2.", "2", 1),
    (math, "It was $20 and is now $15.\n\nAnswer: 15 dollars", "15", 1),
    (math, "So $a+b=905$, thus it is **73**.", "73", 1),
    # cut off within the last \boxed{}: an earlier box or formula was taken
    (math, "I got \\boxed{5}. Let me check again: \\boxed{", "5", 0),
    (math, "I got \\boxed{5} but wait, maybe \\boxed{7", "5", 0),
    (math, "$x=5$ and so \\boxed{7", "5", 0),
    # thinking is not the answer
    (math, "<think>\\boxed{5}</think>\n7", "5", 0),
    (math, "<think>\\boxed{7}</think>\n5", "5", 1),
    (math, "<think>\\boxed{5} hmm", "5", 0),
    (math, "<think>$x=7$</think>\nThe answer is 5", "5", 1),
    (gsm8k, "<think>maybe 5. Hmm, let me compute 5", "5", 0),
    # scripts without spaces between words
    (gsm8k, "答案是18。", "18", 1),
    (gsm8k, "共18元", "18", 1),
    (gsm8k, "#### 18个", "18", 1),
    (gsm8k, "정답은 18입니다.", "18", 1),
    (math, "정답은 18입니다.", "18", 1),
    (math, "答案：\\boxed{18元}", "18", 1),
    (gsm8k, "共3人18元", "3", 0),
    # numbers below the sixth decimal are not all equal
    (math, "\\boxed{0.0000002}", "0.0000001", 0),
    (math, "\\boxed{\\frac{1}{2^{98}}}", "\\frac{1}{2^{99}}", 0),
    (math, "\\boxed{6.63\\times 10^{-34}}", "1.05\\times 10^{-34}", 0),
    # units that differ
    (math, "\\boxed{12\\text{ m}}", "12\\text{ cm}", 0),
    (math, "\\boxed{5\\text{ minutes}}", "5\\text{ hours}", 0),
    (math, "\\boxed{12}", "12\\text{ cm}", 1),
    (math, "\\boxed{12\\text{ cm}}", "12", 1),
    # thousands in LaTeX and in plain text
    (math, "\\boxed{10\\,000}", "10000", 1),
    (gsm8k, "The answer is 1\u00a0018.", "1018", 1),
    (gsm8k, "\\boxed{10{,}000}", "10000", 1),
    (math, "\\boxed 5", "5", 1),
    # references that are not whole numbers, or floats as JSON and parquet hold them
    (gsm8k, "#### 1/2", "1/2", 1),
    (gsm8k, "10000000000000000", "1e+16", 1),
    (exact, "5", "5.0", 1),
    # signs that must stay
    (gsm8k, "3x", "3", 0),
    (gsm8k, "x2", "2", 0),
    (math, "\\boxed{1331}", "1331 and 1728", 0),
    (math, "\\boxed{[0,1]}", "[0,1)", 0),
    # --- of the same kinds
    # thinking
    (math, "so \\boxed{5}</think>\n\\boxed{7}", "7", 1),
    (math, "so \\boxed{5}</think>\n\\boxed{7}", "5", 0),
    (gsm8k, "5\n</think>\n\n7", "7", 1),
    (gsm8k, "<think>5</think>7<think>5", "7", 0),
    (gsm8k, "<think>5</think>7<think>5", "5", 0),
    (math, "<think>\\boxed{7}</think>\n#### 5", "5", 1),
    (exact, "<think>7</think>\n\n5", "5", 1),
    (exact, "<think>\n5", "5", 0),
    (gsm8k, "[THINK]5[/THINK]7", "7", 1),
    # boxes
    (math, "\\boxed{5} and \\boxed", "5", 0),
    (math, "$\\boxed 5$", "5", 1),
    (math, "\\fbox{5}", "5", 1),
    (gsm8k, "\\boxed{18} after 3 steps", "18", 1),
    (gsm8k, "\\boxed{18} then \\boxed{", "18", 0),
    (math, "\\boxed{\\{1,2\\}}", "\\{1,2\\}", 1),
    (math, "$$\\boxed{\\frac{7}{2}}$$", "7/2", 1),
    (math, "First $5$. Then the final answer is \\boxed{\\frac{7}{2", "5", 0),
    (math, "\\boxed -5", "-5", 1),
    (math, "\\boxed \\frac{1}{2}", "1/2", 1),
    # prose
    (math, "There are $n=12$ boys and the total number of pupils is 30.", "30", 1),
    (math, "There are $n=12$ boys and the total number of pupils is 30.", "12", 0),
    (math, "Since $x+y=10$ and $x-y=2$, we have $x=6$.", "6", 1),
    (math, "Since $x+y=10$ and $x-y=2$, we have $x=6$.", "2", 0),
    (math, "So the area is $12\\pi$.\nThis completes the proof.", "12\\pi", 1),
    (math, "Thus\n\\[\nx = 5\n\\]\n", "5", 1),
    (math, "The answer is\n$$\n18\n$$", "18", 1),
    (math, "**Answer:**\n18", "18", 1),
    (math, "The final answer is $\\frac{1}{2}$. I hope it is correct.", "1/2", 1),
    (math, "The answer is 18. Let me know if you have 3 more questions.", "18", 1),
    (gsm8k, "The answer is 18. That took 3 steps.", "18", 1),
    (math, "The answer is B.", "B", 1),
    (math, "The answer is (B) 5", "B", 0),
    (math, "The probability is 1/2.", "1/2", 1),
    (math, "So the probability is 1/2.", "2", 0),
    (math, "So the probability is 1/2.", "1", 0),
    (math, "So $x=1$ or $x=2$.", "x=2", 0),
    # money
    (math, "It costs €18 and the change is €2.", "2", 1),
    (math, "Tickets cost $12.50 each, so she pays $25.", "25", 1),
    (math, "Tickets cost $12.50 each, so she pays $25.", "12.5", 0),
    (math, "$5 + $3 = $8", "8", 1),
    (math, "He has \\$5 and \\$7, in total \\$12.", "12", 1),
    (math, "\\boxed{\\$12}", "12", 1),
    (math, "$20", "20", 1),
    (math, "20$", "20", 1),
    (math, "\\boxed{5}", "\\$5", 1),
    (math, "The total is $1,234.50.", "1234.5", 1),
    (math, "He paid $5 for $x=3$ kilos, $15 in all.", "15", 1),
    (math, "€5", "$5", 0),
    (math, "\\boxed{€5}", "5", 1),
    (gsm8k, "€18", "18", 1),
    (gsm8k, "#### €18", "$18", 0),
    # scripts
    (gsm8k, "คำตอบคือ18", "18", 1),
    (gsm8k, "Ответ: 18яблок", "18", 1),
    (gsm8k, "答え：18個", "18", 1),
    (gsm8k, "答えは１８です。", "18", 1),
    (gsm8k, "答案是**18**元", "18", 1),
    (gsm8k, "共18万", "18", 0),
    (gsm8k, "18分之5", "5", 0),
    (gsm8k, "一共有3个，18元", "18", 1),
    (gsm8k, "1，018", "18", 0),
    (gsm8k, "الجواب ١٨", "18", 1),
    (math, "答え：18個", "18", 1),
    (math, "Ответ: 18яблок", "18", 1),
    (math, "คำตอบคือ18", "18", 1),
    (math, "答案是$x=18$。", "18", 1),
    (math, "所以一共是18元。", "18", 1),
    (math, "\\boxed{18万}", "18", 0),
    (math, "\\boxed{5或7}", "7", 0),
    (math, "\\boxed{18개}", "18", 1),
    (math, "18", "18元", 1),
    (math, "\\boxed{\\text{18元}}", "18", 1),
    (gsm8k, "3𝑥", "3", 0),
    (gsm8k, "é3", "3", 0),
    (gsm8k, "18é", "18", 0),
    (gsm8k, "2π", "2", 0),
    (gsm8k, "5②", "5", 0),
    # thousands
    (gsm8k, "10\\ 000", "10000", 1),
    (gsm8k, "1\u2009018", "1018", 1),
    (gsm8k, "1\u202f018 dollars", "1018", 1),
    (math, "\\boxed{1\u2009018}", "1018", 1),
    (math, "\\boxed{10{,}000}", "10000", 1),
    (math, "10,\\!000", "10000", 1),
    (math, "\\boxed{10000}", "10{,}000", 1),
    (math, "\\boxed{1\\,234\\,567}", "1234567", 1),
    (gsm8k, "1'234'567", "1234567", 1),
    # small
    (math, "0.00000012", "0.00000011", 0),
    (math, "\\boxed{1/2006!}", "1/2004!", 0),
    (math, "$x=0.0000002$", "x=0.0000001", 0),
    (math, "\\boxed{(0.0000001,2)}", "(0.0000002,2)", 0),
    (math, "\\boxed{\\{0.0000001,2\\}}", "\\{0.0000002,2\\}", 0),
    (math, "\\boxed{10^{-9}}", "10^{-10}", 0),
    (math, "\\boxed{10^{-9}}", "0.000000001", 1),
    (math, "\\boxed{1.05\\times10^{-34}}", "1.05\\times 10^{-34}", 1),
    (math, "\\boxed{0.333333}", "1/3", 1),
    (math, "\\boxed{0.166667}", "1/6", 1),
    (math, "0.0000001x", "0.0000002x", 0),
    (math, "\\boxed{0}", "0.0000001", 0),
    (math, "\\boxed{9\\%}", "9", 1),
    (math, "\\boxed{0.09}", "9\\%", 1),
    (math, "\\boxed{3.141593}", "\\pi", 1),
    (math, "\\boxed{[0,0.0000001]}", "[0,0.0000002]", 0),
    (
        math,
        "\\boxed{\\begin{pmatrix}0.0000001\\\\1\\end{pmatrix}}",
        "\\begin{pmatrix}0.0000002\\\\1\\end{pmatrix}",
        0,
    ),
    (math, "\\boxed{x<0.0000001}", "x<0.0000002", 0),
    (math, "\\boxed{e^{-40}}", "e^{-41}", 0),
    (math, "\\boxed{0.0000001i}", "0.0000002i", 0),
    (math, "\\boxed{2^{-99}}", "\\frac{1}{2^{99}}", 1),
    # units
    (math, "\\boxed{5\\text{ kg}}", "5\\text{ g}", 0),
    (math, "12 dollars", "12 cents", 0),
    (math, "The answer is 12 m", "12 cm", 0),
    (math, "\\boxed{5\\,\\mathrm{kg}}", "5\\,\\mathrm{kg}", 1),
    (math, "\\boxed{5\\text{ m}^2}", "5\\text{ m}", 0),
    (math, "\\boxed{5\\text{ km/h}}", "5\\text{ m/s}", 0),
    (math, "\\boxed{5\\text{ minutes}}", "5\\text{ min}", 1),
    (math, "\\boxed{5\\text{ m}^2}", "5\\text{ square meters}", 1),
    (math, "5 hours", "5\\text{ hours}", 1),
    (math, "\\boxed{\\$5}", "5\\text{ dollars}", 1),
    (math, "5 hours", "5", 1),
    (math, "\\boxed{90^\\circ}", "90", 1),
    (math, "\\boxed{90^\\circ}", "90\\text{ degrees}", 1),
    (math, "\\boxed{12m}", "12m", 1),
    (gsm8k, "#### 12 cm", "12 m", 0),
    (gsm8k, "12 cm", "12", 1),
    (math, "\\boxed{3\\sqrt{2}\\text{ cm}}", "3\\sqrt{2}\\text{ m}", 0),
    (math, "\\boxed{6.63\\times10^{-34}\\text{ J s}}", "6.63\\times10^{-34}", 1),
    (math, "\\boxed{18\\text{ apples}}", "18", 1),
    # equal
    (math, "no solution", "no solution", 1),
    (math, "\\boxed{\\text{no solution}}", "no solution", 1),
    (math, "\\begin{odd", "\\begin{odd", 1),
    (gsm8k, "#### (1,2)", "(1,2)", 1),
    (gsm8k, "x+1", "x+1", 1),
    (math, "$", "$", 1),
    (math, "There are 5 apples", "There are 5 apples", 1),
    (gsm8k, "1/2", "1/2", 1),
    (gsm8k, "#### 18 of 20", "18", 1),
    (gsm8k, "#### 18 of 20", "20", 0),
    (gsm8k, "1 or 2", "2", 0),
    (gsm8k, "9*2=<<9*2=18>>18\n#### 18", "9*2=<<9*2=18>>18\n#### 18", 1),
    (math, "18", "9*2=18\n#### 18", 1),
    (math, "\\boxed{5}", "So $x+1=6$ and \\boxed{5}.", 1),
    (exact, "100000", "100000.0", 1),
    (exact, "0.00001", "1e-05", 1),
    (exact, "5.0", "5", 0),
    (exact, "2.5", "2.5", 1),
    (gsm8k, "0.00001", "1e-05", 1),
    (math, "10000000000000000", "1e+16", 1),
    (gsm8k, "The answer is in the box below:\n18", "18", 1),
    (gsm8k, "It is 18.\nDone.", "18", 1),
    (gsm8k, "#### Conclusion\nThe answer is 18", "18", 1),
    (math, "#### Conclusion\nThe answer is $x=5$", "5", 1),
    (math, "I think \\(x=5\\) so the total is 15.", "15", 1),
    (math, "x = \\frac{1}{2}", "1/2", 1),
    (math, "We get \\(\\frac{1}{2}\\).", "1/2", 1),
    (math, "<answer>18</answer>", "18", 1),
    (math, "So it is $x^2+1$", "x^2+1", 1),
    (math, "\\boxed{\\mathrm{e}}", "e", 1),
    (math, "\\boxed{\\varnothing}", "\\emptyset", 1),
    # --- more of them
    (gsm8k, "1 2", "12", 0),
    (math, "1 2", "12", 0),
    (math, "( 1 , 2 )", "(1,2)", 1),
    (math, "5 minutes", "5 hours", 0),
    (math, "It takes 5 minutes.", "5 hours", 0),
    (math, "\\boxed{3\\text{ kg}}", "3\\text{ g}", 0),
    (math, "The mass is $3$ kg.", "3 g", 0),
    (math, "The mass is $3$ kg.", "3 kg", 1),
    (math, "The mass is 3 kg", "3", 1),
    (math, "the price is €5", "€5", 1),
    (math, "the price is €5", "5", 1),
    (math, "It costs €3 and then $5.", "5", 1),
    (math, "It costs $3 and then €5.", "5", 1),
    (math, "It costs $3 and then €5.", "3", 0),
    (math, "$\\$5$", "5", 1),
    (math, "$5.00", "5", 1),
    (math, "It costs $5.", "$5$", 1),
    (gsm8k, "It costs $5.", "5", 1),
    (math, "x=3だから、合計は7です。", "7", 1),
    (math, "したがって答えは $\\frac{1}{2}$ です。", "1/2", 1),
    (math, "答えは\\(7\\)です", "7", 1),
    (gsm8k, "合計は1,018円です。", "1018", 1),
    (gsm8k, "전체는 1,018원", "1018", 1),
    (gsm8k, "มี18คน", "18", 1),
    (gsm8k, "Всего 18 яблок.", "18", 1),
    (gsm8k, "Всего 18 тысяч", "18", 0),
    (gsm8k, "18千克", "18", 1),
    (gsm8k, "18千", "18", 0),
    (gsm8k, "三分之18", "18", 0),
    (math, "<think>\nfoo $5$\n</think>\n\nThe answer is $\\boxed{7}$.", "7", 1),
    (math, "foo $5$\n</think>\n\nSo it's 7", "7", 1),
    (math, "foo $5$\n</think>\n\nSo it's 7", "5", 0),
    (gsm8k, "<think>x</think>\n\n#### 18", "18", 1),
    (gsm8k, "<think>#### 18", "18", 0),
    (gsm8k, "</think>18", "18", 1),
    (math, "\\boxed{5}\n\nWait, \\boxed{6} or \\boxed{", "6", 0),
    (math, "\\boxed{\\frac{1}{2", "1/2", 0),
    (math, "$$\\boxed{x=5$$", "5", 0),
    (math, "\\boxed{1.05\\times10^{-34}}", "6.63\\times10^{-34}", 0),
    (math, "1e-9", "2e-9", 0),
    (math, "\\boxed{3\\times10^{-8}}", "3\\times10^{-8}\\text{ m}", 1),
    (math, "\\boxed{\\frac{1}{10^{10}}}", "10^{-10}", 1),
    (math, "\\boxed{0.00001}", "\\frac{1}{100000}", 1),
    (math, "\\boxed{(1,2)}", "(1,2)", 1),
    (math, "\\boxed{x\\in[0,1]}", "[0,1]", 1),
    (math, "\\boxed{0<x<12.5}", "(0,12.5)", 1),
    (math, "\\boxed{\\text{There are } 5 \\text{ apples}}", "5", 1),
    (math, "\\boxed{1,000,000}", "1000000", 1),
    (math, "\\boxed{5{,}000\\text{ dollars}}", "5000", 1),
    (math, "\\boxed{18\\%}", "18", 1),
    (math, "\\boxed{\\dfrac{7}{2}}", "3.5", 1),
    (math, "So the answer is $\\frac{3}{4}$ of the pie.", "\\frac{3}{4}", 1),
    (math, "The answer is (C).", "C", 1),
    (math, "\\boxed{\\text{(C)}}", "C", 1),
    (math, "C", "C", 1),
    (math, "D", "C", 0),
    (math, "#### 18", "18", 1),
    (math, "The final answer is: $\\boxed{18}$", "18", 1),
    (math, "18 cm^2", "18 cm", 0),
    (math, "\\boxed{18\\text{ cm}^2}", "18\\text{ cm}^2", 1),
    (math, "12 in.", "12 ft", 0),
    (math, "12 inches", "12 feet", 0),
    (math, "90°", "90^\\circ", 1),
    (math, "\\boxed{5\\text{ s}}", "5\\text{ seconds}", 1),
    (math, "5 hrs", "5 hours", 1),
    (math, "\\boxed{5\\ \\mathrm{m/s}}", "5\\ \\mathrm{km/h}", 0),
    (math, "\\boxed{10\\text{ cents}}", "10\\text{ dollars}", 0),
    (math, "\\$10", "10 cents", 0),
    (math, "$10", "10 cents", 0),
    (math, "10¢", "$10", 0),
    (math, "10%", "10 dollars", 0),
    (gsm8k, "18 cents", "$18", 0),
    (gsm8k, "18 dollars", "$18", 1),
    (gsm8k, "18 apples", "18", 1),
    (gsm8k, "She has 18 oranges left.", "18 apples", 1),
    (gsm8k, "The answer is 18 apples and not 20.", "18", 0),
    (gsm8k, "answer: 18", "18", 1),
    (gsm8k, "Answer: **18**", "18", 1),
    (gsm8k, "So 5 + 13 = 18", "18", 1),
    (gsm8k, "The answer is 5 + 13 = 18", "18", 1),
    (gsm8k, "-5", "−5", 1),
    (gsm8k, "minus 5", "-5", 0),
    (gsm8k, "0.5", ".5", 1),
    (gsm8k, "5.", "5", 1),
    (gsm8k, "18.00", "18", 1),
    (exact, "C#", "C#", 1),
    (exact, "5.50", "5.5", 0),
    (exact, "10", "1e+1", 1),
    (math, "$x^2$", "x^2", 1),
    (math, "x^2 ", "x^2", 1),
    (math, "\\frac{1}{2", "\\frac{1}{2", 1),
    (gsm8k, "no", "no", 1),
    (math, "Paris", "Paris", 1),
    (math, "\\boxed{Paris}", "Paris", 1),
    (math, "The capital is Paris", "Paris", 0),
    (math, "I got $5$ at first. So the answer is 7.", "7", 1),
    (math, "I got $5$ at first. So the answer is 7.", "5", 0),
    (math, "The answer is 7, since $5+2=7$.", "7", 1),
    (math, "**Final Answer**\n\n$$x = 7$$", "7", 1),
    (math, "**Final Answer**: \\(7\\)", "7", 1),
    (math, "Final answer: $7$", "7", 1),
    (math, "Final Answer: The final answer is $7$. I hope it is correct.", "7", 1),
    (math, "Answer: 1/2", "0.5", 1),
    (math, "= 1/2", "0.5", 1),
    (math, "so p = 0.5", "1/2", 1),
    (math, "therefore x is \\frac{1}{2}", "1/2", 1),
    (math, "We find that the limit equals $\\infty$", "\\infty", 1),
    (math, "\\boxed{-\\infty}", "\\infty", 0),
    (math, "\\boxed{10}", "10\\,000", 0),
    (math, "\\boxed{1\\,018}", "1\\ 018", 1),
    (math, "1\u202f018", "1018", 1),
    (math, "so we get 1\u00a0018 in total", "1018", 1),
    # --- and money, lists and units in sentences
    (math, "<think>\\boxed{5}</think>", "5", 0),
    (gsm8k, "<think>18</think>", "18", 0),
    (gsm8k, "18 €", "18", 1),
    (math, "18 €", "18", 1),
    (math, "It costs 18€ and the change is 2€", "2", 1),
    (math, "It costs 18€ and the change is 2€", "18", 0),
    (math, "$x$ costs $18.", "18", 1),
    (math, "The price is $18 (that is, $x=18$).", "18", 1),
    (math, "US$18", "18", 1),
    (gsm8k, "US$18", "18", 1),
    (math, "18 USD", "18", 1),
    (math, "The total is $3x$.", "3x", 1),
    (math, "The total is $3x$.", "3", 0),
    (math, "$2^{10}$ is 1024", "1024", 1),
    (math, "\\( x = 5 \\) so total \\( 73 \\)", "73", 1),
    (math, "We know \\(x=5\\), hence there are 73 of them.", "73", 1),
    (math, "Each of the $12$ boxes holds $6$ eggs: 72 eggs.", "72", 1),
    (math, "Each of the $12$ boxes holds $6$ eggs: 72 eggs.", "6", 0),
    (math, "She spent $12 on $3$ books and has $5 left.", "5", 1),
    (math, "Cost: $12.50", "12.5", 1),
    (math, "He owes $-5$ dollars.", "-5", 1),
    (math, "profit of $1,200", "1200", 1),
    (math, "between $5 and $10", "5", 0),
    (math, "The answer is $5 \\text{ or } 7$", "5", 0),
    (math, "$x = 5$ or $x=7$", "\\{5,7\\}", 1),
    (math, "x = 5 or x = 7", "7", 0),
    (math, "答案是\\(\\frac{1}{2}\\)。", "\\frac{1}{2}", 1),
    (math, "因此答案为 \\boxed{18}。", "18", 1),
    (math, "合計$18です", "18", 1),
    (math, "答えは 18 円です。", "18", 1),
    (gsm8k, "答えは 18 円です。", "18", 1),
    (gsm8k, "そのため、18個のりんごがあります。", "18", 1),
    (gsm8k, "정답: 18개입니다", "18", 1),
    (gsm8k, "그래서 총 18마리", "18", 1),
    (gsm8k, "ดังนั้นมี 18 ตัว", "18", 1),
    (gsm8k, "итого 18руб.", "18", 1),
    (gsm8k, "итого 18%", "18", 1),
    (gsm8k, "x18", "18", 0),
    (gsm8k, "18a", "18", 0),
    (gsm8k, "α18", "18", 0),
    (gsm8k, "18α", "18", 0),
    (math, "\\boxed{0.00000001}", "0", 0),
    (math, "\\boxed{1.38\\times10^{-23}}", "1.38\\times 10^{-23}", 1),
    (math, "\\boxed{1.38\\times10^{-23}}", "1.38\\times 10^{-24}", 0),
    (math, "1.6 \\times 10^{-19}", "9.1 \\times 10^{-31}", 0),
    (math, "\\boxed{\\frac{1}{3000000}}", "\\frac{1}{4000000}", 0),
    (math, "\\boxed{\\frac{1}{3000000}}", "0.000000333333", 1),
    (math, "\\boxed{\\sqrt{2}}", "1.414214", 1),
    (math, "\\boxed{1.4142}", "\\sqrt{2}", 0),
    (math, "\\boxed{3\\text{ hours}}", "3\\text{ days}", 0),
    (math, "\\boxed{3\\text{ km}}", "3\\text{ miles}", 0),
    (math, "\\boxed{3\\text{ m/s}}", "3\\text{ m}", 0),
    (math, "\\boxed{3\\text{ cm}^3}", "3\\text{ cm}^2", 0),
    (math, "\\boxed{3\\,\\text{cm}^{2}}", "3\\text{ cm}^2", 1),
    (math, "\\boxed{3\\text{ square units}}", "3", 1),
    (math, "\\boxed{3\\text{ units}}", "3\\text{ units}", 1),
    (math, "\\boxed{12\\text{ eggs}}", "12\\text{ eggs}", 1),
    (math, "The area is 12 square feet.", "12\\text{ ft}^2", 1),
    (math, "The area is 12 square feet.", "12", 1),
    (math, "\\boxed{30^\\circ}", "30^{\\circ}", 1),
    (math, "$30^\\circ$", "30", 1),
    (math, "\\boxed{30\\text{ degrees}}", "30\\text{ radians}", 0),
    (math, "\\boxed{50\\%}", "0.5", 1),
    (math, "\\boxed{0.5}", "50\\%", 1),
    (math, "50%", "50\\%", 1),
    (math, "50 percent", "50\\%", 1),
    (math, "\\boxed{10{,}000}", "10,000", 1),
    (math, "10 000", "0", 0),
    (math, "10 000", "10000", 1),
    (math, "1 2", "2", 0),
    (gsm8k, "10 000", "0", 0),
    (math, "\\boxed{12\\,345.6}", "12345.6", 1),
    (gsm8k, "\\boxed{10\\,000}", "10000", 1),
    (gsm8k, "10~000", "10000", 1),
    (gsm8k, "$10{,}000$", "10000", 1),
    (math, "\\boxed{ 5 }", "5", 1),
    (math, "\\boxed{\\boxed{5}}", "5", 1),
    (math, "\\boxed{5}.", "5", 1),
    (math, "$\\boxed{5}$ apples", "5", 1),
    (math, "\\boxed{5} and \\boxed{6}", "5", 0),
    (math, "\\boxed{5}\n#### 6", "5", 1),
    (gsm8k, "Answer: 18 (rounded)", "18", 1),
    (gsm8k, "The final answer is 18!", "18", 1),
    (gsm8k, "**18**", "18", 1),
    (math, "5", "5.0", 1),
    (math, "5.0", "5", 1),
    (gsm8k, "5", "5.0", 1),
    (gsm8k, "5.0", "5.0", 1),
    (exact, "5.0", "5.0", 1),
    (exact, "-3", "-3.0", 1),
    (math, "The answer is not 5.", "5", 0),
    (math, "Is the answer 5? No, the answer is 7.", "7", 1),
    (math, "So, the number of ways is $\\binom{5}{2} = 10$.", "10", 1),
    (math, "Hence $f(2) = 7$.", "7", 1),
    (math, "Hence $f(2) = 7$.", "2", 0),
    (math, "x = 5, y = 3", "5", 0),
    (math, "Answer: x=5", "5", 1),
    (math, "#### x = 5", "5", 1),
    (math, "#### \\frac{1}{2}", "0.5", 1),
    (math, "#### $5", "5", 1),
    (math, "#### 5 dollars", "5", 1),
]


@pytest.fixture(scope="module", autouse=True)
def no_process_stays():
    yield
    mathprocess._PROCESSES.close()


def test_graders_read_the_answer_that_is_meant():
    found = [(g.__name__, c, r, int(g(c, r)["correct"])) for g, c, r, _ in VERDICTS]
    assert found == [(g.__name__, c, r, right) for g, c, r, right in VERDICTS]


@pytest.mark.parametrize(
    ("text", "mark", "answer"),
    [
        ("\\boxed{1} and \\boxed{\\frac{1}{2}}.", "box", "\\frac{1}{2}"),
        ("#### 1\n\\boxed{2}", "box", "2"),
        ("\\boxed{\\{1\\}}", "box", "\\{1\\}"),
        ("The answer is 1.\n#### 2", "####", "2"),
        ("#### The sum\nThe answer is 1.5. So there.", "said", "1.5"),
        ("The answer is: 1\nThe answer is: 2\nDone.", "said", "2"),
        ("The answer is\n\\[\n2\n\\]", "said", "\\[ 2 \\]"),
        ("The answer is in the box below:\n18", "end", "18"),
        ("x = 1\ny = 2\nI hope that this helps!", "end", "y = 2"),
        ("<think>1</think>2", "end", "2"),
        ("1</think>2", "end", "2"),
        ("答案：２", "said", "２"),
    ],
)
def test_one_place_of_a_text_has_its_answer(text, mark, answer):
    found = find_answer(text)
    assert (found.mark, found.line) == (mark, answer)


@pytest.mark.parametrize(
    "text", ["<think>5", "a</think>5<think>6", "\\boxed{5} \\boxed{6", "\\boxed"]
)
def test_a_text_that_was_cut_off_has_no_answer(text):
    assert find_answer(text) is None


def test_a_prompt_opens_thinking_where_it_ends_with_the_mark():
    assert opened_thinking("<|assistant|>\n<think>\n") == "<think>"
    assert opened_thinking("[THINK]") == "[THINK]"
    for text in ("", "Use <think>, please.", "<think>\n\n</think>\n\n"):
        assert opened_thinking(text) == ""


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("12\\text{ cm}", {"cm": 1}),
        ("12 m^2", {"m": 2}),
        ("12\\text{ square meters}", {"m": 2}),
        ("3\\,\\mathrm{m/s^2}", {"m": 1, "s": -2}),
        ("3 m s^{-1}", {"m": 1, "s": -1}),
        ("3 meters per second", {"m": 1, "s": -1}),
        ("60 mph", {"mi": 1, "h": -1}),
        ("it takes 5 minutes in all", {"min": 1}),
        ("\\$5", {"usd": 1}),
        ("18元", {"yuan": 1}),
        ("90^{\\circ}", {"°": 1}),
        ("12 apples", {}),
        ("2m+3s", {}),
        ("x + 1", {}),
    ],
)
def test_the_unit_behind_an_answer(text, unit):
    assert unit_of(text) == unit


def test_units_differ_only_where_both_are_known():
    assert differ("5 m", "5 cm") and differ("$5", "5 cents")
    assert (
        not differ("5 m", "5") and not differ("5 apples", "5 cm") and not differ("5 h", "5 hours")
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("5.0", "5"),
        ("-5.0", "-5"),
        ("1e+16", "10000000000000000"),
        ("1e-05", "0.00001"),
        ("1.5e+20", "150000000000000000000"),
        ("2.5", "2.5"),
        ("5", "5"),
        ("x.0", "x.0"),
        ("1e+999999", "1e+999999"),
    ],
)
def test_a_float_is_written_as_people_write_it(written, meant):
    assert plain_float(written) == meant


def test_a_grader_says_which_references_it_cannot_read():
    assert [unreadable(gsm8k, r) for r in ("18", "#### 18", "$1,018", "1/2", "blue", " ")] == [
        False,
        False,
        False,
        True,
        True,
        True,
    ]
    assert [unreadable(math, r) for r in ("18", "\\frac{1}{2}", "x^2", "[0,1)", "\\frac{")] == [
        False,
        False,
        False,
        False,
        True,
    ]
    assert [unreadable(exact, r) for r in ("blue", "")] == [False, True]


def test_thinking_that_the_prompt_opened_counts_as_opened():
    def spell(ids):
        return "".join(map(chr, ids))

    def judged(grader, prompt, answer):
        ids = np.array([ord(c) for c in prompt + answer], np.int32)
        drawn = np.arange(len(ids)) >= len(prompt)
        episode = Episode(
            token_ids=ids,
            drawn=drawn,
            logprobs=np.zeros(len(ids), np.float32),
            versions=np.where(drawn, 0, -1).astype(np.int32),
            stop=StopReason.EOS,
        )
        asked = Prompt(prompt_id=0, position=0, token_ids=ids[~drawn], text="q", reference="5")
        judges = [Judge(function=grader, name="grader")]
        scorer = RewardScorer(judges, spell, timeout_s=20.0)
        (score,) = asyncio.run(scorer((episode,), asked))
        return score.reward

    for grader in (exact, gsm8k, math):
        assert judged(grader, "q<think>\n", "5") == 0, "the thinking never ends"
        assert judged(grader, "q<think>\n", "7</think>5") == 1
        assert judged(grader, "q<think>\n\n</think>\n\n", "5") == 1
