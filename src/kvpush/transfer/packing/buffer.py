"""Contiguous memory that blocks are packed into and unpacked from."""

from __future__ import annotations

import torch

from kvpush.transfer.packing.base import PackingError


class StagingBuffer:
    """Memory of one device, allocated once and kept. Its owner divides it; packers only check that they stay inside.

    num_bytes: at least 1. device: CUDA ordinal, or None for host memory. The address is a multiple of 64. bytes, words:
    the memory as uint8 and, up to the last whole one, as int64.

    Raises PackingError if the memory cannot be had.
    """

    def __init__(self, num_bytes: int, device: int | None = None) -> None:
        if num_bytes < 1:
            raise ValueError(f"num_bytes is {num_bytes}, must be at least 1")
        place = "host memory" if device is None else f"memory of CUDA device {device}"
        try:
            target = torch.device("cpu") if device is None else torch.device("cuda", device)
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=target)
            if device is None:
                self.bytes.zero_()  # pages that do not exist are missed now, not in the first transfer
        except (RuntimeError, AssertionError) as error:  # out of memory; torch without CUDA raises the second
            raise PackingError(f"no staging buffer: {num_bytes} bytes of {place} cannot be had: {error}") from error
        self.words = self.bytes[: num_bytes // 8 * 8].view(torch.int64)
        self.address = self.bytes.data_ptr()
        self.num_bytes = num_bytes
        self.device = device

    def holds(self, address: int, length: int) -> bool:
        """Whether `length` bytes from `address` on lie inside."""
        return self.address <= address and address + length <= self.address + self.num_bytes

    def view(self, address: int, length: int) -> torch.Tensor:
        """The bytes as a uint8 tensor without a copy. Raises ValueError if they do not lie inside."""
        if not self.holds(address, length):
            raise ValueError(
                f"{length} bytes at {address:#x} leave the buffer of {self.num_bytes} bytes at {self.address:#x}"
            )
        start = address - self.address
        return self.bytes[start : start + length]


def holder(buffers: tuple[StagingBuffer, ...], address: int, length: int) -> StagingBuffer:
    """The buffer in which these bytes lie. Raises ValueError if there is none."""
    for buffer in buffers:
        if buffer.holds(address, length):
            return buffer
    known = ", ".join(f"{buffer.num_bytes} bytes at {buffer.address:#x}" for buffer in buffers) or "none"
    raise ValueError(f"{length} bytes at {address:#x} lie in no staging buffer (there are: {known})")
