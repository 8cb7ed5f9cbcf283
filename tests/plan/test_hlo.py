"""Programs' texts are read as XLA counts them: on texts by hand, and on small compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_async.plan.chips import CHIPS
from jaxrl_async.plan.cost import cost_of, group_axes, parse_groups
from jaxrl_async.plan.hlo import arrays_of, bytes_of, parse, trip_count
from jaxrl_async.plan.pace import pace_of

MESH = {"data": 2, "fsdp": 4}


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile()


def cost(program, mesh=MESH, **more):
    return cost_of(parse(program.as_text()), mesh, pace_of(CHIPS["v5e"]), **more)


def test_shapes_of_tuples_and_layouts_are_read():
    shape = "(bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/f32[], (s32[3]{0}))"
    assert arrays_of(shape) == (("bf16", (8, 128)), ("f32", ()), ("s32", (3,)))
    assert bytes_of(shape) == 8 * 128 * 2 + 4 + 12


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("HloModule x\n")


def test_products_in_a_loop_count_as_often_as_it_turns():
    """XLA's own cost_analysis counts the body once."""

    def seven_products(x, w):
        return jax.lax.fori_loop(0, 7, lambda _, y: jnp.tanh(y @ w), x)

    x, w = jnp.zeros((16, 32)), jnp.zeros((32, 32))
    program = compiled(seven_products, x, w)
    assert cost(program).flops == 7 * 2 * 16 * 32 * 32
    assert program.cost_analysis()["flops"] < 2 * 2 * 16 * 32 * 32


def test_nested_loops_multiply():
    def inner(y, w):
        return jax.lax.fori_loop(0, 3, lambda _, z: jnp.sin(z @ w), y)

    def outer(y, w):
        return jax.lax.fori_loop(0, 5, lambda _, z: inner(z, w), y)

    y = jnp.zeros((8, 8))
    assert cost(compiled(outer, y, y)).flops == 15 * 2 * 8 * 8 * 8


def test_a_loop_that_data_ends_turns_as_often_as_is_said():
    def until_small(x):
        return jax.lax.while_loop(lambda y: y.sum() > 1, lambda y: jnp.sin(y @ y), x)

    program = compiled(until_small, jnp.ones((8, 8)))
    each = 2 * 8 * 8 * 8
    assert cost(program).flops == 0
    assert cost(program, open_turns=(4.0,)).flops == 4 * each


@pytest.mark.parametrize("loops", [1, 5])
def test_of_a_conditional_the_costliest_branch_counts(loops):
    """One runs, and the text does not say which: 3 products of 8 x 8 x 8 here, 1 or none there."""

    def one(x):
        return jnp.sin(x @ x)

    def three(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y @ y), x)

    branches = [lambda x: x + 1, three, one]

    def several(n, x):
        return jax.lax.fori_loop(0, loops, lambda _, y: jax.lax.switch(n, branches, y), x)

    program = compiled(several, jnp.int32(0), jnp.ones((8, 8)))
    assert "branch_computations=" in program.as_text()
    assert cost(program).flops == loops * 3 * 2 * 8 * 8 * 8


def test_of_two_branches_the_costlier_counts_wherever_it_stands():
    def both(few, x, w):
        return jax.lax.cond(few, lambda: x @ w, lambda: (x @ w) @ w)

    x, w = jnp.zeros((4, 16)), jnp.zeros((16, 16))
    assert cost(compiled(both, True, x, w)).flops == 2 * 2 * 4 * 16 * 16
    program = compiled(lambda few, x, w: both(~few, x, w), True, x, w)
    assert cost(program).flops == 2 * 2 * 4 * 16 * 16


def test_a_branch_in_a_branch_is_chosen_for_itself():
    def product(x):
        return jnp.sin(x @ x)

    def inner(few, x):
        return jax.lax.cond(few, lambda: x + 1, lambda: product(x))

    def outer(few, many, x):
        return jax.lax.cond(few, lambda: product(inner(many, x)), lambda: product(x))

    program = compiled(outer, True, True, jnp.zeros((8, 8)))
    assert cost(program).flops == 2 * 2 * 8 * 8 * 8


@pytest.mark.parametrize(
    "branches",
    ["branch_computations={%other, %one}", "true_computation=%one, false_computation=%other"],
)
def test_named_branches_are_followed(branches):
    text = """HloModule m

%one (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  ROOT %d = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%other (y: f32[4,4]) -> f32[4,4] {
  ROOT %y = f32[4,4]{1,0} parameter(0)
}

ENTRY %main (n: s32[], a: f32[4,4]) -> f32[4,4] {
  %n = s32[] parameter(0)
  %a = f32[4,4]{1,0} parameter(1)
  ROOT %c = f32[4,4]{1,0} conditional(%n, %a, %a), BRANCHES
}
""".replace("BRANCHES", branches)
    assert cost_of(parse(text), {"fsdp": 1}, pace_of(CHIPS["v5e"])).flops == 2 * 4**3


