"""The reader of optimised HLO, on programs written by hand: what each reads can be counted."""

import pytest

from tools.parameter_reads import nbytes, parameter_reads

PRODUCT = """
%product (a: bf16[8,64], b: bf16[32,64]) -> f32[8,32] {
  %a = bf16[8,64]{1,0} parameter(0)
  %b = bf16[32,64]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""
SLICED_PRODUCT = """
%slice_one (p: bf16[5,32,64], i: s32[]) -> bf16[32,64] {
  %p = bf16[5,32,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %zero = s32[] constant(0)
  %cut = bf16[1,32,64]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,32,64}
  ROOT %flat = bf16[32,64]{1,0} bitcast(%cut)
}

%sliced_product (a: bf16[8,64], p.1: bf16[5,32,64], i.1: s32[]) -> f32[8,32] {
  %a.1 = bf16[8,64]{1,0} parameter(0)
  %p.1 = bf16[5,32,64]{2,1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %one = bf16[32,64]{1,0} fusion(%p.1, %i.1), kind=kLoop, calls=%slice_one
  ROOT %dot.2 = f32[8,32]{1,0} dot(%a.1, %one), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""
LOOP = """
%body (state: (s32[], bf16[8,64], bf16[5,32,64])) -> (s32[], bf16[8,64], bf16[5,32,64]) {
  %state = (s32[], bf16[8,64]{1,0}, bf16[5,32,64]{2,1,0}) parameter(0)
  %step = s32[] get-tuple-element(%state), index=0
  %x.1 = bf16[8,64]{1,0} get-tuple-element(%state), index=1
  %all = bf16[5,32,64]{2,1,0} get-tuple-element(%state), index=2
  BODY
  ROOT %next = (s32[], bf16[8,64]{1,0}, bf16[5,32,64]{2,1,0}) tuple(%step, %x.1, %all)
}

%condition (state.1: (s32[], bf16[8,64], bf16[5,32,64])) -> pred[] {
  %state.1 = (s32[], bf16[8,64]{1,0}, bf16[5,32,64]{2,1,0}) parameter(0)
  %step.1 = s32[] get-tuple-element(%state.1), index=0
  %count = s32[] constant(5)
  ROOT %more = pred[] compare(%step.1, %count), direction=LT
}

ENTRY %main (params.w: bf16[5,32,64], x: bf16[8,64]) -> bf16[8,64] {
  %params.w = bf16[5,32,64]{2,1,0} parameter(0)
  %x = bf16[8,64]{1,0} parameter(1)
  %start = s32[] constant(0)
  %carry = (s32[], bf16[8,64]{1,0}, bf16[5,32,64]{2,1,0}) tuple(%start, %x, %params.w)
  %loop = (s32[], bf16[8,64], bf16[5,32,64]) while(%carry), condition=%condition, body=%body
  ROOT %out = bf16[8,64]{1,0} get-tuple-element(%loop), index=1
}
"""
FUSED = "%y = f32[8,32]{1,0} fusion(%x.1, %all, %step), kind=kOutput, calls=%sliced_product"
COPIED = """%one.1 = bf16[32,64]{1,0} fusion(%all, %step), kind=kLoop, calls=%slice_one
  %y = f32[8,32]{1,0} fusion(%x.1, %one.1), kind=kOutput, calls=%product"""
WHOLE = '%y = bf16[5,32,64]{2,1,0} custom-call(%all), custom_call_target="all_of_it"'


def times(text):
    ((read, size),) = parameter_reads(text).values()
    return read / size


@pytest.mark.parametrize(("body", "expected"), [(FUSED, 1), (COPIED, 2), (WHOLE, 5)])
def test_a_loop_over_stacked_weights(body, expected):
    """Slices inside a product are read once; a slice that is stored first, twice; all of it in
    each of five steps, five times."""
    assert times(PRODUCT + SLICED_PRODUCT + LOOP.replace("BODY", body)) == expected


def entry(lines):
    return (
        PRODUCT
        + """
ENTRY %main (params.w: bf16[32,64], x: bf16[8,64]) -> f32[8,32] {
  %params.w = bf16[32,64]{1,0:T(8,128)(2,1)} parameter(0)
  %x = bf16[8,64]{1,0} parameter(1)
"""
        + "\n".join(f"  {line}" for line in lines)
        + "\n}\n"
    )


def test_a_copy_in_another_layout_counts_twice():
    turned = "%turned = bf16[32,64]{0,1} copy(%params.w)"
    product = "ROOT %y = f32[8,32]{1,0} fusion(%x, %NAME), kind=kOutput, calls=%product"
    assert times(entry([product.replace("NAME", "params.w")])) == 1
    assert times(entry([turned, product.replace("NAME", "turned")])) == 2


def test_what_lies_in_the_cores_own_memory_is_read_again_for_nothing():
    lines = [
        "%began = (bf16[32,64]{1,0:S(1)}, bf16[32,64]{1,0}, u32[]) copy-start(%params.w)",
        "%here = bf16[32,64]{1,0:T(8,128)(2,1)S(1)} copy-done(%began)",
        "%y = f32[8,32]{1,0} fusion(%x, %here), kind=kOutput, calls=%product",
        "ROOT %z = f32[8,32]{1,0} fusion(%x, %here), kind=kOutput, calls=%product",
    ]
    assert times(entry(lines)) == 1


def test_two_products_read_twice():
    lines = [
        "%y = f32[8,32]{1,0} fusion(%x, %params.w), kind=kOutput, calls=%product",
        "ROOT %z = f32[8,32]{1,0} fusion(%x, %params.w), kind=kOutput, calls=%product",
    ]
    assert times(entry(lines)) == 2


def test_bytes_of_a_printed_shape():
    assert nbytes("bf16[3,5]{1,0:T(8,128)(2,1)S(1)}") == 30
    assert nbytes("(f32[2]{0}, s8[7]{0}, f8e4m3fn[4]{0}, pred[])") == 8 + 7 + 4 + 1
