"""Hardware as plain data. Figures are of one representative product for each architecture, named in `product`.

Sources, by column:
- shared memory, registers, threads: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (the
  opt-in maximum of a block); AMD CDNA3 and CDNA4 ISA guides (LDS of a compute unit, 512 VGPRs of a lane).
- SMs, clock, bandwidth, L2, dense tensor and vector TFLOP/s: the vendor's data sheet or white paper of `product`.
- exponentials: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions" (16 results a clock for each
  SM); CDNA3 ISA guide (transcendentals at a quarter of the rate of 64 lanes).
- `measured_*`: bench/README.md, one H200; elsewhere a data sheet's figure times `DERATE`.
"""

from __future__ import annotations

from dataclasses import dataclass

DERATE = 0.8  # the part of a data sheet's peak that one H200 reached (738 of 989 TFLOP/s, 4345 of 4800 GB/s), rounded


@dataclass(frozen=True)
class Capabilities:
    """What the instruction set has; these, never version numbers, decide what is generated."""

    has_tensor_core: bool = False  # 16-bit matrix products in hardware
    has_bf16: bool = False
    has_fp8: bool = False
    has_tf32: bool = False  # float32 matrix products in reduced precision (NVIDIA tf32)
    has_matrix_f32: bool = False  # float32 matrix products in full precision (AMD MFMA)
    has_async_copy: bool = False  # from memory to shared memory past the registers, in whole 16 bytes
    has_wgmma: bool = False
    has_tma: bool = False
    has_tcgen05: bool = False
    has_mfma: bool = False


@dataclass(frozen=True)
class Target:
    """One kind of hardware. Bytes, GB/s (1e9), GHz and TFLOP/s (1e12) as the names say; 0 where it has no meaning."""

    name: str
    product: str
    backend: str  # Triton's: cuda | hip; "" where there is none
    arch: int | str  # Triton's: 90, "gfx942"
    warp_size: int
    shared_bytes: int  # the most that one block can ask for
    shared_bytes_sm: int  # of a whole SM or compute unit
    registers_thread: int  # 32-bit registers that one thread can have
    registers_sm: int
    threads_block: int
    threads_sm: int
    units: int  # SMs or compute units; cores of a CPU are found out when it runs
    clock_ghz: float
    hbm_gbs: float
    l2_bytes: int
    tensor_tflops: float  # bf16 and f16, accumulated in float32, dense
    fp32_tflops: float  # vector units
    exp_per_clock: int  # of one unit
    caps: Capabilities = Capabilities()
    measured_gbs: float = 0.0
    measured_tflops: float = 0.0

    @property
    def is_gpu(self) -> bool:
        return bool(self.backend)

    @property
    def gpu_target(self) -> tuple[str, int | str, int]:
        """Arguments of Triton's GPUTarget: backend, arch, warp size."""
        return self.backend, self.arch, self.warp_size

    @property
    def reachable_gbs(self) -> float:
        """HBM bandwidth in GB/s that a good kernel can see."""
        return self.measured_gbs or DERATE * self.hbm_gbs

    @property
    def reachable_tflops(self) -> float:
        """TFLOP/s of 16-bit matrix products that a good kernel can see."""
        return self.measured_tflops or DERATE * self.tensor_tflops

    @property
    def exp_gps(self) -> float:
        """Exponentials a second, in 1e9."""
        return self.units * self.exp_per_clock * self.clock_ghz


KIB, MIB = 1024, 1024 * 1024

_AMPERE = Capabilities(has_tensor_core=True, has_bf16=True, has_tf32=True, has_async_copy=True)
_ADA = Capabilities(has_tensor_core=True, has_bf16=True, has_tf32=True, has_async_copy=True, has_fp8=True)
_HOPPER = Capabilities(
    has_tensor_core=True, has_bf16=True, has_tf32=True, has_async_copy=True, has_fp8=True, has_wgmma=True, has_tma=True
)
_BLACKWELL = Capabilities(
    has_tensor_core=True, has_bf16=True, has_tf32=True, has_async_copy=True, has_fp8=True, has_tma=True,
    has_tcgen05=True,
)  # fmt: skip
_CONSUMER_BLACKWELL = Capabilities(
    has_tensor_core=True, has_bf16=True, has_tf32=True, has_async_copy=True, has_fp8=True, has_tma=True
)
_CDNA3 = Capabilities(has_tensor_core=True, has_bf16=True, has_fp8=True, has_matrix_f32=True, has_mfma=True)
_CDNA4 = Capabilities(
    has_tensor_core=True, has_bf16=True, has_fp8=True, has_matrix_f32=True, has_mfma=True, has_async_copy=True
)