@pytest.mark.parametrize(
    ("queries", "keys", "flops"),
    [
        ("bf16[32,8192,128]", "bf16[8,8192,128]", 2 * 32 * 8192 * 8192 * 128),
        ("bf16[32,1024,128]", "bf16[8,8192,128]", 2 * 32 * 1024 * 8192 * 128),  # context 8
        ("bf16[2,4,512,128]", "bf16[2,4,2048,128]", 2 * 2 * 4 * 512 * 2048 * 128),  # two rows
    ],
)
def test_splash_attention_sees_half_of_the_keys(queries, keys, flops):
    """Two products of 2 t * T * K each, half of it above the diagonal."""
    text = f"""HloModule m

ENTRY %main (m: s8[1,16,16], q: {queries}, k: {keys}) -> {queries} {{
  %m = s8[1,16,16] parameter(0)
  %q = {queries} parameter(1)
  %k = {keys} parameter(2)
  ROOT %splash_mha_fwd.2 = {queries} custom-call(%m, %q, %k, %k), TARGET, LAYOUTS
}}
""".replace("TARGET", 'custom_call_target="tpu_custom_call"').replace(
        "LAYOUTS",
        f"operand_layout_constraints={{s8[1,16,16]{{2,1,0}}, {queries}{{}}, {keys}{{}}, {keys}{{}},"
        " s32[8192,128]{1,0}, s32[8,8192]{1,0}}",
    )
    (kernel,) = cost_of(parse(text), {"fsdp": 1}, pace_of(CHIPS["v5e"])).kernels
    assert kernel.flops == flops
    assert (kernel.length, kernel.width) == arrays_of(keys)[0][1][-2:]


@pytest.mark.parametrize(("expert", "rows", "used"), [(1, 65536, 32), (4, 65536, 32), (1, 1, 1)])
def test_experts_products_are_counted_from_rows_and_matrices(expert, rows, used):
    """Of rows over an axis of 4 a fourth is a device's own; one row reads one expert's matrix."""
    out, x, matrices = f"f32[{rows},768]", f"bf16[{rows},2048]", "bf16[32,2048,768]"
    text = f"""HloModule m

ENTRY %main (x: {x}, w: {matrices}) -> {out} {{
  %x = {x} parameter(0)
  %w = {matrices} parameter(1)
  ROOT %ragged-dot-none.2 = {out} custom-call(%x, %w), TARGET, LAYOUTS
}}
""".replace("TARGET", 'custom_call_target="tpu_custom_call"').replace(
        "LAYOUTS", f"operand_layout_constraints={{s32[33]{{0}}, {x}{{1,0}}, {matrices}{{2,1,0}}}}"
    )
    (kernel,) = cost_of(parse(text), {"fsdp": 2, "expert": expert}, pace_of(CHIPS["v5e"])).kernels
    own = rows / expert
    assert kernel.flops == 2 * own * 2048 * 768
    wanted = own * (4 * 768 + 2 * 2048) + used * 2 * 2048 * 768
    assert kernel.num_bytes == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("name", "rows", "vocab", "cycles"),
    [
        ("draw_token", 128, 151_936, 16 * 38 * 290),
        ("draw_token", 5, 4_097, 2 * 290),
        ("draw_truncated", 128, 151_936, 16 * 38 * 3100),
    ],
)
def test_drawing_a_token_by_the_kernel_has_cycles(name, rows, vocab, cycles):
    text = f"""HloModule draw
ENTRY %main (l: f32[{rows},{vocab}]) -> s32[{rows},1] {{
  %l = f32[{rows},{vocab}]{{1,0}} parameter(0)
  ROOT %{name}.1 = s32[{rows},1]{{1,0}} custom-call(%l), TARGET, LAYOUTS
}}
"""
    text = text.replace("TARGET", 'custom_call_target="tpu_custom_call"').replace(
        "LAYOUTS", f"operand_layout_constraints={{f32[{rows},{vocab}]{{1,0}}}}"
    )
    chip = CHIPS["v6e"]
    cost = cost_of(parse(text), {}, pace_of(chip))
    assert cost.compute_s == pytest.approx(cycles / chip.clock_hz)


def test_an_instruction_that_the_compiler_cannot_estimate_takes_its_roofline():
    """It writes the largest number there is in place of cycles: hundreds of years each."""
    text = """HloModule m

ENTRY %main (x: bf16[16,4096], w: bf16[4096,12288]) -> bf16[16,12288] {
  %x = bf16[16,4096]{1,0} parameter(0)
  %w = bf16[4096,12288]{1,0} parameter(1)
  ROOT %d = bf16[16,12288]{1,0} dot(%x, %w), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}, backend_config={"estimated_cycles":"9223372036854775807"}
}
"""
    num_bytes = 2 * (16 * 4096 + 4096 * 12288 + 16 * 12288)
    cost = cost_of(parse(text), {"fsdp": 1}, pace_of(CHIPS["v5e"]))
    assert cost.compute_s == pytest.approx(num_bytes / CHIPS["v5e"].hbm_bytes_per_s)


