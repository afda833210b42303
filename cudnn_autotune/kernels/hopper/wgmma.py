"""The matrix instruction of a warpgroup on GPUs of compute capability 9.0, as CUDA C++."""

from __future__ import annotations

import functools
from typing import Final, Literal

from cudnn_autotune.kernels import sources

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
_OF_REGISTERS = """\
// The same with a in registers: its 16 rows of a warp are those of mma_16x8x16. The registers must
// not change until the product is done.
template <typename T, int transposed_b>
__device__ __forceinline__ void multiply_registers_{n}(float (&d)[{registers}],
                                                       const unsigned (&a)[4], Matrix b) {{
#ifdef __CUDACC_RTC__
#define WGMMA(type)                                                                           \\
  asm volatile(                                                                               \\
      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32." type "." type " {{{outputs}}}, "            \\
      "{{%{first}, %{second}, %{third}, %{fourth}}}, %{fifth}, 1, 1, 1, %{sixth};"               \\
      : {operands}                                                                            \\
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor), "n"(transposed_b))
  if constexpr (kIsHalf<T>) {{
    WGMMA("f16");
  }} else {{
    WGMMA("bf16");
  }}
#undef WGMMA
#else
  emulation::wgmma<T, {n}>(d, a, b.descriptor, transposed_b);
#endif
}}
"""


@functools.cache
def source(n: int, *, has_registers: bool = False) -> str:
    """Returns device.cuh, wgmma.cuh, and a function ``multiply_<n>`` for products of n columns.

    Args:
        n: a multiple of 8, 256 at most.
        has_registers: add ``multiply_registers_<n>``, whose left matrix is in registers.
    """
    count = n // 2
    template = _INSTRUCTION + _OF_REGISTERS if has_registers else _INSTRUCTION
    instruction = template.format(
        n=n,
        registers=count,
        outputs=",".join(f"%{i}" for i in range(count)),
        operands=", ".join(f'"+f"(d[{i}])' for i in range(count)),
        first=count,
        second=count + 1,
        third=count + 2,
        fourth=count + 3,
        fifth=count + 4,
        sixth=count + 5,
    )
    return sources.source(__package__, "wgmma.cuh") + instruction
