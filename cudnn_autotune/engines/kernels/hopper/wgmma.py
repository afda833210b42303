"""The matrix instruction of a warpgroup on GPUs of compute capability 9.0, as CUDA C++."""

from __future__ import annotations

import functools
from typing import Final, Literal

from cudnn_autotune.engines.kernels import sources

CAPABILITY_MAJOR = 9
"""The only major compute capability whose GPUs have the instruction."""
ARCH_SUFFIX: Final[Literal["a"]] = "a"
_INSTRUCTION = """\
#line 1 "wgmma {n}"
// d += a * b, with a of 64 x 16, b of 16 x {n}, in shared memory, and d in float32. All warps of a
// warpgroup execute it together; see wgmma.cuh.
template <typename T, int transposed_a, int transposed_b>
__device__ __forceinline__ void multiply_{n}(float (&d)[{registers}], Matrix a, Matrix b) {{
#ifdef __CUDACC_RTC__
#define WGMMA(type)                                                                           \\
  asm volatile(                                                                               \\
      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32." type "." type " {{{outputs}}}, "            \\
      "%{first}, %{second}, 1, 1, 1, %{third}, %{fourth};"                                     \\
      : {operands}                                                                            \\
      : "l"(a.descriptor), "l"(b.descriptor), "n"(transposed_a), "n"(transposed_b))
  if constexpr (kIsHalf<T>) {{
    WGMMA("f16");
  }} else {{
    WGMMA("bf16");
  }}
#undef WGMMA
#else
  emulation::wgmma<T, {n}>(d, a.descriptor, b.descriptor, transposed_a, transposed_b);
#endif
}}
"""


@functools.cache
def source(n: int) -> str:
    """Returns device.cuh, wgmma.cuh, and a function ``multiply_<n>`` for products of n columns.

    Args:
        n: a multiple of 8, 256 at most.
    """
    count = n // 2
    instruction = _INSTRUCTION.format(
        n=n,
        registers=count,
        outputs=",".join(f"%{i}" for i in range(count)),
        operands=", ".join(f'"+f"(d[{i}])' for i in range(count)),
        first=count,
        second=count + 1,
        third=count + 2,
        fourth=count + 3,
    )
    return sources.source(__package__, "wgmma.cuh") + instruction
