"""The emulation of CUDA finds what a GPU would only sometimes show."""

from __future__ import annotations

import pytest
import torch
from support import cuda_emulation
from support.cuda_emulation import EmulationError, launch_kernel

from cudnn_autotune import kernels
from cudnn_autotune.engines.recipe import Address, Kernel, KernelLaunch
from cudnn_autotune.kernels.sources import source

pytestmark = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)

DEVICE = source(kernels.__name__)  # device.cuh alone
X, Y = Address("x"), Address("y")


def run(
    body: str,
    x: torch.Tensor,
    y: torch.Tensor,
    threads: int = 32,
    blocks: int = 1,
    **options: object,
) -> None:
    code = DEVICE + (
        'extern "C" __global__ void test_kernel(const unsigned* x, float* y) {' + body + "}"
    )
    shared = int(options.pop("shared_bytes", 0))  # type: ignore[call-overload]
    grid, block = (blocks, 1, 1), (threads, 1, 1)
    launch = KernelLaunch(Kernel(code, "test_kernel"), grid, block, (X, Y), shared)
    launch_kernel(launch, {"x": x, "y": y}, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [8, 16])
def test_an_mma_multiplies_matrices(dtype: torch.dtype, k: int) -> None:
    """The fragments are loaded by the other route, ldmatrix, from row-major matrices."""
    name = {torch.float16: "half", torch.bfloat16: "bfloat16"}[dtype]
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(16, k, generator=generator).to(dtype)
    b = torch.randn(k, 8, generator=generator).to(dtype)
    y = torch.full((16, 8), torch.nan)
    count = (16 * k + k * 8) // 2
    load_a = "load_matrices(a, (char*)shared + ((lane % 16) * K + lane / 16 * 8) * 2);"
    multiply = f"mma_16x8x{k}<{name}>(d, a, b);"
    if k == 8:
        load_a = "load_matrices(a, (char*)shared + (lane % 16) * K * 2);"
        multiply = f"mma_16x8x8<{name}>(d, a, b[0]);"
    body = f"""
      constexpr int K = {k};
      DYNAMIC_SHARED(shared);
      const int lane = threadIdx.x;
      for (int i = lane; i < {count}; i += 32) copy_async<4>((unsigned*)shared + i, x + i);
      commit_copies();
      copies_arrived<0>();
      __syncthreads();
      unsigned a[K / 4], b[K / 8];
      {load_a}
      load_transposed(b, (char*)shared + (16 * K + (lane % K) * 8) * 2);
      float d[4] = {{0.0f, 0.0f, 0.0f, 0.0f}};
      {multiply}
      for (int r = 0; r < 4; ++r) y[(lane / 4 + r / 2 * 8) * 8 + lane % 4 * 2 + r % 2] = d[r];
    """
    x = torch.cat([a.flatten(), b.flatten()]).view(torch.int32)
    run(body, x, y, shared_bytes=4 * count)
    assert torch.allclose(y.double(), a.double() @ b.double(), atol=1e-4)


def test_an_mma_in_tf32_multiplies_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(16, 8, generator=generator), torch.randn(8, 8, generator=generator)
    y = torch.full((16, 8), torch.nan)
    body = """
      const float* m = (const float*)x;
      const int g = threadIdx.x / 4, t = threadIdx.x % 4;
      unsigned a[4], b[2];
      for (int r = 0; r < 4; ++r) a[r] = to_tf32(m[(g + 8 * (r % 2)) * 8 + t + 4 * (r / 2)]);
      for (int r = 0; r < 2; ++r) b[r] = to_tf32(m[128 + (t + 4 * r) * 8 + g]);
      float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      mma_16x8x8_tf32(d, a, b);
      for (int r = 0; r < 4; ++r) y[(g + r / 2 * 8) * 8 + 2 * t + r % 2] = d[r];
    """
    run(body, torch.cat([a.flatten(), b.flatten()]), y)
    assert torch.allclose(y, a @ b, atol=1e-2)
    assert not torch.equal(y, a @ b)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_threads_meet_at_barriers_and_in_shuffles(is_reversed: bool) -> None:
    y = torch.full((96,), torch.nan)
    body = """
      DYNAMIC_SHARED(shared);
      float* values = (float*)shared;
      const int i = threadIdx.x;
      values[i] = i;
      __syncthreads();
      float sum = values[95 - i];
      for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bits);
      y[i] = sum;
    """
    run(body, y, y, threads=96, shared_bytes=4 * 96, is_reversed=is_reversed)
    sums = torch.arange(96.0).reshape(3, 32).sum(1).flip(0)
    assert torch.equal(y, sums.repeat_interleave(32))


