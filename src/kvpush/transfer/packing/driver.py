"""The few calls of the CUDA driver that torch does not offer: memory of one process, mapped into another.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

HANDLE_BYTES = 64
UUID_BYTES = 16

_LAZY_ENABLE_PEER_ACCESS = 1
_IS_LEGACY_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE


class DriverError(Exception):
    """A call of the driver failed; the message holds the call and the driver's own words."""


class Driver(Protocol):
    """Memory and devices as the driver sees them. Addresses and lengths in bytes; raises DriverError."""

    def device_uuid(self, device: int) -> bytes: ...

    def allocation_of(self, device: int, address: int) -> tuple[int, int]:
        """(address, length) of the allocation that an address of this device lies in."""
        ...

    def exportable(self, device: int, address: int) -> bool:
        """Whether the allocation is of the kind that has handles."""
        ...

    def export(self, device: int, address: int) -> bytes:
        """The handle of the allocation, HANDLE_BYTES long, the same at every call."""
        ...

    def open(self, device: int, handle: bytes) -> int:
        """Maps another process's allocation for kernels of `device`; returns its address here."""
        ...

    def close(self, device: int, address: int) -> None: ...


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * UUID_BYTES),)


class CudaDriver:
    """libcuda. Works in every thread: each call runs in the device's primary context, which is the one that torch uses.

    Raises DriverError if there is no driver.
    """

    def __init__(self) -> None:
        try:
            self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"the CUDA driver cannot be loaded: {error}") from None
        address, pointer, size = ctypes.c_uint64, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)
        out = ctypes.POINTER(ctypes.c_uint64)
        for name, arguments in {
            "cuInit": [ctypes.c_uint],
            "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
            "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
            "cuDeviceGetUuid_v2": [ctypes.POINTER(_Uuid), ctypes.c_int],
            "cuDevicePrimaryCtxRetain": [ctypes.POINTER(pointer), ctypes.c_int],
            "cuCtxPushCurrent_v2": [pointer],
            "cuCtxPopCurrent_v2": [ctypes.POINTER(pointer)],
            "cuPointerGetAttribute": [pointer, ctypes.c_int, address],
            "cuMemGetAddressRange_v2": [out, size, address],
            "cuIpcGetMemHandle": [ctypes.POINTER(_Handle), address],
            "cuIpcOpenMemHandle_v2": [out, _Handle, ctypes.c_uint],
            "cuIpcCloseMemHandle": [address],
        }.items():
            try:
                function = getattr(self._cuda, name)
            except AttributeError:
                raise DriverError(f"the CUDA driver has no {name}") from None
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._call("cuInit", 0)
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def device_uuid(self, device: int) -> bytes:
        uuid = _Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), self._device(device))
        return bytes(uuid.bytes)

    def allocation_of(self, device: int, address: int) -> tuple[int, int]:
        start, length = ctypes.c_uint64(), ctypes.c_size_t()
        with self._current(device):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(length), address)
        return start.value, length.value

    def exportable(self, device: int, address: int) -> bool:
        # The driver writes a bool, of one byte; the room is larger for the case that one does not.
        answer = ctypes.c_int(0)
        with self._current(device):
            self._call("cuPointerGetAttribute", ctypes.byref(answer), _IS_LEGACY_IPC_CAPABLE, address)
        return answer.value != 0

    def export(self, device: int, address: int) -> bytes:
        handle = _Handle()
        with self._current(device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return ctypes.string_at(ctypes.addressof(handle), HANDLE_BYTES)

    def open(self, device: int, handle: bytes) -> int:
        address = ctypes.c_uint64()
        with self._current(device):
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_ENABLE_PEER_ACCESS,
            )  # fmt: skip
        return address.value

    def close(self, device: int, address: int) -> None:
        with self._current(device):
            self._call("cuIpcCloseMemHandle", address)

    @contextmanager
    def _current(self, device: int) -> Iterator[None]:
        context = self._contexts.get(device)
        if context is None:
            # Kept for the life of the process, as torch keeps it.
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(device))
            self._contexts[device] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _device(self, ordinal: int) -> int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            words = text.value.decode(errors="replace") if text.value else "unknown error"
            raise DriverError(f"{name}: {words} ({code})")


@lru_cache(maxsize=1)
def cuda_driver() -> CudaDriver:
    """The one of this process. Raises DriverError if there is none."""
    return CudaDriver()
