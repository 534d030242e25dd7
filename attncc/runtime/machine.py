"""Which target this machine's GPU is, without importing torch: asked of the driver, or read from the system's files."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute, CUDA driver API
AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
AMD_DRIVER = Path("/sys/module/amdgpu/version")
SAME_CODE = {"sm_103": "sm_100", "sm_121": "sm_120"}  # later chips of a family that run its plans


def local_target() -> str | None:
    """`sm_90`, `gfx942`, ... of the first GPU that this process may use; None where there is none."""
    return _nvidia() or _amd()


def _nvidia() -> str | None:
    driver = _cuda()
    if driver is None or driver.cuInit(0) != 0:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    failed = (
        driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), COMPUTE_CAPABILITY_MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), COMPUTE_CAPABILITY_MINOR, device)
    )
    name = f"sm_{major.value}{minor.value}"
    return None if failed else SAME_CODE.get(name, name)


def _amd(nodes: Path = AMD_NODES) -> str | None:
    with contextlib.suppress(OSError):
        for node in sorted(nodes.iterdir(), key=lambda p: (len(p.name), p.name)):
            with contextlib.suppress(OSError, ValueError):
                for line in (node / "properties").read_text().splitlines():
                    name, _, value = line.partition(" ")
                    if name == "gfx_target_version" and int(value):
                        return gfx_name(int(value))
    return None


def driver_version() -> str:
    """The driver's version as `12.8` (that of the CUDA API which it offers) or amdgpu's own; "" where there is none."""
    driver = _cuda()
    version = ctypes.c_int()
    if driver is not None and driver.cuDriverGetVersion(ctypes.byref(version)) == 0:
        return f"{version.value // 1000}.{version.value % 1000 // 10}"
    with contextlib.suppress(OSError):
        return AMD_DRIVER.read_text().strip()
    return ""


def _cuda() -> ctypes.CDLL | None:
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    return None


def gfx_name(version: int) -> str:
    """The name of an AMD architecture from its number, two decimal digits a part: 90402 is gfx942."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
