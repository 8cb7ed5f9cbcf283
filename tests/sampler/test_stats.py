"""Statistics of samplers: how readings of several become one."""

from dataclasses import fields

from jaxrl_async.sampler.stats import SamplerStats


def test_counters_add_gauges_hold_now_and_of_the_largest_one_stays():
    earlier = SamplerStats(blocks=5, in_flight=3, used_page_share=0.5, max_probe_error=0.2)
    now = SamplerStats(blocks=2, in_flight=1, used_page_share=0.25, max_probe_error=0.1)
    both = now.after(earlier)
    assert (both.blocks, both.in_flight, both.used_page_share) == (7, 1, 0.25)
    assert both.max_probe_error == 0.2
    gone = both.ended()
    assert (gone.blocks, gone.in_flight, gone.used_page_share) == (7, 0, 0.0)


def test_side_by_side_times_and_shares_are_means_and_requests_add():
    first = SamplerStats(busy_s=2.0, in_flight=3, used_page_share=0.5, compiled_programs=2)
    second = SamplerStats(busy_s=4.0, in_flight=1, used_page_share=0.0, compiled_programs=3)
    both = first.merged_with([second])
    assert (both.busy_s, both.in_flight, both.used_page_share) == (3.0, 4, 0.25)
    assert both.compiled_programs == 5
    assert second.after(first).compiled_programs == 3, "a replica's programs outlive it"
    assert first.merged_with([]) is first


def test_nothing_came_before_the_first_one():
    reading = SamplerStats(**{f.name: i for i, f in enumerate(fields(SamplerStats), 1)})
    assert reading.after(SamplerStats()) == reading