def test_copies_arrive_when_they_are_waited_for() -> None:
    x, y = torch.arange(8.0), torch.full((8,), torch.nan)
    body = """
      DYNAMIC_SHARED(shared);
      float* values = (float*)shared;
      for (int group = 0; group < 2; ++group) {
        copy_async<16>(values + 4 * group, x + 4 * group, group == 0);
        commit_copies();
      }
      copies_arrived<1>();
      for (int i = 0; i < 8; ++i) y[i] = values[i];
    """
    run(body, x, y, threads=1, shared_bytes=32)
    assert torch.equal(y[:4], x[:4])
    assert y[4:].isnan().all(), "nobody has waited for these"


def test_a_missing_barrier_shows_when_the_order_is_reversed() -> None:
    y = torch.full((64,), torch.nan)
    body = """
      DYNAMIC_SHARED(shared);
      float* values = (float*)shared;
      values[threadIdx.x] = 1.0f;
      y[threadIdx.x] = values[threadIdx.x / 2];
    """
    run(body, y, y, threads=64, shared_bytes=256)
    assert not y.isnan().any()
    run(body, y, y, threads=64, shared_bytes=256, is_reversed=True)
    assert y.isnan().any()


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("if (threadIdx.x < 16) __syncwarp();", "some have returned"),
        ("if (threadIdx.x < 16) __syncwarp(); else __shfl_sync(~0u, 1, 0);", "different"),
        ("y[0] = ((const float4*)(x + 1))->x;", "misaligned"),
        ("DYNAMIC_SHARED(s); ((float*)s)[threadIdx.x == 0 ? 32 : 0] = 1.0f;", "behind its end"),
        ("DYNAMIC_SHARED(s); s[-1] = 0;", "before its beginning"),
        ("DYNAMIC_SHARED(s); unsigned r[1]; load_matrices(r, s + 8);", "aligned"),
        ("DYNAMIC_SHARED(s); unsigned r[1]; load_matrices(r, s + 128);", "not in shared memory"),
        ("this is no code", "does not compile"),
    ],
)
def test_undefined_behaviour_is_an_error(body: str, what: str) -> None:
    memory = torch.zeros(64)
    with pytest.raises(EmulationError, match=what):
        run(body, memory, memory, shared_bytes=128)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_that_wait_for_one_that_has_not_started_are_an_error(seed: int) -> None:
    y = torch.zeros(3)
    body = """
      y[blockIdx.x] = 1.0f;
      for (int i = 0; i < 3; ++i) {
        while (((volatile float*)y)[i] == 0.0f) emulation::wait_for_blocks();
      }
    """
    run(body, y, y, blocks=3, resident=3, seed=seed)
    for resident in (1, 2):
        with pytest.raises(EmulationError, match="not started"):
            run(body, y, y.zero_(), blocks=3, resident=resident, seed=seed)


def test_conversions_round_as_pytorch_does() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=generator, dtype=torch.int32)
    x = torch.cat([bits.view(torch.float32), torch.tensor([0.0, torch.inf, torch.nan, 65520.0])])
    for name, dtype in (("half", torch.float16), ("bfloat16", torch.bfloat16)):
        y = torch.zeros(len(x))
        body = f"""
          const float* values = (const float*)x;
          for (int i = 0; i < {len(x)}; ++i) y[i] = to_float(from_float<{name}>(values[i]));
        """
        run(body, x, y, threads=1)
        assert torch.equal(y.nan_to_num(1.5), x.to(dtype).float().nan_to_num(1.5)), name


def test_tf32_rounds_to_the_nearest_and_keeps_what_is_not_finite() -> None:
    step = 2.0**-10
    numbers = [1 + 0.4 * step, 1 + 0.5 * step, -1 - 1.6 * step, torch.inf, -torch.inf, torch.nan]
    x = torch.cat([torch.tensor(numbers), torch.tensor([-1, 2**31 - 1]).int().view(torch.float32)])
    y = torch.zeros(len(x))
    body = "y[i] = __uint_as_float(to_tf32(((const float*)x)[i]));"
    run(f"for (int i = 0; i < {len(x)}; ++i) {body}", x, y)
    right = torch.tensor([1, 1 + step, -1 - 2 * step, torch.inf, -torch.inf, *[torch.nan] * 3])
    assert torch.equal(y.nan_to_num(7, 8, 9), right.nan_to_num(7, 8, 9))
