"""Machine code is read as it is run: loops, and the shortest way through them."""

from tools import machine_code

# A loop that skips two instructions where two predicates hold, and behind it a wait that failed,
# which repeats and jumps back into the middle. Short loops are passed over: hence the padding.
PADDING = "    -:-:-:Y:01        /*0000*/                   IADD3 R1, R1, 0x1, RZ \n"
CODE = f"""
kernel:
    -:-:-:Y:04        /*0000*/                   LDC R1, c[0x0][0x28]
.L_x_1:
    -:-:-:Y:02        /*0010*/                   SYNCS.PHASECHK.TRANS64 P0, [UR4], R2
    -:-:-:Y:05        /*0020*/              @!P0 BRA `(.L_x_3)
.L_x_2:
    -:-:-:Y:01        /*0030*/                   HGMMA.64x8x16.F32.BF16 R32, gdesc[UR52], RZ, !UPT
    -:-:-:Y:06        /*0040*/               @P1 BRA P2, `(.L_x_4)
    2:-:-:Y:10        /*0050*/                   LDL R3, [R1]
    -:-:-:Y:10        /*0060*/                   MUFU.EX2 R3, R3
.L_x_4:
{PADDING * 40}    -:-:-:Y:05        /*0070*/               @P3 BRA `(.L_x_1)
    -:-:-:Y:05        /*0080*/                   EXIT
.L_x_3:
{PADDING * 40}    -:-:-:Y:02        /*0090*/                   SYNCS.PHASECHK.TRANS64 P0, [UR4], R2
    -:-:-:Y:05        /*00a0*/              @!P0 BRA `(.L_x_3)
    -:-:-:Y:05        /*00b0*/                   BRA `(.L_x_2)
"""


def test_the_loop_and_its_shortest_way():
    loop, wait = machine_code.loops(CODE)
    assert loop.instructions == 6 + 40 + 1
    assert loop.shortest == 4 + 40 + 1  # without LDL and MUFU
    assert loop.cycles == 2 + 5 + 1 + 6 + 40 + 5
    assert loop.ops == {"barrier": 1, "tensor": 1, "spills": 1, "exp2": 1, "other": 2 + 40 + 1}
    assert wait.instructions == wait.shortest == 42