_ALL = (
    Target(
        "cpu", "any", "", "", 1, shared_bytes=0, shared_bytes_sm=0, registers_thread=0, registers_sm=0, threads_block=0,
        threads_sm=0, units=1, clock_ghz=3.0, hbm_gbs=50, l2_bytes=MIB, tensor_tflops=0.1, fp32_tflops=0.1,
        exp_per_clock=1, caps=Capabilities(has_bf16=True),
    ),  # an ordinary core: two 256-bit multiply-adds a clock; the order of magnitude only
    Target(
        "sm_80", "A100 SXM 80 GB", "cuda", 80, 32, shared_bytes=163 * KIB, shared_bytes_sm=164 * KIB,
        registers_thread=255, registers_sm=65536, threads_block=1024, threads_sm=2048, units=108, clock_ghz=1.41,
        hbm_gbs=2039, l2_bytes=40 * MIB, tensor_tflops=312, fp32_tflops=19.5, exp_per_clock=16, caps=_AMPERE,
    ),
    Target(
        "sm_86", "A10", "cuda", 86, 32, shared_bytes=99 * KIB, shared_bytes_sm=100 * KIB,
        registers_thread=255, registers_sm=65536, threads_block=1024, threads_sm=1536, units=72, clock_ghz=1.695,
        hbm_gbs=600, l2_bytes=6 * MIB, tensor_tflops=125, fp32_tflops=31.2, exp_per_clock=16, caps=_AMPERE,
    ),
    Target(
        "sm_89", "L40S", "cuda", 89, 32, shared_bytes=99 * KIB, shared_bytes_sm=100 * KIB,
        registers_thread=255, registers_sm=65536, threads_block=1024, threads_sm=1536, units=142, clock_ghz=2.52,
        hbm_gbs=864, l2_bytes=96 * MIB, tensor_tflops=362, fp32_tflops=91.6, exp_per_clock=16, caps=_ADA,
    ),
    Target(
        "sm_90", "H200 SXM", "cuda", 90, 32, shared_bytes=227 * KIB, shared_bytes_sm=228 * KIB,
        registers_thread=255, registers_sm=65536, threads_block=1024, threads_sm=2048, units=132, clock_ghz=1.83,
        hbm_gbs=4800, l2_bytes=50 * MIB, tensor_tflops=989, fp32_tflops=66.9, exp_per_clock=16, caps=_HOPPER,
        measured_gbs=4345, measured_tflops=738,
    ),
    Target(
        "sm_100", "B200", "cuda", 100, 32, shared_bytes=227 * KIB, shared_bytes_sm=228 * KIB,
        registers_thread=255, registers_sm=65536, threads_block=1024, threads_sm=2048, units=148, clock_ghz=1.85,
        hbm_gbs=8000, l2_bytes=126 * MIB, tensor_tflops=2250, fp32_tflops=75, exp_per_clock=16, caps=_BLACKWELL,
    ),
    Target(
        "sm_120", "GeForce RTX 5090", "cuda", 120, 32, shared_bytes=99 * KIB, shared_bytes_sm=100 * KIB,
        registers_thread=255, registers_sm=65536, threads_block=1024, threads_sm=1536, units=170, clock_ghz=2.407,
        hbm_gbs=1792, l2_bytes=96 * MIB, tensor_tflops=209.5, fp32_tflops=104.8, exp_per_clock=16,
        caps=_CONSUMER_BLACKWELL,
    ),
    Target(
        "gfx942", "Instinct MI300X", "hip", "gfx942", 64, shared_bytes=64 * KIB, shared_bytes_sm=64 * KIB,
        registers_thread=512, registers_sm=131072, threads_block=1024, threads_sm=2048, units=304, clock_ghz=2.1,
        hbm_gbs=5300, l2_bytes=4 * MIB, tensor_tflops=1307, fp32_tflops=163.4, exp_per_clock=16, caps=_CDNA3,
    ),  # L2 of one chiplet; 256 MiB of memory-side cache behind it are left out
    Target(
        "gfx950", "Instinct MI355X", "hip", "gfx950", 64, shared_bytes=160 * KIB, shared_bytes_sm=160 * KIB,
        registers_thread=512, registers_sm=131072, threads_block=1024, threads_sm=2048, units=256, clock_ghz=2.4,
        hbm_gbs=8000, l2_bytes=4 * MIB, tensor_tflops=2517, fp32_tflops=157.3, exp_per_clock=16, caps=_CDNA4,
    ),
)  # fmt: skip

TARGETS: dict[str, Target] = {t.name: t for t in _ALL}


def target(name: str) -> Target:
    """The target of that name; ValueError names those there are."""
    try:
        return TARGETS[name]
    except KeyError:
        raise ValueError(f"unknown target {name!r}; there are: {', '.join(TARGETS)}") from None
