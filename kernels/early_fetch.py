"""Memory that a kernel brings to L2 before its wait, so that the device's memory never rests.

While the kernel in front computes, a program that waits for it (kernels/pdl.py) may start to copy
what it will read afterwards. Such a copy is a hint: no value enters the program, and every write of
an earlier kernel goes through L2 as well, so it can be useless, never wrong. Its addresses must be
memory of this process all the same.
"""

from __future__ import annotations

from nanorunner.kernels.triton_support import IS_INTERPRETED, jit, tl

# Of all programs of a launch together: a quarter of an H200's L2, 4 us of its memory's time.
EARLY_BYTES = 16 << 20
COPY_BYTES = 16  # what the copy engine moves at least, and how it wants its addresses aligned


@jit()
def fetch_to_l2(place: tl.tensor, num_bytes: tl.tensor, is_mine: tl.tensor) -> None:
    """Start to copy num_bytes from each place [32 * warps], where is_mine, to L2.

    Places and bytes are multiples of COPY_BYTES. The instruction takes one address at a time, so
    the threads of a warp follow each other: few large copies are better than many small ones.
    """
    if not IS_INTERPRETED:
        tl.inline_asm_elementwise(
            """{
            .reg .pred mine;
            setp.ne.s32 mine, $3, 0;
            @mine cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,r,r",
            [place, num_bytes, is_mine.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