def test_a_counter_s_start_step_and_bound_decide_the_turns():
    text = """HloModule m

%body (p: (s32[], f32[2])) -> (s32[], f32[2]) {
  %p = (s32[], f32[2]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %x = f32[2]{0} get-tuple-element(%p), index=1
  ROOT %t = (s32[], f32[2]{0}) tuple(%next, %x)
}

%condition (p: (s32[], f32[2])) -> pred[] {
  %p = (s32[], f32[2]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %bound = s32[] constant(11)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

ENTRY %main (x: f32[2]) -> (s32[], f32[2]) {
  %x = f32[2]{0} parameter(0)
  %start = s32[] constant(2)
  %given = (s32[], f32[2]{0}) tuple(%start, %x)
  ROOT %loop = (s32[], f32[2]{0}) while(%given), condition=%condition, body=%body
}
"""
    program = parse(text)
    loop = program.computations["main"][-1]
    assert trip_count(program, loop, "main") == 5  # 2, 4, 6, 8, 10


def test_the_tpu_compilers_convolutions_are_products():
    """[8192, 4096] @ [4096, 8 heads, 128] as it writes them: heads are a window of padding."""
    text = """HloModule m

ENTRY %main (x: bf16[8192,4096,1], w: bf16[8,4096,128]) -> bf16[8192,8,128] {
  %x = bf16[8192,4096,1]{1,0,2} parameter(0)
  %w = bf16[8,4096,128]{2,1,0} parameter(1)
  ROOT %c = bf16[8192,8,128]{2,0,1} convolution(%x, %w), WINDOW, dim_labels=bf0_0io->b0f
}
""".replace("WINDOW", "window={size=8 pad=7_7 rhs_reversal=1}")
    assert (
        cost_of(parse(text), {"fsdp": 1}, pace_of(CHIPS["v5e"])).flops == 2 * 8192 * 4096 * 8 * 128
    )


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        ("fsdp", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("data", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("data+fsdp", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("data+fsdp", ()),
        ("", ((0,), (1,))),
    ],
)
def test_groups_of_devices_are_mesh_axes(axes, groups):
    assert group_axes(groups, MESH) == axes


def test_all_ways_of_writing_groups_are_read():
    rows, columns = ((0, 1, 2), (3, 4, 5)), ((0, 3), (1, 4), (2, 5))
    assert parse_groups("x(%y), replica_groups={{0,1,2},{3,4,5}}, z") == rows
    assert parse_groups("x(%y), replica_groups=[2,3]<=[6], z") == rows
    assert parse_groups("x(%y), replica_groups=[3,2]<=[2,3]T(1,0), z") == columns
    assert parse_groups("x(%y), replica_groups=mesh['a'=2,'b'=3] {'b'}, z") == rows
    assert parse_groups("x(%y), replica_groups=mesh['a'=2,'b'=3] {'a'}, z") == columns
    assert parse_groups("x(%y), source_target_pairs={{0,3},{3,0}}, z") == ((0, 3), (3, 0))
    assert parse_groups("x(%y), channel_id=3") == ()


def test_collectives_are_found_with_axis_and_bytes():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))
    shapes = {"x": ((16, 64), P("data")), "w": ((64, 32), P("fsdp"))}
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in shapes.values()
    )

    def local(x, w):
        return x @ jax.lax.all_gather(w, "fsdp", tiled=True)

    program = jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), P("fsdp")), out_specs=P("data"), check_vma=False
    )
    found = cost(jax.jit(program).lower(x, w).compile())
    (gather,) = found.collectives
    assert (gather.kind, gather.axes, gather.group) == ("all-gather", "fsdp", 4)
    assert gather.num_bytes == 64 * 32 * 4 * 3 / 4, "three quarters come from the others"
    assert found.flops == 2 * 8 * 64 * 32, "each device its half of the rows"


@pytest.mark.full
def test_a_sum_over_all_devices_is_sent_twice_round():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))
    x = jax.ShapeDtypeStruct(
        (8, 128), jnp.float32, sharding=NamedSharding(mesh, P(("data", "fsdp")))
    )
    summed = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, P()))
    (reduce,) = cost(summed.lower(x).compile()).collectives
    assert (reduce.kind, reduce.axes) == ("all-reduce", "data+fsdp")
    assert reduce.num_bytes == 2 * 128 * 4 * 7 / 8
